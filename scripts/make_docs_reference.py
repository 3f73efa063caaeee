"""Hook of mkdocs: the API reference, a page for each package.

Pages exist only while the site is built. What a page shows is read from the
source by mkdocstrings; nothing of ours is imported.
"""

import ast
import pathlib
from collections.abc import Iterator

from mkdocs.config import defaults
from mkdocs.structure import files as files_lib

ROOT = pathlib.Path(__file__).parents[1]
_TOPS = ("rl", "models", "launch", "envs")
_TITLE = "API reference"


def on_files(
  files: files_lib.Files, config: defaults.MkDocsConfig
) -> files_lib.Files:
  """Adds the pages, and their names to the navigation."""
  entries = []
  for top in _TOPS:
    packages = []
    for name, modules in _packages(top):
      path = f"reference/{name}.md"
      content = "\n\n".join(_page(name, modules)) + "\n"
      files.append(files_lib.File.generated(config, path, content=content))
      packages.append({name: path})
    entries.append({top: packages})
  for entry in config.nav or []:
    if _TITLE in entry:
      entry[_TITLE] = entries
  return files


def _packages(top: str) -> Iterator[tuple[str, list[str]]]:
  """Yields each package of a top package with its modules, both dotted."""
  for package in sorted((ROOT / top).rglob("__init__.py")):
    folder = package.parent
    name = ".".join(folder.relative_to(ROOT).parts)
    modules = [
      f"{name}.{path.stem}"
      for path in sorted(folder.glob("*.py"))
      if not path.stem.startswith("__")
    ]
    yield name, modules


def _page(name: str, modules: list[str]) -> Iterator[str]:
  path = ROOT / pathlib.Path(*name.split("."))
  yield f"# {name}"
  yield ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or ""
  for module in modules:
    yield f"::: {module}"
