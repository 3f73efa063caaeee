"""The disk of a run, which may be full, read-only or gone: errors and words."""

import errno
import pathlib
import shutil

_ERRORS = {
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EFBIG,
  errno.EROFS,
  errno.EIO,
  errno.ESTALE,
  errno.ENODEV,
  errno.EMFILE,
  errno.ENFILE,
}


def is_cause(error: OSError, directory: pathlib.Path) -> bool:
  """Returns True if the disk that holds a directory made a write fail."""
  return error.errno in _ERRORS or not directory.exists()


def failure(error: OSError, directory: pathlib.Path) -> str:
  """Returns a sentence about a write below a directory that failed."""
  where = error.filename or directory
  return f"{where} cannot be written: {error.strerror}{room(directory)}"


def check_room(directory: pathlib.Path, num_bytes: int) -> None:
  """Raises OSError if files of so many bytes do not fit into a directory."""
  if num_bytes > shutil.disk_usage(directory).free:
    why = f"no space left for {num_bytes / 1e6:,.1f} MB"
    raise OSError(errno.ENOSPC, why, str(directory))


def room(directory: pathlib.Path) -> str:
  """Returns how much of the disk is free, to follow a reason; "" if unknown."""
  try:
    usage = shutil.disk_usage(directory)
  except OSError:
    return f"; {directory} is gone"
  free, total = usage.free / 1e6, usage.total / 1e6
  return f"; {free:,.1f} of {total:,.1f} MB are free there"
