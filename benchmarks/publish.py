"""Publishing under load: how long decoding stands still, and what moves.

  python -m benchmarks.publish [--repeats=5] [--rows=16]

A learner's device and a pool's. The pool's engine decodes `--rows` answers at
once, all the time, while every weight of a model of 4 layers and width 256 is
published again and again, with each way of treating requests in flight in turn.
Of each publish are measured:

  publish_s    from the call until the engine serves the new weights
  transfer_s   of that, copying them; decoding goes on meanwhile
  stall_s      what the engine says that decoding stood still
  mesh_idle_s  longest time for which the pool's device had nothing to do
  row_gap_s    median over rows of the longest time without a token

and with it `step_s`, the time in which every row gets one token, and what the
last two are for as long right before, when nothing is published. `stall ratio`
is stall_s over step_s + transfer_s, and `idle ratio` mesh_idle_s over it, which
also holds what the host does before the next program. With "drain" and "abort"
requests end, so that rows wait for others, or for a new request.

Medians, and ratios with smallest and largest. Writes
benchmarks/results/publish.json.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine, publish_load, small_parts
from launch.cli import jax_setup
from models import memory_report, sharding
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.runtime import trace

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each way.")
_ROWS = absl_flags.DEFINE_integer("rows", 16, "Answers decoded at once.")

_MODEL = small_parts.PUBLISHED
_WAYS = get_args(contract.InFlight)
_PROMPT, _ANSWER = 16, 64
_WINDOW_S, _AFTER_S = 1.0, 0.4


def _requests() -> publish_load.Requests:
  """Returns the requests of rows, which must not end all at the same time."""
  draws = [np.random.default_rng(row) for row in range(_ROWS.value)]

  def request(row: int, answer: int) -> contract.DecodeRequest:
    rng = draws[row]
    return contract.DecodeRequest(
      request_id=f"{row} {answer}",
      session=f"{row} {answer}",
      tokens=rng.integers(_MODEL.vocab_size, size=_PROMPT).astype(np.int32),
      max_tokens=int(rng.integers(_ANSWER // 2, _ANSWER)),
      seed=1000 * row + answer,
    )

  return request


def _idle_s(spans: trace.Trace, start: float, end: float) -> float:
  """Returns the longest time for which the pool's device had no work."""
  start, end = start - spans.origin, end - spans.origin
  inside = [s for s in list(spans.spans) if s.end > start and s.start < end]
  worked = trace.busy(inside, "decode")
  edges = [start, *(t for span in worked for t in span), end]
  return max(b - a for a, b in zip(edges[::2], edges[1::2], strict=True))


def _transfer_s(spans: trace.Trace, start: float) -> float:
  """Returns the seconds of what was copied since then."""
  found = [
    span.end - span.start
    for span in list(spans.spans)
    if span.name in ("cast", "reshard") and span.start > start - spans.origin
  ]
  return sum(found)


async def _one(
  load: publish_load.Load,
  spans: trace.Trace,
  version: int,
  params: Any,
  way: contract.InFlight,
) -> dict[str, float]:
  """Returns what one publish costs, and a window of the same length before."""
  await asyncio.sleep(_WINDOW_S)
  start = time.monotonic()
  stall_s = await load.publisher.publish(version, params, way)
  publish_s = time.monotonic() - start
  # What was encoded again, or had to wait, shows in the next tokens.
  await asyncio.sleep(_AFTER_S)
  end = time.monotonic()
  transfer_s = _transfer_s(spans, start)
  step_s = load.step_s(start - _WINDOW_S, start)
  before = start - min(end - start, _WINDOW_S)
  return {
    "step_s": step_s,
    "publish_s": publish_s,
    "transfer_s": transfer_s,
    "stall_s": stall_s,
    "mesh_idle_s": _idle_s(spans, start, end),
    "row_gap_s": load.gap_s(start, end),
    "mesh_idle_s without": _idle_s(spans, before, start),
    "row_gap_s without": load.gap_s(before, start),
    "stall ratio": stall_s / (step_s + transfer_s),
    "idle ratio": _idle_s(spans, start, end) / (step_s + transfer_s),
  }


async def _under_load(
  layouts: Sequence[sharding.Layout],
) -> dict[str, dict[str, float]]:
  """Returns medians of what publishing costs, by way."""
  spans = trace.Trace(None)
  settings = engine_settings.EngineSettings(
    slots=_ROWS.value,
    row_buckets=(_ROWS.value,),
    chunk_buckets=(_PROMPT, _MODEL.max_length),
    compile_ahead=True,
  )
  found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
  async with publish_load.decoding(
    _MODEL, layouts, settings, _requests(), _ROWS.value, spans
  ) as load:
    params = small_parts.weights(_MODEL, layouts[0])
    versions = enumerate(small_parts.versions(params), 1)
    for repeat in range(_REPEATS.value + 1):
      for way in _WAYS:
        one = await _one(load, spans, *next(versions), way)
        if repeat:  # The first is for whatever compiles late.
          found[way].append(one)
  return {way: _summary(ones) for way, ones in found.items()}


def _summary(ones: Sequence[Mapping[str, float]]) -> dict[str, float]:
  row = machine.medians(ones)
  for name in ("stall ratio", "idle ratio"):
    row |= machine.spread(name, [one[name] for one in ones])
  return row


def main(_: list[str]) -> None:
  """Measures and prints the table, and keeps it."""
  place = placement.Placement()
  jax_setup.prepare(place)
  ways = asyncio.run(_under_load(place.layouts()))
  print(machine.describe())
  machine.show("under load", [{"way": w, **row} for w, row in ways.items()])
  machine.keep(
    "publish",
    rows=_ROWS.value,
    repeats=_REPEATS.value,
    params=memory_report.num_params(_MODEL).total,
    **{"under load": ways},
  )


if __name__ == "__main__":
  app.run(main)
