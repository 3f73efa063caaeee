"""Plays agents written against the `openai` client and records them.

  async def agent(base_url, task):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    ...
    return reward

  async with agents.serving(engine, chat) as players:
    trajectories = await players.play(agent, episode, deadline_s=600)

The agent needs no change for training: its base_url names the session.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from envs import base, threads
from launch.openai import app as openai_app
from launch.openai import http_server
from rl.agents import answer_stream, served_agent, sessions
from rl.data import trajectory
from rl.rollout import episode as episode_lib
from rl.runtime import watchdog as watchdog_lib

Agent = Callable[[str, base.Task], Any]
"""(base_url, task) -> reward, or None if graded elsewhere; async or not."""

_MAX_THREADS = 512


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Agents:
  """Plays agents against one server.

  Attributes:
    address: of the server, "http://127.0.0.1:8000".
    pool: threads for agents that are not async.
  """

  sessions: sessions.Sessions
  address: str
  pool: threads.ThreadPool
  watchdog: watchdog_lib.Watchdog | None = None

  async def play(
    self, agent: Agent, episode: episode_lib.Episode, *, deadline_s: float
  ) -> list[trajectory.Trajectory]:
    """Plays an agent once; see `served_agent.play`.

    Args:
      agent: runs in a thread unless it is async. A thread cannot be stopped,
        but gets no more answers after the deadline.
    """

    async def run(name: str) -> object:
      base_url = f"{self.address}/sessions/{name}/v1"
      if _is_async(agent):
        return await agent(base_url, episode.task)
      result = await self.pool.call(agent, base_url, episode.task)
      return await result if isinstance(result, Awaitable) else result

    return await served_agent.play(
      self.sessions, episode, run, deadline_s=deadline_s, watchdog=self.watchdog
    )


@contextlib.asynccontextmanager
async def serving(
  engine: answer_stream.ServedEngine,
  chat: episode_lib.Chat,
  how: openai_app.Serving | None = None,
  *,
  host: str = "127.0.0.1",
  port: int = 0,
  max_sessions: int = 4096,
  watchdog: watchdog_lib.Watchdog | None = None,
) -> AsyncIterator[Agents]:
  """Serves an engine on the running event loop while agents play.

  Args:
    port: 0 takes any free one.
    max_sessions: agents that may play at a time.
  """
  opened = sessions.Sessions(chat, max_sessions=max_sessions)
  app = openai_app.app(engine, opened, how)
  pool = threads.ThreadPool(max_size=_MAX_THREADS)
  async with http_server.listening(
    app, http_server.bind(host, port)
  ) as address:
    yield Agents(sessions=opened, address=address, pool=pool, watchdog=watchdog)


def _is_async(agent: Agent) -> bool:
  call = getattr(agent, "__call__", None)  # noqa: B004
  return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(call)
