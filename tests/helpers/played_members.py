"""Members of groups with chosen rewards, turns and scores."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32
from numpy.typing import ArrayLike

from envs import base
from rl.algorithms import advantages, group_selection, returns
from rl.data import trajectory

OK = trajectory.Status.COMPLETED
FAULT = trajectory.Status.ENV_FAULT


def played(
  reward: float,
  lengths: Sequence[int] = (3,),
  *,
  earned: ArrayLike | None = None,
  seen: Sequence[str] | None = None,
  penalties: ArrayLike | None = None,
  values: ArrayLike | None = None,
) -> returns.EpisodeReturnInputs:
  """Returns what an estimator sees of a member.

  Args:
    lengths: sampled tokens of each turn.
    earned: the environment's reward of each turn; 0 by default.
    seen: what the environment wrote before each turn; by default no two turns
      are alike. Histories are of that alone, as if all had answered the same.
  """
  count = len(lengths)
  words = seen or [f"turn {i}" for i in range(count)]
  histories = ["/".join(words[: i + 1]) for i in range(count)]
  return returns.EpisodeReturnInputs(
    reward=float(reward),
    turns=np.repeat(np.arange(count), lengths),
    turn_rewards=np.array([0.0] * count if earned is None else earned, "f8"),
    observations=[word.encode() for word in words],
    histories=[word.encode() for word in histories],
    penalties=None if penalties is None else np.array(penalties, "f4"),
    values=None if values is None else np.array(values, "f4"),
  )


def rewards(*values: float) -> list[returns.EpisodeReturnInputs]:
  """Returns one member of one turn for each reward."""
  return [played(value) for value in values]


def group(
  *members: tuple[trajectory.Status, float | None, Sequence[int]],
  task: str = "game/train/0",
  earned: Sequence[Sequence[float]] = (),
) -> trajectory.Group:
  """Returns a group of (status, reward, sampled tokens of each turn).

  Args:
    earned: of each member the environment's reward of each turn; 0 by default.
  """
  rewards = earned or [[0.0] * len(lengths) for _, _, lengths in members]
  return trajectory.Group(
    group_id=0,
    trajectories=[
      trajectory.Trajectory(
        task_id=task,
        group_id=0,
        index=index,
        turns=[
          _turn(place, length, rewards[index][place])
          for place, length in enumerate(lengths)
        ],
        status=status,
        reward=reward,
      )
      for index, (status, reward, lengths) in enumerate(members)
    ],
    admitted=0,
    task=base.Task(id=task, index=0, split="train", seed=0),
  )


def of_group(
  group: trajectory.Group, estimator: advantages.Estimator
) -> tuple[Float32[np.ndarray, " G"], Bool[np.ndarray, " G"]]:
  """Returns (mean advantages, trained) of a group that is all of an update."""
  selection = group_selection.select([group], estimator)
  (means,) = selection.mean_advantages(selection.estimate())
  return means, selection.trained[0]


def _turn(place: int, length: int, reward: float) -> trajectory.Turn:
  return trajectory.Turn(
    context=np.full(2, place, np.int32),
    tokens=np.zeros(length, np.int32),
    logprobs=np.zeros(length, np.float32),
    versions=np.zeros(length, np.int32),
    stop="stop",
    reward=reward,
  )
