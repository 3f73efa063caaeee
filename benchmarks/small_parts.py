"""Parts that several benchmarks begin with: weights, a learner, episodes."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from models import config as model_config
from models import definition, sharding
from models import policy as policy_lib
from rl.algorithms import losses, objective
from rl.data import trajectory
from rl.train import learner, optimizers

PUBLISHED = model_config.tiny_moe(
  vocab_size=512,
  d_model=256,
  head_dim=64,
  d_ff=512,
  d_expert=256,
  num_experts=8,
  max_length=128,
)
"""A model of 4 layers whose publishes are measured."""


def weights(
  config: model_config.ModelConfig, layout: sharding.Layout | None = None
) -> definition.Params:
  """Returns drawn weights, on one device or as a layout says."""
  return draw(config, layout)(jax.random.key(0))


def draw(
  config: model_config.ModelConfig, layout: sharding.Layout | None
) -> Any:
  """Returns the jitted function that draws weights from a key."""
  policy = policy_lib.of(config)
  places = layout and layout.tree(policy.axes)
  return jax.jit(policy.init, out_shardings=places)


def versions(params: definition.Params) -> Iterator[definition.Params]:
  """Yields the weights again and again, each time as other arrays."""
  step = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf * 1.0001))
  while True:
    params = jax.block_until_ready(step(params))
    yield params


def programs(
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  learning_rate: float = optimizers.AdamW.learning_rate,
) -> learner.Learner:
  """Returns the programs of a learner of the clipped surrogate."""
  minimised = objective.Objective(loss=losses.ClippedSurrogate())
  optimizer = optimizers.AdamW(learning_rate=learning_rate)
  return learner.Learner(config, layout, minimised, optimizer())


def turn(
  context: np.ndarray, tokens: np.ndarray, logprob: float
) -> trajectory.Turn:
  """Returns a turn whose tokens are all equally likely."""
  return trajectory.Turn(
    context=context,
    tokens=tokens,
    logprobs=np.full(len(tokens), logprob, np.float32),
    versions=np.zeros(len(tokens), np.int32),
    stop="stop",
  )


def episode(
  turns: Sequence[trajectory.Turn], group: int = 0, index: int = 0
) -> trajectory.Trajectory:
  """Returns an episode that ended as it should."""
  return trajectory.Trajectory(
    task_id="benchmark",
    group_id=group,
    index=index,
    turns=turns,
    status=trajectory.Status.COMPLETED,
    reward=0.0,
  )


def advantages(
  episodes: Sequence[trajectory.Trajectory], rng: np.random.Generator
) -> list[np.ndarray]:
  """Returns a drawn advantage of each episode, for each of its tokens."""
  draws = rng.normal(size=len(episodes))
  return [
    np.full(one.num_sampled, value, np.float32)
    for one, value in zip(episodes, draws, strict=True)
  ]
