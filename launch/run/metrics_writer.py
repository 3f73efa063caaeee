"""Writes the metrics of a run as JSON lines and for TensorBoard."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class MetricsWriter:
  """Appends one line for each round and each evaluation of a run.

  Files: metrics.jsonl, evaluations.jsonl and tensorboard/ in the directory of
  the run. The observer of the run calls `write` and `evaluation`, which flush.
  """

  def __init__(self, run_dir: pathlib.Path | str, *, first_round: int = 0):
    """Opens the files, creating them and the directory as needed.

    Args:
      first_round: of this process. Lines of this round and later, from an
        earlier process, are dropped: a resumed run has each round once. So are
        evaluations from the round before on, which is evaluated again.
    """
    # Half a second that a process without metrics should not pay.
    import tensorboardX

    run_dir = pathlib.Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    last = first_round - 1
    rows = cut_back(run_dir / "metrics.jsonl", first_round)
    cut_back(run_dir / "evaluations.jsonl", last)
    self._metrics = (run_dir / "metrics.jsonl").open("a")
    self._evaluations = (run_dir / "evaluations.jsonl").open("a")
    self._board: Any = tensorboardX.SummaryWriter(
      str(run_dir / "tensorboard"), purge_step=max(0, last), flush_secs=10
    )
    # The purge drops the metrics of the last round with its evaluation.
    for row in rows:
      if row["round"] == last:
        self._scalars(row, last)

  def write(self, round: int, metrics: Mapping[str, float]) -> None:
    """Appends the metrics of a finished round."""
    self._metrics.write(json_line(round, metrics))
    self._metrics.flush()
    self._scalars(metrics, round)

  def evaluation(
    self, round: int, metrics: Mapping[str, int | float | str]
  ) -> None:
    """Appends the result of an evaluation made after `round`."""
    self._evaluations.write(json_line(round, metrics))
    self._evaluations.flush()
    self._scalars(
      {f"evaluation/{name}": value for name, value in metrics.items()}, round
    )

  def _scalars(self, row: Mapping[str, Any], round: int) -> None:
    from tensorboardX.proto import summary_pb2

    protos: Any = summary_pb2  # It makes its names when it is imported.
    # One event for all: each goes through a queue and a thread.
    values = [
      protos.Summary.Value(tag=name, simple_value=value)
      for name, value in row.items()
      # TensorBoard warns about each value that is not finite.
      if isinstance(value, int | float) and math.isfinite(value)
    ]
    self._board.file_writer.add_summary(protos.Summary(value=values), round)

  def close(self) -> None:
    """Flushes and closes all files."""
    self._metrics.close()
    self._evaluations.close()
    self._board.close()


def json_line(
  number: int, metrics: Mapping[str, int | float | str], key: str = "round"
) -> str:
  """Returns a line of JSON; numbers that are not finite become null.

  Args:
    key: name of `number`.
  """
  # JSON has neither nan nor inf; parsers in other languages reject them.
  finite = {name: _finite(value) for name, value in metrics.items()}
  return json.dumps({key: number} | finite | {key: number}) + "\n"


def _finite(value: float | str) -> float | str | None:
  if isinstance(value, str):
    return value
  return float(value) if math.isfinite(value) else None


def cut_back(
  path: pathlib.Path, first: int, key: str = "round"
) -> list[dict[str, Any]]:
  """Cuts a file to the complete lines whose number is below `first`.

  Atomic: a kill leaves the old file or the new one.

  Returns:
    The kept rows; none if the file does not exist.
  """
  if not path.exists():
    return []
  lines = path.read_text().splitlines(keepends=True)
  kept = [line for line in lines if _is_before(line, first, key)]
  rewritten = path.with_suffix(".tmp")
  rewritten.write_text("".join(kept))
  os.replace(rewritten, path)
  return [json.loads(line) for line in kept]


def _is_before(line: str, first: int, key: str) -> bool:
  try:
    return json.loads(line)[key] < first
  except json.JSONDecodeError:  # A kill cut the line short.
    return False
