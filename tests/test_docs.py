"""Documentation: tables, commands, paths and names are those of the code."""

import ast
import collections
import contextlib
import functools
import importlib
import itertools
import json
import pathlib
import pkgutil
import re
import statistics

import pytest

import envs
from launch.cli import flags
from models.hf import config as hf_config
from rl.settings import annotations, short_names
from scripts import (
  make_docs,
  make_docs_docstrings,
  make_docs_links,
  make_docs_recipes,
)
from tests.helpers import markdown

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
  ROOT / "README.md",
  ROOT / "CONTRIBUTING.md",
  *sorted((ROOT / "docs").rglob("*.md")),
]
TOPS = (
  *("rl", "models", "launch", "envs", "configs", "twinmesh"),
  *("benchmarks", "scripts"),
)
FOLDERS = (*TOPS, "docs", "notebooks", "tests")
FILE = re.compile(r"\.(py|md|lock|svg|jsonl?|html|txt|yml)$")
# Other projects' names.
OTHERS = {"dataclasses", "flax", "openai", "optax", "transformers", "ui"}

SUCCESS = {"success": 0.86, "low": 0.823, "high": 0.891}

each_page = pytest.mark.parametrize(
  "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


@functools.cache
def modules() -> dict[str, list[pathlib.Path]]:
  """Returns the modules of all packages by their last name."""
  found: dict[str, list[pathlib.Path]] = {}
  for top in TOPS:
    for path in (ROOT / top).rglob("*.py"):
      found.setdefault(path.stem, []).append(path)
  return found


@functools.cache
def names_in(path: pathlib.Path) -> frozenset[str]:
  """Returns all names that a module defines or imports, members included."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      names.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
    elif isinstance(node, ast.alias):
      names.add((node.asname or node.name).partition(".")[0])
  return frozenset(names)


@functools.cache
def fields_by_short_name() -> dict[str, set[str]]:
  """Returns what each part of a setting's value takes, by its short name."""
  flags.load("configs/guess_number_moe.py")
  for module in pkgutil.walk_packages(envs.__path__, "envs."):
    importlib.import_module(module.name)
  fields = collections.defaultdict(set)
  for package in ("envs", "models", "rl"):
    for cls in short_names.classes(package):
      for name, maker in short_names.choices(cls).items():
        # Of classes that are no settings, annotations may need type checkers.
        with contextlib.suppress(NameError):
          fields[name] |= annotations.parameters(maker).keys()
  return fields


@functools.cache
def settings() -> frozenset[str]:
  """Returns the annotated fields of all classes of rl and models."""
  fields = set()
  for paths in modules().values():
    for path in paths:
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
          fields |= {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
          }
  return frozenset(fields)


def exists(name: str) -> bool:
  """Whether a dotted name is a module, part of one, or a setting."""
  parts = name.split(".")
  if parts[0] in TOPS:
    path = ROOT
    while parts and (path / parts[0]).is_dir():
      path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
      path = path / f"{parts.pop(0)}.py"
    if path.is_dir():
      return not parts
    return set(parts) <= names_in(path)
  if set(parts) <= settings():
    return True
  if parts[0][0].isupper():
    return any(
      set(parts) <= names_in(path)
      for paths in modules().values()
      for path in paths
    )
  return any(
    set(parts[1:]) <= names_in(path) for path in modules().get(parts[0], [])
  )


def known_flags(module: str) -> set[str]:
  """Returns the flags that a command and its imports of launch define."""
  path = ROOT.joinpath(*module.split("."))
  path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
  names, waiting, seen = set(), [path], set()
  while waiting:
    path = waiting.pop()
    if path in seen or not path.is_file():
      continue
    seen.add(path)
    text = path.read_text()
    names |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', text))
    for package, imported in re.findall(
      r"^from (launch[\w.]*) import (\([^)]*\)|.+)$", text, re.MULTILINE
    ):
      folder = ROOT.joinpath(*package.split("."))
      waiting += [folder / f"{n}.py" for n in re.findall(r"\w+", imported)]
  return names


def test_tables_and_picture_are_up_to_date():
  stale = [str(p.relative_to(ROOT)) for p in make_docs.outdated()]
  assert not stale, "run python -m scripts.make_docs"


@pytest.mark.parametrize(
  "docstring",
  [
    "A run.",
    "A run.\n\nHardware: x. Duration: y. Expected: z.",
    "A run.\n\npython -m launch.train\n\nHardware: x. Expected: z.",
  ],
)
def test_a_recipe_without_command_or_result_is_refused(docstring, tmp_path):
  file = tmp_path / "run.py"
  file.write_text(f'"""{docstring}"""')
  with pytest.raises(ValueError, match=r"run\.py: its docstring needs"):
    make_docs_recipes.read(file)


def test_a_recipe_has_the_parts_of_its_docstring(tmp_path):
  file = tmp_path / "run.py"
  file.write_text(
    '"""A run.\n\npython -m launch.train --config=x\n\nWhy.\n\n'
    'Hardware: two\ncores. Duration: 5.5 minutes. Expected:\na lot.\n"""'
  )
  assert make_docs_recipes.read(file) == make_docs_recipes.Recipe(
    name="run",
    title="A run",
    commands="python -m launch.train --config=x",
    text="Why.",
    fields={
      "Hardware": "two cores",
      "Duration": "5.5 minutes",
      "Expected": "a lot",
    },
  )


@pytest.mark.parametrize(
  ("found", "words"),
  [
    ({"rows": [{"after": SUCCESS}]}, "86.0 % (82.3 to 89.1), 1 seed"),
    (
      {
        "metric": "success",
        "changes": ["config.rounds=4"],
        "rows": [{"after": SUCCESS}, {"after": SUCCESS | {"success": 1.0}}],
      },
      "86.0 to 100.0 %, 2 seeds, config.rounds=4",
    ),
    (
      {"metric": "loss", "rows": [{"after": {"loss": 0.0039}}]},
      "0.004 nats a token, 1 seed",
    ),
    (
      {"metric": "step_s", "rows": [{"after": {"step_s": 1070.41}}]},
      "a step of 1,070.4 s, 1 seed",
    ),
  ],
)
def test_results_of_a_recipe_have_their_spread(found, words, tmp_path):
  (tmp_path / "seeds_run.json").write_text(json.dumps(found))
  assert make_docs_recipes.measured("run", tmp_path) == words
  (tmp_path / "seeds_run.json").rename(tmp_path / "seeds_run_teacher.json")
  assert make_docs_recipes.measured("run", tmp_path) == f"teacher: {words}"


def test_every_table_has_its_place():
  text = "".join(page.read_text() for page in make_docs.pages())
  for name in make_docs.tables():
    assert text.count(f"<!-- table {name} -->") == 1


@each_page
def test_commands_name_what_exists(page):
  makefile = (ROOT / "Makefile").read_text()
  for command in markdown.commands(page):
    if command[0] == "make":
      assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
      continue
    module, arguments = command[2], command[3:]
    assert exists(module), command
    known = known_flags(module)
    for argument in arguments:
      if flag := re.match(r"--(\w+)", argument):
        name = flag[1].removeprefix("no") if "." in argument else flag[1]
        assert name in known, (command, argument)


@each_page
def test_commands_that_train_have_a_directory_or_only_explain(page):
  text = page.read_text().replace("\\\n", " ")
  train = r"^ *(?:python -m launch\.train|twinmesh train) .*"
  enough = r" --(workdir=|explain|help|config\.help|print_config)| \.\."
  for command in re.findall(train, text, re.MULTILINE):
    assert re.search(enough, command), command


def files_of_a_reader(path: pathlib.Path) -> None:
  """Makes the models and the data that readers of the guides have."""
  (path / "runs").mkdir()
  reward = markdown.block(ROOT / "docs/guides/rewards.md", "class Partial")
  (path / "myreward.py").write_text(reward)
  for model in ("my-model", "runs/sft-hf"):
    (path / model).symlink_to(hf_config.TINY)
  said = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": ""},
  ]
  pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
  asked = {"question": "a", "answer": "b"}
  data = {"chats": {"messages": said}, "pairs": pair, "questions": asked}
  for name, row in data.items():
    rows = (json.dumps(row | {"n": number}) for number in range(30))
    (path / f"{name}.jsonl").write_text("\n".join(rows))


@each_page
def test_settings_on_command_lines_are_accepted(page, tmp_path, monkeypatch):
  files_of_a_reader(tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  for command in markdown.commands(page):
    given = {
      name: value
      for argument in command[3:]
      for name, _, value in [argument.removeprefix("--").partition("=")]
    }
    path = given.get("config")
    if command[0] == "make" or path is None or path.endswith(".json"):
      continue
    changes = {
      name.removeprefix("no").removeprefix("config."): (
        None if name.startswith("no") else value
      )
      for name, value in given.items()
      if re.match(r"(no)?config\.", name)
    }
    flags.load(str(ROOT / path), changes)


@each_page
def test_paths_exist(page):
  for name in re.findall(r"`([\w./-]+)`", page.read_text()):
    first, slash, _ = name.partition("/")
    if slash and first in FOLDERS:
      assert (ROOT / name).exists(), name
    elif not slash and name.endswith(".py"):
      assert name.removesuffix(".py") in modules(), name


@each_page
def test_code_in_tables_has_no_bars(page):
  # GitHub shows an escaped bar in code as a bar, the site with its backslash.
  spans = re.findall(r"`([^`\n]+)`", page.read_text())
  assert not [span for span in spans if "\\|" in span]


@each_page
def test_links_lead_to_files_of_a_clone(page):
  for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text()):
    assert (page.parent / target).exists(), target


@each_page
def test_files_that_the_site_shows_are_linked_to_before(page):
  above = page.read_text().split("```{ .python }\n")
  for text, code in itertools.pairwise(above):
    (path,) = re.findall(r'^--8<-- "(.+)"\n```', code)
    links = re.findall(r"\]\(([^)]+)\)", text.rstrip().split("\n\n")[-1])
    assert ROOT / path in [(page.parent / link).resolve() for link in links]


@pytest.mark.parametrize(
  ("link", "depth", "kept"),
  [
    ("[a](../notebooks/a.ipynb)", 0, "[a](notebooks/a.md)"),
    ("[a](../../notebooks/a.ipynb)", 1, "[a](../notebooks/a.md)"),
    ("[`a`](../../configs/a.py)", 1, "`a`"),
    ("[a](../metrics.md#speed)", 1, "[a](../metrics.md#speed)"),
    ("[a](https://a.example/../b)", 0, "[a](https://a.example/../b)"),
  ],
)
def test_links_stay_within_the_site(link, depth, kept):
  assert make_docs_links.within_site(link, depth) == kept


def test_long_names_in_tables_may_break():
  long = "<code>algorithm.advantage=dr_grpo</code>"
  html = f"<p>{long}</p><td><code>a.b</code> {long}</td>"
  assert make_docs_links.breakable(html) == (
    f"<p>{long}</p><td><code>a.b</code> "
    "<code>algorithm.<wbr>advantage=<wbr>dr_<wbr>grpo</code></td>"
  )


@each_page
def test_names_exist(page):
  text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
  if page.parent.name == "migration":
    # The first column, and a paragraph about theirs, have names of others.
    text = re.sub(r"^\|.*?\|", "", text, flags=re.M)
  for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\(.*?\))?`", text):
    if name.partition(".")[0] not in OTHERS and not FILE.search(name):
      assert exists(name), name


@each_page
def test_parts_in_a_sentence_have_their_short_names_and_fields(page):
  text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
  for span in re.findall(r"`([^`]+)`", text):
    for name, field in re.findall(r"(?<![\w.])([a-z]\w*)\((\w+)=", span):
      assert field in fields_by_short_name().get(name, ()), span


def test_figures_of_the_readme_are_those_of_the_results():
  readme = " ".join((ROOT / "README.md").read_text().split())
  rows = make_docs.result("seeds_guess_number_moe")["rows"]
  for moment in ("before", "after"):
    a, b, c = (f"{100 * row[moment]['success']:.1f}" for row in rows)
    assert f"{a}, {b} and {c} %" in readme
  minutes = sorted(row["minutes"] for row in rows)
  assert f"{minutes[0]:.1f} to {minutes[-1]:.1f} minutes" in readme
  lake = make_docs.result("seeds_frozen_lake_moe")["rows"][0]
  a, b = (100 * lake[moment]["success"] for moment in ("before", "after"))
  assert f"from {a:.1f} to {b:.1f} %" in readme

  gains = {
    (row["task"], row["schedule"]): row["measured"]["step_s"]
    for row in make_docs.result("overlap")["rows"]
  }
  gains = {key: gains[key[0], "sync"] / s for key, s in gains.items()}
  assert f"{gains['slow', 'in_flight']:.2f} times as fast" in readme
  low, high = sorted((gains["slow", "recycle"], gains["slow", "drop"]))
  assert f"{low:.2f} to {high:.2f} times" in readme
  flying = ("in_flight", "keep_kv", "drop", "recycle")
  asleep = [gains["accelerator", name] for name in flying]
  assert f"{min(asleep):.2f} to {max(asleep):.2f} times" in readme
  others = [x for (task, name), x in gains.items() if task == "as_is"]
  assert f"{min(others):.2f} to {max(others):.2f} times" in readme

  finals: dict[str, list[float]] = {}
  for row in make_docs.result("learning")["rows"]:
    if row["algorithm"] == "grpo" and row["learning_rate"] == 0.001:
      name = f"{row['schedule']} {row['arm']}"
      finals.setdefault(name, []).append(100 * row["curve"][-1])
  uncorrected, ratio, sync = (
    f"{statistics.fmean(finals[name]):.0f} %"
    for name in ("eta4 uncorrected", "eta4 ratio", "sync on policy")
  )
  assert f"wins {uncorrected} of its games" in readme
  assert f"{ratio}, versus {sync} on-policy" in readme


def test_code_of_the_readme_stands_in_a_config():
  sources = [path.read_text() for path in (ROOT / "configs").glob("*.py")]
  pieces = markdown.blocks(PAGES[0], "python")
  assert len(pieces) == 4
  for piece in pieces:
    assert any(piece in source for source in sources), piece


def test_the_readme_is_one_page():
  assert len((ROOT / "README.md").read_text()) <= 9_000


def test_drawings_of_docstrings_become_blocks():
  text = "Says.\n\na -> b   -> c\n\nProse x[a][b].\n\nArgs:\n  x: of y[a][b]."
  assert make_docs_docstrings.markdown(text) == (
    "Says.\n\n```text\na -> b   -> c\n```\n\nProse x[a]\\[b].\n\n"
    "Args:\n  x: of y[a]\\[b]."
  )
