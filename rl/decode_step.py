"""The decode program: one chunk of context, then several sampled tokens.

Letters: R rows of the dispatch, C chunk of new context, K tokens sampled at
most, V vocabulary.

  plan ->  [ chunk of C ids ] -> sample -> feed -> sample -> ... (early exit)
                 |                           |
       past KV (read only)        fresh KV (small, carried by the loop)
                 +---- one scatter at the end ----+
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from models import cache as cache_lib
from models import config as model_config
from models import sharding, transformer

MAX_STOP_IDS = 4


class Plan(NamedTuple):
  """What every row of a dispatch does. Host arrays, one transfer each.

  Attributes:
    integers: per row: cache row, past length, new ids, tokens to sample at
      most, seed, then MAX_STOP_IDS stop ids (-1: none).
    chunk: the new ids.
    temperature: 0 takes the most probable token.
  """

  integers: Int32[np.ndarray, "R 9"]
  chunk: Int32[np.ndarray, "R C"]
  temperature: Float32[np.ndarray, " R"]


class Sampled(NamedTuple):
  """What a dispatch sampled; entries from `counts` on are meaningless."""

  tokens: Int32[Array, "R K"]
  logprobs: Float[Array, "R K"]
  counts: Int32[Array, " R"]


def empty_plan(rows: int, chunk: int, *, idle_row: int) -> Plan:
  """Returns a plan in which no row does anything.

  Args:
    idle_row: a cache row past the end: writes to it vanish.
  """
  integers = np.zeros((rows, 5 + MAX_STOP_IDS), np.int32)
  integers[:, 0] = idle_row
  integers[:, 5:] = -1
  return Plan(
    integers, np.zeros((rows, chunk), np.int32), np.ones(rows, np.float32)
  )


def sample(
  logits: Float[Array, "R V"],
  seeds: Int32[Array, " R"],
  positions: Int32[Array, " R"],
  temperature: Float[Array, " R"],
) -> tuple[Int32[Array, " R"], Float[Array, " R"]]:
  """Returns (tokens, log-probabilities at the temperature, in nats).

  The noise of a token follows from its row's seed and its position alone.
  """
  greedy = temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  logprobs = jax.nn.log_softmax(scaled.astype(jnp.float32))

  def noise(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

  perturbed = logprobs + jax.vmap(noise)(seeds, positions)
  choice = jnp.where(
    greedy, jnp.argmax(logprobs, -1), jnp.argmax(perturbed, -1)
  ).astype(jnp.int32)
  return choice, jnp.take_along_axis(logprobs, choice[:, None], 1)[:, 0]


class _Loop(NamedTuple):
  step: Int32[Array, ""]
  alive: Bool[Array, " R"]
  last: Int32[Array, " R"]
  fresh: cache_lib.Fresh
  sampled: Sampled


def advance(
  params: transformer.Params,
  cache: cache_lib.Cache,
  plan: Plan,
  *,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  max_steps: int,
  whole: bool,
) -> tuple[cache_lib.Cache, Sampled]:
  """Feeds each row its chunk and samples up to its budget.

  The key and value of the last sampled token are not in the cache yet: it is
  the first new id of the row's next dispatch.

  Args:
    max_steps: K.
    whole: the plan's rows are the cache's rows, in order.
  """
  integers, chunk, temperature = (jnp.asarray(x) for x in plan)
  row, past, num_new, budget, seed = (integers[:, i] for i in range(5))
  stop_ids = integers[:, 5:]
  num_rows, chunk_size = chunk.shape
  past_cache = cache if whole else cache_lib.take(cache, row)
  extend = functools.partial(
    transformer.extend, params, config, past_cache, past, layout=layout
  )

  def pick(hidden, positions):
    logits = transformer.head(params, config, hidden, layout=layout)
    return sample(logits, seed, positions, temperature)

  offsets = jnp.arange(chunk_size, dtype=jnp.int32)
  positions = jnp.where(
    offsets < num_new[:, None], past[:, None] + offsets, cache_lib.EMPTY
  )
  fresh = cache_lib.init_fresh(config, num_rows, chunk_size + max_steps - 1)
  hidden, fresh = extend(fresh, 0, chunk, positions)
  newest = jnp.maximum(num_new - 1, 0)[:, None, None]
  hidden = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
  start = past + num_new
  token, logprob = pick(hidden, start)

  def record(sampled, step, alive, token, logprob):
    return Sampled(
      tokens=sampled.tokens.at[:, step].set(token),
      logprobs=sampled.logprobs.at[:, step].set(logprob),
      counts=sampled.counts + alive,
    )

  def still_alive(alive, token, count):
    stopped = (token[:, None] == stop_ids).any(1)
    return alive & ~stopped & (count < budget)

  def body(loop: _Loop) -> _Loop:
    positions = jnp.where(loop.alive, start + loop.step - 1, cache_lib.EMPTY)
    hidden, fresh = extend(
      loop.fresh,
      chunk_size + loop.step - 1,
      loop.last[:, None],
      positions[:, None],
    )
    token, logprob = pick(hidden[:, 0], start + loop.step)
    sampled = record(loop.sampled, loop.step, loop.alive, token, logprob)
    alive = still_alive(loop.alive, token, sampled.counts)
    return _Loop(loop.step + 1, alive, token, fresh, sampled)

  alive = budget > 0
  sampled = Sampled(
    tokens=jnp.zeros((num_rows, max_steps), jnp.int32),
    logprobs=jnp.zeros((num_rows, max_steps), jnp.float32),
    counts=jnp.zeros(num_rows, jnp.int32),
  )
  sampled = record(sampled, 0, alive, token, logprob)
  alive = still_alive(alive, token, sampled.counts)
  loop = jax.lax.while_loop(
    lambda loop: (loop.step < max_steps) & loop.alive.any(),
    body,
    _Loop(jnp.int32(1), alive, token, fresh, sampled),
  )
  return cache_lib.commit(cache, row, loop.fresh), loop.sampled
