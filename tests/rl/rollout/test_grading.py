"""Grading on a clock that jumps: every time below is exact."""

import asyncio
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from envs import base, call_clock, threads
from envs.rewards import rewards
from rl.data import trajectory
from rl.rollout import grading
from rl.runtime import virtual_clock
from rl.runtime import watchdog as watchdog_lib
from rl.testing import fakes

pytestmark = pytest.mark.virtual_time

TASK = fakes.Counting().task(0, "train")
SAID = base.Transcript([base.Message("assistant", "yes")], [0.25, 0.5])
RETRIES = grading.Retries(first_wait_s=1.0, max_wait_s=3.0, deadline_s=20.0)


def ended(index=0, status=trajectory.Status.COMPLETED):
  return trajectory.Trajectory(
    task_id=TASK.id, group_id=3, index=index, turns=[], status=status
  )


def now():
  return asyncio.get_running_loop().time()


@dataclasses.dataclass(eq=False)
class Told:
  """A reward that does what it is told for each call, and when it was called.

  A number is the grade, an exception is raised, all else is called.
  """

  script: list[Any]
  stateless: bool = True
  times: list[float] = dataclasses.field(default_factory=list)

  async def __call__(self, task, transcripts) -> Any:
    self.times.append(now())
    what = self.script[len(self.times) - 1]
    if isinstance(what, BaseException):
      raise what
    if isinstance(what, Callable):
      what = await what()
    return [base.Grade(what, {"told": what})] if what is not None else None


def forever():
  return asyncio.Event().wait()


async def graded(graders, index=0, name=""):
  return await graders.grade(ended(index), SAID, TASK, name=name)


def test_a_reward_that_answers_is_called_once():
  reward = Told([0.75])
  graders = grading.Graders(reward, RETRIES)
  record = virtual_clock.run(graded(graders))
  assert (record.reward, record.parts) == (0.75, {"told": 0.75})
  assert record.status is trajectory.Status.COMPLETED
  assert graders.stats() == grading.Stats(calls=1)


def test_a_trajectory_that_was_cut_off_is_graded_too():
  record = ended(status=trajectory.Status.TRUNCATED)
  grade = grading.Graders(rewards.Outcome()).grade
  after = virtual_clock.run(grade(record, SAID, TASK))
  assert (after.reward, after.status) == (0.75, trajectory.Status.TRUNCATED)


@pytest.mark.parametrize(
  "status", [s for s in trajectory.Status if not s.trainable]
)
def test_what_is_not_trainable_comes_back_as_it_is(status):
  record, reward = ended(status=status), Told([])
  grade = grading.Graders(reward).grade
  assert virtual_clock.run(grade(record, SAID, TASK)) is record
  assert not reward.times


@pytest.mark.parametrize(
  "failure",
  [
    OSError("down"),
    asyncio.CancelledError(),  # It claims so: nobody cancels.
    math.nan,
    math.inf,
    None,
    "much",
    forever,
  ],
  ids=lambda failure: getattr(failure, "__name__", str(failure)),
)
def test_a_failure_is_followed_by_another_call(failure):
  reward = Told([failure, 0.5])
  graders = grading.Graders(reward, RETRIES)
  record = virtual_clock.run(graded(graders))
  assert (record.reward, record.fault) == (0.5, "")
  late_s = RETRIES.deadline_s * (failure is forever)
  assert reward.times == [0.0, late_s + 1.0]
  assert graders.stats() == grading.Stats(calls=2, retries=1, busy_s=late_s)


def test_waits_grow_up_to_a_bound():
  reward = Told([OSError("down")] * 4 + [1.0])
  retries = dataclasses.replace(RETRIES, attempts=5)
  assert (
    virtual_clock.run(graded(grading.Graders(reward, retries))).reward == 1.0
  )
  # 1 s, twice that, and then no more than 3 s.
  assert reward.times == [0.0, 1.0, 3.0, 6.0, 9.0]
  assert retries.wait_s(100_000) == 3.0


async def test_the_longest_grading_is_known():
  reward = Told([forever] * 4)
  retries = dataclasses.replace(RETRIES, attempts=4)

  await graded(grading.Graders(reward, retries))
  # Four deadlines of 20 s and waits of 1 s, 2 s and 3 s.
  assert now() == retries.longest_s(20.0) == 86.0


def test_exhausted_is_a_fault_with_the_last_reason_and_never_a_reward():
  reward = Told([OSError("first"), forever, OSError("last")])
  graders = grading.Graders(reward, RETRIES)
  record = virtual_clock.run(graded(graders))
  assert record.status is trajectory.Status.REWARD_FAULT
  assert record.reward is None
  assert not record.parts
  assert record.fault.startswith("reward raised OSError: last (test_grading.py")
  assert record.fault.endswith(", in __call__), after 3 attempts")
  stats = graders.stats()
  assert (stats.calls, stats.retries, stats.faults) == (3, 2, 1)


def test_without_retries_the_fault_is_that_of_the_only_call():
  reward = Told([forever])
  retries = dataclasses.replace(RETRIES, attempts=1)
  record = virtual_clock.run(graded(grading.Graders(reward, retries)))
  assert record.fault == "reward took over 20 s"


def test_grading_begins_before_anything_else_that_is_ready():
  order = []

  async def noted():
    order.append("reward")
    return 1.0

  async def member(graders, index):
    order.append(f"end {index}")
    if index:
      await asyncio.sleep(0)  # Plays on, turn after turn.
      order.append(f"next turn {index}")
      return
    await graded(graders)

  async def scenario():
    graders = grading.Graders(Told([noted]))
    await asyncio.gather(*(member(graders, i) for i in range(3)))

  virtual_clock.run(scenario())
  # No member that plays on has its next turn before the reward.
  turns = {"next turn 1", "next turn 2"}
  assert turns.isdisjoint(order[: order.index("reward")])


async def test_the_call_is_told_once_and_when_it_is_made():
  called = []

  reward = fakes.Judge(
    delay_s=lambda index, call: 4.0, fails=lambda index, call: call == 1
  )
  graders = grading.Graders(reward, RETRIES, max_concurrent=1)
  ends = [
    graders.grade(ended(i), SAID, TASK, lambda: called.append(now()))
    for i in range(2)
  ]
  await asyncio.gather(*ends)
  # The second waits for the place of the first; its first call fails at 8 s.
  assert reward.calls[TASK.id] == 3
  assert called == [0.0, 4.0]


async def test_an_answer_after_the_deadline_is_nobodys():
  async def stubborn():
    try:
      await asyncio.sleep(60)
    except asyncio.CancelledError:
      await asyncio.sleep(15)  # It answers at 35 s all the same.
    return 0.1

  async def slow():
    await asyncio.sleep(18)
    return 0.9

  reward = Told([stubborn, slow])
  graders = grading.Graders(reward, RETRIES)
  record = asyncio.create_task(graded(graders))
  await asyncio.sleep(30)
  late = graders.stats().late
  record = await record
  stats = graders.stats()
  # The deadline of the first is 20 s, the second is called at 21 s and answers
  # at 39 s; the answer of the first came while it was being asked.
  assert (reward.times, record.reward) == ([0.0, 21.0], 0.9)
  assert (late, stats.late) == (1, 0)
  assert (stats.calls, stats.faults) == (2, 0)


async def test_what_a_late_call_raises_disturbs_nobody():
  reports = []

  async def stubborn():
    try:
      await asyncio.sleep(60)
    except asyncio.CancelledError:
      raise OSError("too late") from None

  loop = asyncio.get_running_loop()
  loop.set_exception_handler(lambda loop, context: reports.append(context))
  await graded(grading.Graders(Told([stubborn, 0.5]), RETRIES))
  assert not reports


async def test_calls_beyond_the_places_wait_and_the_waits_are_counted():
  reward = fakes.Judge(delay_s=lambda index, call: 2.0)
  graders = grading.Graders(reward, RETRIES, max_concurrent=2)
  ends = [asyncio.create_task(graded(graders, i)) for i in range(5)]
  await asyncio.sleep(1)
  during = graders.stats()
  await asyncio.gather(*ends)
  after = graders.stats()
  assert (during.in_flight, during.waiting) == (2, 3)
  # Of five calls of 2 s two wait for 2 s and one for 4 s.
  assert after == grading.Stats(calls=5, busy_s=10.0, queue_s=8.0)


async def test_who_waits_to_call_again_holds_no_place():
  reward = Told([OSError("down"), 0.25, 0.5])
  graders = grading.Graders(reward, RETRIES, max_concurrent=1)
  records = await asyncio.gather(graded(graders, 0), graded(graders, 1))
  values = [record.reward for record in records]
  assert values == [0.5, 0.25]
  assert reward.times == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("at_s", [1.0, 3.0])
async def test_cancelling_gives_up_the_call_or_the_wait_and_frees_the_place(
  at_s,
):
  # The first is asked until 2 s and waits until 3.5 s; cancelled at 1 s or 3.
  reward = fakes.Judge(
    delay_s=lambda index, call: 2.0, fails=lambda index, call: call == 0
  )
  retries = dataclasses.replace(RETRIES, first_wait_s=1.5)
  graders = grading.Graders(reward, retries, max_concurrent=1)
  first = asyncio.create_task(graded(graders))
  await asyncio.sleep(at_s)
  first.cancel()
  with pytest.raises(asyncio.CancelledError):
    await first
  record = await graded(graders, 1)
  end_s = now()
  stats = graders.stats()
  assert (record.reward, end_s) == (0.75, at_s + 2.0)
  assert (stats.calls, stats.in_flight, stats.waiting) == (2, 0, 0)
  assert stats.late == stats.faults == 0


@pytest.mark.parametrize(
  ("made", "told"),
  [
    (lambda: [base.Grade(1.0, {})], "reward is no coroutine, it returned list"),
    (lambda: 1 / 0, "reward raised ZeroDivisionError"),
  ],
  ids=["list", "raise"],
)
def test_a_reward_that_is_not_awaited_is_a_fault(made, told):
  class Plain(Told):
    def __call__(self, task, transcripts):
      return made()

  record = virtual_clock.run(graded(grading.Graders(Plain([]), RETRIES)))
  assert record.status is trajectory.Status.REWARD_FAULT
  assert told in record.fault


def test_a_grade_whose_parts_cannot_be_read_is_a_fault():
  class Torn(dict):
    def items(self):
      raise KeyError("page 7")

  class Tearing(Told):
    async def __call__(self, task, transcripts) -> Any:
      return [base.Grade(1.0, Torn())]

  record = virtual_clock.run(graded(grading.Graders(Tearing([]), RETRIES)))
  assert "reward returned what raised KeyError: 'page 7'" in record.fault


async def test_the_watchdog_names_the_call_and_the_wait_for_a_place():
  watchdog = watchdog_lib.Watchdog()

  reward = fakes.Judge(delay_s=lambda index, call: 2.0)
  graders = grading.Graders(reward, RETRIES, 1, watchdog)
  ends = [
    asyncio.create_task(graded(graders, i, f"train/3/0/{i}")) for i in range(2)
  ]
  await asyncio.sleep(1)
  lines = watchdog.dump().splitlines()[1:]
  await asyncio.gather(*ends)
  assert sorted(line.rsplit("  ", 2)[0].split("  ")[:2] for line in lines) == [
    ["episode train/3/0/0", "reward"],
    ["episode train/3/0/1", "a place to be graded"],
  ]
  assert watchdog.dump() == "nobody waits"


def test_work_in_a_thread_holds_up_no_other_grading():
  # The first call ends only after the second, which a blocked loop could not
  # even begin.
  second = threading.Event()

  class Heavy(Told):
    async def __call__(self, task, transcripts) -> Any:
      self.times.append(0.0)
      if len(self.times) == 1:
        await threads.call(second.wait, 10.0)
      second.set()
      return [base.Grade(1.0, {})]

  async def scenario():
    graders = grading.Graders(Heavy([]))
    return await asyncio.gather(graded(graders, 0), graded(graders, 1))

  assert [record.reward for record in asyncio.run(scenario())] == [1.0, 1.0]
  assert second.is_set()


@pytest.mark.parametrize(
  ("reward", "words"),
  [
    (Told([], stateless=False), "Told has stateless=False: it needs the env"),
    (object(), "object does not say whether it is stateless"),
  ],
)
def test_a_reward_that_needs_the_environment_is_refused(reward, words):
  with pytest.raises(ValueError, match=words):
    grading.refuse_stateful(reward)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"attempts": 0}, "grading.attempts=0 must be at least 1"),
    (
      {"deadline_s": 0.0},
      "grading.deadline_s=0.0 must be a finite number above 0",
    ),
    ({"deadline_s": math.inf}, "deadline_s=inf must be a finite"),
    ({"deadline_s": math.nan}, "grading.deadline_s=nan"),
    ({"factor": 0.5}, "grading.factor=0.5 must be at least 1"),
    ({"first_wait_s": -1.0}, "grading.first_wait_s=-1.0"),
    ({"first_wait_s": 20.0}, "max_wait_s=10.0 must be .* 20.0"),
    ({"max_wait_s": math.inf}, "max_wait_s=inf must be a finite"),
  ],
  ids=str,
)
def test_settings_that_cannot_work_are_refused(fields, words):
  retries = grading.Retries(**fields)
  with pytest.raises(ValueError, match=words):
    retries.validate()
  with pytest.raises(ValueError, match=words):
    grading.Graders(Told([]), retries)


def test_graders_that_could_not_grade_are_refused():
  with pytest.raises(ValueError, match="max_concurrent=0"):
    grading.Graders(Told([]), RETRIES, 0)
  with pytest.raises(ValueError, match="stateless=False"):
    grading.Graders(Told([], stateless=False))


@dataclasses.dataclass(eq=False)
class Queueing:
  """A reward that takes `works_s`, at one of two places, once for each part."""

  works_s: float
  parts: int = 1
  stateless: bool = True
  places: asyncio.Semaphore = dataclasses.field(
    default_factory=lambda: asyncio.Semaphore(2)
  )

  async def __call__(self, task, transcripts) -> Any:
    await asyncio.gather(*(self._work() for _ in range(self.parts)))
    return [base.Grade.single("worked", 1.0)]

  async def _work(self) -> None:
    async with call_clock.place(self.places):
      await asyncio.sleep(self.works_s)


async def test_a_wait_for_a_place_of_a_reward_is_not_its_own_time():
  graders = grading.Graders(Queueing(works_s=15.0), RETRIES)
  records = await asyncio.gather(*(graded(graders, i) for i in range(8)))
  # The last waits for 45 s, with a deadline of 20.
  found = [one.reward for one in records], graders.stats().retries, now()
  assert found == ([1.0] * 8, 0, 60.0)


@pytest.mark.parametrize("parts", [1, 3])
async def test_a_reward_that_holds_a_place_is_late_whatever_else_it_waits_for(
  parts,
):
  alone = dataclasses.replace(RETRIES, attempts=1)
  reward = Queueing(works_s=math.inf, parts=parts)
  record = await graded(grading.Graders(reward, alone))
  assert (record.fault, now()) == ("reward took over 20 s", 20.0)


@dataclasses.dataclass(frozen=True)
class Offloaded:
  """A reward that cannot be hashed, and fails to end what it has."""

  weights: dict[str, float] = dataclasses.field(default_factory=dict)
  closed: list[str] = dataclasses.field(default_factory=list, compare=False)
  stateless = True

  async def __call__(self, task, transcripts) -> Any:
    return [base.Grade.single("offloaded", 1.0)]

  async def open(self) -> None:
    pass

  async def close(self) -> None:
    self.closed.append("closed")
    raise OSError("its server is gone")

  def counts(self):
    return {"calls": 1.0}


async def test_a_reward_that_fails_to_close_does_not_keep_others_from_it():
  one, other = Offloaded({"a": 1.0}), Offloaded({"b": 1.0})
  both = rewards.Weighted(
    tuple(
      rewards.Criterion(name, reward)
      for name, reward in (
        ("one", one),
        ("other", other),
        ("again", dataclasses.replace(one)),
      )
    )
  )

  graders = grading.Graders(both)
  await graders.close()
  assert graders.costs() == {"calls": 2.0}
  assert (one.closed, other.closed) == (["closed"], ["closed"])
