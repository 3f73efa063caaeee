# %% [markdown]
# # Write a loss, and see its bias
#
# **Question.** You have an idea for a policy loss. When samples come from older
# policies, does its gradient still point where the policy gradient does? And is
# the gradient that points best the best one to follow?
#
# A training run answers this with noise, after hours. Here the answer is exact,
# in seconds: on a task so small that every path through it can be summed up.

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
import math

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from launch.report import notebook
from rl.algorithms import loss_aggregation, losses, packed_row
from rl.testing import tabular, tabular_estimates

notebook.use_style()

# %% [markdown]
# ## The oracle
#
# A task of up to three turns and five tokens. There are few enough paths to
# list them all, so the expected return and its gradient are sums, without
# sampling. `TABLES[n]` is the policy *n* optimizer steps before the one that is
# trained.

# %%
paths = tabular.paths()
gradient = tabular.gradient(tabular.TABLES[0], paths.rewards)
returns = [tabular.chances_under(t) @ paths.rewards for t in tabular.TABLES]
print(f"{len(paths.rewards)} paths")
for late, expected in enumerate(returns):
  print(f"{late} steps ago the expected return was {expected:.3f}")

# %% [markdown]
# The policies get better from step to step, as those of a real run do. What
# they sampled is what a loss has to learn from when it comes late.

# %% [markdown]
# ## A loss of your own
#
# A loss is a frozen dataclass that takes a row of tokens and returns a number
# for each. PPO clips the ratio *r* between the trained policy and the old one,
# so beyond the bound the gradient is suddenly zero. An idea: let the gain level
# off smoothly instead, along a tanh.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class Saturating:
  """-A bound tanh((r - 1) / bound): a gain that levels off around r = 1.

  Attributes:
    bound: of r - 1, where the gain has mostly levelled off.
  """

  bound: float = 0.3
  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  own_weight = False
  has_ratio = True

  def __call__(self, row: packed_row.Row) -> losses.Terms:
    """Returns the loss by token."""
    ratio = packed_row.bounded_exp(
      packed_row.log_ratio(row.logprobs, row.old, row)
    )
    # Whatever stands where nothing was sampled, even nan, must not count.
    gain = jnp.where(row.sampled, row.advantages, 0.0)
    level = jnp.tanh((ratio - 1) / self.bound)
    return losses.Terms(-gain * self.bound * level, jnp.abs(level) > 0.9)


# %% [markdown]
# ## Its mean and its noise, exactly
#
# The loss is called on every path at once, with the log-probabilities of the
# old policy. Weighed by the probability that the old policy takes it, a path's
# gradient contributes to the mean; the spread around the mean is the noise of a
# single trajectory.


# %%
def moments(loss, late):
  """Returns (mean gradient, variance of one trajectory's gradient)."""
  lags = tabular.old(late)
  chances = tabular.probabilities(lags)[0]
  better = paths.rewards - chances @ paths.rewards
  found = tabular_estimates.of_groups(
    tabular_estimates.Rule(loss=loss),
    np.arange(len(better))[:, None],
    lags,
    np.repeat(better[:, None, None], tabular.PLACES, 2),
  )
  mean = np.einsum("p,psa->sa", chances, found.sums)
  return mean, chances @ ((found.sums - mean) ** 2).sum((1, 2))


def bias(loss, late):
  """Returns the error of the mean, relative to the gradient's length."""
  mean, _ = moments(loss, late)
  return np.linalg.norm(mean - gradient) / np.linalg.norm(gradient)


# %% [markdown]
# ## Bias by lag
#
# Four losses, from no lag to four steps late.

# %%
candidates = {
  "REINFORCE, no ratio": losses.Reinforce(),
  "ratio, not clipped": losses.ClippedSurrogate(
    clip_low=1.0, clip_high=math.inf
  ),
  "PPO clip": losses.ClippedSurrogate(),
  "saturating": Saturating(),
}
biases = {
  name: [bias(loss, late) for late in range(5)]
  for name, loss in candidates.items()
}
print(f"{'steps late':>22}" + "".join(f"{late:>7}" for late in range(5)))
for name, row in biases.items():
  print(f"{name:>22}" + "".join(f"{value:7.1%}" for value in row))

# %%
figure, axes = plt.subplots(figsize=(7, 3.6))
for name, row in biases.items():
  axes.plot(range(5), row, marker="o", label=name)
axes.set(xlabel="optimizer steps late", ylabel="bias / length of the gradient")
axes.set_xticks(range(5))
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# **What to see.** With fresh samples (0 late) all four are right. With late
# ones the ratio of each token, not clipped, is nearest to the gradient: it
# corrects all but the chance to come to a state. Whatever bounds the ratio, by
# a clip or a tanh, adds bias, because the tokens that have changed most count
# least. *Saturating* is no exception: worse than PPO's clip when samples are
# one step late, better when they are later. So was it a bad idea?

# %% [markdown]
# ## Bias is not all
#
# An update sees a batch, not the mean of all paths. For *n* trajectories the
# square of its error is bias² + noise² / n. A tight bound has much bias and
# little noise. A wide one has more noise and, up to a point, less bias: beyond
# 1.6 nothing is left to win. Below is the error by the bound of the loss, four
# steps late.

# %%
bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
length = np.linalg.norm(gradient)
found = [moments(Saturating(bound=bound), late=4) for bound in bounds]
bias_of = np.array([np.linalg.norm(mean - gradient) for mean, _ in found])
noise_of = np.sqrt([variance for _, variance in found])
errors = {
  n: np.hypot(bias_of, noise_of / math.sqrt(n)) / length for n in (16, 64, 1024)
}
best = {n: bounds[int(np.argmin(row))] for n, row in errors.items()}

figure, axes = plt.subplots(figsize=(7, 3.6))
axes.plot(
  bounds, bias_of / length, color="#808080", ls="--", label="bias alone"
)
for n, row in errors.items():
  axes.plot(bounds, row, marker="o", label=f"{n} trajectories")
axes.set_xscale("log", base=2)
axes.set_xticks(bounds, [f"{bound:g}" for bound in bounds])
axes.set(xlabel="bound of the loss", ylabel="error / length of the gradient")
axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %%
for n, bound in best.items():
  print(f"{n:5} trajectories: the best bound is {bound:g}")

# %% [markdown]
# **What to take along.** The more trajectories an update has, the wider the
# best bound: noise averages out and bias does not. With few, even a biased
# gradient is the better one to follow. So a loss is chosen together with the
# size of the batch and the lag that the schedule allows.
#
# ## Into a run
#
# A config file names the loss, and its fields become flags:
#
# ```python
# algorithm=dataclasses.replace(base.algorithm, loss=Saturating(bound=0.4))
# ```
#
# ```
# python -m launch.train --config=mine.py --config.algorithm.loss.bound=0.8 ...
# ```
#
# `configs/guess_number_own.py` is a complete example. The same measure for
# every loss of the library is in the docstrings of `rl/algorithms/losses.py`.
#
# *Exercise.* Let only tokens with a positive advantage level off. Where does
# the bias go?
