"""The schedule as a value: what may run while what else runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from rl.engine import contract
from rl.settings import checks

Consume = Literal["submit", "ready", "drop", "recycle"]
"""In which order groups are trained.

submit: in the order in which they were submitted. Nothing is ever too old.
ready: as they are complete; only within a round of one version.
drop: as they are complete. What can no longer be trained within the bound is
  cancelled at once, and another task of the same source takes its place.
recycle: as "drop", and the same task is played again.
"""

Admission = Literal["fifo", "frontier", "hard_frontier"]
"""Which groups decode first.

fifo: requests are served as they come.
frontier: the groups submitted first, and others wherever there is room.
hard_frontier: no more than `frontier_groups` unfinished groups are played.
"""

OldLogprob = Literal["decode", "snapshot", "recompute"]
"""What the ratio of the loss compares with.

decode: the log-probability that the engine recorded with each token.
snapshot: that of the learner's weights from the start of the round.
recompute: that of the learner's weights when the group is trained.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redundancy:
  """What is played beyond need, so that the slowest need not be waited for.

  Attributes:
    extra_groups: of a round. With a bound of 0 the rest is aborted as soon as
      the round has its groups. Else it goes on: the next round trains what
      this one did not need, and the slowest of it grows too old and is dropped.
    extra_members: of a group; the first `group_size` that end make it up.

  Source: RollArt, arXiv 2512.22560, section 6.3.
  """

  extra_groups: int = 0
  extra_members: int = 0

  def validate(self) -> None:
    """Raises ValueError on a negative count."""
    names = ("extra_groups", "extra_members")
    checks.at_least(self, 0, *names, where="overlap.redundancy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """When groups are admitted, trained and their weights published.

  A round is what one publish rests on. Group i is admitted when
  i < (version + max_staleness + 1) * groups_per_round. Consumed in that order
  it trains at version i // groups_per_round, so admission alone bounds
  staleness; in any other order the bound is checked.

  Attributes:
    groups_per_round: R groups trained between two publishes.
    updates_per_round: optimizer steps in a round. Update j of a round trains
      on data from weights j updates old.
    groups_per_microbatch: groups of one gradient accumulation.
    wait_for_round: train only when the last group of the round is ready, as a
      synchronous system does; else as soon as a micro-batch is.
    max_staleness: eta, in rounds: T - F of every trained group is at most
      this, from the version of its first token to the one it trains at.
    consume: order of training, and what becomes of groups that are too old.
    on_publish: what becomes of what is in flight when weights arrive. With a
      bound of 0 nothing is. "drain": an engine first ends the trajectories
      that have begun on it, while others decode, so each has one version.
      "recompute": trajectories go on, and every token is sampled from keys and
      values of its own version. "keep_kv": from older ones as well; publishing
      is cheaper, and no forward pass of one version gives its log-probability
      again. What the engine recorded is still what the ratio needs, but
      whether engine and learner agree can no longer be measured.
    admission: which groups decode first.
    frontier_groups: F unfinished groups of a hard frontier.
    old_logprob: the policy that the ratio of a loss is against. "decode": the
      one that sampled, token by token, as the engine recorded it. "snapshot":
      the weights at the beginning of the round; "recompute": those at the time
      of training. What lies between either and the engine is for
      `algorithm.correction` to weigh.
    redundancy: what is played beyond need.
    too_slow_after: attempts in a row, in the place of one group, that grew too
      old, after which their source is too slow for the bound there and any
      source may take the place.

  Source: keeping keys and values, PipelineRL, arXiv 2509.19128; frontier,
  RolloutPipe, 2606.26997.
  """

  groups_per_round: int = 32
  updates_per_round: int = 1
  groups_per_microbatch: int = 8
  wait_for_round: bool = False
  max_staleness: int = 0
  consume: Consume = "submit"
  on_publish: contract.InFlight = "drain"
  admission: Admission = "frontier"
  frontier_groups: int = 0
  old_logprob: OldLogprob = "decode"
  redundancy: Redundancy = dataclasses.field(default_factory=Redundancy)
  too_slow_after: int = 3

  @property
  def groups_per_update(self) -> int:
    """Groups whose gradients one optimizer step sums."""
    return self.groups_per_round // self.updates_per_round

  @property
  def streams(self) -> bool:
    """Whether gradients accumulate before the groups of an update are all."""
    return (
      not self.wait_for_round
      and self.groups_per_microbatch < self.groups_per_update
    )

  @property
  def checks_age(self) -> bool:
    """Whether a group can turn out to be too old."""
    return self.max_staleness > 0 and self.consume in ("drop", "recycle")

  @property
  def drains(self) -> bool:
    """Whether trajectories of one version outlive a round of training."""
    return self.max_staleness > 0 and self.on_publish == "drain"

  def validate(self) -> None:
    """Raises ValueError on a schedule that cannot run or keep its bound."""
    self._validate_counts()
    checks.one_of(self, Consume, "consume")
    checks.one_of(self, contract.InFlight, "on_publish")
    checks.one_of(self, Admission, "admission")
    checks.one_of(self, OldLogprob, "old_logprob")
    self.redundancy.validate()
    if self.max_staleness and self.updates_per_round > 1:
      raise ValueError(
        f"overlap.updates_per_round={self.updates_per_round} with "
        f"max_staleness={self.max_staleness}: in flight, weights are "
        "published after every update; use updates_per_round=1"
      )
    self._validate_on_publish()
    self._validate_order()

  def _validate_counts(self) -> None:
    counts = ("groups_per_round", "updates_per_round", "groups_per_microbatch")
    out = "a round trains at least one group"
    checks.at_least(self, 1, *counts, "too_slow_after", out=out)
    checks.at_least(self, 0, "frontier_groups", out="0 is none")
    checks.at_least(self, 0, "max_staleness", out="0 is synchronous")
    if self.groups_per_round % self.updates_per_round:
      raise ValueError(
        f"overlap.updates_per_round={self.updates_per_round} does not divide"
        f" groups_per_round={self.groups_per_round}; use "
        f"{math.gcd(self.updates_per_round, self.groups_per_round)}"
      )
    if self.groups_per_update % self.groups_per_microbatch:
      raise ValueError(
        f"overlap.groups_per_microbatch={self.groups_per_microbatch} does "
        f"not divide the {self.groups_per_update} groups of an update; use "
        f"{math.gcd(self.groups_per_microbatch, self.groups_per_update)}"
      )

  def _validate_on_publish(self) -> None:
    if self.on_publish == "abort":
      raise ValueError(
        "overlap.on_publish='abort' would end episodes as faults of the "
        "engine, with nothing to train on; use on_publish=recompute"
      )
    if not self.max_staleness and self.on_publish == "keep_kv":
      raise ValueError(
        "overlap.on_publish='keep_kv' with max_staleness=0: nothing is in "
        "flight, so all it could keep is stale prefixes; use on_publish=drain"
      )

  def _validate_order(self) -> None:
    if self.wait_for_round and self.max_staleness:
      raise ValueError(
        f"overlap.wait_for_round=true with max_staleness={self.max_staleness}:"
        " a round that is waited for whole has no use for the next one; use "
        "max_staleness=0, or wait_for_round=false"
      )
    if self.max_staleness and self.consume == "ready":
      raise ValueError(
        f"overlap.consume=ready with max_staleness={self.max_staleness}: in "
        "the order of completion a slow group grows older than any bound; use "
        "consume=submit, or drop or recycle, which check it"
      )
    if not self.max_staleness and self.consume in ("drop", "recycle"):
      raise ValueError(
        f"overlap.consume={self.consume} with max_staleness=0: nothing can be "
        "too old; use consume=ready or submit"
      )
    if self.redundancy.extra_groups and self.consume == "submit":
      raise ValueError(
        "overlap.redundancy.extra_groups="
        f"{self.redundancy.extra_groups} with consume=submit: the slowest "
        "group would be waited for all the same; use consume="
        + ("drop" if self.max_staleness else "ready")
      )
    hard = self.admission == "hard_frontier"
    if hard and self.frontier_groups < 1:
      raise ValueError(
        f"overlap.frontier_groups={self.frontier_groups} with "
        "admission=hard_frontier: nothing would be played; use at least "
        f"{self.groups_per_microbatch}"
      )
    if hard and self.consume != "submit":
      raise ValueError(
        f"overlap.consume={self.consume} with admission=hard_frontier: a "
        "frontier is the groups submitted first; use consume=submit"
      )


def priority(
  schedule: Overlap,
) -> Callable[[int, int], tuple[int, ...]]:
  """Returns what orders requests: (group, index) -> priority, lowest first."""
  if schedule.admission == "fifo":
    return lambda group, index: ()
  return lambda group, index: (group, index)


def sync(
  groups_per_round: int,
  updates_per_round: int = 1,
  groups_per_microbatch: int | None = None,
) -> Overlap:
  """Returns rollout, then training, then publishing: nothing overlaps."""
  return Overlap(
    groups_per_round=groups_per_round,
    updates_per_round=updates_per_round,
    groups_per_microbatch=_microbatch(
      groups_per_round // max(updates_per_round, 1), groups_per_microbatch
    ),
    wait_for_round=True,
  )


def strict_pipeline(
  groups_per_round: int, groups_per_microbatch: int | None = None
) -> Overlap:
  """Returns one update a round, its gradient summed while the tail decodes.

  The gradient is that of `sync`: every token is of the weights that it trains.

  Source: FlexMARL, arXiv 2602.09578; Periodic Asynchrony, 2511.18871.
  """
  return Overlap(
    groups_per_round=groups_per_round,
    groups_per_microbatch=_microbatch(groups_per_round, groups_per_microbatch),
    consume="ready",
  )


def rollout_pipe(
  groups_per_round: int,
  updates_per_round: int,
  groups_per_microbatch: int | None = None,
  frontier_groups: int | None = None,
  hard: bool = False,
) -> Overlap:
  """Returns several updates a round, on complete groups, as its tail decodes.

  The weights of the decode pools are fixed for the round. That is not lag 0:
  update j of a round trains on data j updates old, as it does in `sync`.

  Args:
    hard: play no more than `frontier_groups` at once, by default those of one
      update; else they only go first.

  Source: complete-group pipelining and frontier-group dispatch of RolloutPipe,
  arXiv 2606.26997.
  """
  per_update = groups_per_round // max(updates_per_round, 1)
  return Overlap(
    groups_per_round=groups_per_round,
    updates_per_round=updates_per_round,
    groups_per_microbatch=_microbatch(per_update, groups_per_microbatch),
    consume="submit" if hard else "ready",
    admission="hard_frontier" if hard else "frontier",
    frontier_groups=per_update if frontier_groups is None else frontier_groups,
  )


def one_step_off(
  groups_per_round: int, groups_per_microbatch: int | None = None
) -> Overlap:
  """Returns rollout of the next round while this one trains: a lag of 1.

  Weights are published when all that has begun has ended.

  Source: slime's train_async; StreamRL, arXiv 2504.15930.
  """
  return bounded(groups_per_round, 1, groups_per_microbatch)


def bounded(
  groups_per_round: int,
  max_staleness: int,
  groups_per_microbatch: int | None = None,
) -> Overlap:
  """Returns rollout within a bound, with one version a trajectory.

  Engines take new weights one by one, each when the trajectories that have
  begun on it have ended; `one_step_off` is this with a bound of 1.

  Source: ROLL Flash, arXiv 2510.11345.
  """
  return Overlap(
    groups_per_round=groups_per_round,
    groups_per_microbatch=_microbatch(groups_per_round, groups_per_microbatch),
    max_staleness=max_staleness,
    on_publish="drain",
  )


def in_flight(
  groups_per_round: int,
  max_staleness: int = 1,
  groups_per_microbatch: int | None = None,
  on_publish: contract.InFlight = "recompute",
) -> Overlap:
  """Returns rollout that never stops: weights arrive inside trajectories.

  Every token carries the version that sampled it. Cached keys and values are
  recomputed under the new weights, or with "keep_kv" left as they are.

  Source: RollArt, arXiv 2512.22560, section 6.2; AReaL, 2505.24298; with
  "keep_kv" PipelineRL, 2509.19128.
  """
  return Overlap(
    groups_per_round=groups_per_round,
    groups_per_microbatch=_microbatch(groups_per_round, groups_per_microbatch),
    max_staleness=max_staleness,
    on_publish=on_publish,
  )


def _microbatch(groups_per_update: int, given: int | None) -> int:
  """Returns `given`, or the largest divisor that 8 has as well."""
  return math.gcd(8, groups_per_update) if given is None else given
