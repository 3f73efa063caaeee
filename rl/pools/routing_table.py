"""Which engine serves which session: who is where, and what moves them.

         assign            lose                  move
  new ---------> live at i -----> live, homeless -----> live at j
                    |  send: requests go to i
                    +--end--> forgotten

  engine: open --drain--> draining --update--> updating --reopen--> open

A session stays where its keys and values are. Were the phases of a request to
go to different pools, `Routes.send` would say so: a session has one engine
because there one decides for both.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from rl.pools import affinity

State = Literal["open", "draining", "updating", "lost"]
"""What an engine is there for.

open: everything.
draining: sessions that it has; it takes no new ones.
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
  version: int = -1
  sampled: int = -1
  sample: affinity.Sample = dataclasses.field(default_factory=affinity.Sample)


@dataclasses.dataclass(eq=False)
class Counts:
  """What has been decided so far.

  Attributes:
    sessions: that began, by pool and domain.
    fallbacks: sessions that went elsewhere than they should.
    returns: times that the sessions of a domain went where they should again.
    moved: sessions that lost their engine and got another.
  """

  sessions: collections.Counter[tuple[str, str]] = dataclasses.field(
    default_factory=collections.Counter
  )
  fallbacks: int = 0
  returns: int = 0
  moved: int = 0


class Routes:
  """Who is where. Pure: no clock, no task, no engine.

  A session that is assigned is known until it ends. One that was not gets an
  engine at its first request, and is forgotten when others are remembered.

  Args:
    seats: one for each engine.
    max_sessions: remembered of those that were never assigned; the one not
      seen for longest is forgotten first.

  Attributes:
    counts: what has been decided so far.
    one_version: engines drain before they take weights, so that all tokens of
      a conversation are of one version.
  """

  def __init__(
    self,
    seats: Sequence[affinity.Seat],
    routing: affinity.Routing,
    max_sessions: int = 65_536,
  ):
    self.counts = Counts()
    self.one_version = False
    self._seats = tuple(seats)
    self._affinity = affinity.Affinity(seats, routing)
    # Sessions of each engine; requests of sessions that were never assigned.
    self._held, self._loose = [0] * len(seats), [0] * len(seats)
    self._states: list[State] = ["open"] * len(seats)
    self._sessions: dict[str, _Session] = {}
    self._max_sessions = max_sessions
    self._homes: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._requests: dict[str, tuple[int, bool]] = {}
    self._away: set[str] = set()

  def of(self, *states: State) -> list[int]:
    """Returns the engines that are in one of these states, in order."""
    return [i for i, state in enumerate(self._states) if state in states]

  @property
  def load(self) -> list[int]:
    """Sessions of each engine; a request of one never assigned is one too."""
    return [sum(both) for both in zip(self._held, self._loose, strict=True)]

  @property
  def seconds(self) -> Mapping[tuple[str, str], float]:
    """Seconds of a session by domain and pool, as far as they are known."""
    return self._affinity.estimates.seconds

  @property
  def serving(self) -> list[int]:
    """Engines that have not been lost, in order."""
    return self.of("open", "draining", "updating")

  @property
  def bindings(self) -> Mapping[str, int]:
    """The engine of every session that was assigned and has one."""
    bound = {name: session.engine for name, session in self._sessions.items()}
    return {name: i for name, i in bound.items() if i is not None}

  def describe(self) -> dict[str, float]:
    """Returns what was decided, by the names of metrics.

    `sessions/POOL/DOMAIN` began there, `session_s/POOL/DOMAIN` is how long one
    takes there, as far as that was measured.
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
      **sessions,
      **seconds,
    }

  @property
  def num_remembered(self) -> int:
    """Sessions that were never assigned and have an engine all the same."""
    return len(self._homes)

  def assign(self, session: str, domain: str) -> affinity.Choice | None:
    """Begins a session; None: it must wait, or all engines are lost.

    Raises:
      ValueError: it has begun already.
    """
    if session in self._sessions:
      raise ValueError(f"session {session} has begun already")
    choice = self._first(domain)
    if choice is None:
      return None
    pool = self._seats[choice.engine].pool
    self._homes.pop(session, None)
    self._sessions[session] = _Session(domain, choice.engine)
    self._held[choice.engine] += 1
    self.counts.sessions[pool, domain] += 1
    self._affinity.estimates.begin(domain, pool)
    return self._counted(domain, choice)

  def _first(self, domain: str) -> affinity.Choice | None:
    """Returns where a session begins, if anywhere yet."""
    free = self.of("open")
    preferred = self._affinity.preferred(domain)
    if preferred is not None and preferred.isdisjoint(free):
      # A pool that only takes new weights is worth waiting for.
      soon = preferred.intersection(self.of("draining", "updating"))
      free = [] if soon else free
    if not free:
      return None
    return self._affinity.choose(domain, free, self.load)

  def _counted(self, domain: str, choice: affinity.Choice) -> affinity.Choice:
    if choice.wanted:
      self.counts.fallbacks += 1
      self._away.add(domain)
    elif domain in self._away:
      self.counts.returns += 1
      self._away.discard(domain)
    return choice

  def end(self, session: str) -> None:
    """Ends a session; one that has ended, or never began, is no matter."""
    mine = self._sessions.pop(session, None)
    if mine is None or mine.engine is None:
      return
    self._held[mine.engine] -= 1
    pool = self._seats[mine.engine].pool
    self._affinity.estimates.end(mine.domain, pool, mine.sample)

  def send(self, request: str, session: str) -> affinity.Choice | None:
    """Returns the engine for a request of a session; None: all are lost.

    Raises:
      ValueError: a request of this name is in flight, or the session must
        `move` first.
    """
    if request in self._requests:
      raise ValueError(f"request {request} is already in flight")
    mine = self._sessions.get(session)
    if mine is None:
      choice = self._home(session)
    elif mine.engine is None:
      raise ValueError(f"session {session} has lost its engine")
    else:
      choice = affinity.Choice(mine.engine)
    if choice is not None:
      self._requests[request] = choice.engine, mine is None
      self._loose[choice.engine] += mine is None
    return choice

  def homeless(self, session: str) -> bool:
    """Whether a session that was assigned has lost its engine."""
    mine = self._sessions.get(session)
    return mine is not None and mine.engine is None

  def move(
    self, session: str, versions: Sequence[int]
  ) -> affinity.Choice | None:
    """Gives a homeless session another engine; None: it must wait, or all are
    lost.

    The versions of a conversation never fall, and if they can stay they do: an
    engine that drains still has the weights with which the session began.

    Args:
      versions: that each engine serves.

    Raises:
      ValueError: with `one_version`, none will serve that of its tokens.
    """
    mine = self._sessions[session]
    able = [i for i in self.serving if versions[i] >= mine.version]
    if self.one_version:
      able = self._alike(session, versions, able)
    if not able:
      return None

    def unlike(i: int) -> tuple[bool, int]:
      return self._states[i] == "updating", versions[i]

    best = min(map(unlike, able))
    nearest = [i for i in able if unlike(i) == best]
    choice = self._affinity.choose(mine.domain, nearest, self.load)
    mine.engine = choice.engine
    self._held[choice.engine] += 1
    self.counts.moved += 1
    return self._counted(mine.domain, choice)

  def _alike(
    self, session: str, versions: Sequence[int], able: Sequence[int]
  ) -> list[int]:
    """Returns the engines on which a session will have one version."""
    version = self._sessions[session].sampled
    # One that takes its weights waits for no session that comes now.
    able = [i for i in able if self._states[i] != "updating"]
    if version < 0:
      return able
    behind = [i for i in self.serving if versions[i] < version]
    able = [i for i in able if versions[i] == version]
    if self.serving and not able and not behind:
      raise ValueError(
        f"session {session} has tokens of version {version}, which no engine "
        "that is left serves"
      )
    return able

  def _home(self, session: str) -> affinity.Choice | None:
    """Returns the engine of a session that was never assigned."""
    home = self._homes.pop(session, None)
    if home is not None and self._states[home] != "lost":
      choice = affinity.Choice(home)
    elif engines := self.of("open") or self.serving:
      choice = self._affinity.choose("", engines, self.load)
      self._counted("", choice)
    else:
      return None
    self._homes[session] = choice.engine
    if len(self._homes) > self._max_sessions:
      self._homes.popitem(last=False)
    return choice

  def answered(self, request: str) -> None:
    """Takes a request from its engine."""
    engine, counts = self._requests.pop(request)
    self._loose[engine] -= counts

  def asked(self, request: str) -> int:
    """Returns the engine of a request.

    Raises:
      ValueError: no such request is in flight.
    """
    if request not in self._requests:
      raise ValueError(f"request {request} is not in flight")
    return self._requests[request][0]

  def measure(
    self, session: str, engine: int, sample: affinity.Sample, version: int = -1
  ) -> None:
    """Notes what a request of a session took; it counts when that ends.

    Args:
      version: of the last token that it was answered; -1 when there is none.
    """
    mine = self._sessions.get(session)
    if mine is None:
      return
    mine.sampled = max(mine.sampled, version)
    if mine.engine == engine:
      mine.sample = mine.sample.plus(sample)

  def lose(self, engine: int, version: int) -> None:
    """Sends nothing to an engine any more; its sessions move as they ask.

    Args:
      version: that it served.
    """
    self._states[engine] = "lost"
    for session in self._sessions.values():
      if session.engine == engine:
        session.engine, session.version = None, version
        session.sample = affinity.Sample()
    self._held[engine] = 0

  def recover(self, engine: int) -> None:
    """Takes an engine that was lost into use again.

    Raises:
      ValueError: it was not.
    """
    self._change(engine, "lost", "open")
    for session in [s for s, i in self._homes.items() if i == engine]:
      del self._homes[session]  # What it knew of them is gone.

  def drain(self, engine: int) -> None:
    """Lets an engine that is open take no new session.

    Raises:
      ValueError: it is not open.
    """
    self._change(engine, "open", "draining")

  def drained(self, engine: int) -> bool:
    """Whether no session that was assigned is on an engine."""
    return not self._held[engine]

  def update(self, engine: int) -> None:
    """Marks an engine that has drained as taking its weights.

    Raises:
      ValueError: it does not drain, or has not yet.
    """
    if not self.drained(engine):
      raise ValueError(f"engine {engine} has sessions")
    self._change(engine, "draining", "updating")

  def reopen(self, engine: int) -> None:
    """Ends `drain` and `update`; one that was lost meanwhile stays so."""
    if self._states[engine] != "lost":
      self._states[engine] = "open"

  def _change(self, engine: int, before: State, after: State) -> None:
    if self._states[engine] != before:
      raise ValueError(
        f"engine {engine} is {self._states[engine]}, not {before}"
      )
    self._states[engine] = after
