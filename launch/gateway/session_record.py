"""The file to which a server appends the trajectories of its sessions."""

import contextlib
import json
import os
from collections.abc import Sequence

from rl.data import trajectory
from rl.settings import annotations


class Unrecorded(RuntimeError):
  """Trajectories cannot be written; none of them is in the file."""


class SessionRecord:
  """Appends trajectories as JSON lines, whole or not at all.

  Only the user of the server may read a file that it creates. It may also be a
  pipe, which `line_file.LineFile` could not read. A last line that a crash has
  cut is ended first. `keep` is called for each session, `close` once.

  Raises:
    SettingError: the file cannot be written.
  """

  def __init__(self, path: str | os.PathLike[str]):
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
      self._file = os.open(path, flags, 0o600)
      if os.fstat(self._file).st_size and not _ends_a_line(path):
        os.write(self._file, b"\n")
    except OSError as error:
      raise annotations.SettingError(
        f"--record={path} cannot be written: {error.strerror}"
      ) from error

  def keep(self, branches: Sequence[trajectory.Trajectory]) -> None:
    """Writes the trajectories of one session.

    Raises:
      Unrecorded: the disk is full, or gone.
    """
    lines = [json.dumps(trajectory.trajectory_to_json(t)) for t in branches]
    rest = "".join(f"{line}\n" for line in lines).encode()
    size = os.fstat(self._file).st_size
    try:
      while rest:
        rest = rest[os.write(self._file, rest) :]
    except OSError as error:
      with contextlib.suppress(OSError):
        os.ftruncate(self._file, size)
      raise Unrecorded(
        f"the session cannot be recorded, and stays open: {error.strerror}"
      ) from error

  def close(self) -> None:
    """Closes the file."""
    os.close(self._file)


def _ends_a_line(path: str | os.PathLike[str]) -> bool:
  with open(path, "rb") as file:
    file.seek(-1, os.SEEK_END)
    return file.read() == b"\n"
