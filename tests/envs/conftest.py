"""Plays episodes as a rollout does, without a model."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from envs import base
from envs.rewards import rewards
from models.chat import byte_chat
from rl.rollout import environment_checks, environment_trial, episode

Agent = Callable[[base.Task, Sequence[base.Message]], str]


async def _episode(
  source: base.Source, task: base.Task, agent: Agent
) -> base.Transcript:
  environment = source(task)
  try:
    messages = list(await environment.start())
    rewards = []
    done = False
    while not done:
      answer = base.Message("assistant", agent(task, messages))
      step = await environment.step(answer)
      messages += [answer, *step.messages]
      rewards.append(step.reward)
      done = step.done
      assert len(rewards) < 100, "an episode must end"
    return base.Transcript(messages, rewards)
  finally:
    await environment.close()


@pytest.fixture
def play_all():
  """Returns a function that plays many tasks at the same time."""

  def play_all(
    source: base.Source, tasks: Sequence[base.Task], agent: Agent
  ) -> list[base.Transcript]:
    async def run():
      episodes = (_episode(source, task, agent) for task in tasks)
      return await asyncio.gather(*episodes)

    return asyncio.run(run())

  return play_all


@pytest.fixture
def play(play_all):
  """Returns a function that plays one task."""
  return lambda source, task, agent: play_all(source, [task], agent)[0]


@pytest.fixture
def faults_of():
  """Returns a function that makes all checks of a source before a run.

  It takes a source and an agent, and returns faults by the name of the check.
  """

  def faults_of(source: base.Source, answer: Agent) -> dict[str, str]:
    async def respond(question: environment_trial.Question) -> str:
      return answer(question.task, question.messages)

    trial = environment_trial.Trial(
      source=source,
      reward=rewards.Outcome(),
      limits=episode.Limits(max_turns=60),
      chat=byte_chat.ByteChat(),
      respond=respond,
    )
    trial = environment_checks.any_text(trial)
    _, results = asyncio.run(environment_checks.run(trial, 2))
    return {result.name: result.fault for result in results if result.fault}

  return faults_of
