"""Publishing in fewer bits: bytes that move, and what they cost in accuracy.

  python -m benchmarks.weight_dtypes [--repeats=5] [--rows=32]

A learner's device and a pool's. All weights of a float32 model of 4 layers and
width 256, with 8 experts, are published as each type, and adapters alone as
they are: bytes, and median seconds with nothing else running. Then the engine
samples an answer of 64 ids in each of `--rows` requests, and the learner scores
the same ids with its own weights:

  gap   |log-probability of the engine - that of the learner|, in nats

The weights are drawn. Those of the head are scaled so that logits have a
standard deviation of about 3, as those of a trained model. Routers choose
freely on both sides, so the gap includes tokens that went to other experts; in
`replayed` the learner takes the engine's experts, as with
`rollout.record_experts`.
Writes benchmarks/results/weight_dtypes.json.
"""

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine, small_parts
from launch.cli import jax_setup
from models import config as model_config
from models import lora, memory_report, sharding
from models import policy as policy_lib
from rl.data import batch, trajectory
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement, weight_transfer
from rl.runtime import mesh_thread, trace
from rl.train import logprob_gap

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Publishes of each type.")
_ROWS = absl_flags.DEFINE_integer("rows", 32, "Answers that are compared.")

_MODEL = dataclasses.replace(small_parts.PUBLISHED, tie_embeddings=False)
_PROMPT, _ANSWER, _LOGITS = 16, 64, 3.0


class _Pool:
  """A learner's device and a pool's, and the way between them."""

  def __init__(
    self,
    layouts: Sequence[sharding.Layout],
    config: model_config.ModelConfig,
    dtype: weight_transfer.Dtype,
  ):
    spans = trace.Trace(None)
    self.learner, self.copier, self.decode = (
      mesh_thread.MeshThread(n, spans) for n in ("learner", "host", "decode")
    )
    self.transfer = weight_transfer.MeshTransfer(
      [weight_transfer.pool_shardings(config, layouts[1], dtype)],
      self.learner,
      self.copier,
      weight_transfer.Publishing(dtype=dtype),
    )

  def close(self) -> None:
    for thread in (self.decode, self.copier, self.learner):
      thread.close()


def _init(config: model_config.ModelConfig, layout: sharding.Layout) -> Any:
  """Returns drawn weights whose logits are spread like a trained model's."""

  def draw():
    params = policy_lib.of(config).init(jax.random.key(0))
    # The hidden state is normed, so logits are sums of d_model products.
    spread = params["head"].std() * config.d_model**0.5
    return params | {"head": params["head"] * (_LOGITS / spread)}

  places = layout.tree(policy_lib.of(config).axes)
  return jax.jit(draw, out_shardings=places)()


async def _moved(
  layouts: Sequence[sharding.Layout],
  config: model_config.ModelConfig,
  dtype: weight_transfer.Dtype,
) -> dict[str, float]:
  """Returns bytes and median seconds of a publish of what a model trains."""
  pool = _Pool(layouts, config, dtype)
  trained, frozen = lora.split(_init(config, layouts[0]))
  seconds, moved = [], 0
  held: Any = None
  fresh = small_parts.versions(trained)
  for _ in range(_REPEATS.value + 1):
    trained = next(fresh)
    start = time.monotonic()
    (held,) = await pool.transfer.stage(lora.join(trained, frozen), [0])
    moved = held.moved_bytes
    seconds.append(time.monotonic() - start)
  del held
  pool.close()
  # The first compiles the cast.
  return {"bytes": moved, "seconds": statistics.median(seconds[1:])}


def _request(number: int) -> contract.DecodeRequest:
  draws = np.random.default_rng(number)
  return contract.DecodeRequest(
    request_id=str(number),
    session=str(number),
    tokens=draws.integers(_MODEL.vocab_size, size=_PROMPT).astype(np.int32),
    max_tokens=_ANSWER,
    seed=number,
    experts=True,
  )


def _episode(
  request: contract.DecodeRequest, answer: contract.Completion
) -> trajectory.Trajectory:
  turn = trajectory.Turn(
    context=request.tokens,
    tokens=answer.tokens,
    logprobs=answer.logprobs,
    versions=answer.versions,
    stop=answer.stop,
    experts=answer.experts,
  )
  return small_parts.episode([turn], index=request.seed)


async def _gap(
  layouts: Sequence[sharding.Layout], dtype: weight_transfer.Dtype
) -> dict[str, float]:
  """Returns the gap of answers that were sampled with such weights."""
  pool = _Pool(layouts, _MODEL, dtype)
  params = _init(_MODEL, layouts[0])
  settings = engine_settings.EngineSettings(
    slots=_ROWS.value,
    row_buckets=(_ROWS.value,),
    chunk_buckets=(_PROMPT,),
    record_experts=True,
  )
  config = weight_transfer.pool_model(_MODEL, dtype)
  served = settings.build(config, layouts[1], pool.decode)
  (copy,) = await pool.transfer.stage(params, [0])
  await served.start(copy.params, 0)
  requests = [_request(i) for i in range(_ROWS.value)]
  answers = await asyncio.gather(*map(served.generate, requests))
  await served.close()
  rows, length = _ROWS.value, _PROMPT + _ANSWER
  episodes = list(map(_episode, requests, answers))
  (packed,) = batch.pack(episodes, rows=rows, length=length, version=0).batches
  programs = small_parts.programs(_MODEL, layouts[0])
  found: dict[str, float] = {}
  for name, data in (
    ("gap", packed._replace(experts=None)),
    ("gap replayed", packed),
  ):
    gap = await logprob_gap.measure(
      programs, pool.learner, {0: params}, data, rows
    )
    found |= {f"{name} mean": gap.mean, f"{name} max": gap.max}
  pool.close()
  return found


async def _run(layouts: Sequence[sharding.Layout]) -> dict[str, Any]:
  rows: dict[str, Any] = {}
  for dtype in get_args(weight_transfer.Dtype):
    name = "float32" if dtype == "same" else dtype
    rows[name] = await _moved(layouts, _MODEL, dtype)
    rows[name] |= await _gap(layouts, dtype)
  adapted = dataclasses.replace(_MODEL, lora=lora.Lora())
  rows["adapters"] = await _moved(layouts, adapted, "same")
  whole = rows["float32"]["bytes"]
  for row in rows.values():
    row["share of float32"] = row["bytes"] / whole
  return rows


def main(_: list[str]) -> None:
  """Measures every type, prints the table and keeps it."""
  place = placement.Placement()
  jax_setup.prepare(place)
  rows = asyncio.run(_run(place.layouts()))
  print(machine.describe())
  for name, row in rows.items():
    cells = (f"{key} {value:.4g}" for key, value in row.items())
    print(f"{name:16}", ", ".join(cells))
  machine.keep(
    "weight_dtypes",
    rows=_ROWS.value,
    repeats=_REPEATS.value,
    params=memory_report.num_params(_MODEL).total,
    dtypes=rows,
  )


if __name__ == "__main__":
  app.run(main)
