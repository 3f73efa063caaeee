"""The files of a run as arrays, for notebooks and scripts of one's own.

run = run_data.read("runs/lake")
run.metrics["success"]           an array, one value for each round
pandas.DataFrame(run.metrics)    the same as a table
run.trajectories(11)             the episodes kept of round 11
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.cli import workdir
from launch.report import run_files, trajectory_index
from models import untrusted_files
from rl.settings import overrides

Columns = Mapping[str, np.ndarray]
"""Arrays of one length by name: float64, nan where a row has no number; or
objects, where some row has a text."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunData:
  """The records of a run so far.

  Attributes:
    settings: each leaf of config.json as text, by its dotted name.
    metrics: of the rounds, in order; docs/metrics.md explains the names.
    evaluations: in order of the versions that were evaluated.
    warm_start: of its steps, in order.
    notes: sentences about files and lines that could not be read.
  """

  path: pathlib.Path
  settings: Mapping[str, str]
  metrics: Columns
  evaluations: Columns
  warm_start: Columns
  notes: Sequence[str] = ()

  def trajectories(self, round: int) -> list[dict[str, Any]]:
    """Returns the episodes that were kept of a round, none of most rounds.

    Raises:
      KeyError: none were kept; the message lists the rounds that have some.
    """
    kept = trajectory_index.files(self.path)
    if round not in kept:
      known = ", ".join(map(str, sorted(kept)))
      raise KeyError(f"no episodes of round {round}; there are: {known}")
    return list(run_files.lines(kept[round], [], turns=list))


def read(path: str | os.PathLike) -> RunData:
  """Returns the data of a run, whether it has ended or not.

  Raises:
    ValueError: the directory holds no run.
  """
  directory = pathlib.Path(path)
  workdir.check_exists(directory)
  try:
    config = run_files.settings(directory)
  except untrusted_files.BadFile as error:
    raise ValueError(f"{directory} is no run: {error}") from error
  notes: list[str] = []
  # Files that these settings rule out are not missing.
  of_rounds = notes if config.get("rounds") != 0 else []
  of_steps = notes if config.get("warm_start") else []
  steps = directory / workdir.WARM_START_LINES
  return RunData(
    path=directory,
    settings=overrides.flat(config),
    metrics=_columns(directory / "metrics.jsonl", of_rounds),
    evaluations=_columns(directory / "evaluations.jsonl", of_rounds),
    warm_start=_columns(steps, of_steps, "step"),
    notes=notes,
  )


def _columns(
  path: pathlib.Path, notes: list[str], key: str = "round"
) -> Columns:
  rows = run_files.numbered(path, notes, key).values()
  names = dict.fromkeys(name for row in rows for name in row)
  return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: Sequence[Any]) -> np.ndarray:
  if any(isinstance(value, str) for value in values):
    return np.array(values, dtype=object)
  numbers = [x if isinstance(x, int | float) else np.nan for x in values]
  return np.array(numbers, dtype=np.float64)
