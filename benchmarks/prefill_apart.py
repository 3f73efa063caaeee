"""Prefill and decoding on two engine processes: apart, and together.

  python -m benchmarks.prefill_apart [--repeats=5] [--sessions=24]

  together   sessions go to the process with the fewest, which does both
  apart      the first process encodes all prompts, and hands keys and values
             over through shared memory; the second has all sessions

Sessions ask once, for `_ANSWER` tokens; prompts have the same length in a
round. `_AT_ONCE` play at a time, the next when one has ended. Caches are empty
at the beginning. Both sides play the same sessions, in turn, on the same two
processes, every other time backwards. Each process has a share of a processor
(paced_engine.py), by kind of program:

  two kinds    the ratios of an H800, which encodes, and an H20: RollArt (arXiv
               2512.22560), table 2
  alike        there is no difference

The model is far smaller than one that such processors are for, so the bytes of
a token weigh less beside its arithmetic: the rows say what the split and the
hand-over do here, and not what they would do there. Wall time of a round, CPU
time of all processes, time to the first token (hand-over included) and between
later ones, and bytes moved. Writes medians over repeats, and of the ratios of
the two sides in the same repeat, to benchmarks/results/prefill_apart.json, with
the load of the machine before and after.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import machine, paced_engine
from launch.cli import jax_setup
from models import config as model_config
from rl.engine import contract
from rl.pools import affinity, placement, router
from rl.runtime import trace

_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each side and length.", 1)
_SESSIONS = flags.DEFINE_integer("sessions", 24, "Of a round.", 1)
_AT_ONCE = 8
_PROMPTS = (64, 256, 1024)
_ANSWER = 96
_MODEL = model_config.tiny_moe(
  num_layers=2, d_model=64, d_ff=128, num_experts=0, max_length=1152
)
_ENGINE = paced_engine.PacedEngine(
  slots=_AT_ONCE,
  row_buckets=(_AT_ONCE,),
  chunk_buckets=(64,),
  prefill_tokens=256,
  compile_ahead=True,
)
_FIRST = placement.EngineInfo("first")
_SECOND = placement.EngineInfo("second")
SIDES = {
  "together": (_FIRST, _SECOND),
  "apart": (_FIRST._replace(role="prefill"), _SECOND),
}
POOLS = {"two kinds": paced_engine.TWO_KINDS, "alike": paced_engine.ALIKE}


async def play(
  serving: router.Router, prompt: int, sessions: int, seed: int
) -> tuple[list[list[int]], list[tuple[float, float]]]:
  """Returns the answers, and seconds to the first token and of a later one.

  Args:
    prompt: ids of each.
    seed: decides the ids.
  """
  await serving.flush_cache()
  places = asyncio.Semaphore(_AT_ONCE)

  async def one(number: int) -> tuple[list[int], tuple[float, float]]:
    rng = np.random.default_rng((seed, prompt, number))
    name = f"{seed} {prompt} {number}"
    ids = rng.integers(_MODEL.vocab_size, size=prompt, dtype=np.int32)
    async with places:
      await serving.begin(name, "")
      asked_s, first_s, first, tokens = time.monotonic(), 0.0, 0, []
      async for delta in serving.stream(
        contract.DecodeRequest(
          request_id=name,
          session=name,
          tokens=ids,
          max_tokens=_ANSWER,
          seed=number,
        )
      ):
        if not tokens:
          first_s, first = time.monotonic() - asked_s, len(delta.tokens)
        tokens += delta.tokens.tolist()
      serving.end(name)
      later_s = time.monotonic() - asked_s - first_s
      return tokens, (first_s, later_s / (len(tokens) - first))

  played = await asyncio.gather(*map(one, range(sessions)))
  return [tokens for tokens, _ in played], [times for _, times in played]


async def _round(
  engines: Sequence[Any], side: str, prompt: int, seed: int
) -> tuple[dict[str, float], list[list[int]]]:
  """Returns the row of one side and length, and its answers."""
  serving = router.Router(
    engines,
    infos=SIDES[side],
    routing=affinity.Routing(min_prefill_ids=32),
  )
  pids = [engine.pid for engine in engines]
  start_s, cpu_s = time.monotonic(), machine.cpu_s(pids)
  answers, times = await play(serving, prompt, _SESSIONS.value, seed)
  row = {
    "wall_s": time.monotonic() - start_s,
    "cpu_s": machine.cpu_s(pids) - cpu_s,
    "first_token_s": statistics.median(first for first, _ in times),
    "token_s": statistics.median(later for _, later in times),
  }
  routes = serving.describe()
  missed = [x for name, x in routes.items() if "missed" in name]
  moved = {
    "moved_bytes": routes.get("hand_over_bytes", 0.0),
    "missed": sum(missed),
  }
  return row | moved, answers


async def measured(
  pools: Sequence[paced_engine.Shares],
) -> dict[int, list[dict[str, Any]]]:
  """Returns the rows of each repeat by length of prompt."""
  found: dict[int, list[dict[str, Any]]] = {prompt: [] for prompt in _PROMPTS}
  shares = dict(zip(SIDES["apart"], pools, strict=True))
  async with paced_engine.processes(
    shares, trace.Trace(None), _MODEL, _ENGINE
  ) as engines:
    for side in SIDES:  # For whatever happens late.
      await _round(engines, side, _PROMPTS[0], seed=0)
    for repeat in range(1, _REPEATS.value + 1):
      for prompt in _PROMPTS:
        rows, answers = {}, {}
        for side in list(SIDES)[:: -1 if repeat % 2 else 1]:
          rows[side], answers[side] = await _round(
            engines, side, prompt, repeat
          )
        pairs = zip(answers["together"], answers["apart"], strict=True)
        row = rows | {"same answers": sum(a == b for a, b in pairs)}
        found[prompt].append(row)
        machine.show(f"{prompt} ids", [{"side": x} | rows[x] for x in rows])
  return found


def _medians(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns medians of both sides, and ratios of together over apart."""
  sides = {
    side: machine.medians([row[side] for row in repeats]) for side in SIDES
  }
  gains = {}
  for name in ("wall_s", "cpu_s", "first_token_s", "token_s"):
    each = [row["together"][name] / row["apart"][name] for row in repeats]
    gains[name] = [min(each), statistics.median(each), max(each)]
  same = sum(row["same answers"] for row in repeats)
  return {**sides, "gain": gains, "same answers": same}


def main(_: list[str]) -> None:
  """Measures, prints and keeps the rows of all pools."""
  jax_setup.prepare(placement.Placement())
  load, kept = [os.getloadavg()[0]], {}
  for name, pools in POOLS.items():
    found = asyncio.run(measured(pools))
    kept[name] = {prompt: _medians(rows) for prompt, rows in found.items()}
    load.append(os.getloadavg()[0])
  machine.keep(
    "prefill_apart",
    repeats=_REPEATS.value,
    sessions=_SESSIONS.value,
    answer=_ANSWER,
    load=load,
    shares=POOLS,
    pools=kept,
  )


if __name__ == "__main__":
  app.run(main)
