"""Explanations of metrics, read from the tables of docs/metrics.md.

A wheel has that page beside this file.
"""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_HERE = pathlib.Path(__file__)
_PLACES = (
  _HERE.parents[2] / "docs" / "metrics.md",
  _HERE.with_name("metrics.md"),
)
PAGE = next((page for page in _PLACES if page.is_file()), _PLACES[0])
_HEAD = ("name", "unit", "formula", "meaning", "worse")
_NUMBER = "k"
_WORSE = {
  "↑": "Worse when higher.",
  "↓": "Worse when lower.",
  "↕": "Worse when away from its usual value.",
}


class MetricEntry(NamedTuple):
  """One row of a table.

  Attributes:
    name: of a metric or of many: `<k>` stands for a number, `<other>` for any
      text.
    worse: an arrow; "–" where neither direction is worse.
  """

  name: str
  unit: str
  formula: str
  meaning: str
  worse: str

  def matches(self, metric: str) -> bool:
    """True when the row explains a metric."""
    return re.fullmatch(_pattern(self.name), metric) is not None

  @property
  def less_is_better(self) -> bool:
    """True where more is worse."""
    return self.worse == "↑"

  def __str__(self) -> str:
    fields = {"Formula": self.formula, "Unit": self.unit}
    sentences = [
      f"{self.meaning[0].upper()}{self.meaning[1:]}.",
      *(f"{name}: {x}." for name, x in fields.items() if x != "–"),
      _WORSE.get(self.worse, ""),
    ]
    return " ".join(filter(None, sentences)).replace("`", "")


def _pattern(name: str) -> str:
  parts = re.split(r"<(\w+)>", name)
  return "".join(
    re.escape(part) if i % 2 == 0 else (r"\d+" if part == _NUMBER else r"[^/]+")
    for i, part in enumerate(parts)
  )


def entries(page: pathlib.Path = PAGE) -> list[MetricEntry]:
  """Returns the rows of the page; empty where it is not installed."""
  if not page.is_file():
    return []
  return list(_rows(page.read_text("utf-8").splitlines()))


def _rows(lines: Sequence[str]) -> Iterator[MetricEntry]:
  is_ours = False
  for line in lines:
    cells = tuple(x.strip() for x in line.strip().strip("|").split("|"))
    if not line.startswith("|"):
      is_ours = False
    elif cells == _HEAD:
      is_ours = True
    elif is_ours and not set(line) <= set("|- "):
      name, *rest = cells
      yield MetricEntry(name.strip("`"), *rest)


def explain(
  metrics: Sequence[str], page: pathlib.Path = PAGE
) -> Mapping[str, str]:
  """Returns a sentence or two for each metric that the page explains."""
  rows = entries(page)
  found = ((name, [x for x in rows if x.matches(name)]) for name in metrics)
  return {name: str(matching[0]) for name, matching in found if matching}
