# %% [markdown]
# # First steps
#
# **Question.** What happens to a token from the moment it is sampled until it
# has changed the policy?
#
# These are the parts that `python -m launch.train` runs, one at a time: roll
# out four groups, look at a trajectory, take one gradient step, publish the
# weights.

# %% tags=["colab"]
# In Colab: asks for the wheel that "Getting started" makes, as
# dist/twinmesh-*.whl, and installs it. Does nothing elsewhere.
import importlib
import subprocess
import sys

if "google.colab" in sys.modules:
  (wheel,) = importlib.import_module("google.colab.files").upload()
  command = [sys.executable, "-m", "pip", "install", f"./{wheel}[envs]"]
  subprocess.run(command, check=True)

# %%
import asyncio
import threading

from launch.cli import flags, jax_setup
from launch.run import rollout_samples
from rl import assemble, initial_state
from rl.algorithms import group_selection
from rl.data import batch
from rl.rollout import group_rollout
from rl.train import train_state

# %% [markdown]
# ## Settings
#
# Settings are a typed, frozen tree, and overrides are those of the command
# line. These make a model that compiles in seconds. The agent has to find a
# number from 1 to 20 in five guesses, from nothing but "higher" and "lower".

# %%
experiment = flags.load(
  "configs/guess_number_moe.py",
  {
    "model.num_layers": "2",
    "model.d_model": "32",
    "model.d_expert": "32",
    "model.num_heads": "2",
    "model.head_dim": "16",
    "rollout.group_size": "8",
    "overlap.groups_per_round": "4",
    "overlap.groups_per_microbatch": "4",
    "engine.slots": "32",
    "engine.row_buckets": "32,",
    "engine.chunk_buckets": "8,",
    "batch.rows": "8",
    "warm_start.optimizer.learning_rate": "0.005",
  },
)
jax_setup.prepare(experiment.placement)

# %% [markdown]
# ## Build
#
# One function wires everything. The learner and the decode pool get a mesh of
# their own: on a laptop those are two virtual devices of the CPU, so what you
# see below is what a pod does.

# %%
parts = assemble.build(experiment)
print("learner:", parts.learner_layout.devices)
print("decode: ", parts.decode_layouts[0].devices)

# %% [markdown]
# The parts live on one event loop. A thread of its own keeps it running, since
# a notebook has a loop already.

# %%
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()


def run(work):
  """Runs a coroutine on the loop of the parts and returns its result."""
  return asyncio.run_coroutine_threadsafe(work, loop).result()


# %% [markdown]
# ## Warm up
#
# A few supervised steps on demonstrations teach the form of an answer. Then the
# engine starts, and serves version 0 of the policy.

# %%
state = run(initial_state.create(parts))
run(parts.start(state, 0))
print("served version:", parts.router.stats().version)

# %% [markdown]
# ## Roll out four groups
#
# A group is several episodes of one task. They are sampled side by side, each
# on its own timeline.


# %% tags=["varies"]
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


groups = run(roll_out(4))
for group in groups:
  rewards = [member.reward for member in group.trajectories]
  print("rewards", *(f"{reward:g}" for reward in rewards))

# %% [markdown]
# Members of a group had the same number to find. Where their rewards differ,
# the group says which answers were better; where all are equal it teaches
# nothing.
#
# ## Look at a trajectory
#
# On the left of each arrow what the agent was shown, on the right what it
# sampled: every id with its log-probability and the version of the policy that
# sampled it. Both travel with the token to the learner.

# %% tags=["varies"]
member = max(groups[0].trajectories, key=lambda one: len(one.turns))
for turn in rollout_samples.readable(member, parts.chat)["turns"]:
  said = [
    f"{word} ({logprob:.2f}, v{version})"
    for word, logprob, version in zip(
      turn["words"], turn["logprobs"], turn["versions"], strict=True
    )
  ]
  print(" ".join(turn["context_words"]), "->", ", ".join(said))
print("status", member.status.value, "reward", member.reward)

# %% [markdown]
# ## Take one update
#
# Rewards become advantages: how much better a member did than its group.
# Trajectories become packed rows, and the learner accumulates a gradient over
# them and applies it once.

# %% tags=["varies"]
selection = group_selection.select(groups, experiment.algorithm.advantage)
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
  if total is None:
    raise ValueError("in each group all members did equally well")
  return parts.programs.step(state, total)


state, metrics = run(parts.learner_thread.run("update", train, state))
for name in ("entropy", "grad_norm", "behaviour_kl"):
  print(f"{name:14} {metrics[name]:.4g}")

# %% [markdown]
# `behaviour_kl` is next to 0: the policy that trains is the one that sampled,
# up to the rounding of two different programs. In a run that overlaps, it is a
# version or more ahead. `docs/metrics.md` explains every metric.
#
# ## Publish
#
# The new weights go to the decode mesh. From then on the engine serves version
# 1, and tokens say so.

# %%
run(parts.publisher.publish(1, state.params, "recompute"))
print("served version:", parts.router.stats().version)
again = run(roll_out(1))[0].trajectories[0]
sampled_by = {version for turn in again.turns for version in turn.versions}
print("sampled by versions", sorted(int(version) for version in sampled_by))

# %%
run(parts.close())

# %% [markdown]
# **What to take along.** A token carries its log-probability and version from
# the engine to the loss; nothing is sampled twice and no id is guessed from
# text. A run does these steps all at once, on both meshes, within a bound on
# staleness: see the notebook on schedules.
#
# *Exercise.* Set `rollout.group_size` to `2`. How often does a group teach
# nothing?
