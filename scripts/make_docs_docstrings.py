"""Extension of griffe: docstrings as Markdown.

Drawings, tables and commands in a docstring are aligned by spaces. They become
blocks of code, so that the site shows them as they stand in the source.
"""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$", re.M)
_ALIGNED = re.compile(r"\S {3,}\S|^ {2,}\S|--[+>]|<-+[ -]|^python -m", re.M)


class Docstrings(griffe.Extension):
  """Rewrites every docstring before it is parsed."""

  def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
    """Called by griffe for each module, class, function and attribute."""
    if obj.docstring is not None:
      obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
  """Returns a docstring whose aligned blocks are fenced.

  From the first section on nothing changes but brackets in a row, which
  Markdown would take for a link.
  """
  section = _SECTION.search(docstring)
  end = section.start() if section else len(docstring)
  blocks = docstring[:end].split("\n\n")
  text = "\n\n".join(
    f"```text\n{block}\n```" if _ALIGNED.search(block) else _escaped(block)
    for block in blocks
    if block.strip()
  )
  if section:
    text += "\n\n" + _escaped(docstring[end:])
  return text


def _escaped(text: str) -> str:
  return text.replace("][", "]\\[")
