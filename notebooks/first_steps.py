# %% [markdown]
# # First steps
#
# The parts that `python -m launch.train` runs, one at a time: roll out two
# groups, look at a trajectory, take one gradient step, publish the weights.
# Opens in Jupyter (with jupytext), VS Code or Spyder; also runs as a script.

# %%
import asyncio
import dataclasses
import pathlib
import sys
import threading

ROOT = pathlib.Path(__file__).parents[1] if "__file__" in globals() else ".."
sys.path.insert(0, str(ROOT))

from launch.cli import flags, jax_setup

# Settings are a typed, frozen tree; overrides are those of the command line.
experiment = flags.load(
  f"{ROOT}/configs/guess_number_moe.py",
  {
    # Small enough to compile within seconds.
    "model.num_layers": "2",
    "model.d_model": "32",
    "model.d_expert": "32",
    "model.num_heads": "2",
    "model.head_dim": "16",
    "rollout.group_size": "4",
    "overlap.groups_per_round": "2",
    "overlap.groups_per_microbatch": "2",
    "engine.slots": "32",
    "engine.row_buckets": "32,",
    "engine.chunk_buckets": "8,",
    "batch.rows": "8",
    "warm_start.steps": "10",
  },
)
jax_setup.prepare(experiment.placement)

# %% [markdown]
# ## Build
# One function wires everything. The learner and the decode pool get a mesh of
# their own: on a laptop those are two virtual devices of the CPU.

# %%
from launch.run import rollout_samples
from rl import assemble, initial_state
from rl.algorithms import group_selection, presets
from rl.data import batch
from rl.rollout import group_rollout
from rl.train import train_state

parts = assemble.build(experiment)
print("learner:", parts.learner_layout.devices)
print("decode: ", parts.decode_layouts[0].devices)

# The parts live on one event loop; a thread of its own keeps it running here
# and in Jupyter alike.
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()


def run(work):
  """Runs a coroutine on the loop of the parts and returns its result."""
  return asyncio.run_coroutine_threadsafe(work, loop).result()


# %% [markdown]
# ## Warm up
# A few supervised steps from an oracle, then the engine compiles its shapes.

# %%
state = run(initial_state.create(parts))
run(parts.start(state, 0))
print(parts.router.stats())

# %% [markdown]
# ## Roll out two groups
# A group is G episodes of one task, each on its own timeline.


# %%
async def roll_out(count):
  """Plays `count` groups side by side."""
  plays = [
    group_rollout.GroupRollout(
      parts.player,
      parts.tasks.next(),
      group_id=i,
      seed=experiment.seed,
      admitted=0,
    )
    for i in range(count)
  ]
  return await asyncio.gather(*(play.run() for play in plays))


groups = run(roll_out(2))
for group in groups:
  rewards = [member.reward for member in group.trajectories]
  print(group.trajectories[0].task_id, "rewards", rewards)

# %% [markdown]
# ## Look at a trajectory
# Every id is kept as it was sampled, with its log-probability and the version
# of the policy that sampled it.

# %%
member = groups[0].trajectories[0]
for turn in rollout_samples.readable(member, parts.chat)["turns"]:
  said = [
    f"{word} ({logprob:.2f}, v{version})"
    for word, logprob, version in zip(
      turn["words"], turn["logprobs"], turn["versions"], strict=True
    )
  ]
  print(" ".join(turn["context_words"]), "->", ", ".join(said))
print(member.status, member.reward)

# %% [markdown]
# ## Take one update
# Rewards become advantages, trajectories become packed rows, and the learner
# accumulates a gradient and applies it once.

# %%
estimator = experiment.algorithm.advantage
selection = group_selection.select(groups, estimator)
packed = batch.pack(
  selection.members,
  rows=experiment.batch.rows,
  length=experiment.batch.length,
  version=0,
  share_prompts=experiment.batch.share_prompts,
)
estimate = selection.estimate()
packed = batch.with_column(packed, "advantages", estimate.advantages)


def train(state: train_state.TrainState):
  """Returns the state after one update, and its metrics."""
  total = None
  for rows in packed.batches:
    total = parts.programs.accumulate(state.params, total, rows)
  if total is None:  # All members did equally well.
    return state, {}
  return parts.programs.step(state, total)


state, metrics = run(parts.learner_thread.run("update", train, state))
print({name: round(value, 4) for name, value in metrics.items()})

# %% [markdown]
# ## Publish
# The new weights go to the decode mesh; the engine serves version 1.

# %%
run(parts.publisher.publish(1, state.params, "recompute"))
print("served version:", parts.router.stats().version)
again = run(roll_out(1))[0].trajectories[0]
print("sampled by version", again.turns[0].versions.tolist())

# %%
run(parts.close())

# %% [markdown]
# ## What to change
# The polymorphic settings are the callables themselves, so an experiment is a
# value: try another one.

# %%
print(
  dataclasses.replace(
    experiment, algorithm=presets.Rloo(entropy_bonus=0.01)
  ).algorithm
)
