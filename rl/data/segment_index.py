"""Maps each packed segment to its task, group and member."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from models import untrusted_files
from rl.data import batch as batch_lib
from rl.data import trajectory

_MAX_BYTES = 256 * untrusted_files.MIB


class Owner(NamedTuple):
  """The trajectory of one segment.

  Attributes:
    batch: of the update.
    task, group, member: see `trajectory.Trajectory`.
  """

  batch: int
  row: int
  segment: int
  task: str
  group: int
  member: int

  def __str__(self) -> str:
    return f"group {self.group} member {self.member} of {self.task}"


def of(
  packed: batch_lib.Packed,
  members: Sequence[trajectory.Trajectory],
  *,
  first: int = 0,
) -> Iterator[Owner]:
  """Yields the owner of every segment in which something was sampled.

  Args:
    members: the packed trajectories, in order.
    first: number of the first of these batches within the update.
  """
  for place, member in zip(packed.places, members, strict=True):
    if place is not None and len(place.index):
      segments = packed.batches[place.batch].segments
      yield Owner(
        first + place.batch,
        place.row,
        int(segments[place.row, place.index[0]]),
        member.task_id,
        member.group_id,
        member.index,
      )


def write(file: pathlib.Path, owners: Sequence[Owner]) -> None:
  """Writes them as JSON, a list for each."""
  file.write_text(json.dumps([list(owner) for owner in owners]))


def read(file: pathlib.Path) -> list[Owner]:
  """Reads the file of `write`; returns an empty list if it is missing.

  Raises:
    ValueError: the file holds something else.
  """
  if not file.exists():
    return []
  rows = untrusted_files.read_json(file, _MAX_BYTES)
  fields = Owner.__annotations__.values()
  if not isinstance(rows, list):
    raise ValueError(f"{file} must hold a list of owners; copy it again")
  for row in rows:
    if not isinstance(row, list) or [type(x) for x in row] != [*fields]:
      raise ValueError(
        f"{file} holds {row!r:.80}, which is no owner "
        f"({', '.join(Owner._fields)}); copy it again"
      )
  return [Owner(*row) for row in rows]
