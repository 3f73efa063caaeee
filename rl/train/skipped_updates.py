"""Keeps the batches of updates that were not finite on disk, for diagnosis.

run/skipped/round_000012_update_0/
  batches.npz   every micro-batch of the update, column by column
  owners.json   the trajectories of their segments
  state/        the parameters that it met, as a checkpoint

`launch.replay` reads them. Rounds count from 1, as in metrics.jsonl and on the
screen: round 12 trains version 11. Updates count from 0 within their round, as
in events.jsonl.
"""

import dataclasses
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models import untrusted_files
from rl.data import batch as batch_lib
from rl.data import segment_index
from rl.runtime import checkpoint
from rl.train import train_state

BATCHES = "batches.npz"
"""Appears last, by a rename, so an update that has it is whole."""
_OWNERS = "owners.json"
_STATE = "state"
_UNFINISHED = "unfinished"
_MAX_BYTES = 8 << 30


class Unreadable(Exception):
  """The directory holds no whole skipped update."""


class SkippedUpdate(NamedTuple):
  """One update that changed nothing, and the parameters that it met.

  Attributes:
    params, critic: as in a `TrainState`.
    version: at which the batches were trained.
    number: of the update within its round.
    left_out_divisor: what the groups left out add to what the loss is
      divided by.
    owners: of the segments; of older runs they are not known.
  """

  batches: list[batch_lib.Batch]
  params: Any
  critic: Any
  version: int
  number: int
  left_out_divisor: float
  owners: Sequence[segment_index.Owner] = ()

  @property
  def round(self) -> int:
    """The round of the update, counted from 1."""
    return self.version + 1


@dataclasses.dataclass(frozen=True)
class Quarantine:
  """The directory of a run's skipped updates.

  Attributes:
    most: number of updates to keep, the newest: the last ones end a run.
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
    left_out_divisor: float = 0.0,
    owners: Sequence[segment_index.Owner] = (),
  ) -> pathlib.Path:
    """Writes a skipped update; returns its directory.

    It replaces one with the same name, which a run that goes on from an earlier
    checkpoint may meet again.

    Args:
      state: an update that is skipped has left it as it was.
      batches: one or more.
      version: at which they were trained; `number` of the update in its round.
      left_out_divisor, owners: see `SkippedUpdate`.
    """
    path = self.directory / name(version + 1, number)
    unfinished = self.directory / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    columns = {
      f"{i}/{name}": column
      for i, packed in enumerate(batches)
      for name, column in batch_lib.columns(packed).items()
    }
    np.savez_compressed(unfinished / BATCHES, allow_pickle=False, **columns)
    segment_index.write(unfinished / _OWNERS, owners)
    saved = checkpoint.Checkpoints(unfinished / _STATE, keep=1)
    try:
      host = {
        "version": version,
        "number": number,
        "left_out_divisor": left_out_divisor,
      }
      saved.save(0, _policy(state), host)
    finally:
      saved.close()
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    for old in updates(self.directory)[: -self.most]:
      shutil.rmtree(old)
    return path


def name(round_: int, number: int) -> str:
  """Returns the name of the directory of an update."""
  return f"round_{round_:06}_update_{number}"


def of_round(directory: pathlib.Path, round_: int) -> list[pathlib.Path]:
  """Returns the skipped updates of one round that are still kept, in order."""
  start = name(round_, 0).removesuffix("0")
  found = [x for x in updates(directory) if x.name.startswith(start)]
  return sorted(found, key=lambda path: int(path.name.removeprefix(start)))


def updates(directory: pathlib.Path) -> list[pathlib.Path]:
  """Returns the skipped updates of a directory, oldest first."""
  files = directory.glob(f"round_*/{BATCHES}")
  found = [(file.stat().st_mtime_ns, file.parent) for file in files]
  # Not by round alone: a run may have gone on from an earlier one.
  return [path for _, path in sorted(found)]


def read(path: pathlib.Path, abstract: train_state.TrainState) -> SkippedUpdate:
  """Returns a skipped update.

  Args:
    abstract: of the learner that it was for; see `learner.Learner.abstract`.

  Raises:
    Unreadable: none lies there, or it is damaged.
    checkpoint.Mismatch: it is of another model.
  """
  batches = _batches(path / BATCHES)
  try:
    owners = segment_index.read(path / _OWNERS)
  except ValueError as error:
    raise Unreadable(str(error)) from error
  saved = checkpoint.Checkpoints(path / _STATE, keep=1)
  try:
    found = saved.restore(_policy(abstract))
  finally:
    saved.close()
  if found is None:
    raise Unreadable(f"{path / _STATE} holds no parameters that can be read")
  try:
    return SkippedUpdate(
      batches,
      found.state["params"],
      found.state["critic"],
      version=int(found.host["version"]),
      number=int(found.host["number"]),
      left_out_divisor=float(found.host["left_out_divisor"]),
      owners=owners,
    )
  except (TypeError, ValueError, KeyError) as error:
    raise Unreadable(
      f"{path / _STATE} lacks the number of its round: {error!r}; copy it again"
    ) from error


def _policy(state: train_state.TrainState) -> dict[str, Any]:
  """Returns the part of a state that a gradient depends on."""
  return {"params": state.params, "critic": state.critic}


def _batches(file: pathlib.Path) -> list[batch_lib.Batch]:
  try:
    # A member of the archive is read, and its checksum compared, when asked.
    with (
      untrusted_files.open_regular(file) as opened,
      np.load(opened) as archive,
    ):
      size = sum(member.file_size for member in archive.zip.infolist())
      if size > _MAX_BYTES:
        raise ValueError(f"{size:,} bytes are more than {_MAX_BYTES:,}")
      columns = dict(archive)
    names = {name.partition("/")[0] for name in columns}
    batches = [_batch(columns, i) for i in range(len(names))]
    for batch in batches:
      batch_lib.check(batch)
    return batches
  except (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise Unreadable(f"{file} cannot be read: {error}") from error


def _batch(columns: Mapping[str, np.ndarray], index: int) -> batch_lib.Batch:
  start = f"{index}/"
  return batch_lib.of_columns(
    {
      name.removeprefix(start): column
      for name, column in columns.items()
      if name.startswith(start)
    }
  )
