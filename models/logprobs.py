"""Log-probabilities of tokens, without the logits of all of them at once.

  hidden[C, D] -> logits[C, V] -> log-probability of the target, entropy
       backward: the same logits again -> gradients of hidden and table

One chunk of C tokens at a time on each device, so that [tokens, V] never
exists. When all tokens fit one chunk its logits are kept instead.

Letters: B rows, L row length, D width, V vocabulary, P parts that the
tokens are split into over the mesh, N chunks, C tokens of a chunk.

Source: Cut Cross-Entropy, arXiv 2411.09009, section 4.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from models import sharding


class Term(NamedTuple):
  """One product of which logits are the sum.

  Attributes:
    hidden: states, or what an adapter has made of them.
    table: output projection, one word a row.
  """

  hidden: Float[Array, "*any D"]
  table: Float[Array, "V D"]


class _Settings(NamedTuple):
  temperature: float
  layout: sharding.Layout | None


def logits(terms: Sequence[Term]) -> Float32[Array, "*any V"]:
  """Returns the logits of few tokens whole, in float32 as `score` has them."""
  first, *others = (
    jnp.einsum(
      "...d,vd->...v",
      term.hidden,
      term.table,
      preferred_element_type=jnp.float32,
    )
    for term in terms
  )
  return sum(others, first)


def score(
  terms: Sequence[Term],
  targets: Int32[Array, "B L"],
  *,
  temperature: float,
  chunk: int,
  layout: sharding.Layout | None = None,
) -> tuple[Float32[Array, "B L"], Float32[Array, "B L"]]:
  """Returns log-probabilities of the targets and entropies, in nats.

  Everything behind the products of hidden states and tables is float32, sums
  of gradients included, whatever the two are.

  Args:
    temperature: the logits are divided by it.
    chunk: at most so many tokens of a device have logits at the same time.
    layout: of mesh and rules; None is one device.
  """
  parts = layout.size("tokens") if layout else 1
  tokens = targets.size // parts
  num_chunks = max(1, -(-tokens // chunk))
  size = -(-tokens // num_chunks)
  padding = num_chunks * size - tokens

  def split(x):
    rest = (None,) * (x.ndim - 2)
    x = sharding.by_device(layout, x)
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in rest)))
    x = x.reshape(parts, num_chunks, size, *x.shape[2:])
    # Cut within each device's own tokens: no chunk mixes those of two.
    x = jnp.moveaxis(x, 1, 0)
    return sharding.constrain(layout, x, None, "tokens", None, *rest)

  def join(x):
    x = jnp.moveaxis(x, 0, 1).reshape(parts, num_chunks * size)
    return sharding.by_row(layout, x[:, :tokens], targets.shape)

  settings = _Settings(temperature, layout)
  hidden = tuple(split(term.hidden) for term in terms)
  tables = tuple(term.table for term in terms)
  logprobs, entropy = _score(settings, hidden, tables, split(targets))
  return join(logprobs), join(entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(settings, hidden, tables, targets):
  """Returns log-probabilities and entropies [N, P, C]."""
  return _forward(settings, hidden, tables, targets)[0]


def _forward(settings, hidden, tables, targets):
  whole = _whole(settings, tables)

  def step(_, x):
    own, targets = x
    found = _summary(settings, _logits(settings, own, whole), targets)
    return None, found._replace(below=None)

  if len(targets) > 1:
    _, found = jax.lax.scan(step, None, (hidden, targets))
  else:
    first = [x[0] for x in hidden]
    found = _summary(settings, _logits(settings, first, whole), targets[0])
    found = jax.tree.map(lambda x: x[None], found)
  return (found.logprobs, found.entropy), (hidden, tables, targets, found)


def _backward(settings, saved, cotangents):
  hidden, tables, targets, found = saved
  whole = _whole(settings, tables)

  def step(totals, x):
    own, found, *rest = x
    if found.below is None:
      below = _logits(settings, own, whole) - found.top[..., None]
      found = found._replace(below=below)
    d_logits = _d_logits(settings, found, *rest).astype(own[0].dtype)
    d_own, d_tables = _products(settings, d_logits, own, whole)
    return jax.tree.map(jnp.add, totals, d_tables), d_own

  parts = hidden[0].shape[1]
  totals = tuple(
    _by_part(settings, jnp.zeros((parts, *table.shape), jnp.float32))
    for table in tables
  )
  chunks = (hidden, found, targets, *cotangents)
  if len(targets) > 1:
    totals, d_hidden = jax.lax.scan(step, totals, chunks)
  else:
    totals, d_hidden = step(totals, jax.tree.map(lambda x: x[0], chunks))
    d_hidden = jax.tree.map(lambda x: x[None], d_hidden)
  d_tables = []
  for place, (table, total) in enumerate(zip(tables, totals, strict=True)):
    # Each part has summed over its own tokens; now over the mesh, once.
    width = "rank" if place else "embed"
    total = sharding.constrain(settings.layout, total.sum(0), "vocab", width)
    d_tables.append(total.astype(table.dtype))
  return d_hidden, tuple(d_tables), None


_score.defvjp(_forward, _backward)


def _whole(settings: _Settings, tables):
  """Gathers the width, where it is split, before the loop: not in each turn."""
  return [sharding.constrain(settings.layout, x, "vocab", None) for x in tables]


def _by_part(settings: _Settings, x):
  return sharding.constrain(settings.layout, x, "tokens", "vocab", None)


def _logits(settings: _Settings, hidden, tables) -> Float32[Array, "P C V"]:
  whole = logits(list(map(Term, hidden, tables))) / settings.temperature
  return sharding.constrain(settings.layout, whole, "tokens", None, "vocab")


class _Summary(NamedTuple):
  """Of the logits `below + top` of a chunk.

  Attributes:
    below: [P, C, V], or None where it is to be computed again; the rest is
      [P, C].
    log_total: log sum exp of `below`.
  """

  below: Any
  top: Array
  log_total: Array
  logprobs: Array
  entropy: Array


def _summary(
  settings: _Settings,
  logits: Float32[Array, "P C V"],
  targets: Int32[Array, "P C"],
) -> _Summary:
  top = jnp.max(logits, -1)
  below = logits - top[..., None]
  layout = settings.layout
  if sharding.platform(layout) == "cpu":
    # There what is summed over exists: once then, and not in three versions.
    below = jax.lax.optimization_barrier(below)
  weights = jnp.exp(below)
  total = weights.sum(-1)
  log_total = jnp.log(total)
  if layout is None or layout.size("vocab") == 1:
    picked = jnp.take_along_axis(below, targets[..., None], -1)[..., 0]
  else:
    # An index would gather a vocabulary that is split.
    picked = jnp.where(_is_target(below, targets), below, 0.0).sum(-1)
  entropy = log_total - (weights * below).sum(-1) / total
  return _Summary(below, top, log_total, picked - log_total, entropy)


def _d_logits(
  settings: _Settings,
  found: _Summary,
  targets: Int32[Array, "P C"],
  d_logprobs: Float32[Array, "P C"],
  d_entropy: Float32[Array, "P C"],
) -> Float32[Array, "P C V"]:
  """By d log p_t = 1[j = t] - p_j and dH = -p_j (log p_j + H)."""
  logprobs = found.below - found.log_total[..., None]
  from_entropy = d_entropy[..., None] * (logprobs + found.entropy[..., None])
  spread = jnp.exp(logprobs) * (d_logprobs[..., None] + from_entropy)
  hit = _is_target(logprobs, targets)
  d_logits = jnp.where(hit, d_logprobs[..., None], 0.0) - spread
  return d_logits / settings.temperature


def _products(settings: _Settings, d_logits, hidden, tables):
  """Returns gradients of a chunk's hidden states and, by part, of tables."""
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  d_hidden = tuple(
    sharding.constrain(
      settings.layout,
      product("pcv,vd->pcd", d_logits, table).astype(x.dtype),
      *("tokens", None, None),
    )
    for x, table in zip(hidden, tables, strict=True)
  )
  d_tables = tuple(
    _by_part(settings, product("pcv,pcd->pvd", d_logits, x)) for x in hidden
  )
  return d_hidden, d_tables


def _is_target(logits, targets):
  words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  return words == targets[..., None]
