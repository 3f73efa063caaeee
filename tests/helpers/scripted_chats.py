"""Episodes of sources of text, with a real tokenizer and scripted answers."""

import asyncio
import functools

from envs import base
from models.chat import hf_chat
from rl.data import trajectory
from rl.rollout import episode
from rl.testing import scripted_engine
from tests.helpers import chat_messages


@functools.cache
def _chat() -> hf_chat.HfChat:
  return hf_chat.HfChat.load(chat_messages.GOLDEN)


def calling(name: str, arguments: str = "{}") -> base.Message:
  """Returns an answer with one call."""
  return base.Message("assistant", "", (base.ToolCall(name, arguments),))


def say(text: str) -> base.Message:
  """Returns an answer of text alone."""
  return base.Message("assistant", text)


def play(
  source: base.Source,
  *said: base.Message,
  task: base.Task | None = None,
  step_s: float = 60.0,
) -> tuple[trajectory.Trajectory, base.Transcript, str]:
  """Returns an episode, its messages, and all that the model saw.

  Args:
    said: the agent's answers.
    task: the first of training by default.
  """
  chat = _chat()
  answers = iter(
    [chat.encode_answer(episode.as_text(m)).tolist() for m in said]
  )
  engine = scripted_engine.ScriptedEngine(lambda request: next(answers))
  own = episode.Episode(task or source.task(0, "train"), 0, 0, 0)
  partial = episode.PartialTrajectory(own)
  limits = episode.Limits(turn_tokens=400, max_tokens=8000, step_s=step_s)
  played, transcript = asyncio.run(
    episode.play(source, engine.generate, chat, limits, partial)
  )
  shown = "".join(chat.token(i) for i in played.ids.tolist())
  return played, transcript, shown
