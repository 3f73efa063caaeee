"""Lines of a log, with the time of day at which they are printed."""

import sys
import time
from typing import TextIO


def time_of_day() -> str:
  """Returns the local time, as in "09:30:00"."""
  return time.strftime("%H:%M:%S")


def stamped(text: str, time: str) -> str:
  """Returns a text whose lines all begin with a time."""
  return "\n".join(f"{time} {line}" for line in text.split("\n"))


def tell(text: str, stream: TextIO | None = None) -> None:
  """Prints a text: as it is on a terminal, with times in a log file.

  Args:
    stream: None is stderr.
  """
  target = stream or sys.stderr
  lines = text if target.isatty() else stamped(text, time_of_day())
  print(lines, file=target, flush=True)
