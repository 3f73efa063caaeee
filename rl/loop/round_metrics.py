"""Metrics of one round, from its groups, events and spans.

Shares and means over nothing are nan.
"""

import collections
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.audit import event_log
from rl.data import trajectory
from rl.runtime import trace
from rl.schedule import overlap
from rl.train import trainer

_RENAMED = {"clipped": "clip_fraction"}
_ADDED = {
  "tokens": "trained_tokens",
  "dropped": "dropped_assignments",
  "zero_variance_groups": "zero_variance_groups",
  "singleton_groups": "singleton_groups",
  "skipped": "skipped_updates",
}


def of_groups(
  groups: Sequence[trajectory.Group],
  *,
  success: float,
  trained_at: int,
) -> dict[str, float]:
  """Returns success, reward, lengths, staleness and faults of a round.

  Args:
    groups: may be empty.
    success: an episode succeeds when its graded reward, before shaping, is at
      least this.
    trained_at: the version before the round's updates.
  """
  episodes = [t for group in groups for t in group.trajectories]
  lags = [trained_at - int(group.first_version) for group in groups]
  counts = collections.Counter(t.status for t in episodes)
  faults = {
    f"faults/{status.value}": float(counts[status])
    for status in trajectory.Status
    if status.is_fault
  }
  return {
    **_scores(episodes, success),
    "groups": float(len(groups)),
    "turns_mean": _mean([len(t.turns) for t in episodes]),
    "sampled_tokens": float(sum(t.num_sampled for t in episodes)),
    "truncated": float(counts[trajectory.Status.TRUNCATED]),
    "truncated_share": _mean(
      [t.status is trajectory.Status.TRUNCATED for t in episodes]
    ),
    "cut_answer_share": _mean(
      [turn.stop == "length" for t in episodes for turn in t.turns]
    ),
    "staleness_mean": _mean(lags),
    "staleness_max": float(max(lags, default=np.nan)),
    "faults": sum(faults.values()),
    "fault_share": _mean([t.status.is_fault for t in episodes]),
    **faults,
    **_means_by_name("reward", [t.parts for t in episodes]),
    **_means_by_name("env", [t.metrics for t in episodes]),
  }


def _scores(
  episodes: Sequence[trajectory.Trajectory], success: float
) -> dict[str, float]:
  """Returns the share of successes and the mean reward, shaping included."""
  graded = [t for t in episodes if t.reward is not None]
  before = [t.graded_reward for t in graded]
  return {
    "success": _mean([b is not None and b >= success for b in before]),
    "reward_mean": _mean([t.reward for t in graded]),
  }


def _means_by_name(
  prefix: str, named: Sequence[Mapping[str, float]]
) -> dict[str, float]:
  """Returns the mean of each name over those that have it."""
  values = collections.defaultdict(list)
  for numbers in named:
    for name, number in numbers.items():
      values[f"{prefix}/{name}"].append(number)
  return {name: _mean(values[name]) for name in sorted(values)}


def _mean(values: Sequence[Any]) -> float:
  return float(np.mean(values)) if values else np.nan


class SlotSources:
  """Sources of the slots, for events that name only the slot.

  The coordinator calls `follow` once a round. A slot that was trained or given
  up in one round is forgotten in the next.
  """

  def __init__(self):
    self._sources: dict[int, str] = {}
    self._gone: set[int] = set()

  def follow(self, events: Sequence[event_log.Event]) -> Mapping[int, str]:
    """Returns the source of every slot that the events of a round name."""
    for group in self._gone:
      self._sources.pop(group, None)
    self._sources |= _submitted(events)
    trained = {e["group"] for e in event_log.of_kind(events, "trained")}
    redundant = {
      event["group"]
      for event in event_log.of_kind(events, "dropped")
      if event["reason"] == "redundant"
    }
    self._gone = trained | redundant
    return dict(self._sources)


def of_sources(
  groups: Sequence[trajectory.Group],
  events: Sequence[event_log.Event],
  *,
  success: float,
  trained_at: int,
  slots: Mapping[int, str] = types.MappingProxyType({}),
) -> dict[str, float]:
  """Returns the metrics of each source, as `source/<name>/...`.

  `groups`, `share`, rewards, lengths (in ids) and staleness are of the trained
  groups. `episodes` counts those that ended or were aborted meanwhile;
  `fault_rate` and `abort_rate` are shares of them. `dropped` counts attempts,
  `too_slow` the times that a slot gave up on the source because it is too slow
  for the bound, so that its share of the trained groups falls.

  Args:
    groups: trained in this round.
    events: of the round.
    slots: sources of slots that earlier rounds submitted; see `SlotSources`.
      Events of unknown slots are left out.
  """
  trained = collections.defaultdict(list)
  for group in groups:
    trained[_source(group)].append(group)
  sources = {
    **slots,
    **{group.group_id: _source(group) for group in groups},
    **_submitted(events),
  }
  counts = collections.defaultdict(collections.Counter)
  for event in events:
    if source := sources.get(event.get("group", -1)):
      counts[source][event["kind"]] += 1
  report = {}
  for name in sorted({*trained, *counts}):
    share = len(trained[name]) / len(groups) if groups else np.nan
    numbers = {
      "share": share,
      **_of_trained(trained[name], success, trained_at),
      **_of_events(counts[name]),
    }
    report |= {f"source/{name}/{key}": numbers[key] for key in numbers}
  return report


def _submitted(events: Sequence[event_log.Event]) -> dict[int, str]:
  """Returns the source of each slot that the events submit."""
  submitted = event_log.of_kind(events, "submitted")
  return {event["group"]: event["source"] for event in submitted}


def _source(group: trajectory.Group) -> str:
  """Returns the source of its task: the first part of the task's id."""
  return group.trajectories[0].task_id.partition("/")[0]


def _of_trained(
  groups: Sequence[trajectory.Group], success: float, trained_at: int
) -> dict[str, float]:
  episodes = [t for group in groups for t in group.trajectories]
  return {
    **_scores(episodes, success),
    "groups": float(len(groups)),
    "length_mean": _mean([t.num_ids for t in episodes]),
    "sampled_mean": _mean([t.num_sampled for t in episodes]),
    "staleness_mean": _mean(
      [trained_at - int(g.first_version) for g in groups]
    ),
  }


def _of_events(counts: collections.Counter[str]) -> dict[str, float]:
  episodes = counts["ended"] + counts["aborted"]
  return {
    "episodes": float(episodes),
    "faults": float(counts["fault"]),
    "aborted": float(counts["aborted"]),
    "fault_rate": counts["fault"] / episodes if episodes else np.nan,
    "abort_rate": counts["aborted"] / episodes if episodes else np.nan,
    "dropped": float(counts["dropped"]),
    "too_slow": float(counts["source_too_slow"]),
  }


def of_selection(
  groups: Sequence[trajectory.Group], events: Sequence[event_log.Event]
) -> dict[str, float]:
  """Returns mean lengths of trained and of launched episodes, in ids.

  A share below 1 over many rounds shows that the schedule prefers short
  episodes. Launched are those that ended or were aborted in the round, with
  their length at that time: aborted ones would have been longer.

  Args:
    groups: trained in this round.
    events: of the round.
  """
  trained = [
    t.num_ids
    for group in groups
    for t in group.trajectories
    if t.status.trainable
  ]
  launched = [event["length"] for event in _finished(events)]
  means = _mean(trained), _mean(launched)
  return {
    "length_trained_mean": means[0],
    "length_launched_mean": means[1],
    "length_trained_share": means[0] / means[1] if means[1] else np.nan,
  }


def _finished(events: Sequence[event_log.Event]) -> list[event_log.Event]:
  """Returns the ends of episodes, aborted ones included."""
  return [event for event in events if event["kind"] in ("ended", "aborted")]


def of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the learner's per-token means, averaged over a round's updates.

  Names are the learner's, including those that a model adds. An update that
  lacks a name, or trained nothing, does not count in its mean.
  """
  means = trainer.means(updates)
  added = {
    new: sum(sums[name] for sums in updates if name in sums)
    for name, new in _ADDED.items()
    if name in means
  }
  return added | {
    _RENAMED.get(name, name): mean
    for name, mean in means.items()
    if name not in _ADDED
  }


def of_microbatches(events: Sequence[event_log.Event]) -> dict[str, float]:
  """Returns the number of micro-batches of a round, and their sizes in ids."""
  sizes = collections.Counter[int]()
  for event in event_log.of_kind(events, "dequeued"):
    sizes[event["microbatch"]] += event["length"]
  return {
    "microbatches": float(len(sizes)),
    "microbatch_ids_mean": _mean(list(sizes.values())),
    "microbatch_ids_max": float(max(sizes.values(), default=np.nan)),
  }


def of_schedule(schedule: overlap.Overlap) -> dict[str, float]:
  """Returns the bounds of a round.

  `updates_late_max`: within its own round update j trains on data j updates
  old.
  """
  return {
    "staleness_bound": float(schedule.max_staleness),
    "updates_late_max": float(schedule.updates_per_round - 1),
  }


def of_speed(
  events: Sequence[event_log.Event],
  updates: Sequence[Mapping[str, float]],
  wall_s: float,
) -> dict[str, float]:
  """Returns sampled tokens a second, as played and as trained.

  Args:
    events: of the round; an episode counts when it ends or is aborted.
  """
  played = sum(event["tokens"] for event in _finished(events))
  trained = sum(sums["tokens"] for sums in updates)
  return {
    "decode_tokens_per_s": played / wall_s,
    "learner_tokens_per_s": trained / wall_s,
    "round_s": wall_s,
  }


def of_spans(both: trace.TrackOverlap, wall_s: float) -> dict[str, float]:
  """Returns the busy shares of both meshes over `wall_s`, and their overlap."""
  return {
    "learner_busy": both.first_s / wall_s,
    "decode_busy": both.second_s / wall_s,
    "overlap_share": both.share,
  }
