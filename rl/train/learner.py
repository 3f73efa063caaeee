"""The training programs: accumulate over micro-batches, then one update.

  init -> state -+-> accumulate(batch) -> ... -> update -> state
                 |        sums of gradients and counts     |
                 +-----------------------------------------+

All parameters are trained or, where there are adapters, only these; and the
critic's head if there is one. Gradients, moments and master copies exist for
nothing else.

Letters: B rows, L row length, D width.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32

from models import config as model_config
from models import definition, lora, memory_report, sharding
from models import logprobs as logprobs_lib
from models import policy as policy_lib
from rl.algorithms import objective as objective_lib
from rl.algorithms import references
from rl.data import batch as batch_lib
from rl.train import optimizers, train_state

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
"""Metrics of every update; `objective.metrics` has more."""


class LearnerLost(RuntimeError):
  """The processes in which a learner runs have ended."""


class Accumulator(NamedTuple):
  """Unnormalised gradient and sums over micro-batches, added in float32.

  The gradient of one micro-batch has the precision of the parameters.
  """

  grads: train_state.Trainable
  sums: objective_lib.ObjectiveSums


def score_tokens(
  params: definition.Params,
  critic: definition.Params | None,
  batch: batch_lib.Batch,
  *,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  temperature: float,
  through_body: bool = True,
) -> objective_lib.Scored:
  """Returns the scores of every token, in nats and in float32.

  Entry t comes from the hidden state of the token before it, so the first
  entry of a row, and of every segment without a parent, means nothing: a
  trajectory starts with context.

  Args:
    through_body: whether the critic's gradient goes on below its head.
  """
  placed = _as_jax(batch)
  prefix = placed.prefix
  policy = policy_lib.of(config).bind(params)
  hidden, aux = _hidden(policy, placed, layout)
  targets = placed.tokens
  if prefix is not None:
    hidden = jnp.take_along_axis(hidden, prefix.previous[..., None], 1)
  else:
    # Scores move, being smaller than hidden states.
    targets = jnp.roll(targets, -1, axis=1)
  logprobs, entropy = logprobs_lib.score(
    policy.terms(hidden),
    targets,
    temperature=temperature,
    chunk=-(-config.compute.logprob_chunk // layout.size("length")),
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


def _hidden(
  policy: Any, batch: Any, layout: sharding.Layout
) -> tuple[Float[Array, "B L D"], Any]:
  """Returns the state after every token, and statistics of the routers."""
  prefix = batch.prefix
  return policy.hidden(
    batch.tokens,
    batch.positions,
    batch.segments,
    parents=prefix and prefix.parents,
    copies=prefix and prefix.copies,
    experts=batch.experts,
    layout=layout,
  )


def _values(
  critic: definition.Params, hidden: Float[Array, "B L D"]
) -> Float32[Array, "B L"]:
  wide = hidden.astype(jnp.float32)
  return jnp.einsum("bld,d->bl", wide, critic["kernel"]) + critic["bias"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
  """All that decides the training programs, but for their mesh.

  Attributes:
    reference: the policy to stay close to; see `scoring.reference_program`.
    temperature, critic, optimizer_memory, num_lags: see `Learner`.
  """

  model: model_config.ModelConfig
  objective: objective_lib.Objective
  optimizer: optimizers.Optimizer
  temperature: float = 1.0
  critic: bool = False
  reference: references.Reference | None = None
  optimizer_memory: references.Memory = "device"
  num_lags: int = 1

  @property
  def arguments(self) -> dict[str, Any]:
    """Those of `Learner`, but for the layout."""
    return {
      "config": self.model,
      "objective": self.objective,
      "optimizer": self.optimizer(),
      "temperature": self.temperature,
      "critic": self.critic,
      "reference": references.memory(self.reference),
      "optimizer_memory": self.optimizer_memory,
      "num_lags": self.num_lags,
    }

  def build(self, layout: sharding.Layout) -> "Learner":
    """Returns the programs of a mesh in this process."""
    return Learner(layout=layout, **self.arguments)


class Learner:
  """The training programs of one mesh, each compiled when it is first called.

  A learner holds no state: that is an argument. A batch may lie on the host, or
  on the mesh already; see `place`.

    state, total = learner.init(key), None
    for batch in batches:
      total = learner.accumulate(state.params, total, batch, state.critic)
    state, metrics = learner.step(state, total)

  Args:
    temperature: that of sampling, so that ratios start at 1.
    critic: whether there is one.
    reference: where to keep the first parameters; None does not keep them.
    optimizer_memory: where moments and master copies lie between updates. With
      "host" an update brings them to the device, when there are no activations,
      and takes them back.
    num_lags: how many are told apart in the metrics.

  Attributes:
    abstract: shapes and shardings of the state, for restoring it.
    config: of the model.
  """

  abstract: train_state.TrainState
  score_reference: "ScoreProgram | None" = None
  """Scores batches under the reference; None leaves it to
  `scoring.reference_program`."""

  def __init__(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    objective: objective_lib.Objective,
    optimizer: optax.GradientTransformation,
    temperature: float = 1.0,
    *,
    critic: bool = False,
    reference: references.Memory | None = None,
    optimizer_memory: references.Memory = "device",
    num_lags: int = 1,
  ):
    self.config, self._layout = config, layout
    self._objective = objective
    self._optimizer = optax.with_extra_args_support(optimizer)
    self._temperature, self._num_lags = temperature, num_lags
    begin = functools.partial(
      train_state.begin, config=config, optimizer=optimizer
    )
    shapes = train_state.shapes(
      config,
      begin,
      train_state.critic_head(config) if critic else None,
      has_reference=reference is not None,
    )
    placed = train_state.shardings(shapes, config, layout, optimizer, reference)
    self._placed = placed
    self._kept = train_state.in_memory(
      (placed.opt_state, placed.master), optimizer_memory
    )
    opt_state, master = self._kept
    self.abstract = memory_report.placed(
      shapes, placed._replace(opt_state=opt_state, master=master)
    )
    self._moves = optimizer_memory != "device"
    self._reference: references.Memory | None = reference
    trained, _ = train_state.split(placed.params, placed.critic)
    replicated: Any = layout.sharding()
    sums = Accumulator(trained, replicated)
    trained_shapes, _ = train_state.split(shapes.params, shapes.critic)
    wide = jax.tree.map(lambda x: x.update(dtype=jnp.float32), trained_shapes)
    self._draw = jax.jit(
      policy_lib.of(config).init, out_shardings=placed.params
    )
    self._begin = jax.jit(begin, out_shardings=tuple(placed[1:4]))
    self._no_values = jax.jit(
      lambda: _zeros(shapes.critic), out_shardings=placed.critic
    )
    self._add = jax.jit(
      self._with_gradient, donate_argnums=2, out_shardings=sums
    )
    # Memory goes to the first result of its shape, in the order of arguments:
    # from gradients to parameters, unless these are rounded.
    self._apply = jax.jit(
      self._with_update,
      donate_argnums=(1, 2, 4) if placed.master is None else (2, 4),
      out_shardings=(trained, *placed[1:4], None),
    )
    base = dataclasses.replace(config, lora=None)
    self._score = score_program(config, layout, temperature)
    self._score_base = score_program(base, layout, temperature)
    self._no_sums = jax.jit(self._nothing, out_shardings=replicated)
    self._no_total = jax.jit(
      lambda: Accumulator(_zeros(wide), self._nothing()), out_shardings=sums
    )
    self._add_sums = jax.jit(
      self._with_sums, donate_argnums=2, out_shardings=replicated
    )
    self._means = jax.jit(_means)
    self._values = jax.jit(self._states)

  def init(self, key: Array) -> train_state.TrainState:
    """Returns a fresh state, born sharded."""
    return self.wrap(self._draw(key))

  def wrap(self, params: definition.Params) -> train_state.TrainState:
    """Returns a state that holds these parameters, placed as in `abstract`.

    Its optimizer is fresh, its critic says 0, and the parameters themselves are
    the reference if there is to be one.
    """
    critic = self._no_values()
    trainable, _ = train_state.split(params, critic)
    opt_state, updates, master = self._begin(trainable)
    opt_state, master = self._put_away(opt_state, master)
    return self.refer(
      train_state.TrainState(params, opt_state, updates, master, critic)
    )

  def refer(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the state with its parameters as the reference, if it has one.

    They share memory on devices: an update leaves parameters as they are.
    """
    if self._reference is None:
      return state
    params = state.params
    if self._reference != "device":
      params = jax.device_put(params, self._placed.reference)
    return state._replace(reference=params)

  def put(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns a state of arrays of this process, for the programs to use."""
    return state

  def fetch(self, tree: Any) -> Any:
    """Returns parts of a state as arrays of this process."""
    return tree

  def place(self, batch: batch_lib.Batch) -> batch_lib.Batch:
    """Returns the batch on the mesh."""
    return jax.device_put(batch, self._layout.sharding("batch", "length"))

  def lower(self, batch: batch_lib.Batch) -> tuple[Any, Any]:
    """Returns the lowered programs of a batch's gradient and of an update.

    Nothing is on a device for them.
    """
    state, whole = self.abstract, self._layout.sharding()
    trainable, frozen = train_state.split(state.params, state.critic)
    batch = memory_report.placed(
      batch, self._layout.sharding("batch", "length")
    )
    total: Any = Accumulator(
      jax.tree.map(lambda x: x.update(dtype=jnp.float32), trainable),
      memory_report.placed(jax.eval_shape(self._nothing), whole),
    )
    # Where they lie during the update.
    rest = memory_report.placed(tuple(state[1:4]), tuple(self._placed[1:4]))
    divisor = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    add = self._add.lower(trainable, frozen, total, batch)
    return add, self._apply.lower(
      trainable, total.grads, *rest, total.sums, divisor
    )

  def score(
    self, params: definition.Params, batch: batch_lib.Batch
  ) -> Float32[Array, "B L"]:
    """Returns the log-probability of every token, in nats."""
    return self._score(params, self.place(batch))

  def score_base(
    self, params: definition.Params, batch: batch_lib.Batch
  ) -> Float32[Array, "B L"]:
    """Returns the same without adapters."""
    return self._score_base(lora.drop(params), self.place(batch))

  def values(
    self,
    params: definition.Params,
    critic: definition.Params,
    batch: batch_lib.Batch,
  ) -> Float32[Array, "B L"]:
    """Returns the critic's value of the state after every token."""
    return self._values(params, critic, self.place(batch))

  def accumulate(
    self,
    params: definition.Params,
    total: Accumulator | None,
    batch: batch_lib.Batch,
    critic: definition.Params | None = None,
  ) -> Accumulator:
    """Returns the sums with one more batch in them; donates `total`.

    Args:
      total: None before the first batch. Then zeros are added to: a program of
        its own would be one more to trace and load for each shape of a batch.
    """
    trainable, frozen = train_state.split(params, critic)
    if total is None:
      total = self._no_total()
    return self._add(trainable, frozen, total, self.place(batch))

  def update(
    self,
    state: train_state.TrainState,
    total: Accumulator,
    left_out_divisor: float = 0.0,
  ) -> tuple[train_state.TrainState, dict[str, Array]]:
    """Returns the state after an optimizer step, and metrics on the mesh.

    Where loss or gradient is not finite nothing changes, and the metric
    `skipped` is 1. Donates the optimizer's state, the master copy and, where
    they can hold the new parameters, the gradients, but no parameters:
    published versions stay readable. Frozen parameters are the very same arrays
    again.

    Args:
      left_out_divisor: is added to what the loss is divided by.
    """
    trainable, frozen = train_state.split(state.params, state.critic)
    divisor = np.float32(left_out_divisor)
    # Each process has it: `device_put` would compare it across all of them.
    with jax.transfer_guard("allow"):
      count = jax.make_array_from_callback(
        (), self._layout.sharding(), lambda _: divisor
      )
    opt_state, updates, master = state[1:4]
    if self._moves:
      kept = opt_state, master
      opt_state, master = jax.device_put(
        kept, (self._placed.opt_state, self._placed.master)
      )
      # jax donates nothing to another memory; the host would hold both copies.
      for leaf in jax.tree.leaves(kept):
        leaf.delete()
    new, opt_state, updates, master, metrics = self._apply(
      trainable, total.grads, opt_state, updates, master, total.sums, count
    )
    opt_state, master = self._put_away(opt_state, master)
    parts = new, opt_state, updates, master
    return train_state.changed(state, frozen, parts), metrics

  def _put_away(self, opt_state: Any, master: Any) -> tuple[Any, Any]:
    """Returns the optimizer's state where it lies between updates."""
    if not self._moves:
      return opt_state, master
    return jax.device_put((opt_state, master), self._kept)

  def step(
    self,
    state: train_state.TrainState,
    total: Accumulator,
    left_out_divisor: float = 0.0,
  ) -> tuple[train_state.TrainState, dict[str, float]]:
    """Returns what `update` does, with its metrics on the host."""
    state, metrics = self.update(state, total, left_out_divisor)
    found = jax.device_get(metrics)
    return state, {name: float(value) for name, value in found.items()}

  def measure(
    self, params: definition.Params, batches: Iterable[batch_lib.Batch]
  ) -> dict[str, float]:
    """Returns the metrics of the loss on batches, without a gradient."""
    trainable, frozen = train_state.split(params, None)
    sums = self._no_sums()
    for batch in batches:
      sums = self._add_sums(trainable, frozen, sums, self.place(batch))
    found = jax.device_get(self._means(sums))
    return {name: float(value) for name, value in found.items()}

  # What is compiled: loss -> gradient -> sums -> update.

  def _scored(
    self,
    params: definition.Params,
    critic: definition.Params | None,
    batch: batch_lib.Batch,
    *,
    through_body: bool,
  ) -> objective_lib.Scored:
    return score_tokens(
      params,
      critic,
      batch,
      config=self.config,
      layout=self._layout,
      temperature=self._temperature,
      through_body=through_body,
    )

  def _states(
    self,
    params: definition.Params,
    critic: definition.Params,
    batch: batch_lib.Batch,
  ) -> Float32[Array, "B L"]:
    policy = policy_lib.of(self.config).bind(params)
    hidden, _ = _hidden(policy, _as_jax(batch), self._layout)
    return _values(critic, hidden)

  def _loss(
    self,
    trainable: train_state.Trainable,
    frozen: Any,
    batch: batch_lib.Batch,
  ) -> tuple[Array, objective_lib.ObjectiveSums]:
    """Returns what to differentiate, summed over tokens, and the sums."""
    scored = self._scored(
      lora.join(trainable.policy, frozen),
      trainable.critic,
      batch,
      through_body=self._objective.value.through_body,
    )
    return objective_lib.of_batch(
      self._objective, scored, _as_jax(batch), num_lags=self._num_lags
    )

  def _nothing(self) -> objective_lib.ObjectiveSums:
    return objective_lib.zero(
      self._objective,
      num_lags=self._num_lags,
      critic=self.abstract.critic is not None,
      num_experts=self.config.num_experts if self.config.num_sparse else 0,
    )

  def _with_gradient(
    self,
    trainable: train_state.Trainable,
    frozen: Any,
    total: Accumulator,
    batch: batch_lib.Batch,
  ) -> Accumulator:
    grads, sums = jax.grad(self._loss, has_aux=True)(trainable, frozen, batch)
    added: Any = jax.tree.map(
      lambda before, g: before + g.astype(jnp.float32), total.grads, grads
    )
    return Accumulator(added, objective_lib.add(total.sums, sums))

  def _with_sums(
    self,
    trainable: train_state.Trainable,
    frozen: Any,
    total: objective_lib.ObjectiveSums,
    batch: batch_lib.Batch,
  ) -> objective_lib.ObjectiveSums:
    _, new = self._loss(trainable, frozen, batch)
    return objective_lib.add(total, new)

  def _with_update(
    self,
    trainable: train_state.Trainable,
    grads: train_state.Trainable,
    opt_state: optax.OptState,
    updates: Array,
    master: train_state.Trainable | None,
    sums: objective_lib.ObjectiveSums,
    left_out_divisor: Array,
  ) -> tuple[
    train_state.Trainable, optax.OptState, Array, Any, dict[str, Array]
  ]:
    total = Accumulator(grads, sums)
    _, norm, divisor = mean_gradient(total, left_out_divisor)
    is_finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    old: Any = trainable if master is None else master

    def step():
      # Divided once more, as means from outside would have to be in memory.
      means: Any
      means, _, _ = mean_gradient(total, left_out_divisor)
      changes: Any
      changes, after = self._optimizer.update(
        means, opt_state, old, grad_norm=norm
      )
      return optax.apply_updates(old, changes), after

    def skip():
      if master is not None:
        return master, opt_state
      # Parameters that a branch hands through are copied before every step.
      # These are written, where they are needed, into the gradients' memory.
      keep = functools.partial(jnp.where, is_finite)
      return jax.tree.map(keep, grads, trainable), opt_state

    exact, after = jax.lax.cond(is_finite, step, skip)
    rounded = jax.tree.map(lambda x, old: x.astype(old.dtype), exact, trainable)
    metrics = objective_lib.metrics(sums, divisor)
    metrics |= {"grad_norm": norm, "skipped": 1.0 - is_finite}
    return (
      rounded,
      after,
      updates + is_finite,
      None if master is None else exact,
      metrics,
    )


ScoreProgram = Callable[[train_state.TrainState, batch_lib.Batch], Array]
"""(state, batch) -> log-probabilities [B, L], on the learner's mesh."""


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


def mean_gradient(
  total: Accumulator, left_out_divisor: float | Array
) -> tuple[train_state.Trainable, Array, Array]:
  """Returns the gradient of an update, its norm, and what divided it."""
  divisor = jnp.maximum(total.sums.divisor + left_out_divisor, 1.0)
  means: Any = jax.tree.map(lambda g: g / divisor, total.grads)
  return means, optax.tree.norm(means), divisor


def _means(sums: objective_lib.ObjectiveSums) -> dict[str, Array]:
  return objective_lib.metrics(sums, jnp.maximum(sums.divisor, 1.0))


def _as_jax(batch: batch_lib.Batch) -> Any:
  """Returns the batch with jax arrays, which inside a jit it has anyway."""
  return jax.tree.map(jnp.asarray, batch)


def _zeros(shapes: Any) -> Any:
  """Returns a tree of zeros."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
