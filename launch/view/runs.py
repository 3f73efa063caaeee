"""All runs below a directory: found, read as they grow, and told as JSON.

RunsDirectory.look -> ViewedRun (one for each config.json) -> overview, curves
"""

import json
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib import parse

from launch.cli import workdir
from launch.report import comparison, metric_docs, run_files, thinning
from launch.run import status_server
from launch.view import followed_rows
from models import untrusted_files

MAX_RUNS = 1000
"""Runs that a page lists: those that come first by name."""

_MAX_DEPTH = 4
_MAX_POINTS = 2000
_FROZEN_VALUES, _MIN_FROZEN = 1_000_000, 50
_CONFIG = "config.json"
_EVALUATED_S = f"{comparison.EVALUATION}time_s"
_FIRST = ("success", "reward_mean")
_AXES = ("rounds", "tokens", "time")
_REPORT = "report.html"
_NO_METRICS = (
  *("round", f"{comparison.EVALUATION}round"),
  *(f"{comparison.WARM_START}{name}" for name in ("step", "time_s")),
)


class ViewedRun:
  """One run, read again when its files have changed.

  Attributes:
    name: its path below the directory; that of the directory itself if it is
      one run.
  """

  def __init__(self, name: str, path: pathlib.Path):
    self.name = name
    self.path = path
    self._metrics = followed_rows.FollowedRows(path / "metrics.jsonl")
    steps = path / workdir.WARM_START_LINES
    self._steps = followed_rows.FollowedRows(steps, "step")
    self._evaluations = followed_rows.FollowedRows(path / "evaluations.jsonl")
    self._rows: tuple[Any, dict[int, dict[str, Any]]] | None = None
    self._settings: dict[str, str] = {}
    self._rounds: int | None = None
    self._num_steps: int | None = None
    self._seen: tuple[int, int] | None = None
    self._curve: tuple[Any, dict[str, Any]] | None = None
    self._all_metrics: tuple[Any, dict[str, Any]] | None = None

  @property
  def is_tuning(self) -> bool:
    """True if it is to have no rounds: the steps of its warm start are all."""
    return comparison.is_tuning(self.settings())

  @property
  def metrics(self) -> followed_rows.FollowedRows:
    """Rows of its rounds or, in fine-tuning, of its steps."""
    return self._steps if self.is_tuning else self._metrics

  def rows(self) -> dict[int, dict[str, Any]]:
    """Returns the metrics by round, with those of evaluations after it.

    See `comparison.with_evaluations` and `of_steps`.
    """
    is_tuning, ours, theirs = self.is_tuning, self.metrics, self._evaluations
    metrics, evaluations = ours.look(), theirs.look()
    key = is_tuning, ours.changes, theirs.changes
    if self._rows is None or self._rows[0] != key:
      join = comparison.of_steps if is_tuning else comparison.with_evaluations
      self._rows = key, join(metrics, evaluations)
    return self._rows[1]

  def names(self) -> list[str]:
    """Returns the names of the metrics that some round has."""
    self.rows()
    start = comparison.WARM_START if self.is_tuning else ""
    ours, theirs = self.metrics.names, self._evaluations.names
    found = [f"{start}{name}" for name in ours]
    found += [f"{comparison.EVALUATION}{name}" for name in theirs]
    return [name for name in found if name not in _NO_METRICS]

  def curve(
    self, metric: str, less: bool, most: int = _MAX_POINTS
  ) -> dict[str, Any]:
    """Returns a metric over all axes, and its last and best mean.

    The newest answer is kept until there are more rows.

    Args:
      less: less of it is better.
      most: points of the curve.
    """
    rows = self.rows()
    assert self._rows is not None
    key = metric, less, most, self._rows[0]
    if self._curve is None or self._curve[0] != key:
      compared = self.compared(comparison.values_of(rows, metric), metric)
      axes = places(rows)
      values = [compared.values.get(number) for number in axes["rounds"]]
      self._curve = (
        key,
        {
          **{x: thinning.places(column, most) for x, column in axes.items()},
          "values": thinning.values(metric, values, most),
          "last": compared.last,
          "best": compared.best(less),
        },
      )
    return self._curve[1]

  def all_metrics(self) -> dict[str, Any]:
    """Returns all metrics over all axes; kept until there are more rows."""
    rows = self.rows()
    assert self._rows is not None
    if self._all_metrics is None or self._all_metrics[0] != self._rows[0]:
      self._all_metrics = self._rows[0], _all_metrics(rows, self.names())
    return self._all_metrics[1]

  def frozen(self, metrics: Mapping[str, bool], most: int) -> dict[str, Any]:
    """Returns the curves of all metrics, and the last and best mean of each.

    Args:
      metrics: names, and whether less of each is better.
      most: points of a curve.
    """
    curves = {
      name: self.curve(name, less, most) for name, less in metrics.items()
    }
    known = {
      name: curve for name, curve in curves.items() if curve["last"] is not None
    }
    axes = next(iter(curves.values()))
    return {
      **{axis: axes[axis] for axis in _AXES},
      "metrics": {name: curve["values"] for name, curve in known.items()},
      "last": {name: curve["last"] for name, curve in known.items()},
      "best": {name: curve["best"] for name, curve in known.items()},
    }

  def compared(
    self, values: Mapping[int, float], metric: str = ""
  ) -> comparison.ComparedRun:
    """Returns the run as `comparison` has it, with values of a metric."""
    return comparison.ComparedRun(
      name=self.name,
      settings=self.settings(),
      values=values,
      rounds=len(self.metrics.look()),
      note=comparison.remark(self.path),
      width=comparison.width(metric),
    )

  def settings(self) -> dict[str, str]:
    """Returns the leaves of its config.json as text, by dotted name."""
    self._read_config()
    return self._settings

  @property
  def rounds(self) -> int | None:
    """Rounds that it is to have, or else steps; None where nothing says."""
    return self._rounds or self._num_steps

  def _read_config(self) -> None:
    file = self.path / _CONFIG
    seen = stamp(file)
    if seen == self._seen:
      return
    self._seen = seen
    try:
      config = run_files.settings(self.path)
      self._settings = comparison.settings_of(config)
    except (untrusted_files.BadFile, RecursionError):
      config, self._settings = {}, {}
    rounds = config.get("rounds")
    self._rounds = rounds if isinstance(rounds, int) else None
    steps = self._settings.get("warm_start.steps", "")
    self._num_steps = int(steps) if steps.isdecimal() else None

  def state(self, newest: int) -> str:
    """Returns "running", "failed", "ended" or "stopped".

    Args:
      newest: round that it has trained.
    """
    if is_alive(self.path):
      return "running"
    if workdir.failure(self.path):
      return "failed"
    is_over = self._rounds is not None and newest >= self._rounds
    if self.is_tuning:  # With its last step it gets a checkpoint of rounds.
      is_over = bool(workdir.checkpoints(self.path))
    return "ended" if is_over else "stopped"


def stamp(path: pathlib.Path) -> tuple[int, int] | None:
  """Returns what changes with the content of a file; None without one."""
  try:
    found = path.stat()
  except OSError:
    return None
  return found.st_mtime_ns, found.st_size


def is_alive(run_dir: pathlib.Path) -> bool:
  """Returns whether a process of this host works on a run.

  Its file is only read: nothing is sent to an address that a directory of
  somebody else names.
  """
  try:
    text = untrusted_files.read_text(run_dir / status_server.FILE, 4096)
    where = json.loads(text)
    if where["host"] != socket.gethostname():
      return False
    pid = int(where["pid"])
    if pid <= 0:  # A group of processes.
      return False
    os.kill(pid, 0)
  except PermissionError:
    return True
  except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
    return False
  return True


class RunsDirectory:
  """The runs below a directory; `look` finds those of now.

  Any thread may look; one at a time calls the other methods.
  """

  def __init__(self, root: pathlib.Path):
    self.root = root
    self._runs: dict[str, ViewedRun] = {}
    self._left_out = 0
    self._docs = metric_docs.entries()

  def look(self) -> Mapping[str, ViewedRun]:
    """Returns the runs of now by their names, in order."""
    everything = sorted(_directories(self.root))
    found = dict(everything[:MAX_RUNS])
    self._left_out = len(everything) - len(found)
    self._runs = {
      name: self._runs.get(name) or ViewedRun(name, path)
      for name, path in found.items()
    }
    return self._runs

  def overview(self) -> dict[str, Any]:
    """Returns the data of the table of runs."""
    runs = self.look()
    compared = [run.compared({}) for run in runs.values()]
    names = comparison.differing(compared)
    groups = {
      run.name: group
      for group, members in comparison.groups(compared).items()
      for run in members
    }
    is_tuning = bool(runs) and all(run.is_tuning for run in runs.values())
    rows, metrics = [], dict.fromkeys(() if is_tuning else _FIRST)
    for run, seen in zip(runs.values(), compared, strict=True):
      newest = max(run.metrics.look(), default=0)
      metrics |= dict.fromkeys(run.names())
      rows.append(
        {
          "name": run.name,
          "state": run.state(newest),
          "round": newest,
          "rounds": run.rounds,
          "group": groups[run.name],
          "settings": {
            key: seen.settings[key] for key in names if key in seen.settings
          },
          "note": seen.note,
        }
      )
    return {
      "title": self.root.resolve().name,
      "runs": rows,
      "left_out": self._left_out,
      "differing": names,
      "is_tuning": is_tuning,
      "metrics": list(metrics),
    }

  def curves(self, metric: str) -> dict[str, Any]:
    """Returns a metric of every run, over rounds, tokens and seconds."""
    entry = self._entry(metric)
    less = _is_less(entry)
    runs = {name: run.curve(metric, less) for name, run in self.look().items()}
    return {"runs": runs, "meaning": "" if entry is None else str(entry)}

  def frozen(self, metric: str, less: bool) -> dict[str, Any]:
    """Returns all data of the pages over runs, for a page of its own.

    Curves of many runs have fewer points. A run that has a report links to it.

    Args:
      metric: that comes first.
      less: less of it is better.
    """
    table = self.overview()
    names = list(dict.fromkeys([metric, *table["metrics"]]))
    num_curves = max(1, len(names) * len(self._runs))
    most = max(_MIN_FROZEN, min(_MAX_POINTS, _FROZEN_VALUES // num_curves))
    runs = {
      name: run.frozen(
        {
          key: less if key == metric else _is_less(self._entry(key))
          for key in names
        },
        most,
      )
      for name, run in self._runs.items()
    }
    for row in table["runs"]:
      page = self._runs[row["name"]].path / _REPORT
      if page.is_file():
        row["page"] = parse.quote(page.relative_to(self.root).as_posix())
    return {
      "table": {
        **table,
        "metrics": names,
        "sort": {"key": "best", "down": not less},
      },
      "runs": runs,
      "meanings": metric_docs.explain(names),
    }

  def _entry(self, metric: str) -> metric_docs.MetricEntry | None:
    return next((row for row in self._docs if row.matches(metric)), None)

  def metrics_of(self, name: str) -> dict[str, Any]:
    """Returns all metrics of a run; KeyError if there is no such run."""
    return self.look()[name].all_metrics()


def _directories(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields name and path of each run; links are not followed."""
  if run_files.is_run(root):
    yield root.resolve().name, root
    return
  level = [root]
  for _ in range(_MAX_DEPTH):
    level, above = [], level
    for directory in above:
      for path in _subdirectories(directory):
        if run_files.is_run(path):
          yield path.relative_to(root).as_posix(), path
        else:
          level.append(path)


def _subdirectories(directory: pathlib.Path) -> list[pathlib.Path]:
  try:
    with os.scandir(directory) as entries:
      return [
        pathlib.Path(entry.path)
        for entry in entries
        if entry.is_dir(follow_symlinks=False)
        and not entry.name.startswith(".")
      ]
  except OSError:
    return []


def _all_metrics(
  rows: Mapping[int, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, Any]:
  axes = places(rows)
  columns = {
    key: thinning.values(
      key,
      [_number(rows[number].get(key)) for number in axes["rounds"]],
      _MAX_POINTS,
    )
    for key in keys
  }
  return {
    **{x: thinning.places(column, _MAX_POINTS) for x, column in axes.items()},
    "metrics": columns,
    "last": {
      key: comparison.last_mean(
        comparison.values_of(rows, key), comparison.width(key)
      )
      for key in keys
    },
    "meanings": metric_docs.explain(list(columns)),
  }


def places(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Returns the places of all rounds on the axes of a curve.

  Those are "rounds", "tokens" that were sampled until then, and the "time" in
  seconds, without the pauses between two processes of one run.
  """
  numbers = sorted(rows)
  tokens, total = [], 0.0
  for number in numbers:
    total += _number(rows[number].get("sampled_tokens")) or 0.0
    tokens.append(total)
  return {
    "rounds": numbers,
    "tokens": tokens,
    "time": [
      _number(rows[number].get("time_s", rows[number].get(_EVALUATED_S)))
      for number in numbers
    ],
  }


def _number(value: Any) -> float | None:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return float(f"{value:.6g}") if is_number else None


def _is_less(entry: metric_docs.MetricEntry | None) -> bool:
  """Returns whether less of a metric is better."""
  return entry is not None and entry.less_is_better
