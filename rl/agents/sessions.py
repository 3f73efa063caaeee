"""The open sessions of a server, by name."""

import collections
import re
import secrets
import time
from collections.abc import Callable, Sequence

from rl.agents import session_tree
from rl.data import trajectory
from rl.rollout import episode as episode_lib

_ID = re.compile(r"[\w.:~@=+-]{1,200}", re.ASCII)


class UnknownSession(LookupError):
  """The name belongs to none of the sessions that this owner has open."""


class FinishedSession(RuntimeError):
  """The session has ended and takes no more requests."""


class TooManySessions(RuntimeError):
  """All `max_sessions` sessions wait for an answer."""


class Sessions:
  """The sessions of one server; all methods belong to one event loop.

  Args:
    max_sessions: open at a time. One more ends the session that was idle for
      longest, as TRUNCATED and without a reward.
    keep: receives the trajectories of each session as it ends. If it raises,
      the session stays open.
    clock: in seconds.
  """

  def __init__(
    self,
    chat: episode_lib.Chat,
    *,
    max_sessions: int = 4096,
    keep: Callable[[Sequence[trajectory.Trajectory]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if max_sessions < 1:
      raise ValueError(f"max_sessions={max_sessions} must be at least 1")
    self.chat = chat
    self._max = max_sessions
    self._keep = keep or (lambda trajectories: None)
    self._clock = clock
    self._open: collections.OrderedDict[str, session_tree.Session] = (
      collections.OrderedDict()
    )
    # The owner of each.
    self._finished: collections.OrderedDict[str, str] = (
      collections.OrderedDict()
    )

  def __len__(self) -> int:
    return len(self._open)

  def open(
    self,
    name: str | None = None,
    *,
    owner: str = "",
    seed: int | None = None,
    priority: tuple[int, ...] = (),
  ) -> session_tree.Session:
    """Returns the session of a name, a new one if there is none.

    Args:
      name: None gives a random name.
      owner: nobody else finds the session.
      seed, priority: of a new session; a random seed by default.

    Raises:
      ValueError: the name has forbidden characters.
      FinishedSession: it has ended.
      UnknownSession: it belongs to another owner.
      TooManySessions: all sessions wait for an answer, so none can be ended.
    """
    if name is None:
      name = secrets.token_hex(8)
    if not _ID.fullmatch(name):
      raise ValueError(
        f"session {name[:200]!r}: use 1 to 200 letters, digits or . _ : ~ @ = "
        "+ -"
      )
    if name not in self._open and name not in self._finished:
      self._make_room()
      seed = secrets.randbits(31) if seed is None else seed
      self._open[name] = session_tree.Session(
        name, self.chat, seed, priority, self._clock, owner
      )
    session = self.get(name, owner)
    self._open.move_to_end(name)
    return session

  def get(self, name: str, owner: str = "") -> session_tree.Session:
    """Returns an open session.

    Raises:
      FinishedSession: it has ended.
      UnknownSession: the name is not open, or belongs to another owner.
    """
    if self._finished.get(name) == owner:
      raise FinishedSession(f"session {name} is finished; use another name")
    session = self._open.get(name)
    if session is None or session.owner != owner:
      raise UnknownSession(f"no session {name} is open")
    return session

  def holds(self, session: session_tree.Session) -> bool:
    """Returns whether a session is still open."""
    return self._open.get(session.name) is session

  def finish(
    self, name: str, ending: session_tree.Ending, owner: str = ""
  ) -> list[trajectory.Trajectory]:
    """Ends a session and returns its trajectories, at least one.

    Raises:
      FinishedSession: it has ended before.
      UnknownSession: the name was never opened, or not by this owner.
    """
    branches = self.get(name, owner).trajectories(ending)
    self._end(name, branches)
    return branches

  def close(self) -> int:
    """Ends all as TRUNCATED, without rewards; returns those with answers.

    Those that cannot be kept stay open, and the first error of `keep` is
    raised.
    """
    count, failed = 0, None
    for name in list(self._open):
      try:
        count += self._interrupt(name)
      except Exception as error:
        failed = failed or error
    if failed is not None:
      raise failed
    return count

  def _interrupt(self, name: str) -> bool:
    session = self._open[name]
    has_answers = session.num_answers > 0
    self._end(
      name,
      session.trajectories(session_tree.INTERRUPTED) if has_answers else [],
    )
    return has_answers

  def _end(self, name: str, branches: Sequence[trajectory.Trajectory]) -> None:
    if branches:
      self._keep(branches)
    self._finished[name] = self._open.pop(name).owner
    if len(self._finished) > self._max:
      self._finished.popitem(last=False)

  def _make_room(self) -> None:
    if len(self._open) < self._max:
      return
    idle = (n for n, session in self._open.items() if not session.running)
    name = next(idle, None)
    if name is None:
      raise TooManySessions(
        f"all of max_sessions={self._max} wait for answers; finish some, or "
        "retry later"
      )
    self._interrupt(name)
