"""Which session owns which row of the KV cache. Pure bookkeeping."""

import collections


class Slots:
  """Rows of the cache and their owners; idle owners are evicted oldest first.

  The engine calls `acquire` before a request runs, `rest` when it has
  finished and `release` when its session ends.
  """

  def __init__(self, num_slots: int):
    self._free = list(range(num_slots - 1, -1, -1))
    self._row: dict[str, int] = {}
    self._idle: collections.OrderedDict[str, None] = collections.OrderedDict()

  def acquire(self, session: str) -> tuple[int, bool] | None:
    """Returns (row, whether it still holds the session's cache), or None.

    None: every row belongs to a session whose request is running.
    """
    if session in self._row:
      self._idle.pop(session, None)
      return self._row[session], True
    if self._free:
      row = self._free.pop()
    elif self._idle:
      victim, _ = self._idle.popitem(last=False)
      row = self._row.pop(victim)
    else:
      return None
    self._row[session] = row
    return row, False

  def rest(self, session: str) -> None:
    """Keeps the session's cache while it waits for its environment."""
    if session in self._row:
      self._idle[session] = None

  def release(self, session: str) -> None:
    """Frees the row of a session that ended; unknown ones are ignored."""
    self._idle.pop(session, None)
    row = self._row.pop(session, None)
    if row is not None:
      self._free.append(row)

  @property
  def num_free(self) -> int:
    """Rows that belong to nobody."""
    return len(self._free)
