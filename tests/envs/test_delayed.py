import math
import pickle
import statistics
import time

import pytest

from configs import counter
from envs import base, delayed
from envs.suites import gymnasium
from envs.tools import tool_environment

LAKE = gymnasium.FrozenLake()
SOURCE = delayed.Delayed(source=LAKE, median_s=0.005, sigma=0.5)
TASK = LAKE.task(0, "train")


def test_an_episode_is_the_same_as_without_waits_but_takes_longer(play):
  start = time.perf_counter()
  slow = play(SOURCE, TASK, SOURCE.oracle)
  elapsed_s = time.perf_counter() - start
  assert slow == play(LAKE, TASK, LAKE.oracle)
  answers = [m.content for m in slow.messages if m.role == "assistant"]
  # A wait after each answer. Event loops round a timer by less than 1 ms.
  waits = [SOURCE.wait_s(TASK, answers[: i + 1]) for i in range(len(answers))]
  assert elapsed_s > sum(waits) - 0.001 * len(waits)


def test_it_speaks_for_its_source():
  wrapped: base.Source = SOURCE
  assert (wrapped.name, wrapped.words) == (LAKE.name, LAKE.words)
  assert wrapped.task(3, "eval") == LAKE.task(3, "eval")
  assert wrapped.explore(TASK, [], 5) == LAKE.explore(TASK, [], 5)
  assert pickle.loads(pickle.dumps(SOURCE)) == SOURCE


def test_the_tools_of_an_environment_are_shown():
  slow = delayed.Delayed(
    source=tool_environment.ToolEnvironment(make=counter.Counter)
  )
  (tool,) = slow(slow.task(0, "train")).tools
  assert tool["function"]["name"] == "add"


def test_the_wait_follows_from_the_task_and_the_answers_so_far():
  other = LAKE.task(1, "train")
  histories = [
    (TASK, ["up"]),
    (TASK, ["up", "up"]),
    (TASK, ["left", "up"]),
    (TASK, [""]),
    (TASK, ["", ""]),
    (other, ["up"]),
  ]
  waits = [SOURCE.wait_s(*history) for history in histories]
  assert waits == [SOURCE.wait_s(*history) for history in histories]
  assert len(set(waits)) == len(histories)


def test_waits_are_log_normal():
  source = delayed.Delayed(source=LAKE, median_s=0.25, sigma=2.0)
  logs = [math.log(source.wait_s(TASK, [str(i)])) for i in range(2000)]
  # Standard errors of 2000 draws: of the mean 2 / sqrt(2000) = 0.045, of the
  # deviation 2 / sqrt(4000) = 0.032; the bounds are four of them.
  assert statistics.mean(logs) == pytest.approx(math.log(0.25), abs=0.18)
  assert statistics.stdev(logs) == pytest.approx(2.0, abs=0.13)


@pytest.mark.parametrize("fields", [{"median_s": 0.0}, {"sigma": -1.0}])
def test_settings_that_cannot_work_are_refused(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    delayed.Delayed(source=LAKE, **fields)
