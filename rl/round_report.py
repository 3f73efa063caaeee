"""What one round was like, as flat numbers: metrics from groups and spans."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32

from rl import trace, trajectory


def of_groups(
  groups: Sequence[trajectory.Group],
  advantages: Sequence[Float32[np.ndarray, " G"]],
  *,
  success: float,
  trained_at: int,
) -> dict[str, float]:
  """Returns success, reward, lengths, staleness and faults of a round.

  Args:
    advantages: of each group's members.
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
    "zero_variance_groups": float(
      sum(not np.any(values) for values in advantages)
    ),
    "turns_mean": float(np.mean([len(t.turns) for t in episodes])),
    "sampled_tokens": float(sum(t.num_sampled for t in episodes)),
    "truncated": float(counts[trajectory.Status.TRUNCATED]),
    "staleness_mean": float(np.mean(lags)),
    "staleness_max": float(max(lags)),
    "faults": sum(faults.values()),
    **faults,
  }


def of_update(sums: Mapping[str, float]) -> dict[str, float]:
  """Returns the learner's per-token means under the names of the metrics."""
  return {
    "loss": sums["loss"],
    "entropy": sums["entropy"],
    "clip_fraction": sums["clipped"],
    "behaviour_kl": sums["behaviour_kl"],
    "load_balance": sums["balance"],
    "router_entropy": sums["router_entropy"],
    "grad_norm": sums["grad_norm"],
    "trained_tokens": sums["tokens"],
  }


def of_spans(spans: Sequence[trace.Span], wall_s: float) -> dict[str, float]:
  """Returns how busy both meshes were over `wall_s` seconds, and at once."""
  both = trace.overlap(spans)
  return {
    "learner_busy": both.first_s / wall_s,
    "decode_busy": both.second_s / wall_s,
    "overlap_share": both.share,
  }
