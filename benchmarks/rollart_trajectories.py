"""RollArt's R2: trajectory-level against batched environment interaction.

  python -m benchmarks.rollart_trajectories [--rounds=7]

256 environments (32 groups of 8), 20 turns, step latency Gaussian(10 s, sigma),
answers that take next to no time; weights and training take none. In "batch"
all environments of a round wait for the slowest of each turn; in "ours" the
same coordinator plays the same draws as it always does. The ratio of seconds a
round is what RollArt (arXiv 2512.22560, 7.3, figure 11b) publishes for 10
iterations of an 8B model. Turns, generation time and what becomes of negative
latencies are not published: 20 turns, none, and 0 s are assumed, and a sweep
shows what follows from other values. "model" is the same without a coordinator:
the sum over turns of the largest latency by the largest sum, mean of 200 draws.
All in virtual time.
Writes benchmarks/results/rollart_trajectories.json.
"""

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
from absl import app

from benchmarks import machine, simulated
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload
from rl.simulation import processor as simulated_processor

PUBLISHED = {1: 1.23, 3: 1.51, 5: 1.69, 7: 2.18, 10: 2.27}
_GROUPS, _MEMBERS, _TURNS, _MEAN_S = 32, 8, 20, 10.0
_ANSWER = 100
_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redrawn:
  """A normal distribution in which draws below 0 are drawn again."""

  mean: float
  sigma: float

  def quantile(self, probability: float) -> float:
    """Returns the quantile of the part above 0."""
    below = _NORMAL.cdf(-self.mean / self.sigma)
    return self.mean + self.sigma * _NORMAL.inv_cdf(
      below + (1.0 - below) * probability
    )


def settings(
  step_s: distributions.Distribution,
  *,
  rounds: int,
  turns: int = _TURNS,
  answer_s: float = 0.001,
  groups: int = _GROUPS,
) -> simulate.Simulation:
  """Returns a run in which environments take most of the time."""
  speed = simulated_processor.Speed(
    tau0_s=answer_s / _ANSWER, b0=math.inf, slots=groups * _MEMBERS
  )
  return simulate.Simulation(
    cluster=simulated.cluster(speed),
    workloads=(
      workload.Workload(
        name="game",
        turns=distributions.Fixed(float(turns)),
        answer_tokens=distributions.Fixed(float(_ANSWER)),
        reply_tokens=distributions.Fixed(2.0),
        step_s=step_s,
        correlation=0.0,
      ),
    ),
    overlap=overlap.sync(groups),
    rollout=group_rollout.Rollout(
      group_size=_MEMBERS,
      max_turns=turns,
      turn_tokens=1_000,
      max_tokens=1_000_000,
      step_s=1e6,
    ),
    rounds=rounds,
    warmup=0,
  )


def compare(chosen: simulate.Simulation) -> tuple[float, float]:
  """Returns mean seconds of a round, in lockstep and by trajectory."""
  batch = simulated.Lockstep(
    chosen.workloads,
    chosen.seed,
    episodes=chosen.overlap.groups_per_round * chosen.rollout.group_size,
  )
  together = simulated.play(chosen, batch)
  alone = simulated.play(chosen)
  return (
    statistics.mean(simulated.rounds_s(together)),
    statistics.mean(simulated.rounds_s(alone)),
  )


def model(sigma: float, draws: int = 200) -> float:
  """Returns the speed-up that the latencies alone give, without a run."""
  shape = (draws, _GROUPS * _MEMBERS, _TURNS)
  noise = np.random.default_rng(0).standard_normal(shape)
  step_s = np.maximum(_MEAN_S + sigma * noise, 0.0)
  return float(step_s.max(1).sum() / step_s.sum(2).max(1).sum())


def _row(sigma: int, rounds: int, **other: Any) -> dict[str, Any]:
  step_s = distributions.Gaussian(mean=_MEAN_S, sigma=float(sigma))
  together, alone = compare(settings(step_s, rounds=rounds, **other))
  speedup = together / alone
  return {
    "sigma_s": sigma,
    "batch_s": together,
    "ours_s": alone,
    "speedup": speedup,
    "model": model(sigma),
    "published": PUBLISHED[sigma],
    "deviation": simulated.deviation(speedup, PUBLISHED[sigma]),
  }


def _sweep(rounds: int) -> list[dict[str, Any]]:
  """Returns speed-ups under other assumptions, a row each."""
  rows = []
  for turns, answer_s in (
    (10, 0.001),
    (30, 0.001),
    (20, 2.5),
    (20, 5.0),
  ):
    row: dict[str, Any] = {"turns": turns, "answer_s": answer_s, "below 0": "0"}
    for sigma in PUBLISHED:
      one = _row(sigma, rounds, turns=turns, answer_s=answer_s)
      row[f"sigma {sigma}"] = one["speedup"]
    rows.append(row)
  again: dict[str, Any] = {
    "turns": _TURNS, "answer_s": 0.001, "below 0": "redrawn",
  }  # fmt: skip
  for sigma in PUBLISHED:
    drawn = Redrawn(mean=_MEAN_S, sigma=sigma)
    together, alone = compare(settings(drawn, rounds=rounds))
    again[f"sigma {sigma}"] = together / alone
  return [*rows, again]


def main(_: list[str]) -> None:
  """Measures, prints and keeps both."""
  rounds = simulated.ROUNDS.value
  rows = [_row(sigma, rounds) for sigma in PUBLISHED]
  machine.show("trajectories against batches", rows)
  sweep = _sweep(1)
  machine.show("speed-up under other assumptions, one round each", sweep)
  worst = max(abs(row["deviation"]) for row in rows)
  print(f"\nworst deviation {worst:.1%}")
  machine.keep(
    "rollart_trajectories",
    environments=_GROUPS * _MEMBERS,
    turns=_TURNS,
    rounds=rounds,
    rows=rows,
    sweep=sweep,
    worst_deviation=worst,
  )


if __name__ == "__main__":
  app.run(main)
