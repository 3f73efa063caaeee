"""Plays an episode of a source, and notes the time that each part takes."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Sequence

from envs import base
from envs.suites import textarena

_MOVE = re.compile(r"'(\[[^\]]+\])'")  # as games for two offer them


@dataclasses.dataclass(frozen=True)
class Played:
  """One episode; times in milliseconds."""

  source: str
  task_ms: float
  start_ms: float
  step_ms: Sequence[float]
  tokens: float
  tools: int


Answer = Callable[
  [base.Source, base.Task, Sequence[base.Message]], base.Message
]
"""Returns the answer to a conversation."""


async def play(source: base.Source, index: int, answer: Answer) -> Played:
  """Plays one task to its end."""
  began = time.perf_counter()
  task = source.task(index, "train")
  task_ms = 1000 * (time.perf_counter() - began)
  environment = source(task)
  try:
    began = time.perf_counter()
    messages = list(await environment.start())
    start_ms = 1000 * (time.perf_counter() - began)
    step_ms, done = [], False
    while not done:
      said = answer(source, task, messages)
      began = time.perf_counter()
      step = await environment.step(said)
      step_ms.append(1000 * (time.perf_counter() - began))
      messages += [said, *step.messages]
      done = step.done
  finally:
    await environment.close()
  tokens = sum(_num_tokens(source, message) for message in messages)
  tools = len(getattr(environment, "tools", ()))
  return Played(source.name, task_ms, start_ms, step_ms, tokens, tools)


def own_answer(
  source: base.Source, task: base.Task, messages: Sequence[base.Message]
) -> base.Message:
  """Returns the oracle's answer, or any that there is."""
  answer: str | base.Message = "0"
  with contextlib.suppress(ValueError):
    answer = base.demonstrator(source).oracle(task, messages)
  if isinstance(source, textarena.SinglePlayer):
    answer = source.random_answer(task.seed + len(messages))
  elif offered := _MOVE.findall(messages[-1].content):
    answer = offered[0]
  if isinstance(answer, str):
    return base.Message("assistant", answer)
  return answer


def _num_tokens(source: base.Source, message: base.Message) -> float:
  calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
  text = " ".join([message.content, *calls])
  is_words = isinstance(source, base.WordList)
  return len(text.split()) if is_words else len(text) / 4
