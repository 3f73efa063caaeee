"""Small simulated runs, of which much can be worked out by hand."""

import dataclasses

import pytest

from rl.rollout import group_rollout
from rl.simulation import distributions, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import result as simulation_result

# A token of 8 sequences takes 0.01 (1 + 8 / 8) = 0.02 s.
SPEED = simulated_processor.Speed(
  tau0_s=0.01, b0=8.0, slots=8, kv_tokens=1 << 16, update_s=2.0
)
CONSTANT = workload.Workload(
  prompt_tokens=distributions.Fixed(2.0),
  answer_tokens=distributions.Fixed(100.0),
)
HEAVY = workload.Workload(
  prompt_tokens=distributions.Fixed(2.0),
  answer_tokens=distributions.LogNormal(mean=100.0, sigma=0.9, max_value=800.0),
)
AGENT = workload.Workload(
  name="agent",
  turns=distributions.LogNormal(mean=3.0, sigma=0.5),
  answer_tokens=distributions.LogNormal(mean=30.0, sigma=0.9),
  step_s=distributions.LogNormal(mean=0.5, sigma=1.0, tail_share=0.05),
  start_s=distributions.Gaussian(mean=1.0, sigma=0.5),
  reward_s=distributions.LogNormal(mean=0.2, sigma=0.5),
  step_fault=0.01,
  reward_fault=0.02,
)


def settings(schedule, *workloads, engines=1, size=2, **changes):
  """Returns a run whose learner needs 1 ms an id and 1 s an update."""
  return dataclasses.replace(
    simulate.Simulation(
      cluster=simulate.Cluster(
        learner=simulated_learner.LearnerSpeed(token_s=1e-3, update_s=1.0),
        pools=(simulate.EnginePool(engines=engines, speed=SPEED),),
        transfer_s=3.0,
      ),
      workloads=workloads or (CONSTANT,),
      overlap=schedule,
      rollout=group_rollout.Rollout(
        group_size=size,
        max_turns=8,
        turn_tokens=1000,
        max_tokens=10_000,
        step_s=600.0,
      ),
      rounds=6,
    ),
    **changes,
  )


def run(schedule, *workloads, **changes):
  simulated = settings(schedule, *workloads, **changes)
  return simulation_result.measure(simulate.simulate(simulated))


def close(number):
  return pytest.approx(number, abs=1e-4)
