"""Small fleets and tasks for tests to plan, and a pool to simulate them in."""

import concurrent.futures
import dataclasses
import multiprocessing

from configs import guess_number_moe
from rl.planning import fleet, problem, search
from rl.pools import affinity
from rl.rollout import group_rollout
from rl.simulation import distributions, workload
from rl.simulation import processor as simulated_processor

QUICK = simulated_processor.Speed(
  tau0_s=0.01, b0=8.0, prefill_per_s=5e3, slots=4, kv_tokens=4000, update_s=0.3
)
WIDE = dataclasses.replace(QUICK, tau0_s=0.015, b0=32.0, slots=8, update_s=0.1)
MATH = workload.Workload(
  prompt_tokens=distributions.Fixed(20.0),
  answer_tokens=distributions.LogNormal(mean=80.0, sigma=0.8, max_value=400.0),
)
GAME = workload.Workload(
  name="game",
  turns=distributions.LogNormal(mean=3.0, sigma=0.5, max_value=6.0),
  prompt_tokens=distributions.Fixed(40.0),
  reply_tokens=distributions.Fixed(10.0),
  answer_tokens=distributions.LogNormal(mean=15.0, sigma=0.7),
  start_s=distributions.LogNormal(mean=0.3, sigma=0.5),
  step_s=distributions.LogNormal(mean=0.4, sigma=1.0, max_value=8.0),
  reward_s=distributions.LogNormal(mean=0.1, sigma=0.5),
  start_fault=0.02,
  step_fault=0.02,
  # Of 3 calls: one in 8 is never graded.
  reward_fault=0.5,
)
GUESSES = dataclasses.replace(
  GAME,
  name="guess_number",
  prompt_tokens=distributions.Fixed(6.0),
  reply_tokens=distributions.Fixed(2.0),
  answer_tokens=distributions.Fixed(2.0),
)


def small_fleet(**changes) -> fleet.Fleet:
  """Returns three devices that may train, and one that only decodes."""
  return dataclasses.replace(
    fleet.Fleet(
      kinds=(
        fleet.DeviceKind(
          name="quick",
          count=3,
          cost=3.0,
          kind="compute",
          speed=QUICK,
          learner_devices=(1, 2),
          token_s=1.5e-3,
          scaling=0.9,
          update_s=0.2,
        ),
        fleet.DeviceKind(
          name="wide", count=1, cost=1.0, kind="bandwidth", speed=WIDE
        ),
      ),
      transfer_s=0.5,
    ),
    **changes,
  )


def question(**changes) -> problem.Planning:
  """Returns a question about the small fleet and rounds of four groups."""
  workloads = changes.setdefault("workloads", (MATH, GAME))
  names = [task.name for task in workloads]
  prefer = {GAME.name: "compute"} if GAME.name in names else {}
  return dataclasses.replace(
    problem.Planning(
      fleet=small_fleet(),
      workloads=workloads,
      groups_per_round=4,
      rollout=group_rollout.Rollout(
        group_size=2,
        max_turns=6,
        turn_tokens=400,
        max_tokens=1200,
        step_s=60.0,
      ),
      space=problem.Space(max_staleness=2, updates_per_round=2),
      routing=affinity.Routing(prefer=prefer),
      rounds=4,
      tolerance=0.0,
    ),
    **changes,
  )


def guessing() -> problem.Planning:
  """Returns what plans `configs/guess_number_moe.py` on the small fleet."""
  return question(
    workloads=(GUESSES,),
    rollout=guess_number_moe.get_config().rollout,
    space=problem.Space(schedules=("sync", "in_flight"), max_staleness=1),
    routing=affinity.Routing(prefer={GUESSES.name: "compute"}),
  )


def untyped_process() -> concurrent.futures.Executor:
  """Returns a process that checks no types, to be used in a `with`.

  There a run takes a tenth of the time; other tests simulate with checks.
  """
  return concurrent.futures.ProcessPoolExecutor(
    1, multiprocessing.get_context("spawn")
  )


def simulate_all(
  question: problem.Planning, every: int = 1
) -> list[search.ChoiceEstimate]:
  """Returns the estimates of all choices, or of one in so many."""
  waiting, _ = search.candidates(question)
  return [search.estimate(question, one) for one in waiting[::every]]


def plan_of(question: problem.Planning, *fits: search.Fits) -> search.FleetPlan:
  """Returns the plan, among choices that fit."""
  return search.best_of(question, *search.candidates(question, *fits))
