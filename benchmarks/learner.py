"""Training speed: the learner as the coordinator calls it against a bare step.

  python -m benchmarks.learner [--repeats=5]

Both sides take the same packed batch of the README's run through the same model
to the same clipped surrogate and AdamW step. The bare side is one jitted
function of (params, optimizer state, batch), called in a plain loop. The
learner's side goes through its mesh thread and the event loop, packs the rows
from trajectories, places them, accumulates, and updates, waiting after each.
The two take turns; medians of tokens (of all trained rows) a second are
compared. Writes benchmarks/results/learner.json.
"""

import asyncio
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from launch.cli import flags, jax_setup
from rl import assemble, initial_state
from rl.algorithms import packed_row
from rl.data import batch, trajectory
from rl.train import learner

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each side.")
_STEPS = absl_flags.DEFINE_integer("steps", 20, "Of each repeat.")


def _episodes(count: int) -> list[trajectory.Trajectory]:
  """Returns games of five turns: 2 ids of context and 2 sampled ones each."""
  random = np.random.default_rng(0)

  def turn() -> trajectory.Turn:
    return trajectory.Turn(
      context=random.integers(3, 29, 2).astype(np.int32),
      tokens=random.integers(3, 29, 2).astype(np.int32),
      logprobs=np.full(2, -3.0, np.float32),
      versions=np.zeros(2, np.int32),
      stop="stop",
    )

  return [
    trajectory.Trajectory(
      task_id="benchmark",
      group_id=i,
      index=0,
      turns=[turn() for _ in range(5)],
      status=trajectory.Status.COMPLETED,
      reward=1.0,
    )
    for i in range(count)
  ]


def _bare_step(parts: assemble.Parts):
  """Returns one jitted function that does a whole step."""
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
    ) / tokens

  @jax.jit
  def step(params, opt_state, packed):
    grads = jax.grad(loss)(params, packed)
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state

  return step


async def _measure(parts: assemble.Parts) -> dict[str, float]:
  shape = parts.experiment.batch
  episodes = _episodes(shape.rows * (shape.length // 20))
  draws = np.random.default_rng(1).normal(size=len(episodes))
  values = [
    np.full(one.num_sampled, value, np.float32)
    for one, value in zip(episodes, draws, strict=True)
  ]
  state = await parts.learner_thread.run(
    "init", initial_state.fresh_state, parts.programs, 0
  )
  step = _bare_step(parts)

  def pack():
    packed = batch.pack(episodes, **dataclasses.asdict(shape), version=0)
    return batch.with_column(packed, "advantages", values).batches

  (packed,) = pack()
  bare_packed = parts.programs.place(packed)
  optimizer = parts.experiment.optimizer()
  bare = (state.params, jax.jit(optimizer.init)(state.params))

  async def ours():
    nonlocal state
    (rows,) = pack()
    total = await parts.learner_thread.run("zero", parts.programs.zero)
    total = await parts.learner_thread.run(
      "accumulate",
      lambda: parts.programs.accumulate(
        state.params, total, parts.programs.place(rows)
      ),
    )
    state, _ = await parts.learner_thread.run(
      "update", parts.programs.update, state, total
    )

  # Twice: what a step returns may lie elsewhere than what it was begun with.
  for _ in range(2):
    bare = jax.block_until_ready(step(*bare, bare_packed))
    await ours()
  tokens = int((packed.segments > 0).sum())
  rates, bare_rates = [], []
  for _ in range(_REPEATS.value):
    start = time.monotonic()
    for _ in range(_STEPS.value):
      await ours()
    rates.append(tokens * _STEPS.value / (time.monotonic() - start))
    start = time.monotonic()
    for _ in range(_STEPS.value):
      bare = jax.block_until_ready(step(*bare, bare_packed))
    bare_rates.append(tokens * _STEPS.value / (time.monotonic() - start))
  ratios = [a / b for a, b in zip(rates, bare_rates, strict=True)]
  return {
    "learner tokens/s": statistics.median(rates),
    "bare step tokens/s": statistics.median(bare_rates),
    "ratio": statistics.median(ratios),
    "ratio min": min(ratios),
    "ratio max": max(ratios),
  }


def main(argv: list[str]) -> None:
  """Measures both sides in turn and prints the medians and their ratio."""
  del argv
  experiment = flags.load("configs/guess_number_moe.py")
  jax_setup.prepare(experiment.placement)
  row = asyncio.run(_run(assemble.build(experiment)))
  print(machine.describe())
  for name, value in row.items():
    print(f"{name:28} {value:10.3f}")
  machine.keep("learner", **row)


async def _run(parts: assemble.Parts) -> dict[str, float]:
  try:
    return await _measure(parts)
  finally:
    await parts.close()


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
