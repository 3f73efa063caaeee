"""Says what an error means, and what to do: twinmesh explain CODE.

  twinmesh explain TM-D01
  twinmesh explain          lists all codes

The page docs/errors.md has the same.
"""

import difflib
import re
import signal
import sys
import textwrap
from collections.abc import Iterator

from twinmesh import error_codes
from twinmesh.error_causes import CAUSES, Cause

_BY_NAME = {
  name: cause for cause in CAUSES for name in (cause.code, *cause.replies)
}
_LINK = re.compile(r"\[[^]]+\]\(([^)]+)\)")


def main() -> None:
  """Prints the causes that are named, or all codes."""
  names = sys.argv[1:]
  if {"--help", "-h"} & {*names}:
    print((__doc__ or "").strip())
  elif not names:
    print("\n".join(f"{one.code}  {one.title}" for one in CAUSES))
  else:
    print("\n\n\n".join(text(_named(name)) for name in names))


def _named(name: str) -> Cause:
  for known in (name, name.upper()):
    if known in _BY_NAME:
      return _BY_NAME[known]
  near = difflib.get_close_matches(name.upper(), _BY_NAME, 1)
  out = f"did you mean {near[0]}?" if near else "leave it out to see all"
  error_codes.fail(f"there is no code {name}; {out}", "TM-C04")


def text(cause: Cause) -> str:
  """Returns a cause in paragraphs, for a terminal of 80 columns."""
  return "\n\n".join(_paragraphs(cause))


def _paragraphs(cause: Cause) -> Iterator[str]:
  yield f"{cause.code}: {cause.title}"
  yield "\n".join(_filled(line, "  ") for line in cause.sees.splitlines())
  yield _filled(cause.why)
  yield _filled(_LINK.sub(r"docs/\1", cause.cure))
  if cause.code_block:
    yield textwrap.indent(cause.code_block, "  ")


def _filled(words: str, indent: str = "") -> str:
  own = indent + words[: len(words) - len(words.lstrip())]
  return textwrap.fill(
    words.strip(),
    80,
    initial_indent=own,
    subsequent_indent=own,
    break_on_hyphens=False,
    break_long_words=False,
  )


if __name__ == "__main__":
  # A reader that has seen enough, as in `... | head`, is no error.
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  main()
