"""Compares mathematical expressions in processes that may be killed.

equal -> an idle process, or a new one -> is the reference an expression?
                                       -> is the answer equal? or its death

math-verify limits its time by signals, which work in a main thread only and
not within one long operation: 9**9**9**9 would stop all threads, as it keeps
the interpreter's lock. Here the kernel ends a process that has used its time.
Time of the processor counts, so a busy machine changes no result.

The file is also the program of the process. It imports nothing of ours.
"""

import contextlib
import json
import logging
import resource
import signal
import subprocess
import sys
from multiprocessing import connection
from typing import Any

_MEMORY_BYTES = 2 << 30
# Long enough to start the process on a busy machine.
_WALL_S = 25.0
# Of one process, since parsers keep some memory of every text.
_MAX_CALLS = 1000
_ENDED_BY_ANSWER = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)


class _Process:
  """One process and the pipe to it; used by one thread at a time."""

  def __init__(self) -> None:
    self._pipe, theirs = connection.Pipe()
    command = [sys.executable, "-P", __file__, str(theirs.fileno())]
    with theirs:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is for the run, which ends this.
      )
    self._calls = 0
    self._is_idle = True

  def equal(self, reference: str, answer: str, cpu_s: float) -> bool:
    self._calls, self._is_idle = self._calls + 1, False
    self._pipe.send_bytes(json.dumps([reference, answer, cpu_s]).encode())
    status, is_read, result = 0, False, False
    try:
      is_read = self._receive()
      result = is_read and self._receive()
      self._is_idle = True
    except EOFError:
      status = self._process.wait()
    if status and (not is_read or status not in _ENDED_BY_ANSWER):
      raise ChildProcessError(
        f"the process that compares expressions ended with status {status} "
        f"on reference answer {reference!r}"
      )
    if not is_read:
      raise ValueError(f"reference answer {reference!r} is no LaTeX expression")
    return result

  @property
  def is_reusable(self) -> bool:
    return self._is_idle and self._calls < _MAX_CALLS

  def close(self) -> None:
    self._pipe.close()
    self._process.kill()
    self._process.wait()

  def _receive(self) -> bool:
    if not self._pipe.poll(_WALL_S):
      raise TimeoutError(f"no comparison of expressions within {_WALL_S:g} s")
    return json.loads(self._pipe.recv_bytes())


_idle: list[_Process] = []


def equal(reference: str, answer: str, cpu_s: float) -> bool:
  """Returns whether two LaTeX expressions are equal; blocks.

  Args:
    cpu_s: seconds of the processor; an answer that takes longer is not equal.

  Raises:
    ValueError: the reference is no expression.
    OSError: the process was ended by others, or is late.
  """
  try:
    process = _idle.pop()
  except IndexError:
    process = _Process()
  try:
    return process.equal(reference, answer, cpu_s)
  finally:
    if process.is_reusable:
      _idle.append(process)
    else:
      process.close()


def _serve(pipe: connection.Connection) -> None:
  """Answers requests until the other side is closed."""
  with contextlib.suppress(ValueError, OSError):  # Not every system has it.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  logging.disable()
  import math_verify
  import sympy

  latex = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

  def parsed(text: str) -> list[Any]:
    return math_verify.parse(
      f"\\boxed{{{text}}}",
      latex,
      fallback_mode="no_fallback",
      parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )

  def is_near(a: Any, b: Any) -> bool:
    """Returns False for two numbers that differ in six significant digits."""
    a, b = (
      x.rhs if isinstance(x, sympy.Eq) and x.lhs.is_Symbol else x
      for x in (a, b)
    )
    # A percentage is trusted: math-verify lets 50% equal 50.
    if any(not x.is_number or x.has(sympy.UnevaluatedExpr) for x in (a, b)):
      return True
    a, b = sympy.N(a, 15), sympy.N(b, 15)
    # Above what sympy leaves of an exact 0, as of sqrt(2)^2 - 2.
    return bool(abs(a - b) <= max(abs(a), abs(b)) * 5e-6 + 1e-90)

  def equal(a: Any, b: Any) -> bool:
    # To six decimals, in which all small numbers are 0. An interval may be
    # written as x < 2; of other sets, {1, 2} would equal 1 < x < 2.
    if not math_verify.verify(
      a,
      b,
      timeout_seconds=None,
      allow_set_relation_comp=isinstance(a, sympy.Interval | sympy.Union),
    ):
      return False
    try:
      return is_near(a, b)
    except Exception:  # Whatever sympy raises where it cannot compute one.
      return True

  def send(value: bool) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    pipe.send_bytes(json.dumps(value).encode())

  while True:
    reference, answer, cpu_s = json.loads(pipe.recv_bytes())
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    expected = parsed(reference)
    send(bool(expected))
    if expected:
      signal.setitimer(signal.ITIMER_PROF, cpu_s)
      found = parsed(answer)
      send(any(equal(a, b) for a in expected for b in found))


if __name__ == "__main__":
  with contextlib.suppress(EOFError):
    _serve(connection.Connection(int(sys.argv[1])))
