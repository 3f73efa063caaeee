"""Where the time of a dispatch goes, by wrapping the engine's own functions.

  choose -> build -> queue ~> launch -> program -> fetch
                                                     |
                                    absorb <- wake <~+

Straight arrows stay in a thread: the event loop's or the mesh's.
"""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from rl.engine.builtin import dispatch_plan
from rl.engine.builtin import engine as builtin_engine

STEPS = (
  "choose", "build", "queue", "launch", "program", "fetch", "wake", "absorb",
)  # fmt: skip


class _Stopwatch:
  """Seconds of each step, by the dispatch."""

  def __init__(self, stack: contextlib.ExitStack):
    self.taken: dict[str, list[float]] = collections.defaultdict(list)
    self._stack = stack

  def replace(self, owner: Any, name: str, function: Any) -> None:
    """Puts a function in the place of another until the stack unwinds."""
    self._stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, function)

  def wrap(self, owner: Any, name: str, step: str) -> None:
    """Times all calls of a function as a step."""
    self.replace(owner, name, self.timed(getattr(owner, name), step))

  def timed(self, function: Callable[..., Any], step: str) -> Any:
    """Returns the function with its calls timed as a step."""

    def call(*args, **kwargs):
      start = time.monotonic()
      try:
        return function(*args, **kwargs)
      finally:
        self.taken[step].append(time.monotonic() - start)

    return call


@contextlib.contextmanager
def measured(
  served: builtin_engine.BuiltinEngine,
) -> Iterator[dict[str, list[float]]]:
  """Yields the seconds of each step of the dispatches in the body."""
  runner, ends = served._runner, collections.deque[float]()
  with contextlib.ExitStack() as stack:
    watch = _Stopwatch(stack)
    watch.wrap(served._scheduler, "next", "choose")
    watch.wrap(dispatch_plan, "build", "build")
    watch.wrap(served._queue, "apply_results", "absorb")
    # The results are ready when they are fetched.
    watch.wrap(jax, "device_get", "fetch")
    programs = dict(runner._programs)
    stack.callback(runner._programs.update, programs)
    for chunks, program in programs.items():
      runner._programs[chunks] = _Awaited(watch, program)
    submit, complete = served._thread.submit, served._complete

    def submitted(name: str, function: Callable[..., Any], *args: Any) -> Any:
      asked = time.monotonic()

      def run(*args: Any) -> Any:
        watch.taken["queue"].append(time.monotonic() - asked)
        try:
          return function(*args)
        finally:
          ends.append(time.monotonic())

      return submit(name, run, *args)

    def completed(*args: Any) -> None:
      watch.taken["wake"].append(time.monotonic() - ends.popleft())
      complete(*args)

    watch.replace(served._thread, "submit", submitted)
    watch.replace(served, "_complete", completed)
    yield watch.taken


class _Awaited:
  """A program whose launch and whose work are timed apart."""

  def __init__(self, watch: _Stopwatch, program: Any):
    self._launch = watch.timed(program, "launch")
    self._wait = watch.timed(jax.block_until_ready, "program")
    self._cache_size = program._cache_size

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._wait(self._launch(*args, **kwargs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
  """Microseconds of a dispatch, the median of each step, and its turns."""

  steps_us: dict[str, float]
  turns: float


def summary(taken: dict[str, list[float]], turns: int) -> Times:
  """Returns the table of the dispatches of so many turns."""
  return Times(
    steps_us={s: 1e6 * statistics.median(taken[s]) for s in STEPS},
    turns=turns / len(taken["absorb"]),
  )
