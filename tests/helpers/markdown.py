"""Code blocks and commands of a Markdown page."""

import pathlib
import re
import shlex


def blocks(page: pathlib.Path, language: str = "") -> list[str]:
  """Returns the code blocks of a page in one language."""
  fences = re.findall(
    r"^ *```(.*?)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL
  )
  return [text for found, text in fences if found == language]


def block(page: pathlib.Path, part: str) -> str:
  """Returns the one block of Python on a page that has this part."""
  (found,) = (code for code in blocks(page, "python") if part in code)
  return found


def commands(page: pathlib.Path) -> list[list[str]]:
  """Returns the arguments of every command in a page's code blocks."""
  lines = "".join(blocks(page)).replace("\\\n", " ").splitlines()
  words = [shlex.split(line, comments=True) for line in lines if line.strip()]
  return [w for w in words if w[:1] == ["make"] or w[:2] == ["python", "-m"]]
