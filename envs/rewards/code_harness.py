"""The program in the sandbox that tries an answer: tests here, answer there.

  tests, in this process --name, arguments--> answer, in a process of its own
                         <---plain value-----

Only the first process knows the tests and the word that says that all have
passed. The second can answer calls, or not; it cannot read the first, which has
no /proc and whose memory the sandbox's filter of system calls guards.

It is given to the sandbox as text, so it imports the standard library alone.
"""

import ast
import builtins
import json
import math
import os
import signal
import subprocess
import sys
import types
from typing import IO, Any


class _Floats(ast.NodeTransformer):
  def visit_Name(self, node: ast.Name) -> ast.AST:
    values = {"inf": math.inf, "nan": math.nan}
    return ast.Constant(values[node.id]) if node.id in values else node


def _plain(text: str) -> Any:
  """Returns plain data of its `repr`, which runs nothing."""
  return ast.literal_eval(_Floats().visit(ast.parse(text, mode="eval")))


def _say(stream: IO[str], message: Any) -> None:
  stream.write(json.dumps(message) + "\n")
  stream.flush()


def _answer() -> None:
  """Defines what the answer does, and calls it as asked."""
  asked, told = sys.stdin, os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # The answer may print.
  space: dict[str, Any] = {"__name__": "answer"}
  exec(json.loads(asked.readline()), space)
  _say(told, [name for name, value in space.items() if callable(value)])
  for line in asked:
    name, args, kwargs = json.loads(line)
    try:
      value = space[name](*_plain(args), **_plain(kwargs))
      _say(told, ["", repr(value)])
    except BaseException as error:
      _say(told, [type(error).__name__, str(error)])


class _Function:
  """A function of the answer."""

  def __init__(self, process: subprocess.Popen[str], name: str):
    self._process = process
    self._name = name

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Returns its value, or raises an exception of the same name."""
    ask, told = self._process.stdin, self._process.stdout
    assert ask
    assert told
    _say(ask, [self._name, repr(args), repr(kwargs)])
    error, text = json.loads(told.readline())
    if not error:
      return _plain(text)
    kind = getattr(builtins, error, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
      raise _made(kind, text)
    raise RuntimeError(text)


def _made(kind: type[Exception], text: str) -> Exception:
  try:
    return kind(text)
  except TypeError:  # Such as UnicodeDecodeError, which needs more than text.
    return RuntimeError(text)


def _test() -> None:
  """Runs the tests; prints the word if all have passed."""
  answer, tests, word = json.load(sys.stdin)
  for number in (signal.SIGINT, signal.SIGPIPE):
    signal.signal(number, signal.SIG_DFL)  # No exception for tests to catch.
  told = os.dup(1)
  os.dup2(2, 1)  # Tests may print.
  process = subprocess.Popen(
    [sys.executable, "-P", "-s", "-B", __file__, "answer"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  assert process.stdin
  assert process.stdout
  _say(process.stdin, answer)
  space: dict[str, Any] = {"__name__": "tests"}
  for name in json.loads(process.stdout.readline()):
    # A `len` or `all` of the answer's own would decide the tests.
    if not name.startswith("_") and not hasattr(builtins, name):
      space[name] = _Function(process, name)
  exec(compile(tests, "tests", "exec"), space)
  for name, test in list(space.items()):
    if name.startswith("test") and isinstance(test, types.FunctionType):
      test()
  os.write(told, word.encode())
  os._exit(0)


if __name__ == "__main__":
  _answer() if sys.argv[1:] == ["answer"] else _test()
