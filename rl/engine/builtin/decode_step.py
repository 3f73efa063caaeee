"""The decode program: new context of some rows, then sampled tokens of all.

Letters: R rows of the dispatch, P rows with chunks of C ids, N = P * C + R - P
new ids, W pages of a table, K tokens sampled at most, S slots, V vocabulary.

  plan -> [ feed N ids ] -> sample -> [ feed R ids ] -> sample -> ...
               |   ^                       |   ^        (early exit)
               v   |                       v   |
  pages ------ + new --------------------- + new ---

A row can go on from the dispatch before (`FOLLOW`) although the host has not
seen its tokens yet: the last id, its position and whether it samples on stay
on the device, in the row's slot of `Carry`. With drafts (`drafts.py`) a step
feeds D more ids of each row and samples up to D + 1 tokens.
"""

import dataclasses
import functools
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
from rl.engine.builtin import drafts

MAX_STOP_IDS = 4
MAX_TOP_LOGPROBS = 20

SLOT, PAST, NEW, BUDGET, SEED, TOP_K, BIAS, FOLLOW, STEPS = range(9)
_STOPS = STEPS + 1
_TABLE = _STOPS + MAX_STOP_IDS
_FLOATS = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DispatchPlan:
  """The work of every row of a dispatch: one array, hence one transfer.

  The rest are views of it, on the host and in a program alike.

  Attributes:
    packed: the ids, and then of each row its floats and integers.
    rows, num_ids: R and N.
  """

  packed: Int32[np.ndarray, " n"]
  rows: int = dataclasses.field(metadata={"static": True})
  num_ids: int = dataclasses.field(metadata={"static": True})

  @property
  def ids(self) -> Int32[np.ndarray, " N"]:
    """New ids, up to C for each of the first P rows, one for each other."""
    return self.packed[: self.num_ids]

  @property
  def floats(self) -> Float32[np.ndarray, "R 3"]:
    """Temperature, top p and min p of each row."""
    return self._table[:, :_FLOATS].view(np.float32)

  @property
  def integers(self) -> Int32[np.ndarray, "R columns"]:
    """The other columns of each row.

    Slot, cached length, new ids, tokens to sample at most, seed, top k, bias
    row, whether it follows, steps of the dispatch; then MAX_STOP_IDS stop ids
    (-1: none), then its pages. For a row that follows, the cached length is
    only a bound: the device knows it.
    """
    return self._table[:, _FLOATS:]

  @property
  def _table(self) -> Int32[np.ndarray, "R all"]:
    return self.packed[self.num_ids :].reshape(self.rows, -1)

  @property
  def stop_ids(self) -> Int32[np.ndarray, "R stops"]:
    """Stop ids of each row."""
    return self.integers[:, _STOPS:_TABLE]

  @property
  def tables(self) -> Int32[np.ndarray, "R W"]:
    """Pages of each row."""
    return self.integers[:, _TABLE:]


class Carry(NamedTuple):
  """The state of each slot between two dispatches, kept on the device.

  Attributes:
    history: ids of its conversation, for drafts; None without any.
  """

  last: Int32[Array, " S"]
  length: Int32[Array, " S"]
  alive: Bool[Array, " S"]
  history: Int32[Array, "S L"] | None = None


class Sampled(NamedTuple):
  """The tokens of a dispatch; entries from `counts` on are meaningless.

  Attributes:
    fed, stepped: experts of the new ids, and of the ids that were sampled and
      fed in this dispatch; None when they are not recorded.
    top: ids and log-probabilities of the most probable; None when they are not
      listed.
    drafted, right: drafts that were fed, and those that were right; None
      without drafts.
  """

  tokens: Int32[Array, "R K"]
  logprobs: Float32[Array, "R K"]
  counts: Int32[Array, " R"]
  fed: Int[Array, "N layers k"] | None = None
  stepped: Int[Array, "R steps layers k"] | None = None
  top: tuple[Int32[Array, "R K n"], Float32[Array, "R K n"]] | None = None
  drafted: Int32[Array, " R"] | None = None
  right: Int32[Array, " R"] | None = None


def empty_plan(
  rows: int, chunks: tuple[int, int], width: int, *, slots: int
) -> DispatchPlan:
  """Returns a plan of idle rows.

  Args:
    chunks: (P, C).
    width: W.
    slots: S, the slot of idle rows: it is out of range, so writes vanish.
  """
  count, size = chunks
  num_ids = count * size + rows - count
  packed = np.zeros(num_ids + rows * (_FLOATS + _TABLE + width), np.int32)
  plan = DispatchPlan(packed, rows, num_ids)
  plan.integers[:, SLOT] = slots
  plan.stop_ids[:] = -1
  plan.floats[:] = (1.0, 1.0, 0.0)
  return plan


def init_carry(slots: int, history: int = 0) -> Carry:
  """Returns the state of unused slots.

  Args:
    history: L, the longest conversation, with drafts; else 0.
  """
  zeros = jnp.zeros(slots, jnp.int32)
  ids = jnp.zeros((slots, history), jnp.int32) if history else None
  return Carry(zeros, jnp.zeros_like(zeros), jnp.zeros(slots, bool), ids)


def set_history(
  carry: Carry, slot: Int32[Array, ""], ids: Int32[Array, " L"]
) -> Carry:
  """Returns the state with the ids of a slot, which came without being fed."""
  assert carry.history is not None
  return carry._replace(history=carry.history.at[slot].set(ids))


class _Rows(NamedTuple):
  """A plan on the device, where rows that follow have their slot's state.

  Attributes:
    known: ids in the cache after the new ones are fed.
    budget: tokens to sample at most; 0 while context is left to feed.
    ids, positions: of each new id.
    newest: index of each row's last new id.
    history: ids so far, the new ones included; None without drafts.
  """

  slot: Int32[Array, " R"]
  known: Int32[Array, " R"]
  budget: Int32[Array, " R"]
  stop_ids: Int32[Array, "R stops"]
  params: sampling.SamplingParams
  ids: Int32[Array, " N"]
  positions: Int32[Array, " N"]
  newest: Int32[Array, " R"]
  history: Int32[Array, "R L"] | None

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


class _Drafted(NamedTuple):
  """A loop, with drafts of the next step and a mask of those to be fed."""

  loop: _Loop
  proposed: Int32[Array, "R D"]
  is_fed: Bool[Array, "R D"]


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
  num_drafts: int = 0,
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
    num_drafts: D, of each row and step; needs `carry.history`.
  """
  rows = _rows(plan, carry, chunks)
  tables = jnp.asarray(plan.tables)
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
    each = len(hidden) // len(tables)
    params = rows.params
    if each > 1:
      params = jax.tree.map(lambda x: jnp.repeat(x, each), params)
    one = sampling.sample(logits, positions, params, biases)
    if not top_logprobs:
      return _Choice(*one)
    top = sampling.most_probable(logits, params.temperature, top_logprobs)
    return _Choice(*one, top)

  choice = pick(hidden[rows.newest], rows.known)
  started = rows.budget > 0
  sampled = _unsampled(
    len(tables),
    max_steps,
    experts,
    top_logprobs,
    num_drafts,
  )
  sampled = _record(sampled, 0, started, choice)

  alive = _alive(started, rows, choice.token, sampled)
  sample_on = _sample_on
  if num_drafts:
    sample_on = functools.partial(_sample_with_drafts, num_drafts)
  loop = sample_on(
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

  return jax.lax.while_loop(_worthwhile(rows, steps), body, first)


def _sample_with_drafts(
  num_drafts: int,
  feed: Callable[..., Any],
  pick: Callable[..., _Choice],
  rows: _Rows,
  steps: Int32[Array, ""],
  first: _Loop,
) -> _Loop:
  """Does what `_sample_on` does; each right draft adds a token to its step.

  Keys and values of wrong drafts lie after the last token, and are overwritten
  before they are read.
  """

  def proposing(loop: _Loop) -> _Drafted:
    counts, history = loop.sampled.counts, _history(rows, loop.sampled)
    assert history is not None
    proposed = drafts.propose(history, rows.known + counts, num_drafts)
    order = jnp.arange(num_drafts, dtype=jnp.int32)
    is_fed = order < (rows.budget - counts)[:, None] - 1
    is_fed &= loop.alive[:, None]
    is_fed &= jnp.cumprod(proposed != drafts.NONE, 1).astype(bool)
    return _Drafted(loop, proposed, is_fed)

  def step(
    loop: _Loop,
    proposed: Int32[Array, "R D"],
    is_fed: Bool[Array, "R D"],
  ) -> _Loop:
    num_rows, width = len(proposed), proposed.shape[1] + 1
    offset = jnp.arange(width, dtype=jnp.int32)
    # The last token has not been fed; the first of these feeds it.
    at = (rows.known + loop.sampled.counts - 1)[:, None] + offset
    ids = jnp.concatenate([loop.last[:, None], proposed], 1)
    fed = jnp.concatenate([loop.alive[:, None], is_fed], 1)
    hidden, cache, experts = feed(
      loop.cache,
      jnp.where(fed, ids, 0).reshape(-1),
      jnp.where(fed, at, kv_cache.EMPTY).reshape(-1),
      (num_rows, width) if width > 1 else (0, 1),
    )
    choice, experts = jax.tree.map(
      lambda x: x.reshape(num_rows, width, *x.shape[1:]),
      (
        pick(hidden, (at + 1).reshape(-1)),
        None if experts is None else experts[:, 0],
      ),
    )
    right = drafts.num_right(proposed, is_fed, choice.token)
    stops = (choice.token[..., None] == rows.stop_ids[:, None]).any(-1)
    before_stop = jnp.cumsum(stops, 1) - stops == 0
    is_kept = loop.alive[:, None] & (offset <= right[:, None]) & before_stop
    sampled = _record_kept(loop.sampled, is_kept, is_fed, choice, experts)
    newest = jnp.maximum(is_kept.sum(1, dtype=jnp.int32) - 1, 0)
    token = jnp.take_along_axis(choice.token, newest[:, None], 1)[:, 0]
    last = jnp.where(loop.alive, token, loop.last)
    alive = _alive(loop.alive, rows, last, sampled)
    return _Loop(loop.step + 1, alive, last, cache, sampled)

  worthwhile = _worthwhile(rows, steps)

  def steps_of(width: int, state: _Drafted) -> _Drafted:
    """Takes steps with drafts, or without, as long as that is due."""
    return jax.lax.while_loop(
      lambda now: worthwhile(now.loop) & (now.is_fed.any() == (width > 0)),
      lambda now: proposing(
        step(now.loop, now.proposed[:, :width], now.is_fed[:, :width])
      ),
      state,
    )

  # Loops, since XLA would copy the pages for the branches of a cond.
  return jax.lax.while_loop(
    lambda now: worthwhile(now.loop),
    lambda now: steps_of(num_drafts, steps_of(0, now)),
    proposing(first),
  ).loop


def _worthwhile(
  rows: _Rows, steps: Int32[Array, ""]
) -> Callable[[_Loop], Bool[Array, ""]]:
  num_started = (rows.budget > 0).sum()

  def worthwhile(loop: _Loop) -> Bool[Array, ""]:
    return (loop.step < steps) & (2 * loop.alive.sum() > num_started)

  return worthwhile


def _history(rows: _Rows, sampled: Sampled) -> Int32[Array, "R L"] | None:
  """Returns the ids of each row with those sampled; None without drafts."""
  if rows.history is None:
    return None
  row = jnp.arange(len(rows.slot), dtype=jnp.int32)[:, None]
  step = jnp.arange(sampled.tokens.shape[1], dtype=jnp.int32)
  at = rows.known[:, None] + step
  at = jnp.where(step < sampled.counts[:, None], at, kv_cache.EMPTY)
  return rows.history.at[row, at].set(sampled.tokens, mode="drop")


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
  history = before.history
  if history is not None:
    history = history.at[owners, positions].set(ids, mode="drop")
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
    history=history,
  )


def _unsampled(
  rows: int,
  max_steps: int,
  experts: Int[Array, "N 1 layers k"] | None,
  top_logprobs: int,
  num_drafts: int,
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
  none = jnp.zeros(rows, jnp.int32)
  return Sampled(
    tokens=jnp.zeros((rows, max_steps), jnp.int32),
    logprobs=jnp.zeros((rows, max_steps), jnp.float32),
    counts=none,
    fed=None if experts is None else experts[:, 0],
    stepped=stepped,
    top=top,
    drafted=none if num_drafts else None,
    right=none if num_drafts else None,
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


def _record_kept(
  sampled: Sampled,
  is_kept: Bool[Array, "R n"],
  is_fed: Bool[Array, "R D"],
  choices: _Choice,
  experts: Int[Array, "R n layers k"] | None,
) -> Sampled:
  """Appends the choices of a step that are kept, the first of each row.

  Args:
    choices: n of each row; those after drafts follow the first.
    experts: of the ids that were fed, each one before its choice.
  """
  row = jnp.arange(len(is_kept), dtype=jnp.int32)[:, None]
  offset = jnp.arange(is_kept.shape[1], dtype=jnp.int32)
  end = sampled.tokens.shape[1]
  place = jnp.where(is_kept, sampled.counts[:, None] + offset, end)
  num_kept = is_kept.sum(1, dtype=jnp.int32)
  assert sampled.drafted is not None
  assert sampled.right is not None
  stepped = sampled.stepped
  if stepped is not None and experts is not None:
    stepped = stepped.at[row, place - 1].set(experts, mode="drop")

  def put(old, new):
    return old.at[row, place].set(new, mode="drop")

  return sampled._replace(
    tokens=put(sampled.tokens, choices.token),
    logprobs=put(sampled.logprobs, choices.logprob),
    counts=sampled.counts + num_kept,
    stepped=stepped,
    top=jax.tree.map(put, sampled.top, choices.top),
    drafted=sampled.drafted + is_fed.sum(1, dtype=jnp.int32),
    right=sampled.right + jnp.maximum(num_kept - 1, 0),
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
    history=_history(rows, loop.sampled),
  )
  return jax.tree.map(
    lambda old, new: old.at[rows.slot].set(new, mode="drop"), carry, left
  )
