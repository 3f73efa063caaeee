"""Writes docs/errors.md, from the table of causes."""

from collections.abc import Iterator

from twinmesh.error_causes import CAUSES, THEMES, Cause

_INTRODUCTION = """# Errors

An error ends with a line such as `more: twinmesh explain TM-D01`: the code of
its cause. `twinmesh explain CODE` prints what this page has of it, and
`twinmesh explain` lists all codes; in a clone without the command it is
`python -m twinmesh explain`. A code stays the same while messages may change.

The exit code is 2 where the command line or a setting is wrong, so that nothing
has begun; 1 where something failed later; and 128 + the number of a signal that
ended the command.

<!-- Written by python -m scripts.make_docs from twinmesh/error_causes.py. -->
"""


def page() -> str:
  """Returns the text of docs/errors.md."""
  lines = [_INTRODUCTION]
  for letter, theme in THEMES.items():
    own = [cause for cause in CAUSES if cause.code[3] == letter]
    lines += [f"## {theme}", ""]
    lines += [line for cause in own for line in _entry(cause)]
  return "\n".join(lines).rstrip() + "\n"


def _entry(cause: Cause) -> Iterator[str]:
  # The anchor is the code alone, so that a link outlives a better title.
  yield f"### {cause.code}: {cause.title} {{ #{cause.code.lower()} }}"
  yield from ("", "```text", cause.sees, "```", "", cause.why, "", cause.cure)
  if cause.replies:
    names = ", ".join(f"`{name}`" for name in cause.replies)
    yield from ("", f"In replies of a server, `code` is {names}.")
  if cause.code_block:
    yield from ("", "```text", cause.code_block, "```")
  yield ""
