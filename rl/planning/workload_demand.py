"""The demand of a workload: tokens and waits on any hardware.

Measured in one simulated run in which nothing ever queues, so that its time
without decoding is that of environments and rewards. Draws depend only on the
seed and the play of a task, so every other run of the same tasks has the same
tokens and waits; only the members that get them may differ.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float64

from rl.audit import event_log
from rl.data import trajectory
from rl.planning import problem as problem_lib
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import simulate

# Seconds of a token under any load; subtracted again from the waits.
_TOKEN_S = 0.01
_NO_LIMIT = simulated_processor.Speed(
  tau0_s=_TOKEN_S, b0=1e18, slots=1 << 40, kv_tokens=1 << 60
)


@dataclasses.dataclass(frozen=True, eq=False)
class WorkloadDemand:
  """The demand of N groups of G members, in the order of submission.

  Attributes:
    tokens: sampled.
    context: ids that come from environments, each encoded once at least.
    trained: ids that the learner computes; 0 of a member with a fault.
    broken: a fault ended the episode, so it joins a group only if too few
      others are left; a failed reward alone does not count.
    wait_s: from the first call to the end of the episode, without decoding.
    reward_s: of all calls of the reward, until one succeeds or none is left.
  """

  tokens: Float64[np.ndarray, "N G"]
  context: Float64[np.ndarray, "N G"]
  trained: Float64[np.ndarray, "N G"]
  broken: Bool[np.ndarray, "N G"]
  wait_s: Float64[np.ndarray, "N G"]
  reward_s: Float64[np.ndarray, "N G"]


def of(
  problem: problem_lib.Planning, redundancy: overlap.Redundancy
) -> WorkloadDemand:
  """Returns the demand of all groups until the last round that counts."""
  groups = problem.groups_per_round + redundancy.extra_groups
  members = problem.rollout.group_size + redundancy.extra_members
  count = problem.window.stop * groups
  run = simulate.Simulation(
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=0.0),
      pools=(simulate.EnginePool(engines=1, speed=_NO_LIMIT),),
      transfer_s=0.0,
    ),
    workloads=problem.workloads,
    overlap=overlap.sync(count),
    rollout=dataclasses.replace(problem.rollout, group_size=members),
    rounds=1,
    warmup=0,
    seed=problem.seed,
  )
  return _measured(simulate.simulate(run), count, members)


def _measured(
  record: simulate.RunRecord, count: int, members: int
) -> WorkloadDemand:
  tokens, context, trained, wait_s, reward_s = np.zeros((5, count, members))
  broken = np.ones((count, members), bool)
  began = np.zeros(count)
  grading: dict[tuple[int, int], float] = {}
  for event in record.events:
    kind = event["kind"]
    if kind == "submitted":
      began[event["group"]] = event["t"]
    if kind not in ("ended", "grading", "reward", "fault"):
      continue
    where = event["group"], event["index"]
    if kind == "ended":
      tokens[where] = event["tokens"]
      context[where] = event["length"] - event["tokens"]
      status = trajectory.Status(event["status"])
      broken[where] = not status.trainable
      trained[where] = event["length"] if status.trainable else 0.0
      lasted_s = event["t"] - began[where[0]]
      wait_s[where] = max(lasted_s - event["tokens"] * _TOKEN_S, 0.0)
    elif kind == "grading":
      grading[where] = event["t"]
    elif where in grading:
      reward_s[where] = event["t"] - grading[where]
      trained[where] *= kind == "reward"
  return WorkloadDemand(tokens, context, trained, broken, wait_s, reward_s)


def num_tokens(record: simulate.RunRecord) -> int:
  """Returns the tokens trained in the rounds that count."""
  counted = record.settings.counted
  return sum(
    event["tokens"]
    for event in event_log.of_kind(record.events, "trained")
    if event["version"] in counted
  )
