"""Guarded calls of user code: in time and checked, or a Fault.

guarded: call -> _run in its own task --+-> under a deadline -> check -> value
           |                            |       |
           +-- a future: no task -------+       +-- too late -> _leave_behind

A deadline stands still while its call queues: see `envs.call_clock`.
"""

import asyncio
import contextlib
import ctypes
import functools
import inspect
import json
import numbers
import reprlib
import sys
import types
from collections.abc import (
  Awaitable,
  Callable,
  Mapping,
  Sequence,
)
from typing import Any, TypeGuard, TypeVar, get_args

import numpy as np

from envs import base
from rl.runtime import watchdog as watchdog_lib

_T = TypeVar("_T")
_Outcome = tuple[Any, BaseException | None]

# A call that needs no wait ends where it is made. Python 3.11 cannot do that.
_EAGER: Any = {"eager_start": True} if sys.version_info >= (3, 12) else {}

TESTED_PYTHONS = ((3, 11), (3, 13))
"""First and last version of CPython whose internals `detach_task` knows."""

_ROLES = get_args(base.Role)
# Advantages are float32: a reward beyond this would be infinite there.
_MAX_REWARD = float(np.finfo(np.float32).max)


class Fault(Exception):
  """User code raised, overran its deadline or returned nonsense."""


class NotAwaitable(Fault):
  """A method that should be a coroutine returned something else."""


async def guarded(
  call: Callable[[], Awaitable[Any]],
  deadline_s: float,
  what: str,
  watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
  owner: str = "",
  of: str = "",
  late: set[asyncio.Task[Any]] | None = None,
  check: Callable[[Any], _T] = lambda value: value,
) -> _T:
  """Returns the checked result of user code, or raises Fault.

  What the call gives is awaited in a task of its own, which begins at once; a
  plain future of this loop needs none. A call that is late, or whose caller is
  cancelled, is cancelled and left behind: waiting for it would let code that
  catches its cancellation overrun the deadline.

  Args:
    call: makes the awaitable; it may raise or return nonsense too.
    what: a word for the call, such as "step".
    watchdog: lists that `owner` waits for `what` + `of`, and reports where the
      first of them that is late stands.
    late: holds the call while it is left behind, until it ends.
    check: returns the valid value or raises Fault; looking at the value may
      run user code too.
  """
  loop = asyncio.get_running_loop()
  answer: asyncio.Future[_Outcome | None] = loop.create_future()
  deadline = _Deadline(answer, deadline_s)
  with watchdog.track(owner=owner, what=what + of, deadline_s=deadline_s):
    outer = base.CLOCK.set(deadline)
    try:
      work = _begin(call, answer)
    finally:
      base.CLOCK.reset(outer)
    if not answer.done():
      deadline.begin()
      try:
        await answer
      finally:
        deadline.end()
        if not work.done():
          _leave_behind(work, set() if late is None else late)
  outcome = answer.result()
  if outcome is None:
    watchdog.late(owner, what + of, deadline_s, work)
    raise Fault(f"{what} took over {deadline_s:g} s")
  value, error = outcome
  if error is not None:
    raise Fault(raised(what, error)) from error
  try:
    return check(value)
  except (KeyboardInterrupt, Fault):
    raise
  except BaseException as error:
    raise Fault(f"{what} returned what raised {base.reason(error)}") from error


class _Deadline:
  """Gives None as the outcome of a call whose seconds are over.

  They count from now on; nothing is given before `begin`, nor after `end`.
  A `base.CallClock`.
  """

  def __init__(self, answer: asyncio.Future[_Outcome | None], seconds: float):
    self._answer = answer
    self._loop = answer.get_loop()
    # On the clock of the loop; while this one stands still, the seconds left.
    self._due_s = self._loop.time() + seconds
    self._waiting = self._held = 0
    self._is_set = False
    self._timer: asyncio.TimerHandle | None = None

  def begin(self) -> None:
    self._is_set = True
    self._renew()

  def end(self) -> None:
    self._is_set = False
    self._renew()

  def change(self, *, waiting: int = 0, held: int = 0) -> None:
    stood_still = self._stands_still
    self._waiting += waiting
    self._held += held
    if self._stands_still != stood_still:
      now_s = self._loop.time()
      self._due_s += now_s if stood_still else -now_s
      self._renew()

  @property
  def _stands_still(self) -> bool:
    return self._waiting > 0 and not self._held

  def _renew(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    if self._is_set and not self._stands_still:
      self._timer = self._loop.call_at(self._due_s, _give, self._answer, None)


def _begin(
  call: Callable[[], Awaitable[Any]],
  answer: asyncio.Future[_Outcome | None],
) -> asyncio.Future[Any]:
  """Begins a call that gives its outcome; returns what gives it later."""
  loop = answer.get_loop()
  try:
    work = awaitable(call())
  except KeyboardInterrupt:
    raise
  except BaseException as error:
    _give(answer, (None, error))
    return answer
  if _is_pending(work, loop):
    work.add_done_callback(functools.partial(_give_result, answer))
    return work
  return asyncio.Task(_run(work, answer), loop=loop, **_EAGER)


def awaitable(work: Any) -> Awaitable[Any]:
  """Returns what user code gave to await, or raises NotAwaitable."""
  if type(work) is types.CoroutineType or inspect.isawaitable(work):
    return work
  raise NotAwaitable(f"is no coroutine, it returned {_kind(work)}")


def raised(what: str, error: BaseException) -> str:
  """Returns why a call failed: "step raised OSError: no such game"."""
  if isinstance(error, NotAwaitable):
    return f"{what} {error}; write async def"
  if isinstance(error, Fault):
    return str(error)
  return f"{what} raised {base.reason(error)}"


async def _run(
  work: Awaitable[Any], answer: asyncio.Future[_Outcome | None]
) -> None:
  """Gives the value of an awaitable and None, or None and its exception.

  Caught here, since asyncio ends the loop when a task raises SystemExit.
  """
  try:
    _give(answer, (await work, None))
  except KeyboardInterrupt:
    raise
  except BaseException as error:
    _give(answer, (None, error))


def _is_pending(
  work: object, loop: asyncio.AbstractEventLoop
) -> TypeGuard[asyncio.Future[Any]]:
  """Returns True for a future to wait for; a subclass may do anything."""
  is_future = type(work) is asyncio.Future
  return is_future and work.get_loop() is loop and not work.done()


def _give_result(
  answer: asyncio.Future[_Outcome | None], work: asyncio.Future[Any]
) -> None:
  """Gives the outcome of a future that is done."""
  try:
    _give(answer, (work.result(), None))
  except BaseException as error:
    _give(answer, (None, error))


def _give(
  answer: asyncio.Future[_Outcome | None], outcome: _Outcome | None
) -> None:
  """Ends a wait; the first to do so decides."""
  if not answer.done():
    answer.set_result(outcome)


def _leave_behind(
  work: asyncio.Future[Any], late: set[asyncio.Task[Any]]
) -> None:
  """Cancels a call that nobody waits for any more."""
  work.cancel()
  if isinstance(work, asyncio.Task):  # A future ends as it is cancelled.
    late.add(work)
    work.add_done_callback(late.discard)
    detach_task(work)


def detach_task(task: asyncio.Task[Any]) -> None:
  """Lets the loop and the process end although a task resists being cancelled.

  `asyncio.run` waits for every task that it knows, and the end of the process
  closes every coroutine that it collects; user code that catches both would
  run forever. Python offers no public remedy, so this uses CPython's internals:
  see TESTED_PYTHONS.
  """
  asyncio.tasks._unregister_task(task)  # asyncio.run does not wait for it.
  held = ctypes.py_object(task)
  ctypes.pythonapi.Py_IncRef(held)  # The end of the process does not close it.
  task.add_done_callback(lambda _: ctypes.pythonapi.Py_DecRef(held))


def contained(call: Callable[..., _T], what: str, *args: Any) -> _T:
  """Returns the result of user code; whatever it raises becomes a Fault."""
  try:
    return call(*args)
  except (KeyboardInterrupt, Fault):
    raise
  except BaseException as error:
    raise Fault(f"{what} raised {base.reason(error)}") from error


def checked_environment(built: Any) -> Any:
  """Returns an environment or an agent, or raises Fault."""
  if isinstance(built, type):
    raise Fault(f"building it returned the class {built.__name__}; call it")
  lacks = [x for x in ("start", "step", "close") if not hasattr(built, x)]
  if lacks and not isinstance(built, base.Agent):
    raise Fault(
      f"building it returned {_kind(built)}, not an environment: it has no "
      f"{', '.join(lacks)}"
    )
  return built


def checked_messages(messages: object, what: str) -> list[base.Message]:
  """Returns valid messages, or raises Fault."""
  if not isinstance(messages, Sequence):
    raise Fault(f"{what} returned {_kind(messages)}, not a list of messages")
  said = contained(list, f"{what} returned messages, which", messages)
  for message in said:
    if not isinstance(message, base.Message):
      raise Fault(f"{what} returned {_kind(message)} in place of a Message")
    texts = isinstance(message.role, str) and isinstance(message.content, str)
    if not texts or message.role not in _ROLES:
      raise Fault(
        f"{what} returned a message of role {_shown(message.role)} whose "
        f"content is {_kind(message.content)}"
      )
  return said


def checked_tools(tools: object) -> list[dict[str, Any]]:
  """Returns tools as plain JSON data, or raises Fault."""
  if not isinstance(tools, Sequence) or isinstance(tools, str):
    raise Fault(f"tools are {_kind(tools)}, not a list of JSON schemas")
  if not tools:
    return []
  copied = contained(
    lambda: json.loads(json.dumps(list(tools), allow_nan=False)), "its tools"
  )
  for tool in copied:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
      raise Fault(
        f"tool {_shown(tool)} has no name; use the form of the OpenAI API: "
        '{"type": "function", "function": {"name": ..., "parameters": ...}}'
      )
  return copied


def _checked_metrics(metrics: object, what: str) -> dict[str, float]:
  if not isinstance(metrics, Mapping):
    raise Fault(f"{what} returned metrics={_kind(metrics)}, not a mapping")
  copied = contained(lambda: dict(metrics), f"reading the metrics of {what}")
  return {
    str(name): checked_reward(value, f"metric {_shown(name)}")
    for name, value in copied.items()
  }


def checked_step(step: object) -> base.Step:
  """Returns a valid step, or raises Fault."""
  if not isinstance(step, base.Step):
    raise Fault(f"step returned {_kind(step)}, not a Step")
  if not isinstance(step.done, (bool, np.bool_)):
    raise Fault(f"step returned done={_kind(step.done)}, not a bool")
  messages = checked_messages(step.messages, "step")
  metrics = _checked_metrics(step.metrics, "step") if step.metrics else {}
  reward = checked_reward(step.reward)
  return base.Step(messages, reward, bool(step.done), metrics)


def checked_result(result: object) -> base.AgentResult:
  """Returns a valid result of an agent, or raises Fault."""
  if not isinstance(result, base.AgentResult):
    raise Fault(f"run returned {_kind(result)}, not an AgentResult")
  return base.AgentResult(
    None if result.reward is None else checked_reward(result.reward),
    _checked_metrics(result.metrics, "run"),
  )


def checked_reward(reward: object, what: str = "reward") -> float:
  """Returns a number that is finite as float32, or raises Fault.

  True is 1, and False 0. An array of no axes, of any library, is its number.
  """
  if type(reward) is float and abs(reward) <= _MAX_REWARD:
    return reward  # The common case, and the rest takes longer.
  if getattr(reward, "ndim", None) == 0:
    with contextlib.suppress(Exception):
      reward = reward.item()  # pyright: ignore[reportAttributeAccessIssue]
  # numpy's numbers are Real too, and a comparison counts as 1 or 0.
  if not isinstance(reward, (numbers.Real, np.bool_)):
    raise Fault(f"{what} is {_kind(reward)}, not a number")
  # An int may be too large for float(), and a user's class may do anything.
  with contextlib.suppress(Exception):
    value = float(reward)
    if abs(value) <= _MAX_REWARD:
      return value
  raise Fault(f"{what} {_shown(reward)} is not a finite number (float32)")


def checked_grades(
  grades: object, count: int
) -> list[tuple[float, dict[str, float]]]:
  """Returns (value, parts) of each of so many valid grades, or raises Fault."""
  try:
    given = base.checked_grades(grades, count, "reward")
  except ValueError as error:
    raise Fault(str(error)) from error
  return [_checked_grade(grade) for grade in given]


def _checked_grade(grade: base.Grade) -> tuple[float, dict[str, float]]:
  if not isinstance(grade.parts, Mapping):
    raise Fault(f"reward returned parts={_kind(grade.parts)}, not a mapping")
  # Before their sum, which one of them may have made infinite or nan.
  parts = {
    str(name): checked_reward(part, f"part {_shown(name)} of the reward")
    for name, part in grade.parts.items()
  }
  return checked_reward(grade.value), parts


def _kind(value: object) -> str:
  return "None" if value is None else type(value).__name__


def _shown(value: object) -> str:
  """Returns a short repr, or the type if repr fails."""
  try:
    return reprlib.repr(value)
  except (Exception, SystemExit):
    return _kind(value)
