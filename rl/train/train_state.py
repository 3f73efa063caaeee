"""The state that training changes, and its shardings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from models import config as model_config
from models import definition, lora, sharding
from models import policy as policy_lib
from rl.algorithms import references


class TrainState(NamedTuple):
  """All that training changes; checkpointed whole.

  Attributes:
    params: the published parameters, in the dtype of the model.
    opt_state: float32 moments of the trained parameters.
    updates: optimizer steps taken, i32 scalar.
    master: the trained parameters in float32; `params` and `critic` are their
      rounded copy, as an update too small for bfloat16 must not vanish. None
      when parameters are float32 anyway.
    critic: head from hidden states to values; None without a critic.
    reference: the initial parameters, to stay close to; None if not kept.
  """

  params: definition.Params
  opt_state: optax.OptState
  updates: Array
  master: "Trainable | None" = None
  critic: definition.Params | None = None
  reference: definition.Params | None = None


class Trainable(NamedTuple):
  """The parameters with a gradient: all or the adapters, and the critic."""

  policy: definition.Params
  critic: definition.Params | None


def critic_head(config: model_config.ModelConfig) -> definition.Params:
  """Returns the shapes of a critic's head; it begins with zeros."""
  return {
    "kernel": jax.ShapeDtypeStruct((config.d_model,), jnp.float32),
    "bias": jax.ShapeDtypeStruct((), jnp.float32),
  }


def split(params: Any, critic: Any) -> tuple[Trainable, Any]:
  """Returns the trained and the frozen parameters."""
  policy, frozen = lora.split(params)
  return Trainable(policy, critic), frozen


def changing(state: TrainState) -> tuple[Trainable, Any, Any, Any]:
  """Returns the parts of a state that an update may change.

  Leaves may be numbers of arrays that other processes hold.
  """
  trainable, _ = split(state.params, state.critic)
  return trainable, state.opt_state, state.updates, state.master


def changed(
  state: TrainState, frozen: Any, parts: tuple[Trainable, Any, Any, Any]
) -> TrainState:
  """Returns a state with other parts; inverse of `changing`.

  Args:
    frozen: the frozen parameters, as `split` returns them.
  """
  trainable, opt_state, updates, master = parts
  return state._replace(
    params=lora.join(trainable.policy, frozen),
    opt_state=opt_state,
    updates=updates,
    master=master,
    critic=trainable.critic,
  )


def begin(
  trainable: Trainable,
  *,
  config: model_config.ModelConfig,
  optimizer: optax.GradientTransformation,
) -> tuple[optax.OptState, Array, Trainable | None]:
  """Returns the state of a fresh optimizer, no updates, and master copies."""
  master = None
  if config.dtype != "float32":
    master = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
  exact: Any = trainable if master is None else master
  opt_state = optimizer.init(exact)
  return opt_state, jnp.zeros((), jnp.int32), master


def shapes(
  config: model_config.ModelConfig,
  begin: Callable[..., tuple[optax.OptState, Array, Trainable | None]],
  head: definition.Params | None,
  *,
  has_reference: bool,
) -> TrainState:
  """Returns the state as jax.ShapeDtypeStructs."""
  params = policy_lib.of(config).shapes
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
  """Returns the shardings of a state.

  Moments, master copies and the reference are sharded like the parameters they
  belong to.

  Args:
    reference: where the reference lies; None is that there is none.
  """
  replicated: Any = layout.sharding()
  params = layout.tree(policy_lib.of(config).axes)
  critic = jax.tree.map(lambda _: replicated, shapes.critic)
  trained, _ = split(params, critic)
  exact = shapes.master
  if exact is None:
    exact, _ = split(shapes.params, shapes.critic)
  opt_state = optimizer_shardings(optimizer, exact, trained, replicated)
  master = None if shapes.master is None else trained
  state = TrainState(params, opt_state, replicated, master, critic)
  if reference is None:
    return state
  return state._replace(reference=in_memory(params, reference))


def in_memory(shardings: Any, memory: references.Memory) -> Any:
  """Returns a tree of the same shardings in the device's or host's memory."""
  kind = references.MEMORY_KINDS[memory]
  return jax.tree.map(lambda x: x.with_memory_kind(kind), shardings)


def optimizer_shardings(
  optimizer: optax.GradientTransformation,
  params_shapes: Any,
  params_shardings: Any,
  replicated: jax.sharding.NamedSharding,
) -> Any:
  """Returns a tree of shardings of the structure of the optimizer's state.

  A moment of the shape of its parameter is sharded like it. A moment that has
  one axis less is sharded like the axes that are left; of two axes of the same
  length, the last counts as reduced. Counts and placeholders are replicated.

  Args:
    params_shapes: jax.ShapeDtypeStruct for each parameter.
    params_shardings: jax.sharding.NamedSharding for each.
  """

  def place(moment, shape, placed):
    if isinstance(moment, optax.MaskedNode):
      return moment
    return _like(moment.shape, shape.shape, placed) or replicated

  return optax.tree.map_params(
    optimizer,
    place,
    jax.eval_shape(optimizer.init, params_shapes),
    params_shapes,
    params_shardings,
    transform_non_params=lambda _: replicated,
    is_leaf=lambda node: isinstance(node, optax.MaskedNode),
  )


def _like(
  shape: tuple[int, ...],
  param: tuple[int, ...],
  placed: jax.sharding.NamedSharding,
) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of a moment, or None for a placeholder."""
  if shape == param:
    return placed
  axes = (*placed.spec, *[None] * (len(param) - len(placed.spec)))
  for reduced in reversed(range(len(param))):
    if shape == (*param[:reduced], *param[reduced + 1 :]):
      kept = jax.P(*axes[:reduced], *axes[reduced + 1 :])
      return jax.sharding.NamedSharding(placed.mesh, kept)
  return None
