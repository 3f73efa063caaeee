"""What the tasks of a run ask for, whatever hardware it has.

One simulated run in which nothing ever queues: what is left of time without
decoding is that of environments and rewards. Draws depend on the seed and the
play of a task alone, so these are the tokens and waits of every other run of
the same tasks, but for which member of a group has which of its plays.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Bool, Float64

from rl.audit import event_log
from rl.data import trajectory
from rl.planning import problem as problem_lib
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import simulate

# What a token takes however many decode; it is taken off again.
_TOKEN_S = 0.01
_NO_LIMIT = simulated_processor.Speed(
  tau0_s=_TOKEN_S, b0=1e18, slots=1 << 40, kv_tokens=1 << 60
)


@dataclasses.dataclass(frozen=True, eq=False)
class Demand:
  """Numbers of N groups in the order of submission, each of G members.

  Attributes:
    tokens: sampled.
    context: ids that come from environments, each encoded once at least.
    trained: ids that the learner computes; 0 of a member with a fault.
    broken: a fault ended the episode, which is then part of a group only for
      want of others; where only the reward failed it is like any other.
    wait_s: from the first call to the end of the episode, without decoding.
    reward_s: of all calls of the reward, until one succeeds or none is left.
  """

  tokens: Float64[np.ndarray, "N G"]
  context: Float64[np.ndarray, "N G"]
  trained: Float64[np.ndarray, "N G"]
  broken: Bool[np.ndarray, "N G"]
  wait_s: Float64[np.ndarray, "N G"]
  reward_s: Float64[np.ndarray, "N G"]


class Demands:
  """The demand of a question, for every redundancy that it allows.

  Args:
    problem: `Planning.window` says how many rounds there are.
  """

  def __init__(self, problem: problem_lib.Planning):
    self._asked = problem
    self.of = functools.cache(self._of)

  def _of(self, redundancy: overlap.Redundancy) -> Demand:
    """Returns the demand of all groups until the last round that counts."""
    problem = self._asked
    groups = problem.groups_per_round + redundancy.extra_groups
    members = problem.rollout.group_size + redundancy.extra_members
    count = problem.window.stop * groups
    run = simulate.Simulation(
      cluster=simulate.Cluster(
        learner=simulated_learner.Learner(token_s=0.0, update_s=0.0),
        pools=(simulate.Pool(engines=1, speed=_NO_LIMIT),),
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


def _measured(record: simulate.Record, count: int, members: int) -> Demand:
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
  return Demand(tokens, context, trained, broken, wait_s, reward_s)


def num_tokens(record: simulate.Record) -> int:
  """Returns tokens that were trained in the rounds that count."""
  counted = record.settings.counted
  return sum(
    event["tokens"]
    for event in event_log.of_kind(record.events, "trained")
    if event["version"] in counted
  )
