"""The licences of all packages in requirements.lock, as a page.

They are read from the metadata of what is installed. A package of the lock that
is for another platform, and so is not installed here, keeps its line.
"""

import importlib.metadata
import pathlib
import re
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
_HEAD = """\
# Licences of dependencies

All packages that `requirements.lock` may install, with the tools of tests and
documentation, as their own metadata name their licences. A run needs few of
them; the rest comes with extras. This page comes from
`python -m scripts.make_docs`.

| package | version | licence |
| --- | --- | --- |
"""
_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
_ROW = re.compile(r"^\| ([\w.-]+) \| \d\S* \| (.+) \|$", re.MULTILINE)
_CLASSIFIER = "License :: "
_MAX_LENGTH = 60


def page() -> str:
  """Returns the whole page."""
  known = dict(listed()) if PAGE.exists() else {}
  return _HEAD + "".join(
    f"| {name} | {version} | {licence} |\n"
    for name, version, licence in rows(known)
  )


def listed() -> list[tuple[str, str]]:
  """Returns name and licence of each package, as the page has them."""
  return _ROW.findall(PAGE.read_text("utf-8"))


def rows(known: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
  """Yields name, version and licence of each package of the lock.

  Args:
    known: licences of packages that are not installed.
  """
  for name, version in _PIN.findall((ROOT / "requirements.lock").read_text()):
    try:
      metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
      yield name, version, known.get(name, "unknown")
      continue
    yield (
      name,
      version,
      of_metadata(
        _one(metadata.get_all("License-Expression")),
        _one(metadata.get_all("License")),
        metadata.get_all("Classifier") or [],
      ),
    )


def _one(found: list[str] | None) -> str | None:
  return found[0] if found else None


def of_metadata(
  expression: str | None, text: str | None, classifiers: list[str]
) -> str:
  """Returns the licence that a package states, in the order of precision.

  Args:
    expression: of SPDX.
    text: a name, or all of a licence.
    classifiers: of which those of licences count.
  """
  names = [
    found.rpartition(" :: ")[2]
    for found in classifiers
    if found.startswith(_CLASSIFIER) and not found.endswith(":: OSI Approved")
  ]
  first = (text or "").strip().partition("\n")[0].strip()
  short = first if len(first) <= _MAX_LENGTH else ""
  found = expression or ", ".join(names) or short or "unknown"
  return found.replace("|", "/")
