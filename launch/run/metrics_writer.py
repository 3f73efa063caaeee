"""Writes the metrics of a run as JSON lines, for TensorBoard and a tracker."""

import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from launch.cli import run_repair
from rl.loop import trackers
from rl.runtime import line_file

_FLUSH_S = 10.0


class MetricsWriter:
  """Appends one line for each round and each evaluation of a run.

  Files: metrics.jsonl, evaluations.jsonl and tensorboard/ in the directory of
  the run. The observer of the run calls `write` and `evaluation`, which flush.
  """

  def __init__(
    self,
    run_dir: pathlib.Path | str,
    *,
    first_round: int = 0,
    tracker: trackers.Tracker | None = None,
  ):
    """Opens the files, creating them and the directory as needed.

    Args:
      tracker: takes the same numbers; whoever opened it closes it.
      first_round: of this process. Lines of this round and later, from an
        earlier process, are dropped: a resumed run has each round once. So are
        evaluations from the round before on, which is evaluated again.
    """
    run_dir = pathlib.Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    last = first_round - 1
    row = cut_back(run_dir / "metrics.jsonl", first_round)
    cut_back(run_dir / "evaluations.jsonl", last)
    self._metrics = line_file.LineFile(run_dir / "metrics.jsonl")
    self._evaluations = line_file.LineFile(run_dir / "evaluations.jsonl")
    self._board = Board(run_dir / "tensorboard", max(0, last))
    # The purge drops the metrics of the last round with its evaluation.
    if row is not None and row["round"] == last:
      self._board.write(finite_numbers(row), last)
    self._trackers = [self._board, *([tracker] if tracker else ())]

  def write(self, round: int, metrics: Mapping[str, float]) -> None:
    """Appends the metrics of a finished round."""
    self._metrics.append([json_line(round, metrics)])
    self._scalars(metrics, round)

  def evaluation(
    self, round: int, metrics: Mapping[str, int | float | str]
  ) -> None:
    """Appends the result of an evaluation made after `round`."""
    self._evaluations.append([json_line(round, metrics)])
    self._scalars(
      {f"evaluation/{name}": value for name, value in metrics.items()}, round
    )

  def _scalars(self, row: Mapping[str, Any], round: int) -> None:
    numbers = finite_numbers(row)
    for tracker in self._trackers:
      tracker.write(numbers, round)

  def close(self) -> None:
    """Writes out what TensorBoard has not been shown."""
    self._board.close()


class Board:
  """The scalars of a run for TensorBoard.

  Written by the thread that calls: the queue of tensorboardX's own thread is
  never emptied again, and holds up whoever adds, once a disk is full.
  """

  def __init__(self, directory: pathlib.Path, purge_step: int):
    """Opens a new file.

    Args:
      purge_step: TensorBoard drops what older files have from this step on.
    """
    # Half a second that a process without metrics should not pay.
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    # Any: these make their names when they are imported.
    events: Any = event_pb2
    self._event, self._summary = events.Event, cast(Any, summary_pb2).Summary
    directory.mkdir(parents=True, exist_ok=True)
    self._writer = event_file_writer.EventsWriter(str(directory / "events"))
    session = events.SessionLog(status=events.SessionLog.START)
    self._write(step=purge_step, file_version="brain.Event:2")
    self._write(step=purge_step, session_log=session)
    self._due_s = 0.0

  def write(self, values: Mapping[str, float], step: int) -> None:
    """Appends values, and flushes every few seconds."""
    made = [
      self._summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
    ]
    self._write(step=step, summary=self._summary(value=made))
    if time.monotonic() >= self._due_s:
      self._writer.flush()
      self._due_s = time.monotonic() + _FLUSH_S

  def _write(self, **fields: Any) -> None:
    self._writer.write_event(self._event(wall_time=time.time(), **fields))

  def close(self) -> None:
    """Flushes what is left."""
    self._writer.close()


def json_line(
  number: int, metrics: Mapping[str, int | float | str], key: str = "round"
) -> str:
  """Returns a line of JSON; numbers that are not finite become null.

  Args:
    key: name of `number`.
  """
  # JSON has neither nan nor inf; parsers in other languages reject them.
  finite = {name: _finite(value) for name, value in metrics.items()}
  return json.dumps({key: number} | finite | {key: number})


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
  """Returns the metrics of a row that a tracker takes."""
  # TensorBoard warns about each value that is not finite.
  return {
    name: value
    for name, value in row.items()
    if isinstance(value, int | float) and math.isfinite(value)
  }


def _finite(value: float | str) -> float | str | None:
  if isinstance(value, str):
    return value
  return float(value) if math.isfinite(value) else None


def cut_back(
  path: pathlib.Path, first: int, key: str = "round"
) -> dict[str, Any] | None:
  """Cuts a file to the complete lines whose number is below `first`.

  Atomic: a kill leaves the old file or the new one. Memory is that of a line.

  Returns:
    The last kept row; None if there is none.
  """
  if not path.exists():
    return None
  last = b""

  def kept() -> Iterator[bytes]:
    nonlocal last
    for line, found in run_repair.numbered(path, key):
      if found is not None and found < first:
        last = line
        yield line

  run_repair.write(path, kept())
  return json.loads(last) if last else None
