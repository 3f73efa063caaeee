"""Batches whose loss or gradient was not finite, on disk, for a post mortem.

run/skipped/round_000012_update_0/
  batches.npz   every micro-batch of the update, column by column
  state/        the parameters that it met, as a checkpoint

`launch.replay` reads them.
"""

import dataclasses
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rl import batch as batch_lib
from rl import checkpoint, train_state

BATCHES = "batches.npz"
"""Whoever has it has all of an update: it appears whole, by a rename."""
_STATE = "state"
_UNFINISHED = "unfinished"


class Unreadable(Exception):
  """No whole skipped update lies there."""


class Kept(NamedTuple):
  """What was put away.

  Attributes:
    params, critic: those that the batches met, as a `TrainState` has them.
    version: that they were trained at.
    number: of the update within its round.
    masked: what groups that teach nothing add to what the loss is divided by.
  """

  batches: list[batch_lib.Batch]
  params: Any
  critic: Any
  version: int
  number: int
  masked: float


@dataclasses.dataclass(frozen=True)
class Quarantine:
  """The directory of a run's skipped updates.

  Attributes:
    most: so many updates are kept, the newest: the last ones end a run.
  """

  directory: pathlib.Path
  most: int = 2

  def __post_init__(self):
    """Raises ValueError when nothing could be kept."""
    if self.most < 1:
      raise ValueError(f"most={self.most} keeps no update; use 1 or more")

  def keep(
    self,
    state: train_state.TrainState,
    batches: Sequence[batch_lib.Batch],
    version: int,
    number: int,
    masked: float = 0.0,
  ) -> pathlib.Path:
    """Writes a skipped update; returns where.

    It takes the place of one with the same name, which a run that goes on from
    an earlier checkpoint may meet again.

    Args:
      state: an update that is skipped has left it as it was.
      batches: one or more.
      masked: see `Kept`.
    """
    path = self.directory / f"round_{version:06}_update_{number}"
    unfinished = self.directory / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    columns = {
      f"{i}/{name}": column
      for i, packed in enumerate(batches)
      for name, column in _columns(packed)
    }
    np.savez_compressed(unfinished / BATCHES, allow_pickle=False, **columns)
    saved = checkpoint.Checkpoints(unfinished / _STATE, keep=1)
    try:
      host = {"version": version, "number": number, "masked": masked}
      saved.save(0, _policy(state), host)
    finally:
      saved.close()
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    for old in kept(self.directory)[: -self.most]:
      shutil.rmtree(old)
    return path


def kept(directory: pathlib.Path) -> list[pathlib.Path]:
  """Returns the skipped updates of a directory, oldest first."""
  files = directory.glob(f"round_*/{BATCHES}")
  # Not by round: a run may have gone on from an earlier one.
  return [x.parent for x in sorted(files, key=lambda x: x.stat().st_mtime_ns)]


def read(path: pathlib.Path, abstract: train_state.TrainState) -> Kept:
  """Returns a skipped update.

  Args:
    abstract: of the learner that it was for; see `learner.Learner.abstract`.

  Raises:
    Unreadable: none lies there, or it is damaged.
    checkpoint.Mismatch: it is of another model.
  """
  batches = _batches(path / BATCHES)
  saved = checkpoint.Checkpoints(path / _STATE, keep=1)
  try:
    found = saved.restore(_policy(abstract))
  finally:
    saved.close()
  if found is None:
    raise Unreadable(f"{path / _STATE} holds no parameters that can be read")
  return Kept(
    batches, found.state["params"], found.state["critic"], **found.host
  )


def _policy(state: train_state.TrainState) -> dict[str, Any]:
  """Returns what a gradient depends on."""
  return {"params": state.params, "critic": state.critic}


def _columns(packed: batch_lib.Batch) -> Iterator[tuple[str, np.ndarray]]:
  for name, column in packed._asdict().items():
    if name == "prefix" and column is not None:
      for part, own in column._asdict().items():
        yield f"prefix/{part}", np.asarray(own)
    elif column is not None:
      yield name, np.asarray(column)


def _batches(file: pathlib.Path) -> list[batch_lib.Batch]:
  try:
    # A member of the archive is read, and its checksum compared, when asked.
    with np.load(file) as archive:
      columns = dict(archive)
    count = 1 + max(int(name.partition("/")[0]) for name in columns)
    return [_batch(columns, i) for i in range(count)]
  except (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise Unreadable(f"{file} cannot be read: {error}") from error


def _batch(columns: Mapping[str, np.ndarray], index: int) -> batch_lib.Batch:
  start = f"{index}/"
  own = {
    name.removeprefix(start): column
    for name, column in columns.items()
    if name.startswith(start)
  }
  parts = {
    name.removeprefix("prefix/"): own.pop(name)
    for name in list(own)
    if name.startswith("prefix/")
  }
  prefix = batch_lib.Prefix(**parts) if parts else None
  return batch_lib.Batch(**own, prefix=prefix)
