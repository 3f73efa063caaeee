"""Evaluation: held-out tasks played by the served weights."""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable

from rl.audit import event_log
from rl.data import fault_summary, trajectory
from rl.rollout import episode, group_rollout, prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
  """The result of one evaluation.

  Attributes:
    episodes: graded ones, without faults.
    success: share of them that succeeded; nan if there are none.
    low, high: 95 % Wilson interval of the share.
    reward: their mean reward.
    faults: episodes that ended without a reward.
    fault: status and message of the most frequent fault; "" without faults.
  """

  episodes: int
  success: float
  low: float
  high: float
  reward: float
  faults: int
  fault: str = ""


async def evaluate(
  player: group_rollout.Player,
  *,
  episodes: int,
  temperature: float,
  success: float,
  seed: int,
  report: Callable[[str], None] = lambda text: None,
) -> tuple[EvaluationResult, list[trajectory.Trajectory]]:
  """Plays the first `episodes` tasks of the held-out split, one episode each.

  Each episode that ends is a heartbeat for the player's watchdog, so that a
  deadline of the whole is that of one episode.

  Args:
    player: of training; its log is not written.
    success: an episode succeeds when its reward is at least this.
    report: is told after each episode how many have ended.
  """
  limits = dataclasses.replace(
    player.limits,
    temperature=temperature,
    record_experts=False,
    overlong=None,
    repetition=None,
  )
  quiet = dataclasses.replace(
    player,
    limits=limits,
    log=event_log.EventLog(clock=asyncio.get_running_loop().time),
    closing=set(),
  )
  ended = itertools.count(1)

  async def play(i: int) -> trajectory.Trajectory:
    task = prompts.task_of(player.source, i, "eval")
    played = await _play(quiet, episode.Episode(task, i, 0, seed))
    report(f"evaluating {next(ended)}/{episodes}")
    return played

  playing = [asyncio.create_task(play(i)) for i in range(episodes)]
  try:
    trajectories = await asyncio.gather(*playing)
  finally:
    # Programs of agents that outlive the event loop complain about it.
    for task in playing:
      task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    await asyncio.gather(*quiet.closing)
  return summarise(trajectories, success), trajectories


async def _play(
  player: group_rollout.Player, held_out: episode.Episode
) -> trajectory.Trajectory:
  graded = await player.play_alone(held_out)
  player.watchdog.heartbeat()
  return graded


def summarise(
  trajectories: list[trajectory.Trajectory], success: float
) -> EvaluationResult:
  """Returns the share of graded episodes with at least `success` as reward."""
  rewards = [t.reward for t in trajectories if t.reward is not None]
  wins = sum(reward >= success for reward in rewards)
  low, high = wilson(wins, len(rewards))
  return EvaluationResult(
    episodes=len(rewards),
    success=wins / len(rewards) if rewards else math.nan,
    low=low,
    high=high,
    reward=sum(rewards) / len(rewards) if rewards else math.nan,
    faults=len(trajectories) - len(rewards),
    fault=str(fault_summary.most_frequent(trajectories) or ""),
  )


def wilson(successes: int, trials: int) -> tuple[float, float]:
  """Returns the Wilson score interval of 95 % of a success rate.

  It lies within [0, 1], and is all of that where `trials` is 0.

  Source: Wilson, 1927; Brown, Cai and DasGupta, 2001, eq. 4.
  """
  if trials == 0:
    return 0.0, 1.0
  z = 1.96  # Quantile of the normal distribution.
  rate = successes / trials
  center = rate + z**2 / (2 * trials)
  spread = rate * (1 - rate) / trials + z**2 / (4 * trials**2)
  margin = z * math.sqrt(spread)
  scale = 1 + z**2 / trials
  low, high = (center - margin) / scale, (center + margin) / scale
  return max(0.0, low), min(1.0, high)
