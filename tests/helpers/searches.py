"""Searches by Hypothesis: the same few examples in each run, or many new ones.

`make test` tries the same examples each time, some seconds of them. `make fuzz`
sets TWINMESH_FUZZ to the seconds for which each search goes on with new ones;
what fails is kept, and tried first the next time. With TWINMESH_FUZZ_SEED, in
hexadecimal, these are the same each time: CI has one, so that what it says of a
commit does not depend on luck.
"""

import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import stateful

_SECONDS = float(os.environ.get("TWINMESH_FUZZ", "0"))
_SEED = os.environ.get("TWINMESH_FUZZ_SEED")


def examples(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Returns a decorator of a test that Hypothesis gives its arguments.

  Args:
    count: of the examples that are tried, or tried at a time.
  """

  def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
    search = _settings(count)(test)
    return _again(search, seeded=search)

  return decorate


def run(machine: type[stateful.RuleBasedStateMachine], count: int, steps: int):
  """Searches the runs of a state machine for one that fails.

  Args:
    count: as of `examples`.
    steps: of a run.
  """
  settings = _settings(count, steps)
  search = _again(stateful.run_state_machine_as_test, seeded=machine)
  search(machine, settings=settings)


def _settings(count: int, steps: int = 50) -> hypothesis.settings:
  kept = hypothesis.settings.get_profile("default").database
  return hypothesis.settings(
    max_examples=count,
    stateful_step_count=steps,
    derandomize=not _SECONDS,
    database=kept if _SECONDS else None,
    # Machines differ, and so does what runs beside the tests.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
  )


def _again(
  search: Callable[..., Any], seeded: Callable[..., Any]
) -> Callable[..., Any]:
  """Returns a search that is made anew until its time is over.

  Args:
    seeded: test or state machine that holds the seed of the search.
  """

  @functools.wraps(search)
  def searches(*args: Any, **named: Any) -> None:
    end_s = time.monotonic() + _SECONDS
    for number in itertools.count():
      if number and time.monotonic() >= end_s:
        return
      if _SECONDS and _SEED:
        hypothesis.seed(int(_SEED, 16) + number)(seeded)
      search(*args, **named)

  return searches
