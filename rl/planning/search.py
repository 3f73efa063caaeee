"""Searches the best way to use a fleet: bounds first, then simulated runs.

choices --floor--> sorted by their best case --simulate--> until none that is
                                                           left can be better

A choice whose lower bound is no better than the best run so far is never
simulated, so the plan is that of simulating all of them.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from rl.planning import demand, lower_bound
from rl.planning import problem as problem_lib
from rl.simulation import result as simulation_result
from rl.simulation import simulate

Fits = Callable[[problem_lib.Choice], str | None]
"""Returns why a choice cannot be used, or nothing."""
Estimated = Callable[[problem_lib.Planning, "Candidate"], "Estimate"]
"""Returns what a choice is worth, as `estimate` does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A choice and how good it could be.

  Attributes:
    key: of `Goal.key` at the lower bound.
  """

  choice: problem_lib.Choice
  floor: lower_bound.Floor
  key: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """A choice that was simulated.

  Attributes:
    cost: of a step, on the devices that are used.
    tokens: trained in a step.
    bound_by: what most of a step's time goes to; see `binding`.
    share: of a step's time that does.
    key: of `Goal.key`.
  """

  choice: problem_lib.Choice
  floor: lower_bound.Floor
  result: simulation_result.Result
  cost: float
  tokens: float
  bound_by: str
  share: float
  key: tuple[float, ...]

  @property
  def lag_mean(self) -> float:
    """Rounds from the first token of a group to its training."""
    lags = self.result.group_lags
    return sum(lag * n for lag, n in lags.items()) / sum(lags.values())

  @property
  def lag_max(self) -> int:
    """The largest of these."""
    return max(self.result.group_lags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """An answer.

  Attributes:
    estimates: all that were simulated, the best first.
    choices: how many there were.
    refused: why choices did not fit, and how many for that reason.
    complete: nothing that was not simulated can be better by more than
      `Planning.tolerance`.
  """

  estimates: Sequence[Estimate]
  choices: int
  refused: Mapping[str, int]
  complete: bool

  @property
  def best(self) -> Estimate:
    """What to do."""
    return self.estimates[0]

  @property
  def met(self) -> bool:
    """Whether it keeps the bounds of the goal; else it is the nearest."""
    return self.best.key[0] == 0.0


def search(
  problem: problem_lib.Planning,
  fits: Fits = lambda choice: None,
  told: Callable[[Estimate], None] = lambda estimate: None,
) -> Plan:
  """Returns the best choice, having simulated what could be it.

  Args:
    fits: called before anything is simulated.
    told: of each run when it has ended.

  Raises:
    ValueError: the question has no answer; with the way out.
  """
  return best_of(problem, *candidates(problem, fits), told)


def best_of(
  problem: problem_lib.Planning,
  waiting: Sequence[Candidate],
  refused: Mapping[str, int],
  told: Callable[[Estimate], None] = lambda estimate: None,
  estimated: Estimated | None = None,
) -> Plan:
  """Returns the best of all candidates, having simulated what could be it.

  Args:
    waiting, refused: see `candidates`.
    estimated: simulates; `estimate` if nothing else does.
  """
  best: Estimate | None = None
  estimates: list[Estimate] = []
  complete = True
  for candidate in waiting:
    if best is not None and not _promising(candidate.key, best.key, problem):
      break
    if len(estimates) == problem.max_simulations:
      complete = False
      break
    estimates.append((estimated or estimate)(problem, candidate))
    told(estimates[-1])
    best = min(estimates, key=lambda one: _rank(problem, one))
  return _plan(problem, estimates, waiting, refused, complete)


def exhaustive(
  problem: problem_lib.Planning, fits: Fits = lambda choice: None
) -> Plan:
  """Returns the best choice, having simulated every one."""
  waiting, refused = candidates(problem, fits)
  estimates = [estimate(problem, candidate) for candidate in waiting]
  return _plan(problem, estimates, waiting, refused, complete=True)


def fitting(
  problem: problem_lib.Planning, fits: Fits = lambda choice: None
) -> tuple[list[problem_lib.Choice], dict[str, int]]:
  """Returns choices that fit, and why how many others do not.

  Raises:
    ValueError: none fits, or the question cannot be problem.
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
  """Returns choices that fit, the most promising first, and why others do not.

  Raises:
    ValueError: none fits, or the question cannot be problem.
  """
  fit, refused = fitting(problem, fits)
  demands = demand.Demands(problem)
  found = [_candidate(problem, choice, demands) for choice in fit]
  # Of what may be equally good the cheapest is looked at first.
  found.sort(key=lambda one: (one.key, problem.cost(one.choice)))
  return found, refused


def _candidate(
  problem: problem_lib.Planning,
  choice: problem_lib.Choice,
  demands: demand.Demands,
) -> Candidate:
  redundancy = choice.overlap.redundancy
  needs = demands.of(redundancy)
  if not needs.tokens.any():
    raise ValueError(
      f"workloads: nothing is sampled, for no prompt leaves room in rollout."
      f"max_tokens={problem.rollout.max_tokens}; raise it"
    )
  bound = lower_bound.floor(
    needs,
    cluster := problem.cluster(choice),
    choice.overlap,
    problem.window,
    problem.rollout.group_size,
  )
  if redundancy.extra_groups and len(problem.workloads) > 1:
    # Which tasks are played depends on which came too late.
    publish_s = lower_bound.publish_s(cluster)
    bound = dataclasses.replace(bound, step_s=publish_s, tokens=float("inf"))
  key = problem.goal.key(bound.step_s, problem.cost(choice), bound.tokens)
  return Candidate(choice=choice, floor=bound, key=key)


def estimate(problem: problem_lib.Planning, candidate: Candidate) -> Estimate:
  """Returns what a simulated run of a choice was worth."""
  choice = candidate.choice
  record = simulate.simulate(problem.simulated(choice))
  result = simulation_result.measure(record)
  cost = problem.cost(choice)
  tokens = demand.num_tokens(record) / result.rounds
  bound_by, share = binding(result, candidate.floor)
  return Estimate(
    choice=choice,
    floor=candidate.floor,
    result=result,
    cost=cost * result.step_s,
    tokens=tokens,
    bound_by=bound_by,
    share=share,
    key=problem.goal.key(result.step_s, cost, tokens),
  )


def binding(
  result: simulation_result.Result, bound: lower_bound.Floor
) -> tuple[str, float]:
  """Returns what most of the learner's time goes to, and that share of it.

  "learner" trains and "publish" waits for weights to arrive. When it waits for
  groups, that is for what takes longest to make them: "decode" (all engines in
  full use), "prefill", "tail" (the longest answers, one after another) or
  "environments".
  """
  waits = result.learner_idle
  shares = {
    "learner": result.train_s / result.step_s,
    "publish": waits["publish"],
  }
  makers = ("decode", "prefill", "tail", "environments")
  slowest = max(makers, key=lambda name: bound.parts[name])
  shares[slowest] = waits["data"]
  name = max(shares, key=lambda part: shares[part])
  return name, shares[name]


def _promising(
  least: tuple[float, ...],
  best: tuple[float, ...],
  problem: problem_lib.Planning,
) -> bool:
  """Whether what is at least `least` could beat the best noticeably."""
  if least[0] != best[0]:
    return least[0] < best[0]
  return least[1] < best[1] * (1.0 - problem.tolerance)


def _rank(problem: problem_lib.Planning, one: Estimate) -> tuple[float, ...]:
  return (*one.key, problem.cost(one.choice))


def _plan(
  problem: problem_lib.Planning,
  estimates: Iterable[Estimate],
  waiting: Sequence[Candidate],
  refused: Mapping[str, int],
  complete: bool,
) -> Plan:
  return Plan(
    estimates=sorted(estimates, key=lambda one: _rank(problem, one)),
    choices=len(waiting),
    refused=refused,
    complete=complete,
  )
