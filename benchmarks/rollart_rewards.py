"""RollArt's R3: rewards on accelerators of their own against serverless ones.

  python -m benchmarks.rollart_rewards [--rounds=7]

Three math jobs, each on 16 H800, graded by a model. Dedicated: 8 train, 4 roll
out and 4 grade. Serverless: 8 train and 8 roll out, and a platform that all
three share grades, which begins a seat for a call that finds none free and ends
it when it has been free. RollArt (arXiv 2512.22560, 7.3) publishes that the
rollout of a step falls from 158 s to 77 s, and that the accelerators that grade
are in use for 88 % of their time, not for 6 %. Most of the first gain is that
of twice the rollout; the paper does not say so.

Inputs that are published: the accelerators, an 8B model, 16k tokens, 84 prompts
a step (taken as groups of 8). Fitted, and so no results: the seconds of a
token, to a dedicated rollout of 158 s, and those of a grading, to 6 %. Assumed:
42 sequences on an accelerator (KV of 340k tokens, half of 16k for each), which
slow each other as in `processor.Speed`, log-normal lengths of mean 5,000, and a
training of 100 s. Lengths decide how much of the rollout can be halved, so
their spread is swept, and so are a platform's cold starts and its most seats,
neither of which is published. A seat ends after 1 s without a call. Jobs run
side by side and wait for the seats, so use and rollout are of one run.

In virtual time. Writes benchmarks/results/rollart_rewards.json.
"""

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from absl import app

from benchmarks import machine, simulated
from rl.rollout import grading, group_rollout
from rl.runtime import virtual_clock
from rl.schedule import overlap
from rl.simulation import distributions, resources, simulate, workload, world
from rl.simulation import processor as simulated_processor

ROLLOUT_S = {"dedicated": 158.0, "serverless": 77.0}
USE = {"dedicated": 0.06, "serverless": 0.88}
JOBS, GRADERS = 3, 4
_GROUPS, _MEMBERS = 84, 8
_TOKENS, _TRAIN_S = 5_000.0, 100.0
# Of 158 + 100 s on 4 accelerators 6 % are 62 s, for 672 gradings.
_REWARD_S = 0.06 * GRADERS * (158.0 + _TRAIN_S) / (_GROUPS * _MEMBERS)
_SIGMAS = (0.0, 0.25, 0.5)
DEDICATED = resources.Seats(count=GRADERS)
_SIGMA_OF_PLATFORMS = 0.25


def settings(
  engines: int, *, tau0_s: float, sigma: float, seed: int, rounds: int
) -> simulate.Simulation:
  """Returns one job, with so many accelerators that roll out.

  Args:
    tau0_s: seconds of a token at no load.
    sigma: spread of the lengths.
  """
  speed = simulated_processor.Speed(tau0_s=tau0_s, slots=42)
  return simulate.Simulation(
    cluster=simulated.cluster(speed, engines, update_s=_TRAIN_S),
    workloads=(
      workload.Workload(
        name="math",
        turns=distributions.Fixed(1.0),
        answer_tokens=distributions.LogNormal(
          mean=_TOKENS, sigma=sigma, max_value=16_384
        ),
        reward_s=distributions.Fixed(_REWARD_S),
      ),
    ),
    overlap=overlap.sync(_GROUPS),
    rollout=group_rollout.Rollout(
      group_size=_MEMBERS,
      max_turns=1,
      turn_tokens=16_384,
      max_tokens=20_000,
      grading=grading.Retries(deadline_s=600.0),
    ),
    rounds=rounds,
    warmup=0,
    seed=seed,
  )


def play(
  jobs: Sequence[simulate.Simulation], seats: resources.Seats
) -> tuple[float, resources.SeatCosts]:
  """Returns seconds of a rollout, mean over jobs side by side, and the costs.

  Args:
    seats: of all jobs together.
  """
  pool = resources.SeatPool(seats)

  async def run() -> list[simulate.RunRecord]:
    worlds = [world.World(one.workloads, one.seed, pool) for one in jobs]
    return await asyncio.gather(*map(simulate.play, jobs, worlds))

  records = virtual_clock.run(run())
  rollouts_s = [
    statistics.mean(simulated.rounds_s(simulated.checked(record))) - _TRAIN_S
    for record in records
  ]
  costs = max((r.rewards for r in records if r.rewards), key=lambda c: c.calls)
  return statistics.mean(rollouts_s), costs


def fit(sigma: float, rounds: int) -> float:
  """Returns the seconds of a token with which a dedicated rollout takes 158 s.

  All of a rollout but its gradings takes time in proportion.
  """
  guess_s = 0.005
  guess = settings(4, tau0_s=guess_s, sigma=sigma, seed=0, rounds=rounds)
  return guess_s * ROLLOUT_S["dedicated"] / play([guess], DEDICATED)[0]


def serverless(
  platform: resources.Seats, *, tau0_s: float, sigma: float, rounds: int
) -> tuple[float, resources.SeatCosts]:
  """Returns `play` of all jobs on one platform."""
  jobs = [
    settings(8, tau0_s=tau0_s, sigma=sigma, seed=seed, rounds=rounds)
    for seed in range(JOBS)
  ]
  return play(jobs, platform)


def compare(sigma: float, tau0_s: float, rounds: int) -> dict[str, Any]:
  """Returns the row of a spread of lengths, on a platform without a bound."""
  alone = [
    play(
      [settings(4, tau0_s=tau0_s, sigma=sigma, seed=seed, rounds=rounds)],
      DEDICATED,
    )
    for seed in range(JOBS)
  ]
  dedicated_s = statistics.mean(seconds for seconds, _ in alone)
  platform = resources.Seats(count=1 << 10, elastic=True)
  seconds, _ = serverless(platform, tau0_s=tau0_s, sigma=sigma, rounds=rounds)
  return {
    "sigma": sigma,
    "token_ms": 1e3 * tau0_s,
    "dedicated_s": dedicated_s,
    "serverless_s": seconds,
    "gain": dedicated_s / seconds,
    "dedicated_use": statistics.mean(costs.use for _, costs in alone),
  }


def on_platform(
  platform: resources.Seats, tau0_s: float, dedicated_s: float, rounds: int
) -> dict[str, Any]:
  """Returns the row of a platform: rollout, use, and errors of both."""
  seconds, costs = serverless(
    platform, tau0_s=tau0_s, sigma=_SIGMA_OF_PLATFORMS, rounds=rounds
  )
  return {
    "cold_s": platform.cold_s,
    "max_workers": platform.count,
    "serverless_s": seconds,
    "gain": dedicated_s / seconds,
    "use": costs.use,
    "use error": costs.use - USE["serverless"],
    "rollout error": simulated.deviation(seconds, ROLLOUT_S["serverless"]),
    "cold_starts": costs.cold_starts / costs.calls,
    "scaled_to_zero": costs.scaled_to_zero,
    "mean_wait_s": costs.mean_wait_s,
    "max_wait_s": costs.max_wait_s,
  }


def main(_: list[str]) -> None:
  """Simulates, prints and keeps."""
  rounds = simulated.ROUNDS.value
  fitted = {sigma: fit(sigma, rounds) for sigma in _SIGMAS}
  rows = [compare(sigma, fitted[sigma], rounds) for sigma in _SIGMAS]
  gain = ROLLOUT_S["dedicated"] / ROLLOUT_S["serverless"]
  machine.show(f"rollout of a step; published gain {gain:.2f}", rows)
  dedicated_s = rows[_SIGMAS.index(_SIGMA_OF_PLATFORMS)]["dedicated_s"]
  platforms = [
    on_platform(
      resources.Seats(count=most, elastic=True, cold_s=cold_s),
      fitted[_SIGMA_OF_PLATFORMS],
      dedicated_s,
      rounds,
    )
    for cold_s in (0.5, 2.0, 10.0)
    for most in (2, 3, 4, 64)
  ]
  machine.show(
    f"a platform for all; published use {USE['serverless']:.0%}", platforms
  )
  machine.keep(
    "rollart_rewards",
    rounds=rounds,
    jobs=JOBS,
    published={"rollout_s": ROLLOUT_S, "use": USE, "gain": gain},
    sigma_of_platforms=_SIGMA_OF_PLATFORMS,
    rows=rows,
    platforms=platforms,
  )


if __name__ == "__main__":
  app.run(main)
