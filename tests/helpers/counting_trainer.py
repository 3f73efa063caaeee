"""A trainer over programs that only count, and groups for it."""

import dataclasses
import math

import numpy as np

from rl.algorithms import advantages, presets
from rl.algorithms import objective as objective_lib
from rl.data import trajectory
from rl.runtime import mesh_thread
from rl.testing import fakes
from rl.train import learner
from rl.train import trainer as trainer_lib

STATUS = trajectory.Status
GRPO = presets.Grpo()
NOTHING = dict.fromkeys(learner.METRICS, math.nan)
NOTHING |= {"tokens": 0.0, "skipped": 0.0}
SETTINGS = trainer_lib.TrainerSettings(
  rows=4,
  length=8,
  share_prompts=False,
  probe_rows=4,
  max_staleness=0,
  old_logprob="decode",
)


def member(reward, index=0, versions=(0, 0), status=STATUS.COMPLETED):
  """Returns a context of two ids and an answer of some, all of -0.5 nats."""
  count = len(versions)
  turn = trajectory.Turn(
    context=np.array([3, 1], np.int32),
    tokens=np.arange(5, 5 + count, dtype=np.int32),
    logprobs=np.full(count, -0.5, np.float32),
    versions=np.array(versions, np.int32),
    stop="stop",
  )
  return trajectory.Trajectory("t", 0, index, [turn], status, reward)


def group(*rewards, **fields):
  """Returns a group of such members; a reward of None is a fault."""
  members = [
    member(
      reward,
      index,
      **fields,
      **({"status": STATUS.ENV_FAULT} if reward is None else {}),
    )
    for index, reward in enumerate(rewards)
  ]
  return trajectory.Group(group_id=0, trajectories=members, admitted=0)


class Programs(fakes.FakeLearner):
  """A learner that counts updates and keeps what it is called with.

  It scores every token with -0.5 - updates / 4 nats and a value of `updates`,
  these being those of the weights it is given.
  """

  def __init__(self, grad_norm=1.0):
    super().__init__()
    self.grad_norm = grad_norm
    self.batches = []
    self.weights = []
    self.masked = []

  def accumulate(self, params, total, batch, critic=None):
    self.weights.append(params["updates"])
    self.batches.append(batch)
    return super().accumulate(params, total, batch, critic)

  def update(self, state, total, left_out_divisor=0.0):
    after, sums = super().update(state, total, left_out_divisor)
    self.masked.append(left_out_divisor)
    if not math.isfinite(self.grad_norm):
      return state, {**sums, "grad_norm": self.grad_norm, "skipped": 1.0}
    return after, {**sums, "grad_norm": self.grad_norm}

  def score(self, params, batch):
    nats = -0.5 - params["updates"] / 4
    return np.full_like(batch.behaviour, nats)

  def values(self, params, critic, batch):
    return np.full_like(batch.behaviour, params["updates"])

  @property
  def compared_with(self):
    """The one log-probability that the tokens of each batch have."""
    return [
      float(value)
      for packed in self.batches
      for value in np.unique(_old(packed)[packed.sampled])
    ]


def _old(packed):
  return packed.behaviour if packed.old is None else packed.old


def build(
  thread: mesh_thread.MeshThread,
  programs=None,
  estimator=None,
  objective: objective_lib.Objective = GRPO,
  **changes,
):
  """Returns a trainer of fake programs that starts afresh."""
  built = programs or Programs()
  trainer = trainer_lib.MeshTrainer(
    dataclasses.replace(SETTINGS, **changes),
    built,
    thread,
    estimator=estimator or advantages.Grpo(),
    objective=objective,
  )
  trainer.restore(built.abstract)
  return trainer
