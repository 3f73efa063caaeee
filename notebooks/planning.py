# %% [markdown]
# # Plan a pod
#
# **Question.** You have a number of devices of two kinds. How many should
# train, how many decode, and under which schedule? What limits the answer?
#
# The planner simulates the run that you would start, with the real coordinator
# on a virtual clock. It touches no device.

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
import dataclasses

import matplotlib.pyplot as plt

from launch.report import notebook
from rl.planning import fleet, problem, search
from rl.rollout import group_rollout
from rl.simulation import distributions, processor, workload

notebook.use_style()

# %% [markdown]
# ## The fleet
#
# Six strong devices, of which some may train, and four cheap ones that only
# decode. An engine is described by a few numbers that can be measured: the time
# of a decode step (`tau0_s`), the number of rows at which it has doubled
# (`b0`), and its slots. `scaling` is what a learner keeps of its speed when it
# doubles.

# %%
strong = processor.Speed(
  tau0_s=0.010, b0=32.0, prefill_per_s=20_000.0, slots=16, update_s=1.0
)
cheap = processor.Speed(
  tau0_s=0.016, b0=32.0, prefill_per_s=5_000.0, slots=16, update_s=1.0
)
pod = fleet.Fleet(
  kinds=(
    fleet.DeviceKind(
      name="strong",
      count=6,
      cost=3.0,
      speed=strong,
      learner_devices=(1, 2, 4),
      token_s=5e-4,
      scaling=0.9,
      update_s=1.0,
    ),
    fleet.DeviceKind(name="cheap", count=4, cost=1.0, speed=cheap),
  ),
  transfer_s=1.0,
)

# %% [markdown]
# ## The task
#
# A game of about five turns, with an environment that takes half a second to
# answer, at times much longer. Eight groups of four episodes make a round.

# %%
game = workload.Workload(
  name="game",
  turns=distributions.LogNormal(mean=5.0, sigma=0.5, max_value=10.0),
  answer_tokens=distributions.LogNormal(mean=120.0, sigma=0.7),
  step_s=distributions.LogNormal(
    mean=0.5, sigma=1.0, tail_share=0.01, max_value=20.0
  ),
)
question = problem.Planning(
  fleet=pod,
  workloads=(game,),
  groups_per_round=8,
  rollout=group_rollout.Rollout(
    group_size=4, max_turns=10, turn_tokens=2_000, max_tokens=8_000, step_s=60.0
  ),
  space=problem.Space(
    schedules=("sync", "in_flight"), max_staleness=2, points=3
  ),
  rounds=5,
  tolerance=0.05,
)

# %% [markdown]
# ## Search
#
# Every choice (devices that train, engines of each kind, schedule) has a lower
# bound of its step: it cannot be faster than its learner, nor than its engines
# when all their slots are full. The planner simulates the most promising first
# and stops when no bound is left below the best step found.


# %%
def plan(question):
  """Returns the plan for a question, after as few simulations as it takes."""
  return search.best_of(question, *search.candidates(question))


fastest = plan(question)
print(f"{fastest.choices} choices, {len(fastest.estimates)} simulated\n")
for one in fastest.estimates[:5]:
  print(
    f"{one.choice.split:40} {one.choice.schedule:13} {one.result.step_s:5.1f} s"
  )

# %% [markdown]
# A line is a choice: *devices that train | engines*, the schedule, and the time
# of a step. The first is the plan. Those below it come close with other
# devices: where two are as good, take the cheaper or the simpler one.

# %% [markdown]
# ## Was it right to stop?
#
# Each choice by its lower bound. Dots were simulated and lie above the
# diagonal, which says that the bound is one. Ticks along the bottom were not
# simulated: the bound of each is slower than the plan, or faster by less than
# the 5 % that `tolerance` gives away.

# %%
waiting, _ = search.candidates(question)
tried = fastest.estimates
chosen = [one.choice for one in tried]
left_out = [one.bound.step_s for one in waiting if one.choice not in chosen]
bound_s = [one.bound.step_s for one in tried]
step_s = [one.result.step_s for one in tried]
best_s = fastest.best.result.step_s

figure, axes = plt.subplots(figsize=(7, 4))
axes.scatter(bound_s, step_s, s=18, label="simulated")
axes.plot(
  left_out, [0] * len(left_out), "|", ms=14, color="#c9822b", label="left out"
)
top = max(step_s)
axes.plot([0, top], [0, top], color="#808080", lw=1, label="step = bound")
axes.axvline(best_s, color="#c2588f", lw=1, label="the plan's step")
axes.set(xlabel="lower bound of the step, s", ylabel="simulated step, s")
axes.set(xlim=(0, max(top, *left_out) * 1.05), ylim=(-2, top * 1.05))
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# ## What limits the plan
#
# A step has parts, each of which takes its time whatever the others do. Below
# are those with one, two and four devices that train, under the schedule of the
# plan, when as much as possible of the rest decodes.

# %%
schedule = fastest.best.choice.schedule
parts = {}
for candidate in waiting:
  devices, _ = candidate.choice.split.split(" | ")
  if candidate.choice.schedule == schedule:
    seconds = candidate.bound.parts
    least = parts.setdefault(devices, seconds)
    if seconds["decode"] < least["decode"]:
      parts[devices] = seconds

figure, axes = plt.subplots(figsize=(7, 3.2))
names = ["learner", "decode", "environments", "publish"]
for place, (devices, seconds) in enumerate(sorted(parts.items())):
  axes.barh(
    [i + 0.27 * place for i in range(len(names))],
    [seconds[name] for name in names],
    height=0.25,
    label=f"{devices} train",
  )
axes.set_yticks([i + 0.27 for i in range(len(names))], names)
axes.invert_yaxis()
axes.set(xlabel="seconds of a step")
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# More devices that train shorten the learner's part and take engines away, so
# decoding gets longer. By these parts alone four devices would beat two by far.
# Simulated they are about as fast (see the table above), because of waits that
# no part shows. That is why the planner simulates.

# %% [markdown]
# ## Another goal, another plan
#
# Fast is not cheap, and late samples have a price in learning that no clock
# shows. The same question three times: the fastest step, the fastest that
# trains on policy, and the cheapest.

# %%
goals = {
  "on policy": problem.Goal(max_lag=0),
  "cheapest": problem.Goal(minimise="cost"),
}
plans = {
  name: plan(dataclasses.replace(question, goal=goal))
  for name, goal in goals.items()
}
plans = {"fastest": fastest, **plans}
for name, answer in plans.items():
  one = answer.best
  print(
    f"{name:10} {one.choice.split:32} {one.choice.schedule:13} "
    f"{one.result.step_s:5.1f} s, cost {one.cost:4.0f}, lag {one.lag_mean:.1f}"
  )

# %%
figure, axes = plt.subplots(figsize=(7, 3.6))
every = [one for answer in plans.values() for one in answer.estimates]
axes.scatter(
  [one.cost for one in every],
  [one.result.step_s for one in every],
  s=14,
  alpha=0.5,
)
for (name, answer), colour in zip(
  plans.items(), notebook.COLOURS[1:], strict=False
):
  one = answer.best
  axes.scatter([one.cost], [one.result.step_s], s=90, color=colour, label=name)
axes.set(
  xlabel="cost of a step", ylabel="step, s", xlim=(0, None), ylim=(0, None)
)
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# **What to take along.** Each dot is one way to use the pod: to the left is
# cheaper, down is faster. The fastest and the cheapest plan lie on the lower
# left edge of the cloud, and the one on policy far inside: being strictly on
# policy costs time that no choice of devices wins back.
#
# ## With your own numbers
#
# `python -m launch.plan --config=FILE` asks the same from the command line;
# `--calibrate=RUN` takes speeds and tasks from the log of a run that you have,
# and `--base=X.py --out=Y.py` writes the plan as a config for `launch.train`.
#
# *Exercise.* Give the cheap devices `tau0_s=0.010` too. Which of the three
# plans changes?
