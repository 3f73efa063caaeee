"""Writes docs/recipes.md: the docstring of each config, and what was measured.

A docstring is a title, commands, text and, last, three sentences that begin
with "Hardware:", "Duration:" and "Expected:".
"""

import ast
import json
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_FIELDS = ("Hardware", "Duration", "Expected")
_INTRODUCTION = """# Recipes

Each file of `configs/` is a run that can be started as it is, and a place to
begin from. A run stops after the rounds in its file; `--config.rounds=2` is
enough to see it go. *Measured* is the success on held-out tasks at the end of
each run in `benchmarks/results`, with `python -m benchmarks.seeds` or the
benchmark named in the recipe.

<!-- Written by python -m scripts.make_docs from the files. -->

"""


class Recipe(NamedTuple):
  """The docstring of a config, in parts.

  Attributes:
    commands: lines of a shell.
    text: paragraphs between the commands and the fields.
    fields: by name; see the module.
  """

  name: str
  title: str
  commands: str
  text: str
  fields: Mapping[str, str]


def read(file: pathlib.Path) -> Recipe:
  """Returns the recipe of a config.

  Raises:
    ValueError: a part is missing.
  """
  docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
  title, *paragraphs = docstring.split("\n\n")
  words = "".join(rf"{name}:\s(?P<{name}>.+?)\s*" for name in _FIELDS)
  found = re.fullmatch(words, paragraphs[-1] if paragraphs else "", re.DOTALL)
  commands = [x for x in paragraphs if x.startswith("python -m")]
  if not commands or found is None:
    raise ValueError(
      f"{file}: its docstring needs a command and, as the last paragraph, "
      f"{': .. '.join(_FIELDS)}: .."
    )
  text = [x for x in paragraphs[:-1] if x not in commands]
  fields = {name: _one_line(found[name]) for name in _FIELDS}
  return Recipe(
    file.stem, _one_line(title), commands[0], "\n\n".join(text), fields
  )


def _one_line(text: str) -> str:
  return " ".join(text.split()).removesuffix(".")


def measured(name: str) -> str:
  """Returns the success of the runs of a config that were kept, or a dash."""
  # The benchmark of the calculator has its own file.
  stem = {"tool_calculator_hf": "tools"}.get(name, f"seeds_{name}")
  path = _RESULTS / f"{stem}.json"
  if not path.exists():
    return "–"
  rows = json.loads(path.read_text("utf-8"))["rows"]
  found = [100 * row["after"]["success"] for row in rows]
  low, high = f"{min(found):.1f}", f"{max(found):.1f}"
  seeds = f"{len(rows)} seed{'s' if len(rows) > 1 else ''}"
  return f"{low if low == high else f'{low} to {high}'} %, {seeds}"


def page() -> str:
  """Returns the page as Markdown."""
  files = sorted((_ROOT / "configs").glob("*.py"))
  recipes = [read(file) for file in files if file.stem != "__init__"]
  return _INTRODUCTION + _table(recipes) + "".join(map(_section, recipes))


def _table(recipes: list[Recipe]) -> str:
  lines = ["| recipe | hardware | duration | measured |", "|---|---|---|---|"]
  lines += [
    f"| [`{x.name}`](#{x.name}) | {x.fields['Hardware']} | "
    f"{x.fields['Duration']} | {measured(x.name)} |"
    for x in recipes
  ]
  return "\n".join(lines) + "\n"


def _section(recipe: Recipe) -> str:
  # Columns stay as they are typed.
  text = "\n\n".join(
    f"```text\n{paragraph}\n```" if "   " in paragraph else paragraph
    for paragraph in recipe.text.split("\n\n")
  )
  return (
    f"\n## {recipe.name}\n\n{recipe.title}.\n\n"
    f"```sh\n{recipe.commands}\n```\n\n"
    + (f"{text}\n\n" if text else "")
    + f"**Expected**: {recipe.fields['Expected']}.\n"
  )
