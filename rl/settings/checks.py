"""What settings are refused for in the same words, wherever they stand."""

import difflib
import math
from collections.abc import Collection


def nearest(name: str, known: Collection[str]) -> str:
  """Returns "; did you mean X?", or nothing when no known name is near."""
  near = difflib.get_close_matches(name, sorted(known), 1)
  return f"; did you mean {near[0]}?" if near else ""


def check_seconds(where: str, value: float) -> None:
  """Raises ValueError on a time that is below 0, or never ends."""
  if not 0 <= value < math.inf:
    raise ValueError(f"{where}={value} is below 0, or never ends")
