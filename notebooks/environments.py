# %% [markdown]
# # Write an environment
#
# **Question.** You have a task in mind. How little code makes it one that an
# agent learns, and how do you know that it is sound before you train on it?
#
# The task here: count down to 0. The agent sees a number and answers with the
# one below, turn by turn. It starts without knowing any number.

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
import os
import pathlib

import matplotlib.pyplot as plt

from launch.report import notebook, run_data

notebook.use_style()

# %% [markdown]
# ## The task
#
# The cell below writes a file, which is all that a run needs. `Countdown` is a
# *source*: it makes tasks, and an environment for each. `Count` is an
# environment, for one episode: `start` returns the first messages, `step` takes
# the agent's answer and returns messages, a reward, and whether it is over.
# Text in, text out; ids and masks are not its business.
#
# `oracle` and `explore` are optional. They let a run begin with a few
# supervised steps that teach the form of an answer.

# %%
# %%writefile my_task.py
"""Count down to 0: the agent answers a number with the one below it."""

import dataclasses
import random

from configs import guess_number_moe
from envs import base
from rl.settings import overrides

DIGITS = tuple("0123")


@dataclasses.dataclass(frozen=True)
class Countdown:
  """Tasks of one to three turns; the reward is the share of right answers."""

  name = "countdown"
  words = DIGITS

  def task(self, index, split):
    """Returns the task at a position; its seed is the first number."""
    seed = random.Random(f"{split}/{index}").randint(1, 3)
    return base.Task(f"{self.name}/{split}/{index}", index, split, seed)

  def __call__(self, task):
    """Returns a fresh environment, for one episode."""
    return Count(task.seed)

  def oracle(self, task, messages):
    """Returns the right answer."""
    return str(int(messages[-1].content) - 1)

  def explore(self, task, messages, seed):
    """Returns a random answer."""
    return random.Random(seed).choice(DIGITS)


class Count:
  def __init__(self, number):
    self.number = number
    self.share = 1 / number

  async def start(self):
    return [base.Message("user", str(self.number))]

  async def step(self, answer):
    if answer.content.strip() != str(self.number - 1):
      return base.Step([], reward=0.0, done=True)
    self.number -= 1
    shown = [base.Message("user", str(self.number))] if self.number else []
    return base.Step(shown, reward=self.share, done=not self.number)

  async def close(self):
    pass


def get_config():
  """Returns a run of half a minute: that of another game, made smaller."""
  run = dataclasses.replace(
    guess_number_moe.get_config(), environment=Countdown(), rounds=25
  )
  return overrides.apply(
    run,
    {
      "model.num_layers": "1",
      "model.d_model": "32",
      "model.d_expert": "32",
      "model.num_heads": "2",
      "model.head_dim": "16",
      "engine.slots": "64",
      "engine.compile_ahead": "false",
      "rollout.group_size": "16",
      "overlap.groups_per_round": "8",
      "batch.rows": "16",
      "optimizer.learning_rate": "0.01",
      "warm_start.episodes": "32",
      "warm_start.exploration": "0.5",
      "warm_start.optimizer.learning_rate": "0.003",
    },
  )


# %% [markdown]
# ## Is it sound?
#
# Before you train, let the task be played without a model. This prints an
# episode as a model would see it, and checks what goes wrong most often: tasks
# that are not repeatable, environments that block, rewards that junk can earn.


# %% tags=["varies"]
def call(*arguments):
  """Runs a command of the library and prints what it says."""
  process = subprocess.run(
    [sys.executable, "-m", *arguments],
    env=os.environ | {"NO_COLOR": "1"},
    capture_output=True,
    text=True,
    check=False,
  )
  print(process.stdout if process.returncode == 0 else process.stderr)
  return process


tried = call("launch.try_environment", "--config=my_task.py")

# %% [markdown]
# In the episode on top, `[brackets]` are what the agent says, and what is
# trained. The last line is the verdict. Two of the checks are worth a second
# look: *junk* says that no nonsense earns a reward, and *repeats* that the same
# answers bring the same replies, without which a run could not be resumed.

# %% [markdown]
# ## Does an agent learn it?
#
# 25 rounds of eight groups of 16 episodes, after a warm start in which half of
# the answers are random.

# %% tags=["varies"]
trained = call(
  "launch.train", "--config=my_task.py", "--workdir=runs/countdown", "--quiet"
)

# %% [markdown]
# The run checks itself at its end: the last line says how late groups were
# trained, and that each sampled token is accounted for.

# %%
run = run_data.read("runs/countdown")
success, held_out = run.metrics["success"], run.evaluations

# %% tags=["varies"]
figure, axes = plt.subplots(figsize=(7, 3.6))
axes.plot(run.metrics["round"], success, label="training episodes")
axes.errorbar(
  held_out["round"],
  held_out["success"],
  [
    held_out["success"] - held_out["low"],
    held_out["high"] - held_out["success"],
  ],
  fmt="o",
  capsize=3,
  label="held-out tasks",
)
axes.set(xlabel="round", ylabel="success", ylim=(0, 1.05))
axes.legend(loc="lower right")
plt.show()

# %% tags=["varies"]
for number, share in zip(held_out["round"], held_out["success"], strict=True):
  print(f"after round {number:2.0f}: {share:.0%} of the episodes get to 0")

# %% [markdown]
# **What to see.** The warm start brings a third of the episodes to 0, by luck
# and a little knowledge. Reinforcement learning does the rest within 25 rounds.
# An episode counts as a success when its reward is 1: each answer is right.

# %% [markdown]
# ## Look at episodes
#
# Numbers can lie; read what was said. Here is an episode of the least reward,
# of the first round that was kept and of the last.

# %% tags=["varies"]
folder = pathlib.Path("runs/countdown/trajectories")
rounds = sorted(int(path.stem[-6:]) for path in folder.glob("*.jsonl"))
worst = []
for number in (rounds[0], rounds[-1]):
  episode = min(run.trajectories(number), key=lambda one: one["reward"])
  worst.append(episode["reward"])
  print(f"round {number}, reward {episode['reward']:.2f}")
  for turn in episode["turns"]:
    print("  ", *turn["context_words"], "->", *turn["words"])

# %% [markdown]
# **What to take along.** An environment is two methods and a source. Try it
# before you train, give credit for parts of the way when success is rare at
# first, and read episodes. `docs/guides/environments.md` goes on from here:
# tools, games of other packages, processes, and rewards that are computed
# elsewhere.
#
# *Exercise.* Let only the last step earn a reward, and train in a directory of
# its own: one whose rounds are done is not trained again. How much longer does
# it take?
