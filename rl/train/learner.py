"""The only training jit: accumulate over micro-batches, then one update.

  init -> state -+-> accumulate(batch) -> ... -> update -> state
                 |        sums of gradients and counts     |
                 +-----------------------------------------+

What is trained is all parameters or, where there are adapters, the adapters,
and the critic's head if there is one: gradients, moments and master copies
exist for nothing else.

Letters: B rows, L row length, D width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32

from models import config as model_config
from models import logprobs as logprobs_lib
from models import lora, sharding, transformer
from rl.algorithms import objective as objective_lib
from rl.algorithms import references
from rl.data import batch as batch_lib
from rl.train import train_state

METRICS: tuple[str, ...] = (
  "tokens",
  "grad_norm",
  "loss",
  "clipped",
  "entropy",
  "behaviour_kl",
  "behaviour_ess",
  "skipped",
)
"""What every update reports; see `objective.metrics` for what comes on top."""


class Accumulator(NamedTuple):
  """Unnormalised gradient and sums over micro-batches, added in float32.

  The gradient of one micro-batch has the precision of the parameters.
  """

  grads: train_state.Trainable
  sums: objective_lib.Sums


def score_tokens(
  params: transformer.Params,
  critic: transformer.Params | None,
  batch: batch_lib.Batch,
  *,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  temperature: float,
  through_body: bool = True,
) -> objective_lib.Scored:
  """Returns what the model says of every token, in nats and in float32.

  Entry t comes from the hidden state of the token before it, so the first
  entry of a row, and of every segment without a parent, means nothing: a
  trajectory starts with context.

  Args:
    through_body: whether the critic's gradient goes on below its head.
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
  logprobs, entropy = logprobs_lib.score(
    logprobs_lib.terms(params, config, hidden),
    targets,
    temperature=temperature,
    chunk=config.compute.logprob_chunk,
    layout=layout,
  )
  values = None
  if critic is not None:
    below = hidden if through_body else jax.lax.stop_gradient(hidden)
    values = _values(critic, below)
  if prefix is None:
    logprobs, entropy, values = jax.tree.map(
      lambda x: jnp.roll(x, 1, axis=1), (logprobs, entropy, values)
    )
  has_routers = config.num_sparse > 0
  return objective_lib.Scored(
    logprobs, entropy, values, aux if has_routers else None
  )


def _values(
  critic: transformer.Params, hidden: Float[Array, "B L D"]
) -> Float32[Array, "B L"]:
  wide = hidden.astype(jnp.float32)
  return jnp.einsum("bld,d->bl", wide, critic["kernel"]) + critic["bias"]


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
  """The compiled training programs of one mesh; the state is an argument.

  Attributes:
    init: key -> TrainState, born sharded.
    wrap: parameters, placed as in `abstract` -> TrainState that holds them,
      with a fresh optimizer, a critic that says 0, and they themselves as the
      reference if there is to be one.
    zero: () -> Accumulator.
    accumulate: (params, accumulator, placed batch, critic) -> accumulator;
      donates the accumulator. Without a critic the last is left out.
    update: (state, accumulator, flat_count) -> (state, metrics); donates the
      optimizer's state, the master copy and, where they can hold the new
      parameters, the gradients, but no parameters: published versions stay
      readable. Frozen parameters are the very same arrays again. `flat_count`
      is added to what the loss is divided by, 0.0 by default. Where loss or
      gradient is not finite nothing changes, and the metric `skipped` is 1.
    score: (params, placed batch) -> log-probabilities [B, L].
    score_base: the same without adapters.
    values: (params, critic, placed batch) -> the critic's values [B, L].
    place: host batch -> batch on the mesh.
    abstract: shapes and shardings of the state, for restoring it.
  """

  init: Callable[[Array], train_state.TrainState]
  wrap: Callable[[transformer.Params], train_state.TrainState]
  zero: Callable[[], Accumulator]
  accumulate: Callable[..., Accumulator]
  update: Callable[..., tuple[train_state.TrainState, dict[str, Array]]]
  score: Callable[..., Array]
  score_base: Callable[..., Array]
  values: Callable[..., Array]
  place: Callable[[batch_lib.Batch], batch_lib.Batch]
  abstract: train_state.TrainState


def build(
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  objective: objective_lib.Objective,
  optimizer: optax.GradientTransformation,
  temperature: float = 1.0,
  *,
  critic: bool = False,
  reference: references.Memory | None = None,
  num_lags: int = 1,
) -> Learner:
  """Returns the programs for one model, mesh, objective and optimizer.

  Args:
    temperature: that of sampling, so that ratios start at 1.
    critic: whether there is one.
    reference: where to keep the first parameters; None does not keep them.
    num_lags: how many are told apart in the metrics.
  """
  score = functools.partial(
    score_tokens, config=config, layout=layout, temperature=temperature
  )
  begin = functools.partial(
    train_state.begin, config=config, optimizer=optimizer
  )
  shapes = train_state.shapes(
    config,
    begin,
    train_state.critic_head(config) if critic else None,
    has_reference=reference is not None,
  )
  shardings = train_state.shardings(
    shapes, config, layout, optimizer, reference
  )
  trained, _ = train_state.split(shardings.params, shardings.critic)
  replicated: Any = layout.sharding()
  grads = Accumulator(trained, replicated)
  zero = functools.partial(
    objective_lib.zero,
    objective,
    num_lags=num_lags,
    critic=critic,
    num_experts=config.num_experts if config.num_sparse else 0,
  )
  total = functools.partial(
    _total,
    score=functools.partial(score, through_body=objective.value.through_body),
    objective=objective,
    num_lags=num_lags,
  )
  add = jax.jit(
    functools.partial(_accumulate, gradient=jax.grad(total, has_aux=True)),
    donate_argnums=2,
    out_shardings=grads,
  )
  init, wrap = _starting(config, begin, shapes, shardings)
  base = dataclasses.replace(config, lora=None)
  below = score_program(base, layout, temperature)
  return Learner(
    init=init,
    wrap=wrap,
    zero=jax.jit(
      functools.partial(_zero, shapes=shapes, sums=zero), out_shardings=grads
    ),
    accumulate=lambda params, accumulator, batch, critic=None: add(
      *train_state.split(params, critic), accumulator, batch
    ),
    update=_updating(layout, shardings, optimizer),
    score=score_program(config, layout, temperature),
    score_base=lambda params, batch: below(lora.drop(params), batch),
    values=jax.jit(lambda *args: score(*args).values),
    place=functools.partial(jax.device_put, device=layout.sharding("batch")),
    abstract=train_state.abstract(shapes, shardings),
  )


def score_program(
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  temperature: float,
) -> Callable[..., Array]:
  """Returns (params, placed batch) -> log-probabilities [B, L] of any model."""

  def score(params, batch):
    scored = score_tokens(
      params,
      None,
      batch,
      config=config,
      layout=layout,
      temperature=temperature,
    )
    return scored.logprobs

  return jax.jit(score)


def _starting(
  config: model_config.ModelConfig,
  begin: Callable[..., tuple[Any, Array, Any]],
  shapes: train_state.TrainState,
  shardings: train_state.TrainState,
) -> tuple[Callable, Callable]:
  """Returns `init` and `wrap` of a learner."""
  start = jax.jit(begin, out_shardings=tuple(shardings[1:4]))
  draw = jax.jit(
    lambda key: transformer.init(key, config), out_shardings=shardings.params
  )
  no_values = jax.jit(
    lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.critic),
    out_shardings=shardings.critic,
  )

  def wrap(params):
    critic = no_values()
    opt_state, updates, master = start(train_state.split(params, critic)[0])
    kept = shardings.reference
    if kept is not None:
      kept = jax.device_put(params, kept)
    return train_state.TrainState(
      params, opt_state, updates, master, critic, kept
    )

  return lambda key: wrap(draw(key)), wrap


def _updating(
  layout: sharding.Layout,
  shardings: train_state.TrainState,
  optimizer: optax.GradientTransformation,
) -> Callable:
  """Returns `update` of a learner."""
  trained, _ = train_state.split(shardings.params, shardings.critic)
  # Rounded parameters have no use for the memory of float32 gradients.
  apply = jax.jit(
    functools.partial(_update, optimizer=optimizer),
    donate_argnums=(1, 3, 4) if shardings.master is None else (1, 3),
    out_shardings=(trained, *shardings[1:4], None),
  )

  def update(state, accumulator, flat_count=0.0):
    trainable, frozen = train_state.split(state.params, state.critic)
    flat_count = jax.device_put(np.float32(flat_count), layout.sharding())
    new, opt_state, updates, master, metrics = apply(
      trainable, *state[1:4], *accumulator, flat_count
    )
    after = state._replace(
      params=lora.join(new.policy, frozen),
      opt_state=opt_state,
      updates=updates,
      master=master,
      critic=new.critic,
    )
    return after, metrics

  return update


def _zero(
  *,
  shapes: train_state.TrainState,
  sums: Callable[[], objective_lib.Sums],
) -> Accumulator:
  trainable, _ = train_state.split(shapes.params, shapes.critic)
  grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trainable)
  return Accumulator(grads, sums())


def _accumulate(
  trainable: train_state.Trainable,
  frozen: Any,
  accumulator: Accumulator,
  batch: batch_lib.Batch,
  *,
  gradient: Callable[..., tuple[train_state.Trainable, objective_lib.Sums]],
) -> Accumulator:
  new = Accumulator(*gradient(trainable, frozen, batch))
  return jax.tree.map(jnp.add, accumulator, new)


def _total(
  trainable: train_state.Trainable,
  frozen: Any,
  batch: batch_lib.Batch,
  *,
  score: Callable[..., objective_lib.Scored],
  objective: objective_lib.Objective,
  num_lags: int,
) -> tuple[Array, objective_lib.Sums]:
  params = lora.join(trainable.policy, frozen)
  scored = score(params, trainable.critic, batch)
  return objective_lib.of_batch(
    objective, scored, _as_jax(batch), num_lags=num_lags
  )


def _update(
  trainable: train_state.Trainable,
  opt_state: optax.OptState,
  updates: Array,
  master: train_state.Trainable | None,
  grads: train_state.Trainable,
  sums: objective_lib.Sums,
  flat_count: Array,
  *,
  optimizer: optax.GradientTransformation,
) -> tuple[train_state.Trainable, optax.OptState, Array, Any, dict[str, Array]]:
  means: Any
  means, norm, divisor = mean_gradient(Accumulator(grads, sums), flat_count)
  is_finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
  exact: Any = trainable if master is None else master
  changes: Any
  changes, after = optimizer.update(means, opt_state, exact)
  changed = optax.apply_updates(exact, changes)
  keep = functools.partial(jnp.where, is_finite)
  exact = jax.tree.map(keep, changed, exact)
  rounded = jax.tree.map(lambda x, old: x.astype(old.dtype), exact, trainable)
  metrics = objective_lib.metrics(sums, divisor)
  metrics |= {"grad_norm": norm, "skipped": 1.0 - is_finite}
  return (
    rounded,
    jax.tree.map(keep, after, opt_state),
    updates + is_finite,
    None if master is None else exact,
    metrics,
  )


def mean_gradient(
  total: Accumulator, flat_count: float | Array
) -> tuple[train_state.Trainable, Array, Array]:
  """Returns the gradient of an update, its norm, and what divided it."""
  divisor = jnp.maximum(total.sums.divisor + flat_count, 1.0)
  means: Any = jax.tree.map(lambda g: g / divisor, total.grads)
  return means, optax.tree.norm(means), divisor


def _as_jax(batch: batch_lib.Batch) -> Any:
  """Returns the batch with jax arrays, which inside a jit it has anyway."""
  return jax.tree.map(jnp.asarray, batch)
