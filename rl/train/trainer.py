"""Trains on groups: select, score, estimate, pack, accumulate, update.

groups -> select -> score -> estimate -> Accumulation.add (packed rows)
  -> Learner.accumulate (sums on the mesh) -> Learner.step, once an epoch

While the mesh computes one batch, the next is packed and placed on it.
"""

import asyncio
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32

from rl.algorithms import advantages, group_selection, loss_aggregation
from rl.algorithms import objective as objective_lib
from rl.data import batch, segment_index, trajectory
from rl.runtime import mesh_thread
from rl.schedule import overlap
from rl.train import (
  learner,
  logprob_gap,
  scoring,
  skipped_updates,
  train_state,
)


class TokenUse(NamedTuple):
  """Numbers of the T sampled tokens of a trained member.

  Attributes:
    advantages: as trained.
    old: log-probabilities under the policy that ratios are against, in nats;
      None if that is the policy that sampled.
  """

  advantages: Float[np.ndarray, " T"]
  old: Float[np.ndarray, " T"] | None = None


class MemberUse(NamedTuple):
  """The use that training made of the G members of a group.

  Attributes:
    advantages: means over the tokens of each; 0 for one that is not trained.
    cut: compared with the others, but not trained because a limit cut it.
    by_token: of the tokens of each; None for one that is not trained.
  """

  advantages: Float32[np.ndarray, " G"]
  trained: Bool[np.ndarray, " G"]
  cut: Bool[np.ndarray, " G"]
  by_token: Sequence[TokenUse | None]


@runtime_checkable
class Trainer(Protocol):
  """The coordinator's view of a trainer.

  `restore`; then, round by round, `begin_round`, for each of its updates
  `accumulate` one or more times and `update`, and `describe`.
  """

  def restore(self, state: Any) -> None:
    """Goes on from there."""
    ...

  @property
  def state(self) -> Any:
    """The state that a checkpoint holds; valid until the next update."""
    ...

  @property
  def params(self) -> Any:
    """The weights to be published."""
    ...

  async def begin_round(self, version: int) -> None:
    """Begins a round, with these weights as its version."""
    ...

  async def accumulate(
    self, groups: Sequence[trajectory.Group]
  ) -> Sequence[MemberUse]:
    """Adds the gradient of whole groups; returns the use made of each."""
    ...

  async def update(self) -> dict[str, float]:
    """Takes one optimizer step, or one an epoch; returns their metrics.

    `skipped` is the share of them that changed nothing.
    """
    ...

  async def describe(self) -> dict[str, float]:
    """Returns further metrics at the end of a round."""
    ...

  @property
  def gap(self) -> logprob_gap.Gap | None:
    """Log-probabilities that `describe` last compared, if any."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings:
  """Settings of `MeshTrainer`: shapes of batches, and epochs.

  Attributes:
    rows, length, tail_rows, share_prompts: see `experiment.BatchShape`.
    shards: blocks of rows that lie on different devices.
    probe_rows: rows in which engine and learner are compared each round.
    max_staleness: rounds for which old weights are kept, to compare them.
    epochs: optimizer steps on the same groups.
    mask_truncated: see `algorithm.Algorithm`.
    refresh_reference: rounds after which the policy becomes the reference.
    has_routers: whether the model has experts to balance.
    max_skipped: updates in a row that may be skipped for numbers that are not
      finite; one more ends the run.
  """

  rows: int
  length: int
  share_prompts: bool
  probe_rows: int
  max_staleness: int
  old_logprob: overlap.OldLogprob
  tail_rows: int | None = None
  shards: int = 1
  epochs: int = 1
  mask_truncated: bool = False
  refresh_reference: int | None = None
  has_routers: bool = False
  max_skipped: int = 2


def conversations(
  member: trajectory.Trajectory,
) -> list[trajectory.Trajectory]:
  """Returns the conversations of a member that hold a token to train."""
  return [part for part in member.conversations if part.num_sampled]


def _joined(
  values: scoring.Tokens | None,
  members: Sequence[Sequence[trajectory.Trajectory]],
) -> scoring.Tokens | None:
  """Returns values by member, of values by conversation."""
  if values is None:
    return None
  left = iter(values)
  return [
    np.concatenate(list(itertools.islice(left, len(parts))))
    for parts in members
  ]


def _last(
  values: Sequence[float] | None,
  members: Sequence[Sequence[trajectory.Trajectory]],
) -> list[float] | None:
  """Returns that of the last conversation of each member."""
  if values is None:
    return None
  ends = itertools.accumulate(map(len, members))
  return [values[end - 1] for end in ends]


def _parted(
  values: scoring.Tokens,
  members: Sequence[Sequence[trajectory.Trajectory]],
) -> scoring.Tokens:
  """Returns values by conversation, of values by member."""
  parted = []
  for own, parts in zip(values, members, strict=True):
    ends = np.cumsum([part.num_sampled for part in parts])[:-1]
    parted += np.split(own, ends)
  return parted


class _Unlearnable(NamedTuple):
  """Numbers of groups without an advantage in an update, by reason.

  Attributes:
    divisor: their share in the divisor of the loss. Their loss is 0 whatever
      the weights, so they are left out of the batches but not of the mean.
  """

  zero_variance: int = 0
  singleton: int = 0
  divisor: float = 0.0

  def plus(
    self,
    selection: group_selection.Selection,
    aggregate: loss_aggregation.Aggregate,
  ) -> "_Unlearnable":
    """Returns the sums with these groups included."""
    counts = collections.Counter(selection.reasons)
    divisor = sum(
      aggregate.count(
        [s.num_sampled for member in members for s in conversations(member)]
      )
      for members in selection.left_out
    )
    return _Unlearnable(
      self.zero_variance + counts["zero_variance"],
      self.singleton + counts["singleton"],
      self.divisor + divisor,
    )


class MeshTrainer:
  """The trainer of one mesh; see `Trainer` for who calls what when.

  Args:
    programs: built with the same objective.
    reference: scores batches under the reference; None when there is none.
    kept: gets the batches of skipped updates; None forgets them.
  """

  def __init__(
    self,
    settings: TrainerSettings,
    programs: learner.Learner,
    thread: mesh_thread.MeshThread,
    *,
    estimator: advantages.Estimator,
    objective: objective_lib.Objective,
    reference: learner.ScoreProgram | None = None,
    kept: skipped_updates.Quarantine | None = None,
  ):
    self._settings = settings
    self._programs = programs
    self._thread = thread
    self._estimator = estimator
    self._objective = objective
    self._keep_zero_variance = objective.regularises(
      has_routers=settings.has_routers
    )
    self._weighs_entropy = (
      self._keep_zero_variance
      and bool(objective.entropy_bonus)
      and not objective.entropy_on_zero_variance
    )
    self._scorer = scoring.Scorer(programs, thread, self._pack, reference)
    self._quarantine = kept
    self._state: train_state.TrainState | None = None
    self._served: dict[int, Any] = {}
    self._critic: tuple[Any, Any] | None = None
    self._version = 0
    self._accumulation: Accumulation | None = None
    self._unlearnable = _Unlearnable()
    self._penalties: list[Float32[np.ndarray, " _"]] = []
    self._number = 0
    self._skipped = 0
    self._probe: batch.Batch | None = None
    self._gap: logprob_gap.Gap | None = None

  def restore(self, state: train_state.TrainState) -> None:
    """Goes on from a restored or fresh state."""
    self._state = state
    self._served = {}

  @property
  def state(self) -> train_state.TrainState:
    """Valid until the next update."""
    if self._state is None:
      raise RuntimeError("a trainer without a state; call `restore` first")
    return self._state

  @property
  def params(self) -> Any:
    """The newest weights."""
    return self.state.params

  async def begin_round(self, version: int) -> None:
    """Keeps the weights while groups that began with them may be trained.

    All groups of the round are valued by the critic as it is now.
    """
    self._version, self._number = version, 0
    every = self._settings.refresh_reference
    if every and version and version % every == 0:
      refer = self._programs.refer
      self._state = await self._thread.run("refer", refer, self.state)
    oldest = version - self._settings.max_staleness
    self._served = {v: p for v, p in self._served.items() if v >= oldest}
    self._served[version] = self.state.params
    if self._estimator.needs_values:
      self._critic = self.state.params, self.state.critic
    self._probe = None

  async def accumulate(
    self, groups: Sequence[trajectory.Group]
  ) -> Sequence[MemberUse]:
    """Adds the gradient of whole groups; returns the use made of each."""
    if self._accumulation is None:
      self._accumulation = Accumulation(
        self._programs, self._thread, self._pack
      )
    selection = group_selection.select(
      groups,
      self._estimator,
      penalised=self._objective.reward_kl is not None,
      keep_zero_variance=self._keep_zero_variance,
      mask_truncated=self._settings.mask_truncated,
    )
    self._unlearnable = self._unlearnable.plus(
      selection, self._objective.loss.aggregate
    )
    members = [conversations(member) for member in selection.members]
    samples = [sample for member in members for sample in member]
    scores = await self._scorer.score(
      samples, self.state, self._old(), self._critic
    )
    penalties = scoring.penalties(self._objective.reward_kl, samples, scores)
    self._penalties += penalties or []
    # Members are compared as wholes, however many conversations they led.
    estimate = selection.estimate(
      penalties=_joined(penalties, members),
      values=_joined(scores.values, members),
      finals=_last(scores.finals, members),
    )
    columns: dict[batch.Column, scoring.Tokens] = {
      "advantages": _parted(estimate.advantages, members),
      **scores.columns,
    }
    if estimate.returns is not None:
      columns["returns"] = _parted(estimate.returns, members)
    if self._weighs_entropy:
      columns["entropy_weights"] = [
        np.full(sample.num_sampled, not is_same, np.float32)
        for member, is_same in zip(
          members, selection.zero_variance, strict=True
        )
        for sample in member
      ]
    is_trained = [
      flag
      for member, flag in zip(members, selection.is_trained, strict=True)
      for _ in member
    ]
    if not all(is_trained):
      keep = functools.partial(itertools.compress, selectors=is_trained)
      samples = list(keep(samples))
      columns = {name: list(keep(values)) for name, values in columns.items()}
    await self._accumulation.add(self.state, samples, columns)
    # The first batch of a round is a sample as good as any.
    self._probe = self._probe or next(iter(self._accumulation.batches), None)
    old = _joined(scores.old, members) or [None] * len(members)
    tokens = list(map(TokenUse, estimate.advantages, old))
    return list(
      map(
        MemberUse,
        selection.mean_advantages(estimate),
        selection.trained,
        selection.cut,
        selection.by_group(tokens),
      )
    )

  def _pack(
    self,
    members: Sequence[trajectory.Trajectory],
    *,
    only_full: bool = False,
  ) -> batch.Packed:
    settings = self._settings
    return batch.pack(
      members,
      rows=settings.rows,
      length=settings.length,
      version=self._version,
      share_prompts=settings.share_prompts,
      shards=settings.shards,
      tail_rows=settings.tail_rows,
      only_full=only_full,
    )

  def _old(self) -> Any | None:
    """Returns the weights of the old policy; None if the engine's are it."""
    match self._settings.old_logprob:
      case "decode":
        return None
      case "snapshot":
        return self._served[self._version]
      case "recompute":
        return self.state.params

  async def update(self) -> dict[str, float]:
    """Takes a step an epoch, or none if nothing was accumulated.

    Without a step all means are nan, and only counts are 0.

    A loss or gradient that is not finite changes nothing: the update is
    skipped with its remaining epochs, and its batches are kept.

    Raises:
      FloatingPointError: that has happened too often in a row.
    """
    this, self._accumulation = self._accumulation, None
    left, self._unlearnable = self._unlearnable, _Unlearnable()
    number, self._number = self._number, self._number + 1
    penalties, self._penalties = self._penalties, []
    more = {
      "zero_variance_groups": float(left.zero_variance),
      "singleton_groups": float(left.singleton),
    }
    if penalties and (penalty := self._objective.reward_kl) is not None:
      mean = np.concatenate(penalties).mean(dtype=np.float64)
      more["kl"] = float(mean) / penalty.weight
    if this is not None:
      await this.flush(self.state)
    if this is None or not this.batches:
      nothing = dict.fromkeys(learner.METRICS, np.nan)  # Means over no token.
      return nothing | {"tokens": 0.0, "skipped": 0.0} | more
    self._probe = self._probe or this.batches[0]
    steps: list[dict[str, float]] = []
    for epoch in range(self._settings.epochs):
      if epoch:
        await this.repeat(self.state)
      self._state, sums = await this.step(self.state, left.divisor)
      steps.append(sums)
      if sums["skipped"]:
        await self._keep(this, number, left.divisor, sums)
        break
    else:
      self._skipped = 0
    more |= {"tokens": steps[0]["tokens"], "fill": this.fill}
    return means(steps) | more

  async def _keep(
    self,
    this: "Accumulation",
    number: int,
    left_out_divisor: float,
    sums: dict[str, float],
  ) -> None:
    """Keeps a skipped update on disk; raises if it was one too many."""
    self._skipped += 1
    where = "nobody kept its batches"
    if self._quarantine is not None:
      met = self.state._replace(opt_state=None, master=None, reference=None)
      directory = await self._thread.run(
        "quarantine",
        self._quarantine.keep,
        await self._thread.run("fetch", self._programs.fetch, met),
        this.batches,
        self._version,
        number,
        left_out_divisor,
        this.owners,
      )
      where = f"its batches are in {directory}"
    if self._skipped > self._settings.max_skipped:
      raise FloatingPointError(
        f"round {self._version + 1}: updates in a row whose loss or gradient "
        f"is not finite: {self._skipped}, and max_skipped="
        f"{self._settings.max_skipped} allows no more; the last has loss "
        f"{sums['loss']} and gradient norm {sums['grad_norm']}; {where}. "
        "Lower optimizer.learning_rate or optimizer.max_grad_norm in a new "
        "run, or mend the data that launch.replay names"
      )

  async def describe(self) -> dict[str, float]:
    """Compares recorded log-probabilities with those of the same weights."""
    self._gap = await logprob_gap.measure(
      self._programs,
      self._thread,
      self._served,
      self._probe,
      self._settings.probe_rows,
    )
    return logprob_gap.metrics(self._gap)

  @property
  def gap(self) -> logprob_gap.Gap | None:
    """The tokens that `describe` compared last."""
    return self._gap


class _Waiting(NamedTuple):
  member: trajectory.Trajectory
  columns: dict[batch.Column, Float32[np.ndarray, " _"]]


class Accumulation:
  """The gradient of one update, summed on the mesh as trajectories come in.

  `MeshTrainer` calls `add` any number of times, `flush`, and `step`; for
  another epoch it calls `repeat` and `step`.

  Args:
    pack: (trajectories, only_full=) -> rows; see `batch.pack`.

  Attributes:
    batches: accumulated so far.
    owners: the trajectories of their segments.
  """

  def __init__(
    self,
    programs: learner.Learner,
    thread: mesh_thread.MeshThread,
    pack: Callable[..., batch.Packed],
  ):
    self.batches: list[batch.Batch] = []
    self.owners: list[segment_index.Owner] = []
    self._programs = programs
    self._thread = thread
    self._pack = pack
    self._waiting: list[_Waiting] = []
    self._total: learner.Accumulator | None = None
    self._running: asyncio.Future[learner.Accumulator] | None = None

  @property
  def fill(self) -> float:
    """Share of the places in all batches that hold a token."""
    places = sum(packed.segments.size for packed in self.batches)
    return sum(
      np.count_nonzero(packed.segments) for packed in self.batches
    ) / max(places, 1)

  async def add(
    self,
    state: train_state.TrainState,
    members: Sequence[trajectory.Trajectory],
    columns: Mapping[batch.Column, scoring.Tokens],
  ) -> None:
    """Accumulates full batches; the rest waits for more trajectories.

    The last batch is still on the mesh when this returns, so that the next
    groups are selected and packed meanwhile.
    """
    for i, member in enumerate(members):
      own: dict[batch.Column, Float32[np.ndarray, " _"]] = {
        name: values[i] for name, values in columns.items()
      }
      self._waiting.append(_Waiting(member, own))
    await self._train(state, only_full=True)

  async def flush(self, state: train_state.TrainState) -> None:
    """Accumulates the trajectories that still wait."""
    await self._train(state, only_full=False)

  async def repeat(self, state: train_state.TrainState) -> None:
    """Accumulates the same batches once more, after a step."""
    self._total = None
    await self._accumulate(state, self.batches)

  async def step(
    self, state: train_state.TrainState, left_out_divisor: float
  ) -> tuple[train_state.TrainState, dict[str, float]]:
    """Returns the state after an optimizer step, and its metrics.

    Args:
      left_out_divisor: what the groups left out add to the divisor.
    """
    await self._ran()
    return await self._thread.run(
      "update", self._programs.step, state, self._total, left_out_divisor
    )

  async def _train(
    self, state: train_state.TrainState, *, only_full: bool
  ) -> None:
    waiting = self._waiting
    members = [w.member for w in waiting]
    packed = self._pack(members, only_full=only_full)
    for name in waiting[0].columns if waiting else ():
      packed = batch.with_column(
        packed,
        name,
        [
          w.columns[name][: 0 if place is None else None]
          for w, place in zip(waiting, packed.places, strict=True)
        ],
      )
    self._waiting = [
      w
      for w, place in zip(waiting, packed.places, strict=True)
      if place is None
    ]
    self.owners += segment_index.of(packed, members, first=len(self.batches))
    self.batches += packed.batches
    await self._accumulate(state, packed.batches)

  async def _accumulate(
    self,
    state: train_state.TrainState,
    batches: Sequence[batch.Batch],
  ) -> None:
    for packed in batches:
      placed = self._programs.place(packed)  # While the one before runs.
      await self._ran()
      self._running = self._thread.submit(
        "accumulate",
        self._programs.accumulate,
        state.params,
        self._total,
        placed,
        state.critic,
      )

  async def _ran(self) -> None:
    """Waits for the batch on the mesh, if there is one."""
    if self._running is not None:
      running, self._running = self._running, None
      self._total = await running


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the mean of each number over the rows that hold it.

  A nan, the mean of nothing, does not count.
  """
  known: dict[str, list[float]] = {}
  for row in rows:
    for name, value in row.items():
      known.setdefault(name, []).extend([] if np.isnan(value) else [value])
  return {
    name: float(np.mean(values)) if values else np.nan
    for name, values in known.items()
  }
