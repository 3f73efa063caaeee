"""Gradient estimates of the library on the tabular task, and their errors.

  paths played -> advantages (rl.algorithms.advantages) -> Row -> loss x
  correction
    -> d loss / d log-probability of every token -> gradient of the table

A loss sees the table only through the log-probabilities of a row, so the last
step is the closed form of `tabular.along`, in float64.

Letters: N groups, G members, T places, P paths, S states, A tokens.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Float64, Int

from rl.algorithms import advantages as advantages_lib
from rl.algorithms import corrections, loss_aggregation, losses, packed_row
from rl.algorithms import kl as kl_lib
from rl.algorithms import returns as returns_lib
from rl.testing import tabular

# The gradient of the expected return: all that a trajectory's tokens sum to.
RETURN = loss_aggregation.Constant(length=1.0)


def members(
  values: Float64[np.ndarray, "P T"] | None = None,
  penalties: Float64[np.ndarray, "P T"] | None = None,
) -> list[returns_lib.EpisodeReturnInputs]:
  """Returns every path as estimators of advantages see it.

  A state is what the environment shows before a turn.
  """
  every = tabular.paths()
  found = []
  for path, sampled in enumerate(every.sampled):
    states = every.states[path, sampled]
    steps = np.stack([states, every.tokens[path, sampled]], 1)
    turns, firsts = np.unique(tabular.TURN[states], return_index=True)
    found.append(
      returns_lib.EpisodeReturnInputs(
        reward=float(every.rewards[path]),
        turns=tabular.TURN[states],
        turn_rewards=every.turn_rewards[path, turns],
        observations=[states[first].tobytes() for first in firsts],
        histories=[
          steps[:first].tobytes() + states[first].tobytes() for first in firsts
        ],
        penalties=None if penalties is None else penalties[path, sampled],
        values=None if values is None else values[path, sampled],
      )
    )
  return found


def advantages_of(
  estimator: advantages_lib.Estimator,
  played: Int[np.ndarray, "N G"],
  every: list[returns_lib.EpisodeReturnInputs],
  groups_per_update: int | None = None,
) -> Float64[np.ndarray, "N G T"]:
  """Returns the advantages of tokens; 0 in padding.

  Args:
    every: the `members` of all paths.
    groups_per_update: over which an estimator whose scope is the batch whitens;
      None leaves that out.
  """
  own: list[np.ndarray] = []
  with _unchecked():
    for update in np.split(played, len(played) // (groups_per_update or 1)):
      parts = [
        part
        for group in update.tolist()
        for part in estimator([every[path] for path in group]).advantages
      ]
      own += estimator.over_batch(parts) if groups_per_update else parts
  found = np.zeros((*played.shape, tabular.PLACES))
  found[tabular.paths().sampled[played]] = np.concatenate(own)
  return found


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
  """Leaves out checks of types, which of so many calls take minutes."""
  before = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    yield
  finally:
    jaxtyping.config.update("jaxtyping_disable", before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """The treatment of a sampled token.

  Attributes:
    old: the version that ratios are against. None is the one that sampled the
      token (bypass), 0 the one that is trained (scored again before its first
      step).
  """

  loss: losses.Loss
  correction: corrections.Correction | None = None
  old: int | None = None
  aggregate: loss_aggregation.Aggregate = RETURN


class GroupGradients(NamedTuple):
  """Gradients of groups, up the objective, not yet divided by counts."""

  sums: Float64[np.ndarray, "N S A"]
  counts: Float64[np.ndarray, " N"]

  @property
  def mean(self) -> Float64[np.ndarray, "S A"]:
    """The gradient of one update over all groups."""
    return self.sums.mean(0) / self.counts.mean()


class Errors(NamedTuple):
  """The distance of estimates from an oracle.

  Attributes:
    standard: of every coordinate, in standard errors of the mean.
    distance: of all coordinates together, Hotelling's T squared.
    chance: that estimates whose mean is the oracle are so far off, or more.
  """

  standard: Float64[np.ndarray, "S A"]
  distance: float
  chance: float


def of_groups(
  rule: Rule,
  played: Int[np.ndarray, "N G"],
  lags: Int[np.ndarray, "M T"],
  advantages: Float64[np.ndarray, "N G T"],
) -> GroupGradients:
  """Returns the gradient that the trained policy gets from each group.

  Args:
    played: paths; member i of all, flattened, is of kind i % M.
    lags: of the versions that sampled, as `tabular.play` takes them.
  """
  num, size = played.shape
  kinds = np.arange(played.size).reshape(played.shape) % len(lags)
  sampled = tabular.paths().sampled[played]

  def row(values: np.ndarray) -> jax.Array:
    # What is not sampled must not matter.
    filled = np.where(sampled, values, np.nan).astype(np.float32)
    return jnp.asarray(filled.reshape(num, -1))

  behaviour = tabular.logprobs(lags)[kinds, played]
  current = tabular.logprobs(tabular.old(0))[0, played]
  old = behaviour
  if rule.old is not None:
    old = tabular.logprobs(tabular.old(rule.old))[0, played]
  members = np.arange(1, size + 1)[:, None]
  rows = packed_row.Row(
    logprobs=row(current),
    old=row(old),
    behaviour=row(behaviour),
    advantages=row(advantages),
    sampled=jnp.asarray(sampled.reshape(num, -1)),
    segments=jnp.asarray((sampled * members).reshape(num, -1), jnp.int32),
  )
  slopes, counts = _slopes(rule, rows)
  per_member = tabular.along(
    tabular.TABLES[0],
    played.ravel(),
    -np.asarray(slopes, np.float64).reshape(-1, tabular.PLACES),
  )
  sums = per_member.reshape(num, size, *per_member.shape[1:]).sum(1)
  return GroupGradients(sums, np.asarray(counts, np.float64))


@functools.partial(jax.jit, static_argnums=0)
def _slopes(rule: Rule, rows: packed_row.Row) -> tuple[jax.Array, jax.Array]:
  """Returns d loss / d log-probability of each token, and counts of rows."""

  def total(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
    sums, counts = jax.vmap(functools.partial(_loss, rule))(
      rows._replace(logprobs=logprobs)
    )
    return sums.sum(), counts

  return jax.grad(total, has_aux=True)(rows.logprobs)


def _loss(rule: Rule, row: packed_row.Row) -> tuple[jax.Array, jax.Array]:
  loss = rule.loss(row).loss
  if rule.correction is not None:
    loss = loss * rule.correction(row).weights
  return rule.aggregate(loss, row)


def exact(
  rule: Rule,
  lags: Int[np.ndarray, "M T"],
  advantages: Float64[np.ndarray, "P T"],
) -> Float64[np.ndarray, "S A"]:
  """Returns the mean of the estimate, as a sum over all paths."""
  num_paths, kinds = len(advantages), len(lags)
  played = np.repeat(np.arange(num_paths), kinds)[:, None]
  found = of_groups(
    rule, played, lags, np.repeat(advantages[:, None], kinds, 0)
  )
  chances = tabular.probabilities(lags).T.reshape(-1) / kinds
  mean = np.einsum("n,nsa->sa", chances, found.sums)
  return mean / (chances @ found.counts)


def kl_gradients(
  reference: int,
) -> tuple[Float64[np.ndarray, "S A"], Float64[np.ndarray, "S A"]]:
  """Returns gradients of KL(policy, reference) and of KL(reference, policy).

  Each is the sum over states of the divergence there, times how often the
  policy comes there; that this changes with the policy is left out.
  """
  table = tabular.TABLES[0]
  every = tabular.paths()
  weights = every.sampled * tabular.chances_under(table)[:, None]
  visits = np.bincount(every.states.ravel(), weights.ravel(), tabular.STATES)
  log, other = tabular.log_policy(tabular.TABLES[[0, reference]])
  gap = log - other
  from_policy = gap - (np.exp(log) * gap).sum(-1, keepdims=True)
  return (
    visits[:, None] * np.exp(log) * from_policy,
    visits[:, None] * (np.exp(log) - np.exp(other)),
  )


def kl_of_episodes_gradient(reference: int) -> Float64[np.ndarray, "S A"]:
  """Returns the gradient of the KL between whole paths of both policies.

  Unlike the first of `kl_gradients` it has all of it.
  """
  now, other = (tabular.logprobs(tabular.old(lag))[0] for lag in (0, reference))
  return tabular.gradient(tabular.TABLES[0], (now - other).sum(-1))


def kl_loss_gradient(
  penalty: kl_lib.KlPenalty, reference: int, lags: Int[np.ndarray, "M T"]
) -> Float64[np.ndarray, "S A"]:
  """Returns the mean gradient of a penalty as a loss, weight left out.

  It is a sum over all paths.

  Args:
    reference: the version of that lag.
    lags: of the versions that sample.
  """
  sampled = tabular.paths().sampled
  now, other = (
    jnp.asarray(tabular.logprobs(tabular.old(lag))[0], jnp.float32)
    for lag in (0, reference)
  )

  def total(logprobs: jax.Array, behaviour: jax.Array) -> jax.Array:
    rows = packed_row.Row(
      logprobs=logprobs,
      old=behaviour,
      behaviour=behaviour,
      advantages=jnp.zeros_like(logprobs),
      sampled=jnp.asarray(sampled),
      segments=jnp.asarray(sampled, jnp.int32),
    )
    return jax.vmap(penalty)(rows, other).sum()

  behaviours = jnp.asarray(tabular.logprobs(lags), jnp.float32)
  slopes = [jax.grad(total)(now, behaviour) for behaviour in behaviours]
  weights = tabular.probabilities(lags)[..., None] * np.asarray(slopes)
  played = np.arange(len(sampled))
  return tabular.along(tabular.TABLES[0], played, weights.mean(0)).sum(0)


def controlled(
  found: GroupGradients,
  unbiased: GroupGradients,
  oracle: Float64[np.ndarray, "S A"],
) -> tuple[Float64[np.ndarray, "S A"], float]:
  """Returns a better mean of estimates, and the standard error of its size.

  What the same groups say by an estimator of known mean, `oracle`, is regressed
  out: the noise that both share does not count.
  """
  free = unbiased.sums[..., :-1] / unbiased.counts.mean()
  known = oracle[:, :-1].reshape(-1)
  centred = free.reshape(len(free), -1) - known
  design = np.column_stack([np.ones(len(centred)), centred])
  targets = (found.sums / found.counts.mean()).reshape(len(free), -1)
  fitted, *_ = np.linalg.lstsq(design, targets)
  noise = targets - design @ fitted
  error = np.sqrt((noise.var(0) / len(noise)).sum())
  return fitted[0].reshape(oracle.shape), float(error)


def compare(
  found: GroupGradients, oracle: Float64[np.ndarray, "S A"]
) -> Errors:
  """Returns the errors of the mean; groups are what is independent.

  The count is random too: the error of the quotient is that of its linear part
  (delta method), exact where counts are all the same.
  """
  num = len(found.counts)
  centred = found.sums - found.mean * found.counts[:, None, None]
  centred = centred / found.counts.mean()
  error = found.mean - oracle
  standard = error / (centred.std(0, ddof=1) / np.sqrt(num))
  # The row of a softmax sums to 0: its last coordinate says nothing more.
  free = centred[..., :-1].reshape(num, -1)
  gap = error[:, :-1].ravel()
  spread = free.T @ free / (num - 1)
  distance = float(num * gap @ np.linalg.solve(spread, gap))
  chance = jax.scipy.stats.chi2.sf(distance, len(gap))
  return Errors(standard, distance, float(chance))


def bias(
  mean: Float64[np.ndarray, "S A"], oracle: Float64[np.ndarray, "S A"]
) -> tuple[float, float]:
  """Returns |mean - oracle| / |oracle| and the cosine of their angle."""
  size = float(np.linalg.norm(oracle))
  off = float(np.linalg.norm(mean - oracle)) / size
  product = float(np.sum(mean * oracle))
  return off, product / (size * float(np.linalg.norm(mean)))
