"""Lower bounds of a choice's step time, which no simulated run breaks.

Round v demand seconds W of training, w of them for its last batch, s of a
publish, and R = max(path, D, P, H, S) of rollout: the longest group alone,
grading included; all tokens and all contexts, at the rate of all engines in
full use; all episodes and all gradings, with every slot of hosts and every seat
taken. Where the engines of one pool encode, D has what decoding loses by that.
Let e(v) be the end of training round v - 1 and p(v) the time at which version v
serves, which admits the groups of round v + eta. Then

  p(v)           >= e(v) + s,  p(v + 1) >= p(v) + s
  e(v + 1)       >= e(v) + W
  e(v + eta + 1) >= p(v) + R + w
  e(v + n)       >= p(v) + D of rounds v + eta ... v + n - 1, and w
  e(v + 2)       >= p(v) + W            since publishes do not overlap
  p(v + 1)       >= p(v) + path of round v + eta, if engines drain
  e(v + 1)       >= p(v) + c + W        on-policy; c: until the first batch is
                                        ready, or the round, if it is waited for

and the longest path through these from the first to the last e is the bound.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from rl.planning import workload_demand
from rl.schedule import overlap as overlap_lib
from rl.simulation import simulate

# Rounding of the simulated engine: a token or timer may end so much earlier.
_SLACK = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerBound:
  """Lower bounds of a step, as means over the rounds that count.

  Attributes:
    step_s: of a step, with all waits that cannot be avoided.
    tokens: upper bound of the tokens that a step trains.
    parts: seconds that each part of a step takes alone: "decode", "prefill",
      "hosts" and "seats" (with each of them in use all the time), "learner",
      "publish", "tail" (decoding of the longest episode) and "environments"
      (with rewards, in that episode); the last two are divided by the rounds
      over which they may spread.
  """

  step_s: float
  tokens: float
  parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class _Rounds:
  """Lower bounds of every round, in seconds.

  Attributes:
    decode, prefill: with all engines in full use.
    hosts, seats: with all slots of hosts, or all seats of rewards, taken.
    path, first: until the last group, or the first batch, can be ready.
    episode: until the last episode can end, before its grading.
    wait: of the environments and rewards in `path`.
    train, last: of all groups and of the last batch, updates included.
  """

  decode: Float64[np.ndarray, " V"]
  prefill: Float64[np.ndarray, " V"]
  hosts: Float64[np.ndarray, " V"]
  seats: Float64[np.ndarray, " V"]
  path: Float64[np.ndarray, " V"]
  episode: Float64[np.ndarray, " V"]
  wait: Float64[np.ndarray, " V"]
  first: Float64[np.ndarray, " V"]
  train: Float64[np.ndarray, " V"]
  last: Float64[np.ndarray, " V"]

  @property
  def roll(self) -> Float64[np.ndarray, " V"]:
    """Until the last group can be ready."""
    shared = (self.decode, self.prefill, self.hosts, self.seats)
    return np.maximum.reduce((self.path, *shared))


def of_choice(
  demand: workload_demand.WorkloadDemand,
  cluster: simulate.Cluster,
  schedule: overlap_lib.Overlap,
  window: range,
  group_size: int,
  *,
  num_slots: float = math.inf,
  num_seats: float = math.inf,
) -> LowerBound:
  """Returns the bounds of a choice, as means over the rounds of a window.

  Args:
    num_slots: of hosts, if every environment needs one.
    num_seats: of rewards, if no call is repeated.
  """
  places = num_slots, num_seats
  rounds = _rounds(demand, cluster, schedule, window.stop, group_size, places)
  links = _links(rounds, cluster, schedule, window)
  step_s = _longest(links, window) / len(window)
  within = slice(window.start, window.stop)
  spread = schedule.max_staleness + 1
  path, wait = rounds.path[within].mean(), rounds.wait[within].mean()
  parts = {
    "decode": rounds.decode[within].mean(),
    "prefill": rounds.prefill[within].mean(),
    "hosts": rounds.hosts[within].mean(),
    "seats": rounds.seats[within].mean(),
    "learner": rounds.train[within].mean(),
    "publish": cluster.publish_s,
    "tail": (path - wait) / spread,
    "environments": wait / spread,
  }
  max_tokens = _by_round(demand.tokens.sum(1), window.stop)[within]
  return LowerBound(
    step_s=step_s * (1.0 - _SLACK),
    tokens=float(max_tokens.sum(1).mean()),
    parts={name: float(seconds) for name, seconds in parts.items()},
  )


class _Link(NamedTuple):
  """A bound on two moments (round, kind): `end` >= `start` + seconds."""

  start: tuple[int, str]
  end: tuple[int, str]
  seconds: float


_TRAINED, _SERVED = "e", "p"


def _links(
  rounds: _Rounds,
  cluster: simulate.Cluster,
  schedule: overlap_lib.Overlap,
  window: range,
) -> Iterator[_Link]:
  """Yields the bounds between the moments of a run."""
  eta, drains = schedule.max_staleness, schedule.drains
  train, tail = rounds.train, rounds.roll + rounds.last
  for v in window:
    served = v, _SERVED
    yield _Link((v, _TRAINED), served, cluster.publish_s)
    yield _Link((v, _TRAINED), (v + 1, _TRAINED), train[v])
    if v + eta < window.stop:
      yield _Link(served, (v + eta + 1, _TRAINED), tail[v + eta])
    if not eta:
      c = rounds.roll if schedule.wait_for_round else rounds.first
      yield _Link(served, (v + 1, _TRAINED), c[v] + train[v])
    elif v + 1 < window.stop:
      yield _Link(served, (v + 1, _SERVED), cluster.publish_s)
      yield _Link(served, (v + 2, _TRAINED), train[v + 1])
    if drains and cluster.hidden_s and v + eta < window.stop:
      # Engines open for new sessions while the next weights travel.
      yield _Link(served, (v + 1, _SERVED), rounds.episode[v + eta])
    yield from _work(rounds, cluster, schedule, v, window.stop)


def _work(
  rounds: _Rounds,
  cluster: simulate.Cluster,
  schedule: overlap_lib.Overlap,
  v: int,
  stop: int,
) -> Iterator[_Link]:
  """Yields the links of engines in full use, starting at version v."""
  eta, pause_s = schedule.max_staleness, cluster.blocked_s
  for end in range(v + eta + 2, stop + 1):
    inside = slice(v + eta, end)
    # Versions that must serve before the last of these groups is trained: with
    # a bound above 0 its own is still on its way.
    pauses = end - 1 - v - (eta > 0)
    decode_s = rounds.decode[inside].sum() + pauses * pause_s
    others = (rounds.prefill, rounds.hosts, rounds.seats)
    work_s = max(decode_s, *(part[inside].sum() for part in others))
    last_s = rounds.last[end - 1]
    yield _Link((v, _SERVED), (end, _TRAINED), work_s + last_s)


def _longest(links: Iterable[_Link], window: range) -> float:
  """Returns the longest path from the first to the last round trained."""
  reached = {(window.start, _TRAINED): 0.0}
  # Links lead from e(v) to p(v) or to a later round, so sorting is enough.
  for start, end, seconds in sorted(links):
    if start in reached:
      behind = reached[start] + float(seconds)
      reached[end] = max(reached.get(end, 0.0), behind)
  return reached[window.stop, _TRAINED]


def _rounds(
  demand: workload_demand.WorkloadDemand,
  cluster: simulate.Cluster,
  schedule: overlap_lib.Overlap,
  stop: int,
  group_size: int,
  places: tuple[float, float],
) -> _Rounds:
  size, speeds = group_size, [pool.speed for pool in cluster.pools]
  token_s = min(speed.tau_s(1) for speed in speeds)
  encode_s = min(pool.id_s for pool in cluster.pools)
  alone_s = demand.wait_s + demand.tokens * token_s + demand.context * encode_s
  episode = _kth(alone_s, size)
  # Any G members hold one that is graded no earlier.
  path = _kth(alone_s + demand.reward_s, size)
  wait = _kth(demand.wait_s + demand.reward_s, size)
  ids = _by_round(_least_trained(demand, size), stop)
  learner, total = cluster.learner, schedule.groups_per_round
  batch = schedule.groups_per_batch
  in_order = schedule.consume == "submit"
  ready = _by_round(path, stop)

  def least(each: Float64[np.ndarray, "N G"]) -> Float64[np.ndarray, " V"]:
    return _smallest_sum(_by_round(_smallest_sum(each, size), stop), total)

  prefill = least(demand.context) / sum(p.ids_per_s for p in cluster.pools)
  first, *others = cluster.pools
  shared = 0.0 if others or first.prefill else first.speed.interference
  return _Rounds(
    decode=least(demand.tokens) / cluster.tokens_per_s + shared * prefill,
    prefill=prefill,
    hosts=least(alone_s) / places[0],
    seats=least(demand.reward_s) / places[1],
    path=_kth(ready, total),
    episode=_kth(_by_round(episode, stop), total),
    wait=_kth(_by_round(wait, stop), total),
    first=ready[:, :batch].max(1) if in_order else _kth(ready, batch),
    train=_smallest_sum(ids, total) * learner.token_s
    + schedule.updates_per_round * learner.update_s,
    last=(ids[:, -batch:].sum(1) if in_order else _smallest_sum(ids, batch))
    * learner.token_s
    + learner.update_s,
  )


def _by_round(
  values: Float64[np.ndarray, " N"], rounds: int
) -> Float64[np.ndarray, "V M"]:
  """Returns the groups by the round that submits them."""
  return values.reshape(rounds, -1)


def _smallest_sum(
  values: Float64[np.ndarray, "V M"], count: int
) -> Float64[np.ndarray, " V"]:
  """Returns the sum of the `count` smallest of each row."""
  return np.sort(values, 1)[:, :count].sum(1)


def _kth(
  values: Float64[np.ndarray, "N G"], count: int
) -> Float64[np.ndarray, " N"]:
  """Returns the `count`-th smallest of each row."""
  return np.sort(values, 1)[:, count - 1]


def _least_trained(
  demand: workload_demand.WorkloadDemand, size: int
) -> Float64[np.ndarray, " N"]:
  """Returns the ids of each group's cheapest members to train.

  A broken member costs nothing, but replaces no other.
  """
  ordered = np.sort(np.where(demand.broken, np.inf, demand.trained), 1)
  ordered = ordered[:, :size]
  return np.where(np.isinf(ordered), 0.0, ordered).sum(1)
