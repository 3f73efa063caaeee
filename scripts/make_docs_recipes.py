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
_FORMS = {
  "success": "{} %",
  "accuracy": "{} % of held-out pairs",
  "loss": "{} nats a token",
  "reward": "reward {}",
  "step_s": "a step of {} s",
}
_INTRODUCTION = """# Recipes

Each file of `configs/` is a run that works as it is, and a template for your
own. `--config.rounds=2` is enough to try one of `launch.train`.

- A first run on a CPU: `guess_number_moe`, `frozen_lake_moe`.
- Your own data and a published model: `own_data`, `qwen3_0_6b`, `qwen3_4b`.
- Your own task: `sums` (rows), `counter` and `tool_calculator_hf` (tools),
  `next_letter` (an async class), `agent_letters` (a program).
- Your own loss: `guess_number_own`.
- SFT, DPO and distillation: `sft_chats`, `guess_number_sft`, `dpo_pairs`,
  `guess_number_distill`.
- Schedules: `guess_number_schedules`.
- The task of the migration pages: `migrated_sums`.
- Clusters: `qwen3_30b_a3b`, `simulated_3000`, `fleet_small`.

*Measured* lists results from `benchmarks/results`, by
`python -m benchmarks.seeds`, `python -m benchmarks.seeds_simulated` or the
benchmark named in the recipe: success on held-out tasks unless noted. A single
run has its 95 % interval in brackets; several runs are given as a range.

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


def measured(name: str, results: pathlib.Path = _RESULTS) -> str:
  """Returns the results of a config that were kept, or a dash.

  Those with an argument of the config, as in FILE:teacher, begin with it.
  """
  # These have a benchmark of their own.
  if name == "guess_number_schedules":
    return _paces(results)
  stem = {"tool_calculator_hf": "tools"}.get(name, f"seeds_{name}")
  own = [results / f"{stem}.json", *sorted(results.glob(f"{stem}_*.json"))]
  return (
    "; ".join(
      f"{argument}{': ' if argument else ''}{_result(path)}"
      for path in own
      if path.exists()
      for argument in [path.stem.removeprefix(stem).strip("_")]
    )
    or "–"
  )


def _paces(results: pathlib.Path) -> str:
  """Returns how fast a round of each schedule is, over one of `sync`."""
  rows = json.loads((results / "overlap.json").read_text("utf-8"))["rows"]
  step_s = {
    row["schedule"]: row["measured"]["step_s"]
    for row in rows
    if row["task"] == "as_is"
  }
  paces = sorted(step_s["sync"] / s for s in step_s.values())
  return (
    f"a round {paces[0]:.2f} to {paces[-1]:.2f} times as fast as one of `sync`"
  )


def _result(path: pathlib.Path) -> str:
  """Returns "92.0 to 99.0 %, 3 seeds" of a file."""
  found = json.loads(path.read_text("utf-8"))
  metric, rows = found.get("metric", "success"), found["rows"]

  def text(value: float) -> str:
    if metric in ("success", "accuracy"):
      return f"{100 * value:.1f}"
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}"

  values = [row["after"][metric] for row in rows]
  low, high = text(min(values)), text(max(values))
  told = _FORMS[metric].format(low if low == high else f"{low} to {high}")
  if len(rows) == 1 and metric == "success":
    after = rows[0]["after"]
    told += f" ({text(after['low'])} to {text(after['high'])})"
  seeds = f"{len(rows)} seed{'s' if len(rows) > 1 else ''}"
  return ", ".join([told, seeds, *found.get("changes", ())])


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
