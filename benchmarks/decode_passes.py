"""Why five turns take the engine longer than the bare step of decode_floor.

  python -m benchmarks.decode_passes [--repeats=5]

Both decode the five turns of `decode_load` in one process, in turn. A pass is
one use of all weights: a step of decoding, or one that encodes context. Printed
and kept in benchmarks/results/decode_passes.json, as medians of a load: passes,
ids of a pass, the share of these that somebody asked for (the rest are idle
rows, and padding of contexts), and CPU seconds of the event loop and of all
else, which is the programs.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import (
  decode_engine,
  decode_floor,
  decode_load,
  machine,
  small_parts,
)
from rl.engine import contract
from rl.engine.builtin import decode_step
from rl.engine.builtin import engine as builtin_engine

_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds of each load.")

_KIND = "five"
_CONCURRENCIES = (8, 64)


class _Counted:
  """The `advance` of an engine's runner, which counts passes and ids.

  Attributes:
    passes, ids, wanted: so far.
  """

  def __init__(self, served: builtin_engine.BuiltinEngine):
    self._advance = served._runner.advance
    served._runner.advance = self
    self.passes = self.ids = self.wanted = 0

  def __call__(
    self, params: Any, plan: decode_step.DispatchPlan, *args: Any, **kwargs: Any
  ) -> decode_step.Sampled:
    sampled = self._advance(params, plan, *args, **kwargs)
    steps = max(int(sampled.counts.max()), 1) - 1
    self.passes += 1 + steps
    self.ids += plan.num_ids + steps * plan.rows
    self.wanted += int(plan.integers[:, decode_step.NEW].sum())
    self.wanted += int(np.maximum(sampled.counts - 1, 0).sum())
    return sampled


def _bare_passes(rows: int, seed: int) -> tuple[int, int, int]:
  """Returns passes, ids, and ids that somebody asked for, of the bare step."""
  load = decode_load.conversations(_KIND, rows, seed)
  tokens, turns = decode_load.num_tokens(load), len(load[0])
  steps, context = -(-tokens // rows), sum(len(t.context) for t in load[0])
  # The first token of a turn comes with its context.
  ids = rows * (context + steps - turns)
  return steps, ids, rows * (context - turns) + tokens


async def _measure(
  served: contract.StartableEngine, repeats: int
) -> dict[str, dict[str, Mapping[str, float]]]:
  assert isinstance(served, builtin_engine.BuiltinEngine)
  counted = _Counted(served)
  params = small_parts.weights(decode_engine.MODEL)
  found: dict[str, dict[str, Mapping[str, float]]] = {}
  for rows in _CONCURRENCIES:
    bare = decode_floor.floor(decode_engine.MODEL, params, rows)
    taken: dict[str, list[dict[str, float]]] = {"engine": [], "bare step": []}
    # The first load compiles.
    for seed in [0, *range(repeats)]:
      counted.passes = counted.ids = counted.wanted = 0
      loop_s = time.thread_time()
      wall_s, cpu_s, _ = await decode_engine.play(served, _KIND, rows, seed)
      loop_s = time.thread_time() - loop_s
      counts = counted.passes, counted.ids, counted.wanted
      taken["engine"].append(_row(*counts, wall_s, cpu_s - loop_s, loop_s))
      wall_s, cpu_s, _ = await asyncio.to_thread(bare, _KIND, seed)
      counts = _bare_passes(rows, seed)
      taken["bare step"].append(_row(*counts, wall_s, cpu_s, 0.0))
    found[str(rows)] = {
      side: machine.medians(some[1:]) for side, some in taken.items()
    }
  return found


def _row(
  passes: int, ids: int, wanted: int, wall_s: float, cpu_s: float, loop_s: float
) -> dict[str, float]:
  return {
    "passes": passes,
    "ids a pass": ids / passes,
    "wanted": wanted / ids,
    "wall s": wall_s,
    "programs, CPU s": cpu_s,
    "event loop, CPU s": loop_s,
  }


async def _run() -> dict[str, dict[str, Mapping[str, float]]]:
  async with decode_engine.started(decode_engine.BUILT_IN) as served:
    return await _measure(served, _REPEATS.value)


def main(_: list[str]) -> None:
  """Measures, prints and keeps both loads."""
  print(machine.describe())
  found = asyncio.run(_run())
  for rows, sides in found.items():
    for side, row in sides.items():
      cells = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
      print(f"{rows:>3} conversations, {side:9} {cells}")
  machine.keep("decode_passes", **found)


if __name__ == "__main__":
  app.run(main)
