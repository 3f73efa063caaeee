"""Who holds which page of the KV cache. Pure bookkeeping.

begin --> grow, share ... --> end: what was fed stays known to later requests
"""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from rl.engine.builtin import prefix_cache


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
  """What a running request holds of the cache.

  Attributes:
    pages: of each `page_size` positions in order, as far as there are any.
    cached: leading positions whose keys and values are in the pages. The
      engine raises it as it feeds ids.
    oldest_kv: lowest policy version of those keys and values; None when
      nothing is cached. The engine sets it when it feeds the first id.
    node: for `Paging` only: how far the beginning is known; None at the end.
    spare: for `Paging` only: pages before that whose ids another page holds.
  """

  pages: list[int]
  cached: int
  oldest_kv: int | None
  node: prefix_cache.Node | None = dataclasses.field(default=None, repr=False)
  spare: list[int] = dataclasses.field(default_factory=list, repr=False)


class Paging:
  """Pages of the cache: leased, known (and evictable once idle) or free.

  A page belongs to one lease or to the tree of known beginnings, and a full
  page of the tree is read by any number of leases. The engine calls `begin`
  when it admits a request, `grow` before it feeds ids, `share` when others may
  profit and `end` once; `restart` or `forget` when weights change.

  Args:
    least_copied: known positions of a page that are worth a copy of it.

  Attributes:
    num_pages: of the cache.
  """

  def __init__(self, num_pages: int, page_size: int, least_copied: int = 1):
    if num_pages < 1 or page_size < 1:
      raise ValueError(f"{num_pages} pages of {page_size} ids: both are >= 1")
    self.num_pages = num_pages
    self._page_size = page_size
    self._least_copied = least_copied
    self._page_bytes = prefix_cache.ID_BYTES * page_size
    self._tree = prefix_cache.PrefixTree(page_size)
    self._free = list(range(num_pages - 1, -1, -1))
    self._num_leases = 0

  @property
  def num_free(self) -> int:
    """Pages that hold nothing."""
    return len(self._free)

  @property
  def num_idle(self) -> int:
    """Pages that hold a known beginning which no lease uses."""
    return len(self._tree.idle)

  def begin(
    self, ids: Int32[np.ndarray, " N"]
  ) -> tuple[Lease, tuple[int, int] | None]:
    """Returns the longest known beginning of `ids`, and a page to copy.

    At most N - 1 positions are known, so that one id is always fed. Whole
    pages are shared. The page in which the beginning ends is the lease's to
    write: in place where it ends with the page's own ids and nobody writes it,
    else in a fresh page; when there is none, the beginning ends a page earlier.

    Returns:
      The lease and (source, target) or None. The engine copies the page before
      the next dispatch, in the order of the calls (see `at_once`), also when
      the lease has ended by then. It may leave that out only when it ends the
      lease before any other call.
    """
    if not len(ids):
      raise ValueError("no ids; a request has at least one")
    data = _as_bytes(ids[:-1])
    pages, node = self._tree.whole_pages(data)
    self._tree.use(node)
    self._num_leases += 1
    lease = Lease(pages, node.length, node.oldest_kv, node)
    rest = data[len(pages) * self._page_bytes :][: self._page_bytes]
    return lease, self._begin_page(lease, node, rest) if rest else None

  def _begin_page(
    self, lease: Lease, node: prefix_cache.Node, rest: bytes
  ) -> tuple[int, int] | None:
    found = self._tree.nearest(node, rest)
    if found is None:
      return None
    source, common = found
    if not source.users and common * prefix_cache.ID_BYTES == len(source.ids):
      self._tree.descend(source)
      lease.node = source
      page = source.page
    elif common < self._least_copied:
      return None
    else:
      self._tree.touch(source)
      if not self._reserve(1):
        return None
      page = self._free.pop()
    lease.pages.append(page)
    lease.cached += common
    lease.oldest_kv = source.oldest_kv
    # The same page: taken over, or the source was the last that could go.
    return None if page == source.page else (source.page, page)

  def grow(self, lease: Lease, length: int) -> bool:
    """Gives a lease pages for so many positions, evicting idle beginnings.

    False, and nothing has changed, when that does not suffice.
    """
    missing = -(-length // self._page_size) - len(lease.pages)
    if missing <= 0:
      return True
    if not self._reserve(missing):
      return False
    lease.pages += self._free[-missing:]
    del self._free[-missing:]
    return True

  def _reserve(self, pages: int) -> bool:
    """Whether so many pages are free, after eviction if that helps."""
    short = pages - len(self._free)
    if short > len(self._tree.idle):
      return False
    for _ in range(short):
      self._free.append(self._tree.evict())
    return True

  def share(self, lease: Lease, ids: Int32[np.ndarray, " N"]) -> None:
    """Makes ids[: lease.cached] known to others while the lease goes on.

    Who begins after this call reads them, so it comes after the dispatch that
    feeds them.
    """
    if lease.cached > _running(lease).length:
      self._learn(lease, ids)

  def end(self, lease: Lease, ids: Int32[np.ndarray, " N"]) -> None:
    """Takes a lease back; ids[: lease.cached] stay known until evicted.

    Pages that hold nothing of it, or what another page holds as well, are
    free at once.
    """
    self.share(lease, ids)
    node = _running(lease)
    self._free += lease.spare
    self._free += lease.pages[node.depth :]
    self._tree.release(node)
    self._num_leases -= 1
    lease.node, lease.pages, lease.spare = None, [], []

  def _learn(self, lease: Lease, ids: Int32[np.ndarray, " N"]) -> None:
    """Lets the tree know ids[: lease.cached]."""
    node, tree, size = _running(lease), self._tree, self._page_bytes
    version = _fed(lease, len(ids), self._page_size)
    if len(node.ids) % size:
      # The page this lease took over: it comes back with more ids.
      node = tree.cut(node)
    data = _as_bytes(ids[node.length : lease.cached])
    for start in range(0, len(data), size):
      page_ids = data[start : start + size]
      page = lease.pages[node.depth]
      child = tree.known(node, page_ids)
      if child is None:
        node = tree.add(node, page_ids, page, version)
      elif len(page_ids) == size:
        tree.descend(child)
        lease.spare.append(page)
        node = child
      else:
        # Another lease may write that page, so this one cannot hold it, and
        # looks again when it ends.
        tree.touch(child)
    lease.node = node

  def forget(self) -> None:
    """Drops every beginning that no lease uses."""
    self._reserve(len(self._free) + len(self._tree.idle))

  def restart(self, leases: Iterable[Lease]) -> None:
    """Drops everything known, for new weights; the leases stay, but empty.

    Args:
      leases: all that have not ended.
    """
    leases = list(leases)
    if len(leases) != self._num_leases:
      raise ValueError(
        f"{len(leases)} leases of {self._num_leases}; pass all that run"
      )
    self._tree = prefix_cache.PrefixTree(self._page_size)
    self._free = list(range(self.num_pages - 1, -1, -1))
    for lease in leases:
      self._tree.use(self._tree.root)
      lease.pages, lease.cached, lease.oldest_kv = [], 0, None
      lease.node, lease.spare = self._tree.root, []

  def check(self, leases: Iterable[Lease]) -> None:
    """Raises RuntimeError unless every page has one holder, or is free.

    Args:
      leases: all that have not ended.
    """
    leases = list(leases)
    ends = [_running(lease) for lease in leases]
    if len(leases) != self._num_leases:
      raise RuntimeError(f"{len(leases)} leases of {self._num_leases}")
    known = self._tree.check(ends)
    held = collections.Counter(self._free + known)
    for lease, node in zip(leases, ends, strict=True):
      held.update(lease.spare + lease.pages[node.depth :])
      while node.parent is not None:
        page = lease.pages[node.depth - 1]
        if page != node.page and page not in lease.spare:
          raise RuntimeError(
            f"{lease} reads page {page}, which it does not hold"
          )
        node = node.parent
    wrong = {page: held[page] for page in range(self.num_pages)} | held
    wrong = {page: times for page, times in wrong.items() if times != 1}
    if wrong or held.total() != self.num_pages:
      raise RuntimeError(f"of {self.num_pages} pages, held so often: {wrong}")


def at_once(copies: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
  """Returns (source, target) pages to copy at once instead of in order.

  A target occurs once, and is filled from what its source held before all.
  """
  origin: dict[int, int] = {}
  for source, target in copies:
    origin[target] = origin.get(source, source)
  return [(source, target) for target, source in origin.items()]


def _running(lease: Lease) -> prefix_cache.Node:
  if lease.node is None:
    raise RuntimeError(f"{lease} has ended")
  return lease.node


def _as_bytes(ids: Int32[np.ndarray, " N"]) -> bytes:
  if ids.dtype != np.int32:
    raise ValueError(f"ids of type {ids.dtype}; use int32")
  return ids.tobytes()


def _fed(lease: Lease, num_ids: int, page_size: int) -> int:
  """Returns the lowest version of a lease that says what it was fed."""
  room = min(num_ids, page_size * len(lease.pages))
  if lease.cached > room or lease.oldest_kv is None:
    raise ValueError(
      f"{lease} of {num_ids} ids in pages of {page_size}: cached is at most "
      f"{room}, and oldest_kv is set when the first id is fed"
    )
  return lease.oldest_kv
