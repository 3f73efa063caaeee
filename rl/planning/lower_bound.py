"""How fast a choice could be at best: a bound that no simulated run breaks.

A round v has W of training, w of which is its last batch, a publish of s, and
groups that take R = max(path, D, P) at least: the longest of them alone, its
grading included, and all tokens and contexts at the rate of all engines in full
use. Let e(v) be when
round v - 1 is trained and p(v) when version v serves, which admits what round
v + eta trains. Then

  p(v)           >= e(v) + s
  e(v + 1)       >= e(v) + W
  e(v + eta + 1) >= p(v) + R + w
  e(v + n)       >= p(v) + D of rounds v + eta ... v + n - 1, and w
  e(v + 1)       >= p(v) + W            unless engines drain, and then
  e(v + 2)       >= p(v) + W,  p(v + 1) >= p(v) + path of round v + eta
  e(v + 1)       >= p(v) + c + W        on-policy; c: the first batch is ready,
                                        all of them when the round is waited for

and the longest way through these from the first to the last e is the bound.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from rl.planning import demand
from rl.schedule import overlap as overlap_lib
from rl.simulation import simulate

# Of the simulated engine: a token may end this much earlier, as may a timer.
_SLACK = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
  """Lower bounds of a step, as means over the rounds that count.

  Attributes:
    step_s: of a step, with everything that one waits for.
    tokens: most that a step can train.
    parts: seconds of a step that one thing alone takes: "decode", "prefill",
      "learner", "publish" (new weights), "tail" (decoding of the longest
      episode) and "environments" (their part in it, and that of rewards), the
      last two divided by the rounds over which they may spread.
  """

  step_s: float
  tokens: float
  parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class _Rounds:
  """Numbers of every round, in seconds.

  Attributes:
    decode, prefill: with all engines in full use.
    path, first: until the last group, or the first batch, can be ready.
    episode: until the last episode can end; it is still to be graded.
    wait: of the environments and rewards in `path`.
    train, last: of all groups and of the last batch, updates included.
  """

  decode: Float64[np.ndarray, " V"]
  prefill: Float64[np.ndarray, " V"]
  path: Float64[np.ndarray, " V"]
  episode: Float64[np.ndarray, " V"]
  wait: Float64[np.ndarray, " V"]
  first: Float64[np.ndarray, " V"]
  train: Float64[np.ndarray, " V"]
  last: Float64[np.ndarray, " V"]

  @property
  def roll(self) -> Float64[np.ndarray, " V"]:
    """Until the last group can be ready."""
    return np.maximum(np.maximum(self.decode, self.prefill), self.path)


def floor(
  needs: demand.Demand,
  cluster: simulate.Cluster,
  schedule: overlap_lib.Overlap,
  window: range,
  group_size: int,
) -> Floor:
  """Returns bounds on the mean step of the rounds of a window."""
  rounds = _rounds(needs, cluster, schedule, window.stop, group_size)
  links = _links(rounds, cluster, schedule, window)
  step_s = _longest(links, window) / len(window)
  within = slice(window.start, window.stop)
  spread = schedule.max_staleness + 1
  path, wait = rounds.path[within].mean(), rounds.wait[within].mean()
  parts = {
    "decode": rounds.decode[within].mean(),
    "prefill": rounds.prefill[within].mean(),
    "learner": rounds.train[within].mean(),
    "publish": publish_s(cluster),
    "tail": (path - wait) / spread,
    "environments": wait / spread,
  }
  most = _by_round(needs.tokens.sum(1), window.stop)[within]
  return Floor(
    step_s=step_s * (1.0 - _SLACK),
    tokens=float(most.sum(1).mean()),
    parts={name: float(seconds) for name, seconds in parts.items()},
  )


class _Link(NamedTuple):
  """`end` is so many seconds behind `start`, or more; both (round, kind)."""

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
  """Yields what must lie between the moments of a run."""
  eta, drains = schedule.max_staleness, schedule.drains
  train, tail = rounds.train, rounds.roll + rounds.last
  for v in window:
    served = v, _SERVED
    yield _Link((v, _TRAINED), served, publish_s(cluster))
    yield _Link((v, _TRAINED), (v + 1, _TRAINED), train[v])
    if v + eta < window.stop:
      yield _Link(served, (v + eta + 1, _TRAINED), tail[v + eta])
    if not eta:
      c = rounds.roll if schedule.wait_for_round else rounds.first
      yield _Link(served, (v + 1, _TRAINED), c[v] + train[v])
    elif not drains:
      yield _Link(served, (v + 1, _TRAINED), train[v])
    elif v + 1 < window.stop:
      yield _Link(served, (v + 2, _TRAINED), train[v + 1])
    if drains and cluster.transfer_s and v + eta < window.stop:
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
  """Yields the links of engines in full use, from one version on."""
  eta, pause_s = schedule.max_staleness, cluster.blocked_s
  for end in range(v + eta + 2, stop + 1):
    inside = slice(v + eta, end)
    # Versions that must serve before the last of these groups is admitted, or
    # without drained engines before the last of them is trained.
    pauses = end - 1 - v - (eta if schedule.drains else 0)
    decode_s = rounds.decode[inside].sum() + pauses * pause_s
    work_s = max(decode_s, rounds.prefill[inside].sum())
    last_s = rounds.last[end - 1]
    yield _Link((v, _SERVED), (end, _TRAINED), work_s + last_s)


def _longest(links: Iterable[_Link], window: range) -> float:
  """Returns the least time from the first to the last round trained."""
  reached = {(window.start, _TRAINED): 0.0}
  # All ways lead from e(v) to p(v), or to a later round.
  for start, end, seconds in sorted(links):
    if start in reached:
      behind = reached[start] + float(seconds)
      reached[end] = max(reached.get(end, 0.0), behind)
  return reached[window.stop, _TRAINED]


def publish_s(cluster: simulate.Cluster) -> float:
  """Returns seconds of a publish for which nothing else is waited for."""
  return cluster.transfer_s + cluster.update_s


def _rounds(
  needs: demand.Demand,
  cluster: simulate.Cluster,
  schedule: overlap_lib.Overlap,
  stop: int,
  group_size: int,
) -> _Rounds:
  size, speeds = group_size, [pool.speed for pool in cluster.pools]
  token_s = min(speed.tau_s(1) for speed in speeds)
  encode_s = min(1.0 / speed.prefill_per_s for speed in speeds)
  prefill = sum(p.engines * p.speed.prefill_per_s for p in cluster.pools)
  alone_s = needs.wait_s + needs.tokens * token_s + needs.context * encode_s
  episode = _kth(alone_s, size)
  # Whichever members make the group, one of them is graded no earlier.
  path = _kth(alone_s + needs.reward_s, size)
  wait = _kth(needs.wait_s + needs.reward_s, size)
  ids = _by_round(_least_trained(needs, size), stop)
  learner, total = cluster.learner, schedule.groups_per_round
  batch = _per_batch(schedule)
  in_order = schedule.consume == "submit"
  ready = _by_round(path, stop)
  return _Rounds(
    decode=_fewest(_by_round(_least(needs.tokens, size), stop), total)
    / cluster.tokens_per_s,
    prefill=_fewest(_by_round(_least(needs.context, size), stop), total)
    / prefill,
    path=_kth(ready, total),
    episode=_kth(_by_round(episode, stop), total),
    wait=_kth(_by_round(wait, stop), total),
    first=ready[:, :batch].max(1) if in_order else _kth(ready, batch),
    train=_fewest(ids, total) * learner.token_s
    + schedule.updates_per_round * learner.update_s,
    last=(ids[:, -batch:].sum(1) if in_order else _fewest(ids, batch))
    * learner.token_s
    + learner.update_s,
  )


def _per_batch(schedule: overlap_lib.Overlap) -> int:
  if schedule.streams:
    return schedule.groups_per_microbatch
  return schedule.groups_per_update


def _by_round(
  values: Float64[np.ndarray, " N"], rounds: int
) -> Float64[np.ndarray, "V M"]:
  """Returns groups by the round in which they are submitted."""
  return values.reshape(rounds, -1)


def _fewest(
  values: Float64[np.ndarray, "V M"], count: int
) -> Float64[np.ndarray, " V"]:
  """Returns sums of the smallest `count`."""
  return np.sort(values, 1)[:, :count].sum(1)


def _least(
  values: Float64[np.ndarray, "N G"], count: int
) -> Float64[np.ndarray, " N"]:
  return np.sort(values, 1)[:, :count].sum(1)


def _kth(
  values: Float64[np.ndarray, "N G"], count: int
) -> Float64[np.ndarray, " N"]:
  """Returns the `count`-th smallest of each row."""
  return np.sort(values, 1)[:, count - 1]


def _least_trained(
  needs: demand.Demand, size: int
) -> Float64[np.ndarray, " N"]:
  """Returns ids of the members that give the learner the least to do.

  One that broke gives it nothing, but takes the place of no other.
  """
  ordered = np.sort(np.where(needs.broken, np.inf, needs.trained), 1)
  ordered = ordered[:, :size]
  return np.where(np.isinf(ordered), 0.0, ordered).sum(1)
