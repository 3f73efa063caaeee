"""Rules of the whole project, read from its files."""

import ast
import collections
import re

import pytest

from tests.helpers import packages

pytestmark = pytest.mark.process  # It asks git for the files.

# Floors from the ground up: a package imports from floors below its own, and
# nothing beside or above it.
FLOORS = {
  "envs": [
    ["envs"],
    ["envs.offload", "envs.sandbox"],
    ["envs.rewards", "envs.suites", "envs.tools"],
  ],
  "models": [
    ["models.untrusted_files"],
    ["models.chat", "models.quantize", "models.rope", "models.sharding"],
    ["models.definition", "models.logprobs", "models.lora"],
    ["models.config"],
    ["models.initializers", "models.kv_cache", "models.layer_stack"],
    ["models.attention", "models.mlp", "models.moe"],
    ["models.transformer"],
    ["models.policy"],
    ["models.hf", "models.memory_report"],
  ],
  "rl": [
    ["rl.settings", "rl.runtime", "rl.data"],
    ["rl.backends"],
    ["rl.engine"],
    ["rl.engine.builtin", "rl.engine.sglang"],
    ["rl.schedule"],
    ["rl.algorithms", "rl.audit"],
    ["rl.train", "rl.rollout", "rl.pools"],
    ["rl.loop"],
    ["rl.agents", "rl.testing", "rl.simulation"],
    ["rl.experiment"],
    ["rl.memory_plan", "rl.planning", "rl.remote"],
    ["rl.assemble"],
    ["rl.initial_state"],
  ],
  "configs": [["configs.programs"], ["configs"]],
  "twinmesh": [["twinmesh"]],
  "launch": [
    ["launch.cli", "launch.http"],
    ["launch.gateway", "launch.report"],
    ["launch.run"],
    ["launch.view"],
    ["launch"],
  ],
}
# Packages of other top packages that may be imported.
MAY_IMPORT = {
  "envs": [],
  "models": [],
  "rl": ["models", "envs.base"],
  "configs": ["rl", "models", "envs"],
  "launch": ["configs", "rl", "models", "envs", "twinmesh"],
  # Its commands are modules that it runs by name.
  "twinmesh": [],
}
# Nothing may be imported relatively: "" is what stands before the first dot.
OURS = {*MAY_IMPORT, "benchmarks", "notebooks", "tests", ""}
NAMES_THAT_SAY_NOTHING = {"utils", "common", "helpers", "types", "misc"}
# Distributions that one package imports, for all of the project.
ONE_IMPORTER = {"sgl_jax": "rl.engine.sglang"}
# A preset is named like the estimator or the loss that its paper is known for.
NAMED_BY_PAPERS = {
  "Cispo",
  "ClipCov",
  "DrGrpo",
  "Gmpo",
  "Grpo",
  "Gspo",
  "KlCov",
  "Reinforce",
  "ReinforcePlusPlus",
  "Rloo",
  "Vespo",
}
QUESTION = re.compile(
  r"(What|Who|Whose|Whom|Which|How|Where|When|Whether|Why)\b"
)

# A slash before the bracket: the patterns do not match themselves.
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|work|tmp|opt|home|Users)\b")
REGISTRY = re.compile(r"pypi\.org|python[h]osted")


def wrong_imports(package: str, module: ast.Module) -> list[str]:
  """Returns the imports of a module that its top package must not have."""
  allowed = [package, *MAY_IMPORT[package]]
  return [
    name
    for name in packages.imported(module)
    if name.partition(".")[0] in OURS
    and not any(f"{name}.".startswith(f"{ok}.") for ok in allowed)
  ]


def floor_numbers(floors: list[list[str]]) -> dict[str, int]:
  """Returns the floor of each package of a top package, 0 at the bottom."""
  return {package: n for n, level in enumerate(floors) for package in level}


def wrong_arrows(
  floors: list[list[str]], arrows: dict[tuple[str, str], tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
  """Returns the arrows that do not lead to a lower floor, with their files."""
  number = floor_numbers(floors)
  return {
    f"{here} -> {there}": files
    for (here, there), files in arrows.items()
    if here in number and there in number and number[here] <= number[there]
  }


def undocumented(module: ast.Module) -> list[str]:
  """Returns the public names of a module that lack a docstring."""
  kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  names = ["module"] if module.body and not ast.get_docstring(module) else []
  return names + [
    node.name
    for node in module.body
    if isinstance(node, kinds)
    and not node.name.startswith("_")
    and not ast.get_docstring(node)
  ]


def questions(module: ast.Module) -> list[str]:
  """Returns first lines of docstrings that begin with a question word."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  return [
    text.splitlines()[0]
    for node in ast.walk(module)
    if isinstance(node, kinds)
    and (text := ast.get_docstring(node))
    and QUESTION.match(text)
  ]


def public_classes(module: ast.Module) -> list[str]:
  """Returns the public classes that a module defines."""
  return [
    node.name
    for node in module.body
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
  ]


def unscaled_deadlines(source: str) -> list[int]:
  """Returns the lines that wait for seconds of a fixed number, 3 or more.

  Shorter ones are waits that a test expects to be over.
  """
  found = []
  for node in ast.walk(ast.parse(source)):
    waits: list[ast.expr] = []
    match node:
      case ast.Call(keywords=keywords, args=args, func=func):
        waits += [x.value for x in keywords if x.arg == "timeout"]
        name = getattr(func, "attr", "")
        if name in ("join", "result", "settimeout", "wait") and len(args) == 1:
          waits += args
        elif name == "wait_for":
          waits += args[1:]
      case ast.BinOp(
        left=ast.Call(func=ast.Attribute(attr="monotonic")),
        op=ast.Add(),
        right=right,
      ):
        waits.append(right)
    found += [
      wait.lineno
      for wait in waits
      if isinstance(wait, ast.Constant)
      and isinstance(wait.value, int | float)
      and wait.value >= 3
    ]
  return sorted(found)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way_between_top_packages(package):
  wrong = {
    str(path.relative_to(packages.ROOT)): names
    for path in packages.python_files(package)
    if (names := wrong_imports(package, packages.parsed(path)))
  }
  assert not wrong


@pytest.mark.parametrize(
  ("package", "source", "wrong"),
  [
    ("rl", "from envs import base\nfrom rl.train import learner", []),
    ("rl", "from envs import base, mixture", ["envs.mixture"]),
    ("rl", "def f():\n  import launch.train", ["launch.train"]),
    ("models", "import numpy as np\nfrom rl.engine import x", ["rl.engine.x"]),
    ("envs", "import envs.base\nimport envs_of_others", []),
    ("configs", "from launch.cli import flags", ["launch.cli.flags"]),
    ("envs", "from .base import Task", [".base.Task"]),
  ],
)
def test_a_wrong_import_is_seen(package, source, wrong):
  assert wrong_imports(package, ast.parse(source)) == wrong


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_imports_lead_to_lower_floors(package):
  assert not wrong_arrows(FLOORS[package], packages.arrows())


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_every_room_has_a_floor(package):
  found = {
    packages.package_of(
      ".".join(path.relative_to(packages.ROOT).with_suffix("").parts)
    )
    for path in packages.python_files(package)
    if path.name != "__init__.py"
  }
  assert found == {*floor_numbers(FLOORS[package])}


@pytest.mark.parametrize(
  ("arrow", "is_wrong"),
  [
    (("a.high", "a.low"), False),
    (("a.low", "a.high"), True),
    (("a.low", "a.beside"), True),
    (("a.low", "b.elsewhere"), False),
  ],
)
def test_an_arrow_up_or_sideways_is_seen(arrow, is_wrong):
  floors = [["a.low", "a.beside"], ["a.high"]]
  assert bool(wrong_arrows(floors, {arrow: ("a/x.py",)})) == is_wrong


def test_importers_are_the_packages_that_import_one_or_a_part_of_it():
  found = packages.importers("rl.engine")
  assert {"rl.rollout", "rl.pools", "rl.assemble"} <= found
  assert not found & {"rl.engine", "rl.engine.builtin", "rl.data", "models"}


def test_files_are_named_for_what_they_hold():
  files = packages.python_files()
  assert not [p for p in files if p.stem in NAMES_THAT_SAY_NOTHING]


@pytest.mark.parametrize("package", sorted(ONE_IMPORTER))
def test_a_package_of_others_has_one_importer(package):
  use = re.compile(rf'import_module\(\s*f?"{package}\b|import {package}\b')
  importers = {
    packages.package_of(
      ".".join(path.relative_to(packages.ROOT).with_suffix("").parts)
    )
    for path in packages.python_files(*packages.TOPS)
    if use.search(path.read_text())
  }
  assert importers == {ONE_IMPORTER[package]}


def test_a_test_file_is_named_for_the_file_that_it_tests():
  product = {
    f"tests/{path.parent}/test_{path.stem}.py"
    for file in packages.python_files(*packages.TOPS)
    for path in [file.relative_to(packages.ROOT)]
  }
  tests = {
    str(path.relative_to(packages.ROOT))
    for package in packages.TOPS
    for path in packages.python_files("tests")
    if path.stem.startswith("test_")
    and path.is_relative_to(packages.ROOT / "tests" / package)
  }
  assert not tests - product


def test_public_names_have_docstrings():
  missing = {
    str(path.relative_to(packages.ROOT)): names
    for path in packages.python_files("envs", "models", "rl", "launch")
    if (names := undocumented(packages.parsed(path)))
  }
  assert not missing


def test_a_missing_docstring_is_seen():
  source = "def f():\n  pass\n\nclass _C:\n  pass\n\nclass D:\n  'Says.'\n"
  assert undocumented(ast.parse(source)) == ["module", "f"]


def test_docstrings_name_a_thing_or_say_what_is_done():
  wrong = {
    str(path.relative_to(packages.ROOT)): lines
    for path in packages.python_files(*packages.TOPS)
    if (lines := questions(packages.parsed(path)))
  }
  assert not wrong


def test_a_docstring_that_begins_with_a_question_is_seen():
  source = "'''Whose it is.'''\ndef f():\n  '''Returns what it was.'''\n"
  assert questions(ast.parse(source)) == ["Whose it is."]


def test_one_public_class_name_stands_for_one_thing():
  places = collections.defaultdict(list)
  for path in packages.python_files("envs", "models", "rl", "launch"):
    for name in public_classes(packages.parsed(path)):
      places[name].append(str(path.relative_to(packages.ROOT)))
  shared = {name: at for name, at in places.items() if len(at) > 1}
  assert {*shared} <= NAMED_BY_PAPERS, shared


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY])
def test_nothing_depends_on_one_machine_or_registry(pattern):
  found = []
  for path in packages.project_files():
    try:
      lines = path.read_text().splitlines()
    except UnicodeDecodeError:
      continue
    found += [
      f"{path.relative_to(packages.ROOT)}:{number}: {line.strip()}"
      for number, line in enumerate(lines, start=1)
      if pattern.search(line)
    ]
  assert not found


def test_paths_of_one_machine_are_told_from_others():
  assert MACHINE_PATH.search("cd /" + "root/x")
  assert MACHINE_PATH.search("'/" + "tmp'")
  assert not MACHINE_PATH.search("https://example.org/home, tests/work, /usr")


def test_deadlines_of_tests_scale_with_the_machine():
  unscaled = {
    str(path.relative_to(packages.ROOT)): lines
    for path in packages.python_files("tests")
    if (lines := unscaled_deadlines(path.read_text()))
  }
  assert not unscaled


def test_a_deadline_that_does_not_scale_is_seen():
  source = (
    "run(timeout=30)\nthread.join(5)\nend = time.monotonic() + 20\n"
    "asyncio.wait_for(work, 60.0)\n"
    # Expected to pass, or scaled, or no deadline.
    "run(timeout=0.1)\nthread.join(scaled(5))\n', '.join(x)\nwait(5, 6)\n"
  )
  assert unscaled_deadlines(source) == [1, 2, 3, 4]
