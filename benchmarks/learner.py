"""Training speed: the learner as the coordinator calls it against a bare step.

  python -m benchmarks.learner [--repeats=5]

Both sides take the same packed batches of the README's run through the same
model to the same clipped surrogate and AdamW step: an update of one batch, and
one of four. The bare side is one jitted function of (params, optimizer state,
batches), called in a plain loop with batches that lie on the mesh. The
learner's side goes through its mesh thread and the event loop, packs the rows
from trajectories, places them, accumulates, updates, and fetches the metrics.
The two take turns and wait after each update; medians of tokens (of all trained
rows) a second are compared. The same for the process's CPU seconds, which on a
CPU that others use too say more. The learning rate is next to 0: routers that
learn would give the two sides different work. Writes
benchmarks/results/learner.json.
"""

import asyncio
import dataclasses
import functools
import statistics
import time
from collections.abc import Awaitable, Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app
from absl import flags as absl_flags

from benchmarks import machine, small_parts
from launch.cli import flags, jax_setup
from rl import assemble, initial_state
from rl.algorithms import packed_row
from rl.data import batch, trajectory
from rl.train import learner, trainer

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each side.")
_STEPS = absl_flags.DEFINE_integer("steps", 12, "Batches of each repeat.")

_BATCHES = (1, 4)


def _episodes(count: int) -> list[trajectory.Trajectory]:
  """Returns games of five turns: 2 ids of context and 2 sampled ones each."""
  random = np.random.default_rng(0)

  def turn() -> trajectory.Turn:
    context, tokens = random.integers(3, 29, (2, 2)).astype(np.int32)
    return small_parts.turn(context, tokens, -3.0)

  return [
    small_parts.episode([turn() for _ in range(5)], group=i)
    for i in range(count)
  ]


def _bare_step(parts: assemble.Parts):
  """Returns one jitted function that does a whole step on a few batches."""
  experiment = parts.experiment
  optimizer = experiment.optimizer()

  def loss(params, packed):
    scored = learner.score_tokens(
      params,
      None,
      packed,
      config=experiment.model,
      layout=parts.learner_layout,
      temperature=experiment.rollout.temperature,
    )
    algorithm = experiment.algorithm
    rows = packed_row.Row(
      logprobs=scored.logprobs,
      old=packed.behaviour,
      behaviour=packed.behaviour,
      advantages=packed.advantages,
      sampled=packed.sampled,
      segments=packed.segments,
    )
    total = jax.vmap(algorithm.loss)(rows).loss
    aux = scored.aux
    assert aux is not None  # The model has experts.
    tokens = packed.sampled.sum()
    bonus = jnp.where(packed.sampled, scored.entropy, 0).sum()
    return (
      total.sum()
      - algorithm.entropy_bonus * bonus
      + algorithm.balance_weight * aux.load_balance * tokens
    )

  @jax.jit
  def step(params, opt_state, batches):
    tokens = sum(packed.sampled.sum() for packed in batches)
    grads = [jax.grad(loss)(params, packed) for packed in batches]
    grads = jax.tree.map(lambda *parts: sum(parts) / tokens, *grads)
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state

  return step


async def _measure(parts: assemble.Parts, num_batches: int) -> dict[str, float]:
  shape = parts.experiment.batch
  episodes = _episodes(num_batches * shape.rows * (shape.length // 20))
  values = small_parts.advantages(episodes, np.random.default_rng(1))
  pack = functools.partial(batch.pack, **dataclasses.asdict(shape), version=0)
  state = await parts.learner_thread.run(
    "init", initial_state.fresh_state, parts.programs, 0
  )
  packed = batch.with_column(pack(episodes), "advantages", values).batches
  assert len(packed) == num_batches
  placed = [parts.programs.place(rows) for rows in packed]
  step = _bare_step(parts)
  bare = (
    state.params,
    jax.jit(parts.experiment.optimizer().init)(state.params),
  )

  async def ours():
    nonlocal state
    update = trainer.Accumulation(parts.programs, parts.learner_thread, pack)
    await update.add(state, episodes, {"advantages": values})
    await update.flush(state)
    state, _ = await update.step(state, 0.0)

  async def bare_step():
    nonlocal bare
    bare = jax.block_until_ready(step(*bare, placed))

  sides = {"learner": ours, "bare step": bare_step}
  # Twice: what a step returns may lie elsewhere than what it was begun with.
  for _ in range(2):
    for side in sides.values():
      await side()
  count = _STEPS.value // num_batches
  seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for _ in range(_REPEATS.value):
    for name, side in sides.items():
      seconds[name].append(await _seconds(side, count))
  tokens = count * sum(np.count_nonzero(rows.segments) for rows in packed)
  found: dict[str, float] = {"batches": num_batches}
  for kind, index in (("", 0), ("CPU ", 1)):
    rates = {
      name: [tokens / taken[index] for taken in turns]
      for name, turns in seconds.items()
    }
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    for name, own in rates.items():
      found[f"{name} tokens/{kind}s"] = statistics.median(own)
    found |= machine.spread(f"{kind}ratio", ratios)
  return found


async def _seconds(
  side: Callable[[], Awaitable[None]], count: int
) -> tuple[float, float]:
  """Returns wall and CPU seconds of so many updates."""
  wall, cpu = time.monotonic(), time.process_time()
  for _ in range(count):
    await side()
  return time.monotonic() - wall, time.process_time() - cpu


def main(_: list[str]) -> None:
  """Measures both sides in turn and prints the medians and their ratio."""
  experiment = flags.load("configs/guess_number_moe.py")
  still = dataclasses.replace(experiment.optimizer, learning_rate=1e-12)
  experiment = dataclasses.replace(experiment, optimizer=still)
  jax_setup.prepare(experiment.placement)
  rows = asyncio.run(_run(assemble.build(experiment)))
  print(machine.describe())
  machine.show("the learner and the bare step", rows)
  machine.keep("learner", rows=rows)


async def _run(parts: assemble.Parts) -> list[dict[str, float]]:
  try:
    return [await _measure(parts, number) for number in _BATCHES]
  finally:
    await parts.close()


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
