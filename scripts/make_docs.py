"""Writes the parts of the documentation that follow from other files.

  python -m scripts.make_docs [--check]

- The tables of docs/performance.md and of some guides, from
  benchmarks/results, by scripts/tables. A table stands between
  `<!-- table NAME -->` and `<!-- end -->`; the prose around it stays.
- docs/packages.svg, from the floors of tests/test_house.py.
- docs/licences.md, from the metadata of what is installed.
- docs/long_run.svg, from benchmarks/results/long_run.json.
- docs/recipes.md and docs/settings.md, from docstrings.
- docs/errors.md, from twinmesh/error_causes.py.

With --check nothing is written: a file that differs is an error.
"""

import inspect
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from scripts import (
  make_docs_errors,
  make_docs_licences,
  make_docs_long_run,
  make_docs_picture,
  make_docs_recipes,
  make_docs_settings,
)
from scripts.tables import (
  cells,
  learning,
  notebooks,
  rollout,
  schedules,
  simulated,
  stress,
  training,
)

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
_SIMULATED = ("rollart_", "rollout_pipe")
"""Results that no machine changes."""
_TABLES = (learning, schedules, simulated, rollout, training, stress, notebooks)
_TABLE = re.compile(
  r"(?<=^<!-- table )(\w+) -->\n.*?^<!-- end -->", re.DOTALL | re.MULTILINE
)


def tables() -> dict[str, str]:
  """Returns every table, each public function, as Markdown by its name."""
  return {
    name: _markdown(table)
    for module in _TABLES
    for name, table in inspect.getmembers(module, inspect.isfunction)
    if not name.startswith("_")
  }


def result(name: str) -> Any:
  """Returns a file of benchmarks/results."""
  return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _markdown(table: cells.Table) -> str:
  names = sorted((path.stem for path in RESULTS.glob("*.json")), key=len)
  name = next(n for n in reversed(names) if table.__name__.startswith(n))
  found = result(name)
  head, *rows = table(found)
  lines = [head, ["---"] * len(head), *rows]
  text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
  if name.startswith(_SIMULATED):
    return text
  return f"{text}\n*{found['machine'].split(',')[0]}*\n"


def with_tables(page: str) -> str:
  """Returns a page with its tables written anew.

  Raises:
    KeyError: the page names a table that there is none of.
  """
  made = tables()

  def replaced(match: re.Match[str]) -> str:
    return f"{match[1]} -->\n\n{made[match[1]]}\n<!-- end -->"

  return _TABLE.sub(replaced, page)


def pages() -> Iterator[pathlib.Path]:
  """Yields the pages that have tables."""
  for page in sorted(DOCS.rglob("*.md")):
    if _TABLE.search(page.read_text("utf-8")):
      yield page


def outdated() -> dict[pathlib.Path, str]:
  """Returns the text of each file that differs from its sources."""
  texts = {page: with_tables(page.read_text("utf-8")) for page in pages()} | {
    DOCS / "packages.svg": make_docs_picture.draw(),
    DOCS / "recipes.md": make_docs_recipes.page(),
    make_docs_licences.PAGE: make_docs_licences.page(),
    DOCS / "long_run.svg": make_docs_long_run.draw(result("long_run")),
    DOCS / "settings.md": make_docs_settings.page(),
    DOCS / "errors.md": make_docs_errors.page(),
  }
  return {
    path: text
    for path, text in texts.items()
    if not path.exists() or path.read_text("utf-8") != text
  }


def main() -> None:
  """Writes what differs, or reports it with --check."""
  differing = outdated()
  names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
  if "--check" in sys.argv[1:] and differing:
    sys.exit(f"{names}: not up to date; run python -m scripts.make_docs")
  for path, text in differing.items():
    path.write_text(text, "utf-8")


if __name__ == "__main__":
  main()
