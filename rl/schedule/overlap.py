"""The schedule as a value: the overlap of rollout, training and publishing."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

from rl.engine import contract
from rl.settings import checks

Consume = Literal["submit", "ready", "drop", "recycle"]
"""The order of training.

submit: in the order of submission. Nothing is ever too old.
ready: in the order of completion; only within a round of one version.
drop: in the order of completion. Groups that grow too old for the bound are
  cancelled at once, and another task of the same source takes their place.
recycle: as "drop", but the same task is played again.
"""

Admission = Literal["fifo", "frontier", "hard_frontier"]
"""The groups that decode first.

fifo: requests in the order of arrival.
frontier: the groups submitted first, and others wherever there is room.
hard_frontier: no more than `frontier_groups` unfinished groups are played.
"""

OldLogprob = Literal["decode", "snapshot", "recompute"]
"""The log-probability that the ratio of the loss compares with.

decode: as the engine recorded it with each token.
snapshot: under the learner's weights at the start of the round.
recompute: under the learner's weights when the group is trained.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redundancy:
  """Redundant rollouts, so that the learner need not wait for the slowest.

  Attributes:
    extra_groups: redundant groups per round. With a bound of 0 they are aborted
      as soon as the round has its groups. Otherwise they continue: the next
      round trains them, and the slowest grow too old and are dropped.
    extra_members: redundant members per group; the first `group_size` to end
      are the group.

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
  """The schedule of admission, training and publishing.

  A round ends with one publish. Group i is admitted when
  i < (version + max_staleness + 1) * groups_per_round. Consumed in that order
  it trains at version i // groups_per_round, so admission alone bounds
  staleness; in any other order the bound is checked.

  Attributes:
    groups_per_round: R, the groups trained between two publishes.
    updates_per_round: optimizer steps in a round. Update j of a round trains
      on data from weights j updates old; where rounds overlap, some data is
      older by all updates of one round or more.
    groups_per_microbatch: groups per gradient accumulation; None if
      `tokens_per_microbatch` decides.
    tokens_per_microbatch: a token budget per gradient accumulation, in ids of
      the members that may be trained, context included. The learner takes the
      longest prefix, in the order of training, of the groups that are ready and
      fit, or one larger group alone. A group is never split, and an idle
      learner never waits for the budget to fill.
    wait_for_round: trains only when the last group of the round is ready, as a
      synchronous system does; otherwise as soon as a micro-batch is.
    max_staleness: eta, in rounds: the bound on T - F of every trained group,
      from the version F of its first token to the version T it trains at.
    consume: order of training, and the fate of groups that are too old.
    on_publish: the fate of trajectories in flight when weights arrive; with a
      bound of 0 there are none. "drain": an engine first ends the trajectories
      that have begun on it, while others decode, so each has one version.
      "recompute": trajectories continue, and every token is sampled from keys
      and values of its own version. "keep_kv": from older ones as well;
      publishing is cheaper, but no forward pass of one version repeats its
      log-probability. The recorded one is still right for the ratio, but the
      gap between engine and learner can no longer be measured.
    admission: which groups decode first.
    frontier_groups: F, the unfinished groups of a hard frontier.
    old_logprob: the policy in the denominator of the loss's ratio. "decode":
      the one that sampled each token, as the engine recorded it. "snapshot":
      the weights at the beginning of the round, the same for all its updates:
      the proximal policy of decoupled PPO. "recompute": those at the time of
      training, so that only `algorithm.epochs` take the ratio away from 1.
      `algorithm.correction` weights the difference between either of the last
      two and the engine.
    redundancy: rollouts beyond those that are needed.
    too_slow_after: attempts in a row, in the slot of one group, that grow too
      old before any source may take the slot.

  Source: keeping keys and values, PipelineRL, arXiv 2509.19128; frontier and
  token budget, RolloutPipe, 2606.26997.
  """

  groups_per_round: int = 32
  updates_per_round: int = 1
  groups_per_microbatch: int | None = 8
  tokens_per_microbatch: int | None = None
  wait_for_round: bool = False
  max_staleness: int = 0
  consume: Consume = "submit"
  on_publish: contract.InFlight = "drain"
  admission: Admission = "frontier"
  frontier_groups: int = 0
  old_logprob: OldLogprob = "decode"
  redundancy: Redundancy = Redundancy()
  too_slow_after: int = 3

  @property
  def groups_per_update(self) -> int:
    """Groups whose gradients one optimizer step sums."""
    return self.groups_per_round // self.updates_per_round

  @property
  def streams(self) -> bool:
    """True if gradients accumulate before all groups of an update are ready."""
    return self.groups_per_batch < self.groups_per_update

  @property
  def groups_per_batch(self) -> int:
    """Groups that are accumulated together; by tokens, the fewest of them."""
    if self.wait_for_round:
      return self.groups_per_update
    return self.groups_per_microbatch or 1

  @property
  def checks_age(self) -> bool:
    """True if a group can turn out to be too old."""
    return self.max_staleness > 0 and self.consume in ("drop", "recycle")

  @property
  def drains(self) -> bool:
    """True if trajectories of one version outlive a round of training."""
    return self.max_staleness > 0 and self.on_publish == "drain"

  @property
  def publishes_behind_training(self) -> bool:
    """True if the next round may train before its weights are served."""
    return self.max_staleness > 0

  @property
  def max_groups_in_play(self) -> int:
    """Groups that may be played at once, at most."""
    if self.admission == "hard_frontier":
      return self.frontier_groups
    window = (self.max_staleness + 1) * self.groups_per_round
    return window + self.redundancy.extra_groups

  def validate(self) -> None:
    """Raises ValueError on a schedule that cannot run or keep its bound."""
    counts = ("groups_per_round", "updates_per_round", "groups_per_microbatch")
    out = "a round trains at least one group"
    checks.at_least(self, 1, *counts, "too_slow_after", out=out)
    checks.at_least(self, 1, "tokens_per_microbatch", out="none is no budget")
    checks.at_least(self, 0, "frontier_groups", out="0 is none")
    checks.at_least(self, 0, "max_staleness", out="0 is synchronous")
    what = f"groups_per_round={self.groups_per_round}"
    checks.divides(self, self.groups_per_round, what, "updates_per_round")
    self._validate_microbatch()
    refuse = functools.partial(checks.refuse, self)
    if self.on_publish == "abort":
      why = "all in flight would end as faults; use on_publish=recompute"
      refuse("on_publish", why=why)
    if self.max_staleness:
      if self.wait_for_round:
        why = "nothing is gained; use max_staleness=0, or wait_for_round=false"
        refuse("wait_for_round", "max_staleness", why=why)
      if self.consume == "ready":
        why = "no bound holds for slow groups; use consume=submit, or drop or "
        why += "recycle, which check the age"
        refuse("consume", "max_staleness", why=why)
    else:
      if self.on_publish == "keep_kv":
        why = "nothing in flight could keep any; use on_publish=drain"
        refuse("on_publish", "max_staleness", why=why)
      if self.consume in ("drop", "recycle"):
        why = "nothing can be too old; use consume=ready or submit"
        refuse("consume", "max_staleness", why=why)
    if self.redundancy.extra_groups and self.consume == "submit":
      way = "drop" if self.max_staleness else "ready"
      why = f"the slowest group would be waited for; use consume={way}"
      refuse("redundancy.extra_groups", "consume", why=why)
    if self.admission == "hard_frontier" and self.frontier_groups < 1:
      why = f"nothing would be played; use {self.groups_per_batch} or more"
      refuse("frontier_groups", "admission", why=why)
    if self.admission == "hard_frontier" and self.consume != "submit":
      why = "a frontier is the groups submitted first; use consume=submit"
      refuse("consume", "admission", why=why)

  def _validate_microbatch(self) -> None:
    """Raises ValueError unless one setting says what a micro-batch holds."""
    names = "tokens_per_microbatch", "groups_per_microbatch"
    refuse = functools.partial(checks.refuse, self)
    if self.groups_per_microbatch is not None:
      if self.tokens_per_microbatch is not None:
        why = "a micro-batch has one size; use groups_per_microbatch=none, or "
        refuse(*names, why=why + "tokens_per_microbatch=none")
      what = f"the {self.groups_per_update} groups of an update"
      checks.divides(self, self.groups_per_update, what, names[1])
    elif self.tokens_per_microbatch is None:
      why = "a micro-batch has no size; set one of them"
      refuse(*names, why=why)
    elif self.wait_for_round:
      why = "a round that is waited for is accumulated as a whole; use "
      why += f"groups_per_microbatch={self.groups_per_update} and "
      why += "tokens_per_microbatch=none, or wait_for_round=false"
      refuse(names[0], "wait_for_round", why=why)


def priority(
  schedule: Overlap,
) -> Callable[[int, int], tuple[int, ...]]:
  """Returns (group, index) -> priority of its requests, lowest first."""
  if schedule.admission == "fifo":
    return lambda group, index: ()
  return lambda group, index: (group, index)


def sync(
  groups_per_round: int,
  updates_per_round: int = 1,
  groups_per_microbatch: int | None = None,
) -> Overlap:
  """Returns the schedule without overlap: rollout, training, publishing."""
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
  """Returns a schedule of one update a round, begun while its tail decodes.

  The gradient is summed as groups complete, and is that of `sync`: a token is
  trained under the weights that sampled it.

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
  """Returns a schedule of several updates a round, the first while it decodes.

  An update takes complete groups, and the decode pools keep their weights for
  the round. That is not lag 0: update j of a round trains on data j updates
  old, as in `sync`.

  Args:
    hard: play at most `frontier_groups` at once, by default those of one
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
  """Returns a schedule that plays the next round while this one trains: lag 1.

  Weights are published when all trajectories that have begun have ended.

  Source: slime's train_async; StreamRL, arXiv 2504.15930.
  """
  return bounded(groups_per_round, 1, groups_per_microbatch)


def bounded(
  groups_per_round: int,
  max_staleness: int,
  groups_per_microbatch: int | None = None,
) -> Overlap:
  """Returns a schedule within a bound, with one version a trajectory.

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
  updates_per_round: int = 1,
) -> Overlap:
  """Returns a schedule that plays on: weights arrive inside trajectories.

  Every token carries the version that sampled it. Cached keys and values are
  recomputed under the new weights, or with "keep_kv" left as they are.

  Source: RollArt, arXiv 2512.22560, section 6.2; AReaL, 2505.24298; with
  "keep_kv" PipelineRL, 2509.19128.
  """
  return Overlap(
    groups_per_round=groups_per_round,
    updates_per_round=updates_per_round,
    groups_per_microbatch=_microbatch(
      groups_per_round // max(updates_per_round, 1), groups_per_microbatch
    ),
    max_staleness=max_staleness,
    on_publish=on_publish,
  )


def _microbatch(groups_per_update: int, given: int | None) -> int:
  """Returns `given`, or the greatest common divisor with 8."""
  return math.gcd(8, groups_per_update) if given is None else given
