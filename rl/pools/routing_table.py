"""The routing table: the engine of each session and the state of each engine.

         assign            lose                 move
  new ---------> live at i -----> orphaned ---------> live at j
                    |  send: requests go to i
                    +--end--> forgotten

  engine: open --drain--> draining --update--> updating --reopen--> open

A session stays where its keys and values are. To send the phases of a request
to different pools, change `RoutingTable.send`: a session has one engine only
because `send` gives both phases the same.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from rl.pools import affinity, placement

RouteState = Literal["open", "draining", "updating", "lost"]
"""The work that an engine accepts.

open: everything.
draining: requests of its sessions, but no new session.
updating: it has no session; requests wait for its new weights.
lost: nothing.
"""


@dataclasses.dataclass(eq=False)
class _Session:
  """A session between `assign` and `end`.

  Attributes:
    engine: None when it was lost.
    version: of the last engine that was lost.
    sampled: version of its last token; -1 before the first.
  """

  domain: str
  engine: int | None
  group: str
  version: int = -1
  sampled: int = -1
  sample: affinity.Sample = affinity.Sample()


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
  """

  sessions: collections.Counter[tuple[str, str]] = dataclasses.field(
    default_factory=collections.Counter
  )
  fallbacks: int = 0
  returns: int = 0
  moved: int = 0
  prompts_shared: int = 0
  prompts_repeated: int = 0


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
  """

  def __init__(
    self,
    infos: Sequence[placement.EngineInfo],
    routing: affinity.Routing,
    max_sessions: int = 65_536,
  ):
    self.counts = Counts()
    self.one_version = False
    self._infos = tuple(infos)
    self._affinity = affinity.Affinity(infos, routing)
    self._num_sessions = [0] * len(infos)
    self._unbound_requests = [0] * len(infos)
    self._states: list[RouteState] = ["open"] * len(infos)
    self._sessions: dict[str, _Session] = {}
    # Sessions of each group by engine; 0 where some have been.
    self._groups: dict[str, dict[int, int]] = {}
    self._max_sessions = max_sessions
    # The engine of each unbound session, and of each request.
    self._homes: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._requests: dict[str, tuple[int, bool]] = {}
    self._domains_on_fallback: set[str] = set()

  def of(self, *states: RouteState) -> list[int]:
    """Returns the engines that are in one of these states, in order."""
    return [i for i, state in enumerate(self._states) if state in states]

  @property
  def load(self) -> list[int]:
    """Sessions of each engine; an unbound request counts as one."""
    pairs = zip(self._num_sessions, self._unbound_requests, strict=True)
    return [sum(pair) for pair in pairs]

  @property
  def seconds(self) -> Mapping[tuple[str, str], float]:
    """Measured seconds of a session by domain and pool."""
    return self._affinity.estimates.seconds

  @property
  def serving(self) -> list[int]:
    """Engines that have not been lost, in order."""
    return self.of("open", "draining", "updating")

  @property
  def all_lost(self) -> bool:
    """True while no engine serves."""
    return self._states.count("lost") == len(self._states)

  def describe(self) -> dict[str, float]:
    """Returns the decisions, by the names of metrics.

    `sessions/POOL/DOMAIN` began there, `session_s/POOL/DOMAIN` is the measured
    length of one there.
    """
    sessions = {
      f"sessions/{pool}/{domain}": float(count)
      for (pool, domain), count in sorted(self.counts.sessions.items())
    }
    seconds = {
      f"session_s/{pool}/{domain}": value
      for (domain, pool), value in sorted(self.seconds.items())
    }
    return {
      "engines_lost": float(len(self.of("lost"))),
      "route_fallbacks": float(self.counts.fallbacks),
      "route_returns": float(self.counts.returns),
      "sessions_moved": float(self.counts.moved),
      "prompts_shared": float(self.counts.prompts_shared),
      "prompts_repeated": float(self.counts.prompts_repeated),
      **sessions,
      **seconds,
    }

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
    pool = self._infos[assignment.engine].pool
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
      counts = self._groups.setdefault(group, {})
      counts[engine] = counts.get(engine, 0) + 1

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
    pool, others = self._infos[best.engine].pool, self._groups.get(group, {})
    having = [i for i in engines if i in others and self._infos[i].pool == pool]
    return best._replace(
      engine=self._affinity.beside(having, best.engine, load)
    )

  def _first(
    self, domain: str, engine: int, group: str
  ) -> affinity.Assignment | None:
    """Returns the first engine of a session; None: it must wait."""
    free = self.of("open")
    preferred = self._affinity.preferred(domain)
    if preferred is not None and preferred.isdisjoint(free):
      # A pool that only takes new weights is worth waiting for.
      soon = preferred.intersection(self.of("draining", "updating"))
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
    pool = self._infos[session.engine].pool
    self._affinity.estimates.end(session.domain, pool, session.sample)

  def send(self, request: str, name: str) -> affinity.Assignment | None:
    """Returns the engine for a request of a session; None: all are lost.

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
    if assignment is not None:
      self._requests[request] = assignment.engine, session is None
      self._unbound_requests[assignment.engine] += session is None
    return assignment

  def orphaned(self, name: str) -> bool:
    """Returns True if an assigned session has lost its engine."""
    session = self._sessions.get(name)
    return session is not None and session.engine is None

  def move(
    self, name: str, versions: Sequence[int]
  ) -> affinity.Assignment | None:
    """Gives an orphaned session an engine; None: it must wait, or all are lost.

    The version of a session never falls, and stays the same if it can: an
    engine that drains still has the weights with which the session began.

    Args:
      versions: that each engine serves.

    Raises:
      ValueError: with `one_version`, none will serve that of its tokens.
    """
    session = self._sessions[name]
    able = [i for i in self.serving if versions[i] >= session.version]
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
    behind = [i for i in self.serving if versions[i] < version]
    able = [i for i in able if versions[i] == version]
    if self.serving and not able and not behind:
      raise ValueError(
        f"session {name} has tokens of version {version}, which no engine "
        "that is left serves"
      )
    return able

  def _home(self, name: str) -> affinity.Assignment | None:
    """Returns the engine of an unbound session."""
    home = self._homes.pop(name, None)
    if home is not None and self._states[home] != "lost":
      assignment = affinity.Assignment(home)
    elif engines := self.of("open") or self.serving:
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
    engine, unbound = self._requests.pop(request)
    self._unbound_requests[engine] -= unbound

  def engine_of(self, request: str) -> int:
    """Returns the engine of a request.

    Raises:
      ValueError: no such request is in flight.
    """
    if request not in self._requests:
      raise ValueError(f"request {request} is not in flight")
    return self._requests[request][0]

  def measure(
    self, name: str, engine: int, sample: affinity.Sample, version: int = -1
  ) -> None:
    """Adds a request's sample to its session; it counts when that ends.

    Args:
      version: of the last token of the answer; -1 when it has none.
    """
    session = self._sessions.get(name)
    if session is None:
      return
    session.sampled = max(session.sampled, version)
    if session.engine == engine:
      session.sample = session.sample.plus(sample)

  def lose(self, engine: int, version: int) -> None:
    """Takes an engine out of use; its sessions move as they ask.

    Args:
      version: that it served.
    """
    self._states[engine] = "lost"
    for session in self._sessions.values():
      if session.engine == engine:
        session.engine, session.version = None, version
        session.sample = affinity.Sample()
        self._leave(session.group, engine)
    for group in self._groups.values():
      group.pop(engine, None)  # Its cache is gone.

  def recover(self, engine: int) -> None:
    """Takes a lost engine into use again.

    Raises:
      ValueError: it is not lost.
    """
    self._change(engine, "lost", "open")
    for name in [s for s, i in self._homes.items() if i == engine]:
      del self._homes[name]  # Its cache is gone.

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
    if self._states[engine] != "lost":
      self._states[engine] = "open"

  def _change(self, engine: int, before: RouteState, after: RouteState) -> None:
    if self._states[engine] != before:
      raise ValueError(
        f"engine {engine} is {self._states[engine]}, not {before}"
      )
    self._states[engine] = after
