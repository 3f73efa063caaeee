"""The decode program: new context of some rows, then sampled tokens of all.

Letters: R rows of the dispatch, P rows with chunks of C ids, N = P * C + R - P
new ids, W pages of a table, K tokens sampled at most, S slots, V vocabulary.

  plan -> [ feed N ids ] -> sample -> [ feed R ids ] -> sample -> ...
               |   ^                       |   ^        (early exit)
               v   |                       v   |
  pages ------ + new --------------------- + new ---

A row can go on from the dispatch before (`FOLLOW`) although the host has not
seen its tokens yet: the last id, its position and whether it samples on stay
on the device, in the row's slot of `Carry`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from models import config as model_config
from models import definition, kv_cache, logprobs, sharding
from models import policy as policy_lib
from rl.engine import sampling

MAX_STOP_IDS = 4
MAX_TOP_LOGPROBS = 20

SLOT, PAST, NEW, BUDGET, SEED, TOP_K, BIAS, FOLLOW, STEPS = range(9)
_STOPS = STEPS + 1
_TABLE = _STOPS + MAX_STOP_IDS


class DispatchPlan(NamedTuple):
  """The work of every row of a dispatch: host arrays, one transfer each.

  Attributes:
    integers: per row: slot, cached length, new ids, tokens to sample at most,
      seed, top k, bias row, whether it follows, steps of the dispatch; then
      MAX_STOP_IDS stop ids (-1: none), then its pages. For a row that follows,
      the cached length is only a bound: the device knows it.
    ids: new ids, up to C for each of the first P rows, one for each other.
    floats: per row: temperature, top p, min p.
  """

  integers: Int32[np.ndarray, "R columns"]
  ids: Int32[np.ndarray, " N"]
  floats: Float32[np.ndarray, "R 3"]

  @property
  def stop_ids(self) -> Int32[np.ndarray, "R stops"]:
    """Stop ids of each row."""
    return self.integers[:, _STOPS:_TABLE]

  @property
  def tables(self) -> Int32[np.ndarray, "R W"]:
    """Pages of each row."""
    return self.integers[:, _TABLE:]


class Carry(NamedTuple):
  """The state of each slot between two dispatches, kept on the device."""

  last: Int32[Array, " S"]
  length: Int32[Array, " S"]
  alive: Bool[Array, " S"]


class Sampled(NamedTuple):
  """The tokens of a dispatch; entries from `counts` on are meaningless.

  Attributes:
    fed, stepped: experts of the new ids, and of the ids that were sampled and
      fed in this dispatch; None when they are not recorded.
    top: ids and log-probabilities of the most probable; None when they are not
      listed.
  """

  tokens: Int32[Array, "R K"]
  logprobs: Float32[Array, "R K"]
  counts: Int32[Array, " R"]
  fed: Int[Array, "N layers k"] | None = None
  stepped: Int[Array, "R steps layers k"] | None = None
  top: tuple[Int32[Array, "R K n"], Float32[Array, "R K n"]] | None = None


def empty_plan(
  rows: int, chunks: tuple[int, int], width: int, *, slots: int
) -> DispatchPlan:
  """Returns a plan of idle rows.

  Args:
    chunks: (P, C).
    width: W.
    slots: S, the slot of idle rows: it is out of range, so writes vanish.
  """
  integers = np.zeros((rows, _TABLE + width), np.int32)
  integers[:, SLOT] = slots
  integers[:, _STOPS:_TABLE] = -1
  count, size = chunks
  return DispatchPlan(
    integers,
    np.zeros(count * size + rows - count, np.int32),
    np.tile(np.asarray([[1.0, 1.0, 0.0]], np.float32), (rows, 1)),
  )


def init_carry(slots: int) -> Carry:
  """Returns the state of unused slots."""
  zeros = jnp.zeros(slots, jnp.int32)
  return Carry(zeros, jnp.zeros_like(zeros), jnp.zeros(slots, bool))


class _Rows(NamedTuple):
  """A plan on the device, where rows that follow have their slot's state.

  Attributes:
    known: ids in the cache after the new ones are fed.
    budget: tokens to sample at most; 0 while context is left to feed.
    ids, positions: of each new id.
    newest: index of each row's last new id.
  """

  slot: Int32[Array, " R"]
  known: Int32[Array, " R"]
  budget: Int32[Array, " R"]
  stop_ids: Int32[Array, "R stops"]
  params: sampling.SamplingParams
  ids: Int32[Array, " N"]
  positions: Int32[Array, " N"]
  newest: Int32[Array, " R"]

  def stopped(self, token: Int32[Array, " R"]) -> Bool[Array, " R"]:
    """Returns a mask of the rows whose token is a stop id."""
    return (token[:, None] == self.stop_ids).any(1)


class _Choice(NamedTuple):
  """One token of each row; `top` as in `Sampled`."""

  token: Int32[Array, " R"]
  logprob: Float32[Array, " R"]
  top: tuple[Int32[Array, "R n"], Float32[Array, "R n"]] | None = None


class _Loop(NamedTuple):
  step: Int32[Array, ""]
  alive: Bool[Array, " R"]
  last: Int32[Array, " R"]
  cache: kv_cache.Cache
  sampled: Sampled


def advance(
  params: definition.Params,
  cache: kv_cache.Cache,
  carry: Carry,
  biases: Float32[Array, "biases V"],
  plan: DispatchPlan,
  *,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  chunks: tuple[int, int],
  max_steps: int,
  record_experts: bool = False,
  top_logprobs: int = 0,
) -> tuple[kv_cache.Cache, Carry, Sampled]:
  """Feeds each row its new ids and samples up to its budget.

  The key and value of the last sampled token are not in the cache yet: it is
  the first new id of the row's next dispatch. Sampling ends when half of the
  rows that began have ended, so that they do not wait for the longest.

  Args:
    cache: donate it, and its pages are written in place.
    chunks: (P, C).
    max_steps: K.
    top_logprobs: most probable ids to list beside each sampled one.
  """
  rows = _rows(plan, carry, chunks)
  tables = jnp.asarray(plan.integers)[:, _TABLE:]
  policy = policy_lib.of(config).bind(params)

  def feed(cache, ids, positions, chunks):
    hidden, cache, experts = policy.feed(
      cache, tables, ids, positions, chunks, layout=layout
    )
    if experts is not None:
      narrow = experts.astype(config.expert_dtype)
      experts = narrow if record_experts else None
    return hidden, cache, experts

  hidden, cache, experts = feed(cache, rows.ids, rows.positions, chunks)

  def pick(hidden, positions):
    logits = logprobs.logits(policy.terms(hidden, layout=layout))
    one = sampling.sample(logits, positions, rows.params, biases)
    if not top_logprobs:
      return _Choice(*one)
    heat = rows.params.temperature
    top = sampling.most_probable(logits, heat, top_logprobs)
    return _Choice(*one, top)

  choice = pick(hidden[rows.newest], rows.known)
  started = rows.budget > 0
  sampled = _unsampled(
    len(tables),
    max_steps,
    experts,
    top_logprobs,
  )
  sampled = _record(sampled, 0, started, choice)

  alive = _alive(started, rows, choice.token, sampled)
  loop = _sample_on(
    feed,
    pick,
    rows,
    jnp.minimum(plan.integers[0, STEPS], max_steps),
    _Loop(jnp.int32(1), alive, choice.token, cache, sampled),
  )
  return loop.cache, _next_carry(carry, rows, loop), loop.sampled


def _sample_on(
  feed: Callable[..., Any],
  pick: Callable[..., _Choice],
  rows: _Rows,
  steps: Int32[Array, ""],
  first: _Loop,
) -> _Loop:
  """Feeds each sampled token and samples the next, up to `steps` of a row."""
  started = rows.budget > 0

  def body(loop: _Loop) -> _Loop:
    at = rows.known + loop.step - 1
    positions = jnp.where(loop.alive, at, kv_cache.EMPTY)
    hidden, cache, experts = feed(loop.cache, loop.last, positions, (0, 1))
    choice = pick(hidden, at + 1)
    sampled = _record(loop.sampled, loop.step, loop.alive, choice)
    if sampled.stepped is not None and experts is not None:
      stepped = sampled.stepped.at[:, loop.step - 1].set(experts[:, 0])
      sampled = sampled._replace(stepped=stepped)
    last = jnp.where(loop.alive, choice.token, loop.last)
    alive = _alive(loop.alive, rows, last, sampled)
    return _Loop(loop.step + 1, alive, last, cache, sampled)

  def worthwhile(loop: _Loop) -> Bool[Array, ""]:
    return (loop.step < steps) & (2 * loop.alive.sum() > started.sum())

  return jax.lax.while_loop(worthwhile, body, first)


def _rows(plan: DispatchPlan, carry: Carry, chunks: tuple[int, int]) -> _Rows:
  columns = jnp.asarray(plan.integers)
  floats = jnp.asarray(plan.floats)
  slot, past, new, budget, seed, top_k, bias, follow = (
    columns[:, i] for i in range(STEPS)
  )
  follow = follow > 0
  before = jax.tree.map(lambda x: x.at[slot].get(mode="clip"), carry)
  new = jnp.where(follow & ~before.alive, 0, new)
  past = jnp.where(follow, before.length, past)
  num_chunks, size = chunks
  row = jnp.arange(len(columns), dtype=jnp.int32)
  first = jnp.where(row < num_chunks, row * size, num_chunks * (size - 1) + row)
  owners = jnp.concatenate(
    [jnp.repeat(row[:num_chunks], size), row[num_chunks:]]
  )
  offset = jnp.arange(len(owners), dtype=jnp.int32) - first[owners]
  positions = jnp.where(
    offset < new[owners], past[owners] + offset, kv_cache.EMPTY
  )
  ids = jnp.asarray(plan.ids)
  ids = ids.at[first].set(jnp.where(follow, before.last, ids[first]))
  return _Rows(
    slot=slot,
    known=past + new,
    budget=jnp.where(new > 0, budget, 0),
    stop_ids=columns[:, _STOPS:_TABLE],
    params=sampling.SamplingParams(
      temperature=floats[:, 0],
      top_p=floats[:, 1],
      min_p=floats[:, 2],
      top_k=top_k,
      seed=seed,
      bias=bias,
    ),
    ids=ids,
    positions=positions,
    newest=first + jnp.maximum(new - 1, 0),
  )


def _unsampled(
  rows: int,
  max_steps: int,
  experts: Int[Array, "N 1 layers k"] | None,
  top_logprobs: int,
) -> Sampled:
  """Returns zeros for the tokens, and the experts of the ids that were fed."""
  stepped = None
  if experts is not None:
    shape = (rows, max(max_steps - 1, 1), *experts.shape[2:])
    stepped = jnp.full(shape, -1, experts.dtype)
  top = None
  if top_logprobs:
    shape = (rows, max_steps, top_logprobs)
    top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
  return Sampled(
    tokens=jnp.zeros((rows, max_steps), jnp.int32),
    logprobs=jnp.zeros((rows, max_steps), jnp.float32),
    counts=jnp.zeros(rows, jnp.int32),
    fed=None if experts is None else experts[:, 0],
    stepped=stepped,
    top=top,
  )


def _record(
  sampled: Sampled,
  step: int | Int32[Array, ""],
  alive: Bool[Array, " R"],
  choice: _Choice,
) -> Sampled:
  def put(so_far, new):
    return so_far.at[:, step].set(new)

  return sampled._replace(
    tokens=put(sampled.tokens, choice.token),
    logprobs=put(sampled.logprobs, choice.logprob),
    counts=sampled.counts + alive,
    top=jax.tree.map(put, sampled.top, choice.top),
  )


def _alive(
  alive: Bool[Array, " R"],
  rows: _Rows,
  last: Int32[Array, " R"],
  sampled: Sampled,
) -> Bool[Array, " R"]:
  """Returns a mask of the rows that sample another token in this dispatch."""
  return alive & ~rows.stopped(last) & (sampled.counts < rows.budget)


def _next_carry(carry: Carry, rows: _Rows, loop: _Loop) -> Carry:
  """Returns the state of the slots after the dispatch."""
  counts = loop.sampled.counts
  left = Carry(
    last=loop.last,
    length=rows.known + jnp.maximum(counts - 1, 0),
    alive=(counts > 0) & ~rows.stopped(loop.last),
  )
  return jax.tree.map(
    lambda old, new: old.at[rows.slot].set(new, mode="drop"), carry, left
  )
