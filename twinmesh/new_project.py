"""Begins a project with a task of your own: twinmesh new NAME.

NAME becomes a directory with a task, the config of a run that trains on it, and
tests of both. All of it works before a line is changed.
"""

import argparse
import pathlib
import re
import shlex
from typing import NoReturn

from twinmesh import error_codes

_TEMPLATE = pathlib.Path(__file__).with_name("template")


class NotNew(ValueError):
  """A directory that a project would overwrite."""


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    error_codes.fail(message, "TM-C02")


def main() -> None:
  """Writes the project, and prints the commands that come next."""
  parser = _Parser(
    prog="twinmesh new",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("name", metavar="NAME", help="directory; must be new")
  directory = pathlib.Path(parser.parse_args().name)
  try:
    write(directory)
  except (NotNew, OSError) as error:
    error_codes.fail(error)
  print(
    f"{directory} has a task, a config and tests. Next:\n"
    f"  cd {shlex.quote(str(directory))}\n"
    "  twinmesh try --config=config.py\n"
    "  twinmesh train --config=config.py --workdir=runs/first"
  )


def write(directory: pathlib.Path) -> None:
  """Writes a project into a directory that is new or empty.

  Raises:
    NotNew: it is a file, or holds something.
    OSError: it cannot be written.
  """
  if directory.exists() and not directory.is_dir():
    raise NotNew(f"{directory} is a file; choose another name")
  if directory.is_dir() and (names := sorted(directory.iterdir())):
    raise NotNew(
      f"{directory} holds {names[0].name}; choose another name, or an empty "
      "directory"
    )
  directory.mkdir(parents=True, exist_ok=True)
  # It becomes part of a docstring.
  title = re.sub(r'[\\"]', "_", directory.resolve().name)
  for file in sorted(_TEMPLATE.glob("*.txt")):
    name = file.stem if "." in file.stem else f".{file.stem}"
    text = file.read_text("utf-8").replace("NAME", title)
    (directory / name).write_text(text, "utf-8")


if __name__ == "__main__":
  main()
