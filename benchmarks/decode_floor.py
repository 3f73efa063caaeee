"""The least that benchmarks/decode.py's loads cost: a bare jitted step.

  python -m benchmarks.decode_floor

One call a token for all rows at once, over a plain contiguous cache: no
requests, no pages, no filters, nothing is fetched before the end. Rows are
always full: what conversations differ in length is packed. Answers lines as
`decode_engine` does.
"""

import functools
import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import decode_load, small_parts
from models import config as model_config
from models import definition, kv_cache
from models import logprobs as logprobs_lib
from models import policy as policy_lib


def floor(
  config: model_config.ModelConfig, params: definition.Params, rows: int
) -> Callable[[str, int], tuple[float, float, int]]:
  """Returns what does as many bare calls as a load of `rows` needs at least."""

  # All of a row in one page.
  tables = jnp.arange(rows, dtype=jnp.int32)[:, None]

  @functools.partial(jax.jit, donate_argnums=1)
  def step(params, cache, at, ids):
    positions = jnp.full(rows, at, jnp.int32)
    model = policy_lib.of(config).bind(params)
    hidden, cache, _ = model.feed(cache, tables, ids, positions, (0, 1))
    return cache, *_sample(params, config, hidden, at)

  @functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
  def context(params, cache, at, size):
    positions = at + jnp.arange(size, dtype=jnp.int32)
    ids = jnp.zeros(rows * size, jnp.int32)
    model = policy_lib.of(config).bind(params)
    hidden, cache, _ = model.feed(
      cache, tables, ids, jnp.tile(positions, rows), (rows, size)
    )
    return cache, *_sample(params, config, hidden[size - 1 :: size], at)

  def run(kind: str, seed: int) -> tuple[float, float, int]:
    load = decode_load.conversations(kind, rows, seed)
    tokens = decode_load.num_tokens(load)
    contexts = [len(turn.context) for turn in load[0]]
    steps = -(-tokens // rows)
    wall, cpu = time.monotonic(), time.process_time()
    # Rounded up, so that loads have few lengths.
    length = -(-(sum(contexts) + steps) // 16) * 16
    cache = kv_cache.init_cache(config, rows, length)
    at, results = 0, []
    for i, size in enumerate(contexts):
      # The first token of a turn comes with its context.
      cache, token, taken = context(params, cache, jnp.int32(at), size)
      at += size
      results += [token, taken]
      for _ in range(steps // len(contexts) + (i < steps % len(contexts)) - 1):
        cache, token, taken = step(params, cache, jnp.int32(at), token)
        results += [token, taken]
        at += 1
    jax.device_get(results)
    return time.monotonic() - wall, time.process_time() - cpu, tokens

  return run


def _sample(params, config, hidden, at):
  model = policy_lib.of(config).bind(params)
  logprobs = jax.nn.log_softmax(logprobs_lib.logits(model.terms(hidden)))
  noise = jax.random.fold_in(jax.random.key(0), at)
  token = jax.random.categorical(noise, logprobs).astype(jnp.int32)
  return token, jnp.take_along_axis(logprobs, token[:, None], 1)


def main() -> None:
  """Decodes whenever asked."""
  config = model_config.ModelConfig(
    **decode_load.MODEL, max_length=decode_load.MAX_LENGTH
  )
  params = small_parts.weights(config)
  floors = {n: floor(config, params, n) for n in decode_load.CONCURRENCIES}
  print("ready", flush=True)
  for line in sys.stdin:
    kind, concurrency, seed = line.split()
    took = floors[int(concurrency)](kind, int(seed))
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
  main()
