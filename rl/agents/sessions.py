"""The open sessions: opened by name, ended by a reward, or given up."""

import collections
import re
import secrets
import time
from collections.abc import Callable, Sequence

from rl.agents import session_tree
from rl.data import trajectory
from rl.rollout import episode as episode_lib

_ID = re.compile(r"[\w.:~@=+-]{1,200}", re.ASCII)
_INTERRUPTED = session_tree.Ending(status=trajectory.Status.TRUNCATED)


class UnknownSession(LookupError):
  """No session of that name is open."""


class FinishedSession(RuntimeError):
  """The session is over, and takes no more requests."""


class TooManySessions(RuntimeError):
  """All sessions that there may be are waiting for an answer."""


class Sessions:
  """The sessions of one server; all methods belong to one event loop."""

  def __init__(
    self,
    chat: episode_lib.Chat,
    *,
    max_sessions: int = 4096,
    keep: Callable[[Sequence[trajectory.Trajectory]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts without any.

    Args:
      max_sessions: that are open. One more ends the one that was silent for
        longest, as TRUNCATED and without a reward.
      keep: gets what every session left as it ends. When it raises, the
        session stays open.
      clock: in seconds.
    """
    if max_sessions < 1:
      raise ValueError(f"max_sessions={max_sessions} is below 1")
    self.chat = chat
    self._max = max_sessions
    self._keep = keep or (lambda trajectories: None)
    self._clock = clock
    self._open: collections.OrderedDict[str, session_tree.Session] = (
      collections.OrderedDict()
    )
    self._over: collections.OrderedDict[str, None] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._open)

  def open(
    self,
    name: str | None = None,
    *,
    seed: int | None = None,
    priority: tuple[int, ...] = (),
  ) -> session_tree.Session:
    """Returns a session, a new one when there is none of that name.

    Args:
      name: None makes one up.
      seed, priority: of a new one; a random seed by default.

    Raises:
      ValueError: that can be no name.
      FinishedSession: it is over.
      TooManySessions: there is no room, and none can be ended.
    """
    if name is None:
      name = secrets.token_hex(8)
    if not _ID.fullmatch(name):
      raise ValueError(
        f"session {name[:200]!r}: use 1 to 200 letters, digits or . _ : ~ @ = "
        "+ -"
      )
    if name in self._over:
      raise FinishedSession(f"session {name} is finished; use another name")
    if name not in self._open:
      self._make_room()
      seed = secrets.randbits(31) if seed is None else seed
      self._open[name] = session_tree.Session(
        name, self.chat, seed, priority, self._clock
      )
    self._open.move_to_end(name)
    return self._open[name]

  def get(self, name: str) -> session_tree.Session:
    """Returns an open session.

    Raises:
      UnknownSession: there is none of that name.
    """
    if name not in self._open:
      raise UnknownSession(f"no session {name} is open")
    return self._open[name]

  def holds(self, session: session_tree.Session) -> bool:
    """Whether a session is still open."""
    return self._open.get(session.name) is session

  def finish(
    self, name: str, ending: session_tree.Ending
  ) -> list[trajectory.Trajectory]:
    """Ends a session, and returns what it left; one at least.

    Raises:
      FinishedSession: it is over.
      UnknownSession: there never was one of that name.
    """
    if name in self._over:
      raise FinishedSession(f"session {name} is finished")
    left = self.get(name).trajectories(ending)
    self._end(name, left)
    return left

  def close(self) -> int:
    """Ends all as TRUNCATED, without rewards; returns how many had answers."""
    count = 0
    for name in list(self._open):
      count += self._interrupt(name)
    return count

  def _interrupt(self, name: str) -> bool:
    session = self._open[name]
    some = session.num_answers > 0
    self._end(name, session.trajectories(_INTERRUPTED) if some else [])
    return some

  def _end(self, name: str, left: Sequence[trajectory.Trajectory]) -> None:
    if left:
      self._keep(left)
    del self._open[name]
    self._over[name] = None
    if len(self._over) > self._max:
      self._over.popitem(last=False)

  def _make_room(self) -> None:
    if len(self._open) < self._max:
      return
    idle = (n for n, session in self._open.items() if not session.running)
    name = next(idle, None)
    if name is None:
      raise TooManySessions(
        f"all of max_sessions={self._max} wait for answers; finish some, or "
        "ask again later"
      )
    self._interrupt(name)
