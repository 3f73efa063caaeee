"""Plays one episode of an external agent, which asks the server for answers.

Sessions.open -> agent(name) -> Sessions.finish(reward) -> trajectories
"""

import re
import secrets
from collections.abc import Awaitable, Callable

from rl.agents import session_tree, sessions
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.runtime import isolation
from rl.runtime import watchdog as watchdog_lib

_NOT_IN_NAMES = re.compile(r"[^\w.:~@=+-]", re.ASCII)


async def play(
  open_sessions: sessions.Sessions,
  episode: episode_lib.Episode,
  agent: Callable[[str], Awaitable[object]],
  *,
  deadline_s: float,
  watchdog: watchdog_lib.Watchdog | None = None,
) -> list[trajectory.Trajectory]:
  """Plays an agent once; returns its trajectories, at least one.

  An agent that edits its history, or leads several conversations, leaves one
  trajectory per branch, all with its reward.

  Args:
    agent: gets the name of the session in which to ask for answers; returns
      the reward, or None if it is graded elsewhere.
    watchdog: lists the agent in its table while this waits.

  Returns:
    An agent that raises, overruns the deadline, returns something other than a
    finite number or asks for no answer ends with ENV_FAULT and no reward: a
    fault is data, and the batch masks it.

  Raises:
    EngineClosed: the engine stopped; the task may be replayed elsewhere.
  """
  name = _NOT_IN_NAMES.sub(".", episode.name)[:160]
  name = f"{name}.{secrets.token_hex(4)}"
  session = open_sessions.open(
    name, seed=episode.noise, priority=(episode.group_id, episode.index)
  )
  try:
    with session.request_running():
      owner = f"episode {episode.name}"
      reward = await isolation.guarded(
        lambda: agent(name), deadline_s, "agent", watchdog, owner
      )
    reward = None if reward is None else isolation.checked_reward(reward)
    ending = _ending(episode, trajectory.Status.COMPLETED, reward=reward)
    if not session.num_answers:
      silent = "the agent asked for no answer"
      ending = _ending(episode, trajectory.Status.ENV_FAULT, silent)
  except isolation.Fault as fault:
    if session.engine_closed:
      closed = trajectory.Status.ENGINE_FAULT
      open_sessions.finish(name, _ending(episode, closed, "the engine closed"))
      raise contract.EngineClosed("while an agent played") from fault
    ending = _ending(episode, trajectory.Status.ENV_FAULT, str(fault))
  except BaseException:  # Cancelled: keep the samples.
    lost = _ending(episode, trajectory.Status.ENGINE_FAULT, "cancelled")
    open_sessions.finish(name, lost)
    raise
  return open_sessions.finish(name, ending)


def _ending(
  episode: episode_lib.Episode,
  status: trajectory.Status,
  fault: str = "",
  reward: float | None = None,
) -> session_tree.Ending:
  return session_tree.Ending(
    status=status,
    reward=reward,
    fault=fault,
    task_id=episode.task.id,
    group_id=episode.group_id,
    index=episode.index,
  )
