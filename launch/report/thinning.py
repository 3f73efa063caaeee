"""Curves of few points, each the mean of some rounds at the place of the last.

rounds    1  2  3  4  5  6  7
places    1        4        7    of at most three points
values    1     2..4     5..7
"""

import math
from collections.abc import Sequence
from typing import Any

_PLACES = ("round", "time_s")


def every(count: int, most: int) -> int:
  """Returns the rounds of a point; the first may have fewer.

  Args:
    most: points.
  """
  return -(-count // most) or 1


def places(column: Sequence[Any], most: int) -> list[Any]:
  """Returns the last value of each point."""
  # From the end, so that the newest point stands for as many as the others.
  return list(column[:: -every(len(column), most)])[::-1]


def values(
  metric: str, column: Sequence[float | None], most: int
) -> list[float | None]:
  """Returns the mean of each point with six digits; None where all are None.

  A metric that counts rounds or seconds is a place, and no mean of places.
  """
  if metric.rpartition("/")[2] in _PLACES:
    return places(column, most)
  step = every(len(column), most)
  ends = range(len(column), 0, -step)[::-1]
  return [_mean(column[max(0, end - step) : end]) for end in ends]


def _mean(values: Sequence[float | None]) -> float | None:
  known = [x for x in values if x is not None]
  return float(f"{mean(known):.6g}") if known else None


def mean(values: Sequence[float]) -> float:
  """Returns the mean of some numbers, also of some whose sum is no float."""
  return math.fsum(x / len(values) for x in values)
