"""Warns after a round of skipped updates, empty rounds and metrics that drift.

A round whose episodes all ended in faults trains nothing. After a few of them
in a row the run should end, as it should where a metric leaves its bound.
"""

import pathlib
from collections.abc import Mapping, Sequence

from rl.data import fault_summary, trajectory
from rl.loop import metric_bounds
from rl.rollout import evaluate
from rl.train import skipped_updates

_QUIET = 50


class Hopeless(Exception):
  """The run should end: faults leave nothing to train."""


class OutOfBounds(Hopeless):
  """The run should end: a metric left its bound."""


def of_groups(
  groups: Sequence[trajectory.Group],
) -> fault_summary.FaultSummary | None:
  """Returns the most frequent fault of their members; None without faults."""
  return fault_summary.most_frequent(
    member for group in groups for member in group.trajectories
  )


def of_evaluation(
  version: int, outcome: evaluate.EvaluationResult
) -> str | None:
  """Returns the warning about an evaluation that graded no episode."""
  if outcome.episodes or not outcome.fault:
    return None
  return (
    f"the evaluation of version {version} says nothing of success: all "
    f"{outcome.faults} episodes ended in faults, most with {outcome.fault}"
  )


class RoundWarnings:
  """The warnings of a run; call `after` once per round.

  Attributes:
    hopeless: the reason to end the run, or None.
    held: the reason not to publish the weights of later rounds, or "".
  """

  def __init__(
    self,
    run_dir: pathlib.Path,
    max_in_a_row: int,
    bounds: metric_bounds.MetricBounds,
    max_staleness: int,
    has_warm_start: bool,
  ):
    """Starts before the first round.

    Args:
      run_dir: as the user typed it.
      max_in_a_row: rounds in a row that may train nothing because of faults.
      max_staleness: of the schedule; so many rounds can be trained while
        nothing is published.
      has_warm_start: the run began with one.
    """
    self._monitor = metric_bounds.Monitor(bounds)
    self._run_dir = run_dir
    self._max_in_a_row = max_in_a_row
    self._in_a_row = 0
    self._due = 0  # Round from which a lack of signal is told again.
    self._max_staleness = max_staleness
    self._has_warm_start = has_warm_start
    self._rounds_held = 0
    self.held = ""
    self.hopeless: Hopeless | None = None

  def after(
    self, metrics: Mapping[str, float], groups: Sequence[trajectory.Group]
  ) -> list[str]:
    """Returns one line per warning.

    Args:
      metrics: of the round, as in metrics.jsonl.
      groups: consumed by the round.
    """
    lines = self._skipped(metrics) + self._drifting(metrics)
    is_empty = metrics.get("trained_tokens") == 0
    is_flat = 0 < metrics["groups"] == metrics.get("zero_variance_groups")
    fault = (
      of_groups(groups)
      if is_empty and not metrics["zero_variance_groups"]
      else None
    )
    self._in_a_row = self._in_a_row + 1 if fault else 0
    number = int(metrics["round"])
    is_due = number >= self._due
    start = f"round {number} trained nothing"
    if fault is not None:
      episodes = sum(len(group.trajectories) for group in groups)
      lines.append(
        f"{start}: {fault.episodes} of {episodes} episodes ended with {fault}"
      )
    # On a solved or too hard task all rounds look like this, or every other.
    elif is_empty and is_due:
      self._due = number + _QUIET
      lines.append(f"{start}: {self._why_empty(metrics)}")
    elif is_flat and is_due:
      self._due = number + _QUIET
      lines.append(
        f"round {number} learned nothing from its rewards: "
        f"{self._equally_well(metrics)}"
      )
    if fault is not None and self._in_a_row > self._max_in_a_row:
      self.hopeless = Hopeless(
        f"rounds in a row that trained nothing because of faults: "
        f"{self._in_a_row}, and max_skipped={self._max_in_a_row} allows no "
        f"more; most episodes ended with {fault}. Fix the environment or the "
        "reward; the same command continues from here"
      )
    return lines

  def _drifting(self, metrics: Mapping[str, float]) -> list[str]:
    lines = []
    for crossing in self._monitor.after(metrics):
      if crossing.bound.then == "stop":
        self.hopeless = OutOfBounds(
          f"{crossing}. docs/metrics.md tells what it means; bounds."
          f"{crossing.name} sets the limit, and what follows"
        )
      else:
        lines.append(str(crossing))
    return lines + self._hold(int(metrics["round"]))

  def _hold(self, number: int) -> list[str]:
    """Says whether publishing is held back; returns a line when that ends."""
    held = next(
      (x for x in self._monitor.lasting.values() if x.bound.then == "pause"),
      None,
    )
    was_held, self.held = self.held, str(held or "")
    # The weights of the round that crossed it are on their way.
    self._rounds_held = self._rounds_held + 1 if was_held and held else 0
    if held and self._rounds_held > self._max_staleness:
      self.hopeless = OutOfBounds(
        f"{held}. It has not come back in {self._rounds_held} rounds, and "
        f"overlap.max_staleness={self._max_staleness} lets no more be trained "
        "without new weights. docs/metrics.md tells what it means; bounds."
        f"{held.name} sets the limit, and what follows"
      )
    if was_held and not held:
      return [f"round {number}: the metric is back; publishing goes on"]
    return []

  def _skipped(self, metrics: Mapping[str, float]) -> list[str]:
    if not metrics.get("skipped_updates"):
      return []
    number = int(metrics["round"])
    kept = skipped_updates.of_round(self._run_dir / "skipped", number)
    start = (
      f"round {number}: an update was skipped, as its loss or gradient is not "
      "finite"
    )
    return [
      f"{start}; to find the cause: python -m launch.replay {path}"
      for path in kept
    ] or [start]

  def _why_empty(self, metrics: Mapping[str, float]) -> str:
    if metrics.get("zero_variance_groups"):
      return self._equally_well(metrics)
    return "no group has members with tokens and rewards to compare"

  def _equally_well(self, metrics: Mapping[str, float]) -> str:
    groups = (
      f"in {metrics['zero_variance_groups']:.0f} of {metrics['groups']:.0f} "
      "groups all members did equally well"
    )
    more = (
      "more warm_start.steps help"
      if self._has_warm_start
      else "a warm start helps"
    )
    episodes = metrics.get("truncated_share", 0.0)
    answers = metrics.get("cut_answer_share", 0.0)
    match metrics.get("success"):
      case 0.0 if episodes > 0.5:
        why = (
          f"no episode succeeded, and limits cut {episodes:.0%} of them; raise "
          "rollout.max_turns or max_tokens, or end them in step"
        )
      case 0.0 if answers > 0.5:
        why = (
          f"no episode succeeded, and limits cut {answers:.0%} of the answers; "
          "raise rollout.turn_tokens, or where a new policy does not end its "
          f"answers, {more}"
        )
      case 0.0:
        why = (
          f"no episode succeeded, so the tasks are too hard; {more}, or "
          "rewards for parts of a task"
        )
      case 1.0:
        why = (
          "all episodes succeeded, so the tasks are too easy; use harder ones"
        )
      case _:
        why = (
          "the tasks are too easy or too hard, or the policy has become "
          "certain, against which algorithm.entropy_bonus helps"
        )
    return f"{groups}: {why}; not told again for {_QUIET} rounds"
