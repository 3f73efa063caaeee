# %% [markdown]
# # Schedules and staleness, seen
#
# **Question.** Training and decoding each have a mesh of their own. How much
# time does a run save when they work at once, and how late does it train?
#
# Everything here is simulated: the real coordinator, gate and buffer run on a
# virtual clock, over engines and a learner that only wait. An afternoon of a
# cluster takes a second, and every number repeats.

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

from launch import simulated_timeline
from launch.report import notebook
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, learner, processor, simulate, workload
from rl.simulation import result as simulation_result

notebook.use_style()

# %% [markdown]
# ## A small cluster and a task with a long tail
#
# Two engines with 16 slots each, one learner. An episode has about four turns.
# Between them the environment takes a second, and sometimes half a minute: one
# slow episode holds up its group.

# %%
engine = processor.Speed(
  tau0_s=0.01, b0=8.0, slots=16, kv_tokens=1 << 16, update_s=1.0
)
cluster = simulate.Cluster(
  learner=learner.LearnerSpeed(token_s=4e-4, update_s=1.0),
  pools=(simulate.EnginePool(engines=2, speed=engine),),
  transfer_s=1.0,
)
game = workload.Workload(
  name="game",
  turns=distributions.LogNormal(mean=4.0, sigma=0.5, max_value=8.0),
  answer_tokens=distributions.LogNormal(mean=60.0, sigma=0.8),
  step_s=distributions.LogNormal(
    mean=1.0, sigma=1.0, tail_share=0.03, max_value=30.0
  ),
)
limits = group_rollout.Rollout(
  group_size=8, max_turns=8, turn_tokens=1000, max_tokens=10_000, step_s=600.0
)


def play(schedule):
  """Returns the record of 16 rounds under a schedule, and its result."""
  record = simulate.simulate(
    simulate.Simulation(
      cluster=cluster,
      workloads=(game,),
      overlap=schedule,
      rollout=limits,
      rounds=16,
    )
  )
  return record, simulation_result.measure(record)


# %% [markdown]
# ## Four schedules
#
# They play the same tasks with the same draws of the environment, so whatever
# differs is due to the schedule:
#
# - **sync**: decode a round, train it, publish, begin again;
# - **strict pipeline**: gradients of the first groups are computed while the
#   last ones still decode; the update waits for all of them;
# - **one step off**: the next round decodes while this one trains;
# - **in flight, 3 late**: up to three rounds ahead, and new weights arrive in
#   the middle of episodes.

# %%
schedules = {
  "sync": overlap.sync(8),
  "strict pipeline": overlap.strict_pipeline(8, 2),
  "one step off": overlap.one_step_off(8),
  "in flight, 3 late": overlap.in_flight(8, 3),
}
runs = {name: play(schedule) for name, schedule in schedules.items()}
results = {name: result for name, (_, result) in runs.items()}
for name, result in results.items():
  print(
    f"{name:>18}: {result.step_s:4.1f} s a round, overlap "
    f"{result.overlap:4.0%}, violations {len(result.violations)}"
  )

# %% [markdown]
# A round of *sync* takes about as long as decoding its slowest episode and
# training all of it, one after the other. Each schedule below it hides more of
# one behind the other.

# %% [markdown]
# ## Where the time goes
#
# A bar for each mesh: work, and the reasons for having none. Look at the orange
# part of the learner, *waits for groups*: that is what a schedule can win. The
# decode mesh stands still at the *gate* when the bound on staleness holds back
# the next group.

# %%
LABELS = {"data": "waits for groups", "drain": "waits for the last request"}


def bars(axes, title, parts):
  """Draws one bar a schedule; parts are shares of time by name."""
  left = dict.fromkeys(parts, 0.0)
  for cause in next(iter(parts.values())):
    shares = [parts[name][cause] for name in parts]
    axes.barh(
      [*parts], shares, left=[*left.values()], label=LABELS.get(cause, cause)
    )
    left = {
      name: left[name] + share
      for name, share in zip(parts, shares, strict=True)
    }
  axes.invert_yaxis()
  axes.set(title=title, xlim=(0, 1), xlabel="share of time")
  axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def with_work(idle):
  """Returns idle shares, with work first."""
  return {"work": 1.0 - sum(idle.values()), **idle}


learner_time = {n: with_work(r.learner_idle) for n, r in results.items()}
decode_time = {n: with_work(r.decode_idle) for n, r in results.items()}
figure, (left_axes, right_axes) = plt.subplots(1, 2, figsize=(11, 3.6))
bars(left_axes, "learner", learner_time)
bars(right_axes, "engines", decode_time)
right_axes.set_yticks([])
plt.show()

# %% [markdown]
# ## The same as a timeline
#
# First as a picture of *sync* and of *in flight*, a row for each part of the
# cluster; a full block is all of the time at work. In *sync* learner and
# engines take turns. In flight, both are busy at once.

# %%
for name in ("sync", "in flight, 3 late"):
  print(name)
  print(simulated_timeline.text(runs[name][0], 78))
  print()

# %% [markdown]
# And here with every span, for all four. **Choose a run** on top; drag over a
# stretch to look closer, and point at a span to read what it is. It is the
# timeline of the report of a real run, and works without a kernel. (Viewers
# that run no scripts show nothing here.)

# %%
notebook.timelines(
  {name: simulated_timeline.spans(record) for name, (record, _) in runs.items()}
)

# %% [markdown]
# ## The price: staleness
#
# A token is *k* versions late when *k* updates lie between the policy that
# sampled it and the one that trains on it. A wider bound allows later tokens
# and, up to a point, makes rounds shorter.

# %%
bounds = {
  eta: play(overlap.in_flight(8, eta) if eta else overlap.sync(8))[1]
  for eta in range(5)
}
figure, (left_axes, right_axes) = plt.subplots(1, 2, figsize=(11, 3.4))
left_axes.plot([*bounds], [r.step_s for r in bounds.values()], marker="o")
left_axes.set(
  title="time of a round", xlabel="bound on staleness", ylabel="seconds"
)
left_axes.set_ylim(0)
base = [0.0] * len(bounds)
for late in range(5):
  shares = [
    r.token_lags.get(late, 0) / sum(r.token_lags.values())
    for r in bounds.values()
  ]
  right_axes.bar([*bounds], shares, bottom=base, label=f"{late} late")
  base = [a + b for a, b in zip(base, shares, strict=True)]
right_axes.set(
  title="tokens by lateness", xlabel="bound on staleness", ylabel="share"
)
for axes in (left_axes, right_axes):
  axes.set_xticks([*bounds])
right_axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %%
for eta, result in bounds.items():
  latest = max(result.token_lags)
  print(f"bound {eta}: {result.step_s:4.1f} s, latest token {latest} late")

# %% [markdown]
# **What to take along.** The bound is kept: no token is later than it allows.
# Most of the time is won by the first steps away from *sync*; where the learner
# is busy all the time nothing more can be won, and a larger bound only makes
# tokens older. Whether that hurts is a matter of the loss: see the notebook on
# losses.
#
# *Exercise.* Make the environment quick (`step_s=distributions.Fixed(0.0)`). Is
# a bound of 3 still worth it?
