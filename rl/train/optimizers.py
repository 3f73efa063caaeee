"""Optimizers: frozen callables that build an optax transformation.

  gradient -> clip of the global norm -> rule -> * rate of the update -> change

`Descent` has all but the rule.
"""

import abc
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax import contrib

from rl.settings import checks
from rl.train import muon as muon_lib
from rl.train import parameter_axes


@runtime_checkable
class Optimizer(Protocol):
  """Frozen callable that builds an optax transformation."""

  def __call__(self) -> optax.GradientTransformation:
    """Returns a fresh transformation."""
    ...


@runtime_checkable
class LearningRate(Protocol):
  """Frozen callable from the number of earlier updates to a factor."""

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    ...

  def __call__(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the factor of the peak rate, at most 1."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRate:
  """The peak rate, after a warm-up.

  Attributes:
    warmup_updates: the rate rises linearly over so many updates; the first has
      a rate above 0, the last has the peak.
  """

  warmup_updates: int = 0

  def validate(self) -> None:
    """Raises ValueError on a negative warm-up."""
    out = "use 0 to begin with the whole rate"
    checks.at_least(self, 0, "warmup_updates", out=out)

  def __call__(self, updates: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the factor of an update."""
    return jnp.asarray(self._schedule()(updates))

  def _schedule(self) -> optax.Schedule:
    if self.warmup_updates < 2:
      return optax.schedules.constant_schedule(1.0)
    return optax.schedules.linear_schedule(
      1 / self.warmup_updates, 1.0, self.warmup_updates - 1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decay(ConstantRate):
  """A rate that falls from the peak to a share of it, and stays there.

  Attributes:
    hold_updates: so many more have the peak before it falls: warm-up, stable,
      decay.
    decay_updates: from the last update at the peak to the first at the end.
    end: share of the peak.
  """

  hold_updates: int = 0
  decay_updates: int
  end: float = 0.1

  def validate(self) -> None:
    """Raises ValueError on a time or an end that cannot work."""
    super().validate()
    checks.at_least(self, 0, "hold_updates", out="use 0 to fall at once")
    out = "use the updates of the run, or constant_rate"
    checks.at_least(self, 1, "decay_updates", out=out)
    checks.in_unit(self, "end", out="it is a share of the peak")

  def _fall(self) -> optax.Schedule:
    """Returns the factors from the last update at the peak on."""
    raise NotImplementedError

  def _schedule(self) -> optax.Schedule:
    peak = max(self.warmup_updates - 1, 0) + self.hold_updates
    return optax.schedules.join_schedules(
      [super()._schedule(), self._fall()], [peak]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRate(_Decay):
  """A rate that falls by the same amount in every update."""

  def _fall(self) -> optax.Schedule:
    return optax.schedules.linear_schedule(1.0, self.end, self.decay_updates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineRate(_Decay):
  """A rate that falls along half a cosine, slowly at both ends.

  Source: SGDR, arXiv 1608.03983, eq. 5, without restarts.
  """

  def _fall(self) -> optax.Schedule:
    return optax.schedules.cosine_decay_schedule(
      1.0, self.decay_updates, self.end
    )


def clip_by_norm(
  max_norm: float,
) -> optax.GradientTransformationExtraArgs:
  """Returns `optax.clip_by_global_norm`, which may be told the norm.

  An update that is given it as `grad_norm` need not sum it up again.
  """

  def update(updates, state, params=None, *, grad_norm=None, **others):
    del params, others
    norm = optax.tree.norm(updates) if grad_norm is None else grad_norm

    def clip(g):
      scaled = g / norm.astype(g.dtype) * max_norm
      return jnp.where(norm < max_norm, g, scaled)

    return jax.tree.map(clip, updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descent(abc.ABC):
  """The settings that all optimizers share.

  Attributes:
    learning_rate: the peak.
    schedule: its factor in each update.
    max_grad_norm: gradients of a larger norm, over all parameters, are scaled
      down to it; inf scales none.
    weight_decay: share of a parameter, norms included, that is taken from it
      in each update, times the rate of the update.
  """

  learning_rate: float
  schedule: LearningRate = ConstantRate()
  max_grad_norm: float = 1.0
  weight_decay: float = 0.0

  def validate(self) -> None:
    """Raises ValueError on a rate, schedule, norm or decay that cannot work."""
    checks.finite_above(self, 0, "learning_rate")
    checks.above(self, 0, "max_grad_norm", out="use inf to scale nothing")
    checks.finite_at_least(self, 0, "weight_decay", out="use 0 for none")

  def __call__(self) -> optax.GradientTransformation:
    """Returns clip -> rule -> decay, scaled by the rate of the update."""
    return optax.chain(
      clip_by_norm(self.max_grad_norm),
      self._rule(),
      optax.add_decayed_weights(self.weight_decay),
      # A function even where it is constant: the state has one structure.
      optax.scale_by_learning_rate(self._rate),
    )

  def _rate(self, updates: jax.typing.ArrayLike) -> jax.Array:
    return self.learning_rate * self.schedule(jnp.asarray(updates))

  @abc.abstractmethod
  def _rule(self) -> optax.GradientTransformation:
    """Returns gradient -> step at a rate of 1, uphill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Descent):
  """Adam with decoupled weight decay.

  Attributes:
    b1: decay rate of Adam's first moment.
    b2: decay rate of Adam's second moment.

  Source: arXiv 1711.05101, algorithm 2.
  """

  learning_rate: float = 5e-4
  b1: float = 0.9
  b2: float = 0.99
  short_name = "adamw"

  validate = checks.fields((Descent.validate,), (checks.below, 1, "b1", "b2"))

  def _rule(self) -> optax.GradientTransformation:
    return optax.scale_by_adam(self.b1, self.b2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Descent):
  """Second moments of a matrix as a row and a column; no first moments.

  A step is relative to the root mean square of the parameter, so the rate has
  another scale than Adam's. Of a parameter with more axes the two longest are
  factored. Each of stacked layers is a parameter of its own.

  Attributes:
    decay_exponent: update t keeps 1 - t^-exponent of the second moments.
    max_step_rms: the step of a parameter is scaled down to this root mean
      square, before it is made relative.
    least_factored: a parameter with fewer than two axes of this length keeps
      all its second moments.

  Source: arXiv 1804.04235, algorithms 4 and 5; defaults of section 9, where the
  rate also falls with the root of the updates.
  """

  learning_rate: float = 1e-2
  decay_exponent: float = 0.8
  max_step_rms: float = 1.0
  least_factored: int = 128

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    super().validate()
    checks.finite_above(self, 0, "decay_exponent", "max_step_rms")
    out = "use 1 to factor every matrix"
    checks.at_least(self, 1, "least_factored", out=out)

  def _rule(self) -> optax.GradientTransformation:
    factored = optax.scale_by_factored_rms(
      decay_rate=self.decay_exponent,
      min_dim_size_to_factor=self.least_factored,
    )
    relative = optax.chain(
      optax.clip_by_block_rms(self.max_step_rms),
      optax.scale_by_param_block_rms(),
    )
    return _layer_by_layer(factored, relative)


def _layer_by_layer(
  factored: optax.GradientTransformation,
  relative: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns one rule after the other, of each stacked layer by itself.

  The state is that of the first, with moments stacked as the layers are.

  Args:
    factored: `optax.scale_by_factored_rms`.
    relative: has no state.
  """
  moments = ("v_row", "v_col", "v")

  def each(path, leaf, function):
    for _ in range(parameter_axes.num_stacked(path, leaf)):
      function = jax.vmap(function)
    return function

  def init(params):
    # By fields: optax calls this with a tree that has a mark for parameters.
    def field(name):
      def begin(path, leaf):
        begun = each(path, leaf, lambda x: getattr(factored.init(x), name))
        return begun(leaf)

      return jax.tree.map_with_path(begin, params)

    begun: Any = factored.init(params)
    return begun._replace(**{x: field(x) for x in moments})

  def update(updates: Any, state: Any, params: Any = None):
    def step(path, gradient, param, *moments_of_leaf):
      def one(gradient, param, *own):
        after: Any
        before = state._replace(**dict(zip(moments, own, strict=True)))
        change, after = factored.update(gradient, before, param)
        change, _ = relative.update(change, relative.init(param), param)
        return change, *(getattr(after, name) for name in moments)

      return each(path, param, one)(gradient, param, *moments_of_leaf)

    fields = [getattr(state, name) for name in moments]
    found = jax.tree.map_with_path(step, updates, params, *fields)
    outer, inner = jax.tree.structure(updates), jax.tree.structure((0,) * 4)
    changes, *fields = jax.tree.transpose(outer, inner, found)
    count = optax.safe_increment(state.count)
    after = dict(zip(moments, fields, strict=True))
    return changes, state._replace(count=count, **after)

  return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Descent):
  """Momentum whose singular values are all made about 1, matrix by matrix.

  Adam trains all parameters that `muon.numbers` does not take as matrices. The
  steps of a matrix have a root mean square of `step_rms`, about that of Adam's,
  so both share one rate.

  Attributes:
    momentum: what remains of the mean of gradients (Nesterov's).
    iterations: of Newton and Schulz. Five bring every singular value that is
      at least 0.002 of the gradient's norm to between 0.68 and 1.21.
    b1: decay rate of Adam's first moment.
    b2: decay rate of Adam's second moment.

  Source: Keller Jordan, Muon, 2024; scale: arXiv 2502.16982, section 2.2.
  """

  learning_rate: float = 5e-4
  momentum: float = 0.95
  iterations: int = 5
  step_rms: float = 0.2
  b1: float = 0.9
  b2: float = 0.99

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    super().validate()
    checks.finite_above(self, 0, "step_rms")
    checks.below(self, 1, "momentum", "b1", "b2")
    checks.at_least(self, 1, "iterations", out="use 5, or adamw")

  def _rule(self) -> optax.GradientTransformation:
    muon = optax.chain(
      contrib.scale_by_muon(
        ns_steps=self.iterations,
        beta=self.momentum,
        weight_dimension_numbers=muon_lib.numbers,
      ),
      muon_lib.scale_to_rms(self.step_rms),
    )
    adam = optax.scale_by_adam(self.b1, self.b2)
    return optax.partition({"muon": muon, "adam": adam}, muon_lib.labels)
