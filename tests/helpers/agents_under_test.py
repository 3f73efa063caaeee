"""Agents that ask a session without HTTP, and what plays them."""

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from envs import base
from rl.agents import agent_player, answer_stream
from rl.engine import contract
from rl.testing import fakes
from tests.helpers import players_under_test as players
from tests.helpers import virtual_run

GO, ON = base.Message("user", "go"), base.Message("user", "on")


class Gateway:
  """A server without HTTP: `ask` is a request of an agent."""

  engine: Any
  sessions: Any

  @contextlib.asynccontextmanager
  async def listen(self, engine, sessions, max_length):
    del max_length
    self.engine, self.sessions = engine, sessions
    yield "http://nowhere"

  async def ask(self, endpoint, *messages, max_tokens=100, stops=(), **fields):
    """Returns the answer as a message, recorded as the server does it."""
    session = self.sessions.open(endpoint.key)
    with session.request_running():
      opening = session.begin(list(messages))
      request = contract.DecodeRequest(
        request_id=f"{endpoint.key}/{session.number}",
        session=endpoint.key,
        tokens=opening.tokens,
        max_tokens=max_tokens,
        stop_ids=players.CHAT.stop_ids,
        priority=session.priority,
        **{"seed": opening.seed, **fields},
      )
      parser = answer_stream.AnswerParser(players.CHAT, stops=stops)
      try:
        done = await answer_stream.sample_answer(self.engine, request, parser)
      except contract.EngineClosed:
        session.engine_closed = True
        raise
      answer = base.Message("assistant", parser.answer().content)
      session.record(opening, done, answer)
    return answer


Play = Callable[[Gateway, base.Endpoint, base.Task], Awaitable[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(fakes.Counting):
  """Builds agents that are functions; a reward is wrapped as their result."""

  play: Play
  gateway: Gateway = dataclasses.field(default_factory=Gateway)
  closed: list[str] = dataclasses.field(default_factory=list)

  def __call__(self, task) -> Any:
    return _Agent(self, task)


@dataclasses.dataclass(eq=False)
class _Agent:
  source: Source
  task: base.Task

  async def run(self, endpoint):
    result = await self.source.play(self.source.gateway, endpoint, self.task)
    return base.AgentResult(result) if isinstance(result, float) else result

  async def close(self):
    self.source.closed.append(self.task.id)


def plays(source, served):
  """Returns what plays the agents of a source."""
  return agent_player.AgentPlayer(served, players.CHAT, source.gateway.listen)


class Run(virtual_run.Run):
  """A coordinator in virtual time whose episodes are agents."""

  def player(self):
    agents = plays(self.source, self.router)
    return dataclasses.replace(super().player(), agents=agents)
