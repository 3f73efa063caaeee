"""Forms of attention by length: time forward and backward, and memory.

  python -m benchmarks.attention [--repeats=5] [--dtype=float32]

Every shape has 4096 tokens, 8 heads, 4 kv heads and a head width of 64; rows
are one segment each, or packed with 8. Decoding is one new token for each of 16
rows, forward only, on caches that are full or filled to an eighth. Forms take
turns; medians of wall time are kept. Memory is what XLA allocates beside
arguments and results. "auto" names what `backend.choose` takes. Writes
benchmarks/results/attention.json.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from models.attention import attention, backend, mask

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each form.")
_DTYPE = absl_flags.DEFINE_enum(
  "dtype", "float32", ["float32", "bfloat16"], "Of queries, keys and values."
)
_TOKENS, _HEADS, _KV_HEADS, _WIDTH = 4096, 8, 4, 64
_FORMS = ("reference", "fused", "blockwise")


def _draw(*shapes: tuple[int, ...]) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [
    jax.random.normal(key, shape, _DTYPE.value)
    for key, shape in zip(keys, shapes, strict=True)
  ]


def _rows(form: str, length: int, segments: int) -> tuple[Callable, list[Any]]:
  """Returns a step on whole rows, forward and backward, and its arguments."""
  batch = _TOKENS // length
  wide, narrow = (
    (batch, length, heads, _WIDTH) for heads in (_HEADS, _KV_HEADS)
  )
  ids = 1 + np.arange(length) * segments // length
  ids = jnp.asarray(np.tile(ids, (batch, 1)), jnp.int32)

  def step(q, k, v, cotangent, ids):
    token_mask = mask.packed_mask(ids)

    def attend(q, k, v):
      source = mask.KeyValues(k, v, token_mask)
      return attention.attend(q, token_mask, [source], form=form)

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(cotangent)

  return step, [*_draw(wide, narrow, narrow, wide), ids]


def _decode(form: str, length: int, written: int) -> tuple[Callable, list[Any]]:
  """Returns the decoding of one token a row, and its arguments."""
  rows = 16
  cached = (rows, length, _KV_HEADS, _WIDTH)
  fresh = (rows, 1, _KV_HEADS, _WIDTH)
  arrays = _draw((rows, 1, _HEADS, _WIDTH), cached, cached, fresh, fresh)
  filled = jnp.full((rows, 1), written, jnp.int32)

  def step(q, k, v, new_k, new_v, filled):
    order = jnp.tile(jnp.arange(length, dtype=jnp.int32), (rows, 1))
    past = mask.TokenMask(order, jnp.where(order < filled, 1, -1))
    token_mask = mask.TokenMask(filled, jnp.ones_like(filled))
    sources = [
      mask.KeyValues(k, v, past),
      mask.KeyValues(new_k, new_v, token_mask),
    ]
    return attention.attend(q, token_mask, sources, form=form)

  return step, [*arrays, filled]


def _measure(make: Callable[[str], tuple[Callable, list[Any]]]) -> dict:
  """Returns milliseconds and MiB of every form."""
  programs = {}
  for form in _FORMS:
    step, args = make(form)
    program = jax.jit(step).lower(*args).compile()
    jax.block_until_ready(program(*args))
    programs[form] = program, args
  times: dict[str, list[float]] = {form: [] for form in _FORMS}
  for _ in range(_REPEATS.value):
    for form, (program, args) in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*args))
      times[form].append(1000 * (time.perf_counter() - start))
  return {
    form: {
      "ms": round(statistics.median(times[form]), 2),
      "MiB": round(_temp_bytes(program) / 2**20, 1),
    }
    for form, (program, _) in programs.items()
  }


def _temp_bytes(program: jax.stages.Compiled) -> int:
  analysis = program.memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes


def _auto(batch: int, queries: int, keys: int, sources: int) -> str:
  case = backend.Case(
    batch=batch,
    queries=queries,
    keys=keys,
    heads=_HEADS,
    head_dim=_WIDTH,
    dtypes=frozenset({_DTYPE.value}),
    sources=sources,
    in_order=sources == 1,
  )
  return backend.choose(jax.default_backend(), case)


def main(_: list[str]) -> None:
  """Measures every shape, prints a table and keeps it."""
  print(machine.describe(), _DTYPE.value)
  table = {}
  for length in (64, 128, 256, 512, 1024, 2048, 4096):
    auto = _auto(_TOKENS // length, length, length, 1)
    for segments in (1, 8) if length >= 1024 else (1,):
      name = f"rows of {length}" + (", 8 packed" if segments > 1 else "")
      # Bound here: a lambda would see the last value of the loop.
      table[name] = {"auto": auto} | _measure(
        lambda form, n=length, s=segments: _rows(form, n, s)
      )
      print(f"{name:24}", table[name], flush=True)
  for length in (256, 1024, 4096):
    auto = _auto(16, 1, length + 1, 2)
    for written in (length // 8, length):
      name = f"decode at {written}/{length}"
      table[name] = {"auto": auto} | _measure(
        lambda form, n=length, w=written: _decode(form, n, w)
      )
      print(f"{name:24}", table[name], flush=True)
  machine.keep("attention", dtype=_DTYPE.value, forms=table)


if __name__ == "__main__":
  app.run(main)
