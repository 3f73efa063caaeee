"""Rules of the whole project, read from its files."""

import ast
import functools
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_LINES = 400
NAMES_THAT_SAY_NOTHING = {"utils", "common", "helpers", "types", "misc"}
MAY_IMPORT = {
  "envs": ["envs"],
  "models": ["models"],
  "rl": ["rl", "models", "envs.base"],
  "configs": ["configs", "rl", "models", "envs"],
  "launch": ["launch", "configs", "rl", "models", "envs"],
}
# Nothing may be imported relatively: "" is what stands before the first dot.
OURS = {*MAY_IMPORT, "benchmarks", "notebooks", "tests", ""}

# A slash before the bracket: the patterns do not match themselves.
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|work|tmp|opt|home|Users)\b")
REGISTRY = re.compile(r"pypi\.org|python[h]osted")


@functools.cache
def project_files() -> list[pathlib.Path]:
  """Returns what is or may be committed; without git, what is not hidden."""
  listing = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  if listing.returncode == 0:
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]
  files = []
  for folder, folders, names in os.walk(ROOT):
    made = {"runs", "build", "dist", "__pycache__"}
    folders[:] = [f for f in folders if f[0] != "." and f not in made]
    files += [pathlib.Path(folder, name) for name in names]
  return files


def python_files(*packages: str) -> list[pathlib.Path]:
  """Returns the Python files of some packages, or of the whole project."""
  files = [path for path in project_files() if path.suffix == ".py"]
  if not packages:
    return files
  return [p for p in files if p.relative_to(ROOT).parts[0] in packages]


def wrong_imports(package: str, source: str) -> list[str]:
  """Returns the imports of a module that its package must not have."""
  names = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      module = "." * node.level + (node.module or "")
      names += [f"{module}.{alias.name}" for alias in node.names]
  allowed = MAY_IMPORT[package]
  return [
    name
    for name in names
    if name.partition(".")[0] in OURS
    and not any(f"{name}.".startswith(f"{ok}.") for ok in allowed)
  ]


def undocumented(source: str) -> list[str]:
  """Returns the public names of a module that lack a docstring."""
  module = ast.parse(source)
  kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  names = ["module"] if module.body and not ast.get_docstring(module) else []
  return names + [
    node.name
    for node in module.body
    if isinstance(node, kinds)
    and not node.name.startswith("_")
    and not ast.get_docstring(node)
  ]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package):
  wrong = {
    str(path.relative_to(ROOT)): names
    for path in python_files(package)
    if (names := wrong_imports(package, path.read_text()))
  }
  assert not wrong


@pytest.mark.parametrize(
  ("package", "source", "wrong"),
  [
    ("rl", "from envs import base\nfrom rl import losses", []),
    ("rl", "from envs import base, textarena", ["envs.textarena"]),
    ("rl", "def f():\n  import launch.train", ["launch.train"]),
    (
      "models",
      "import numpy as np\nfrom rl.engine.contract import x",
      ["rl.engine.contract.x"],
    ),
    ("envs", "import envs.base\nimport envs_of_others", []),
    ("configs", "from launch import flags", ["launch.cli.flags"]),
    ("envs", "from .base import Task", [".base.Task"]),
  ],
)
def test_a_wrong_import_is_seen(package, source, wrong):
  assert wrong_imports(package, source) == wrong


def test_files_are_short():
  lengths = {p: len(p.read_text().splitlines()) for p in python_files()}
  assert not {p: n for p, n in lengths.items() if n > MAX_LINES}


def test_files_are_named_for_what_they_hold():
  assert not [p for p in python_files() if p.stem in NAMES_THAT_SAY_NOTHING]


def test_public_names_have_docstrings():
  missing = {
    str(path.relative_to(ROOT)): names
    for path in python_files("envs", "models", "rl", "launch")
    if (names := undocumented(path.read_text()))
  }
  assert not missing


def test_a_missing_docstring_is_seen():
  source = "def f():\n  pass\n\nclass _C:\n  pass\n\nclass D:\n  'Says.'\n"
  assert undocumented(source) == ["module", "f"]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY])
def test_nothing_depends_on_one_machine_or_registry(pattern):
  found = []
  for path in project_files():
    try:
      lines = path.read_text().splitlines()
    except UnicodeDecodeError:
      continue
    found += [
      f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
      for number, line in enumerate(lines, start=1)
      if pattern.search(line)
    ]
  assert not found


def test_paths_of_one_machine_are_told_from_others():
  assert MACHINE_PATH.search("cd /" + "root/x")
  assert MACHINE_PATH.search("'/" + "tmp'")
  assert not MACHINE_PATH.search("https://example.org/home, tests/work, /usr")
