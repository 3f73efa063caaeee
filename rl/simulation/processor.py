"""The time of a simulated engine: pure bookkeeping of its requests.

submit -> waiting --slot, KV--> prefill --ids / rate--> decode --> ended
          (by priority)           (one by one)    (all at once, evenly)
                                  (or in a pool of its own: `prefill_pool`)

Decoding is processor sharing: with b sequences a token of each takes
tau(b) = tau0 (1 + b / b0). A service clock, in tokens a sequence, runs at
1 / tau(b), and a sequence ends when that clock has advanced by its length. So
an arrival or an end costs O(log n), and a token costs nothing.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection
from typing import Any, Literal

from rl.engine import contract
from rl.settings import checks
from rl.simulation import prefill_pool

# Jobs this close to their end are due, in tokens or in seconds, whichever is
# longer: above the rounding errors of the loop's clock.
_CLOSE = 1e-4
_CLOSE_S = 1e-6

EngineActivity = Literal[
  "decode", "prefill", "publish", "drain", "environments", "rewards", "gate"
]
"""The work of an engine, or the cause of its idle time.

publish: weights arrive. drain: requests end before weights arrive.
environments: all sessions wait for theirs. rewards: all sessions have ended,
and some are being graded. gate: the engine has no session.
"""
Hold = Literal["", "drain", "publish"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """The speed and size of an engine.

  Attributes:
    tau0_s: seconds of a token at no load: tau(b) = tau0_s (1 + b / b0).
    b0: number of sequences that doubles it.
    prefill_per_s: ids of context encoded a second.
    slots: sequences that decode at once.
    kv_tokens: room for ids of contexts and answers. An answer's ids are
      reserved when it starts, so that no request is ever preempted.
    update_s: seconds for which decoding stands still when weights arrive.
    interference: share of its pace that decoding loses while context is
      encoded: 1 if that always goes first, 0 if it costs nothing.
  """

  tau0_s: float = 0.012
  b0: float = 96.0
  prefill_per_s: float = math.inf
  slots: int = 64
  kv_tokens: int = 1 << 22
  update_s: float = 0.0
  interference: float = 0.0

  def validate(self, where: str) -> None:
    """Raises ValueError on impossible speeds; `where` is the setting."""
    checks.in_unit(self, "interference", where=where)
    sizes = ("b0", "prefill_per_s", "slots", "kv_tokens")
    checks.above(self, 0, *sizes, where=where)
    checks.finite_above(self, 0, "tau0_s", where=where)
    checks.finite_at_least(self, 0, "update_s", where=where)

  def tau_s(self, sequences: int) -> float:
    """Returns the seconds of a token while `sequences` decode."""
    return self.tau0_s * (1.0 + sequences / self.b0)

  @property
  def tokens_per_s(self) -> float:
    """Tokens sampled a second with every slot in use."""
    return self.slots / self.tau_s(self.slots)


def check_room(max_tokens: int, speeds: Collection[Speed]) -> None:
  """Checks that the KV cache of every engine holds the longest episode."""
  room, bound = min(s.kv_tokens for s in speeds), f"{max_tokens=}"
  out = "an episode could never end there, so lower rollout.max_tokens"
  checks.enough("speed.kv_tokens", room, max_tokens, f"rollout.{bound}", out)


@dataclasses.dataclass(slots=True, eq=False)
class Job:
  """A request in flight.

  Attributes:
    length: tokens of its answer.
    tag: free for the owner's use.
    place: stage of the request.
    left: tokens left to decode when it last entered or left decoding.
    target: reading of the service clock at which it ends.
    begun_s: time at which it got its slot; None before that.
    first_s: time of its first token; None before that.
    first_version: of that token.
    oldest_kv: lowest version of its keys and values.
    cached: ids that need not be encoded.
    room: ids of the cache that are reserved for it.
    spans: (version, tokens) sampled by older weights.
  """

  request: contract.DecodeRequest
  length: int
  arrived_s: float
  tag: Any
  left: float
  place: Literal["waiting", "prefill", "decode", "ended"] = "waiting"
  target: float = 0.0
  begun_s: float | None = None
  first_s: float | None = None
  first_version: int = 0
  oldest_kv: int = 0
  cached: int = 0
  spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  room: int = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self.room = len(self.request.tokens) + self.length


class Processor:
  """The requests of one engine by stage, and its service clock.

  The owner calls `advance` with the time first, then submits, ends or holds
  requests, then calls `settle`, and starts again `wait_s` later.

  Attributes:
    version: of the weights that sample.
    hold: "drain" admits nothing; "publish" stops everything, as `pause` does.
    sessions, graded: sessions of this engine, and episodes being graded; the
      causes of idle time.
    running, decoding: jobs with a slot, and those of them that decode.
    states: (second, state) of each change; the last one goes on.
    served: tokens of all sequences so far, fractions included.
    stood_s: seconds of "publish".
  """

  def __init__(
    self, speed: Speed, elsewhere: prefill_pool.PrefillQueue | None = None
  ):
    self.speed = speed
    self._close_prefill = max(_CLOSE, _CLOSE_S * speed.prefill_per_s)
    self._elsewhere = elsewhere
    # (second of arrival, number, job): keys and values on their way.
    self._coming: list[tuple[float, int, Job]] = []
    self.version = 0
    self.hold: Hold = ""
    self._paused = self._stands = False
    self.sessions = self.graded = 0
    self.running = 0
    self._decode_together(0)
    self.states: list[tuple[float, EngineActivity]] = []
    self._activity: EngineActivity | None = None  # The last of them.
    self.served = self.stood_s = 0.0
    self.sampled = self.prefilled = self.hits = 0
    self.now_s = 0.0
    self._numbers = itertools.count()
    self._waiting: list[tuple[tuple[int, ...], int, Job]] = []
    self._prefill: collections.deque[tuple[float, Job]] = collections.deque()
    self._decode: list[tuple[float, int, Job]] = []
    self._service = self._encoded = self._queued = 0.0
    self._reserved = self._cached_tokens = 0
    # Least recently used first.
    self._cached: collections.OrderedDict[str, int] = collections.OrderedDict()

  @property
  def free(self) -> int:
    """Room for more ids."""
    return self.speed.kv_tokens - self._reserved - self._cached_tokens

  def _decode_together(self, sequences: int) -> None:
    """Sets how many decode, and with it the seconds of a token."""
    self.decoding, self._tau_s = sequences, self.speed.tau_s(sequences)
    self._close = max(_CLOSE, _CLOSE_S / self._tau_s)

  def advance(self, now_s: float) -> None:
    """Accounts for the time since the last call."""
    passed_s = now_s - self.now_s
    if passed_s <= 0:
      return
    decodes = self.decoding and not self._stands  # Nearly always.
    state = "decode" if decodes else self._state()
    if state != self._activity:
      self.states.append((self.now_s, state))
      self._activity = state
    self.now_s = now_s
    if state == "publish":
      self.stood_s += passed_s
      return
    if decodes:
      tokens = self._tokens(passed_s)
      self._service += tokens
      self.served += tokens * self.decoding
    if self._prefill:
      self._encoded += passed_s * self.speed.prefill_per_s

  def served_by(self, now_s: float) -> float:
    """Returns `served` at a later time if nothing changes; changes nothing."""
    if self._stands or not self.decoding:
      return self.served
    return self.served + self._tokens(now_s - self.now_s) * self.decoding

  def _tokens(self, passed_s: float) -> float:
    """Returns the tokens of a sequence, as decoding goes on now."""
    tokens = passed_s / self._tau_s
    return tokens * (1.0 - self.speed.interference) if self._prefill else tokens

  def _state(self) -> EngineActivity:
    if self._stands:
      return "publish"
    if self.decoding:
      return "decode"
    if self.running:
      return "prefill"
    if self.hold == "drain":
      return "drain"
    if self.sessions:
      return "environments"
    return "rewards" if self.graded else "gate"

  def turn(self, hold: Hold) -> None:
    """Sets `hold`."""
    self.hold = hold
    self._stands = self._paused or hold == "publish"

  def pause(self, paused: bool) -> None:
    """Stops everything, or goes on."""
    self._paused = paused
    self._stands = paused or self.hold == "publish"

  def submit(self, job: Job) -> None:
    """Takes a request; it waits for a slot."""
    entry = (job.request.priority, next(self._numbers), job)
    heapq.heappush(self._waiting, entry)

  def settle(self) -> list[Job]:
    """Begins and admits jobs that are due; returns those of full length.

    The caller ends them with `end`, and then calls again.
    """
    if self._stands:
      return []
    done, decode, prefill = [], self._decode, self._prefill
    while decode and decode[0][0] <= self._service + self._close:
      job = heapq.heappop(decode)[2]
      if job.place == "decode":
        job.target = self._service  # With all its tokens.
        done.append(job)
    while prefill and prefill[0][0] <= self._encoded + self._close_prefill:
      self._begin(prefill.popleft()[1])
    while self._coming and self._coming[0][0] <= self.now_s + _CLOSE_S:
      job = heapq.heappop(self._coming)[2]
      if job.place == "prefill":
        self._begin(job)
    if self._waiting and not (done or self.hold):
      self._admit()
    return done

  def wait_s(self) -> float:
    """Returns the seconds until the next job is due."""
    wait_s, decode, prefill = math.inf, self._decode, self._prefill
    if self._stands:
      return wait_s
    pace = 1.0 - self.speed.interference if prefill else 1.0
    if decode and pace:
      tokens = decode[0][0] - self._service
      wait_s = tokens * self._tau_s / pace
    if prefill:
      ids = prefill[0][0] - self._encoded
      wait_s = min(wait_s, ids / self.speed.prefill_per_s)
    if self._coming:
      wait_s = min(wait_s, self._coming[0][0] - self.now_s)
    return wait_s if wait_s > 0.0 else 0.0

  def count(self, job: Job) -> int:
    """Returns the tokens sampled so far; each counts when its time begins."""
    if job.first_s is None:
      return 0
    left = job.left if job.place != "decode" else job.target - self._service
    return min(job.length, math.floor(job.length - left + _CLOSE) + 1)

  def end(self, job: Job) -> int:
    """Frees the slot and room of a job; returns its number of tokens."""
    count, place = self.count(job), job.place
    if place == "prefill":
      self._leave(job)
    job.place = "ended"
    if place == "decode":
      self._decode_together(self.decoding - 1)
    if place != "waiting":
      self.running -= 1
      self._reserved -= job.room
    # Keys and values of older weights serve no other request.
    if count and job.oldest_kv == self.version:
      # The last id is never fed.
      known = len(job.request.tokens) + count - 1
      self._cached_tokens += known - self._cached.get(job.request.session, 0)
      self._cached[job.request.session] = known
    self.sampled += count
    return count

  def _leave(self, job: Job) -> None:
    """Removes the rest of a job's prefill, so that later ones move up."""
    before, left = self._encoded, 0.0
    queue = list(self._prefill)
    self._prefill.clear()
    for target, other in queue:
      if other is job:
        left = target - before
      else:
        self._prefill.append((target - left, other))
      before = target
    self._queued -= left
    self.prefilled -= math.floor(left + _CLOSE)

  def mark(self, job: Job) -> None:
    """Assigns the tokens sampled since the last call to `version`."""
    if fresh := self.count(job) - sum(count for _, count in job.spans):
      job.spans.append((self.version, fresh))

  def encode_again(self, jobs: list[Job]) -> None:
    """Sends all jobs with a slot back to prefill, by priority."""
    for job in jobs:
      if job.place == "decode":
        job.left = job.target - self._service
    self._prefill.clear()
    self._coming.clear()
    self._decode.clear()
    self._decode_together(0)
    for job in sorted(jobs, key=lambda job: job.request.priority):
      job.oldest_kv = self.version
      self._enqueue(job, len(job.request.tokens) + self.count(job))

  def forget(self) -> None:
    """Empties the cache of earlier turns."""
    self._cached.clear()
    self._cached_tokens = 0

  def _admit(self) -> None:
    while self._waiting:
      job = self._waiting[0][2]
      if job.place != "ended":
        full = self._reserved + job.room > self.speed.kv_tokens
        if full or self.running == self.speed.slots:
          return
        self._start(job)
      heapq.heappop(self._waiting)

  def _start(self, job: Job) -> None:
    """Gives a request its slot and its room, and encodes its new ids."""
    self.running += 1
    job.begun_s = self.now_s
    self._reserved += job.room
    known = self._cached.pop(job.request.session, 0)
    self._cached_tokens -= known
    # The last id is always fed.
    job.cached = min(known, len(job.request.tokens) - 1)
    job.oldest_kv = self.version
    self.hits += job.cached
    while self.free < 0:
      _, ids = self._cached.popitem(last=False)
      self._cached_tokens -= ids
    self._enqueue(job, len(job.request.tokens) - job.cached)

  def _enqueue(self, job: Job, ids: int) -> None:
    self.prefilled += ids
    if self._elsewhere is not None:
      job.place = "prefill"
      arrives_s = self._elsewhere.submit(self.now_s, ids)
      heapq.heappush(self._coming, (arrives_s, next(self._numbers), job))
      return
    if math.isinf(self.speed.prefill_per_s):
      self._begin(job)
      return
    job.place = "prefill"
    if not self._prefill:
      self._encoded = self._queued = 0.0
    self._queued += ids
    self._prefill.append((self._queued, job))

  def _begin(self, job: Job) -> None:
    """Starts decoding; the first token is sampled at once."""
    job.place = "decode"
    job.target = self._service + job.left
    self._decode_together(self.decoding + 1)
    if job.first_s is None:
      job.first_s, job.first_version = self.now_s, self.version
    heapq.heappush(self._decode, (job.target, next(self._numbers), job))
