"""The program in the sandbox that tries an answer: tests here, answer there.

  tests, in this process --name, arguments--> answer, in a process of its own
                         <---plain value-----

Only the first process knows the tests and the word that says that they have
passed, or are wrong themselves. The second can answer calls, or not; it cannot
read the first, which has no /proc and whose memory the sandbox's filter of
system calls guards.

It is given to the sandbox as text, so it imports the standard library alone.
"""

import ast
import builtins
import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import types
from collections import abc
from typing import IO, Any, NoReturn


class _Literals(ast.NodeTransformer):
  """Makes constants of what `ast.literal_eval` does not know."""

  def visit_Name(self, node: ast.Name) -> ast.AST:
    values = {"inf": math.inf, "nan": math.nan}
    return ast.Constant(values[node.id]) if node.id in values else node

  def visit_Call(self, node: ast.Call) -> ast.AST:
    self.generic_visit(node)
    match node:
      case ast.Call(func=ast.Name(id="frozenset"), args=args, keywords=[]):
        value: Any = frozenset(*map(ast.literal_eval, args))
        return ast.Constant(value)
    return node


def _read(text: str) -> Any:
  """Returns plain data of its `repr`, which runs nothing."""
  return ast.literal_eval(_Literals().visit(ast.parse(text, mode="eval")))


def _plain(value: Any) -> Any:
  """Returns the plain data that a value is equal to; others as they are.

  A subclass has the value that its built-in class sees, whatever its methods.
  """
  numpy = sys.modules.get("numpy")
  match value:
    case bool():
      return value
    case int():
      return int.__int__(value)
    case float():
      return float.__float__(value)
    case complex():
      return complex.__complex__(value)
    case str():
      return str.__str__(value)
    case bytes() | bytearray():
      return bytes(memoryview(value))
    case list():
      return [_plain(of) for of in list.__iter__(value)]
    case tuple():
      return tuple(_plain(of) for of in tuple.__iter__(value))
    case frozenset():
      return frozenset(_plain(of) for of in frozenset.__iter__(value))
    case set():
      return {_plain(of) for of in set.__iter__(value)}
    case dict():
      return {_plain(key): _plain(of) for key, of in dict.items(value)}
    case abc.KeysView() | abc.ItemsView():
      return {_plain(of) for of in value}
  if numpy and isinstance(value, numpy.generic):
    return _plain(value.item())
  return value


def _is_plain(value: Any) -> bool:
  """Returns whether `_read` would read this value of `_plain`."""
  match value:
    case list() | tuple() | set() | frozenset():
      return all(map(_is_plain, value))
    case dict():
      return all(map(_is_plain, value.items()))
  return isinstance(value, bool | int | float | complex | str | bytes | None)


def _say(stream: IO[str], message: Any) -> None:
  stream.write(json.dumps(message) + "\n")
  stream.flush()


def _answer() -> None:
  """Defines what the answer does, and calls it as asked."""
  asked, told = sys.stdin, os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # The answer may print.
  module = types.ModuleType("answer")
  sys.modules["answer"] = module  # Dataclasses look for their module there.
  space = vars(module)
  exec(json.loads(asked.readline()), space)
  _say(told, [name for name, value in space.items() if callable(value)])
  for line in asked:
    name, *given = json.loads(line)
    args, kwargs = map(_read, given)
    try:
      value = space[name](*args, **kwargs)
    except BaseException as error:
      _say(told, _told(error))
    else:
      _say(told, [[], repr(_plain(value)), ""])


def _told(error: BaseException) -> tuple[list[str], str, str]:
  """Returns the names of its built-in classes, its arguments, and its text."""
  kinds = type(error).__mro__
  names = [of.__name__ for of in kinds if vars(builtins).get(of.__name__) is of]
  args = (str(error),)
  if names[0] == kinds[0].__name__:  # Others may put theirs into words.
    args = error.__reduce__()[1]  # `args` of an OSError leave out its file.
  return names, repr(_plain(args)), str(error)


class _Answer:
  """The answer's process; `_test` starts it, and tests call its functions.

  Attributes:
    functions: by their names.
    calls: number of calls that tests have made.
    raised: the exception of the last call that raised one.
  """

  def __init__(self, code: str, end: abc.Callable[[str], NoReturn]):
    """Starts it with its code; a fault of the tests is told to `end`."""
    self._process = subprocess.Popen(
      [sys.executable, "-P", "-s", "-B", __file__, "answer"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    self._end = end
    self.calls = 0
    self.raised: Exception | None = None
    assert self._process.stdin
    _say(self._process.stdin, code)
    self.functions = {
      name: functools.partial(self._call, name)
      for name in self._hear()
      # A `len` or `all` of the answer's own would decide the tests.
      if not name.startswith("_") and not hasattr(builtins, name)
    }

  def _hear(self) -> Any:
    assert self._process.stdout
    return json.loads(self._process.stdout.readline())

  def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Returns a function's value, or raises an exception as it did.

    Of an exception class of the answer's own, tests see the nearest builtin. A
    value that is no plain data, or none, ends the tests.
    """
    assert self._process.stdin
    self.calls += 1
    given = _plain((args, kwargs))
    if not _is_plain(given):
      self._end(
        f"`{name}` is called with other than plain data: {given!r:.300}"
      )
    _say(self._process.stdin, [name, *map(repr, given)])
    try:
      errors, text, words = self._hear()
      value = _made(errors, text, words) if errors else _read(text)
    except BaseException:
      os._exit(1)  # An exception here would be one that tests may wait for.
    if errors:
      self.raised = value
      raise value
    return value


def _made(names: abc.Sequence[str], args: str, words: str) -> Exception:
  """Returns an exception of the first class that can be made."""
  for kind in (getattr(builtins, name, None) for name in names):
    if isinstance(kind, type) and issubclass(kind, Exception):
      for given in (args, repr((words,))):
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
          return kind(*_read(given))
  raise ValueError(f"{names} are no exceptions of a function")


def _run(tests: str, answer: _Answer) -> str:
  """Runs the tests; returns a fault of theirs, "" if they have passed."""
  space: dict[str, Any] = {"__name__": "tests", **answer.functions}
  try:
    exec(compile(tests, "tests", "exec"), space)
    for name, test in list(space.items()):
      if name.startswith("test") and isinstance(test, types.FunctionType):
        test()
  except ImportError as error:
    if error is answer.raised:
      raise
    return f"{error}, on the machine of this sandbox"
  return "" if answer.calls else "they pass and call no function of the answer"


def _test() -> None:
  """Runs the tests; prints the word, and a fault of the tests if there is one.

  Without the word an answer has failed them.
  """
  code, tests, word = json.load(sys.stdin)
  for number in (signal.SIGINT, signal.SIGPIPE):
    signal.signal(number, signal.SIG_DFL)  # No exception for tests to catch.
  told = os.dup(1)
  os.dup2(2, 1)  # Tests may print.

  def end(fault: str) -> NoReturn:
    os.write(told, f"{word}{fault}".encode(errors="replace"))
    os._exit(0)

  end(_run(tests, _Answer(code, end)))


if __name__ == "__main__":
  sys.set_int_max_str_digits(0)  # CPU time is bounded anyway.
  _answer() if sys.argv[1:] == ["answer"] else _test()
