"""RollArt's R3: rewards on accelerators of their own against serverless ones.

  python -m benchmarks.rollart_rewards [--rounds=7]

Three math jobs, each on 16 H800, graded by a model. Dedicated: 8 train, 4 roll
out and 4 grade. Serverless: 8 train and 8 roll out, and a platform that all
three share grades, which starts a worker for a call that finds none idle and
ends it when it has been idle. RollArt (arXiv 2512.22560, 7.3) publishes that
the rollout of a step falls from 158 s to 77 s, and that the accelerators that
grade are in use for 88 % of their time, not for 6 %. Most of the first gain is
that of twice the rollout; the paper does not say so.

Inputs that are published: the accelerators, an 8B model, 16k tokens, 84 prompts
a step (taken as groups of 8). Calibrated, and so no results: the seconds of a
token, to a dedicated rollout of 158 s, and those of a grading, to 6 %. Assumed:
42 sequences on an accelerator (KV of 340k tokens, half of 16k for each), which
slow each other as in `processor.Speed`, log-normal lengths of mean 5,000, and a
training of 100 s. Lengths decide how much of the rollout can be halved, so
their spread is swept, and so are a platform's cold starts and its most workers,
neither of which is published. A worker ends after 1 s without a call. Waits at
the platform are not fed back into the rollout; they are shown.

In virtual time. Writes benchmarks/results/rollart_rewards.json.
"""

import asyncio
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from absl import app

from benchmarks import machine, simulated
from envs import base
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload, world
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor

ROLLOUT_S = {"dedicated": 158.0, "serverless": 77.0}
USE = {"dedicated": 0.06, "serverless": 0.88}
JOBS, GRADERS = 3, 4
_GROUPS, _MEMBERS = 84, 8
_TOKENS, _TRAIN_S = 5_000.0, 100.0
# Of 158 + 100 s on 4 accelerators 6 % are 62 s, for 672 gradings.
_REWARD_S = 0.06 * GRADERS * (158.0 + _TRAIN_S) / (_GROUPS * _MEMBERS)
_SIGMAS = (0.0, 0.25, 0.5)


@dataclasses.dataclass(frozen=True)
class Call:
  """A grading: when it was asked for, and its seconds of work."""

  start_s: float
  work_s: float


@dataclasses.dataclass(eq=False)
class Graded(world.World):
  """A world that notes its gradings.

  Args:
    graders: gradings at once; 0: unlimited.
  """

  graders: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    self._seats = asyncio.Semaphore(self.graders or 1 << 20)
    self.calls: list[Call] = []

  async def grade(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns the grades, once there is a seat at a grader."""
    time = asyncio.get_running_loop().time
    asked_s = time()
    async with self._seats:
      begun_s = time()
      grades = await super().grade(task, transcripts)
    self.calls.append(Call(asked_s, time() - begun_s))
    return grades


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
  """Serverless functions, one call in each worker.

  Attributes:
    cold_s: until a new worker begins its first call.
    idle_s: until a worker without a call ends.
    max_workers: then calls wait for the first that is free.
  """

  cold_s: float = 2.0
  idle_s: float = 1.0
  max_workers: int = 64


def serve(calls: Iterable[Call], platform: Platform) -> dict[str, float]:
  """Returns the costs of calls on a platform, which is empty at first.

  `use` is the share of the workers' lives in which they grade.
  """
  free_s: list[float] = []  # Of each worker that lives.
  alive_s = busy_s = 0.0
  waits, starts, peak, empty = [], 0, 0, 0
  for call in sorted(calls, key=lambda call: call.start_s):
    now_s = call.start_s
    free_s = [s for s in free_s if s + platform.idle_s >= now_s]
    empty += not free_s
    if idle := [s for s in free_s if s <= now_s]:
      # The last to become idle, so that the others may end.
      begun_s, before_s = now_s, max(idle)
    elif len(free_s) < platform.max_workers:
      starts, before_s = starts + 1, None
      begun_s = now_s + platform.cold_s
      # Each idle time up to `idle_s` is counted when the next call ends it.
      alive_s += platform.cold_s + platform.idle_s
    else:
      begun_s = before_s = min(free_s)
    ended_s = begun_s + call.work_s
    if before_s is not None:
      free_s.remove(before_s)
      alive_s += begun_s - before_s
    free_s.append(ended_s)
    alive_s += call.work_s
    busy_s += call.work_s
    waits.append(begun_s - now_s)
    peak = max(peak, len(free_s))
  return {
    "use": busy_s / alive_s,
    "cold_starts": starts / len(waits),
    "scaled_to_zero": float(empty),
    "workers": float(peak),
    "mean_wait_s": statistics.mean(waits),
    "max_wait_s": max(waits),
  }


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
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=_TRAIN_S),
      pools=(simulate.EnginePool(engines=engines, speed=speed),),
      transfer_s=0.0,
    ),
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
      group_size=_MEMBERS, max_turns=1, turn_tokens=16_384, max_tokens=20_000
    ),
    rounds=rounds,
    warmup=0,
    seed=seed,
  )


@dataclasses.dataclass(frozen=True)
class Played:
  """A job: seconds of a rollout and of the whole run, and all gradings."""

  rollout_s: float
  whole_s: float
  calls: Sequence[Call]


def play(chosen: simulate.Simulation, graders: int = 0) -> Played:
  """Plays one job, with so many gradings at once; 0: unlimited."""
  played = Graded(chosen.workloads, chosen.seed, graders=graders)
  record = simulated.checked(simulate.simulate(chosen, played))
  rounds_s = simulated.rounds_s(record)
  return Played(
    statistics.mean(rounds_s) - _TRAIN_S, sum(rounds_s), played.calls
  )


def compare(sigma: float, rounds: int) -> tuple[dict[str, Any], list[Call]]:
  """Returns the row of a spread of lengths, and the gradings of all jobs."""
  guess_s = 0.005
  more: dict[str, Any] = {"sigma": sigma, "rounds": rounds}
  guess = settings(4, tau0_s=guess_s, seed=0, **more)
  # All of a rollout but its gradings takes time in proportion.
  tau0_s = guess_s * ROLLOUT_S["dedicated"] / play(guess, GRADERS).rollout_s
  jobs = [
    [
      play(settings(engines, tau0_s=tau0_s, seed=seed, **more), graders)
      for seed in range(JOBS)
    ]
    for engines, graders in ((4, GRADERS), (8, 0))
  ]
  dedicated, serverless = jobs
  rollout_s = [statistics.mean(one.rollout_s for one in job) for job in jobs]
  row = {
    "sigma": sigma,
    "token_ms": 1e3 * tau0_s,
    "dedicated_s": rollout_s[0],
    "serverless_s": rollout_s[1],
    "gain": rollout_s[0] / rollout_s[1],
    "dedicated_use": statistics.mean(
      sum(call.work_s for call in one.calls) / (GRADERS * one.whole_s)
      for one in dedicated
    ),
  }
  return row, [call for one in serverless for call in one.calls]


def main(argv: list[str]) -> None:
  """Simulates, prints and keeps."""
  del argv
  rounds = simulated.ROUNDS.value
  compared = [compare(sigma, rounds) for sigma in _SIGMAS]
  rows = [row for row, _ in compared]
  gain = ROLLOUT_S["dedicated"] / ROLLOUT_S["serverless"]
  simulated.show(f"rollout of a step; published gain {gain:.2f}", rows)
  calls = compared[1][1]
  platforms = [
    {"cold_s": cold_s, "max_workers": most}
    | serve(calls, Platform(cold_s=cold_s, max_workers=most))
    for cold_s in (0.5, 2.0, 10.0)
    for most in (2, 3, 4, 64)
  ]
  simulated.show(
    f"a platform for all; published use {USE['serverless']:.0%}", platforms
  )
  machine.keep(
    "rollart_rewards",
    rounds=rounds,
    jobs=JOBS,
    published={"rollout_s": ROLLOUT_S, "use": USE, "gain": gain},
    sigma_of_calls=_SIGMAS[1],
    rows=rows,
    platforms=platforms,
  )


if __name__ == "__main__":
  app.run(main)
