"""The result of a simulated run: its step time T beside the ideal.

D   decode work: tokens of a round / tokens a second with every slot in use
W   training work: busy seconds of the learner in a round
s   seconds of a publish; decoding stands still for s_blk of them
T*  = max(D + s_blk, W, s) with a bound above 0: weights travel while the next
    round trains, and publishes follow one another. With a bound of 0 the
    learner waits until its weights are served, and T* = max(D, W) + s_blk. Over
    many rounds no schedule with the same bound is faster: decoding, at its
    best, and the learner work all the time. Over few rounds T can be less, as
    groups may have been decoded in part before the first round that counts.
on-policy bound  = max(T_roll + w_n, c_1 + W) + s: the shortest step of
    staleness 0. The first batch is ready after c_1, the last group after
    T_roll, and the last batch trains for w_n. c_1, but not W, includes the
    comparison of log-probabilities of the round before.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from rl.audit import event_log, token_ledger
from rl.runtime import trace
from rl.simulation import hosts, resources, simulate

_IDLE = ("publish", "drain", "environments", "rewards", "gate")
_Lags = Mapping[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """Means over the rounds that count; seconds are virtual unless called real.

  Attributes:
    step_s: T, of a round.
    decode_s, train_s: D and W.
    blocked_s, publish_s: s_blk, of all engines in full use, and s.
    ideal_s: T*, the step time of a perfect schedule.
    on_policy_s: the on-policy bound; None where staleness is allowed.
    tokens: sampled in the groups that a round trained.
    decode_use: tokens of all engines, those never trained included, over the
      tokens with every slot in use.
    prefill: share of time in which engines encode context and decode nothing.
    decode_idle: share of the engines' time by cause; see
      `processor.EngineActivity`.
    learner_idle: share of the learner's time by cause: "publish" and "data".
    overlap: share of the less busy mesh's work that the other one hides.
    group_lags, token_lags: trained groups and tokens by their staleness.
    episodes, faults: of the whole run; faults by status.
    violations: broken promises of the schedule; must be empty.
    rewards: costs of the seats of rewards, of the whole run; None without any.
    hosts: use of the hosts of environments; None without any.
    prefill_use: see `simulate.RunRecord`; of the whole run.
    events, turns: of the whole run, like `virtual_s` and `real_s`.
  """

  rounds: int
  step_s: float
  decode_s: float
  train_s: float
  blocked_s: float
  publish_s: float
  ideal_s: float
  on_policy_s: float | None
  tokens: float
  decode_use: float
  prefill: float
  decode_idle: Mapping[str, float]
  learner_idle: Mapping[str, float]
  overlap: float
  group_lags: _Lags
  token_lags: _Lags
  ledger: token_ledger.Ledger
  episodes: int
  faults: Mapping[str, int]
  violations: Sequence[str]
  accelerators: int
  events: int
  jumps: int
  turns: int
  virtual_s: float
  real_s: float
  rewards: resources.SeatCosts | None
  hosts: hosts.HostUse | None
  prefill_use: Mapping[str, float]

  @property
  def efficiency(self) -> float:
    """T* / T."""
    return self.ideal_s / self.step_s

  @property
  def on_policy_efficiency(self) -> float | None:
    """The on-policy bound over T; None where staleness is allowed."""
    return None if self.on_policy_s is None else self.on_policy_s / self.step_s

  @property
  def fault_share(self) -> float:
    """Share of the episodes that end with a fault, of the whole run."""
    return sum(self.faults.values()) / max(self.episodes, 1)

  @property
  def useful(self) -> float:
    """Trained tokens over sampled ones, of the whole run."""
    return self.ledger.trained / max(self.ledger.sampled, 1)

  @property
  def tokens_per_s(self) -> float:
    """Tokens of trained groups a second."""
    return self.tokens / self.step_s


def measure(record: simulate.RunRecord) -> Result:
  """Returns the result of a simulated run."""
  settings, schedule = record.settings, record.settings.overlap
  rounds = settings.counted
  # The window reaches from one end of training to another.
  ends = [
    0.0,
    *{e["version"]: e["end"] for e in _of(record, "update")}.values(),
  ]
  window = ends[rounds.start], ends[rounds.stop]
  seconds, count = window[1] - window[0], len(rounds)
  trained = [e for e in _of(record, "trained") if e["version"] in rounds]
  tokens = sum(e["tokens"] + e["masked"] for e in trained)
  learner = _clipped(trace.busy(record.spans, "learner"), window)
  busy_s = sum(b - a for a, b in learner)
  publish = _clipped(trace.busy(record.spans, "host"), window)
  states = _states(record, window)
  waits = publish
  if schedule.publishes_behind_training:  # Only for the version before.
    began = {e["version"]: e["t"] for e in _of(record, "publish_start")}
    pairs = ((ends[version], began[version]) for version in began)
    waits = _clipped([(a, b) for a, b in pairs if a < b], window)
  idle = {"publish": sum(b - a for a, b in waits) / seconds}
  idle["data"] = 1.0 - busy_s / seconds - idle["publish"]
  # The first round of a run begins without a publish.
  publishes = max(count - (rounds.start == 0), 1)
  decode_s = tokens / count / settings.cluster.tokens_per_s
  blocked_s = settings.cluster.blocked_s
  return Result(
    rounds=count,
    step_s=seconds / count,
    decode_s=decode_s,
    train_s=busy_s / count,
    blocked_s=blocked_s,
    ideal_s=_ideal_s(settings, decode_s, busy_s / count),
    publish_s=sum(b - a for a, b in publish) / publishes,
    on_policy_s=None if schedule.max_staleness else _bound(record),
    tokens=tokens / count,
    decode_use=_use(record, seconds),
    prefill=states["prefill"],
    decode_idle={cause: states[cause] for cause in _IDLE},
    learner_idle=idle,
    overlap=_overlap(record, learner, window),
    group_lags=_counted(
      (e["version"] - e["first_version"], 1) for e in trained
    ),
    token_lags=_counted(_token_lags(record, trained)),
    ledger=record.ledger,
    episodes=sum(1 for _ in event_log.of_kind(record.events, "ended")),
    faults=collections.Counter(
      e["status"] for e in event_log.of_kind(record.events, "fault")
    ),
    violations=record.violations,
    accelerators=settings.cluster.accelerators,
    events=record.num_events,
    jumps=record.jumps,
    turns=record.num_turns,
    virtual_s=record.virtual_s,
    real_s=record.real_s,
    rewards=record.rewards,
    hosts=record.hosts,
    prefill_use=record.prefill_use,
  )


def _ideal_s(
  settings: simulate.Simulation, decode_s: float, train_s: float
) -> float:
  cluster = settings.cluster
  if settings.overlap.publishes_behind_training:
    return max(decode_s + cluster.blocked_s, train_s, cluster.publish_s)
  # The first round of a run begins without a publish.
  share = 1.0 - (settings.counted.start == 0) / len(settings.counted)
  return max(decode_s, train_s) + cluster.blocked_s * share


def _of(record: simulate.RunRecord, kind: str) -> Iterator[event_log.Event]:
  return event_log.of_kind(record.events, kind)


def _clipped(
  intervals: Sequence[trace.Interval], window: trace.Interval
) -> list[trace.Interval]:
  """Returns the parts of intervals inside a window."""
  start, end = window
  cut = ((max(a, start), min(b, end)) for a, b in intervals)
  return [(a, b) for a, b in cut if a < b]


def in_state(
  states: Sequence[tuple[float, str]], end_s: float, state: str
) -> list[trace.Interval]:
  """Returns the intervals that an engine spent in a state."""
  edges = itertools.pairwise([*states, (end_s, "")])
  return [(start, end) for (start, name), (end, _) in edges if name == state]


def _states(
  record: simulate.RunRecord, window: trace.Interval
) -> dict[str, float]:
  """Returns the share of the engines' time in each state, by accelerators."""
  shares: dict[str, float] = collections.defaultdict(float)
  pools = record.settings.cluster.engine_pools
  whole = (window[1] - window[0]) * sum(pool.accelerators for pool in pools)
  for pool, states in zip(pools, record.states, strict=True):
    edges = itertools.pairwise([*states, (record.virtual_s, "")])
    for (start, name), (end, _) in edges:
      inside = min(end, window[1]) - max(start, window[0])
      shares[name] += pool.accelerators * max(inside, 0.0) / whole
  return {name: shares[name] for name in ("decode", "prefill", *_IDLE)}


def _use(record: simulate.RunRecord, seconds: float) -> float:
  """Returns the tokens of the rounds that count over those of full use."""
  settings = record.settings
  before, after = (
    math.fsum(record.served.get(version, ()))
    for version in (settings.counted.start - 1, settings.counted.stop - 1)
  )
  return (after - before) / (seconds * settings.cluster.tokens_per_s)


def _overlap(
  record: simulate.RunRecord,
  learner: Sequence[trace.Interval],
  window: trace.Interval,
) -> float:
  """Returns the share of work hidden by the other mesh, mean over engines."""
  trained_s = sum(b - a for a, b in learner)
  shares = []
  for states in record.states:
    decode = _clipped(in_state(states, record.virtual_s, "decode"), window)
    shorter = min(trained_s, sum(b - a for a, b in decode))
    both = trace.intersection(decode, learner)
    shares.append(both / shorter if shorter else 0.0)
  return math.fsum(shares) / len(shares)


def _bound(record: simulate.RunRecord) -> float:
  """Returns the on-policy bound, mean over the rounds that count."""
  settings = record.settings
  ends = [0.0, *(e["t"] for e in _of(record, "published"))]
  ready = {(e["group"], e["attempt"]): e["t"] for e in _of(record, "ready")}
  taken: dict[int, list[float]] = collections.defaultdict(list)
  for event in _of(record, "dequeued"):
    place = event["group"], event["attempt"]
    taken[event["version"]].append(ready[place])
  work, described_s = _work(record.spans)
  bounds = []
  for number in settings.counted:
    ready_s = [at_s - ends[number] for at_s in taken[number]]
    before_s = described_s.get(number - 1, 0.0)
    per_batch = settings.overlap.groups_per_batch
    # The first round of a run begins without a publish.
    publish_s = settings.cluster.publish_s if number else 0.0
    bounds.append(
      publish_s + on_policy_s(ready_s, work[number], per_batch, before_s)
    )
  return math.fsum(bounds) / len(bounds)


_Work = Sequence[tuple[str, float]]
"""(name, seconds) of the learner's spans, in order."""


def _work(
  spans: Sequence[trace.Span],
) -> tuple[Mapping[int, _Work], Mapping[int, float]]:
  """Returns the learner's work, and the seconds it compares, by version."""
  # Times of events are rounded and those of spans are not, so these decide.
  work: dict[int, list[tuple[str, float]]] = collections.defaultdict(list)
  described_s: dict[int, float] = {}
  for span in spans:
    if span.track != "learner":
      continue
    version, seconds = int(span.args["version"]), span.end - span.start
    if span.name == "score":
      described_s[version] = seconds
    else:
      work[version].append((span.name, seconds))
  return work, described_s


def on_policy_s(
  ready_s: Sequence[float],
  work: _Work,
  per_batch: int,
  before_s: float = 0.0,
) -> float:
  """Returns the bound of one round without its publish.

  Args:
    ready_s: times at which its groups were ready, in the order of training.
    before_s: of the learner for the comparison of the round before.
  """
  last = max(i for i, (name, _) in enumerate(work) if name == "accumulate")
  last_s = sum(seconds for _, seconds in work[last:])
  whole_s = sum(seconds for _, seconds in work)
  first_s = max(before_s, *ready_s[:per_batch])
  return max(max(ready_s) + last_s, first_s + whole_s)


def _token_lags(
  record: simulate.RunRecord, trained: Sequence[event_log.Event]
) -> Iterator[tuple[int, int]]:
  """Yields (staleness, tokens) of every stretch of trained tokens."""
  ended = {event_log.member(e): e["versions"] for e in _of(record, "ended")}
  for event in trained:
    for index in event["members"]:
      place = event["group"], event["attempt"], index
      for version, tokens in ended.get(place, ()):
        yield event["version"] - version, tokens


def _counted(pairs: Iterator[tuple[int, int]]) -> dict[int, int]:
  """Returns sums by key, sorted."""
  sums: collections.Counter[int] = collections.Counter()
  for key, number in pairs:
    sums[key] += number
  return dict(sorted(sums.items()))
