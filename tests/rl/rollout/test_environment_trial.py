"""Episodes without a model."""

import asyncio
import dataclasses
from typing import Any

import pytest

from envs import base, mixture
from envs.rewards import rewards
from models.chat import word_chat
from rl.data import trajectory
from rl.rollout import environment_trial, episode
from rl.testing import fakes

SOURCE = fakes.Counting(turns=3)
CHAT = word_chat.WordChat(tuple(SOURCE.words))
TRIAL = environment_trial.Trial(
  source=SOURCE,
  reward=rewards.Outcome(),
  limits=episode.Limits(),
  chat=CHAT,
  respond=environment_trial.demonstration(SOURCE),
)
TASK = SOURCE.task(0, "train")


def play(**changes):
  trial = dataclasses.replace(TRIAL, **changes)
  return asyncio.run(environment_trial.play(trial, TASK))


def answer(respond, seed):
  async def ask():
    return await respond(environment_trial.Question(TASK, [], seed=seed))

  return asyncio.run(ask())


def test_an_episode_is_played_timed_and_graded():
  played = play()
  assert played.trajectory.status is trajectory.Status.COMPLETED
  assert played.trajectory.reward == 1.0
  assert played.answers == ["yes"] * 3
  counts = {what: len(taken) for what, taken in played.seconds.items()}
  assert counts == {"start": 1, "step": 3, "close": 1}
  assert played.closing == ""


def test_a_script_gives_an_answer_a_turn_and_repeats_the_last():
  played = play(respond=environment_trial.script(["yes", "no"]))
  assert played.answers == ["yes", "no", "no"]
  assert played.trajectory.reward == pytest.approx(1 / 3)


def test_answers_that_the_environment_begins_with_are_no_turns():
  class Example:
    name, task = SOURCE.name, SOURCE.task

    def __call__(self, task):
      environment: Any = SOURCE(task)
      start = environment.start

      async def shows_one():
        example = [base.Message("user", "go"), base.Message("assistant", "yes")]
        return [*example, *await start()]

      environment.start = shows_one
      return environment

  scripted = environment_trial.script(["yes", "no"])
  assert play(source=Example(), respond=scripted).answers == ["yes", "no", "no"]


def test_a_long_answer_is_cut_as_an_engine_cuts_it():
  played = play(respond=environment_trial.script(["yes no yes"]))
  first = played.trajectory.turns[0]
  assert (first.stop, CHAT.decode(first.tokens)) == ("length", "yes no")
  assert played.answers[0] == "yes no yes"


def test_an_answer_that_the_chat_cannot_say_is_no_crash():
  played = play(respond=environment_trial.script(["maybe"]))
  assert played.trajectory.status is trajectory.Status.ENGINE_FAULT
  assert "'maybe' is not among" in played.trajectory.fault


def test_an_oracle_that_raises_is_a_fault():
  async def respond(question):
    raise KeyError("lost")

  played = play(respond=respond)
  start = "giving an answer raised KeyError: 'lost' (test_environment_trial.py:"
  assert played.trajectory.fault.startswith(start)


@pytest.mark.parametrize("method", ["oracle", "explore"])
def test_a_demonstration_that_is_no_text_is_told_with_its_method(method):
  class Counts(fakes.Counting):
    def oracle(self, task, messages) -> Any:
      return 5

    def explore(self, task, messages, seed) -> Any:
      return 5

  ways = {
    "oracle": environment_trial.demonstration(Counts()),
    "explore": environment_trial.exploration(Counts(), CHAT),
  }
  fault = play(respond=ways[method]).trajectory.fault
  assert fault == f"{method} returned int, not a text or a Message"


def test_a_source_that_builds_nothing_is_told_so():
  class Builds(fakes.Counting):
    def __call__(self, task) -> Any:
      return None

  played = play(source=Builds())
  assert "returned None, not an environment" in played.trajectory.fault


def test_an_exception_of_the_environment_is_kept_with_its_traceback():
  played = play(source=fakes.Counting(fault="step"))
  assert played.traceback.startswith("Traceback (most recent call last):\n")
  assert "OSError: the game broke" in played.traceback
  assert play().traceback == ""


def test_random_answers_repeat_and_are_those_of_the_source_if_it_has_any():
  respond = environment_trial.exploration(SOURCE, CHAT)
  assert {*play(respond=respond).answers} <= {"yes", "no"}
  assert play(respond=respond).answers == play(respond=respond).answers


class _Mute:
  """A source of tasks alone."""

  name = "mute"

  def task(self, index: int, split: base.Split) -> base.Task:
    return base.Task(f"mute/{split}/{index}", index, split, index)

  def __call__(self, task: base.Task) -> base.Environment:
    raise NotImplementedError


def test_random_ids_stand_in_for_a_source_that_cannot_play():
  respond = environment_trial.exploration(_Mute(), CHAT)
  texts = [answer(respond, seed) for seed in range(20)]
  assert {w for text in texts for w in str(text).split()} == {*SOURCE.words}
  assert answer(respond, 7) == texts[7]
  with pytest.raises(ValueError, match="no demonstrations"):
    environment_trial.demonstration(_Mute())


def test_a_mixture_demonstrates_if_all_of_its_parts_do():
  mixed = mixture.Mixture((mixture.Part(SOURCE), mixture.Part(_Mute())))
  assert environment_trial.demonstrates(SOURCE)
  assert not environment_trial.demonstrates(mixed)
  respond = environment_trial.exploration(mixed, CHAT)
  assert {*str(answer(respond, 3)).split()} <= {*SOURCE.words}


def test_sessions_in_lockstep_answer_together_until_they_end():
  order = []
  sources = [fakes.Counting(turns=turns) for turns in (1, 3, 2)]

  def trial(number, source):
    async def respond(question):
      order.append(number)
      return "yes"

    return dataclasses.replace(TRIAL, source=source, respond=respond)

  pairs = [(trial(n, s), s.task(n, "train")) for n, s in enumerate(sources)]
  played = asyncio.run(environment_trial.play_together(pairs))
  assert [p.task.index for p in played] == [0, 1, 2]
  # Turn by turn: all three, then the two that are left, then the last one.
  assert [sorted(order[:3]), sorted(order[3:5]), order[5:]] == [
    [0, 1, 2],
    [1, 2],
    [1],
  ]


def test_a_session_that_faults_holds_up_no_other():
  good, bad = fakes.Counting(turns=2), fakes.Counting(fault="start")
  pairs = [
    (dataclasses.replace(TRIAL, source=s), s.task(0, "train"))
    for s in (bad, good)
  ]
  played = asyncio.run(environment_trial.play_together(pairs))
  assert [p.trajectory.status.value for p in played] == [
    "env_fault",
    "completed",
  ]


def test_an_agent_is_left_to_a_run():
  class Agents(fakes.Counting):
    def __call__(self, task) -> Any:
      return Agent()

  class Agent:
    async def run(self, endpoint):
      raise NotImplementedError

    async def close(self):
      pass

  with pytest.raises(
    environment_trial.PlaysItself, match=r"only a run .* with launch\.serve"
  ):
    play(source=Agents())
