"""Rollout speed: the engine under real episodes against a bare jitted loop.

  python -m benchmarks.engine [--episodes=64] [--repeats=5]

Both sides sample from the model of configs/guess_number_moe.py at
`--episodes` concurrent rows on one device. The bare loop is
`decode_step.advance` alone, called over and over on full plans: no requests, no
environments, no event loop. The engine plays whole games of the real
environment through `rollout.Player`. Rates are sampled tokens a second over
the wall time; the two take turns and the medians are compared. Also prints how
much of a turn is host work: the wall time in which the mesh is idle, over the
turns played. Writes benchmarks/results/engine.json.
"""

import asyncio
import functools
import statistics
import time

import jax
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from launch import devices, flags
from models import cache as cache_lib
from rl import (
  assemble,
  decode_step,
  episode,
  learner,
  trace,
  trajectory,
)

_EPISODES = absl_flags.DEFINE_integer("episodes", 64, "Concurrent episodes.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each side.")
_GAMES = 8
"""Episodes played on each row, one after the other."""


async def _play(parts: assemble.Parts, number: int) -> tuple[float, int, int]:
  """Returns (seconds, sampled tokens, turns) of the engine."""
  slots = parts.experiment.engine.slots

  async def row(i: int) -> list[trajectory.Trajectory]:
    played = []
    for game in range(_GAMES):
      index = (number * _GAMES + game) * slots + i
      task = parts.experiment.environment.task(index, "train")
      played.append(
        await parts.player.member(episode.Episode(task, index, 0, 0))
      )
    return played

  start = time.monotonic()
  rows = await asyncio.gather(*(row(i) for i in range(slots)))
  seconds = time.monotonic() - start
  episodes = [one for played in rows for one in played]
  tokens = sum(one.num_sampled for one in episodes)
  return seconds, tokens, sum(len(one.turns) for one in episodes)


def _bare_loop(parts: assemble.Parts, state: learner.TrainState):
  """Returns a function that runs the decode program alone.

  Each dispatch feeds a turn's context of 3 ids and samples a turn's 2 tokens
  on every row, at the lengths of a game, and waits for nothing.
  """
  experiment, layout = parts.experiment, parts.decode_layout
  slots = experiment.engine.slots
  program = jax.jit(
    functools.partial(
      decode_step.advance,
      config=experiment.model,
      layout=layout,
      max_steps=experiment.engine.steps_per_dispatch,
      whole=True,
    ),
    donate_argnums=1,
  )
  rows = layout.sharding("batch")
  params = jax.device_put(state.params, parts.engine_shardings)
  cache = jax.device_put(
    cache_lib.init_cache(experiment.model, slots, experiment.model.max_length),
    layout.sharding(*cache_lib.AXES),
  )
  plans = []
  for turn in range(4):
    plan = decode_step.empty_plan(
      slots, min(experiment.engine.chunk_buckets), idle_row=slots
    )
    plan.integers[:, 0] = np.arange(slots)
    plan.integers[:, 1] = 4 * turn
    plan.integers[:, 2] = 3
    plan.integers[:, 3] = experiment.engine.steps_per_dispatch
    plan.chunk[:, :3] = 4
    plans.append(jax.device_put(plan, rows))

  def run(dispatches: int) -> tuple[float, int]:
    nonlocal cache
    start = time.monotonic()
    counts = []
    for i in range(dispatches):
      cache, sampled = program(params, cache, plans[i % len(plans)])
      counts.append(sampled.counts)
    tokens = int(sum(np.sum(count) for count in jax.device_get(counts)))
    return time.monotonic() - start, tokens

  return run


def main(argv: list[str]) -> None:
  """Measures both sides in turn and prints the medians and their ratio."""
  del argv
  slots = _EPISODES.value
  experiment = flags.load(
    "configs/guess_number_moe.py",
    {"engine.slots": str(slots), "engine.row_buckets": "32,"},
  )
  devices.prepare(experiment.placement)
  row = asyncio.run(_measure(assemble.build(experiment)))
  print(machine.describe())
  for name, value in row.items():
    print(f"{name:28} {value:10.3f}")
  machine.keep("engine", episodes=slots, **row)


async def _measure(parts: assemble.Parts) -> dict[str, float]:
  state = await assemble.initial_state(parts)
  await parts.start(state, trajectory.PolicyVersion(0))
  await _play(parts, 0)  # Imports the game.
  bare = _bare_loop(parts, state)
  bare(8)
  rates, bare_rates, host_us = [], [], []
  for number in range(1, _REPEATS.value + 1):
    first = len(parts.spans.spans)
    seconds, tokens, turns = await _play(parts, number)
    busy = trace.busy(parts.spans.spans[first:], "decode")
    idle_s = seconds - sum(end - start for start, end in busy)
    rates.append(tokens / seconds)
    host_us.append(1e6 * idle_s / turns)
    bare_s, bare_tokens = await asyncio.to_thread(bare, 200)
    bare_rates.append(bare_tokens / bare_s)
  await parts.close()
  ratios = [a / b for a, b in zip(rates, bare_rates, strict=True)]
  return {
    "engine tokens/s": statistics.median(rates),
    "bare loop tokens/s": statistics.median(bare_rates),
    "ratio": statistics.median(ratios),
    "ratio min": min(ratios),
    "ratio max": max(ratios),
    "host us a turn": statistics.median(host_us),
  }


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
