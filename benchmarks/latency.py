"""Latency of the built-in engine, beside its throughput.

  python -m benchmarks.latency [--repeats=20]

The model and the conversations of `benchmarks.decode`: one turn of 32 ids of
context and 64 tokens, or five turns, alone and at 8 and 64 at once. Medians
over all turns of the time to the first token, and of the time of an answer over
its tokens, on the engine's own clock, with the tokens a second of the same
rounds. Tokens reach the host by the dispatch, here of up to 32, so a short
answer has one time for all of them. Writes benchmarks/results/latency.json.
"""

import asyncio
import statistics

from absl import app, flags

from benchmarks import decode_engine, decode_load, machine
from rl.engine import contract

_REPEATS = flags.DEFINE_integer("repeats", 20, "Rounds of each load.")


async def _row(
  served: contract.DecodeEngine, kind: str, concurrency: int
) -> dict[str, float]:
  answers: list[contract.Completion] = []
  rates = []
  for seed in range(_REPEATS.value):
    seconds, _, some = await decode_engine.play(served, kind, concurrency, seed)
    answers += some
    rates.append(sum(len(one.tokens) for one in some) / seconds)
  each = [one.decode_s / len(one.tokens) for one in answers]
  first = [one.first_token_s for one in answers]
  return {
    "first_token_ms": 1e3 * statistics.median(first),
    "token_ms": 1e3 * statistics.median(each),
    "tokens_per_s": statistics.median(rates),
  }


async def _measure() -> dict[str, dict[str, float]]:
  rows = {}
  async with decode_engine.started(decode_engine.BUILT_IN) as served:
    for kind in decode_load.KINDS:
      for concurrency in decode_load.CONCURRENCIES:
        # What is compiled late.
        await decode_engine.play(served, kind, concurrency, 0)
        row = await _row(served, kind, concurrency)
        rows[f"{kind}, {concurrency}"] = row
        print(f"{kind:6} {concurrency:3}", row, flush=True)
  return rows


def main(_: list[str]) -> None:
  """Measures, prints and keeps every load."""
  print(machine.describe())
  machine.keep("latency", loads=asyncio.run(_measure()))


if __name__ == "__main__":
  app.run(main)
