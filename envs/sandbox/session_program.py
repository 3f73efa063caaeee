"""The program of a session: runs pieces of code, one after the other.

It is given to the sandbox as text, so it imports the standard library alone.
What a piece prints goes to stdout as it comes, then a line that begins with a
byte 0 and the word of its request. A piece that writes such a line itself
deceives nobody but its own author, who may print anything in any case.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import traceback
from typing import Any

_MAX_SHOWN = 8000  # Characters of a value, and of a traceback.


def _show(value: Any) -> None:
  """Prints the value of the last expression, as an interactive Python does."""
  if value is not None:
    text = repr(value)
    cut = "..." if len(text) > _MAX_SHOWN else ""
    print(text[:_MAX_SHOWN] + cut)


def _run(code: str, name: str, space: dict[str, Any]) -> tuple[str, str]:
  """Runs one piece; returns (status, traceback)."""
  linecache.cache[name] = len(code), None, code.splitlines(True), name
  try:
    body = ast.parse(code, name).body
    last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
    exec(compile(ast.Module(body, []), name, "exec"), space)
    exec(compile(ast.Interactive(last), name, "single"), space)
    return "ok", ""
  except BaseException as error:
    # Without the frames above, which are no part of the piece.
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != name:
      frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    status = "memory" if isinstance(error, MemoryError) else "error"
    return status, "".join(lines)[-_MAX_SHOWN:]


def _serve() -> None:
  asked, told = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
  os.dup2(1, 2)
  for stream in (sys.stdout, sys.stderr):
    assert isinstance(stream, io.TextIOWrapper)
    # What comes before a time limit is to be seen.
    stream.reconfigure(line_buffering=True, errors="backslashreplace")
  sys.displayhook = _show
  space: dict[str, Any] = {"__name__": "__main__"}
  for number, line in enumerate(asked, start=1):
    word, code = json.loads(line)
    outcome = _run(code, f"<call {number}>", space)
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(BaseException):  # It may be anything by now.
        stream.flush()
    told.write(f"\0{word}{json.dumps(outcome)}\n".encode())
    told.flush()


if __name__ == "__main__":
  _serve()
