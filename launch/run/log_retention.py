"""Deletes the oldest segments of the logs of a run, once they are checked.

  oldest segment --LogReader--> state --> mark on disk --> it is deleted

A restart may supersede what is behind its checkpoint, and an attempt that has
begun. So a segment of events is deleted when all attempts in it are over, and a
round has begun and ended since, before the oldest checkpoint was taken. The
state of the checks after it is in the mark that `segments.delete` leaves, from
which `log_check` goes on. Of spans nothing is kept.
"""

import collections
import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

from launch.report import log_check
from rl.audit import event_log
from rl.runtime import segments

_REST_EVERY = 50
_REST_S = 0.001
"""So the thread of the event loop need not wait long for this one."""
_LOW = 0.75
"""Share of the bound that is left, if that can be."""
_RECENT = 1000
"""Groups of the last events, of which more may come."""


class LogRetention:
  """Keeps the logs of a run below a bound, but for their last segments.

  One thread at a time calls `trim`: the owner, or that of `trim_later`.

  Args:
    run_dir: it has a config.json.
    max_bytes: of events and of spans, each, on disk.
    warn: is given a sentence, once, when the log cannot be checked; nothing of
      it is deleted then. Also of each attempt that keeps a log at twice its
      bound: a restart would begin it again, so its events must stay.
  """

  def __init__(
    self,
    run_dir: pathlib.Path,
    max_bytes: int,
    warn: Callable[[str], None] = lambda _: None,
  ):
    self._log = run_dir / "events.jsonl"
    self._spans = run_dir / "spans.jsonl"
    self._max_bytes = max_bytes
    self._warn = warn
    self._with_restart: dict[int, bool] = {}
    # Nothing can be deleted before that many rounds are safe, or segments are
    # closed.
    self._rounds = self._segments = 0
    self._thread: threading.Thread | None = None
    self._ending = threading.Event()
    self._is_unreadable = False
    self._told: set[tuple[int, int]] = set()

  def trim_later(self, rounds: int) -> None:
    """As `trim`, in a thread, unless it runs or would change nothing."""
    if self._thread is not None and self._thread.is_alive():
      return
    if not self._is_due(rounds) and not self._too_large(self._spans):
      return
    self._thread = threading.Thread(
      target=self._trim_quietly, args=(rounds,), name="retention", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Has the thread end, at the next event."""
    self._ending.set()
    if self._thread is not None:
      self._thread.join()

  def trim(self, rounds: int) -> None:
    """Deletes what is beyond the bound and no longer needed.

    Args:
      rounds: after which a restart goes on, at the earliest.

    Raises:
      OSError: something cannot be written or deleted.
      UnreadableLog: the log cannot be checked.
    """
    while self._too_large(self._spans):
      first = segments.number_of(segments.closed(self._spans)[0])
      segments.delete(self._spans, first)
    alone = False
    while self._is_due(rounds):
      first, last = self._first(), self._last_beyond()
      # All until the last restart is read: once for many, if that can be.
      alone = alone or last == first or not self._delete(last, rounds)
      if alone and not self._delete(first, rounds):
        self._segments = len(segments.closed(self._log))
        return
      self._segments = 0

  def _trim_quietly(self, rounds: int) -> None:
    # What cannot be written is tried again; the run's own files tell of it.
    with contextlib.suppress(OSError, _Ending):
      try:
        self.trim(rounds)
      except log_check.UnreadableLog as error:
        self._is_unreadable = True
        self._warn(f"nothing of the log is deleted, as it is damaged: {error}")

  def _is_due(self, rounds: int) -> bool:
    return (
      not self._is_unreadable
      and self._too_large(self._log)
      and rounds >= self._rounds
      and len(segments.closed(self._log)) > self._segments
    )

  def _too_large(self, path: pathlib.Path) -> bool:
    return bool(
      segments.num_bytes(path) > self._max_bytes and segments.closed(path)
    )

  def _first(self) -> int:
    return segments.number_of(segments.closed(self._log)[0])

  def _last_beyond(self) -> int:
    """Returns the segment up to which to delete, to be well below the bound."""
    left, number = segments.num_bytes(self._log), 0
    for segment in segments.closed(self._log):
      number = segments.number_of(segment)
      left -= segment.stat().st_size
      if left <= _LOW * self._max_bytes:
        break
    return number

  def _delete(self, number: int, rounds: int) -> bool:
    """Deletes the segments up to a number, unless one may still be needed."""
    schedule, group_size = log_check.promised(self._log.parent)
    reader = log_check.LogReader(schedule, group_size)
    try:
      survivors = reader.begin(self._log)
      recent = self._observe(number, reader, survivors)
      groups = {attempt.group for attempt in reader.under_way}
      floor, waiting = self._over_at(number, reader)
    except segments.Damaged as error:
      raise log_check.UnreadableLog(str(error)) from error
    if number == self._first():
      if floor is None:
        self._tell(waiting)
      else:
        self._rounds = floor
    if floor is None or rounds < floor:
      return False
    state = reader.to_host(survivors.to_host(groups | recent, floor))
    segments.delete(self._log, number, state)
    return True

  def _observe(
    self,
    number: int,
    reader: log_check.LogReader,
    survivors: event_log.Survivors,
  ) -> set[int]:
    """Reads segments up to a number; returns the groups of the last events."""
    last = self._last_restart()
    has_restart = last >= self._first()
    if has_restart:
      noted = event_log.LogFile(self._log, last=max(last, number))
      for event in self._events(noted):
        survivors.note(event)
    recent = collections.deque[int](maxlen=_RECENT)
    log = event_log.LogFile(self._log, last=number)
    for event in self._events(log):
      if not has_restart:
        survivors.note(event)
      for one in survivors.take(event):
        reader.observe(one)
      recent.append(event.get("group", -1))
    reader.count_lines(log)
    return set(recent)

  def _last_restart(self) -> int:
    """Returns the number of the last segment with a restart, 0 for none.

    The file, which is not closed, has the number after the last.
    """
    numbers = [segments.number_of(x) for x in segments.closed(self._log)]
    newest = numbers[-1]
    if _is_resumed(event_log.LogFile(self._log, newest + 1)):
      return newest + 1
    for number in reversed(numbers):
      if number not in self._with_restart:
        log = event_log.LogFile(self._log, number, number)
        self._with_restart[number] = _is_resumed(log)
      if self._with_restart[number]:
        return number
    return 0

  def _tell(self, waiting: set[tuple[int, int]]) -> None:
    """Warns of attempts that are not over, once the log is long."""
    size = segments.num_bytes(self._log)
    if size < 2 * self._max_bytes or waiting <= self._told:
      return
    group, number = min(waiting - self._told)
    self._told |= waiting
    self._warn(
      f"{self._log} has {size / 1e6:,.1f} MB, where retention.log_bytes allows "
      f"{self._max_bytes / 1e6:,.1f}: attempt {number} of group {group} is not "
      "over, and what came after its begin must stay until then; "
      f"python -m launch.status {self._log.parent} tells what it waits for"
    )

  def _over_at(
    self, number: int, reader: log_check.LogReader
  ) -> tuple[int | None, set[tuple[int, int]]]:
    """Returns the rounds after which a restart leaves segments as they are.

    None if attempts (group, number) that began there are not over, with these.
    """
    waiting = {
      (attempt.group, attempt.number)
      for attempt in reader.under_way
      if not (attempt.trained or attempt.dropped)
    }
    rounds = reader.rounds
    # A checkpoint is taken between rounds: that of the next one comes after.
    if not waiting:
      return rounds + 1, waiting
    for event in self._events(event_log.LogFile(self._log, number + 1)):
      if event["kind"] == "trained":
        rounds = max(rounds, event["version"] + 1)
      if event["kind"] in ("trained", "dropped"):
        waiting.discard((event["group"], event["attempt"]))
        if not waiting:
          return rounds + 1, waiting
    return None, waiting

  def _events(self, log: event_log.LogFile) -> Iterator[event_log.Event]:
    """Yields events; in the thread with rests, and until it is to end."""
    is_aside = threading.current_thread() is self._thread
    for i, event in enumerate(log):
      if is_aside and i % _REST_EVERY == 0:
        if self._ending.is_set():
          raise _Ending
        time.sleep(_REST_S)
      yield event


def _is_resumed(log: event_log.LogFile) -> bool:
  return any(log.only(("resumed",)))


class _Ending(Exception):
  """The thread is to end."""
