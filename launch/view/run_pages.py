"""The data of one run's page, kept until its files change.

  files of a run --stamp--> changed? --> page.data, rows of trajectories
                            no: what is kept

Reading the log of a long run takes seconds, so while it grows it is read again
only after ten times as long as reading it took.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.cli import workdir
from launch.report import page, trajectory_index
from launch.view import runs
from rl.runtime import segments

_REST = 10.0
_MAX_KEPT = 4
_LOG = "events.jsonl"
_READ = (
  "config.json",
  "metrics.jsonl",
  "evaluations.jsonl",
  "spans.jsonl",
  "logprob_gap.jsonl",
  workdir.WARM_START_LINES,
  workdir.FAILURE,
)

Clock = Callable[[], float]


@dataclasses.dataclass(eq=False)
class _Kept:
  """The kept data of one run.

  Attributes:
    due_s: reading of the clock before which it is not read again.
    version: grows each time that it is read.
    rows: of each file of trajectories, with its stamp and the lines left out.
    records: with their stamps, until the log of the run is read.
  """

  stamps: Any = None
  due_s: float = 0.0
  version: int = 0
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  used: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
  rows: dict[int, tuple[Any, list[trajectory_index.Row], int]] = (
    dataclasses.field(default_factory=dict)
  )
  records: tuple[Any, page.RunRecords] | None = None


class RunPages:
  """Data of the pages of some runs; one thread at a time calls its methods."""

  def __init__(self, clock: Clock = time.monotonic):
    self._clock = clock
    self._kept: dict[pathlib.Path, _Kept] = {}

  def data(self, path: pathlib.Path, *, log: bool = True) -> dict[str, Any]:
    """Returns the data of a run's page; the same object until it changes.

    Args:
      log: False does not wait for the log to be read: unless it was before, the
        page says that it is being read.
    """
    kept = self._kept_of(path)
    if log or kept.stamps is not None:
      return self._read(path).data
    run = _records(kept, path)
    notes = [*run.notes, "The event log is being read."]
    return page.data(dataclasses.replace(run, notes=notes))

  def index(self, path: pathlib.Path) -> dict[str, Any]:
    """Returns the rows of all recorded trajectories, oldest first.

    Which members were trained is known once `data` has read the log.
    """
    kept = self._kept_of(path)
    files = trajectory_index.files(path)
    rows, odd = [], 0
    fresh = {}
    # The newest rounds are those of a run that is looked at.
    for number, file in sorted(files.items(), reverse=True):
      seen = runs.stamp(file), kept.version
      before = kept.rows.get(number)
      if before is None or before[0] != seen:
        try:
          before = (seen, *trajectory_index.rows(file, number, kept.used))
        except OSError:
          continue
      fresh[number] = before
      odd += before[2]
      rows.append(before[1])
      if sum(map(len, rows)) >= trajectory_index.MAX_ROWS:
        break
    kept.rows = fresh
    return {
      "columns": trajectory_index.COLUMNS,
      "rows": [row for part in reversed(rows) for row in part],
      "is_sample": False,
      "odd": odd,
    }

  def detail(
    self, path: pathlib.Path, round_: int, offset: int
  ) -> dict[str, Any]:
    """Returns one trajectory.

    Raises:
      NoTrajectory: there is none.
    """
    file = trajectory_index.files(path).get(round_)
    if file is None:
      raise trajectory_index.NoTrajectory(f"round {round_} has no trajectories")
    return trajectory_index.detail(file, round_, offset)

  def _kept_of(self, path: pathlib.Path) -> _Kept:
    kept = self._kept.pop(path, None) or _Kept()
    # The last one is the one that was asked for last.
    self._kept[path] = kept
    if len(self._kept) > _MAX_KEPT:
      del self._kept[next(iter(self._kept))]
    return kept

  def _read(self, path: pathlib.Path) -> _Kept:
    kept = self._kept_of(path)
    stamps = [_stamps(path / name) for name in (*_READ, _LOG)]
    if stamps == kept.stamps or self._clock() < kept.due_s:
      return kept
    start_s = self._clock()
    run = page.with_log(_records(kept, path))
    kept.records = None  # The spans of a long run take much memory.
    now_s = self._clock()
    kept.data = page.data(run)
    used = run.verdict.census.used if run.verdict else {}
    # Rows of a round are read again only if more is known of its members.
    if used != kept.used:
      kept.used = used
      kept.version += 1
    kept.stamps = stamps
    kept.due_s = now_s + _REST * (now_s - start_s)
    return kept


def _records(kept: _Kept, path: pathlib.Path) -> page.RunRecords:
  """Returns all of a run but its log, read once while nothing changes."""
  stamps = [_stamps(path / name) for name in _READ]
  if kept.records is None or kept.records[0] != stamps:
    kept.records = stamps, page.read(path, log=False)
  return kept.records[1]


def _stamps(path: pathlib.Path) -> list[Any]:
  """Returns what changes with a file or its closed segments."""
  try:
    closed = segments.closed(path)
  except segments.Damaged:  # The page says so.
    closed = []
  return [runs.stamp(file) for file in (path, *closed)]
