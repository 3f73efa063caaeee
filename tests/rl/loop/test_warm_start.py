"""Demonstrations, and steps that fail; what they teach is a run's to show."""

import asyncio
import dataclasses
import itertools
import json
import math
import threading
from typing import Any

import pytest

from models.chat import word_chat
from rl.data import trajectory
from rl.loop import warm_start
from rl.rollout import episode
from rl.runtime import mesh_thread, trace
from rl.testing import fakes
from tests.helpers import machine_speed

CHAT = word_chat.WordChat(("go", "on", "yes", "no"))
LIMITS = episode.Limits(record_experts=True)


def demonstrations(exploration, count=32, seed=0, limits=LIMITS):
  source = fakes.Counting(turns=2)

  async def run():
    return [
      await warm_start.demonstrate(
        source, CHAT, limits, source.task(i, "train"), exploration, seed
      )
      for i in range(count)
    ]

  return asyncio.run(run())


def answers(played):
  return [CHAT.decode(turn.tokens.tolist()) for turn in played.turns]


def test_an_oracle_that_does_not_explore_is_always_right():
  for played in demonstrations(0.0, count=4):
    assert played.status is trajectory.Status.COMPLETED
    assert answers(played) == ["yes", "yes"]
    # An oracle has no routers; imitating it leaves the learner's free.
    assert played.experts is None


def test_an_answer_is_cut_where_an_engine_would_cut_it():
  # "yes" and the end of the turn are two ids; rows of a batch have no room for
  # more than the limits.
  short = dataclasses.replace(LIMITS, turn_tokens=1)
  (played,) = demonstrations(0.0, count=1, limits=short)
  assert [turn.tokens.size for turn in played.turns] == [1, 1]
  assert [turn.stop for turn in played.turns] == ["length", "length"]


def test_exploring_mixes_in_random_answers_that_repeat():
  some = [answers(played) for played in demonstrations(1.0)]
  said = list(itertools.chain(*some))
  # 64 fair draws: fewer than 16 of one kind come once in 10,000 seeds.
  assert 16 <= said.count("no") <= 48
  assert some == [answers(played) for played in demonstrations(1.0)]
  assert some != [answers(played) for played in demonstrations(1.0, seed=1)]


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    (
      {"steps": 0},
      r"warm_start\.steps=0 must be at least 1; .*warm_start=none",
    ),
    ({"episodes": -1}, r"warm_start\.episodes=-1 must be at least 1"),
    (
      {"checkpoint_every": 0},
      r"warm_start\.checkpoint_every=0 must be at least 1",
    ),
    ({"exploration": 1.5}, r"warm_start\.exploration=1\.5 must be in"),
    ({"exploration": float("nan")}, r"warm_start\.exploration=nan must be in"),
  ],
)
def test_a_warm_start_that_cannot_run_is_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    warm_start.WarmStart(**fields).validate()


class Watching(warm_start.WarmStartObserver):
  """Keeps what it is told of: the number of each step, how far it was."""

  def __init__(self):
    self.steps, self.boundaries = [], []

  def on_step(self, number, metrics):
    self.steps.append(number)

  async def on_boundary(self, now):
    self.boundaries.append((now.trained, now.skipped))


class Steps(fakes.FakeLearner):
  """A learner whose updates have these norms, and are skipped if not finite."""

  def __init__(self, norms):
    super().__init__()
    self.norms = iter(norms)

  def update(self, state, total, left_out_divisor=0.0):
    after, sums = super().update(state, total, left_out_divisor)
    sums |= {"grad_norm": next(self.norms), "loss": 0.25}
    if math.isfinite(sums["grad_norm"]):
      return after, sums
    return state, sums | {"skipped": 1.0, "loss": math.nan}


UNOBSERVED = warm_start.WarmStartObserver()


def supervision(steps, fault=""):
  return warm_start.demonstrations(
    warm_start.WarmStart(steps=steps, episodes=2),
    fakes.Counting(turns=2, fault=fault),
    CHAT,
    LIMITS,
    rows=2,
    length=16,
    seed=0,
  )


def imitated(norms, max_skipped, behind=(), watching=UNOBSERVED):
  """Returns how many of some steps were taken, and the last report.

  Args:
    norms: of the gradient of each step; one that is not finite is skipped.
    behind: steps that were taken before, and how many were skipped at last.
  """
  said = []
  state = run(
    supervision(len(norms) + sum(behind[:1])),
    Steps(norms),
    behind,
    max_skipped=max_skipped,
    observer=watching,
    report=said.append,
  )
  return state.updates, said[-1]


def run(supervised, programs, behind=(), **how):
  thread = mesh_thread.MeshThread("learner", trace.Trace(None))
  try:
    return asyncio.run(
      warm_start.run(
        supervised,
        programs,
        warm_start.Imitation(programs.abstract, *behind),
        thread,
        **how,
      )
    )
  finally:
    thread.close()


def test_a_step_whose_demonstrations_all_fail_names_their_fault():
  words = (
    "of 2 demonstrations of counting none can be trained on: env_fault: start "
    "raised OSError: no such game; launch.try_environment"
  )
  with pytest.raises(warm_start.NoDemonstration, match=words):
    asyncio.run(supervision(1, fault="start").batches(0))


@pytest.mark.parametrize(
  ("exploration", "method"), [(0.0, "oracle"), (1.0, "explore")]
)
def test_a_demonstration_that_is_no_text_is_a_fault(exploration, method):
  class Counts(fakes.Counting):
    def oracle(self, task, messages) -> Any:
      return 5

    def explore(self, task, messages, seed) -> Any:
      return 5

  source = Counts()
  played = asyncio.run(
    warm_start.demonstrate(
      source, CHAT, LIMITS, source.task(0, "train"), exploration, 0
    )
  )
  assert played.status is trajectory.Status.ENV_FAULT
  assert played.fault == f"{method} returned int, not a text or a Message"


def test_the_batches_of_the_next_step_are_made_while_one_runs():
  made, real = threading.Event(), supervision(2)

  async def batches(step):
    found = await real.batches(step)
    if step:
      made.set()
    return found

  class Waiting(fakes.FakeLearner):
    def update(self, state, total, left_out_divisor=0.0):
      assert made.wait(machine_speed.scaled(60))
      return super().update(state, total)

  state = run(
    dataclasses.replace(real, batches=batches),
    Waiting(),
    max_skipped=0,
    observer=UNOBSERVED,
  )
  assert state.updates == 2


def test_steps_that_are_not_finite_are_skipped_and_counted_only_in_a_row():
  norms = [1.0, math.nan, math.inf, 1.0, math.nan, math.nan, 1.0]
  taken, said = imitated(norms, max_skipped=2)
  assert taken == 3
  assert said == "warm start done: loss 0.250"


@pytest.mark.parametrize(("max_skipped", "last"), [(0, 2), (1, 5), (2, 6)])
def test_more_of_them_in_a_row_than_allowed_end_it(max_skipped, last):
  norms = [1.0, math.inf, 1.0, math.inf, math.inf, math.inf, 1.0]
  # Of the runs of 1 and 3, the first that is longer than allowed ends it.
  number = max_skipped + 1
  with pytest.raises(FloatingPointError) as error:
    imitated(norms, max_skipped)
  for words in (
    "warm_start: steps in a row",
    f"loss or gradient is not finite: {number};",
    f"the last, step {last}, has loss nan and gradient norm inf",
    "lower warm_start.optimizer.learning_rate",
  ):
    assert words in str(error.value)


def test_those_before_a_resume_count_as_in_a_row():
  with pytest.raises(FloatingPointError, match=r"finite: 3; the last, step 6"):
    imitated([math.nan, 1.0], max_skipped=2, behind=(5, 2))
  assert imitated([math.nan, 1.0], max_skipped=2, behind=(5, 1))[0] == 1


def test_the_step_that_ends_it_is_told_of_but_never_a_boundary():
  watching = Watching()
  with pytest.raises(FloatingPointError):
    imitated([1.0, math.inf, 1.0, math.inf, math.inf], 1, watching=watching)
  assert watching.steps == [1, 2, 3, 4, 5]
  assert watching.boundaries == [(1, 0), (2, 1), (3, 0), (4, 1)]


@pytest.mark.parametrize("loss", [0.5, math.nan])
def test_how_far_it_is_survives_json(loss):
  before = warm_start.Imitation(fakes.FakeLearner().abstract, 7, 2, loss)
  data = json.loads(json.dumps(before.to_host(), allow_nan=False))
  after = warm_start.from_host(before.state, data)
  assert (after.trained, after.skipped) == (7, 2)
  assert after.loss == pytest.approx(loss, nan_ok=True)
