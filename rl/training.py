"""From groups to weights: what an optimizer step rests on.

groups -> advantages -> packed rows -> accumulate (sums on the mesh) -> update
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float32

from rl import (
  advantages,
  agreement,
  batch,
  dispatch,
  learner,
  overlap,
  round_report,
  trajectory,
)


class Used(NamedTuple):
  """What became of the G members of a group."""

  values: Float32[np.ndarray, " G"]
  trained: Bool[np.ndarray, " G"]


@runtime_checkable
class Trainer(Protocol):
  """What the coordinator asks of whoever trains.

  `restore`; then, round by round, `begin_round`, for each of its updates
  `accumulate` one or more times and `update`, and `describe`.
  """

  def restore(self, state: Any) -> None:
    """Goes on from there."""
    ...

  @property
  def state(self) -> Any:
    """What a checkpoint holds; valid until the next update."""
    ...

  @property
  def params(self) -> Any:
    """The weights to be published."""
    ...

  async def begin_round(self, version: int) -> None:
    """A round begins, with these weights as its version."""
    ...

  async def accumulate(
    self, groups: Sequence[trajectory.Group]
  ) -> Sequence[Used]:
    """Adds the gradient of whole groups; says what was used of each."""
    ...

  async def update(self) -> dict[str, float]:
    """Takes one optimizer step; returns its metrics."""
    ...

  async def describe(self) -> dict[str, float]:
    """Returns further metrics at the end of a round."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How groups become batches; see `config.BatchShape`.

  Attributes:
    max_staleness: rounds for which old weights are kept, to compare them.
    probe_rows: rows in which engine and learner are compared each round.
  """

  rows: int
  length: int
  share_prompts: bool
  probe_rows: int
  max_staleness: int
  old_logprob: overlap.OldLogprob


class Training:
  """The trainer of one mesh; see `Trainer` for who calls what when."""

  def __init__(
    self,
    settings: Settings,
    programs: learner.Learner,
    thread: dispatch.MeshThread,
    estimator: advantages.Estimator,
  ):
    self._settings = settings
    self._programs = programs
    self._thread = thread
    self._estimator = estimator
    self._state: learner.TrainState | None = None
    self._served: dict[int, Any] = {}
    self._version = 0
    self._total: learner.Accumulator | None = None
    self._trained = False
    self._probe: batch.Batch | None = None

  def restore(self, state: learner.TrainState) -> None:
    """Goes on from a restored or fresh state."""
    self._state = state
    self._served = {}

  @property
  def state(self) -> learner.TrainState:
    """Valid until the next update."""
    if self._state is None:
      raise RuntimeError("a trainer without a state; call `restore` first")
    return self._state

  @property
  def params(self) -> Any:
    """The newest weights."""
    return self.state.params

  async def begin_round(self, version: int) -> None:
    """Keeps the weights of this version as long as groups may have begun so."""
    self._version = version
    oldest = version - self._settings.max_staleness
    self._served = {v: p for v, p in self._served.items() if v >= oldest}
    self._served[version] = self.state.params
    self._probe = None

  async def accumulate(
    self, groups: Sequence[trajectory.Group]
  ) -> Sequence[Used]:
    """Adds the gradient of whole groups; says what was used of each."""
    used = [
      Used(*pair) for pair in advantages.of_groups(groups, self._estimator)
    ]
    members: list[trajectory.Trajectory] = []
    weights: list[float] = []
    for group, (values, trained) in zip(groups, used, strict=True):
      chosen = np.flatnonzero(trained).tolist()
      members += [group.trajectories[i] for i in chosen]
      weights += [float(values[i]) for i in chosen]
    if self._total is None:
      self._total = await self._thread.run("zero", self._programs.zero)
    for packed in batch.pack(
      members,
      weights,
      rows=self._settings.rows,
      length=self._settings.length,
      share_prompts=self._settings.share_prompts,
    ):
      self._trained = True
      self._probe = self._probe or packed
      self._total = await self._thread.run(
        "accumulate",
        _accumulate,
        self._programs,
        self.state.params,
        self._old(),
        self._total,
        packed,
      )
    return used

  def _old(self) -> Any | None:
    """Returns the weights that the ratio compares with; None: the engine's."""
    match self._settings.old_logprob:
      case "decode":
        return None
      case "snapshot":
        return self._served[self._version]
      case "recompute":
        return self.state.params

  async def update(self) -> dict[str, float]:
    """Takes one optimizer step; of nothing at all it takes none.

    Raises:
      FloatingPointError: the gradient is not finite.
    """
    total, self._total = self._total, None
    trained, self._trained = self._trained, False
    if total is None or not trained:
      return dict.fromkeys(learner.METRICS, 0.0)
    self._state, sums = await self._thread.run(
      "update", _update, self._programs, self.state, total
    )
    if not math.isfinite(sums["grad_norm"]):
      raise FloatingPointError(
        f"round {self._version}: the gradient's norm is {sums['grad_norm']}; "
        "go on from the last checkpoint with a lower learning rate"
      )
    return sums

  async def describe(self) -> dict[str, float]:
    """Compares what the engine recorded with what its weights give."""
    gap = await agreement.measure(
      self._programs,
      self._thread,
      self._served,
      self._probe,
      self._settings.probe_rows,
    )
    return round_report.of_gap(gap)


def _accumulate(
  programs: learner.Learner,
  params: Any,
  old: Any | None,
  total: learner.Accumulator,
  packed: batch.Batch,
) -> learner.Accumulator:
  placed = programs.place(packed)
  if old is not None:
    placed = placed._replace(behaviour=programs.score(old, placed))
  return programs.accumulate(params, total, placed)


def _update(
  programs: learner.Learner,
  state: learner.TrainState,
  total: learner.Accumulator,
) -> tuple[learner.TrainState, dict[str, float]]:
  state, sums = programs.update(state, total)
  sums = jax.device_get(sums)
  return state, {name: float(value) for name, value in sums.items()}
