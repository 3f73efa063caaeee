"""Runs side by side: the settings that differ, their curves, the best one.

run directories -> read -> ComparedRun -> groups that differ in seed only
                                            |-> text, for a terminal
                                            +-> page, with bands over seeds
"""

import collections
import dataclasses
import html
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launch.report import run_files, svg
from models import untrusted_files

_SEED = "seed"
_LAST = 10
"""Rounds of the moving mean by which runs are compared."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 880, 76, 848, 64, 340
_COLOURS = (
  "#4457c9",
  "#15857a",
  "#b85c00",
  "#a3316f",
  "#5b7f1d",
  "#7a4fb5",
  "#9c3b2e",
  "#2a7fb8",
)
_DASHES = ("", "7 4", "2 4")
_NOTHING = "-"
_NOTE = "sweep_note.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
  """The parts of a run that are compared.

  Attributes:
    settings: each leaf of config.json as text, by its dotted name.
    values: the metric of each round that has it.
    rounds: that were trained.
    note: why the run is not to be taken as a whole one, or "".
  """

  name: str
  settings: Mapping[str, str]
  values: Mapping[int, float]
  rounds: int
  note: str = ""

  @property
  def means(self) -> list[float]:
    """Moving means of the metric over ten rounds, or over all if fewer."""
    values = [self.values[number] for number in sorted(self.values)]
    width = min(_LAST, len(values))
    return [
      statistics.fmean(values[end - width : end])
      for end in range(max(width, 1), len(values) + 1)
    ]

  @property
  def last(self) -> float | None:
    """The newest moving mean; None without any."""
    return self.means[-1] if self.values else None

  def best(self, less: bool) -> float | None:
    """Returns the best moving mean; None without any.

    Args:
      less: less of the metric is better.
    """
    return (min if less else max)(self.means, default=None)


def read(directories: Sequence[pathlib.Path], metric: str) -> list[ComparedRun]:
  """Reads those directories that hold a run, whatever state it is in.

  Raises:
    ValueError: none does, or no run has the metric.
  """
  runs, known = [], set[str]()
  for directory in directories:
    if not (directory / "config.json").is_file():
      continue
    rows = _rounds(directory)
    known.update(*rows.values())
    runs.append(
      ComparedRun(
        name=directory.name,
        settings=_settings(directory),
        values=values_of(rows, metric),
        rounds=len(rows),
        note=note(directory),
      )
    )
  if not runs:
    raise ValueError("there are no runs; name the --workdir of a sweep")
  if known and metric not in known:
    raise ValueError(f"no run has a metric {metric}; see docs/metrics.md")
  return runs


def values(directory: pathlib.Path, metric: str) -> dict[int, float]:
  """Returns the metric of a run by round, for rounds that have it."""
  return values_of(_rounds(directory), metric)


def values_of(
  rows: Mapping[int, Mapping[str, Any]], metric: str
) -> dict[int, float]:
  """Returns the metric of rows by round, for rounds that have it."""
  return {
    number: float(row[metric])
    for number, row in rows.items()
    if isinstance(row.get(metric), int | float)
  }


def _rounds(directory: pathlib.Path) -> dict[int, dict[str, Any]]:
  return run_files.by_round(directory / "metrics.jsonl", [])


def note(directory: pathlib.Path) -> str:
  """Returns what a sweep has noted about a run; "" without a note."""
  try:
    return untrusted_files.read_text(directory / _NOTE).strip()
  except untrusted_files.BadFile:
    return ""


def write_note(directory: pathlib.Path, text: str) -> None:
  """Notes something about a run, for `read`."""
  (directory / _NOTE).write_text(f"{text}\n", "utf-8")


def _settings(directory: pathlib.Path) -> dict[str, str]:
  try:
    return flat(run_files.settings(directory))
  except (untrusted_files.BadFile, RecursionError):
    return {}


def flat(tree: Any, path: str = "") -> dict[str, str]:
  """Returns the leaves of a tree of settings as text, by dotted name.

  Args:
    path: of the tree itself.
  """
  if isinstance(tree, dict):
    found: dict[str, str] = {}
    for name, part in tree.items():
      if name == "class":  # Told by its last word, as on the command line.
        found[path] = str(part).rpartition(".")[2]
      else:
        found |= flat(part, f"{path}.{name}" if path else name)
    return found
  if isinstance(tree, list):
    return {path: ",".join(_text_of(part) for part in tree)}
  return {path: _text_of(tree)}


def _text_of(value: Any) -> str:
  return json.dumps(value) if isinstance(value, dict | list) else str(value)


def differing(runs: Sequence[ComparedRun]) -> list[str]:
  """Returns the settings in which runs differ, in their order."""
  names = dict.fromkeys(name for run in runs for name in run.settings)
  return [
    name for name in names if len({run.settings.get(name) for run in runs}) > 1
  ]


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
  heads = ["run", "rounds", f"last {metric}", f"best {metric}", *names, ""]
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

  Args:
    metric: whose means over ten rounds are compared.
    less: less of it is better.
  """
  rows = _table(runs, metric, less)
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


def picture(runs: Sequence[ComparedRun], metric: str) -> str:
  """Returns an SVG: a line of means for each group, and a band over seeds."""
  all_groups = groups(runs)
  values = [value for run in runs for value in run.values.values()]
  rounds = [number for run in runs for number in run.values]
  low, high = min(values, default=0.0), max(values, default=1.0)
  first, last = min(rounds, default=0), max(rounds, default=1)
  x = svg.scale(first, last, _LEFT, _RIGHT)
  y = svg.scale(low, high, _BOTTOM, _TOP)
  parts = [svg.text(28, 38, metric, 'font-size="19" font-weight="600"')]
  for tick in svg.ticks(low, high):
    parts.append(svg.line(_LEFT, y(tick), _RIGHT, y(tick), svg.GRID))
    parts.append(svg.label(_LEFT - 12, y(tick) + 4, f"{tick:,g}", "end"))
  for tick in svg.ticks(first, last):
    parts.append(svg.label(x(tick), _BOTTOM + 22, f"{tick:,g}"))
  parts.append(svg.label(_RIGHT, _BOTTOM + 40, "rounds", "end"))
  for number, (name, members) in enumerate(all_groups.items()):
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    parts += _band(members, x, y, colour, dash)
    at = _BOTTOM + 66 + 22 * number
    parts.append(svg.line(28, at - 4, 52, at - 4, colour, 3))
    parts.append(svg.label(60, at, _legend(name, members), "start"))
  height = _BOTTOM + 66 + 22 * len(all_groups)
  return svg.picture(_WIDTH, height, f"{metric} of all runs", parts)


def _legend(name: str, members: Sequence[ComparedRun]) -> str:
  count = len(members)
  return f"{name} ({count} run{'s' if count > 1 else ''})"


def _band(
  members: Sequence[ComparedRun], x: Any, y: Any, colour: str, dash: str
) -> list[str]:
  by_round: dict[int, list[float]] = collections.defaultdict(list)
  for run in members:
    for number, value in run.values.items():
      by_round[number].append(value)
  if not by_round:
    return []
  numbers = sorted(by_round)
  low, mean, high = (
    svg.smooth([of(by_round[number]) for number in numbers])
    for of in (min, statistics.fmean, max)
  )
  parts = []
  if len(members) > 1:
    edge = [*zip(numbers, high, strict=True)]
    edge += reversed([*zip(numbers, low, strict=True)])
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in edge)
    parts.append(f'<polygon points="{points}" fill="{colour}" opacity="0.15"/>')
  style = f'stroke-width="2.5" stroke-dasharray="{dash}"'
  points = [(x(a), y(b)) for a, b in zip(numbers, mean, strict=True)]
  return [*parts, svg.curve(points, colour, style)]


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; color: #1f2430; background: #fff; }}
svg {{ max-width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin-top: 1.5rem; white-space: nowrap; }}
th, td {{ padding: .3rem .8rem; text-align: left;
  border-bottom: 1px solid #e8e4db; }}
td {{ font-variant-numeric: tabular-nums; }}
tr.best td {{ font-weight: 600; background: #f1eee6; }}
</style>
<h1>{title}</h1>
{picture}
<p>Lines are means over the runs of a setting, moving over a twenty-fifth of the
rounds each way; bands reach from the least to the most of its seeds. The table
compares means over ten rounds, the best run first.</p>
<div class="scroll"><table>
{rows}
</table></div>
</html>
"""


def page(
  runs: Sequence[ComparedRun], metric: str, title: str, less: bool = False
) -> str:
  """Returns a self-contained HTML page; see `text` for the arguments."""
  head, *body = _table(runs, metric, less)
  rows = [_row("th", head)]
  for number, cells in enumerate(body):
    rows.append(_row("td", cells, ' class="best"' if not number else ""))
  return _PAGE.format(
    title=html.escape(title),
    picture=picture(runs, metric),
    rows="\n".join(rows),
  )


def _row(tag: str, cells: Sequence[str], style: str = "") -> str:
  inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
  return f"<tr{style}>{inner}</tr>"
