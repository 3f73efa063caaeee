"""Rollout speed: the engine under real episodes against a bare jitted loop.

  python -m benchmarks.engine [--episodes=64] [--repeats=5]

Both sides sample from the model of configs/guess_number_moe.py at
`--episodes` concurrent rows on one device. The bare loop is
`decode_step.advance` alone, called over and over on full plans: no requests, no
environments, no event loop. The engine plays whole games of the real
environment through `group_rollout.Player`: a row that ends one begins another,
and the clock stops with the first that finds none left, as the bare loop's rows
are always full. Rates are sampled tokens a second, by wall time and by CPU
time, which depends less on what else the machine does; the two take turns and
the medians are compared. Also prints how much of a turn is host work: the wall
time in which the mesh is idle, and the CPU time of the event loop. Then one
more round says where the time of a dispatch goes (`dispatch_times`).
Writes benchmarks/results/engine.json.
"""

import asyncio
import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import dispatch_times, machine
from launch.cli import flags, jax_setup
from models import kv_cache
from models import policy as policy_lib
from rl import assemble, initial_state
from rl.data import trajectory
from rl.engine.builtin import decode_step, sizing
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings as engine_settings
from rl.rollout import episode
from rl.runtime import trace
from rl.train import train_state

_EPISODES = absl_flags.DEFINE_integer("episodes", 64, "Concurrent episodes.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each side.")
_GAMES = 12
"""Episodes for each row, in the mean."""


class _Played(NamedTuple):
  """A round of games: what it took while every row played, and all turns.

  Attributes:
    loop_s: CPU seconds of the event loop's thread.
    idle_s: seconds in which the mesh had nothing to do.
    tokens: sampled in that time.
    turns: in that time, by the tokens of a turn.
    all_turns: in all.
  """

  seconds: float
  cpu_s: float
  loop_s: float
  idle_s: float
  tokens: float
  turns: float
  all_turns: int


async def _play(parts: assemble.Parts, number: int) -> _Played:
  """Plays a round of games on the engine."""
  slots, (served,) = _EPISODES.value, parts.engines
  first = number * _GAMES * slots
  indices = iter(range(first, first + _GAMES * slots))
  ended: list[tuple[float, float, float, int]] = []

  def now() -> tuple[float, float, float, int]:
    tokens = served.stats().sampled_tokens
    now_s = parts.spans.now() - parts.spans.origin
    return now_s, time.process_time(), time.thread_time(), tokens

  async def row() -> list[trajectory.Trajectory]:
    played = []
    for index in indices:
      task = parts.experiment.environment.task(index, "train")
      played.append(
        await parts.player.play_alone(episode.Episode(task, index, 0, 0))
      )
    ended.append(now())
    return played

  first_span, began = len(parts.spans.spans), now()
  rows = await asyncio.gather(*(row() for _ in range(slots)))
  seconds, cpu_s, loop_s, tokens = (
    end - begin for begin, end in zip(began, ended[0], strict=True)
  )
  episodes = [one for played in rows for one in played]
  num_turns = sum(len(one.turns) for one in episodes)
  num_tokens = sum(one.num_sampled for one in episodes)
  turns = num_turns * tokens / num_tokens
  busy = trace.busy(parts.spans.spans[first_span:], "decode")
  idle_s = seconds - trace.intersection(busy, [(began[0], ended[0][0])])
  return _Played(seconds, cpu_s, loop_s, idle_s, tokens, turns, num_turns)


def _bare_loop(parts: assemble.Parts, state: train_state.TrainState):
  """Returns a function that runs the decode program alone.

  Each dispatch feeds a turn's context of 3 ids and samples a turn's 2 tokens
  on every row, at the lengths of a game, and waits for nothing.
  """
  experiment, (layout,) = parts.experiment, parts.decode_layouts
  model = experiment.model
  assert isinstance(experiment.engine, engine_settings.EngineSettings)
  settings = experiment.engine.sizes(model, [sizing.Room(layout)])
  slots, width = settings.slots, settings.width(model.max_length)
  chunks = (slots, min(settings.chunk_buckets))
  program = jax.jit(
    functools.partial(
      decode_step.advance,
      config=model,
      layout=layout,
      chunks=chunks,
      max_steps=settings.steps_per_dispatch,
    ),
    donate_argnums=(1, 2),
  )
  params = jax.device_put(state.params, layout.tree(policy_lib.of(model).axes))
  whole = layout.sharding()
  tables = np.arange(slots * width, dtype=np.int32).reshape(slots, width)
  cache = kv_cache.init_cache(model, slots * width, settings.page_size)
  biases = jnp.zeros((1, model.vocab_size))
  cache, carry, biases = jax.device_put(
    (cache, decode_step.init_carry(slots), biases), whole
  )
  plans = []
  for turn in range(4):
    plan = decode_step.empty_plan(slots, chunks, width, slots=slots)
    columns = plan.integers
    columns[:, decode_step.SLOT] = np.arange(slots)
    columns[:, decode_step.PAST] = 4 * turn
    columns[:, decode_step.NEW] = 3
    columns[:, decode_step.BUDGET] = settings.steps_per_dispatch
    columns[:, decode_step.STEPS] = settings.steps_per_dispatch
    plan.tables[:] = tables
    plan.ids[:] = 4
    plans.append(jax.device_put(plan, whole))

  def run(dispatches: int) -> tuple[float, float, int]:
    nonlocal cache, carry
    start, start_cpu = time.monotonic(), time.process_time()
    counts = []
    for i in range(dispatches):
      cache, carry, sampled = program(
        params, cache, carry, biases, plans[i % len(plans)]
      )
      counts.append(sampled.counts)
    tokens = int(sum(np.sum(count) for count in jax.device_get(counts)))
    return time.monotonic() - start, time.process_time() - start_cpu, tokens

  return run


def main(_: list[str]) -> None:
  """Measures both sides in turn and prints the medians and their ratio."""
  slots = _EPISODES.value
  experiment = flags.load(
    "configs/guess_number_moe.py",
    {"engine.slots": str(slots), "engine.row_buckets": f"32,{slots}"},
  )
  jax_setup.prepare(experiment.placement)
  row = asyncio.run(_measure(assemble.build(experiment)))
  print(machine.describe())
  machine.show("the engine and the bare loop", [row])
  machine.keep("engine", episodes=slots, **row)


async def _measure(parts: assemble.Parts) -> dict[str, float]:
  state = await initial_state.create(parts)
  await parts.start(state, 0)
  await _play(parts, 0)  # Imports the game.
  bare = _bare_loop(parts, state)
  bare(8)
  rates, bare_rates, cpu_ratios = [], [], []
  idle_us, cpu_us, loop_us = [], [], []
  for number in range(1, _REPEATS.value + 1):
    played = await _play(parts, number)
    tokens, turns = played.tokens, played.turns
    rates.append(tokens / played.seconds)
    idle_us.append(1e6 * played.idle_s / turns)
    loop_us.append(1e6 * played.loop_s / turns)
    bare_s, bare_cpu_s, bare_tokens = await asyncio.to_thread(bare, 200)
    bare_rates.append(bare_tokens / bare_s)
    cpu_ratios.append(tokens / played.cpu_s * bare_cpu_s / bare_tokens)
    cpu_us.append(1e6 * played.cpu_s / turns)
  (served,) = parts.engines
  assert isinstance(served, builtin_engine.BuiltinEngine)
  with dispatch_times.measured(served) as taken:
    played = await _play(parts, _REPEATS.value + 1)
  times = dispatch_times.summary(taken, played.all_turns)
  await parts.close()
  ratios = [a / b for a, b in zip(rates, bare_rates, strict=True)]
  return {
    "engine tokens/s": statistics.median(rates),
    "bare loop tokens/s": statistics.median(bare_rates),
    **machine.spread("ratio", ratios),
    "ratio by CPU time": statistics.median(cpu_ratios),
    "CPU us a turn": statistics.median(cpu_us),
    "event loop, CPU us a turn": statistics.median(loop_us),
    "mesh idle us a turn": statistics.median(idle_us),
    "turns a dispatch": times.turns,
    **{f"{step} us": us for step, us in times.steps_us.items()},
  }


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
