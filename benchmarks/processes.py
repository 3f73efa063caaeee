"""Cost of an engine in a process of its own, beside one in this process.

  python -m benchmarks.processes [--repeats=5]

Both engines have the same settings and do the same in turn:

  turns    64 conversations of 12 turns, of 4 ids and 2 tokens each: calls cost
           most where answers are short
  answers  16 answers of 64 tokens at once
  publish  every weight of a model, given from the learner's device; of the time
           until the engine serves it, decoding stands still for the stall

Wall time, and CPU time of all processes of a side. Writes medians, and the
ratios of each pair's sums, to benchmarks/results/processes.json.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import decode_engine, decode_load, machine, small_parts
from launch.cli import jax_setup
from models import memory_report
from rl.audit import event_log
from rl.backends import local
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement, router, weight_publisher, weight_transfer
from rl.remote import engine_worker, remote_engine
from rl.runtime import mesh_thread, trace

_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each side and load.")
_MODEL = small_parts.PUBLISHED
_SETTINGS = engine_settings.EngineSettings(
  slots=64, row_buckets=(16, 64), chunk_buckets=(8,), compile_ahead=True
)
_TURNS, _CONVERSATIONS, _ANSWERS = 12, 64, 16


async def _turns(engine: contract.DecodeEngine, seed: int) -> int:
  """Plays short turns; returns the number of calls."""

  async def one(number: int) -> None:
    rng = np.random.default_rng((seed, number))
    contexts = rng.integers(_MODEL.vocab_size, size=(_TURNS, 4)).tolist()
    turns = [decode_load.Turn(context, 2) for context in contexts]
    await decode_engine.converse(engine, f"{seed} {number}", turns)

  await asyncio.gather(*map(one, range(_CONVERSATIONS)))
  return _CONVERSATIONS * _TURNS


async def _answers(engine: contract.DecodeEngine, seed: int) -> int:
  """Samples long answers; returns the number of tokens."""
  rng = np.random.default_rng(seed)
  requests = [
    contract.DecodeRequest(
      request_id=f"{seed} {number}",
      session=f"{seed} {number}",
      tokens=rng.integers(_MODEL.vocab_size, size=8).astype(np.int32),
      max_tokens=64,
      seed=number,
    )
    for number in range(_ANSWERS)
  ]
  await asyncio.gather(*map(engine.generate, requests))
  return 64 * _ANSWERS


async def _timed(
  work: Callable[[], Coroutine[Any, Any, Any]], pids: Sequence[int]
) -> dict[str, float]:
  start, cpu_s = time.monotonic(), machine.cpu_s(pids)
  extra = await work()
  row = {
    "wall_s": time.monotonic() - start,
    "cpu_s": machine.cpu_s(pids) - cpu_s,
  }
  return row | (extra if isinstance(extra, dict) else {})


class _Side:
  """An engine, and what publishes to it."""

  def __init__(
    self,
    engine: contract.StartableEngine,
    transfer: weight_transfer.MeshTransfer,
    pids: Callable[[], Sequence[int]],
  ):
    spans = trace.Trace(None)
    self.engine, self.pids = engine, pids
    serving = router.Router([engine])
    self._publisher = weight_publisher.WeightPublisher(
      serving, transfer, event_log.EventLog(), spans
    )
    self._version = 0

  async def start(self, params: Any) -> None:
    self._publisher.begin(0, params)
    _, copy = await self._publisher.place_newest(0)
    await self.engine.start(copy, 0)

  async def publish(self, params: Any) -> dict[str, float]:
    self._version += 1
    stall_s = await self._publisher.publish(self._version, params, "recompute")
    return {"stall_s": stall_s}


async def _measure() -> dict[str, Any]:
  place = placement.Placement(
    more=(placement.DecodePool(name="apart", processes=1),)
  )
  learner_layout, layout, plan = place.layouts()
  spans = trace.Trace(None)
  threads = [mesh_thread.MeshThread(x, spans) for x in ("decode", "host")]
  decode, copier = threads
  task = engine_worker.EngineTask(
    model=_MODEL, engine=_SETTINGS, mesh=place.decode
  )
  info = placement.EngineInfo("apart")
  remote = remote_engine.RemoteEngines(
    {info: task}, None, copier, spans, backend=local.Local()
  )
  apart = remote.build(0, info)
  shardings = functools.partial(
    weight_transfer.pool_shardings, _MODEL, dtype="same"
  )
  transfer = functools.partial(
    weight_transfer.MeshTransfer, learner=decode, copier=copier
  )
  sides = {
    "here": _Side(
      _SETTINGS.build(_MODEL, layout, decode),
      transfer([shardings(layout=layout)]),
      lambda: (),
    ),
    "apart": _Side(
      apart,
      transfer([shardings(layout=plan)], write=remote.write, remote=[0]),
      lambda: (apart.pid,),
    ),
  }
  fresh = small_parts.versions(small_parts.weights(_MODEL, learner_layout))
  params = next(fresh)
  for side in sides.values():
    await side.start(params)
  rows: dict[str, dict[str, list[dict[str, float]]]] = {}
  for repeat in range(_REPEATS.value + 1):
    params = next(fresh)
    for name, side in sides.items():
      loads = {
        "turns": functools.partial(_turns, side.engine, repeat),
        "answers": functools.partial(_answers, side.engine, repeat),
        "publish": functools.partial(side.publish, params),
      }
      for load, work in loads.items():
        row = await _timed(work, side.pids())
        if repeat:  # The first is for what compiles late.
          rows.setdefault(load, {}).setdefault(name, []).append(row)
  for side in sides.values():
    await side.engine.close()
  await remote.close()
  for thread in threads:
    thread.close()
  return {load: _summary(sides) for load, sides in rows.items()}


def _summary(
  sides: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
  """Returns the medians of each side, and apart over here."""
  found = {side: machine.medians(ones) for side, ones in sides.items()}
  found["ratio"] = {
    name: sum(x[name] for x in sides["apart"])
    / sum(x[name] for x in sides["here"])
    for name in ("wall_s", "cpu_s")
  }
  return found


def main(_: list[str]) -> None:
  """Measures, prints and keeps the rows."""
  jax_setup.prepare(placement.Placement())
  rows = asyncio.run(_measure())
  for load, sides in rows.items():
    for side, row in sides.items():
      cells = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
      print(f"{load:8} {side:6} {cells}")
  count = memory_report.num_params(_MODEL).total
  machine.keep(
    "processes",
    params=count,
    calls=_CONVERSATIONS * _TURNS,
    repeats=_REPEATS.value,
    loads=rows,
  )


if __name__ == "__main__":
  app.run(main)
