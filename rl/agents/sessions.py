"""The open sessions of a server, by name."""

import collections
import itertools
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence

from envs import base
from rl.agents import session_tree
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.runtime import log_line

# The part of all bytes that one session may hold.
_SHARE = 16
# After which a session that could not be kept is tried again, and how many may
# fail within one request: each costs the making of its trajectories.
_RETRY_S = 60.0
_TRIES = 4
_ID = re.compile(r"[\w.:~@=+-]{1,200}", re.ASCII)


class UnknownSession(LookupError):
  """The name belongs to none of the sessions that this owner has open."""


class FinishedSession(RuntimeError):
  """The session has ended and takes no more requests."""


class FullSession(RuntimeError):
  """The session holds as much as one may, and takes no more requests."""


class TooManySessions(RuntimeError):
  """There is no room for a request, and no session can be ended to make it."""


class Sessions:
  """The sessions of one server; all methods belong to one event loop.

  Args:
    max_sessions: open at a time. One more ends the session that was idle for
      longest, of the owner with the most, as TRUNCATED and without a reward.
    max_bytes: of their answers; more end sessions in the same way, and one
      session takes no requests once it holds a 16th. None: any number.
    max_idle_s: a session without a request for longer is ended in the same way;
      None: never.
    keep: receives the trajectories of each session as it ends. If it raises,
      that session stays open, and others are ended in its place; whoever
      finishes it gets the error.
    clock: in seconds.

  Attributes:
    num_ended: sessions that have ended, by the reason.
  """

  def __init__(
    self,
    chat: episode_lib.Chat,
    *,
    max_sessions: int = 4096,
    max_bytes: int | None = None,
    max_idle_s: float | None = None,
    keep: Callable[[Sequence[trajectory.Trajectory]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if max_sessions < 1:
      raise ValueError(f"max_sessions={max_sessions} must be at least 1")
    self.chat = chat
    self.num_ended: collections.Counter[str] = collections.Counter()
    self._max = max_sessions
    self._max_bytes = math.inf if max_bytes is None else max_bytes
    self._max_idle_s = math.inf if max_idle_s is None else max_idle_s
    # Of each owner.
    self._held: collections.Counter[str] = collections.Counter()
    self._bytes: collections.Counter[str] = collections.Counter()
    self._keep = keep or (lambda trajectories: None)
    self._clock = clock
    self._open: collections.OrderedDict[str, session_tree.Session] = (
      collections.OrderedDict()
    )
    # When those that could not be kept may be tried again.
    self._retry_s: dict[str, float] = {}
    # The owner of each, and the reason of its end.
    self._finished: collections.OrderedDict[str, tuple[str, str]] = (
      collections.OrderedDict()
    )

  def __len__(self) -> int:
    return len(self._open)

  @property
  def num_bytes(self) -> int:
    """About what the answers of open sessions take."""
    return self._bytes.total()

  def open(
    self,
    name: str | None = None,
    *,
    owner: str = "",
    seed: int | None = None,
    priority: tuple[int, ...] = (),
    temperature: float | None = None,
  ) -> session_tree.Session:
    """Returns the session of a name, a new one if there is none.

    Args:
      name: None gives a random name.
      owner: nobody else finds the session.
      seed, priority, temperature: of a new session; a random seed by default.

    Raises:
      ValueError: the name has forbidden characters.
      FinishedSession: it has ended.
      UnknownSession: it belongs to another owner.
      FullSession: it holds too much.
      TooManySessions: all sessions wait for an answer or cannot be kept, so
        none can be ended.
    """
    if name is None:
      name = secrets.token_hex(8)
    if not _ID.fullmatch(name):
      raise ValueError(
        f"session {name[:200]!r}: use 1 to 200 letters, digits or . _ : ~ @ = "
        "+ -"
      )
    self._refuse_more_bytes()
    if name not in self._open and name not in self._finished:
      self._make_room()
      seed = secrets.randbits(31) if seed is None else seed
      self._open[name] = session_tree.Session(
        name, self.chat, seed, priority, self._clock, owner, temperature
      )
      self._held[owner] += 1
    session = self.get(name, owner)
    if session.num_bytes * _SHARE > self._max_bytes:
      raise FullSession(
        f"session {name} holds {session.num_bytes} bytes; finish it, and go on "
        "in another"
      )
    session.asked_s = session.used_s = self._clock()
    self._open.move_to_end(name)
    return session

  def get(self, name: str, owner: str = "") -> session_tree.Session:
    """Returns an open session.

    Raises:
      FinishedSession: it has ended.
      UnknownSession: the name is not open, or belongs to another owner.
    """
    self._end_idle()
    ended_owner, why = self._finished.get(name, (None, ""))
    if ended_owner == owner:
      raise FinishedSession(f"session {name} is {why}; use another name")
    session = self._open.get(name)
    if session is None or session.owner != owner:
      raise UnknownSession(f"no session {name} is open")
    return session

  def holds(self, session: session_tree.Session) -> bool:
    """Returns whether a session is still open."""
    return self._open.get(session.name) is session

  def record(
    self,
    session: session_tree.Session,
    opening: session_tree.Opening,
    completion: contract.Completion,
    answer: base.Message | None,
  ) -> None:
    """Adds an answer to an open session; see `session_tree.Session.record`.

    Raises:
      FinishedSession: the session has ended meanwhile.
    """
    if not self.holds(session):
      raise FinishedSession(
        f"session {session.name} was finished before its answer came"
      )
    before = session.num_bytes
    session.record(opening, completion, answer)
    self._bytes[session.owner] += session.num_bytes - before
    self._make_room_for_bytes()

  def finish(
    self, name: str, ending: session_tree.Ending, owner: str = ""
  ) -> list[trajectory.Trajectory]:
    """Ends a session and returns its trajectories, at least one.

    Raises:
      FinishedSession: it has ended before.
      UnknownSession: the name was never opened, or not by this owner.
    """
    branches = self.get(name, owner).trajectories(ending)
    self._end(name, branches, "finished")
    return branches

  def close(self) -> int:
    """Ends all as TRUNCATED, without rewards; returns those with answers.

    Those that cannot be kept stay open, and the first error of `keep` is
    raised.
    """
    count, failed = 0, None
    for name in list(self._open):
      try:
        count += self._interrupt(name, "closed")
      except Exception as error:
        failed = failed or error
    if failed is not None:
      raise failed
    return count

  def _interrupt(self, name: str, why: str) -> bool:
    session = self._open[name]
    has_answers = session.num_answers > 0
    self._end(
      name,
      session.trajectories(session_tree.INTERRUPTED) if has_answers else [],
      why,
    )
    return has_answers

  def _end(
    self, name: str, branches: Sequence[trajectory.Trajectory], why: str
  ) -> None:
    if branches:
      self._keep(branches)
    session = self._open.pop(name)
    self._retry_s.pop(name, None)
    self._bytes[session.owner] -= session.num_bytes
    self._held[session.owner] -= 1
    self.num_ended[why] += 1
    self._finished[name] = session.owner, why
    if len(self._finished) > self._max:
      self._finished.popitem(last=False)

  def _try_interrupt(self, name: str, why: str) -> bool:
    """Returns whether a session has ended: it stays if it cannot be kept."""
    try:
      self._interrupt(name, why)
    except Exception as error:
      if not self._retry_s:
        log_line.tell(f"session {name}: {error}")
      self._retry_s[name] = self._clock() + _RETRY_S
      return False
    return True

  def _may_end(self, session: session_tree.Session) -> bool:
    retry_s = self._retry_s.get(session.name, -math.inf)
    return not session.running and self._clock() >= retry_s

  def _make_room(self) -> None:
    self._end_idle()
    if len(self._open) >= self._max and not self._make_way(self._held):
      raise TooManySessions(
        f"all of max_sessions={self._max} {self._why_none_ends()}"
      )

  def _make_room_for_bytes(self) -> None:
    while self.num_bytes > self._max_bytes and self._make_way(self._bytes):
      pass

  def _refuse_more_bytes(self) -> None:
    """Keeps sessions from growing without bound while none can be kept."""
    if not self._retry_s:
      return
    self._make_room_for_bytes()
    if self._retry_s and self.num_bytes > self._max_bytes:
      raise TooManySessions(
        f"open sessions hold {self.num_bytes} bytes, above {self._max_bytes}, "
        f"and {self._why_none_ends()}"
      )

  def _why_none_ends(self) -> str:
    kept = " or cannot be recorded" if self._retry_s else ""
    return f"wait for answers{kept}; finish some, or retry later"

  def _make_way(self, held: collections.Counter[str]) -> bool:
    """Ends one session; returns whether one could be ended.

    Whoever holds most gives way, so that no owner can end the sessions of those
    with fewer.
    """
    names = (
      name
      for owner, _ in held.most_common()
      for name, session in self._open.items()
      if session.owner == owner and self._may_end(session)
    )
    return any(
      self._try_interrupt(name, "ended to make room")
      for name in itertools.islice(names, _TRIES)
    )

  def _end_idle(self) -> None:
    before_s, idle = self._clock() - self._max_idle_s, []
    for name, session in self._open.items():
      if session.asked_s >= before_s:
        break  # They are in the order of their last request.
      if session.used_s < before_s and self._may_end(session):
        idle.append(name)
    why = f"ended after {self._max_idle_s:g} s without use"
    failed = 0
    for name in idle:
      failed += not self._try_interrupt(name, why)
      if failed == _TRIES:
        break  # The rest is for the next request.
