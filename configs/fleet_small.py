"""A planning problem: sixteen devices of two kinds.

python -m launch.plan --config=configs/fleet_small.py

Eight fast devices may train; eight cheaper ones only decode. Tasks are short
games with slow steps, and long answers of one turn.

Hardware: one CPU core. Duration: two minutes. Expected: plans, the fastest
first; a step of it takes 27 seconds.
"""

from rl.planning import fleet, problem
from rl.pools import affinity
from rl.rollout import group_rollout
from rl.simulation import distributions, workload
from rl.simulation import processor as simulated_processor


def get_config() -> problem.Planning:
  """Returns the question: the quickest step."""
  return problem.Planning(
    fleet=_fleet(),
    workloads=_workloads(),
    groups_per_round=16,
    rollout=group_rollout.Rollout(
      group_size=8,
      max_turns=16,
      turn_tokens=8_000,
      max_tokens=16_000,
      step_s=120.0,
    ),
    routing=affinity.Routing(prefer={"math": "bandwidth", "game": "compute"}),
  )


def _fleet() -> fleet.Fleet:
  compute = simulated_processor.Speed(
    tau0_s=0.012,
    b0=64.0,
    prefill_per_s=20_000.0,
    slots=32,
    kv_tokens=600_000,
    update_s=1.0,
  )
  bandwidth = simulated_processor.Speed(
    tau0_s=0.010,
    b0=96.0,
    prefill_per_s=5_000.0,
    slots=32,
    kv_tokens=900_000,
    update_s=1.0,
  )
  return fleet.Fleet(
    kinds=(
      fleet.DeviceKind(
        name="compute",
        count=8,
        cost=2.8,
        kind="compute",
        engine_devices=2,
        speed=compute,
        learner_devices=(2, 4, 6),
        token_s=4e-4,
        scaling=0.95,
        update_s=1.0,
      ),
      fleet.DeviceKind(
        name="bandwidth",
        count=8,
        cost=1.0,
        kind="bandwidth",
        engine_devices=2,
        speed=bandwidth,
      ),
    ),
    transfer_s=3.0,
  )


def _workloads() -> tuple[workload.Workload, ...]:
  return (
    workload.Workload(
      name="math",
      answer_tokens=distributions.LogNormal(
        mean=1_500.0, sigma=0.9, max_value=8_000.0
      ),
    ),
    workload.Workload(
      name="game",
      turns=distributions.LogNormal(mean=6.0, sigma=0.5, max_value=16.0),
      answer_tokens=distributions.LogNormal(mean=100.0, sigma=0.7),
      step_s=distributions.LogNormal(
        mean=1.0, sigma=1.0, tail_share=0.01, tail_index=1.5, max_value=60.0
      ),
    ),
  )
