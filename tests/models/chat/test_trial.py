"""Foreign code that is tried in a process of its own."""

import pytest

from models.chat import trial

pytestmark = pytest.mark.process

HERE = __name__
MAX_BYTES = 1 << 30


def ends(argument):
  assert argument == {"a": [1]}


def refuses(argument):
  raise ValueError(f"no {argument}")


def stumbles(argument):
  return argument["a"]


def loops(argument):
  while True:
    pass


def grows(argument):
  while True:
    argument += argument


def test_what_ends_may_be_used():
  trial.run(HERE, "ends", {"a": [1]})


@pytest.mark.parametrize(
  ("function", "cpu_s", "message"),
  [
    ("refuses", trial.MAX_CPU_S, r"^no \[1\]$"),
    (
      "stumbles",
      trial.MAX_CPU_S,
      r"cannot be used: TypeError\(.*; copy it",
    ),
    ("loops", 1, r"takes more than 1 s or 1 GiB, or ends the process"),
    # Where memory is slow to come, it must still end before time does.
    ("grows", trial.MAX_CPU_S, r"it cannot be used: MemoryError"),
  ],
)
def test_what_does_not_end_well_is_refused(function, cpu_s, message):
  with pytest.raises(trial.TrialFailed, match=message):
    trial.run(HERE, function, [1], cpu_s=cpu_s, max_bytes=MAX_BYTES)
