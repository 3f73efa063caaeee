"""What one round was like, as flat numbers: metrics from groups and spans."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from rl import agreement, events, overlap, trace, trajectory

_RENAMED = {"clipped": "clip_fraction"}
_ADDED = {"tokens": "trained_tokens", "dropped": "dropped_assignments"}


def of_groups(
  groups: Sequence[trajectory.Group],
  *,
  success: float,
  trained_at: int,
) -> dict[str, float]:
  """Returns success, reward, lengths, staleness and faults of a round.

  Args:
    success: an episode succeeds when its reward is at least this.
    trained_at: the version before the round's updates.
  """
  episodes = [t for group in groups for t in group.trajectories]
  rewards = np.array([t.reward for t in episodes if t.reward is not None])
  lags = [trained_at - int(group.first_version) for group in groups]
  counts = collections.Counter(t.status for t in episodes)
  faults = {
    f"faults/{status.value}": float(counts[status])
    for status in trajectory.Status
    if not status.trainable
  }
  return {
    "success": float((rewards >= success).mean()) if len(rewards) else np.nan,
    "reward_mean": float(rewards.mean()) if len(rewards) else np.nan,
    "groups": float(len(groups)),
    "zero_variance_groups": float(sum(map(_no_variance, groups))),
    "turns_mean": float(np.mean([len(t.turns) for t in episodes])),
    "sampled_tokens": float(sum(t.num_sampled for t in episodes)),
    "truncated": float(counts[trajectory.Status.TRUNCATED]),
    "staleness_mean": float(np.mean(lags)),
    "staleness_max": float(max(lags)),
    "faults": sum(faults.values()),
    **faults,
  }


def _no_variance(group: trajectory.Group) -> bool:
  """Whether its rewards, two or more of them, are all equal."""
  rewards = [t.reward for t in group.trajectories if t.reward is not None]
  return len(rewards) > 1 and len(set(rewards)) == 1


def of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the learner's per-token means, averaged over a round's updates.

  Names are the learner's, whatever the model adds to those of every update;
  an update without some of them does not count there.
  """
  names = dict.fromkeys(name for sums in updates for name in sums)
  means = {
    _RENAMED.get(name, name): float(
      np.mean([sums[name] for sums in updates if name in sums])
    )
    for name in names
    if name not in _ADDED
  }
  added = {
    new: sum(sums[name] for sums in updates if name in sums)
    for name, new in _ADDED.items()
    if name in names
  }
  return means | added


def of_schedule(schedule: overlap.Overlap) -> dict[str, float]:
  """Returns the bounds that a round was held to.

  `updates_late_max`: update j of a round trains on data j updates old.
  """
  return {
    "staleness_bound": float(schedule.max_staleness),
    "updates_late_max": float(schedule.updates_per_round - 1),
  }


def of_gap(gap: agreement.Gap) -> dict[str, float]:
  """Returns how far engine and learner disagree, in nats."""
  return {
    "logprob_gap_max": gap.max,
    "logprob_gap_mean": gap.mean,
    "logprob_gap_tokens": float(gap.tokens),
  }


def of_speed(
  log: Sequence[events.Event],
  updates: Sequence[Mapping[str, float]],
  wall_s: float,
) -> dict[str, float]:
  """Returns sampled tokens a second, as played and as trained.

  Args:
    log: events of the round; an episode counts when it ends.
  """
  played = sum(event["tokens"] for event in events.of_kind(log, "ended"))
  trained = sum(sums["tokens"] for sums in updates)
  return {
    "decode_tokens_per_s": played / wall_s,
    "learner_tokens_per_s": trained / wall_s,
    "round_s": wall_s,
  }


def of_spans(spans: Sequence[trace.Span], wall_s: float) -> dict[str, float]:
  """Returns how busy both meshes were over `wall_s` seconds, and at once."""
  both = trace.overlap(spans)
  return {
    "learner_busy": both.first_s / wall_s,
    "decode_busy": both.second_s / wall_s,
    "overlap_share": both.share,
  }
