"""A cluster of 3,000 accelerators, one in six of which trains, in simulation.

python -m launch.simulate --config=configs/simulated_3000.py

504 accelerators train and 2,496 decode: 39 engines of 64 each, over which the
experts of a model are spread. The simulator models engines; `accelerators` only
weights their shares.

Five kinds of tasks at once, with prompts of up to 12k ids, answers of up to 46k
and 1 to 48 turns on average, on two kinds of decode pools, with a staleness of
1: the numbers of RollArt's production run (arXiv 2512.22560, section 8) where
they are published. Speeds are those of a mixture of experts of some 200 billion
parameters; environment latencies have a log-normal body and a Pareto tail. The
batch is not published; this one is as large as a fleet of this size needs.

Hardware: one CPU core and 550 MB. Duration: one to two minutes. Expected: a
step of 950 to 1,070 seconds; in all 5,200 to 6,400 simulated seconds and
140 million tokens, with 69 to 85 % of the decode slots in use.
"""

from rl.pools import affinity
from rl.rollout import grading, group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor


def get_config() -> simulate.Simulation:
  """Returns five rounds of 4,096 episodes."""
  return simulate.Simulation(
    cluster=_cluster(),
    workloads=_workloads(),
    overlap=overlap.in_flight(groups_per_round=512, max_staleness=1),
    rollout=group_rollout.Rollout(
      group_size=8,
      max_turns=100,
      turn_tokens=46_000,
      max_tokens=58_000,
      step_s=1_200.0,
      # The slowest rewards are tests that run for minutes.
      grading=grading.Retries(deadline_s=600.0),
    ),
    routing=affinity.Routing(
      prefer={"math": "bandwidth", "game": "bandwidth", "swe": "compute"}
    ),
    rounds=5,
  )


def _cluster() -> simulate.Cluster:
  """Returns 504 accelerators that train and 2,496 that decode."""
  compute = simulated_processor.Speed(
    tau0_s=0.012,
    b0=16.0,
    prefill_per_s=60_000.0,
    slots=24,
    kv_tokens=16_000_000,
    update_s=10.0,
  )
  bandwidth = simulated_processor.Speed(
    tau0_s=0.010,
    b0=24.0,
    prefill_per_s=15_000.0,
    slots=24,
    kv_tokens=24_000_000,
    update_s=10.0,
  )
  return simulate.Cluster(
    learner=simulated_learner.LearnerSpeed(
      token_s=8e-6, update_s=5.0, accelerators=504
    ),
    pools=(
      simulate.EnginePool(
        name="h800",
        engines=24,
        speed=compute,
        kind="compute",
        cost=2.85,
        accelerators=64,
      ),
      simulate.EnginePool(
        name="h20",
        engines=15,
        speed=bandwidth,
        kind="bandwidth",
        cost=1.0,
        accelerators=64,
      ),
    ),
    transfer_s=20.0,
  )


def _workloads() -> tuple[workload.Workload, ...]:
  short = distributions.LogNormal(mean=0.3, sigma=0.8)
  slow = distributions.LogNormal(
    mean=2.0, sigma=1.0, tail_share=0.01, tail_index=1.5, max_value=300.0
  )
  reset = distributions.LogNormal(
    mean=30.0, sigma=0.6, tail_share=0.02, tail_index=1.3, max_value=600.0
  )
  return (
    workload.Workload(
      name="math",
      share=3.0,
      turns=distributions.LogNormal(mean=2.0, sigma=0.5, max_value=5.0),
      prompt_tokens=distributions.LogNormal(mean=400.0, sigma=0.5),
      answer_tokens=distributions.LogNormal(
        mean=4_000.0, sigma=0.9, max_value=46_000.0
      ),
      step_s=short,
      reward_s=distributions.LogNormal(mean=1.0, sigma=1.0),
    ),
    workload.Workload(
      name="swe",
      share=2.0,
      turns=distributions.LogNormal(mean=40.0, sigma=0.2, max_value=50.0),
      prompt_tokens=distributions.LogNormal(
        mean=6_000.0, sigma=0.4, max_value=12_000.0
      ),
      answer_tokens=distributions.LogNormal(mean=250.0, sigma=0.9),
      reply_tokens=distributions.LogNormal(mean=300.0, sigma=0.8),
      start_s=reset,
      step_s=slow,
      reward_s=distributions.LogNormal(mean=20.0, sigma=0.8),
      start_fault=0.001,
    ),
    workload.Workload(
      name="webshop",
      turns=distributions.LogNormal(mean=15.0, sigma=0.5, max_value=30.0),
      prompt_tokens=distributions.LogNormal(mean=1_500.0, sigma=0.3),
      answer_tokens=distributions.LogNormal(mean=150.0, sigma=0.7),
      reply_tokens=distributions.LogNormal(mean=400.0, sigma=0.5),
      step_s=short,
    ),
    workload.Workload(
      name="frozen_lake",
      turns=distributions.LogNormal(mean=48.0, sigma=0.4, max_value=100.0),
      answer_tokens=distributions.LogNormal(mean=120.0, sigma=0.7),
      step_s=distributions.Fixed(0.02),
    ),
    workload.Workload(
      name="game",
      prompt_tokens=distributions.LogNormal(mean=800.0, sigma=0.5),
      answer_tokens=distributions.LogNormal(mean=3_000.0, sigma=0.9),
    ),
  )
