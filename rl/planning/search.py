"""Searches the best use of a fleet: lower bounds first, then simulated runs.

choices --lower_bound--> candidates, sorted by their best case
        --estimate--> simulated one by one, until none of the rest can be better

Choices whose lower bound does not beat the best run so far are never simulated,
so the plan is the same as after simulating all of them.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rl.planning import lower_bound, workload_demand
from rl.planning import problem as problem_lib
from rl.simulation import result as simulation_result
from rl.simulation import simulate

Fits = Callable[[problem_lib.FleetChoice], str | None]
"""Returns the reason against a choice, or None."""
Estimated = Callable[[problem_lib.Planning, "Candidate"], "ChoiceEstimate"]
"""Returns the estimate of a choice, as `estimate` does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A choice with its best case.

  Attributes:
    key: `Goal.key` of the lower bound.
  """

  choice: problem_lib.FleetChoice
  bound: lower_bound.LowerBound
  key: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceEstimate:
  """A simulated choice.

  Attributes:
    cost: of a step, on the devices in use.
    tokens: trained in a step.
    bound_by: the largest part of a step's time; see `binding`.
    share: of that part in a step's time.
    key: `Goal.key` of the result.
  """

  choice: problem_lib.FleetChoice
  bound: lower_bound.LowerBound
  result: simulation_result.Result
  cost: float
  tokens: float
  bound_by: str
  share: float
  key: tuple[float, ...]

  @property
  def lag_mean(self) -> float:
    """Mean rounds from the first token of a group to its training."""
    return mean_lag(self.result)

  @property
  def lag_max(self) -> int:
    """Most rounds from the first token of a group to its training."""
    return max(self.result.group_lags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetPlan:
  """The answer to a planning problem.

  Attributes:
    estimates: of all simulated choices, the best first.
    choices: number of choices that fit.
    refused: numbers of choices that do not fit, by reason.
    complete: no other choice can be better by more than `Planning.tolerance`.
  """

  estimates: Sequence[ChoiceEstimate]
  choices: int
  refused: Mapping[str, int]
  complete: bool

  @property
  def best(self) -> ChoiceEstimate:
    """The best choice."""
    return self.estimates[0]

  @property
  def met(self) -> bool:
    """True when the best keeps the bounds of the goal."""
    return self.best.key[0] == 0.0


def best_of(
  problem: problem_lib.Planning,
  waiting: Sequence[Candidate],
  refused: Mapping[str, int],
  estimated: Estimated | None = None,
) -> FleetPlan:
  """Returns the best of all candidates, after simulating all that could be.

  Args:
    waiting, refused: see `candidates`.
    estimated: simulates a candidate; None: `estimate`.
  """
  best: ChoiceEstimate | None = None
  estimates: list[ChoiceEstimate] = []
  complete = True
  for candidate in waiting:
    if best is not None and not _promising(candidate.key, best.key, problem):
      break
    if _has_idle_places(problem, candidate.choice, estimates):
      continue
    if len(estimates) == problem.max_simulations:
      complete = False
      break
    estimates.append((estimated or estimate)(problem, candidate))
    best = min(estimates, key=lambda one: _rank(problem, one))
  return FleetPlan(
    estimates=sorted(estimates, key=lambda one: _rank(problem, one)),
    choices=len(waiting),
    refused=refused,
    complete=complete,
  )


def fitting(
  problem: problem_lib.Planning, fits: Fits = lambda choice: None
) -> tuple[list[problem_lib.FleetChoice], dict[str, int]]:
  """Returns the choices that fit, and the number of others by reason.

  Raises:
    ValueError: none fits, or a setting of the problem cannot work.
  """
  problem.validate()
  choices = problem.choices()
  reasons = [fits(choice) for choice in choices]
  refused = dict(collections.Counter(why for why in reasons if why))
  fit = [one for one, why in zip(choices, reasons, strict=True) if not why]
  if not fit:
    reason = max(refused, key=lambda why: refused[why])
    raise ValueError(
      f"none of {len(choices)} choices fits, {refused[reason]} of them "
      f"because {reason}"
    )
  return fit, refused


def candidates(
  problem: problem_lib.Planning, fits: Fits = lambda choice: None
) -> tuple[list[Candidate], dict[str, int]]:
  """Returns candidates, the most promising first, and the others by reason.

  Raises:
    ValueError: none fits, or a setting of the problem cannot work.
  """
  fit, refused = fitting(problem, fits)
  demand = functools.cache(functools.partial(workload_demand.of, problem))
  waiting = [
    _candidate(problem, choice, demand(choice.overlap.redundancy))
    for choice in fit
  ]
  # Among equally good candidates the cheapest comes first.
  waiting.sort(key=lambda one: (one.key, problem.cost(one.choice)))
  return waiting, refused


def _candidate(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  demand: workload_demand.WorkloadDemand,
) -> Candidate:
  if not demand.tokens.any():
    raise ValueError(
      "workloads: nothing is sampled: no environment starts, by start_fault "
      f"or within rollout.step_s={problem.rollout.step_s:g}, or no prompt "
      f"leaves room in rollout.max_tokens={problem.rollout.max_tokens}"
    )
  cluster, hosts = problem.cluster(choice), problem.hosts(choice)
  demand, num_seats = _graded(problem, choice, demand)
  bound = lower_bound.of_choice(
    demand,
    cluster,
    choice.overlap,
    problem.window,
    problem.rollout.group_size,
    num_slots=(
      hosts.count * hosts.slots if hosts and not hosts.sources else math.inf
    ),
    num_seats=num_seats,
  )
  surplus = choice.overlap.redundancy.extra_groups
  if (
    choice.overlap.checks_age
    or problem.draws_vary
    or (surplus and len(problem.workloads) > 1)
  ):
    # The tasks that are played depend on those that came too late. The last
    # publish of the window may go on behind it.
    rounds = len(problem.window)
    bound = dataclasses.replace(
      bound,
      step_s=cluster.publish_s * (rounds - 1) / rounds,
      tokens=float("inf"),
    )
  key = problem.goal.key(bound.step_s, problem.cost(choice), bound.tokens)
  return Candidate(choice=choice, bound=bound, key=key)


def _graded(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  demand: workload_demand.WorkloadDemand,
) -> tuple[workload_demand.WorkloadDemand, float]:
  """Returns the demand that a queue for rewards leaves, and the seats."""
  seats = problem.rewards(choice)
  if seats is None:
    return demand, math.inf
  rounds = choice.overlap.max_staleness + 1
  calls = demand.tokens.size // problem.window.stop * rounds
  longest_s = float(demand.reward_s.max())
  wait_s = seats.cold_s + math.ceil(calls / seats.count) * longest_s
  if wait_s + longest_s > problem.rollout.grading.deadline_s:
    # A call may wait until its deadline, and no member need be trained.
    nothing = np.zeros_like(demand.trained)
    return dataclasses.replace(demand, trained=nothing), math.inf
  if any(one.reward_fault for one in problem.workloads):
    return demand, math.inf  # Waits before another call need no seat.
  return demand, seats.count


def _has_idle_places(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  estimates: Iterable[ChoiceEstimate],
) -> bool:
  """True when fewer seats or hosts were simulated, and nothing waited there."""
  hosts = problem.hosts(choice)
  if hosts and hosts.outages:
    return False
  for one in estimates:
    fewer, rewards, slots = one.choice, one.result.rewards, one.result.hosts
    places = {"reward_seats": fewer.reward_seats, "hosts": fewer.hosts}
    if dataclasses.replace(choice, **places) != fewer:
      continue
    if _suffices(
      fewer.reward_seats, choice.reward_seats, rewards and rewards.max_wait_s
    ) and _suffices(fewer.hosts, choice.hosts, slots and slots.max_wait_s):
      return True
  return False


def _suffices(
  fewer: int | None, more: int | None, waited_s: float | None
) -> bool:
  """True when more places than these, for which someone waited, are idle."""
  return fewer == more or ((more or 0) > (fewer or 0) and not waited_s)


def estimate(
  problem: problem_lib.Planning, candidate: Candidate
) -> ChoiceEstimate:
  """Simulates a choice and measures the run."""
  choice = candidate.choice
  record = simulate.simulate(problem.simulated(choice), keep_turns=False)
  result = simulation_result.measure(record)
  seats = result.rewards.alive_s / result.virtual_s if result.rewards else 0.0
  cost = problem.cost(choice, seats)
  tokens = workload_demand.num_tokens(record) / result.rounds
  bound_by, share = binding(result, candidate.bound)
  lag, faults = mean_lag(result), result.fault_share
  return ChoiceEstimate(
    choice=choice,
    bound=candidate.bound,
    result=result,
    cost=cost * result.step_s,
    tokens=tokens,
    bound_by=bound_by,
    share=share,
    key=problem.goal.key(result.step_s, cost, tokens, lag, faults),
  )


def mean_lag(result: simulation_result.Result) -> float:
  """Returns the mean rounds from a group's first token to its training."""
  lags = result.group_lags
  return sum(lag * n for lag, n in lags.items()) / sum(lags.values())


def binding(
  result: simulation_result.Result, bound: lower_bound.LowerBound
) -> tuple[str, float]:
  """Returns the largest part of the learner's time, and its share.

  "learner" is training and "publish" the wait for weights to arrive. The wait
  for groups counts for their slowest maker: "decode" (all engines in full use),
  "prefill", "hosts", "seats", "tail" (the longest answers, one after another)
  or "environments".
  """
  waits = result.learner_idle
  shares = {
    "learner": result.train_s / result.step_s,
    "publish": waits["publish"],
  }
  makers = ("decode", "prefill", "hosts", "seats", "tail", "environments")
  slowest = max(makers, key=lambda name: bound.parts[name])
  shares[slowest] = waits["data"]
  name = max(shares, key=lambda part: shares[part])
  return name, shares[name]


def _promising(
  bound: tuple[float, ...],
  best: tuple[float, ...],
  problem: problem_lib.Planning,
) -> bool:
  """True when a key of at least `bound` could beat the best noticeably."""
  if bound[0] != best[0]:
    return bound[0] < best[0]
  return bound[1] < best[1] * (1.0 - problem.tolerance)


def _rank(
  problem: problem_lib.Planning, one: ChoiceEstimate
) -> tuple[float, ...]:
  return (*one.key, problem.cost(one.choice))
