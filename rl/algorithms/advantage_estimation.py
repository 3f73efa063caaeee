"""Which members of groups are trained, and what each of them learns.

  groups -> trained -> members -> [scores of their tokens] -> of_groups

Letters: G members of a group, T sampled tokens.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32

from rl.algorithms import advantages, returns
from rl.data import trajectory

Reason = Literal["lone", "flat"]


class Trained(NamedTuple):
  """Which members of a group are trained.

  Attributes:
    members: False for one that has no reward or no token, or for a `reason`.
    reason: why those have nothing to learn that have both: "lone", as fewer
      are left than the estimator compares, or "flat", as they did equally
      well; None when they have.
  """

  members: Bool[np.ndarray, " G"]
  reason: Reason | None


def usable(group: trajectory.Group) -> Bool[np.ndarray, " G"]:
  """Returns which members have a reward to compare and a token to train.

  A reward that is no finite number is none.
  """
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


def trained(
  groups: Sequence[trajectory.Group],
  estimator: advantages.Estimator,
  *,
  penalised: bool = False,
  keep_flat: bool = False,
) -> list[Trained]:
  """Returns who is trained of each group, before anything is scored.

  Args:
    groups: all of the update if the estimator's scope is "batch"; else it does
      not matter how many.
    penalised: whether there will be penalties, so that members differ however
      equal their rewards.
    keep_flat: whether members of flat groups are trained, with advantages of
      0, because more than their advantages is.
  """
  found = [usable(group) for group in groups]
  chosen = [Trained(used, None) for used in found]
  for indices in _pools(groups, estimator.pool):
    compared = [
      played(t) for i in indices for t in _chosen(groups[i], found[i])
    ]
    reason: Reason | None = None
    if len(compared) < estimator.min_group_size:
      reason = "lone"
    elif not penalised and estimator.flat(compared):
      reason = "flat"
    if reason is not None:
      kept = keep_flat and reason == "flat"
      for i in indices:
        used = found[i] if kept else np.zeros_like(found[i])
        chosen[i] = Trained(used, reason)
  return chosen


def members(
  groups: Sequence[trajectory.Group], chosen: Sequence[Trained]
) -> list[trajectory.Trajectory]:
  """Returns those that are trained, group after group."""
  return [
    member
    for group, (used, _) in zip(groups, chosen, strict=True)
    for member in _chosen(group, used)
  ]


def of_groups(
  groups: Sequence[trajectory.Group],
  chosen: Sequence[Trained],
  estimator: advantages.Estimator,
  *,
  penalties: Sequence[Float[np.ndarray, " _"]] | None = None,
  values: Sequence[Float[np.ndarray, " _"]] | None = None,
) -> advantages.Estimate:
  """Returns, in float32, what each of `members(groups, chosen)` is to learn.

  Args:
    groups, chosen: as for `trained`, and from it.
    penalties, values: of the sampled tokens of each of these members, as in
      `returns.Played`.

  Raises:
    ValueError: there are no values, but the estimator needs them.
  """
  chosen_members = members(groups, chosen)
  nothing = [None] * len(chosen_members)
  taken = [
    played(member, penalty, value)
    for member, penalty, value in zip(
      chosen_members,
      nothing if penalties is None else penalties,
      nothing if values is None else values,
      strict=True,
    )
  ]
  ends = np.cumsum([0] + [used.sum() for used, _ in chosen]).tolist()
  order: list[int] = []
  found = advantages.Estimate([], [] if estimator.needs_values else None)
  for indices in _pools(groups, estimator.pool):
    places = [p for i in indices for p in range(ends[i], ends[i + 1])]
    if places:
      own = estimator([taken[place] for place in places])
      order += places
      found.advantages.extend(own.advantages)
      if found.returns is not None and own.returns is not None:
        found.returns.extend(own.returns)
  final = found.advantages
  if estimator.scope == "batch":
    final = estimator.over_batch(final)
  return advantages.Estimate(
    _in_order(final, order),
    None if found.returns is None else _in_order(found.returns, order),
  )


def by_member(
  chosen: Sequence[Trained], found: advantages.Estimate
) -> list[Float32[np.ndarray, " _"]]:
  """Returns the mean advantage of all G members of each group.

  It is 0 for those that are not trained: for a log, not for a loss.
  """
  means = iter([values.mean(dtype=np.float64) for values in found.advantages])
  return [
    np.array([next(means) if own else 0.0 for own in used], np.float32)
    for used, _ in chosen
  ]


def _chosen(
  group: trajectory.Group, used: Bool[np.ndarray, " G"]
) -> list[trajectory.Trajectory]:
  return [group.trajectories[i] for i in np.flatnonzero(used).tolist()]


def _pools(
  groups: Sequence[trajectory.Group], pool: advantages.Pool
) -> list[list[int]]:
  """Returns the groups whose members are compared, as indices."""
  if pool == "group":
    return [[i] for i in range(len(groups))]
  found: dict[str, list[int]] = {}
  for i, group in enumerate(groups):
    found.setdefault(group.task.id, []).append(i)
  return list(found.values())


def played(
  member: trajectory.Trajectory,
  penalties: Float[np.ndarray, " T"] | None = None,
  values: Float[np.ndarray, " T"] | None = None,
) -> returns.Played:
  """Returns what an estimator is told of a member, which has to be usable."""
  assert member.reward is not None  # As it is usable.
  return returns.Played(
    reward=float(member.reward),
    turns=np.repeat(
      np.arange(len(member.turns)), [len(t.tokens) for t in member.turns]
    ),
    turn_rewards=np.array([t.reward for t in member.turns], np.float32),
    observations=[t.context.tobytes() for t in member.turns],
    histories=_histories(member),
    penalties=penalties,
    values=values,
  )


def _histories(member: trajectory.Trajectory) -> list[bytes]:
  """Returns a digest of all ids before the answer of each turn."""
  keys, ids = [], hashlib.blake2b(digest_size=16)
  for turn in member.turns:
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
