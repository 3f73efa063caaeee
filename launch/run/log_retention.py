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
_RECENT = 1000
"""Groups of the last events, of which more may come."""


class LogRetention:
  """Keeps the logs of a run below a bound, but for their last segments.

  One thread at a time calls `trim`: the owner, or that of `trim_later`.

  Args:
    run_dir: it has a config.json.
    max_bytes: of events and of spans, each, on disk.
    warn: is given a sentence, once, when the log cannot be checked; nothing of
      it is deleted then.
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
    while self._is_due(rounds):
      self._segments = len(segments.closed(self._log))
      if not self._delete_first(rounds):
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

  def _delete_first(self, rounds: int) -> bool:
    """Deletes the first segment, unless it may still be needed."""
    first = segments.number_of(segments.closed(self._log)[0])
    schedule, group_size = log_check.promised(self._log.parent)
    reader = log_check.LogReader(schedule, group_size)
    try:
      survivors = reader.begin(self._log)
      recent = self._observe(first, reader, survivors)
      groups = {attempt.group for attempt in reader.under_way}
      floor = self._over_at(first, reader)
    except segments.Damaged as error:
      raise log_check.UnreadableLog(str(error)) from error
    if floor is None:
      return False
    self._rounds = floor
    if rounds < floor:
      return False
    state = reader.to_host(survivors.to_host(groups | recent, floor))
    segments.delete(self._log, first, state)
    return True

  def _observe(
    self,
    first: int,
    reader: log_check.LogReader,
    survivors: event_log.Survivors,
  ) -> set[int]:
    """Reads the first segment; returns the groups of its last events."""
    last = self._last_restart()
    if last >= first:
      for event in self._events(event_log.LogFile(self._log, last=last)):
        survivors.note(event)
    recent = collections.deque[int](maxlen=_RECENT)
    log = event_log.LogFile(self._log, last=first)
    for event in self._events(log):
      if last < first:
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

  def _over_at(self, first: int, reader: log_check.LogReader) -> int | None:
    """Returns the rounds after which a restart leaves a segment as it is.

    None if an attempt that began in it is not over.
    """
    waiting = {
      (attempt.group, attempt.number)
      for attempt in reader.under_way
      if not (attempt.trained or attempt.dropped)
    }
    rounds = reader.rounds
    # A checkpoint is taken between rounds: that of the next one comes after.
    if not waiting:
      return rounds + 1
    for event in self._events(event_log.LogFile(self._log, first + 1)):
      if event["kind"] == "trained":
        rounds = max(rounds, event["version"] + 1)
      if event["kind"] in ("trained", "dropped"):
        waiting.discard((event["group"], event["attempt"]))
        if not waiting:
          return rounds + 1
    return None

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
