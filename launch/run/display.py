"""The display of a run: a live panel in a terminal, plain lines elsewhere."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import rich.console
import rich.progress_bar
import rich.table

from launch.cli import steps
from rl.runtime import log_line

_SPARKS = "▁▂▃▄▅▆▇█"
_LEGEND = "busy: decode/learner mesh, % of the round; lag: largest/bound"


class Display:
  """Shows the progress of one run on a stream.

  A terminal gets a panel below all other output; any other stream gets ASCII
  lines with the time of day: rounds at most every two seconds, the last round,
  and every evaluation and note. Both fit 80 columns. A metric that is missing
  or not finite is a dash.
  """

  def __init__(
    self,
    total_rounds: int,
    stream: TextIO,
    *,
    quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], str] = log_line.time_of_day,
  ):
    """Shows nothing yet.

    Args:
      quiet: shows notes and warnings only.
      clock: in seconds, for the time left and the pause between lines.
      now: time of day at which a line was printed.
    """
    self._has_legend = False
    self._total_rounds = total_rounds
    self._clock, self._now = clock, now
    self._metrics: Mapping[str, float] = {}
    self._evaluation: tuple[float, float, float] | None = None
    self._phase = "starting"
    self._fault = ""
    self._successes: list[float] = []
    # (rounds done, time) at the first update.
    self._first: tuple[int, float] | None = None
    self._waiting_line = False
    self._steps = steps.Steps(
      stream, quiet=quiet, panel=self._panel, clock=clock, now=now
    )

  def start(self) -> None:
    """Starts drawing the panel, if there is one."""
    self._steps.start()

  def close(self) -> None:
    """Leaves the last state on the screen."""
    if self._waiting_line:
      self._print_round()
    self._steps.close()

  def phase(self, name: str) -> None:
    """Shows the step outside the rounds, "warm start 12/40", until `update`."""
    self._phase = name
    self._steps.phase(name)

  def play(self) -> None:
    """Shows the rounds again, after a step outside them."""
    self._phase = ""

  def update(self, metrics: Mapping[str, float], fault: str = "") -> None:
    """Shows the metrics of a finished round.

    Args:
      metrics: `round`, counted from 1, and any of success, reward_mean,
        entropy, decode_tokens_per_s, learner_tokens_per_s, decode_busy,
        learner_busy, overlap_share, staleness_max, staleness_bound, groups,
        zero_variance_groups, faults and skipped_updates; with experts also
        router_entropy, max_load and dropped_assignments.
      fault: status and message of the most frequent fault.
    """
    is_due = self._first is None or not self._steps.is_soon
    self._metrics, self._phase, self._fault = dict(metrics), "", fault
    self._first = self._first or (self._done, self._clock())
    success = metrics.get("success", math.nan)
    if math.isfinite(success):
      self._successes.append(success)
    self._waiting_line = True
    if is_due or self._done >= self._total_rounds:
      self._print_round()

  def evaluation(self, success: float, low: float, high: float) -> None:
    """Shows an evaluation: its success rate and the interval around it."""
    self._evaluation = (success, low, high)
    line = f"evaluation: success {self._evaluation_text()}"
    self._steps.print(line, starts_pause=False)

  def note(self, text: str) -> None:
    """Shows a notice above the panel, after the line of the latest round."""
    if self._waiting_line:
      self._print_round()
    self._steps.console.print(self._stamped(text), soft_wrap=True)

  def warn(self, text: str) -> None:
    """Prints a warning on stderr: above the panel, or with the time."""
    print(self._stamped(f"warning: {text}"), file=sys.stderr, flush=True)

  def _stamped(self, text: str) -> str:
    return text if self._steps.is_live else log_line.stamped(text, self._now())

  def doing(self) -> str:
    """Returns the phase, or the round that comes next; in any thread."""
    coming = min(self._done + 1, self._total_rounds)
    return self._phase or f"round {coming} of {self._total_rounds}"

  @property
  def _done(self) -> int:
    return int(self._metrics.get("round", 0))

  def _print_round(self) -> None:
    if not self._has_legend:
      self._steps.print(_LEGEND)
      self._has_legend = True
    self._steps.print(self._line())
    if troubles := self._troubles():
      self._steps.print(troubles)
    self._waiting_line = False

  def _evaluation_text(self) -> str:
    # The rate of no graded episode is nan.
    if self._evaluation is None or math.isnan(self._evaluation[0]):
      return "-"
    success, low, high = map(_percent, self._evaluation)
    return f"{success} ({low} to {high})"

  def _left(self) -> str:
    """Returns the time left at the mean pace since the first update."""
    if self._first is None or self._done == self._first[0]:
      return "-"
    done, since_s = self._first
    pace_s = (self._clock() - since_s) / (self._done - done)
    return steps.duration(pace_s * (self._total_rounds - self._done))

  def _line(self) -> str:
    cells = _cells(self._metrics)
    width = len(str(self._total_rounds))
    reward = _number(self._metrics.get("reward_mean"), ".2f")
    decode, learner = cells["decode_busy"], cells["learner_busy"]
    return (
      f"round {self._done:>{width}}/{self._total_rounds}"
      f" success {cells['success']:>4} reward {reward:>4}"
      f" busy {decode.rstrip('%'):>3}/{learner.rstrip('%'):<3}"
      f" lag {cells['staleness']} left {self._left()}"
    )

  def _troubles(self) -> str:
    """Returns a line on skipped updates and faults; "" without any."""
    cells = _cells(self._metrics)
    troubles = []
    if self._metrics.get("skipped_updates"):
      troubles.append(f"skipped {cells['skipped']}")
    if self._metrics.get("faults"):
      cause = f" ({self._fault})" if self._fault else ""
      troubles.append(f"faults {cells['faults']}{cause}")
    line = "  ".join(troubles)
    return steps.cut(f"  {line}", self._steps.room()) if line else ""

  def _panel(self) -> rich.console.RenderableType:
    """Returns the panel; called by the thread that draws."""
    cells = _cells(self._metrics)
    top = self._steps.row()
    if not self._phase:
      top = steps.bar_row(
        f"round {self._done}/{self._total_rounds}",
        rich.progress_bar.ProgressBar(self._total_rounds, self._done),
        self._steps.compiling() or f"left {self._left()}",
      )
    rows = rich.table.Table.grid(padding=(0, 2))
    # Wide enough for a full sparkline, so that columns never move.
    for style, min_width in (("dim", 0), ("bold", 30), ("dim", 0), ("bold", 0)):
      rows.add_column(style=style, min_width=min_width)
    success = f"{cells['success']}  {sparkline(self._successes)}"
    rows.add_row("success", success, "evaluation", self._evaluation_text())
    decode, learner = (
      f"{cells[mesh]}/s, busy {cells[f'{mesh}_busy']}"
      for mesh in ("decode", "learner")
    )
    rows.add_row("decode", decode, "learner", learner)
    rows.add_row("overlap", cells["overlap"], "staleness", cells["staleness"])
    rows.add_row("reward", cells["reward"], "entropy", cells["entropy"])
    rows.add_row(
      "zero variance", cells["zero_variance"], "faults", cells["faults"]
    )
    if "max_load" in self._metrics:
      rows.add_row(
        "router entropy", cells["router"], "busiest expert", cells["load"]
      )
    if self._metrics.get("skipped_updates"):
      rows.add_row("skipped updates", cells["skipped"], "", "")
    if not self._fault:
      return rich.console.Group(top, rows)
    fault = steps.cut(f"fault: {self._fault}", steps.COLUMNS)
    return rich.console.Group(top, rows, fault)


def sparkline(values: Sequence[float], width: int = 24) -> str:
  """Returns rates in [0, 1] as bars, averaged down to at most `width`."""
  count = min(width, len(values))
  edges = [len(values) * i // count for i in range(count + 1)] if count else []
  means = [
    sum(values[low:high]) / (high - low)
    for low, high in itertools.pairwise(edges)
  ]
  top = len(_SPARKS) - 1
  return "".join(_SPARKS[round(min(1, max(0, x)) * top)] for x in means)


def _cells(metrics: Mapping[str, float]) -> dict[str, str]:
  get = metrics.get
  stalest = _number(get("staleness_max"), ".0f")
  bound = _number(get("staleness_bound"), ".0f")
  return {
    "success": _percent(get("success")),
    "decode": _thousands(get("decode_tokens_per_s")),
    "learner": _thousands(get("learner_tokens_per_s")),
    "decode_busy": _percent(get("decode_busy")),
    "learner_busy": _percent(get("learner_busy")),
    "overlap": _percent(get("overlap_share")),
    "staleness": f"{stalest}/{bound}",
    "reward": _number(get("reward_mean"), ".3f"),
    "entropy": _number(get("entropy"), ".3f"),
    "zero_variance": _percent(_share_of_groups(metrics)),
    "router": _number(get("router_entropy"), ".3f"),
    "load": f"{_number(get('max_load'), '.2f')}x{_dropped(metrics)}",
    "faults": _number(get("faults"), ".0f"),
    "skipped": _number(get("skipped_updates"), ".3g"),
  }


def _share_of_groups(metrics: Mapping[str, float]) -> float | None:
  """Returns the share of groups whose members did equally well."""
  flat, groups = metrics.get("zero_variance_groups"), metrics.get("groups")
  return flat / groups if flat is not None and groups else None


def _dropped(metrics: Mapping[str, float]) -> str:
  """Returns the number of assignments that experts dropped, or ""."""
  count = metrics.get("dropped_assignments", 0.0)
  return f", {count:.0f} dropped" if count else ""


def _number(value: float | None, form: str) -> str:
  if value is None or not math.isfinite(value):
    return "-"
  return format(value, form)


def _percent(rate: float | None) -> str:
  return _number(rate, ".0%")


def _thousands(value: float | None) -> str:
  """Returns up to three digits: 345, 1.2k, 12k, 1.2M."""
  if value is None or not math.isfinite(value):
    return "-"
  for scale, unit in ((1e6, "M"), (1e3, "k")):
    if value >= scale:
      return f"{value / scale:.{1 if value < 10 * scale else 0}f}{unit}"
  return f"{value:.0f}"
