"""Runs side by side: the settings that differ, their curves, the best one.

run directories -> read -> ComparedRun -> groups that differ in seed only
                                            +-> text, for a terminal
"""

import collections
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from launch.cli import known_programs, workdir
from launch.report import metric_docs, run_files, thinning
from models import untrusted_files
from rl.loop import warm_start
from rl.settings import checks, overrides

EVALUATION = "evaluation/"
"""Begins the names of metrics of evaluations."""
WARM_START = "warm_start/"
"""Begins the names of metrics of steps; see `of_steps`."""

_SEED = "seed"
_LAST = 10
"""Rounds of the moving mean by which runs are compared."""
_NOTHING = "-"
_NOTE = "sweep_note.txt"
_MAX_COLUMNS = 12
"""Settings beside the runs in a text."""
_MAX_TEXT = 100
"""Characters of a setting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
  """The parts of a run that are compared.

  Attributes:
    settings: each leaf of config.json as text, by its dotted name.
    values: the metric of each round that has it.
    width: rounds of a moving mean; see `width`.
    rounds: that were trained; of a run without any, the steps.
    note: why the run is not to be taken as a whole one, or "".
  """

  name: str
  settings: Mapping[str, str]
  values: Mapping[int, float]
  rounds: int
  note: str = ""
  width: int = _LAST

  @property
  def means(self) -> list[float]:
    """Moving means of the metric over its width, or over all if fewer."""
    values = [self.values[number] for number in sorted(self.values)]
    width = min(self.width, len(values))
    return [
      thinning.mean(values[end - width : end])
      for end in range(max(width, 1), len(values) + 1)
    ]

  @property
  def last(self) -> float | None:
    """The newest moving mean; None without any."""
    return last_mean(self.values, self.width)

  def best(self, less: bool) -> float | None:
    """Returns the best moving mean; None without any.

    Args:
      less: less of the metric is better.
    """
    return (min if less else max)(self.means, default=None)


def read(directories: Sequence[pathlib.Path], metric: str) -> list[ComparedRun]:
  """Reads those directories that hold a run, whatever state it is in.

  Their names are paths from where all of them lie.

  Raises:
    ValueError: none does, or no run has the metric.
  """
  found = [x.absolute() for x in directories if run_files.is_run(x)]
  if not found:
    raise ValueError("there are no runs; name the --workdir of a sweep")
  root = os.path.commonpath([directory.parent for directory in found])
  runs, known = [], set[str]()
  for directory in found:
    settings = read_settings(directory)
    rows = _rows(directory, settings)
    known.update(*rows.values())
    runs.append(
      ComparedRun(
        name=directory.relative_to(root).as_posix(),
        settings=settings,
        values=values_of(rows, metric),
        rounds=len(rows) - (0 in rows),
        note=remark(directory),
        width=width(metric),
      )
    )
  if known and metric not in known:
    refuse_metric(metric, known)
  return runs


def is_tuning(settings: Mapping[str, str]) -> bool:
  """Returns whether a run has no rounds, but steps of its warm start alone."""
  return settings.get("rounds") == "0"


def are_tuning(directories: Sequence[pathlib.Path]) -> bool:
  """Returns whether all runs among directories are such; False without any."""
  found = [read_settings(x) for x in directories if run_files.is_run(x)]
  known = [settings for settings in found if "rounds" in settings]
  return bool(known) and all(map(is_tuning, known))


def metric_of(given: str | None, is_tuning: bool) -> tuple[str, bool]:
  """Returns the metric that compares runs, and whether less is better.

  Args:
    given: its name, with a minus if less is better, unless docs/metrics.md
      says so; None goes by the runs.
    is_tuning: whether all of them have steps alone.
  """
  name = given or (f"-{WARM_START}loss" if is_tuning else "success")
  metric = name.removeprefix("-")
  rows = metric_docs.entries()
  is_less = any(row.less_is_better for row in rows if row.matches(metric))
  return metric, is_less or name.startswith("-")


def check_documented(metric: str) -> None:
  """Raises ValueError for a metric that no run can have.

  Where the page that explains all metrics is not installed, any may be one.
  """
  rows = metric_docs.entries()
  if rows and not any(row.matches(metric) for row in rows):
    refuse_metric(metric, [row.name for row in rows])


def refuse_metric(metric: str, known: Collection[str]) -> NoReturn:
  """Raises ValueError that names the metric, and one that was meant."""
  out = checks.nearest(metric, known) or "; docs/metrics.md explains all"
  raise ValueError(f"no run has a metric {metric}{out}")


def values(directory: pathlib.Path, metric: str) -> dict[int, float]:
  """Returns the metric of a run by round, for rounds that have it."""
  return values_of(_rows(directory, read_settings(directory)), metric)


def width(metric: str) -> int:
  """Returns the rounds of a moving mean: 1 for evaluations, which are means."""
  means = (EVALUATION, f"{WARM_START}{warm_start.EVAL}")
  return 1 if metric.startswith(means) else _LAST


def last_mean(values: Mapping[int, float], width: int = _LAST) -> float | None:
  """Returns the mean of the newest values by round; None without any."""
  newest = sorted(values)[-width:]
  return thinning.mean([values[n] for n in newest]) if newest else None


def values_of(
  rows: Mapping[int, Mapping[str, Any]], metric: str
) -> dict[int, float]:
  """Returns the metric of rows by round, for rounds that have it."""
  return {
    number: float(row[metric])
    for number, row in rows.items()
    if isinstance(row.get(metric), int | float)
  }


def with_evaluations(
  metrics: Mapping[int, Mapping[str, Any]],
  evaluations: Mapping[int, Mapping[str, Any]],
) -> dict[int, dict[str, Any]]:
  """Returns the metrics by round, with those of evaluations after it.

  These begin with "evaluation/", as in docs/metrics.md. Round 0 has what was
  evaluated before training.
  """
  rows = {number: dict(row) for number, row in metrics.items()}
  for number, row in evaluations.items():
    if number in metrics or number == 0:
      rows[number] = _named(EVALUATION, row) | rows.get(
        number, {"round": number}
      )
  return rows


def of_steps(
  steps: Mapping[int, Mapping[str, Any]],
  evaluations: Mapping[int, Mapping[str, Any]],
) -> dict[int, dict[str, Any]]:
  """Returns the metrics by step of a run without rounds, as of fine-tuning.

  They begin with "warm_start/", as in docs/metrics.md. The last step has what
  was evaluated after it.
  """
  rows: dict[int, dict[str, Any]] = {}
  for number, row in steps.items():
    axes = {"time_s": row.get("time_s"), "sampled_tokens": row.get("tokens")}
    rows[number] = _named(WARM_START, row) | axes
  if rows and (last := evaluations.get(0)):
    rows[max(rows)] |= _named(EVALUATION, last)
  return rows


def _named(start: str, row: Mapping[str, Any]) -> dict[str, Any]:
  return {f"{start}{name}": value for name, value in row.items()}


def _rows(
  directory: pathlib.Path, settings: Mapping[str, str]
) -> dict[int, dict[str, Any]]:
  evaluations = run_files.numbered(directory / "evaluations.jsonl", [])
  if is_tuning(settings):
    steps = directory / workdir.WARM_START_LINES
    return of_steps(run_files.numbered(steps, [], "step"), evaluations)
  metrics = run_files.numbered(directory / "metrics.jsonl", [])
  return with_evaluations(metrics, evaluations)


def note(
  directory: pathlib.Path, point: Mapping[str, str | None] | None = None
) -> str:
  """Returns what a sweep has noted about a run; "" without a note.

  Args:
    point: its overrides: a note about others does not count. None: any.
  """
  try:
    kept = untrusted_files.read_text(directory / _NOTE)
  except untrusted_files.BadFile:
    return ""
  text, _, about = kept.strip().partition("\n")
  return text if point is None or about == json.dumps(point) else ""


def remark(directory: pathlib.Path) -> str:
  """Returns what a sweep has noted about a run, or the error that ended it."""
  return note(directory) or workdir.failure_line(directory)


def write_note(
  directory: pathlib.Path, text: str, point: Mapping[str, str | None]
) -> None:
  """Notes something about a run of these overrides, for `read`."""
  (directory / _NOTE).write_text(f"{text}\n{json.dumps(point)}\n", "utf-8")


def remove_note(directory: pathlib.Path) -> None:
  """Removes a note, about a run that was there before."""
  (directory / _NOTE).unlink(missing_ok=True)


def read_settings(directory: pathlib.Path) -> dict[str, str]:
  """Returns the leaves of a run's config.json; none if it is damaged."""
  try:
    return settings_of(run_files.settings(directory))
  except (untrusted_files.BadFile, RecursionError):
    return {}


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns the leaves of a config.json as text, by dotted name.

  Of a file that is kept in it there is a digest, which tells whether two runs
  have the same. A long text ends with one.
  """
  kept = config.get(known_programs.KEPT)
  found = overrides.flat(
    {x: part for x, part in config.items() if x != known_programs.KEPT}
  )
  for name, file in kept.items() if isinstance(kept, dict) else ():
    digest = _digest(json.dumps(file, sort_keys=True))
    found[f"{known_programs.KEPT}.{name}"] = digest
  return {
    name: text
    if len(text) <= _MAX_TEXT
    else f"{text[:_MAX_TEXT]} ... {_digest(text)}"
    for name, text in found.items()
  }


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def differing(runs: Sequence[ComparedRun]) -> list[str]:
  """Returns the settings in which runs differ, in their order.

  Runs whose settings cannot be read do not count.
  """
  known = [run.settings for run in runs if run.settings]
  names = dict.fromkeys(name for settings in known for name in settings)
  return [name for name in names if len({each.get(name) for each in known}) > 1]


def ranked(runs: Sequence[ComparedRun], less: bool) -> list[ComparedRun]:
  """Returns the runs, the best first, and those without the metric last."""

  def key(run: ComparedRun) -> tuple[bool, float]:
    best = run.best(less)
    if best is None or math.isnan(best):
      return True, 0.0
    return False, best if less else -best

  return sorted(runs, key=key)


def _table(
  runs: Sequence[ComparedRun], metric: str, less: bool
) -> list[list[str]]:
  names = differing(runs)
  have_steps = all(is_tuning(run.settings) for run in runs)
  number = "steps" if have_steps else "rounds"
  heads = ["run", number, f"last {metric}", f"best {metric}", *names, ""]
  return [
    heads,
    *(
      [
        run.name,
        str(run.rounds),
        _number(run.last),
        _number(run.best(less)),
        *(run.settings.get(name, _NOTHING) for name in names),
        run.note,
      ]
      for run in ranked(runs, less)
    ),
  ]


def _number(value: float | None) -> str:
  return _NOTHING if value is None else f"{value:.4g}"


def text(runs: Sequence[ComparedRun], metric: str, less: bool = False) -> str:
  """Returns a table of the runs, the best first.

  Many settings that differ stand in a table below it, a line each.

  Args:
    metric: whose means over ten rounds are compared.
    less: less of it is better.
  """
  rows = _table(runs, metric, less)
  if len(differing(runs)) <= _MAX_COLUMNS:
    return _aligned(rows)
  settings = zip(*([name, *rest[3:-1]] for name, *rest in rows), strict=True)
  short = _aligned([[*row[:4], row[-1]] for row in rows])
  return f"{short}\n\n{_aligned([*settings])}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  )


def groups(
  runs: Sequence[ComparedRun],
) -> dict[str, list[ComparedRun]]:
  """Returns the runs that differ in nothing but their seeds, by their name.

  The name tells the settings that differ between groups.
  """
  names = [name for name in differing(runs) if name != _SEED]
  found: dict[str, list[ComparedRun]] = collections.defaultdict(list)
  for run in runs:
    words = [f"{name}={run.settings.get(name, _NOTHING)}" for name in names]
    found[", ".join(words) or "all runs"].append(run)
  return dict(found)
