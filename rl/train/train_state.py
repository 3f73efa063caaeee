"""What training changes, and where on the mesh it lies."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from models import config as model_config
from models import lora, sharding, transformer
from rl.algorithms import references
from rl.train import optimizer_sharding


class TrainState(NamedTuple):
  """All that training changes; checkpointed whole.

  Attributes:
    params: those that are published, in the dtype of the model.
    opt_state: float32 moments of what is trained.
    updates: optimizer steps taken, i32 scalar.
    master: what is trained, in float32, of which `params` and `critic` are
      the rounded copy: an update too small for bfloat16 must not vanish. None
      when parameters are float32 anyway.
    critic: head from hidden states to values; None without a critic.
    reference: parameters as the run began with them, to stay close to; None
      when nobody asks for them.
  """

  params: transformer.Params
  opt_state: optax.OptState
  updates: Array
  master: "Trainable | None" = None
  critic: transformer.Params | None = None
  reference: transformer.Params | None = None


class Trainable(NamedTuple):
  """What has a gradient: of the policy all or its adapters, and the critic."""

  policy: transformer.Params
  critic: transformer.Params | None


def critic_head(config: model_config.ModelConfig) -> transformer.Params:
  """Returns the shapes of a critic's head; it begins with zeros."""
  return {
    "kernel": jax.ShapeDtypeStruct((config.d_model,), jnp.float32),
    "bias": jax.ShapeDtypeStruct((), jnp.float32),
  }


def split(params: Any, critic: Any) -> tuple[Trainable, Any]:
  """Returns what of the parameters is trained, and what is frozen."""
  policy, frozen = lora.split(params)
  return Trainable(policy, critic), frozen


def begin(
  trainable: Trainable,
  *,
  config: model_config.ModelConfig,
  optimizer: optax.GradientTransformation,
) -> tuple[optax.OptState, Array, Trainable | None]:
  """Returns the state of a fresh optimizer, no updates, and master copies."""
  master = None
  if config.compute.dtype != "float32":
    master = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
  exact: Any = trainable if master is None else master
  opt_state = optimizer.init(exact)
  return opt_state, jnp.zeros((), jnp.int32), master


def shapes(
  config: model_config.ModelConfig,
  begin: Callable[..., tuple[optax.OptState, Array, Trainable | None]],
  head: transformer.Params | None,
  *,
  has_reference: bool,
) -> TrainState:
  """Returns the state as jax.ShapeDtypeStructs."""
  params = transformer.shapes(config)
  begun = jax.eval_shape(begin, split(params, head)[0])
  kept = params if has_reference else None
  return TrainState(params, *begun, critic=head, reference=kept)


def shardings(
  shapes: TrainState,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  optimizer: optax.GradientTransformation,
  reference: references.Memory | None,
) -> TrainState:
  """Returns where everything lies.

  Moments and master copies lie where the parameters do that they are of, and
  so does the reference, be it in the memory of devices or of their host.
  """
  replicated: Any = layout.sharding()
  params = layout.tree(transformer.logical_axes(config))
  critic = jax.tree.map(lambda _: replicated, shapes.critic)
  trained, _ = split(params, critic)
  exact = shapes.master
  if exact is None:
    exact, _ = split(shapes.params, shapes.critic)
  opt_state = optimizer_sharding.shardings(
    optimizer, exact, trained, replicated
  )
  master = None if shapes.master is None else trained
  state = TrainState(params, opt_state, replicated, master, critic)
  if reference is None:
    return state
  kind = references.MEMORY_KINDS[reference]
  kept = jax.tree.map(lambda x: x.with_memory_kind(kind), params)
  return state._replace(reference=kept)


def abstract(shapes: TrainState, shardings: TrainState) -> TrainState:
  """Returns shapes and shardings in one tree, for restoring a state."""
  return jax.tree.map(
    lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
    shapes,
    shardings,
  )
