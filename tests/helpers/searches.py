"""Searches by Hypothesis: the same few examples in each run, or many new ones.

`make test` tries the same examples each time, some seconds of them. `make fuzz`
sets TWINMESH_FUZZ to how many times as many it tries, all of them new; what
fails is kept, and tried first the next time.
"""

import os

import hypothesis
from hypothesis import stateful

_TIMES = int(os.environ.get("TWINMESH_FUZZ", "0"))


def examples(count: int, steps: int = 50) -> hypothesis.settings:
  """Returns the settings of a search of so many examples.

  Args:
    steps: of each example of a state machine.
  """
  kept = hypothesis.settings.get_profile("default").database
  return hypothesis.settings(
    max_examples=count * max(1, _TIMES),
    stateful_step_count=steps,
    derandomize=not _TIMES,
    database=kept if _TIMES else None,
    # Machines differ, and so does what runs beside the tests.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
  )


def run(machine: type[stateful.RuleBasedStateMachine], count: int, steps: int):
  """Searches the runs of a state machine for one that fails."""
  stateful.run_state_machine_as_test(machine, settings=examples(count, steps))
