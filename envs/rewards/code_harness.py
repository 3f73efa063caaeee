"""The program in the sandbox that tries an answer: tests here, answer there.

  tests, in this process --name, arguments--> answer, in a process of its own
                         <---plain value-----

Only the first process knows the tests and the word that says that they have
passed, or are wrong themselves. The second can answer calls, or not; it cannot
read the first, which has no /proc and whose memory the sandbox's filter of
system calls guards.

It is given to the sandbox as text, so it imports the standard library alone.
"""

import builtins
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import types
from collections import abc
from typing import IO, Any, NoReturn

_KINDS: dict[str, abc.Callable[[Any], Any]] = {
  "tuple": tuple,
  "set": set,
  "frozenset": frozenset,
  "dict": dict,
  "bytes": bytes.fromhex,
  "complex": lambda parts: complex(*parts),
}


def _coded(value: Any) -> Any:
  """Returns the plain data that a value is equal to, for JSON.

  Lists are lists there, and other containers objects of one member. A subclass
  has the value that its built-in class sees, whatever its methods.

  Raises:
    TypeError: it is equal to no plain data.
  """
  match value:
    case None | bool():
      return value
    case int():
      return int.__int__(value)
    case float():
      return float.__float__(value)
    case str():
      return str.__str__(value)
    case list():
      return [_coded(of) for of in list.__iter__(value)]
    case tuple():
      return {"tuple": [_coded(of) for of in tuple.__iter__(value)]}
    case dict():
      pairs = dict.items(value)
      return {"dict": [[_coded(key), _coded(of)] for key, of in pairs]}
    case frozenset():
      return {"frozenset": [_coded(of) for of in frozenset.__iter__(value)]}
    case set():
      return {"set": [_coded(of) for of in set.__iter__(value)]}
    case abc.KeysView() | abc.ItemsView():
      return {"set": [_coded(of) for of in value]}
    case bytes() | bytearray():
      return {"bytes": memoryview(value).hex()}
    case complex():
      number = complex.__complex__(value)
      return {"complex": [number.real, number.imag]}
    case _Object():
      return {"object": value._number}
  numpy = sys.modules.get("numpy")
  if numpy and isinstance(value, numpy.generic):
    return _coded(value.item())
  raise TypeError(f"{value!r:.300}")


def _read(text: str) -> Any:
  """Returns the plain data of JSON, which runs nothing."""

  def made(coded: dict[str, Any]) -> Any:
    ((kind, value),) = coded.items()
    return _KINDS[kind](value)

  return json.loads(text, object_hook=made)


def _say(stream: IO[str], message: Any) -> None:
  stream.write(json.dumps(message) + "\n")
  stream.flush()


def _answer() -> None:
  """Defines what the answer does, and calls it as asked."""
  asked, told = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
  for own in (0, 1):
    os.dup2(2, own)  # The answer reads nothing, and may print.
  objects: list[Any] = []
  _KINDS["object"] = objects.__getitem__
  module = types.ModuleType("answer")
  sys.modules["answer"] = module  # Dataclasses look for their module there.
  space = vars(module)
  exec(json.loads(asked.readline()), space)
  _say(told, [name for name, value in space.items() if callable(value)])
  for line in asked:
    owner, name, args, kwargs = _read(line)
    try:
      function = space[name] if owner is None else getattr(owner, name)
      value = function(*args, **kwargs)
    except BaseException as error:
      _say(told, _told(error))
      continue
    try:
      coded = _coded(value)
    except TypeError:
      if not isinstance(function, type):
        raise
      coded = {"object": len(objects)}
      objects.append(value)
    _say(told, [[], coded, ""])


def _told(error: BaseException) -> tuple[list[str], Any, str]:
  """Returns the names of its built-in classes, its arguments, and its text."""
  kinds = type(error).__mro__
  names = [of.__name__ for of in kinds if vars(builtins).get(of.__name__) is of]
  args = (str(error),)
  if names[0] == kinds[0].__name__:  # Others may put theirs into words.
    args = error.__reduce__()[1]  # `args` of an OSError leave out its file.
  try:
    return names, _coded(args), str(error)
  except TypeError:
    return names, None, str(error)


class _Opaque:
  """A value that ends the tests when it is compared, or asked for its truth.

  It may stand in the place of a value that a function should have returned.
  """

  def _end(self, *_: object) -> NoReturn:
    os._exit(1)

  __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _end


class _Object(_Opaque):
  """An object of the answer: tests call its methods, and pass it on."""

  def __init__(self, call: abc.Callable[..., Any], number: int):
    self._call, self._number = call, number

  def __getattr__(self, name: str) -> "_Method":
    if name.startswith("_"):
      raise AttributeError(name)
    return _Method(functools.partial(self._call, self, name))


class _Method(_Opaque):
  """A method of such an object, or an attribute, which cannot be read."""

  def __init__(self, call: abc.Callable[..., Any]):
    self._call = call

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._call(*args, **kwargs)


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
      text=True,
    )
    self._end = end
    self.calls = 0
    self.raised: Exception | None = None
    _KINDS["object"] = functools.partial(_Object, self._call)
    assert self._process.stdin
    _say(self._process.stdin, code)
    self.functions = {
      name: functools.partial(self._call, None, name)
      for name in self._hear()
      # A `len` or `all` of the answer's own would decide the tests.
      if not name.startswith("_") and not hasattr(builtins, name)
    }

  def _hear(self) -> Any:
    assert self._process.stdout
    return _read(self._process.stdout.readline())

  def _call(
    self, owner: _Object | None, name: str, /, *args: Any, **kwargs: Any
  ) -> Any:
    """Returns the value of a function or a method, or raises as it did.

    A class gives an `_Object`. Of an exception class of the answer's own, tests
    see the nearest builtin. Another value that is no plain data, or none, ends
    the tests.
    """
    assert self._process.stdin
    self.calls += 1
    try:
      given = [_coded(owner), name, _coded(list(args)), _coded(kwargs)]
    except (TypeError, RecursionError) as error:
      self._end(f"`{name}` is called with other than plain data: {error}")
    _say(self._process.stdin, given)
    try:
      errors, value, words = self._hear()
      if errors:
        value = _made(errors, value, words)
    except BaseException:
      os._exit(1)  # An exception here would be one that tests may wait for.
    if errors:
      self.raised = value
      raise value
    return value


def _made(names: abc.Sequence[str], args: Any, words: str) -> Exception:
  """Returns an exception of the first class that can be made."""
  for kind in (getattr(builtins, name, None) for name in names):
    if isinstance(kind, type) and issubclass(kind, Exception):
      for given in (args, (words,)):
        with contextlib.suppress(TypeError, ValueError):
          return kind(*given)
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
  for own in (1, 2):  # Tests may print, and more than the sandbox permits.
    os.dup2(os.open(os.devnull, os.O_RDWR), own)

  def end(fault: str) -> NoReturn:
    os.write(told, f"{word}{fault}".encode(errors="replace"))
    os._exit(0)

  end(_run(tests, _Answer(code, end)))


if __name__ == "__main__":
  sys.set_int_max_str_digits(0)  # CPU time is bounded anyway.
  _answer() if sys.argv[1:] == ["answer"] else _test()
