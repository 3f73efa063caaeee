"""One of our engines as a side of benchmarks/decode.py.

  python -m benchmarks.decode_engine built_in|sglang

Says "ready" and then answers every line KIND CONCURRENCY SEED with [wall s, CPU
s, tokens] as JSON. In a process of its own, since sglang-jax needs other
versions of packages; built_in takes the same way.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator

import numpy as np

from benchmarks import decode_load, small_parts
from models import config as model_config
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.runtime import mesh_thread, trace

MODEL = model_config.ModelConfig(
  **decode_load.MODEL, max_length=decode_load.MAX_LENGTH
)

BUILT_IN = engine_settings.EngineSettings(
  slots=64,
  row_buckets=(1, 8, 32, 64),
  chunk_buckets=(12, 32),
  prefill_tokens=1024,
  steps_per_dispatch=32,
  compile_ahead=True,
)


async def converse(
  served: contract.DecodeEngine, name: str, turns: list[decode_load.Turn]
) -> list[contract.Completion]:
  """Plays one conversation; returns its answers."""
  ids: list[int] = []
  answers = []
  for number, turn in enumerate(turns):
    ids += turn.context
    done = await served.generate(
      contract.DecodeRequest(
        request_id=f"{name}/{number}",
        session=name,
        tokens=np.asarray(ids, np.int32),
        max_tokens=turn.tokens,
        seed=len(ids) if served.capabilities.seeds else 0,
      )
    )
    ids += done.tokens.tolist()
    answers.append(done)
  return answers


async def play(
  served: contract.DecodeEngine, kind: str, concurrency: int, seed: int
) -> tuple[float, float, list[contract.Completion]]:
  """Decodes one load; returns wall and CPU seconds, and all answers."""
  load = decode_load.conversations(kind, concurrency, seed)
  await served.flush_cache()
  wall, cpu = time.monotonic(), time.process_time()
  played = await asyncio.gather(
    *(
      converse(served, f"{kind}/{concurrency}/{seed}/{i}", turns)
      for i, turns in enumerate(load)
    )
  )
  wall, cpu = time.monotonic() - wall, time.process_time() - cpu
  return wall, cpu, [one for answers in played for one in answers]


@contextlib.asynccontextmanager
async def started(
  settings: contract.EngineSpec, config: model_config.ModelConfig = MODEL
) -> AsyncIterator[contract.StartableEngine]:
  """Yields an engine of random weights."""
  layout = placement.Placement(colocated=True).layouts()[1]
  thread = mesh_thread.MeshThread("decode", trace.Trace(None))
  served = settings.build(config, layout, thread)
  await served.start(small_parts.weights(config, layout), 0)
  yield served
  await served.close()
  thread.close()


def _settings(name: str) -> contract.EngineSpec:
  if name == "built_in":
    return BUILT_IN
  from rl.engine.sglang import settings as sglang_settings

  return sglang_settings.SglangSettings()


async def _main() -> None:
  async with started(_settings(sys.argv[1])) as served:
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
      kind, concurrency, seed = line.split()
      wall, cpu, answers = await play(served, kind, int(concurrency), int(seed))
      tokens = sum(len(answer.tokens) for answer in answers)
      print(json.dumps([wall, cpu, tokens]), flush=True)


if __name__ == "__main__":
  asyncio.run(_main())
