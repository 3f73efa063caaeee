"""A stream that says it is a terminal, and a clock for what it shows."""

import io


class Terminal(io.StringIO):
  """Keeps what is written, as any of these."""

  def isatty(self) -> bool:
    """Returns True."""
    return True


class Clock:
  """Stands still at `now_s`."""

  now_s = 0.0

  def __call__(self) -> float:
    """Returns that time."""
    return self.now_s
