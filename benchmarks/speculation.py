"""Drafts by n-grams against plain decoding, on text that repeats or does not.

  python -m benchmarks.speculation [--repeats=5]

The model of benchmarks/decode.py with random weights. At temperature 0 it soon
says the same again and again, and at temperature 1 nothing twice: the best and
the worst that drafts can meet. Conversations of 8 ids of context and 144 tokens
on two built-in engines, one with 4 drafts a row and step, which take turns and
must give the same answers. Prints the share of drafts that were right, the
share of tokens that came by them, and tokens a second of CPU and of wall time
over those without drafts. Writes benchmarks/results/speculation.json.
"""

import asyncio
import dataclasses
import statistics
import time
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import decode_engine, decode_load, machine
from rl.engine import contract

_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each side.")
_DRAFTS = 4
_CONTEXT, _TOKENS = 8, 144
_TEXTS = {"repeats itself": 0.0, "never repeats": 1.0}


async def _play(
  served: contract.DecodeEngine, at_once: int, temperature: float, seed: int
) -> tuple[list[list[int]], dict[str, float]]:
  """Returns the answers, and what they cost."""
  rng = np.random.default_rng([at_once, seed])
  requests = [
    contract.DecodeRequest(
      request_id=f"{at_once}/{temperature}/{seed}/{i}",
      session=f"{at_once}/{temperature}/{seed}/{i}",
      tokens=rng.integers(decode_load.VOCAB, size=_CONTEXT, dtype=np.int32),
      max_tokens=_TOKENS,
      temperature=temperature,
      seed=i,
    )
    for i in range(at_once)
  ]
  await served.flush_cache()
  before = served.stats()
  wall_s, cpu_s = time.monotonic(), time.process_time()
  done = await asyncio.gather(*map(served.generate, requests))
  wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
  after = served.stats()
  return [one.tokens.tolist() for one in done], {
    "wall_s": wall_s,
    "cpu_s": cpu_s,
    "drafted": after.drafted_tokens - before.drafted_tokens,
    "right": after.right_drafts - before.right_drafts,
  }


async def _measure() -> list[dict[str, Any]]:
  settings = dataclasses.replace(
    decode_engine.BUILT_IN, speculative_tokens=_DRAFTS
  )
  async with (
    decode_engine.started(decode_engine.BUILT_IN) as plain,
    decode_engine.started(settings) as drafting,
  ):
    return await _rows(plain, drafting)


async def _rows(
  plain: contract.DecodeEngine, drafting: contract.DecodeEngine
) -> list[dict[str, Any]]:
  rows = []
  for text, temperature in _TEXTS.items():
    for at_once in (1, 8):
      sides: list[tuple[dict[str, float], dict[str, float]]] = []
      for seed in range(_REPEATS.value + 1):
        same, without = await _play(plain, at_once, temperature, seed)
        found, own = await _play(drafting, at_once, temperature, seed)
        if found != same:
          raise RuntimeError(f"drafts changed an answer: {text}, {at_once}")
        sides.append((without, own))
      sides = sides[1:]  # The first warms up.
      drafted = sum(own["drafted"] for _, own in sides)
      right = sum(own["right"] for _, own in sides)
      rows.append(
        {
          "text": text,
          "at once": at_once,
          "right": right / drafted if drafted else None,
          "by drafts": right / (len(sides) * at_once * _TOKENS),
          **{
            f"gain, {clock}": statistics.median(
              without[clock] / own[clock] for without, own in sides
            )
            for clock in ("cpu_s", "wall_s")
          },
        }
      )
      print(rows[-1], flush=True)
  return rows


def main(_: list[str]) -> None:
  """Measures both kinds of text and keeps the table."""
  machine.keep("speculation", drafts=_DRAFTS, rows=asyncio.run(_measure()))


if __name__ == "__main__":
  app.run(main)
