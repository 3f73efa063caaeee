# %% [markdown]
# # Analyse runs
#
# **Question.** Two runs differ in one setting. Which one learned more, is the
# difference more than luck, and what held the other back?
#
# Everything that a run knows is in its directory, as lines of JSON.
# `launch.report.run_data` reads them into arrays.

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

import matplotlib.pyplot as plt
import numpy as np

from launch.report import notebook, run_data

notebook.use_style()

# %% [markdown]
# ## Two runs of seconds
#
# The task of `configs/next_letter.py`: answer a letter with the one that
# follows. Both runs have the same seed, warm start and tasks; only the learning
# rate differs. Which samples a round in flight gets depends on the clock, so
# the same run, repeated, is another one: its success may differ by 20 points.

# %%
SMALL = {
  "rounds": 30,
  "model.num_layers": 1,
  "model.d_model": 32,
  "model.d_expert": 32,
  "model.num_heads": 2,
  "model.head_dim": 16,
  "engine.slots": 64,
  "engine.compile_ahead": "false",
  "rollout.group_size": 16,
  "overlap.groups_per_round": 8,
  "batch.rows": 16,
  "warm_start": "warm_start(steps=30, episodes=32, exploration=0.7)",
  "warm_start.optimizer.learning_rate": 0.003,
}


def train(rate):
  """Trains with a learning rate; returns the data of the run."""
  changes = SMALL | {"optimizer.learning_rate": rate}
  workdir = f"runs/rate_{rate:g}"
  command = [
    *(sys.executable, "-m", "launch.train", "--config=configs/next_letter.py"),
    *(f"--config.{name}={value}" for name, value in changes.items()),
    *(f"--workdir={workdir}", "--quiet"),
  ]
  subprocess.run(command, check=True, capture_output=True)
  return run_data.read(workdir)


slow, quick = train(0.001), train(0.01)
runs = {"rate 0.001": slow, "rate 0.01": quick}

# %% [markdown]
# ## What differs
#
# First make sure that the runs differ in what you think they do. `settings` has
# every setting by its name.

# %%
for name in slow.settings:
  values = [run.settings.get(name) for run in runs.values()]
  if values[0] != values[1]:
    print(name, *values)

# %% [markdown]
# ## Which one learned more?
#
# A round has 128 episodes, so its success jumps. Drawn bold is the mean of five
# rounds; dots are evaluations on held-out tasks with 95 % intervals.


# %%
def smooth(values, width=5):
  """Returns means of `width` neighbours."""
  return np.convolve(values, np.ones(width) / width, "valid")


# %% tags=["varies"]
figure, axes = plt.subplots(figsize=(7.5, 3.8))
for (name, run), colour in zip(runs.items(), notebook.COLOURS, strict=False):
  rounds, success = run.metrics["round"], run.metrics["success"]
  held_out = run.evaluations
  around = [
    held_out["success"] - held_out["low"],
    held_out["high"] - held_out["success"],
  ]
  axes.plot(rounds, success, color=colour, alpha=0.35)
  axes.plot(rounds[2:-2], smooth(success), color=colour, lw=2, label=name)
  axes.errorbar(
    held_out["round"],
    held_out["success"],
    around,
    color=colour,
    fmt="o",
    capsize=3,
  )
axes.set(xlabel="round", ylabel="success", ylim=(0, 1))
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Is it more than luck?
#
# Compare intervals, not points. Both runs were evaluated on the same 200 tasks
# after their last round; if the intervals do not touch, the difference is more
# than the luck of these episodes. (It may still be the luck of one seed: for a
# claim, train several and let `launch.view` draw bands.)

# %% tags=["varies"]
last = {
  name: [run.evaluations[key][-1] for key in ("low", "success", "high")]
  for name, run in runs.items()
}
for name, (low, success, high) in last.items():
  print(f"{name:10}: {success:.1%}, between {low:.1%} and {high:.1%}")
lows, _, highs = zip(*last.values(), strict=True)
apart = max(lows) > min(highs)
print("the intervals", "do not touch" if apart else "touch")

# %% [markdown]
# ## What held the other back?
#
# Four metrics that answer most questions of this kind:
#
# - `entropy`: does the policy still try different answers?
# - `zero_variance_groups`: how many groups of a round taught nothing, because
#   all their members did equally well (or badly)?
# - `grad_norm`: is there a signal?
# - `behaviour_kl`: how far is the policy from the one that sampled, in nats? It
#   grows with the lag of the samples and the size of the steps.

# %% tags=["varies"]
names = ["entropy", "zero_variance_groups", "grad_norm", "behaviour_kl"]
figure, grid = plt.subplots(2, 2, figsize=(10, 5), sharex=True)
for axes, metric in zip(grid.flat, names, strict=True):
  for name, run in runs.items():
    axes.plot(run.metrics["round"], run.metrics[metric], label=name)
  axes.set_title(metric)
grid[1, 1].set_yscale("log")
grid[0, 0].legend()
for axes in grid[1]:
  axes.set_xlabel("round")
plt.show()

# %% [markdown]
# **What to see.** With the high rate entropy falls as the policy settles on
# answers, and its distance from the policy that sampled is several times as
# large: it moves. With the low rate the entropy changes less, although the
# gradient is of the same order: the signal is there, and the steps are too
# small.

# %% [markdown]
# ## Were the samples late?
#
# Both runs overlap: a round is sampled while the one before trains.
# `staleness_max` says how many versions the oldest group of a round was late,
# and the setting says what is allowed.

# %%
for name, run in runs.items():
  bound = run.settings["overlap.max_staleness"]
  print(
    f"{name}: at most {run.metrics['staleness_max'].max():.0f} late, "
    f"allowed {bound}"
  )

# %% [markdown]
# ## Down to the tokens
#
# Some rounds are kept in full, token by token. How sure is the policy of the
# answers that it samples? Below is the mean probability of a sampled token in
# each kept round.


# %% tags=["varies"]
def kept_rounds(run):
  """Returns the rounds whose episodes were kept."""
  files = (run.path / "trajectories").glob("*.jsonl")
  return sorted(int(path.stem[-6:]) for path in files)


def certainty(run, number):
  """Returns the mean probability of a sampled token of a kept round."""
  turns = [turn for one in run.trajectories(number) for turn in one["turns"]]
  return np.exp(np.concatenate([turn["logprobs"] for turn in turns])).mean()


sure = {
  name: {number: certainty(run, number) for number in kept_rounds(run)}
  for name, run in runs.items()
}
for name, by_round in sure.items():
  shown = [f"round {n}: {share:.2f}" for n, share in by_round.items()]
  print(f"{name:10} ", ", ".join(shown))

# %% [markdown]
# **What to take along.** Check that the runs differ in one thing; compare
# intervals; then look for the metric that explains the difference, and at last
# at tokens. `pandas.DataFrame(run.metrics)` is a table, `docs/metrics.md`
# explains every name, and `python -m launch.view runs` shows all of this and
# more as a page.
#
# *Exercise.* Add a run with a rate of 0.1. Which metric warns first?
