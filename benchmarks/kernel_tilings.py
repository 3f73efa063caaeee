"""Tilings of our kernels for GPUs, one after the other: which is fastest where.

  python -m benchmarks.kernel_tilings [--tiny] [--only=NAME] [--repeats=5]

  pages     attention to pages: one id of 1, 64 and 512 rows of 2k and of 8 rows
            of 32k, and a prompt of 2k; in bytes/s read, the prompt in FLOP/s
  product   rows of experts by their weights, and by these transposed
  outer     the gradient of the weights

Of 128 experts of which a token takes 8, as in Qwen3-30B-A3B, and of 8 of which
it takes 2. Programs are compiled first, as many at a time as there are cores.
Every tiling's rate is printed, and kept in
benchmarks/results/kernel_tilings.json unless --tiny, which a test runs on a CPU
by the interpreter.
"""

import concurrent.futures
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from benchmarks import accelerator, machine, train_step
from models import kv_cache
from models.attention import paged_triton
from models.moe import grouped_matmul, grouped_matmul_pallas

_PAGE = 16


class Trial(NamedTuple):
  """A program of one tiling.

  Attributes:
    arguments: their shapes; integers are drawn by `integers`.
    integers: returns those arguments, by their place.
    work: bytes or operations of a call.
  """

  case: str
  tiling: Any
  run: Callable[..., Any]
  arguments: tuple[jax.ShapeDtypeStruct, ...]
  integers: Callable[[], dict[int, jax.Array]]
  work: float


def pages(tiny: bool, interpret: bool) -> Iterator[Trial]:
  """Yields tilings of attention to pages."""
  heads, kv_heads, width = (4, 2, 16) if tiny else (16, 8, 128)
  cases = [(2, 1, 64)] if tiny else _PAGED
  for rows, chunk, context in cases:
    number = rows * context // _PAGE
    cache = jax.ShapeDtypeStruct(
      (kv_heads, 1, number, _PAGE, width), jnp.bfloat16
    )
    query = jax.ShapeDtypeStruct((rows, chunk, heads, width), jnp.bfloat16)

    def integers(rows=rows, chunk=chunk, context=context, number=number):
      order = np.random.default_rng(0).permutation(number).astype(np.int32)
      last = np.arange(context - chunk, context, dtype=np.int32)
      return {
        3: jnp.asarray(order.reshape(rows, -1)),
        4: jnp.asarray(np.tile(last, (rows, 1))),
      }

    tables = jax.ShapeDtypeStruct((rows, context // _PAGE), jnp.int32)
    last = jax.ShapeDtypeStruct((rows, chunk), jnp.int32)
    work = 4.0 * kv_heads * rows * context * width
    if chunk > 1:
      work = 2.0 * heads * width * chunk * (2 * context - chunk)
    for tiling in _paged_tilings(chunk > 1, tiny):

      def run(query, k, v, tables, last, tiling=tiling):
        return paged_triton.attend(
          query,
          last,
          kv_cache.Cache(k, v),
          jnp.int32(0),
          tables,
          tiling=tiling,
          interpret=interpret,
        )

      yield Trial(
        f"pages, {rows} rows of {context}, {chunk} ids",
        tiling,
        run,
        (query, cache, cache, tables, last),
        integers,
        work,
      )


_PAGED = (
  (1, 1, 2048),
  (64, 1, 2048),
  (512, 1, 2048),
  (8, 1, 32_768),
  (1, 2048, 2048),
)


def _paged_tilings(
  chunk: bool, tiny: bool
) -> Iterator[paged_triton.PageTiling]:
  yield paged_triton.PageTiling()
  if tiny:
    return
  queries = (64, 128) if chunk else (64,)
  for most, keys, warps, stages in itertools.product(
    queries, (32, 64, 128), (4, 8), (2, 3, 4)
  ):
    tiling = paged_triton.PageTiling(most, keys, warps=warps, stages=stages)
    if tiling != paged_triton.PageTiling():
      yield tiling


def experts(tiny: bool, interpret: bool) -> Iterator[Trial]:
  """Yields tilings of the products of experts and their gradients."""
  tokens, width, hidden = (32, 16, 16) if tiny else (16_384, 2048, 768)
  for number, chosen in [(2, 2)] if tiny else [(128, 8), (8, 2)]:
    form = grouped_matmul.Form("triton")
    block = grouped_matmul.block_rows(form, tokens * chosen, number, 16)
    plan = functools.partial(_plan, tokens, number, chosen, block)
    shapes = jax.eval_shape(plan)
    rows = len(shapes.owner)
    wide, narrow = (
      jax.ShapeDtypeStruct((rows, block, size), jnp.bfloat16)
      for size in (width, hidden)
    )
    weights = jax.ShapeDtypeStruct((number, width, hidden), jnp.bfloat16)

    def integers(plan=plan):
      found = plan()
      return {2: found.owner, 3: found.starts}

    work = 2.0 * tokens * chosen * width * hidden
    for tiling in _expert_tilings(tiny):
      common = {"tiling": tiling, "interpret": interpret}
      for name, first, second in (
        ("product", wide, weights),
        ("product, transposed", narrow, weights),
        ("outer", wide, narrow),
      ):
        run = functools.partial(_grouped, name, common)
        yield Trial(
          f"{name}, {number} experts",
          tiling,
          run,
          (first, second, shapes.owner, shapes.starts),
          integers,
          work,
        )


def _grouped(
  name: str,
  common: dict[str, Any],
  first: jax.Array,
  second: jax.Array,
  owner: jax.Array,
  starts: jax.Array,
) -> jax.Array:
  if name == "outer":
    return grouped_matmul_pallas.outer_triton(
      first, second, owner, starts, **common
    )
  return grouped_matmul_pallas.product_triton(
    first,
    second,
    None,
    owner,
    starts,
    transpose=name != "product",
    **common,
  )


def _plan(
  tokens: int, number: int, chosen: int, block: int
) -> grouped_matmul.Plan:
  scores = np.random.default_rng(0).random((tokens, number))
  taken = jnp.asarray(np.argsort(scores, 1)[:, :chosen], jnp.int32)
  return grouped_matmul.plan(taken, number, block)


def _expert_tilings(tiny: bool) -> Iterator[grouped_matmul_pallas.ExpertTiling]:
  if tiny:
    yield grouped_matmul_pallas.ExpertTiling(warps=4)
    return
  for columns, depth, warps, stages in itertools.product(
    (128, 256), (32, 64), (4, 8), (2, 3, 4)
  ):
    yield grouped_matmul_pallas.ExpertTiling(columns, depth, warps, stages)


def _compiled(trial: Trial) -> Any:
  try:
    return jax.jit(trial.run).lower(*trial.arguments).compile()
  # Such as more shared memory than there is: no tiling for this device.
  except Exception as error:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _rate(trial: Trial, program: Any, repeats: int) -> dict[str, Any]:
  row = {"case": trial.case, "tiling": str(trial.tiling)}
  if isinstance(program, str):
    return row | {"error": program}
  integers = trial.integers()
  arguments = [
    integers[place]
    if place in integers
    else jax.random.normal(jax.random.key(place), shape.shape, shape.dtype)
    for place, shape in enumerate(trial.arguments)
  ]
  took = accelerator.seconds(lambda: program(*arguments), repeats)
  return row | {"rate": trial.work / took, "seconds": took}


def main(_: list[str]) -> None:
  """Measures each tiling, prints the best of each case and keeps all."""
  tiny, interpret = accelerator.TINY.value, jax.default_backend() != "gpu"
  only = train_step.ONLY.value
  trials = [
    trial
    for make in (pages, experts)
    for trial in make(tiny, interpret)
    if only in trial.case
  ]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    programs = list(pool.map(_compiled, trials))
  rows = [
    _rate(trial, program, train_step.REPEATS.value)
    for trial, program in zip(trials, programs, strict=True)
  ]
  for case, some in itertools.groupby(
    sorted(rows, key=lambda row: row["case"]), lambda row: row["case"]
  ):
    best = sorted(some, key=lambda row: -row.get("rate", 0.0))
    for row in best[:3]:
      rate = row.get("error") or f"{row['rate'] / 1e12:.3f} T/s"
      print(f"{case:40} {rate:12} {row['tiling']}")
  print(json.dumps({"machine": machine.describe(), "rows": rows}))
  if not (tiny or only):
    machine.keep("kernel_tilings", rows=rows)


if __name__ == "__main__":
  app.run(main)
