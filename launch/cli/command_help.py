"""The --help of a command, and the errors of its flags.

absl lists flags by name and with a line for each default, and ends with code 1.
Here they stand in the order in which the program defines them, the important
ones first, and a page fits two screens.
"""

import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags as absl_flags

from twinmesh import error_codes

_WIDTH = 80
_INDENT = 26
_SHORT = {"--help", "-help", "-h", "-?", "--helpshort"}
_FULL = {"--helpfull", "-helpfull"}
WRONG_FLAG, _MISSING = "TM-C01", "TM-C02"
_IS_REQUIRED = r"flag --(\w+)=None: Flag --\w+ must have a value"


def parse(argv: Sequence[str]) -> list[str]:
  """Returns the arguments that are not flags, once absl has read the others.

  --help ends the process with code 0, and a wrong flag with code 2.
  """
  asked = {*argv[1 : argv.index("--") if "--" in argv else None]}
  if asked & (_SHORT | _FULL):
    print(text(full=bool(asked & _FULL)))
    sys.exit()
  try:
    return absl_flags.FLAGS(list(argv))
  except absl_flags.Error as error:
    if missing := re.match(_IS_REQUIRED, str(error)):
      error_codes.fail(f"--{missing[1]} is missing; see --help", _MISSING)
    error_codes.fail(f"{error}{_setting(error)}", WRONG_FLAG)


def _setting(error: absl_flags.Error) -> str:
  """Returns the setting that an unknown flag may have meant, as absl does."""
  name, dot, rest = getattr(error, "flagname", "").partition(".")
  known = ["config"] if dot and "config" in absl_flags.FLAGS else []
  near = difflib.get_close_matches(name, known)
  return f". Did you mean: {near[0]}.{rest} ?" if near else ""


def text(*, full: bool = False) -> str:
  """Returns the help of this process' program.

  Args:
    full: with the flags of all modules that it imports.
  """
  program = sys.argv[0]
  own = absl_flags.FLAGS.get_key_flags_for_module(program)
  # Settings come first, wherever they are adopted from.
  own.sort(key=lambda flag: flag.name != "config")
  lines = [(sys.modules["__main__"].__doc__ or "").strip()]
  if own:
    lines += ["", "Flags, with their defaults:", *_lines(own)]
  if full:
    for module, flags in absl_flags.FLAGS.flags_by_module_dict().items():
      if others := [flag for flag in flags if flag not in own]:
        lines += ["", f"{module}:", *_lines(others)]
  else:
    lines += ["", "--helpfull lists the flags of absl and jax, too."]
  return "\n".join(lines)


def _lines(flags: Sequence[absl_flags.Flag[Any]]) -> Iterator[str]:
  """Yields each flag with its default, and its help beside it."""
  for flag in flags:
    left = f"  {_form(flag)}"
    # A line break of absl's own, behind the help of repeated flags.
    words = (flag.help or "").partition(";\n")[0]
    if len(left) >= _INDENT:
      yield left
      left = ""
    yield textwrap.fill(
      words,
      _WIDTH,
      initial_indent=left.ljust(_INDENT),
      subsequent_indent=" " * _INDENT,
      break_on_hyphens=False,
      break_long_words=False,
    )


def _form(flag: absl_flags.Flag[Any]) -> str:
  if flag.boolean:
    return f"--[no]{flag.name}" if flag.default else f"--{flag.name}"
  default = flag.default
  if default is None or default in ("", []):
    return f"--{flag.name}=.."
  shown = f"{default:g}" if isinstance(default, float) else default
  return f"--{flag.name}={shown}"
