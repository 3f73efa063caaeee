"""The schedule as a value: what may run while what else runs."""

import dataclasses
import math

from rl import engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """When groups are admitted, trained and their weights published.

  A round is what one publish rests on. Groups are consumed in the order in
  which they were submitted, so that admission alone bounds staleness: group i
  is admitted when i < (version + max_staleness + 1) * groups_per_round, and
  trains at version i // groups_per_round.

  Attributes:
    groups_per_round: R groups trained between two publishes.
    updates_per_round: optimizer steps in a round. Update j of a round trains
      on data from weights j updates old.
    groups_per_microbatch: groups of one gradient accumulation.
    wait_for_round: train only when the last group of the round is ready, as a
      synchronous system does; else as soon as a micro-batch is.
    max_staleness: eta, in rounds: T - F of every trained group is at most
      this, from the version of its first token to the one it trains at.
    on_publish: what becomes of requests in flight when weights arrive. With a
      bound of 0 there are none. After "recompute" a token is sampled from keys
      and values of its own version; after "keep_kv" from older ones as well:
      publishing is cheaper, and no forward pass of one version gives its
      log-probability again. What the engine recorded is still what the ratio
      needs, but whether engine and learner agree can no longer be measured.

  Source: keeping keys and values, PipelineRL, arXiv 2509.19128.
  """

  groups_per_round: int = 32
  updates_per_round: int = 1
  groups_per_microbatch: int = 8
  wait_for_round: bool = False
  max_staleness: int = 0
  on_publish: engine.InFlight = "drain"

  @property
  def groups_per_update(self) -> int:
    """Groups whose gradients one optimizer step sums."""
    return self.groups_per_round // self.updates_per_round

  def validate(self) -> None:
    """Raises ValueError on a schedule that cannot run or keep its bound."""
    for name in (
      "groups_per_round",
      "updates_per_round",
      "groups_per_microbatch",
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f"overlap.{name}={getattr(self, name)} is below 1; a round trains"
          " at least one group"
        )
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
    if self.max_staleness < 0:
      raise ValueError(
        f"overlap.max_staleness={self.max_staleness} is below 0; 0 is "
        "synchronous"
      )
    if self.max_staleness and self.updates_per_round > 1:
      raise ValueError(
        f"overlap.updates_per_round={self.updates_per_round} with "
        f"max_staleness={self.max_staleness}: in flight, weights are "
        "published after every update; use updates_per_round=1"
      )
    self._validate_on_publish()

  def _validate_on_publish(self) -> None:
    if self.on_publish == "abort":
      raise ValueError(
        "overlap.on_publish='abort' would end episodes as faults of the "
        "engine, with nothing to train on; use on_publish=recompute"
      )
    if self.max_staleness and self.on_publish == "drain":
      raise ValueError(
        f"overlap.on_publish='drain' with max_staleness={self.max_staleness}: "
        "trajectories outlive a publish, so use on_publish=recompute or keep_kv"
      )
    if not self.max_staleness and self.on_publish == "keep_kv":
      raise ValueError(
        "overlap.on_publish='keep_kv' with max_staleness=0: nothing is in "
        "flight, so all it could keep is stale prefixes; use on_publish=drain"
      )


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


def round_pipelined(
  groups_per_round: int,
  updates_per_round: int = 1,
  groups_per_microbatch: int | None = None,
) -> Overlap:
  """Returns training on complete groups while the round's tail decodes.

  The weights of the decode pool are fixed for the round. That is not lag 0:
  update j of a round trains on data j updates old, as it does in `sync`.

  Source: complete-group pipelining of RolloutPipe, arXiv 2606.26997.
  """
  return Overlap(
    groups_per_round=groups_per_round,
    updates_per_round=updates_per_round,
    groups_per_microbatch=_microbatch(
      groups_per_round // max(updates_per_round, 1), groups_per_microbatch
    ),
  )


def in_flight(
  groups_per_round: int,
  max_staleness: int = 1,
  groups_per_microbatch: int | None = None,
  on_publish: engine.InFlight = "recompute",
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
