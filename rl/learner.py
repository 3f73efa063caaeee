"""The only training jit: accumulate over micro-batches, then one update.

  init -> state -+-> accumulate(batch) -> ... -> update -> state
                 |        sums of gradients and counts     |
                 +-----------------------------------------+

What is trained is all parameters or, where there are adapters, the adapters:
gradients, moments and master copies exist for nothing else.

Letters: B rows, L row length, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from models import config as model_config
from models import logprobs as logprobs_lib
from models import lora, sharding, transformer
from rl import batch as batch_lib
from rl import losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """What is minimised, summed over tokens and divided once by their number.

  Attributes:
    entropy_bonus: weight of the policy's entropy, in nats a token.
    balance_weight: weight of the router's load-balance loss. It is not linear
      over micro-batches: each balances its own tokens.
    z_weight: weight of the router's z-loss; 0.001 in its source, ST-MoE, arXiv
      2202.08906, eq. 6. Both mean nothing to a model without experts.
  """

  loss: losses.Loss
  entropy_bonus: float = 0.0
  balance_weight: float = 0.01
  z_weight: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on a weight that is no finite number, or reversed."""
    least = {"balance_weight": 0.0, "z_weight": 0.0}
    for name in ("entropy_bonus", "balance_weight", "z_weight"):
      value = getattr(self, name)
      if not math.isfinite(value) or value < least.get(name, value):
        raise ValueError(
          f"objective.{name}={value} is no number that weighs a loss; use 0 "
          "to leave it out"
        )


class TrainState(NamedTuple):
  """All that training changes; checkpointed whole.

  Attributes:
    params: those that are published, in the dtype of the model.
    opt_state: float32 moments of what is trained.
    updates: optimizer steps taken, i32 scalar.
    master: what is trained, in float32, of which `params` are the rounded
      copy: an update too small for bfloat16 must not vanish. None when
      parameters are float32 anyway.
  """

  params: transformer.Params
  opt_state: optax.OptState
  updates: Array
  master: transformer.Params | None = None


class Sums(NamedTuple):
  """Sums over the sampled tokens of an update; divide by `tokens`.

  Attributes:
    router: Aux of each micro-batch, weighted by its tokens, so it divides
      too, except for `dropped`, which is a count; None without experts.
  """

  tokens: Float[Array, ""]
  loss: Float[Array, ""]
  clipped: Float[Array, ""]
  entropy: Float[Array, ""]
  behaviour_kl: Float[Array, ""]
  router: transformer.Aux | None


METRICS: tuple[str, ...] = (
  "tokens",
  "grad_norm",
  "loss",
  "clipped",
  "entropy",
  "behaviour_kl",
)
"""What every update reports; a model with experts adds the fields of Aux."""


class Accumulator(NamedTuple):
  """Unnormalised gradient and sums over micro-batches, added in float32.

  The gradient of one micro-batch has the precision of the parameters.
  """

  grads: transformer.Params
  sums: Sums


def token_logprobs(
  params: transformer.Params,
  batch: batch_lib.Batch,
  *,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  temperature: float,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], transformer.Aux]:
  """Returns (log-probability of token t, entropy there, aux), in nats.

  Both are float32. Entry t comes from the hidden state of the token before
  it, so the first entry of a row, and of every segment without a parent,
  means nothing: a trajectory starts with context.
  """
  placed = _as_jax(batch)
  prefix = placed.prefix
  hidden, aux = transformer.hidden(
    params,
    config,
    placed.tokens,
    placed.positions,
    placed.segments,
    parents=prefix and prefix.parents,
    copies=prefix and prefix.copies,
    experts=placed.experts,
    layout=layout,
  )
  targets = placed.tokens
  if prefix is not None:
    hidden = jnp.take_along_axis(hidden, prefix.previous[..., None], 1)
  else:
    # Scores move, being smaller than hidden states.
    targets = jnp.roll(targets, -1, axis=1)
  scores = logprobs_lib.score(
    logprobs_lib.terms(params, config, hidden),
    targets,
    temperature=temperature,
    chunk=config.compute.logprob_chunk,
    layout=layout,
  )
  if prefix is None:
    scores = [jnp.roll(x, 1, axis=1) for x in scores]
  return scores[0], scores[1], aux


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
  """The compiled training programs of one mesh; the state is an argument.

  Attributes:
    init: key -> TrainState, born sharded.
    wrap: parameters, placed as in `abstract` -> TrainState that holds them,
      with a fresh optimizer.
    zero: () -> Accumulator.
    accumulate: (params, accumulator, placed batch) -> accumulator; donates
      the accumulator.
    update: (state, accumulator) -> (state, metrics); donates the optimizer's
      state, the master copy and, where they can hold the new parameters, the
      gradients, but no parameters: published versions stay readable. Frozen
      parameters are the very same arrays again.
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
  layout: sharding.Layout,
  objective: Objective,
  optimizer: optax.GradientTransformation,
  temperature: float = 1.0,
) -> Learner:
  """Returns the programs for one model, mesh, objective and optimizer.

  Args:
    temperature: that of sampling, so that ratios start at 1.
  """
  score = functools.partial(
    token_logprobs, config=config, layout=layout, temperature=temperature
  )
  total = functools.partial(
    _objective, score=score, objective=objective, config=config
  )
  begin = functools.partial(_begin, config=config, optimizer=optimizer)
  shardings = _shardings(config, layout, optimizer, begin)
  trained = shardings._replace(params=lora.split(shardings.params)[0])
  grads = Accumulator._make((trained.params, layout.sharding()))
  is_f32 = shardings.master is None
  start = jax.jit(begin, out_shardings=tuple(trained[1:]))
  add = jax.jit(
    functools.partial(_accumulate, gradient=jax.grad(total, has_aux=True)),
    donate_argnums=2,
    out_shardings=grads,
  )
  # Rounded parameters have no use for the memory of float32 gradients.
  apply = jax.jit(
    functools.partial(_update, optimizer=optimizer),
    donate_argnums=(1, 3, 4) if is_f32 else (1, 3),
    out_shardings=(trained, None),
  )

  def init(key):
    params = transformer.init(key, config)
    return TrainState(params, *begin(lora.split(params)[0]))

  def update(state, accumulator):
    trainable, frozen = lora.split(state.params)
    after, metrics = apply(trainable, *state[1:], *accumulator)
    return after._replace(params=lora.join(after.params, frozen)), metrics

  return Learner(
    init=jax.jit(init, out_shardings=shardings),
    wrap=lambda params: TrainState(params, *start(lora.split(params)[0])),
    zero=jax.jit(functools.partial(_zero, config=config), out_shardings=grads),
    accumulate=lambda params, accumulator, batch: add(
      *lora.split(params), accumulator, batch
    ),
    update=update,
    score=jax.jit(lambda params, batch: score(params, batch)[0]),
    place=functools.partial(jax.device_put, device=layout.sharding("batch")),
    abstract=_abstract(config, begin, shardings),
  )


def _begin(
  trainable: Any,
  *,
  config: model_config.ModelConfig,
  optimizer: optax.GradientTransformation,
) -> tuple[optax.OptState, Array, Any]:
  """Returns the state of a fresh optimizer, no updates, and master copies."""
  master = None
  if config.compute.dtype != "float32":
    master = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
  opt_state = optimizer.init(trainable if master is None else master)
  return opt_state, jnp.zeros((), jnp.int32), master


def _abstract(
  config: model_config.ModelConfig,
  begin: Callable[..., tuple[optax.OptState, Array, Any]],
  shardings: TrainState,
) -> TrainState:
  shapes = transformer.shapes(config)
  state = TrainState(shapes, *jax.eval_shape(begin, lora.split(shapes)[0]))
  return jax.tree.map(
    lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
    state,
    shardings,
  )


def _zero(*, config: model_config.ModelConfig) -> Accumulator:
  trainable, _ = lora.split(transformer.shapes(config))
  router = None
  if config.num_sparse:
    sizes = {"load": config.num_experts}
    router = transformer.Aux(
      *(jnp.zeros(sizes.get(name, ())) for name in transformer.Aux._fields)
    )
  return Accumulator(
    jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trainable),
    Sums(*(jnp.zeros(()) for _ in Sums._fields[:-1]), router=router),
  )


def _accumulate(
  trainable: Any,
  frozen: Any,
  accumulator: Accumulator,
  batch: batch_lib.Batch,
  *,
  gradient: Callable[..., tuple[Any, Sums]],
) -> Accumulator:
  new = Accumulator(*gradient(trainable, frozen, batch))
  return jax.tree.map(jnp.add, accumulator, new)


def _update(
  trainable: Any,
  opt_state: optax.OptState,
  updates: Array,
  master: Any,
  grads: Any,
  sums: Sums,
  *,
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Array]]:
  tokens = jnp.maximum(sums.tokens, 1.0)
  grads = jax.tree.map(lambda g: g / tokens, grads)
  exact = trainable if master is None else master
  changes, opt_state = optimizer.update(grads, opt_state, exact)
  exact = optax.apply_updates(exact, changes)
  metrics = _metrics(sums, tokens)
  metrics["grad_norm"] = optax.tree.norm(grads)
  rounded = jax.tree.map(lambda x, old: x.astype(old.dtype), exact, trainable)
  master = exact if master is not None else None
  return TrainState(rounded, opt_state, updates + 1, master), metrics


def _metrics(sums: Sums, tokens: Array) -> dict[str, Array]:
  """Returns scalars: means, and one for each entry of a vector."""
  added = sums._asdict()
  router = added.pop("router")
  added |= router._asdict() if router else {}
  # Counts, all others are means.
  counts = {
    name: added.pop(name) for name in ("tokens", "dropped") if name in added
  }
  means = {name: x / tokens for name, x in added.items()}
  load = means.pop("load", ())
  return counts | means | {f"load/{i}": x for i, x in enumerate(load)}


def _objective(
  trainable: Any,
  frozen: Any,
  batch: batch_lib.Batch,
  *,
  score: Callable[..., tuple[Array, Array, transformer.Aux]],
  objective: Objective,
  config: model_config.ModelConfig,
) -> tuple[Array, Sums]:
  logprobs, entropy, aux = score(lora.join(trainable, frozen), batch)
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
    router=None,
  )
  total = sums.loss - objective.entropy_bonus * sums.entropy
  if config.num_sparse:
    router = jax.tree.map(lambda x: x * tokens, aux)
    total += objective.balance_weight * router.load_balance
    total += objective.z_weight * router.z_loss
    sums = sums._replace(router=router._replace(dropped=aux.dropped))
  return total, sums


def _as_jax(batch: batch_lib.Batch) -> Any:
  """Returns the batch with jax arrays, which inside a jit it has anyway."""
  return jax.tree.map(jnp.asarray, batch)


def _shardings(
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  optimizer: optax.GradientTransformation,
  begin: Callable[..., tuple[optax.OptState, Array, Any]],
) -> TrainState:
  """Moments and master copies lie where the parameters do that they are of."""
  params = layout.tree(transformer.logical_axes(config))
  trainable, _ = lora.split(params)
  shapes, _ = lora.split(transformer.shapes(config))
  opt_state, _, master = jax.eval_shape(begin, shapes)
  placed = optax.tree.map_params(
    optimizer,
    lambda _, where: where,
    opt_state,
    trainable,
    transform_non_params=lambda _: layout.sharding(),
  )
  master = None if master is None else trainable
  return TrainState._make((params, placed, layout.sharding(), master))
