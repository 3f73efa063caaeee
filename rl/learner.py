"""The only training jit: accumulate over micro-batches, then one update.

  init -> state -+-> accumulate(batch) -> ... -> update -> state
                 |        sums of gradients and counts     |
                 +-----------------------------------------+

Letters: B rows, L row length, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from models import config as model_config
from models import sharding, transformer
from rl import batch as batch_lib
from rl import losses


@runtime_checkable
class Optimizer(Protocol):
  """Frozen callable that builds an optax transformation."""

  def __call__(self) -> optax.GradientTransformation:
    """Returns a fresh transformation."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
  """Adam with decoupled weight decay behind a clip of the global norm.

  Attributes:
    warmup_updates: the rate rises linearly over so many updates.

  Source: arXiv 1711.05101.
  """

  learning_rate: float = 5e-4
  warmup_updates: int = 0
  b1: float = 0.9
  b2: float = 0.99
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0

  def validate(self) -> None:
    """Raises ValueError on a rate, decay or norm that cannot work."""
    for name in ("learning_rate", "max_grad_norm"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(
          f"AdamW.{name}={getattr(self, name)} is no number above 0"
        )
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f"AdamW.{name}={getattr(self, name)} is not in [0, 1)")
    for name in ("warmup_updates", "weight_decay"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f"AdamW.{name}={getattr(self, name)} is below 0")

  def __call__(self) -> optax.GradientTransformation:
    """Returns clip -> Adam -> decay, scaled by the (warmed-up) rate."""
    rate = self.learning_rate
    if self.warmup_updates:
      # Not from 0: the first update would do nothing.
      first, steps = rate / self.warmup_updates, self.warmup_updates - 1
      rate = optax.linear_schedule(first, rate, steps)
    return optax.chain(
      optax.clip_by_global_norm(self.max_grad_norm),
      optax.adamw(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """What is minimised, summed over tokens and divided once by their number.

  Attributes:
    entropy_bonus: weight of the policy's entropy, in nats a token.
    balance_weight: weight of the router's load-balance loss. It is not linear
      over micro-batches: each balances its own tokens.
  """

  loss: losses.Loss
  entropy_bonus: float = 0.0
  balance_weight: float = 0.01

  def validate(self) -> None:
    """Raises ValueError on a weight that is no finite number."""
    for name in ("entropy_bonus", "balance_weight"):
      if not math.isfinite(getattr(self, name)):
        raise ValueError(f"objective.{name}={getattr(self, name)} is no number")


class TrainState(NamedTuple):
  """All that training changes; checkpointed whole.

  Attributes:
    updates: optimizer steps taken, i32 scalar.
  """

  params: transformer.Params
  opt_state: optax.OptState
  updates: Array


class Sums(NamedTuple):
  """Sums over the sampled tokens of an update; divide by `tokens`.

  `balance` and `router_entropy` are weighted by tokens, so they divide too.
  """

  tokens: Float[Array, ""]
  loss: Float[Array, ""]
  clipped: Float[Array, ""]
  entropy: Float[Array, ""]
  behaviour_kl: Float[Array, ""]
  balance: Float[Array, ""]
  router_entropy: Float[Array, ""]


class Accumulator(NamedTuple):
  """Unnormalised gradient and sums over micro-batches."""

  grads: transformer.Params
  sums: Sums


def token_logprobs(
  params: transformer.Params,
  batch: batch_lib.Batch,
  *,
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  temperature: float,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], transformer.Aux]:
  """Returns (log-probability of token t, entropy there, aux), in nats.

  Entry t comes from the logits at t - 1, so the first entry of a row, and of
  every segment, scores nothing: a trajectory starts with context.
  """
  placed = _as_jax(batch)
  logits, aux = transformer.apply(
    params,
    config,
    placed.tokens,
    placed.positions,
    placed.segments,
    mesh=mesh,
  )
  logprobs = jax.nn.log_softmax(logits[:, :-1] / temperature)
  targets = placed.tokens[:, 1:, None]
  scored = jnp.take_along_axis(logprobs, targets, axis=-1)[..., 0]
  entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
  first = ((0, 0), (1, 0))
  return jnp.pad(scored, first), jnp.pad(entropy, first), aux


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
  """The compiled training programs of one mesh; the state is an argument.

  Attributes:
    init: key -> TrainState, born sharded.
    wrap: parameters -> TrainState with a fresh optimizer.
    zero: () -> Accumulator.
    accumulate: (params, accumulator, placed batch) -> accumulator; donates
      the accumulator.
    update: (state, accumulator) -> (state, metrics); donates the optimizer's
      state and the accumulator but not the parameters: published versions
      stay readable.
    score: (params, placed batch) -> log-probabilities [B, L].
    place: host batch -> batch on the mesh.
    abstract: shapes and shardings of the state, for restoring it.
  """

  init: Callable[[Array], TrainState]
  wrap: Callable[[transformer.Params], TrainState]
  zero: Callable[[], Accumulator]
  accumulate: Callable[..., Accumulator]
  update: Callable[..., tuple[TrainState, dict[str, Array]]]
  score: Callable[..., Array]
  place: Callable[[batch_lib.Batch], batch_lib.Batch]
  abstract: TrainState


def build(
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  objective: Objective,
  optimizer: optax.GradientTransformation,
  temperature: float = 1.0,
) -> Learner:
  """Returns the programs for one model, mesh, objective and optimizer.

  Args:
    temperature: that of sampling, so that ratios start at 1.
  """
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  param_shardings = sharding.param_shardings(config, mesh)
  state_shardings = _state_shardings(
    config, param_shardings, optimizer, replicated
  )
  acc_shardings = Accumulator._make((param_shardings, replicated))
  score = functools.partial(
    token_logprobs,
    config=config,
    mesh=mesh,
    temperature=temperature,
  )
  gradient = jax.value_and_grad(
    functools.partial(_objective, score=score, objective=objective),
    has_aux=True,
  )

  def wrap(params):
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

  def zero():
    shapes = _param_shapes(config)
    grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return Accumulator(grads, Sums(*(jnp.zeros(()) for _ in Sums._fields)))

  def accumulate(params, accumulator, batch):
    (_, sums), grads = gradient(params, batch)
    return jax.tree.map(jnp.add, accumulator, Accumulator(grads, sums))

  def update(params, opt_state, updates, accumulator):
    sums = accumulator.sums
    tokens = jnp.maximum(sums.tokens, 1.0)
    grads = jax.tree.map(lambda g: g / tokens, accumulator.grads)
    changes, opt_state = optimizer.update(grads, opt_state, params)
    metrics = {name: value / tokens for name, value in sums._asdict().items()}
    metrics["tokens"] = sums.tokens
    metrics["grad_norm"] = optax.tree.norm(grads)
    params = optax.apply_updates(params, changes)
    return TrainState._make((params, opt_state, updates + 1)), metrics

  apply_update = jax.jit(
    update, donate_argnums=(1, 3), out_shardings=(state_shardings, None)
  )
  return Learner(
    init=jax.jit(
      lambda key: wrap(transformer.init(key, config)),
      out_shardings=state_shardings,
    ),
    wrap=jax.jit(wrap, out_shardings=state_shardings),
    zero=jax.jit(zero, out_shardings=acc_shardings),
    accumulate=jax.jit(
      accumulate, donate_argnums=1, out_shardings=acc_shardings
    ),
    update=lambda state, acc: apply_update(*state, acc),
    score=jax.jit(lambda params, batch: score(params, batch)[0]),
    place=functools.partial(
      jax.device_put, device=sharding.batch_sharding(mesh)
    ),
    abstract=jax.tree.map(
      lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
      jax.eval_shape(wrap, _param_shapes(config)),
      state_shardings,
    ),
  )


def _objective(
  params: transformer.Params,
  batch: batch_lib.Batch,
  *,
  score: Callable[..., tuple[Array, Array, transformer.Aux]],
  objective: Objective,
) -> tuple[Array, Sums]:
  logprobs, entropy, aux = score(params, batch)
  placed = _as_jax(batch)
  sampled = placed.sampled
  loss, clipped = jax.vmap(objective.loss)(
    logprobs, placed.behaviour, placed.advantages, sampled
  )
  tokens = sampled.sum().astype(jnp.float32)
  sums = Sums(
    tokens=tokens,
    loss=loss.sum(),
    clipped=clipped.sum(),
    entropy=jnp.where(sampled, entropy, 0.0).sum(),
    behaviour_kl=jnp.where(sampled, placed.behaviour - logprobs, 0.0).sum(),
    balance=aux.load_balance * tokens,
    router_entropy=aux.router_entropy * tokens,
  )
  total = (
    sums.loss
    - objective.entropy_bonus * sums.entropy
    + objective.balance_weight * sums.balance
  )
  return total, sums


def _as_jax(batch: batch_lib.Batch) -> Any:
  """Returns the batch with jax arrays, which inside a jit it has anyway."""
  return jax.tree.map(jnp.asarray, batch)


def _param_shapes(config: model_config.ModelConfig) -> Any:
  return jax.eval_shape(
    functools.partial(transformer.init, config=config), jax.random.key(0)
  )


def _state_shardings(
  config: model_config.ModelConfig,
  param_shardings: Any,
  optimizer: optax.GradientTransformation,
  replicated: jax.sharding.Sharding,
) -> TrainState:
  """Moments are sharded as the parameters they belong to."""
  params = _param_shapes(config)
  opt_state = optax.tree.map_params(
    optimizer,
    lambda _, placed: placed,
    jax.eval_shape(optimizer.init, params),
    param_shardings,
    transform_non_params=lambda _: replicated,
  )
  return TrainState._make((param_shardings, opt_state, replicated))
