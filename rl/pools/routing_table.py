"""The routing table: the engine of each session and the state of each engine.

         assign            lose                 move
  new ---------> live at i -----> orphaned ---------> live at j
                    |  send: requests go to i
                    +--end--> forgotten

  engine: open --drain--> draining --update--> updating --reopen--> open
          expect--> joining --recover--> open ..leave.. remove--> left

A session stays where its keys and values are. `send` gives the phases of a
request to two engines where a pool encodes prompts for the others and many ids
of the request are new; `encoded` ends the first phase.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rl.pools import affinity, placement

RouteState = Literal["joining", "open", "draining", "updating", "lost", "left"]
"""The work that an engine accepts.

joining: nothing yet.
open: everything.
draining: requests of its sessions, but no new session.
updating: it has no session; requests wait for its new weights.
lost: nothing, until it comes back.
left: nothing, ever.
"""
_SERVING: tuple[RouteState, ...] = ("open", "draining", "updating")


@dataclasses.dataclass(eq=False)
class _Session:
  """A session between `assign` and `end`.

  Attributes:
    engine: None when it was lost.
    version: of the last engine that was lost.
    sampled: version of its last token; -1 before the first.
    known: ids of its last request and answer on `engine`, of version `sampled`.
  """

  domain: str
  engine: int | None
  group: str
  version: int = -1
  sampled: int = -1
  known: int = 0
  sample: affinity.Sample = affinity.Sample()


class Sent(NamedTuple):
  """A request in flight.

  Attributes:
    engine: of its session.
    missed: see `affinity.Assignment`.
    unbound: its session has not begun.
    prefill: the engine that encodes it now; -1 is none but its own.
    known: ids of it that its own engine has seen; of the last of them it need
      not have keys and values.
  """

  engine: int
  missed: str = ""
  unbound: bool = False
  prefill: int = -1
  known: int = 0


@dataclasses.dataclass(eq=False)
class Counts:
  """Counts of the decisions so far.

  Attributes:
    sessions: that began, by pool and domain.
    fallbacks: sessions outside the pool that their domain prefers.
    returns: times that a domain got its preferred pool again.
    moved: sessions that lost their engine and got another.
    prompts_shared: sessions that began where another of their group had begun.
    prompts_repeated: sessions that began elsewhere than others of their group,
      so that one more engine encodes their prompt.
    prefills: requests that a pool of `role=prefill` encoded.
    prefills_missed: requests that it should have encoded and did not, by the
      reason.
  """

  sessions: collections.Counter[tuple[str, str]] = dataclasses.field(
    default_factory=collections.Counter
  )
  fallbacks: int = 0
  returns: int = 0
  moved: int = 0
  prompts_shared: int = 0
  prompts_repeated: int = 0
  prefills: int = 0
  prefills_missed: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )


class RoutingTable:
  """Sessions, requests and engines. Pure: no clock, no task, no engine.

  An assigned session is known until it ends. An unbound one gets an engine at
  its first request, and is forgotten when others are remembered.

  Args:
    infos: one for each engine.
    max_sessions: unbound sessions to remember; the one not seen for longest is
      forgotten first.

  Attributes:
    counts: of the decisions so far.
    one_version: engines drain before they take weights, so that all tokens of
      a session are of one version.
    splits_phases: some engines are there to encode for others.
  """

  def __init__(
    self,
    infos: Sequence[placement.EngineInfo],
    routing: affinity.Routing,
    max_sessions: int = 65_536,
  ):
    self.counts = Counts()
    self.one_version = False
    self.splits_phases = any(info.role == "prefill" for info in infos)
    self._affinity = affinity.Affinity(infos, routing)
    self._min_prefill_ids = routing.min_prefill_ids
    self._num_sessions = [0] * len(infos)
    self._num_requests = [0] * len(infos)
    self._unbound_requests = [0] * len(infos)
    self._states: list[RouteState] = ["open"] * len(infos)
    self._leaving: set[int] = set()
    self._in_state: dict[
      tuple[placement.Role | None, tuple[RouteState, ...]], list[int]
    ] = {}
    self._sessions: dict[str, _Session] = {}
    # Sessions of each group by engine; 0 where some have been.
    self._groups: dict[str, collections.Counter[int]] = {}
    self._max_sessions = max_sessions
    # The engine of each unbound session, and of each request.
    self._homes: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._requests: dict[str, Sent] = {}
    self._domains_on_fallback: set[str] = set()

  def of(
    self, *states: RouteState, role: placement.Role | None = None
  ) -> Sequence[int]:
    """Returns the engines that are in one of these states, in order.

    Args:
      role: of their pools; None is any.
    """
    key = role, states
    found = self._in_state.get(key)  # Until an engine changes its state.
    if found is None:
      found = [
        i
        for i, state in enumerate(self._states)
        if state in states and role in (None, self.infos[i].role)
      ]
      self._in_state[key] = found
    return found

  def _set(self, engine: int, state: RouteState) -> None:
    self._states[engine] = state
    self._in_state.clear()

  @property
  def infos(self) -> tuple[placement.EngineInfo, ...]:
    """Pool, kind and role of every engine."""
    return self._affinity.infos

  @property
  def load(self) -> list[int]:
    """Sessions of each engine; an unbound request counts as one."""
    pairs = zip(self._num_sessions, self._unbound_requests, strict=True)
    return [sessions + requests for sessions, requests in pairs]

  @property
  def seconds(self) -> Mapping[tuple[str, str], float]:
    """Measured seconds of a session by domain and pool."""
    return self._affinity.estimates.seconds

  @property
  def serving(self) -> Sequence[int]:
    """Engines that are there and not lost, in order."""
    return self.of(*_SERVING)

  @property
  def any_leaving(self) -> bool:
    """True while an engine that was told to leave is still there."""
    return bool(self._leaving)

  @property
  def _decoding(self) -> Sequence[int]:
    """Engines that serve sessions."""
    return self.of(*_SERVING, role="decode")

  @property
  def _staying(self) -> Sequence[int]:
    if not self._leaving:
      return self._decoding
    return [i for i in self._decoding if i not in self._leaving]

  def _taking(self, *states: RouteState) -> Sequence[int]:
    """Returns engines in these states that take what is new.

    One that is to leave does only where no other serves.
    """
    if not self._leaving:
      return self.of(*states, role="decode")
    takers = self._staying or self._decoding
    return [i for i in takers if self._states[i] in states]

  @property
  def all_lost(self) -> bool:
    """True while no engine serves sessions."""
    return not self._decoding

  def roll(self) -> dict[int, str]:
    """Returns pool, state and sessions of each engine that has not left."""
    return {
      i: f"engine {i} ({self.infos[i].pool}): "
      f"{'leaving' if i in self._leaving else self._states[i]}, "
      f"{self._num_sessions[i]} sessions"
      for i in self.of("joining", "lost", *_SERVING)
    }

  def describe(self) -> dict[str, float]:
    """Returns the decisions, by the names of metrics.

    `sessions/POOL/DOMAIN` began there, `session_s/POOL/DOMAIN` is the measured
    length of one there.
    """
    counts = self.counts
    metrics: dict[str, float] = {
      "engines_lost": len(self.of("lost")),
      "route_fallbacks": counts.fallbacks,
      "route_returns": counts.returns,
      "sessions_moved": counts.moved,
      "prompts_shared": counts.prompts_shared,
      "prompts_repeated": counts.prompts_repeated,
    }
    if self.splits_phases:
      metrics["prefills"] = counts.prefills
      for reason, count in sorted(counts.prefills_missed.items()):
        metrics[f"prefills_missed/{reason}"] = count
    for (pool, domain), count in sorted(counts.sessions.items()):
      metrics[f"sessions/{pool}/{domain}"] = count
    for (domain, pool), seconds in sorted(self.seconds.items()):
      metrics[f"session_s/{pool}/{domain}"] = seconds
    return {name: float(value) for name, value in metrics.items()}

  def assign(
    self, name: str, domain: str, engine: int = -1, group: str = ""
  ) -> affinity.Assignment | None:
    """Begins a session; None: it must wait, or all engines are lost.

    Args:
      engine: that it had before a restart, which it gets again if it may.
      group: of sessions with the same prompt; "" if it is alone.

    Raises:
      ValueError: it has begun already.
    """
    if name in self._sessions:
      raise ValueError(f"session {name} has begun already")
    assignment = self._first(domain, engine, group)
    if assignment is None:
      return None
    pool = self.infos[assignment.engine].pool
    self._homes.pop(name, None)
    self._sessions[name] = _Session(domain, assignment.engine, group)
    if others := self._groups.get(group):
      shared = assignment.engine in others
      self.counts.prompts_shared += shared
      self.counts.prompts_repeated += not shared
    self._join(group, assignment.engine)
    self.counts.sessions[pool, domain] += 1
    self._affinity.estimates.begin(domain, pool)
    return self._counted(domain, assignment)

  def _join(self, group: str, engine: int) -> None:
    """Counts one more session of an engine."""
    self._num_sessions[engine] += 1
    if group:
      self._groups.setdefault(group, collections.Counter())[engine] += 1

  def _leave(self, group: str, engine: int) -> None:
    """Counts one session less; a group without any is forgotten."""
    self._num_sessions[engine] -= 1
    if group:
      counts = self._groups[group]
      counts[engine] -= 1
      if not any(counts.values()):
        del self._groups[group]

  def _choose(
    self, domain: str, group: str, engines: Sequence[int]
  ) -> affinity.Assignment:
    """Returns the best of one or more engines for a session."""
    load = self.load
    best = self._affinity.choose(domain, engines, load)
    pool, others = self.infos[best.engine].pool, self._groups.get(group, {})
    having = [i for i in engines if i in others and self.infos[i].pool == pool]
    return best._replace(
      engine=self._affinity.beside(having, best.engine, load)
    )

  def _first(
    self, domain: str, engine: int, group: str
  ) -> affinity.Assignment | None:
    """Returns the first engine of a session; None: it must wait."""
    free = self._taking("open")
    preferred = self._affinity.preferred(domain)
    if preferred is not None and preferred.isdisjoint(free):
      # A pool that only takes new weights is worth waiting for.
      soon = preferred.intersection(self._taking("draining", "updating"))
      free = [] if soon else free
    if not free:
      return None
    if engine in free and (preferred is None or engine in preferred):
      return affinity.Assignment(engine)
    return self._choose(domain, group, free)

  def _counted(
    self, domain: str, assignment: affinity.Assignment
  ) -> affinity.Assignment:
    if assignment.missed:
      self.counts.fallbacks += 1
      self._domains_on_fallback.add(domain)
    elif domain in self._domains_on_fallback:
      self.counts.returns += 1
      self._domains_on_fallback.discard(domain)
    return assignment

  def end(self, name: str) -> None:
    """Ends a session, also one that has ended or never began."""
    session = self._sessions.pop(name, None)
    if session is None or session.engine is None:
      return
    self._leave(session.group, session.engine)
    pool = self.infos[session.engine].pool
    self._affinity.estimates.end(session.domain, pool, session.sample)

  def send(
    self,
    request: str,
    name: str,
    ids: int = 0,
    versions: Sequence[int] = (),
  ) -> Sent | None:
    """Returns the engines for a request of a session; None: all are lost.

    Args:
      ids: of the request.
      versions: that each engine serves, to have it encoded by another engine of
        the same; without any, its own encodes it.

    Raises:
      ValueError: a request of this name is in flight, or the session must
        `move` first.
    """
    if request in self._requests:
      raise ValueError(f"request {request} is already in flight")
    session = self._sessions.get(name)
    if session is None:
      assignment = self._home(name)
    elif session.engine is None:
      raise ValueError(f"session {name} has lost its engine")
    else:
      assignment = affinity.Assignment(session.engine)
    if assignment is None:
      return None
    sent = Sent(*assignment, unbound=session is None)
    if session is not None and versions and self.splits_phases:
      version = versions[assignment.engine]
      known = session.known if session.sampled == version else 0
      if ids - known >= self._min_prefill_ids:
        prefill = self._encoder(version, versions)
        sent = sent._replace(prefill=prefill, known=known)
    self._requests[request] = sent
    for engine in {sent.engine, sent.prefill} - {-1}:
      self._num_requests[engine] += 1
    self._unbound_requests[sent.engine] += sent.unbound
    return sent

  def _encoder(self, version: int, versions: Sequence[int]) -> int:
    """Returns an engine to encode a request under a version; -1: none can."""
    there = self.of(*_SERVING, role="prefill")
    there = [i for i in there if i not in self._leaving]
    able = [i for i in there if versions[i] == version]
    if not able:
      self.counts.prefills_missed["version" if there else "lost"] += 1
      return -1
    return min(able, key=self._num_requests.__getitem__)

  def is_encoding(self, request: str) -> bool:
    """Returns whether another engine encodes a request in flight now."""
    return self._requests[request].prefill >= 0

  def encoded(self, request: str, missed: str = "") -> None:
    """Ends the first phase of a request, of which its own engine has the rest.

    Args:
      missed: the reason for which its own engine encodes it; "" if it need not.
    """
    sent = self._requests[request]
    self._requests[request] = sent._replace(prefill=-1)
    self._num_requests[sent.prefill] -= 1
    if missed:
      self.counts.prefills_missed[missed] += 1
    else:
      self.counts.prefills += 1

  def must_move(self, name: str) -> bool:
    """Returns True if an assigned session needs another engine.

    Its own was lost, or is to leave and another may take over.
    """
    session = self._sessions.get(name)
    if session is None or session.engine is None:
      return session is not None
    if session.engine not in self._leaving:
      return False
    return bool(self._staying) and not self.one_version

  def move(
    self, name: str, versions: Sequence[int]
  ) -> affinity.Assignment | None:
    """Gives a session that must move an engine; None: it must wait.

    The version of a session never falls, and stays the same if it can: an
    engine that drains still has the weights with which the session began.

    Args:
      versions: that each engine serves.

    Raises:
      ValueError: with `one_version`, none will serve that of its tokens.
    """
    session = self._sessions[name]
    if session.engine is not None:
      self._orphan(session, versions[session.engine])
    # One that is to leave may be the last of a version.
    able = self._decoding if self.one_version else self._taking(*_SERVING)
    able = [i for i in able if versions[i] >= session.version]
    if self.one_version:
      able = self._same_version(name, versions, able)
    if not able:
      return None

    def distance(i: int) -> tuple[bool, int]:
      return self._states[i] == "updating", versions[i]

    least = min(map(distance, able))
    nearest = [i for i in able if distance(i) == least]
    assignment = self._choose(session.domain, session.group, nearest)
    session.engine = assignment.engine
    self._join(session.group, assignment.engine)
    self.counts.moved += 1
    return self._counted(session.domain, assignment)

  def _same_version(
    self, name: str, versions: Sequence[int], able: Sequence[int]
  ) -> list[int]:
    """Returns the engines on which a session will have one version."""
    version = self._sessions[name].sampled
    # An engine that takes its weights waits for no session that comes now.
    able = [i for i in able if self._states[i] != "updating"]
    if version < 0:
      return able
    behind = [i for i in self._decoding if versions[i] < version]
    able = [i for i in able if versions[i] == version]
    if self._decoding and not able and not behind:
      raise ValueError(
        f"session {name} has tokens of version {version}, which no engine "
        "that is left serves"
      )
    return able

  def _home(self, name: str) -> affinity.Assignment | None:
    """Returns the engine of an unbound session."""
    home = self._homes.pop(name, None)
    if home is not None and home in self._taking(*_SERVING):
      assignment = affinity.Assignment(home)
    elif engines := self._taking("open") or self._taking(*_SERVING):
      assignment = self._affinity.choose("", engines, self.load)
      self._counted("", assignment)
    else:
      return None
    self._homes[name] = assignment.engine
    if len(self._homes) > self._max_sessions:
      self._homes.popitem(last=False)
    return assignment

  def answered(self, request: str) -> None:
    """Forgets a request: its engine no longer counts it."""
    sent = self._requests.pop(request)
    for engine in {sent.engine, sent.prefill} - {-1}:
      self._num_requests[engine] -= 1
    self._unbound_requests[sent.engine] -= sent.unbound

  def engine_of(self, request: str) -> int:
    """Returns the engine of a request.

    Raises:
      ValueError: no such request is in flight.
    """
    if request not in self._requests:
      raise ValueError(f"request {request} is not in flight")
    return self._requests[request].engine

  def measure(
    self,
    name: str,
    engine: int,
    sample: affinity.Sample,
    version: int = -1,
    known: int = 0,
  ) -> None:
    """Adds a request's sample to its session; it counts when that ends.

    Args:
      version: of the last token of the answer; -1 when it has none.
      known: ids of the request and the answer.
    """
    session = self._sessions.get(name)
    if session is None:
      return
    session.sampled = max(session.sampled, version)
    if session.engine == engine:
      session.sample = session.sample.plus(sample)
      session.known = known

  def lose(self, engine: int, version: int) -> None:
    """Takes an engine out of use; its sessions move as they ask.

    Args:
      version: that it served.
    """
    self._set(engine, "lost")
    self._leaving.discard(engine)
    for session in self._sessions.values():
      if session.engine == engine:
        self._orphan(session, version)
    for group in self._groups.values():
      group.pop(engine, None)  # Its cache is gone.

  def _orphan(self, session: _Session, version: int) -> None:
    assert session.engine is not None
    self._leave(session.group, session.engine)
    session.engine, session.version, session.known = None, version, 0
    session.sample = affinity.Sample()

  def expect(self, info: placement.EngineInfo) -> int:
    """Makes a place for an engine that will join; returns its number."""
    self._affinity.infos = (*self.infos, info)
    self._num_sessions.append(0)
    self._num_requests.append(0)
    self._unbound_requests.append(0)
    self._states.append("joining")
    self._in_state.clear()
    return len(self._states) - 1

  def is_joining(self, engine: int) -> bool:
    """Returns True until an engine that is expected serves."""
    return self._states[engine] == "joining"

  def recover(self, engine: int) -> bool:
    """Takes an engine into use that was lost or joins; True: it joins.

    Raises:
      ValueError: it does neither.
    """
    joins = self.is_joining(engine)
    self._change(engine, "joining" if joins else "lost", "open")
    for name in [s for s, i in self._homes.items() if i == engine]:
      del self._homes[name]  # Its cache is gone.
    return joins

  def leave(self, engine: int) -> None:
    """Keeps new sessions off an engine for good, once another serves.

    Unless engines drain, its own sessions move with their next request.
    """
    self._leaving.add(engine)

  def may_remove(self, engine: int) -> bool:
    """Returns True if nothing is asked of an engine, and another serves.

    With `one_version` it must have no session either.
    """
    is_idle = not self._num_requests[engine]
    if self.one_version:
      is_idle = is_idle and self.drained(engine)
    return is_idle and bool(self._staying)

  def remove(self, engine: int, version: int) -> None:
    """Takes an engine out of use for good; its sessions move as they ask.

    Args:
      version: that it served.
    """
    self.lose(engine, version)
    self._set(engine, "left")

  def drain(self, engine: int) -> None:
    """Keeps new sessions off an open engine.

    Raises:
      ValueError: it is not open.
    """
    self._change(engine, "open", "draining")

  def drained(self, engine: int) -> bool:
    """Returns True if no assigned session is on an engine."""
    return not self._num_sessions[engine]

  def update(self, engine: int) -> None:
    """Marks a drained engine as taking its weights.

    Raises:
      ValueError: it does not drain, or still has sessions.
    """
    if not self.drained(engine):
      raise ValueError(f"engine {engine} has sessions")
    self._change(engine, "draining", "updating")

  def reopen(self, engine: int) -> None:
    """Ends `drain` and `update`; an engine lost meanwhile stays lost."""
    if self._states[engine] in _SERVING:
      self._set(engine, "open")

  def _change(self, engine: int, before: RouteState, after: RouteState) -> None:
    if self._states[engine] != before:
      raise ValueError(
        f"engine {engine} is {self._states[engine]}, not {before}"
      )
    self._set(engine, after)
