"""Codes of errors: every error that a user reads has that of its cause.

  error: runs/first does not exist
  more: twinmesh explain TM-D01

The table of `error_causes` says which classes, functions and packages raise
errors of a cause. So a message is written where it is raised, and its code is
found where it is printed: by `text` or `fail`, and nowhere else.
"""

import sys
import traceback
import types
from typing import NoReturn

from twinmesh.error_causes import CAUSES

ERROR = "error: "
"""Beginning of the line that tells one."""
UNEXPECTED = "TM-X03"
_TOPS = ("rl", "models", "envs", "launch", "configs", "twinmesh")
_BY_CODE = {cause.code: cause for cause in CAUSES}
_BY_PLACE = {place: cause.code for cause in CAUSES for place in cause.of}
_WRONG_USE = 2


def code_of(error: BaseException, other: str = UNEXPECTED) -> str:
  """Returns the code of an error that was raised.

  An error that wraps another, by `raise .. from`, has the code of that one, if
  it has one. A function counts before a class, and that before the module and
  its packages, which stand for ValueErrors only.

  Args:
    other: the code if none of these has one, as in code of the user's.
  """
  chain = [error]
  while (cause := chain[-1].__cause__) is not None and cause not in chain:
    chain.append(cause)
  codes = filter(None, map(_own_code, reversed(chain)))
  return next(codes, other)


def _own_code(error: BaseException) -> str:
  """Returns the code of an error without its causes, or ""."""
  places = [_place(x) for x, _ in traceback.walk_tb(error.__traceback__)]
  module, name = places[-1] if places else ("", "")
  is_ours = type(error).__module__.partition(".")[0] in _TOPS
  # Any other exception there would be a mistake of the function.
  if is_ours or isinstance(error, ValueError | OSError):
    code = _BY_PLACE.get(f"{module}:{name}", "")
    if code:
      return code
  for cls in type(error).mro():
    if code := _BY_PLACE.get(f"{cls.__module__}:{cls.__qualname__}"):
      return code
  if isinstance(error, ValueError):
    return place_code(module, name)
  if isinstance(error, OSError):
    found = (_BY_PLACE.get(":".join(x), "") for x in reversed(places))
    return next(filter(None, found), "")
  return ""


def _place(frame: types.FrameType) -> tuple[str, str]:
  """Returns the module and the outermost function of a frame."""
  spec = frame.f_globals.get("__spec__")
  # That of a program is called __main__.
  module = spec.name if spec else frame.f_globals.get("__name__", "")
  return module, frame.f_code.co_qualname.partition(".<locals>")[0]


def place_code(module: str, function: str) -> str:
  """Returns the code of a ValueError by the place that raises it, or ""."""
  if code := _BY_PLACE.get(f"{module}:{function}"):
    return code
  while module and module not in _BY_PLACE:
    module = module.rpartition(".")[0]
  return _BY_PLACE.get(module, "")


def more(code: str) -> str:
  """Returns the line that follows an error."""
  return f"more: twinmesh explain {_BY_CODE[code].code}"


def text(error: BaseException | str, code: str = "") -> str:
  """Returns what a user reads of an error, and the line with its code.

  Args:
    code: for a text, or an error of another's class.
  """
  if isinstance(error, BaseException):
    code = code or code_of(error)
  return f"{ERROR}{error}\n{more(code)}"


def fail(
  error: BaseException | str, code: str = "", *, status: int = _WRONG_USE
) -> NoReturn:
  """Prints the text of an error on stderr, and ends the process.

  Args:
    status: exit code; 2 says that the command line or a setting is wrong.
  """
  print(text(error, code), file=sys.stderr)
  sys.exit(status)
