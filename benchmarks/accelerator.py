"""One accelerator, measured against its own rates: everything in one JSON.

  python -m benchmarks.accelerator [--tiny] [--only=NAME] [--repeats=5]

Yardsticks are the best FLOP/s of plain matrix products and the best bytes/s of
plain copies (read and written), of the same device in the same process. Rows:

  start      seconds from the command to the first update, and the share of the
             shorter mesh's work that the other one hides, by the README's run:
             on two devices, and on one (`one_device`); again with warm programs
  train      model FLOP/s of a step of `benchmarks.train_step` over those of
             the matmul: Qwen3-0.6B, Qwen3-8B, 8 and 128 experts, as many layers
             as fit
  experts    FLOP/s of the experts' MLP, forward and backward, over those of one
             dense MLP of as many rows
  attention  of the learner, forward and backward: time of the causal kernel of
             cuDNN, which rows of one segment need, over that of each form
  pages      attention of one id a row alone: bytes/s over those of the copy
  decode     least time of a step, which reads weights and caches once, over the
             measured one: 1, 32, 64 and 512 rows of 2k and 32k tokens; one row
             goes with seven idle ones, as in the engine
  prefill    model FLOP/s of encoding one prompt over the matmul's
  publish    bytes/s of a publish of all weights over the copy's, and seconds
             for which decoding stood still over those of a step of all rows

A row whose measurement fails, as when memory is not enough, has its `error` in
the place of figures. Large programs are compiled first, as many at a time as
there are cores, since that takes most of the time. `goal` is what an H200
should reach: `value` is at least that, and at most that for stalls and for the
start. Writes benchmarks/results/accelerator.json; --tiny, small enough for a
test on a CPU, prints it only.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine, publish_load, small_parts, train_step
from launch.cli import jax_setup
from models import config as model_config
from models import kv_cache, memory_report, sharding
from models import policy as policy_lib
from models.attention import attention, mask, paged
from models.moe import grouped_matmul
from models.moe import layer as moe_layer
from rl.engine import contract
from rl.engine.builtin import decode_step, dispatch_shapes, model_runner
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.runtime import trace

TINY = absl_flags.DEFINE_bool("tiny", False, "Small sizes; nothing is kept.")

Row = dict[str, Any]

_PAGE = 16
_LEAST_ROWS = 8
"""Of a dispatch of the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """The work of each row.

  Attributes:
    products: widths of the square matrices of the yardstick.
    product_flops: of each repeat of a product.
    train: models by name.
    batch: rows and their length when training.
    experts: numbers of experts; each token goes to `chosen` of them.
    tokens, width, hidden: of the experts' MLP.
    attended: rows, and their length, of attention when training.
    paged: rows that attend to pages, and their contexts.
    heads: of queries and of keys, and their width.
    served: the model that is published.
    decoded: models that decode and encode prompts, by name.
    rows, contexts: of decoding.
    prompts: lengths of prompts to encode.
    answers: rows that decode while weights are published.
    copied: bytes of the copy.
    starts: names of the runs from a command to its end, one after the other.
    run: overrides of the README's run.
  """

  products: Sequence[int]
  product_flops: float
  train: Mapping[str, model_config.ModelConfig]
  batch: tuple[int, int]
  experts: Sequence[int]
  chosen: int
  tokens: int
  width: int
  hidden: int
  attended: tuple[int, int]
  paged: Sequence[tuple[int, int]]
  heads: tuple[int, int, int]
  served: model_config.ModelConfig
  decoded: Mapping[str, model_config.ModelConfig]
  rows: Sequence[int]
  contexts: Sequence[int]
  prompts: Sequence[int]
  answers: int
  copied: int
  starts: Sequence[str]
  run: Sequence[str]


def large() -> Sizes:
  """Returns the sizes for an accelerator."""
  qwen = model_config.qwen3
  dense = qwen("8b")
  return Sizes(
    products=(4096, 8192, 16_384),
    product_flops=5e13,
    batch=(8, 2048),
    starts=("first", "warm programs"),
    train={
      "Qwen3-0.6B": qwen("0.6b"),
      "Qwen3-8B": dense,
      "Qwen3-8B with 8 experts": dataclasses.replace(
        dense, num_experts=8, experts_per_token=2, d_expert=dense.d_ff
      ),
      "30B-A3B": model_config.qwen3_moe("30b-a3b"),
    },
    experts=(8, 128),
    chosen=8,
    tokens=16_384,
    width=2048,
    hidden=768,
    attended=(8, 2048),
    paged=((1, 2048), (64, 2048), (512, 2048), (8, 32_768)),
    heads=(16, 8, 128),
    served=dense,
    # Of the small ones the caches of many rows fit, too.
    decoded={
      "Qwen3-8B": dense,
      "Qwen3-0.6B": qwen("0.6b"),
      "Llama-3.2-1B": model_config.llama3("3.2-1b"),
    },
    rows=(1, 32, 64, 512),
    contexts=(2048, 32_768),
    prompts=(2048, 32_768),
    answers=64,
    copied=2**31,
    run=("--config.rounds=20", "--config.evaluation.episodes=0"),
  )


def tiny() -> Sizes:
  """Returns sizes for a test on a CPU."""
  model = model_config.tiny(num_layers=1, d_model=32, max_length=64)
  return Sizes(
    products=(128,),
    product_flops=1e7,
    batch=(2, 64),
    starts=("first",),
    train={"dense": model},
    experts=(2,),
    chosen=2,
    tokens=32,
    width=16,
    hidden=16,
    attended=(2, 64),
    paged=((2, 64),),
    heads=(4, 2, 16),
    served=model,
    decoded={"dense": model},
    rows=(2,),
    contexts=(64,),
    prompts=(32,),
    answers=2,
    copied=2**22,
    run=(
      "--config.rounds=2",
      "--config.evaluation.episodes=0",
      "--config.warm_start=none",
      "--config.model.num_layers=1",
      "--config.model.d_model=32",
      "--config.engine.compile_ahead=false",
      "--config.engine.row_buckets=128,",
    ),
  )


def seconds(run: Callable[[], Any], repeats: int) -> float:
  """Returns the median of a call that waits, after two that compile."""
  took = []
  for _ in range(repeats + 2):
    wall, _ = machine.timed(run)
    took.append(wall)
  return statistics.median(took[2:])


def copy_rate(num_bytes: int, repeats: int) -> float:
  """Returns the bytes/s that a plain copy reads and writes."""
  x = jnp.zeros(num_bytes // 4, jnp.float32)
  # A sum is no copy that XLA could leave out.
  copy = jax.jit(lambda x: x + 1)
  return 2 * x.nbytes / seconds(lambda: copy(x), repeats)


def start(sizes: Sizes, *more: str) -> Iterator[Row]:
  """Yields the README's run, once and with its programs warm, each its own.

  The processes have the device to themselves: run this before all else.
  """
  for name in sizes.starts:
    with tempfile.TemporaryDirectory() as folder:
      command = (
        *(sys.executable, "-m", "launch.train"),
        "--config=configs/guess_number_moe.py",
        f"--workdir={folder}/run",
        "--config.log_startup",
        *sizes.run,
        *more,
      )
      done = subprocess.run(
        command,
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
      )
      found = re.search(r"first update after ([\d.]+) s", done.stdout)
      if done.returncode or found is None:
        raise RuntimeError(
          (done.stderr.strip() or done.stdout).splitlines()[-1]
        )
      lines = pathlib.Path(folder, "run", "metrics.jsonl").read_text()
    # The first round traces its programs.
    rounds = [json.loads(line) for line in lines.splitlines()][1:]
    middle = {
      key: statistics.median(row[key] for row in rounds)
      for key in ("overlap_share", "round_s")
    }
    yield {"case": name, "value": float(found[1]), **middle}


def train(
  name: str,
  config: model_config.ModelConfig,
  batch: tuple[int, int],
  matmul: float,
) -> Iterator[Row]:
  """Yields the share of the matmul's FLOP/s that a train step reaches."""
  row = train_step.row(train_step.fitting(name, config, *batch), matmul)
  case = row.pop("name")
  yield {"case": case, "value": row["ours"]["share of matmul"], **row}


def experts(sizes: Sizes, number: int, repeats: int) -> Iterator[Row]:
  """Yields the speed of experts over that of one MLP with as many rows."""
  keys = jax.random.split(jax.random.key(0), 6)
  dtype, chosen = sizes.served.dtype, sizes.chosen
  draw = functools.partial(jax.random.normal, dtype=dtype)
  shape = sizes.width, sizes.hidden
  params = {
    "gate": draw(keys[0], (number, *shape)),
    "up": draw(keys[1], (number, *shape)),
    "down": draw(keys[2], (number, *shape[::-1])),
  }
  x = draw(keys[3], (sizes.tokens, sizes.width))
  scores = jax.random.normal(keys[4], (sizes.tokens, number))
  taken = jax.lax.top_k(scores, chosen)[1].astype(jnp.int32)
  gates = jnp.full(taken.shape, 1 / chosen, dtype)
  form = grouped_matmul.choose("auto", sharding.platform(None))

  def sparse(params, x):
    mixed, _ = moe_layer.mix(
      params,
      x,
      gates,
      taken,
      form=form,
      least=sizes.served.compute.moe_block,
    )
    return mixed.astype(jnp.float32).sum()

  def dense(params, x):
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return (hidden @ params["down"]).astype(jnp.float32).sum()

  one = jax.tree.map(lambda leaf: leaf[0], params)
  wide = jnp.repeat(x, chosen, 0)
  sparse_s, dense_s = (
    seconds(functools.partial(jax.jit(jax.grad(f, (0, 1))), *args), repeats)
    for f, args in ((sparse, (params, x)), (dense, (one, wide)))
  )
  yield {
    "case": f"{number} experts, {chosen} a token",
    "value": dense_s / sparse_s,
    "experts_s": sparse_s,
    "dense_s": dense_s,
  }


def attend(
  sizes: Sizes, form: str, segments: int, repeats: int
) -> Iterator[Row]:
  """Yields the speed of a form of attention over that without a mask."""
  (rows, length), (heads, kv_heads, width) = sizes.attended, sizes.heads
  keys = jax.random.split(jax.random.key(0), 4)
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  numbers = heads, kv_heads, kv_heads, heads
  query, k, v, cotangent = (
    draw(key, (rows, length, number, width))
    for key, number in zip(keys, numbers, strict=True)
  )
  order = jnp.arange(length, dtype=jnp.int32)
  ids = jnp.broadcast_to(order * segments // length + 1, (rows, length))

  def timed(attend: Callable[..., jax.Array]) -> float:
    def both(query, k, v, cotangent, ids):
      out, pull = jax.vjp(lambda *args: attend(*args, ids), query, k, v)
      return out, pull(cotangent)

    args = query, k, v, cotangent, ids
    return seconds(functools.partial(jax.jit(both), *args), repeats)

  def ours(query, k, v, ids):
    token_mask = mask.packed_mask(ids)
    source = mask.KeyValues(k, v, token_mask)
    return attention.attend(query, token_mask, [source], form=form)

  cudnn = "cudnn" if jax.default_backend() == "gpu" else "xla"
  plain_s = timed(
    lambda query, k, v, ids: jax.nn.dot_product_attention(
      query, k, v, is_causal=True, implementation=cudnn
    )
  )
  took = timed(ours)
  yield {
    "case": f"{form}, {rows} rows of {length}, {segments} segments",
    "value": plain_s / took,
    "attention_s": took,
  }


def pages(
  sizes: Sizes, rows: int, context: int, copied: float, repeats: int
) -> Iterator[Row]:
  """Yields the share of the copy's bytes/s at which pages are attended to."""
  heads, kv_heads, width = sizes.heads
  draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  keys = jax.random.split(jax.random.key(0), 3)
  number = rows * context // _PAGE
  one_layer = 4 * kv_heads * rows * context * width
  # Each call reads another layer, and all of them no cache of the device holds.
  layers = max(8, min(64, sizes.copied // 4 // one_layer))
  shape = kv_heads, layers, number, _PAGE, width
  cache = kv_cache.Cache(*(draw(key, shape) for key in keys[:2]))
  order = np.random.default_rng(0).permutation(number).astype(np.int32)
  tables = jnp.asarray(order.reshape(rows, -1))
  last = jnp.full((rows, 1), context - 1, jnp.int32)

  @jax.jit
  def run(query, cache, tables, last):
    # One after the other, as launching one takes time, too.
    for layer in range(layers):
      query = paged.attend(query, last, cache, layer, tables)
    return query

  query = draw(keys[2], (rows, 1, heads, width))
  took = seconds(lambda: run(query, cache, tables, last), repeats) / layers
  yield {
    "case": f"{rows} rows of {context}",
    "value": one_layer / took / copied,
    "bytes_s": one_layer / took,
  }


def _layout() -> sharding.Layout:
  return placement.Placement(colocated=True).layouts()[1]


def _shapes(config: model_config.ModelConfig, layout: sharding.Layout) -> Any:
  policy = policy_lib.of(config)
  return memory_report.placed(policy.shapes, layout.tree(policy.axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
  """A dispatch of rows of `length`: `chunk` new ids each, then `steps`."""

  config: model_config.ModelConfig
  rows: int
  length: int
  chunk: int
  steps: int

  @functools.cached_property
  def _sizes(self) -> dispatch_shapes.DispatchShapes:
    slots = self._shape[0]
    return dispatch_shapes.DispatchShapes(
      slots=slots,
      pages=self.rows * -(-self.length // _PAGE),
      page_size=_PAGE,
      row_buckets=(slots,),
      chunk_buckets=(self.chunk,),
      prefill_tokens=slots * self.chunk,
      steps_per_dispatch=self.steps,
    )

  @property
  def _shape(self) -> model_runner.Shape:
    rows = self.rows if self.chunk > 1 else max(self.rows, _LEAST_ROWS)
    return rows, ((rows, self.chunk) if self.chunk > 1 else (0, 1))

  def _runner(self) -> model_runner.ModelRunner:
    config = dataclasses.replace(self.config, max_length=self.length)
    return model_runner.ModelRunner(
      config, self._sizes, _layout(), bias_slots=0
    )

  def lower(self) -> Any:
    """Returns its lowered program."""
    return self._runner().lower(_shapes(self.config, _layout()), self._shape)

  def time(self, params: Any, repeats: int) -> float:
    """Returns its seconds."""
    runner, width = self._runner(), self._sizes.width(self.length)
    plan = runner.idle_plan(self._shape)
    first = self.length - self.chunk - self.steps + 1 if self.chunk == 1 else 0
    columns = {
      decode_step.SLOT: np.arange(self.rows),
      decode_step.PAST: first,
      decode_step.NEW: self.chunk,
      decode_step.BUDGET: self.steps,
    }
    for column, value in columns.items():
      plan.integers[: self.rows, column] = value
    plan.integers[:, decode_step.STEPS] = self.steps
    pages = np.arange(self.rows * width).reshape(self.rows, width)
    plan.tables[: self.rows] = pages
    runner.allocate()
    try:
      run = functools.partial(runner.advance, params, plan, self._shape[1])
      return seconds(run, repeats)
    finally:
      runner.free()

  @classmethod
  def decoding(
    cls, config: model_config.ModelConfig, rows: int, context: int
  ) -> "Dispatch":
    """Returns one in which all rows reach the end of their context."""
    steps = min(8, context // 4)
    return cls(config=config, rows=rows, length=context, chunk=1, steps=steps)

  @classmethod
  def encoding(
    cls, config: model_config.ModelConfig, length: int
  ) -> "Dispatch":
    """Returns one that encodes a prompt and samples the token after it."""
    return cls(config=config, rows=1, length=length, chunk=length - 1, steps=1)


def _nbytes(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def decode(
  name: str,
  config: model_config.ModelConfig,
  rows: int,
  context: int,
  copied: float,
  repeats: int,
) -> Iterator[Row]:
  """Yields the least seconds of a step over the measured ones."""
  params = small_parts.weights(config, _layout())
  dispatch = Dispatch.decoding(config, rows, context)
  took = dispatch.time(params, repeats) / dispatch.steps
  item = jnp.dtype(config.dtype).itemsize
  token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
  weights = _nbytes(params)
  if not config.tie_embeddings:  # A step looks up a few words of it.
    weights -= params["embed"].nbytes
  least = (weights + rows * context * token) / copied
  yield {
    "case": f"{name}, {rows} rows of {context}",
    "value": least / took,
    "step_s": took,
    "tokens_per_s": rows / took,
  }


def prefill(
  name: str,
  config: model_config.ModelConfig,
  length: int,
  matmul: float,
  repeats: int,
) -> Iterator[Row]:
  """Yields the share of the matmul's FLOP/s that encoding a prompt reaches."""
  params = small_parts.weights(config, _layout())
  took = Dispatch.encoding(config, length).time(params, repeats)
  # A third of a train step: forward alone, and logits of the last token only.
  flops = train_step.flops_a_token(config, length) / 3 * length
  flops -= 2.0 * config.vocab_size * config.d_model * (length - 1)
  yield {
    "case": f"{name}, 1 prompt of {length}",
    "value": flops / took / matmul,
    "prompt_s": took,
  }


def publish(sizes: Sizes, copied: float, repeats: int) -> Iterator[Row]:
  """Yields the speed of a publish, and what it costs those who decode."""
  yield from asyncio.run(_publish(sizes, copied, repeats))


async def _publish(sizes: Sizes, copied: float, repeats: int) -> list[Row]:
  config = sizes.served
  config = dataclasses.replace(config, max_length=min(2048, config.max_length))
  layouts = placement.Placement(colocated=len(jax.devices()) < 2).layouts()
  settings = engine_settings.EngineSettings(
    slots=sizes.answers,
    row_buckets=(sizes.answers,),
    chunk_buckets=(16,),
    compile_ahead=True,
  )

  def request(row: int, answer: int) -> contract.DecodeRequest:
    return contract.DecodeRequest(
      request_id=f"{row} {answer}",
      session=f"{row} {answer}",
      tokens=np.full(8, row % config.vocab_size, np.int32),
      # Rows must not end all at the same time.
      max_tokens=config.max_length // 2 - row % 8,
      seed=answer,
    )

  took: list[dict[str, float]] = []
  async with publish_load.decoding(
    config, layouts, settings, request, sizes.answers, trace.Trace(None)
  ) as load:
    params = small_parts.weights(config, layouts[0])
    versions = small_parts.versions(params)
    for version in range(1, repeats + 2):
      params = next(versions)
      before = time.monotonic()
      await asyncio.sleep(1.0)
      start = time.monotonic()
      stall_s = await load.publisher.publish(version, params, "keep_kv")
      took.append(
        {
          "publish_s": time.monotonic() - start,
          "stall_s": stall_s,
          "step_s": load.step_s(before, start),
        }
      )
  middle = machine.medians(took[1:])
  rate = 2 * _nbytes(params) / middle["publish_s"]
  same = "two devices" if len(jax.devices()) > 1 else "one device"
  return [
    {"case": f"speed, {same}", "value": rate / copied, **middle},
    {
      "case": f"steps of stall, {same}",
      "value": middle["stall_s"] / middle["step_s"],
      "goal": 1.0,
      **middle,
    },
  ]


def _rows(
  name: str, goal: float | None, measure: Callable[[], Iterator[Row]]
) -> list[Row]:
  """Returns and prints the rows of a measurement, or why there are none."""
  found: list[Row] = []
  try:
    for row in measure():
      found.append({"name": name, "goal": goal, **row})
  # Whatever goes wrong, such as missing memory, is a result of this row.
  except Exception as error:
    why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    found.append({"name": name, "goal": goal, "error": why})
  jax.clear_caches()
  for row in found:
    value = row.get("error") or f"{row['value']:.3g}, goal {row['goal']}"
    print(f"{name:10} {row.get('case', ''):40} {value}", flush=True)
  return found


def compile_ahead(sizes: Sizes, only: str) -> None:
  """Compiles the larger programs of the rows, into the cache of programs."""
  lower: list[Callable[[], Sequence[Any]]] = []
  for name, model in sizes.train.items():
    if only in "train":
      lower.append(functools.partial(_lowered_steps, name, model, sizes))
  for model in sizes.decoded.values():
    dispatches = []
    if only in "decode":
      dispatches += [
        Dispatch.decoding(model, rows, context)
        for context in sizes.contexts
        for rows in sizes.rows
      ]
    if only in "prefill":
      dispatches += [Dispatch.encoding(model, size) for size in sizes.prompts]
    draw = small_parts.draw(model, _layout())
    if dispatches:
      lower.append(lambda draw=draw: [draw.lower(jax.random.key(0))])
    lower += [lambda one=one: [one.lower()] for one in dispatches]

  def compile_one(lower: Callable[[], Sequence[Any]]) -> None:
    # What cannot be compiled says so when it is measured.
    with contextlib.suppress(Exception):
      for lowered in lower():
        lowered.compile()

  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(compile_one, lower))


def _lowered_steps(
  name: str, model: model_config.ModelConfig, sizes: Sizes
) -> Sequence[Any]:
  work = train_step.fitting(name, model, *sizes.batch)
  work = train_step.with_remat(work, work.remats[0])
  return train_step.programs_of(work).lower(train_step.packed(work))


def measure(sizes: Sizes, repeats: int, only: str = "") -> Row:
  """Returns the yardsticks and the rows whose name holds `only`."""
  part = functools.partial
  rows = []
  one = "--config.placement.colocated=true"
  for name, more in (("start", ()), ("one_device", (one,))):
    if only in name:
      rows += _rows(name, 8.0, part(start, sizes, *more))
  began = time.monotonic()
  compile_ahead(sizes, only)
  print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
  config = sizes.served
  matmul = train_step.matmul_rate(
    config.dtype, sizes.products, sizes.product_flops
  )
  copied = copy_rate(sizes.copied, repeats)
  tasks: list[tuple[str, float | None, Callable[[], Iterator[Row]]]] = [
    *(
      ("train", 0.55, part(train, name, model, sizes.batch, matmul))
      for name, model in sizes.train.items()
    ),
    *(
      ("experts", 0.5, part(experts, sizes, number, repeats))
      for number in sizes.experts
    ),
    *(
      ("attention", None, part(attend, sizes, form, segments, repeats))
      for segments in (1, 16)
      for form in ("fused", "triton", "blockwise", "packed")
    ),
    *(
      ("pages", None, part(pages, sizes, *shape, copied, repeats))
      for shape in sizes.paged
    ),
    ("publish", None, part(publish, sizes, copied, repeats)),
  ]
  for name, model in sizes.decoded.items():
    tasks += [
      ("decode", 0.6, part(decode, name, model, n, context, copied, repeats))
      for context in sizes.contexts
      for n in sizes.rows
    ]
    tasks += [
      ("prefill", None, part(prefill, name, model, length, matmul, repeats))
      for length in sizes.prompts
    ]
  for name, goal, task in tasks:
    if only in name:
      rows += _rows(name, goal, task)
  return {"matmul_flops_s": matmul, "copy_bytes_s": copied, "rows": rows}


def main(_: list[str]) -> None:
  """Measures, prints and keeps every row."""
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
  only = train_step.ONLY.value
  sizes = tiny() if TINY.value else large()
  jax_setup.keep_compiled()
  result = measure(sizes, train_step.REPEATS.value, only)
  print(json.dumps({"machine": machine.describe(), **result}))
  if not (TINY.value or only):
    machine.keep("accelerator", **result)


if __name__ == "__main__":
  app.run(main)
