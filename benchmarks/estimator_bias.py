"""How far the mean of each gradient estimate is from the policy gradient.

  python -m benchmarks.estimator_bias

On the task of `rl/testing/tabular.py`, whose policy gradient is known. Bias is
|mean - gradient| / |gradient|; beside it stands the cosine of their angle.

- Losses and corrections, trained on what older policies sampled: the mean is a
  sum over all paths, so the numbers are exact. The advantage is the return less
  its mean, the limit of large groups. All sum up over a trajectory, over a
  constant. Losses are in bypass mode and without a correction; corrections that
  compare "old" are with `Reinforce` and old scored again by the policy that is
  trained, those that compare "current" with token ratios that nothing clips.
- Estimators of advantages and aggregates, on policy: what is left when the best
  factor is taken out, for the step size has one as well, and that factor.
  Estimators have groups of 8 and updates of 4 groups; their numbers are of 1e5
  episodes, with `Rloo` as a control variate, and have a standard error.

Docstrings of `rl` state what is measured here;
tests/claims/test_exact_oracle.py
reads them. Writes benchmarks/results/estimator_bias.json.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from absl import app

from benchmarks import machine
from rl.algorithms import (
  advantages,
  corrections,
  loss_aggregation,
  losses,
  token_advantages,
)
from rl.algorithms import kl as kl_lib
from rl.testing import tabular, tabular_estimates
from rl.testing.tabular_estimates import Rule

LAGS = {f"lag {lag}": tabular.old(lag) for lag in range(5)}
LAGS["mixed"] = tabular.MIXED

_UNCLIPPED = losses.ClippedSurrogate(clip_low=1.0, clip_high=math.inf)
_GROUP_SIZE, _GROUPS_PER_UPDATE, _EPISODES = 8, 4, 100_000


def _corrected(correction: corrections.Correction) -> Rule:
  if correction.compares_old:
    return Rule(loss=losses.Reinforce(), correction=correction, old=0)
  return Rule(loss=_UNCLIPPED, correction=correction)


LOSSES = {
  type(loss).__name__: Rule(loss=loss)
  for loss in (
    losses.ClippedSurrogate(),
    losses.Gspo(),
    losses.GspoToken(),
    losses.Gmpo(),
    losses.Cispo(),
    losses.Reinforce(),
    losses.Aipo(),
    losses.Topr(),
    losses.Vespo(),
    losses.Sapo(),
  )
}
CORRECTIONS = {
  type(correction).__name__: _corrected(correction)
  for correction in (
    corrections.TokenTruncated(),
    corrections.SequenceTruncated(),
    corrections.IcePop(),
    corrections.SequenceMasked(),
    corrections.GeometricRejection(),
    corrections.Veto(),
    corrections.OffPolicySequenceMask(delta=1e-4),
    corrections.DppoMask(),
  )
}
OTHERS = {
  "ClippedSurrogate that clips nothing": Rule(loss=_UNCLIPPED),
  "SequenceTruncated(cap=inf)": _corrected(
    corrections.SequenceTruncated(cap=math.inf)
  ),
  "GeometricRejection(low=0.9, high=1.1)": _corrected(
    corrections.GeometricRejection(low=0.9, high=1.1)
  ),
  "decoupled PPO, old of lag 1": Rule(
    loss=losses.ClippedSurrogate(),
    correction=corrections.TokenTruncated(cap=math.inf),
    old=1,
  ),
}
_LATE: dict[str, corrections.Correction | None] = {
  "": corrections.TokenTruncated(),
  ", not weighed": None,
  ", whole ratios": corrections.SequenceTruncated(cap=math.inf),
}
KL = {
  estimator + name: kl_lib.KlPenalty(estimator=estimator, late=late)
  for estimator in ("k2", "k3", "k3_plus")
  for name, late in _LATE.items()
}
STATED = {
  type(estimator).__name__: estimator
  for estimator in (
    advantages.Grpo(),
    token_advantages.ReinforcePlusPlus(),
    token_advantages.StepGroups(),
  )
}
ESTIMATORS = {
  **STATED,
  "StepGroups by means, discount 1": token_advantages.StepGroups(
    normalise="mean", discount=1.0
  ),
  "TurnReturns, discount 0.9": token_advantages.TurnReturns(discount=0.9),
}


@dataclasses.dataclass(frozen=True)
class Direction:
  """How an estimate on policy differs from the policy gradient.

  Attributes:
    aside: the bias that is left at the best factor, which is the sine of the
      angle between them.
    factor: the estimate's length along the gradient, over the gradient's.
    error: standard error of both.
  """

  aside: float
  factor: float
  error: float = 0.0


@functools.cache
def gradient() -> np.ndarray:
  """Returns the policy gradient of the policy that is trained."""
  return tabular.gradient(tabular.TABLES[0], tabular.paths().rewards)


def measure(rule: Rule) -> dict[str, tuple[float, float]]:
  """Returns (bias, cosine) by lag."""
  found = {}
  for name, lags in LAGS.items():
    rewards = tabular.paths().rewards
    mean = tabular.probabilities(lags).mean(0) @ rewards
    better = np.repeat((rewards - mean)[:, None], tabular.PLACES, 1)
    estimate = tabular_estimates.exact(rule, lags, better)
    found[name] = tabular_estimates.bias(estimate, gradient())
  return found


def sentence(biases: Mapping[str, tuple[float, float]]) -> str:
  """Returns what the docstring of a loss or a correction has to say."""
  percent = {name: f"{100 * bias:.0f} %" for name, (bias, _) in biases.items()}
  return (
    f"Bias: {percent['lag 1']} at lag 1, {percent['lag 4']} at lag 4, "
    f"{percent['mixed']} mixed."
  )


def sentence_on_policy(direction: Direction) -> str:
  """Returns what the docstring of an estimator or an aggregate has to say."""
  return f"Bias: {100 * direction.aside:.0f} % aside of the gradient on policy."


def _direction(mean: np.ndarray, error: float = 0.0) -> Direction:
  size = float(np.linalg.norm(gradient()))
  factor = float(np.sum(mean * gradient())) / size**2
  _, cosine = tabular_estimates.bias(mean, gradient())
  aside = math.sqrt(max(0.0, 1.0 - cosine**2))
  return Direction(aside, factor, error / (factor * size))


def measure_estimator(estimator: advantages.Estimator) -> Direction:
  """Returns how its estimates differ, on policy and without a critic."""
  lags = LAGS["lag 0"]
  played = tabular.play(np.random.default_rng(0), lags, _EPISODES)
  played = played.reshape(-1, _GROUP_SIZE)
  every = tabular_estimates.members()

  def estimates(own: advantages.Estimator) -> tabular_estimates.GroupGradients:
    per_update = _GROUPS_PER_UPDATE if own.scope == "batch" else None
    return tabular_estimates.of_groups(
      Rule(loss=losses.Reinforce()),
      played,
      lags,
      tabular_estimates.advantages_of(own, played, every, per_update),
    )

  return _direction(
    *tabular_estimates.controlled(
      estimates(estimator), estimates(advantages.Rloo()), gradient()
    )
  )


def measure_critic(lambda_: float) -> Direction:
  """Returns how GAE differs while its critic still says 0 of everything."""
  zeros = np.zeros(tabular.paths().states.shape)
  alone = np.arange(len(zeros))[:, None]
  better = tabular_estimates.advantages_of(
    token_advantages.Gae(lambda_=lambda_),
    alone,
    tabular_estimates.members(values=zeros),
  )
  rule = Rule(loss=losses.Reinforce())
  return _direction(tabular_estimates.exact(rule, LAGS["lag 0"], better[:, 0]))


def measure_aggregate(aggregate: loss_aggregation.Aggregate) -> Direction:
  """Returns how an aggregate differs in an update of many trajectories."""
  lags, rewards = LAGS["lag 0"], tabular.paths().rewards
  mean = tabular.probabilities(lags)[0] @ rewards
  better = np.repeat((rewards - mean)[:, None], tabular.PLACES, 1)
  rule = Rule(loss=losses.Reinforce(), aggregate=aggregate)
  return _direction(tabular_estimates.exact(rule, lags, better))


def measure_kl(penalty: kl_lib.KlPenalty) -> dict[str, tuple[float, float]]:
  """Returns lag -> (bias, cosine) of a KL loss; the reference is of lag 4.

  The oracle is the gradient of KL(policy, reference) in the states visited.
  """
  oracle, _ = tabular_estimates.kl_gradients(reference=4)
  return {
    name: tabular_estimates.bias(
      tabular_estimates.kl_loss_gradient(penalty, 4, lags), oracle
    )
    for name, lags in LAGS.items()
  }


def main(_: list[str]) -> None:
  """Measures all, prints the tables and keeps them."""
  print(machine.describe())
  print(f"| bias, cosine | {' | '.join(LAGS)} |")
  print("|---" * (len(LAGS) + 1) + "|")
  off_policy = {}
  for name, rule in (LOSSES | CORRECTIONS | OTHERS).items():
    off_policy[name] = measure(rule)
    cells = [f"{100 * b:.1f} %, {c:.3f}" for b, c in off_policy[name].values()]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
  directions = {n: measure_estimator(e) for n, e in ESTIMATORS.items()}
  directions["Gae, lambda 0.95, no critic yet"] = measure_critic(0.95)
  for aggregate in (
    loss_aggregation.TokenMean(),
    loss_aggregation.SequenceMean(),
  ):
    directions[type(aggregate).__name__] = measure_aggregate(aggregate)
  print("\n| on policy | aside | factor |\n|---|---|---|")
  for name, found in directions.items():
    error = f" ± {100 * found.error:.1f}" if found.error else ""
    print(f"| {name} | {100 * found.aside:.1f}{error} % | {found.factor:.3f} |")
  kl = {name: measure_kl(penalty) for name, penalty in KL.items()}
  for name, by_lag in kl.items():
    cells = [f"{lag} {100 * off:.1f} %" for lag, (off, _) in by_lag.items()]
    print(f"{name} as a loss, bias: {', '.join(cells)}")
  far = tabular_estimates.bias(
    tabular_estimates.kl_gradients(reference=4)[0],
    tabular_estimates.kl_of_episodes_gradient(reference=4),
  )[0]
  print(f"of the KL of whole episodes a loss leaves out {100 * far:.1f} %")
  machine.keep(
    "estimator_bias",
    columns=["bias", "cosine"],
    off_policy=off_policy,
    on_policy={n: dataclasses.asdict(d) for n, d in directions.items()},
    kl=kl,
    kl_left_out=far,
  )


if __name__ == "__main__":
  app.run(main)
