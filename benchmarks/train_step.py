"""Training speed against a plain matmul's rate and a plainly written step.

  python -m benchmarks.train_step [--repeats=5] [--steps=2] [--only=NAME]

One optimizer step on one device: zero, accumulate one batch, update, as the
coordinator calls the learner. Prints tokens a second, and model FLOP/s as a
share of the best rate of a plain matmul of that dtype in the same run:

  FLOPs a token = 6 (weights that a token is multiplied by) + 6 layers H d L

The weights are active ones: of the experts those of the top k, and the output
projection once. The second term is causal attention: two products with L / 2
keys on average, forward once and backward twice. What remat computes again
does not count.

On CPU: the models of 4 layers and width 128 on 64 rows of 96 tokens, with
`benchmarks/yardstick.py` in turn. On an accelerator: Qwen3-1.7B, and as many
layers of Qwen3-30B-A3B as fit with their optimizer, random weights, bfloat16;
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 lets it have the whole device. Policies for
remat are tried from the one that keeps most.
Then the memory of log-probabilities over 151,936 words, in chunks and whole.
Writes benchmarks/results/train_step.json, or train_step_<platform>.json.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine, small_parts, yardstick
from models import config as model_config
from models import logprobs, memory_report
from rl.algorithms import losses, objective
from rl.data import batch
from rl.pools import placement
from rl.train import learner, optimizers

REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each side.")
_STEPS = absl_flags.DEFINE_integer("steps", 2, "Of each repeat.")
ONLY = absl_flags.DEFINE_string("only", "", "Workloads whose name holds this.")

_BYTES_A_PARAMETER = 24
"""bfloat16: old and new copy, gradient; float32: master copy, two moments,
accumulated gradient; and what adding up the gradient takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """A model, and rows of `length` tokens of which the first third is given.

  Attributes:
    plain: whether the yardstick takes turns; it needs much more memory, and
      with many experts much more time.
    remats: policies, of which the first that the memory is enough for is used.
  """

  name: str
  config: model_config.ModelConfig
  rows: int
  length: int
  plain: bool = False
  remats: tuple[str, ...] = ("none",)


def workloads(platform: str) -> list[Workload]:
  """Returns those of a platform, with as many layers as its memory takes."""
  return _small() if platform == "cpu" else _large()


def _small() -> list[Workload]:
  sizes: dict[str, Any] = {
    "vocab_size": 512,
    "d_ff": 512,
    "d_expert": 256,
    "max_length": 96,
    "rope_theta": 1e6,
    # Over few words all logits are small: nothing to compute again.
    "compute": model_config.Compute(logprob_chunk=64 * 96),
  }
  configs = {
    "dense": model_config.tiny(**sizes),
    "8 experts": model_config.tiny_moe(num_experts=8, **sizes),
    "32 experts": model_config.tiny_moe(num_experts=32, **sizes),
  }
  return [
    Workload(
      name=name,
      config=config,
      rows=64,
      length=96,
      plain=config.num_experts <= 8,
    )
    for name, config in configs.items()
  ]


def _large() -> list[Workload]:
  return [
    fitting("Qwen3-1.7B", model_config.qwen3("1.7b")),
    fitting("30B-A3B", model_config.qwen3_moe("30b-a3b")),
  ]


def fitting(
  name: str, whole: model_config.ModelConfig, rows: int = 8, length: int = 2048
) -> Workload:
  """Returns as many layers of a model as fit with their optimizer.

  Raises:
    ValueError: not even one does.
  """
  stats = jax.devices()[0].memory_stats() or {}
  # A quarter is for activations, and for what is not foreseen.
  room = 0.75 * stats.get("bytes_limit", 16e9) / _BYTES_A_PARAMETER
  one, two = (
    memory_report.num_params(
      dataclasses.replace(whole, num_layers=layers)
    ).total
    for layers in (1, 2)
  )
  layers = int(min(whole.num_layers, 1 + (room - one) // (two - one)))
  if layers < 1:
    raise ValueError(f"{name}: one layer needs {one * _BYTES_A_PARAMETER} B")
  return Workload(
    name=f"{name}, {layers} of {whole.num_layers} layers",
    config=dataclasses.replace(whole, num_layers=layers),
    rows=rows,
    length=length,
    remats=("none", "dots", "layer"),
  )


def flops_a_token(config: model_config.ModelConfig, length: int) -> float:
  """Returns model FLOPs of a train step; the formula is on top."""
  active = memory_report.num_params(config).active
  if not config.tie_embeddings:
    # Looking a word up multiplies nothing.
    active -= config.vocab_size * config.d_model
  width = config.num_heads * config.head_dim
  return 6.0 * active + 6.0 * config.num_layers * width * length


def matmul_rate(dtype: str, sizes: Sequence[int], flops: float) -> float:
  """Returns the best FLOP/s of square products, of a few sizes.

  Args:
    flops: of each repeat.
  """
  best = 0.0
  product = jax.jit(jnp.matmul)
  for size in sizes:
    # Of noise, as accelerators multiply equal numbers faster, and with a
    # spectral radius of 1, so that products neither vanish nor overflow.
    noise = np.random.default_rng(0).normal(scale=size**-0.5, size=(size, size))
    x = jnp.asarray(noise, dtype)
    jax.block_until_ready(product(x, x))
    count = max(1, int(flops) // (2 * size**3))
    for _ in range(3):
      start = time.monotonic()
      # Each waits for the one before it: none runs beside another.
      y = x
      for _ in range(count):
        y = product(x, y)
      jax.block_until_ready(y)
      seconds = time.monotonic() - start
      best = max(best, 2.0 * size**3 * count / seconds)
  return best


def packed(work: Workload) -> batch.Batch:
  """Returns whole rows with behaviour near that of random weights."""
  rng = np.random.default_rng(0)
  shape = (work.rows, work.length)
  words = work.config.vocab_size
  order = np.broadcast_to(np.arange(work.length, dtype=np.int32), shape)
  noise = rng.normal(scale=0.1, size=shape)
  return batch.empty(*shape)._replace(
    tokens=rng.integers(words, size=shape, dtype=np.int32),
    positions=order.copy(),
    segments=np.ones(shape, np.int32),
    sampled=order >= work.length // 3,
    behaviour=(noise - np.log(words)).astype(np.float32),
    advantages=rng.normal(size=shape).astype(np.float32),
  )


def programs_of(work: Workload) -> learner.Learner:
  """Returns the programs of a workload, on one device."""
  layout, _ = placement.Placement(colocated=True).layouts()
  return small_parts.programs(work.config, layout)


def _ours(work: Workload) -> Callable[[], float]:
  """Returns a function that does a step and gives its loss."""
  programs = programs_of(work)
  state = programs.init(jax.random.key(0))
  placed = programs.place(packed(work))

  def step() -> float:
    nonlocal state
    total = programs.accumulate(state.params, None, placed)
    state, metrics = programs.update(state, total)
    return float(jax.block_until_ready(metrics)["loss"])

  return step


def _plain(work: Workload) -> Callable[[], float]:
  optimizer = optimizers.AdamW()()
  params = small_parts.weights(work.config)
  opt_state = optimizer.init(params)
  weight = objective.Objective(loss=losses.ClippedSurrogate()).balance_weight
  run = yardstick.build(work.config, optimizer, weight)
  placed = jax.device_put(packed(work))

  def step() -> float:
    nonlocal params, opt_state
    params, opt_state, loss = run(params, opt_state, placed)
    return float(jax.block_until_ready(loss))

  return step


def _compare(work: Workload) -> dict[str, list[tuple[float, float]]]:
  """Returns wall and CPU seconds a step of each side, which take turns.

  Raises:
    AssertionError: both do not train the same.
  """
  sides = {"ours": _ours(work)}
  if work.plain:
    sides["plain"] = _plain(work)
  # Twice: the first step compiles, and the second sees what a jit returned.
  for _ in range(2):
    values = [step() for step in sides.values()]
    np.testing.assert_allclose(values, values[0], rtol=1e-3, atol=1e-4)
  seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for _ in range(REPEATS.value):
    for name, step in sides.items():
      wall, cpu = time.monotonic(), time.process_time()
      for _ in range(_STEPS.value):
        step()
      wall, cpu = time.monotonic() - wall, time.process_time() - cpu
      seconds[name].append((wall / _STEPS.value, cpu / _STEPS.value))
  return seconds


def with_remat(work: Workload, remat: str) -> Workload:
  """Returns the workload with a policy for remat."""
  compute = dataclasses.replace(work.config.compute, remat=remat)
  config = dataclasses.replace(work.config, compute=compute)
  return dataclasses.replace(work, config=config)


def _first_that_fits(
  work: Workload,
) -> tuple[Workload, dict[str, list[tuple[float, float]]]]:
  """Returns what `_compare` does, with the policy for remat that it took."""
  for remat in work.remats:
    tried = with_remat(work, remat)
    try:
      return tried, _compare(tried)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error) or remat == work.remats[-1]:
        raise
    jax.clear_caches()
  raise ValueError(f"{work.name}: remats={work.remats} is empty; name some")


def row(work: Workload, rate: float) -> dict[str, Any]:
  """Returns the figures of a workload.

  Args:
    rate: of a plain matmul, in FLOP/s.
  """
  work, seconds = _first_that_fits(work)
  tokens = work.rows * work.length
  found: dict[str, Any] = {
    "name": work.name,
    "remat": work.config.compute.remat,
  }
  for side, times in seconds.items():
    walls = [wall for wall, _ in times]
    median = statistics.median(walls)
    done = tokens * flops_a_token(work.config, work.length) / median
    found[side] = {
      "tokens/s": tokens / median,
      "min": tokens / max(walls),
      "max": tokens / min(walls),
      "CPU s": statistics.median(cpu for _, cpu in times),
      "FLOP/s": done,
      "share of matmul": done / rate,
    }
  if "plain" in seconds:
    pairs = list(zip(seconds["ours"], seconds["plain"], strict=True))
    for place, name in enumerate(("wall", "CPU")):
      ratios = [b[place] / a[place] for a, b in pairs]
      found[f"ours / plain, {name}"] = {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
      }
  return found


def _print(row: dict[str, Any]) -> None:
  sides = [x for x in ("ours", "plain") if x in row]
  machine.show(row["name"], [{"side": x, **row[x]} for x in sides])
  if "plain" in row:
    for clock in ("wall", "CPU"):
      machine.show(f"ours / plain, {clock}", [row[f"ours / plain, {clock}"]])


def logprob_memory(chunk: int) -> dict[str, float]:
  """Returns temporary MB of value and gradient, in chunks and whole."""
  words, width, shape = 151_936, 64, (8, 1024)
  hidden = jax.ShapeDtypeStruct((*shape, width), jnp.float32)
  table = jax.ShapeDtypeStruct((words, width), jnp.float32)
  ids = jax.ShapeDtypeStruct(shape, jnp.int32)

  def total(hidden, table, ids, chunk):
    scores, entropy = logprobs.score(
      [logprobs.Term(hidden, table)], ids, temperature=1.0, chunk=chunk
    )
    return jnp.sum(scores * entropy)

  def megabytes(chunk: int) -> float:
    run = jax.jit(
      jax.grad(functools.partial(total, chunk=chunk), argnums=(0, 1))
    )
    memory = run.lower(hidden, table, ids).compile().memory_analysis()
    return memory.temp_size_in_bytes / 1e6 if memory else float("nan")

  tokens = shape[0] * shape[1]
  return {
    "tokens": tokens,
    "words": words,
    "chunk": chunk,
    "logits MB": tokens * words * 4 / 1e6,
    "chunks MB": megabytes(chunk),
    "whole MB": megabytes(tokens),
  }


def main(_: list[str]) -> None:
  """Measures each workload, prints a table and keeps it."""
  platform = jax.default_backend()
  chosen = [x for x in workloads(platform) if ONLY.value in x.name]
  dtypes = {work.config.dtype for work in chosen}
  products = (512, 1024, 2048), 2e10
  if platform != "cpu":
    products = (4096, 8192, 16_384), 5e13
  rates = {dtype: matmul_rate(dtype, *products) for dtype in sorted(dtypes)}
  print(machine.describe())
  for dtype, rate in rates.items():
    print(f"plain matmul, {dtype}: {rate / 1e12:.3f} TFLOP/s")
  rows = []
  for work in chosen:
    rows.append(row(work, rates[work.config.dtype]))
    _print(rows[-1])
  memory = logprob_memory(chunk=1024)
  print(" ".join(f"{name} {value:.0f}" for name, value in memory.items()))
  if not ONLY.value:
    suffix = "" if platform == "cpu" else f"_{platform}"
    machine.keep(
      f"train_step{suffix}", matmul=rates, rows=rows, logprobs=memory
    )


if __name__ == "__main__":
  app.run(main)
