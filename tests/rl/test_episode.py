"""Tests of environments that break their contract in the midst of playing."""

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from envs import base
from models import chat as chat_lib
from rl import episode, testing, trajectory

CHAT = chat_lib.WordChat(("go", "on", "yes", "no"))


SAID = [base.Message("user", "on")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreign(testing.Counting):
  """Environments whose `start` or `step` is a function of the test."""

  start: Any = None
  step: Any = None

  def __call__(self, task):
    environment = super().__call__(task)
    for name in ("start", "step"):
      if getattr(self, name) is not None:
        setattr(environment, name, getattr(self, name))
    return environment


def play(source, **limits):
  """Plays one episode; 60 s of deadline are never waited for."""
  task = source.task(0, "train")
  record = episode.Record(episode.Episode(task, 3, 0, 0))
  engine = testing.FakeEngine((5,), chat_lib.END)
  settings = episode.Limits(**limits)
  played, _ = asyncio.run(episode.play(source, engine, CHAT, settings, record))
  return played


def returning(value):
  async def call(*args):
    return value

  return call


def raising(error):
  def call(*args):
    raise error

  return call


@pytest.mark.parametrize(
  ("start", "words"),
  [
    (returning(None), "start returned None, not a list of messages"),
    (returning((SAID, 1)), "start returned list in place of a Message"),
    (returning("go"), "start returned str in place of a Message"),
    (returning([{"role": "user"}]), "returned dict in place of a Message"),
    (returning([base.Message("user", cast(Any, None))]), "content is None"),
    (returning([base.Message(cast(Any, "bot"), "go")]), "of role 'bot'"),
    (raising(OSError("no game")), "start raised OSError: no game"),
    (lambda: 5, "start raised TypeError"),
    (cast(Any, 5), "start raised TypeError"),
  ],
)
def test_a_start_that_returns_nonsense_is_a_fault(start, words):
  member = play(Foreign(start=start))
  assert member.status is trajectory.Status.ENV_FAULT
  assert words in member.fault
  assert not member.turns


@pytest.mark.parametrize(
  ("step", "words"),
  [
    (returning(None), "step returned None, not a Step"),
    (returning((SAID, 1.0, True)), "step returned tuple, not a Step"),
    (returning(base.Step(cast(Any, None), 1.0, True)), "step returned None"),
    (
      returning(base.Step(cast(Any, ["on"]), 1.0, True)),
      "str in place of a Message",
    ),
    (returning(base.Step(SAID, cast(Any, [1.0]), True)), "reward [1.0] is not"),
    (returning(base.Step(SAID, 1e39, True)), "reward 1e+39 is not"),
    (returning(base.Step(SAID, 10**400, True)), "is not a finite number"),
    (returning(base.Step(SAID, 1.0, cast(Any, "no"))), "done=str, not a bool"),
    (raising(OSError("no game")), "step raised OSError: no game"),
    (raising(asyncio.CancelledError()), "step raised CancelledError"),
    (lambda answer: 5, "step raised TypeError"),
  ],
)
def test_a_step_that_returns_nonsense_is_a_fault_and_keeps_the_tokens(
  step, words
):
  member = play(Foreign(step=step))
  assert member.status is trajectory.Status.ENV_FAULT
  assert words in member.fault
  assert member.num_sampled == 2


def test_an_environment_whose_helper_was_cancelled_does_not_stall_its_group():
  async def step(answer):
    helper = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(helper.cancel)
    await helper

  member = play(Foreign(step=step))
  assert member.status is trajectory.Status.ENV_FAULT
  assert "step raised CancelledError" in member.fault


def test_a_first_observation_without_room_for_an_answer_is_a_fault():
  # Four words and <agent> are 5 ids: they fit, but no token behind them.
  start = returning([base.Message("user", "go go go go")])
  member = play(Foreign(start=start), max_tokens=5)
  assert member.status is trajectory.Status.ENV_FAULT
  assert "5 ids" in member.fault
  assert "rollout.max_tokens=5" in member.fault
