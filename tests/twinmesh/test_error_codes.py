"""Every error that a user can read has a code, and every code its errors."""

import ast
import functools
import re

import pytest

from tests.helpers import packages
from twinmesh import error_codes, top_packages
from twinmesh.error_causes import CAUSES, THEMES

CODES = [cause.code for cause in CAUSES]
PLACES = {place: cause.code for cause in CAUSES for place in cause.of}
# Exceptions that are caught where they can be handled: as faults of episodes,
# replies, notes or other errors. None of them ends a command.
HANDLED = {
  "envs.sandbox.session:_TooMuchError",
  "envs.suites.openenv:_InvalidAction",
  "envs.tools.tools:_WrongCall",
  "launch.http.disconnect:ClientGone",
  "launch.run.log_retention:_Ending",
  "launch.run.warm_start_files:WarmStartStopped",
  "rl.backends.addresses:_Full",
  "rl.backends.addresses:_Refused",
  "rl.engine.sglang.scheduler_thread:_Closed",
  "rl.loop.coordinator:Stopped",
  "rl.remote.weight_store:DamagedFile",
  "rl.remote.wire:Malformed",
  "rl.rollout.environment_trial:PlaysItself",
  "rl.rollout.member_requests:Diverged",
  "rl.rollout.starting:_Refused",
  "rl.runtime.isolation:Fault",
  "rl.runtime.isolation:NotAwaitable",
  "rl.settings.annotations:SettingError",
  "rl.settings.parsing:_Mismatch",
}


@functools.cache
def modules() -> dict[str, ast.Module]:
  """Returns the modules of the product, by their dotted names."""
  found = {}
  for path in packages.python_files(*packages.TOPS):
    parts = path.relative_to(packages.ROOT).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    found[name] = packages.parsed(path)
  return found


def named(tree: ast.AST, prefix: str = ""):
  """Yields each class and function with its name, and those inside classes."""
  for node in ast.iter_child_nodes(tree):
    if isinstance(node, ast.ClassDef):
      yield prefix + node.name, node
      yield from named(node, f"{prefix}{node.name}.")
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield prefix + node.name, node
    elif isinstance(node, ast.If | ast.Try):
      yield from named(node, prefix)


def exceptions() -> set[str]:
  """Returns the exception classes of the product, as `module:name`."""
  found: set[str] = set()
  while True:
    names = {place.split(":")[1] for place in found}
    new = {
      f"{module}:{name}"
      for module, tree in modules().items()
      for name, node in named(tree)
      if isinstance(node, ast.ClassDef)
      for base in map(ast.unparse, node.bases)
      if re.search(r"(Error|Exception)$", base) or base.split(".")[-1] in names
    }
    if new <= found:
      return found
    found |= new


def raised(tree: ast.AST):
  """Yields the name of each exception that is raised below a node."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
      yield ast.unparse(node.exc.func).split(".")[-1]


def without_code(module: str, tree: ast.Module) -> list[str]:
  """Returns the functions whose ValueErrors have no code."""
  return [
    f"{module}:{name}"
    for name, node in named(tree)
    if not isinstance(node, ast.ClassDef)
    and {"ValueError", "SettingError"} & {*raised(node)}
    and not error_codes.place_code(module, name)
  ]


def test_codes_are_short_unique_and_in_the_order_of_their_themes():
  assert len({*CODES}) == len(CODES)
  assert all(re.fullmatch(r"TM-[A-Z]\d\d", code) for code in CODES)
  letters = [code[3] for code in CODES]
  assert sorted(letters, key=[*THEMES].index) == letters
  assert {*letters} == {*THEMES}


@pytest.mark.parametrize(
  ("module", "function", "code"),
  [
    ("rl.algorithms.algorithm", "_validate_protocols", "TM-S08"),
    ("rl.settings.checks", "divides", "TM-S06"),
    ("rl.settings.checks", "_check", "TM-S04"),
    ("rl.settings.checks.more", "divides", "TM-S04"),
    ("rl.settings", "f", ""),
    ("numpy", "f", ""),
  ],
)
def test_the_nearest_of_function_module_and_packages_counts(
  module, function, code
):
  assert error_codes.place_code(module, function) == code


def raised_from(cause: BaseException | None, error: BaseException):
  try:
    raise error from cause
  except BaseException as caught:
    return caught


def test_an_error_has_the_code_of_what_it_wraps():
  inner = raised_from(None, top_packages.Shadowed("the package rl"))
  assert error_codes.code_of(raised_from(inner, ValueError())) == "TM-X02"
  assert error_codes.code_of(raised_from(OSError(), inner)) == "TM-X02"


def test_what_nobody_foresaw_has_a_code_too():
  assert error_codes.code_of(raised_from(None, ZeroDivisionError())) == "TM-X03"
  # Of a library, or of a file of the user's.
  assert error_codes.code_of(raised_from(None, ValueError())) == "TM-X03"


def test_the_text_of_an_error_ends_with_its_code():
  assert error_codes.text(top_packages.Shadowed("no rl")) == (
    "error: no rl\nmore: twinmesh explain TM-X02"
  )
  with pytest.raises(KeyError):
    error_codes.text("no rl", "TM-X99")


def test_no_place_has_two_codes():
  assert len(PLACES) == sum(len(cause.of) for cause in CAUSES)


@pytest.mark.process  # It asks git for the files.
def test_every_place_of_the_table_exists():
  missing = []
  for place in PLACES:
    module, _, name = place.partition(":")
    tree = modules().get(module)
    if module != "builtins" and (
      tree is None or (name and name not in dict(named(tree)))
    ):
      missing.append(place)
  assert not missing


@pytest.mark.process
def test_every_exception_class_has_a_code_or_is_handled_inside():
  assert exceptions() - PLACES.keys() == HANDLED


@pytest.mark.process
def test_every_function_that_refuses_something_has_a_code():
  assert not [
    place
    for module, tree in modules().items()
    for place in without_code(module, tree)
  ]


@pytest.mark.parametrize(
  ("module", "source", "missing"),
  [
    ("rl.settings.checks", "def f():\n  raise ValueError(1)", []),
    ("rl.new", "def f():\n  raise ValueError(1)", ["rl.new:f"]),
    ("rl.new", "def f():\n  raise a.SettingError(1)", ["rl.new:f"]),
    ("rl.new", "class A:\n  def f():\n    raise ValueError()", ["rl.new:A.f"]),
    ("rl.new", "def f():\n  raise KeyError(1)", []),
  ],
)
def test_a_refusal_without_a_code_is_seen(module, source, missing):
  assert without_code(module, ast.parse(source)) == missing


def prints_by_itself(module: ast.Module) -> list[str]:
  """Returns what a module tells users of errors without their codes."""
  found = []
  for node in ast.walk(module):
    if isinstance(node, ast.Constant) and str(node.value).startswith("error:"):
      found.append(str(node.value))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.exit":
      found += [
        ast.unparse(x)
        for x in node.args
        if isinstance(x, ast.JoinedStr)
        or (isinstance(x, ast.Constant) and isinstance(x.value, str))
      ]
    if isinstance(node, ast.Attribute) and node.attr == "UsageError":
      found.append(ast.unparse(node))
  return found


@pytest.mark.process
def test_errors_are_printed_with_their_codes_only():
  printing = {
    str(path.relative_to(packages.ROOT)): found
    for path in packages.python_files("launch", "twinmesh")
    if (found := prints_by_itself(packages.parsed(path)))
  }
  assert [*printing] == ["twinmesh/error_codes.py"]


@pytest.mark.parametrize(
  "source",
  [
    "print(f'error: {e}')",
    "sys.exit('it failed')",
    "sys.exit(f'{e}')",
    "raise app.UsageError('no')",
  ],
)
def test_an_error_that_is_printed_without_a_code_is_seen(source):
  assert prints_by_itself(ast.parse(source))


@pytest.mark.process
def test_every_code_has_a_place_that_gives_it():
  literals = {
    node.value
    for module, tree in modules().items()
    if module != "twinmesh.error_causes"
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  }
  used = {*PLACES.values()} | (literals & {*CODES})
  assert used == {*CODES}
  # A code that no cause has would fail only once it is printed.
  assert {x for x in literals if re.fullmatch(r"TM-[A-Z]\d\d", x)} <= {*CODES}
