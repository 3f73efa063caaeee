"""Selects the members of groups that are trained, and estimates advantages.

  groups -> select -> Selection.members -> [scores of their tokens]
         -> Selection.estimate -> advantages

Letters: G members of a group, T sampled tokens.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Float32

from rl.algorithms import advantages, returns
from rl.data import trajectory
from rl.settings import short_names

_T = TypeVar("_T")
Untrained = Literal["singleton", "zero_variance"]
"""Reasons not to train usable members: fewer are left than the estimator
compares, or they did equally well."""


def usable(group: trajectory.Group) -> Bool[np.ndarray, " G"]:
  """Returns a mask of members with a finite reward and a token to train."""
  return np.array(
    [
      t.status.trainable
      and t.reward is not None
      and math.isfinite(t.reward)
      and t.num_sampled > 0
      for t in group.trajectories
    ],
    bool,
  )


def select(
  groups: Sequence[trajectory.Group],
  estimator: advantages.Estimator,
  *,
  penalised: bool = False,
  keep_zero_variance: bool = False,
  mask_truncated: bool = False,
) -> "Selection":
  """Selects the members to train, before anything is scored.

  Args:
    groups: all of the update if the estimator's scope is "batch"; else it does
      not matter how many.
    penalised: whether there will be penalties, so that members differ however
      equal their rewards.
    keep_zero_variance: whether groups without variance are trained, with
      advantages of 0, because more than their advantages has a gradient.
    mask_truncated: whether members that a limit cut are compared only.
  """
  compared = [usable(group) for group in groups]
  reasons: list[Untrained | None] = [None] * len(groups)
  pools = _pools(groups, estimator.pool)
  for pool in pools:
    inputs = [
      return_inputs(t) for i in pool for t in _of(groups[i], compared[i])
    ]
    reason: Untrained | None = None
    if len(inputs) < estimator.min_group_size:
      reason = "singleton"
    elif not penalised and estimator.zero_variance(inputs):
      reason = "zero_variance"
    for i in pool:
      reasons[i] = reason
      if reason and not (keep_zero_variance and reason == "zero_variance"):
        compared[i] = np.zeros_like(compared[i])
  masked = [
    np.array([mask_truncated and t.was_cut for t in group.trajectories], bool)
    for group in groups
  ]
  return Selection(groups, estimator, compared, masked, reasons, pools)


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
  """The members of the groups that are accumulated together.

  Attributes:
    compared: by group, a mask of its members; False without a reward or a
      token, or for a reason.
    masked: by group, those of its members that are not trained even so.
    reasons: by group; None where there is something to learn.
    pools: indices of the groups whose members are compared with one another.
  """

  groups: Sequence[trajectory.Group]
  estimator: advantages.Estimator
  compared: Sequence[Bool[np.ndarray, " _"]]
  masked: Sequence[Bool[np.ndarray, " _"]]
  reasons: Sequence[Untrained | None]
  pools: Sequence[Sequence[int]]

  @functools.cached_property
  def members(self) -> list[trajectory.Trajectory]:
    """The compared members, group after group."""
    pairs = zip(self.groups, self.compared, strict=True)
    return [member for group, mask in pairs for member in _of(group, mask)]

  @functools.cached_property
  def trained(self) -> list[Bool[np.ndarray, " _"]]:
    """By group, a mask of its members that are trained."""
    pairs = zip(self.compared, self.masked, strict=True)
    return [mask & ~masked for mask, masked in pairs]

  @property
  def cut(self) -> list[Bool[np.ndarray, " _"]]:
    """By group, a mask of its compared members that are not trained."""
    pairs = zip(self.compared, self.masked, strict=True)
    return [mask & masked for mask, masked in pairs]

  @functools.cached_property
  def is_trained(self) -> list[bool]:
    """A flag for each of `members`."""
    pairs = zip(self.compared, self.trained, strict=True)
    return [flag for mask, own in pairs for flag in own[mask].tolist()]

  @property
  def zero_variance(self) -> list[bool]:
    """A flag for each of `members`: all of its group did equally well."""
    pairs = zip(self.reasons, self.compared, strict=True)
    return [
      reason is not None for reason, mask in pairs for _ in range(sum(mask))
    ]

  @property
  def left_out(self) -> list[list[trajectory.Trajectory]]:
    """The usable members of each zero-variance group that is not trained.

    Without the masked ones.
    """
    return [
      _of(group, usable(group) & ~masked)
      for group, mask, masked, reason in zip(
        self.groups, self.compared, self.masked, self.reasons, strict=True
      )
      if reason == "zero_variance" and not mask.any()
    ]

  def estimate(
    self,
    *,
    penalties: Sequence[Float[np.ndarray, " _"]] | None = None,
    values: Sequence[Float[np.ndarray, " _"]] | None = None,
    finals: Sequence[float] | None = None,
  ) -> advantages.Estimate:
    """Returns the advantages of `members` and their returns, in float32.

    Args:
      penalties, values: of the sampled tokens of each of these members, as in
        `returns.EpisodeReturnInputs`.
      finals: the critic's value of the last state of each.

    Raises:
      ValueError: the estimator needs values, and there are none.
    """
    estimator, nothing = self.estimator, [None] * len(self.members)
    inputs = [
      return_inputs(member, penalty, value, final or 0.0)
      for member, penalty, value, final in zip(
        self.members,
        nothing if penalties is None else penalties,
        nothing if values is None else values,
        nothing if finals is None else finals,
        strict=True,
      )
    ]
    ends = np.cumsum([0] + [mask.sum() for mask in self.compared]).tolist()
    order: list[int] = []
    joined = advantages.Estimate([], [] if estimator.needs_values else None)
    for pool in self.pools:
      indices = [k for i in pool for k in range(ends[i], ends[i + 1])]
      if indices:
        members = [inputs[k] for k in indices]
        part = estimator(members)
        _check_lengths(estimator, part, members)
        order += indices
        joined.advantages.extend(part.advantages)
        if joined.returns is not None and part.returns is not None:
          joined.returns.extend(part.returns)
    final = joined.advantages
    # Groups kept for another gradient have 0, and are in no deviation.
    same = self.zero_variance
    for i, k in enumerate(order):
      if same[k]:
        final[i] = np.zeros_like(final[i])
    if estimator.scope == "batch":
      varied = [i for i, k in enumerate(order) if not same[k]]
      over = estimator.over_batch([final[i] for i in varied])
      for i, own in zip(varied, over, strict=True):
        final[i] = own
    return advantages.Estimate(
      _in_order(final, order),
      None if joined.returns is None else _in_order(joined.returns, order),
    )

  def mean_advantages(
    self, estimate: advantages.Estimate
  ) -> list[Float32[np.ndarray, " _"]]:
    """Returns, by group, the mean advantage of each of its G members.

    It is 0 for untrained members: for a log, not for a loss.
    """
    means = [x.mean(dtype=np.float64) for x in estimate.advantages]
    return [
      np.array([mean or 0.0 for mean in own], np.float32)
      for own in self.by_group(means)
    ]

  def by_group(self, values: Sequence[_T]) -> list[list[_T | None]]:
    """Returns, by group, the value of each of its G members.

    Args:
      values: of `members`; those that are not trained have None.
    """
    left = itertools.compress(values, self.is_trained)
    return [
      [next(left) if one else None for one in mask] for mask in self.trained
    ]


def _check_lengths(
  estimator: advantages.Estimator,
  found: advantages.Estimate,
  members: Sequence[returns.EpisodeReturnInputs],
) -> None:
  """Raises ValueError on advantages for other members, or other tokens."""
  lengths = [len(own) for own in found.advantages]
  tokens = [len(member.turns) for member in members]
  if lengths != tokens:
    raise ValueError(
      f"algorithm.advantage={short_names.of(estimator)} returned arrays of "
      f"lengths {lengths} for members of {tokens} tokens"
    )


def _of(
  group: trajectory.Group, mask: Bool[np.ndarray, " G"]
) -> list[trajectory.Trajectory]:
  return [group.trajectories[i] for i in np.flatnonzero(mask).tolist()]


def _pools(
  groups: Sequence[trajectory.Group], pool: advantages.Pool
) -> list[list[int]]:
  if pool == "group":
    return [[i] for i in range(len(groups))]
  by_task: dict[str, list[int]] = {}
  for i, group in enumerate(groups):
    by_task.setdefault(group.task.id, []).append(i)
  return list(by_task.values())


def return_inputs(
  member: trajectory.Trajectory,
  penalties: Float[np.ndarray, " T"] | None = None,
  values: Float[np.ndarray, " T"] | None = None,
  final: float = 0.0,
) -> returns.EpisodeReturnInputs:
  """Returns an estimator's view of a member, which must be usable.

  Args:
    final: the critic's value of its last state.
  """
  assert member.reward is not None  # As it is usable.
  is_cut = member.status is trajectory.Status.TRUNCATED
  return returns.EpisodeReturnInputs(
    reward=float(member.reward),
    turns=np.repeat(
      np.arange(len(member.turns)), [len(t.tokens) for t in member.turns]
    ),
    turn_rewards=np.array([t.reward for t in member.turns], np.float64),
    observations=[t.context.tobytes() for t in member.turns],
    histories=_histories(member),
    penalties=penalties,
    values=values,
    bootstrap=final if is_cut else 0.0,
  )


def _histories(member: trajectory.Trajectory) -> list[bytes]:
  """Returns a digest of all ids before the answer of each turn."""
  keys, ids = [], hashlib.blake2b(digest_size=16)
  for turn in member.turns:
    if turn.opens:
      ids = hashlib.blake2b(digest_size=16)
    ids.update(turn.context.tobytes())
    keys.append(ids.digest())
    ids.update(turn.tokens.tobytes())
  return keys


def _in_order(
  arrays: Sequence[Float[np.ndarray, " _"]], places: Sequence[int]
) -> list[Float32[np.ndarray, " _"]]:
  """Returns each array at its place, rounded once and for all."""
  at = dict(zip(places, arrays, strict=True))
  return [at[place].astype(np.float32) for place in range(len(at))]
