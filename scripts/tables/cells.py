"""Parts of tables that several modules write."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Rows = Iterator[Sequence[str]]
Table = Callable[[Mapping[str, Any]], Rows]
"""From a file of benchmarks/results to rows, the head first.

Its name, which is that of the table, begins with that of the file.
"""


def signed(share: float) -> str:
  """Returns "+3.5 %" of 0.035."""
  return f"{100 * share:+.1f} %" if share else "0 %"


def ratio_range(row: Mapping[str, float], name: str = "ratio") -> str:
  """Returns the least and the most of a ratio, "0.95 to 1.10"."""
  return f"{row[f'{name} min']:.2f} to {row[f'{name} max']:.2f}"
