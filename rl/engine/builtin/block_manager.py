"""Holders of the pages of the KV cache. Pure bookkeeping.

begin --> grow, share ... --> end: its prefix stays cached for later requests
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from rl.engine.builtin import prefix_cache


@dataclasses.dataclass(slots=True, eq=False)
class PageTable:
  """The pages of a running request.

  Attributes:
    pages: the i-th holds positions from i * `page_size` on.
    cached: leading positions whose keys and values are in the pages. The
      engine raises it as it feeds ids.
    oldest_kv: lowest policy version of those keys and values; None when
      nothing is cached. The engine sets it when it feeds the first id.
    node: for `BlockManager` only: last page that the prefix cache knows; None
      after `end`.
    duplicate_pages: for `BlockManager` only: pages before that whose ids
      another page of the prefix cache holds too.
    prefixes: for `BlockManager` only: the prefix cache that it began with.
  """

  pages: list[int]
  cached: int
  oldest_kv: int | None
  node: prefix_cache.Node | None = dataclasses.field(default=None, repr=False)
  duplicate_pages: list[int] = dataclasses.field(
    default_factory=list, repr=False
  )
  prefixes: prefix_cache.PrefixTree | None = dataclasses.field(
    default=None, repr=False
  )


class BlockManager:
  """The pages of the cache: each is in a page table, cached or free.

  A page belongs to one page table or to the prefix cache, and a full page of
  the prefix cache is read by any number of page tables. The engine calls
  `begin` when it admits a request, `grow` before it feeds ids, `share` when
  others may profit and `end` or `cancel` once; `restart` or `detach` for new
  weights.

  Args:
    min_copied_ids: a page is copied for its first ids if at least so many of
      them would have to be encoded otherwise.

  Attributes:
    num_pages: of the cache.
  """

  def __init__(self, num_pages: int, page_size: int, min_copied_ids: int = 1):
    if num_pages < 1 or page_size < 1:
      raise ValueError(
        f"num_pages={num_pages} and page_size={page_size} must be at least 1"
      )
    self.num_pages = num_pages
    self._page_size = page_size
    self._min_copied_ids = min_copied_ids
    self._page_bytes = prefix_cache.ID_BYTES * page_size
    self._prefixes = prefix_cache.PrefixTree(page_size)
    self._free = list(range(num_pages - 1, -1, -1))
    self._num_tables = 0

  @property
  def num_free(self) -> int:
    """Pages that hold nothing."""
    return len(self._free)

  @property
  def num_idle(self) -> int:
    """Pages of the prefix cache that no page table uses."""
    return len(self._prefixes.idle)

  def begin(
    self, ids: Int32[np.ndarray, " N"]
  ) -> tuple[PageTable, tuple[int, int] | None]:
    """Returns a page table with the longest cached prefix, and a page to copy.

    At most N - 1 ids count as cached, so that one is always fed. Whole pages
    are shared. The page in which the prefix ends will be written. One that no
    other request writes, and that holds nothing else, is taken over; another is
    copied if that saves `min_copied_ids`. Without a free page to copy to, the
    prefix ends a page earlier.

    Returns:
      The page table and (source, target) or None. The engine copies the page
      before the next dispatch, in the order of the calls (see
      `simultaneous_copies`), even if the request has ended by then. It may
      omit the copy only if it calls `cancel` before any other method.
    """
    if not len(ids):
      raise ValueError("ids is empty; a request has at least one")
    data = _as_bytes(ids[:-1])
    pages, node = self._prefixes.whole_pages(data)
    self._prefixes.use(node)
    self._num_tables += 1
    table = PageTable(
      pages, node.length, node.oldest_kv, node, prefixes=self._prefixes
    )
    rest = data[len(pages) * self._page_bytes :][: self._page_bytes]
    return table, self._begin_page(table, node, rest) if rest else None

  def _begin_page(
    self, table: PageTable, node: prefix_cache.Node, rest: bytes
  ) -> tuple[int, int] | None:
    nearest = self._prefixes.nearest(node, rest)
    if nearest is None:
      return None
    source, common = nearest
    own = self._prefixes.longest_idle(node, rest)
    held = len(own.ids) // prefix_cache.ID_BYTES if own else 0
    if own and common - held < self._min_copied_ids:
      self._prefixes.descend(own)
      source, common, page, table.node = own, held, own.page, own
    elif common < self._min_copied_ids:
      return None
    else:
      self._prefixes.touch(source)
      if not self._reserve(1):
        return None
      page = self._free.pop()
    table.pages.append(page)
    table.cached += common
    table.oldest_kv = source.oldest_kv
    # The same page: taken over, or the source was evicted to make room.
    return None if page == source.page else (source.page, page)

  def grow(self, table: PageTable, length: int) -> bool:
    """Adds pages for so many positions, and evicts idle prefixes if need be.

    Returns False, and changes nothing, if that does not suffice.
    """
    missing = -(-length // self._page_size) - len(table.pages)
    if missing <= 0:
      return True
    if not self._reserve(missing):
      return False
    table.pages += self._free[-missing:]
    del self._free[-missing:]
    return True

  def _reserve(self, pages: int) -> bool:
    """Evicts until so many pages are free; False if that cannot suffice."""
    short = pages - len(self._free)
    if short > len(self._prefixes.idle):
      return False
    for _ in range(short):
      self._free.append(self._prefixes.evict())
    return True

  def share(self, table: PageTable, ids: Int32[np.ndarray, " N"]) -> None:
    """Adds ids[: table.cached] to the prefix cache while the request goes on.

    Requests that begin later read those pages, so call it after the dispatch
    that feeds them. Nothing happens after `detach`.
    """
    is_new = table.cached > _open_node(table).length
    if is_new and self.shares(table):
      self._insert(table, ids)

  def end(self, table: PageTable, ids: Int32[np.ndarray, " N"]) -> None:
    """Takes the pages back; ids[: table.cached] stay cached until evicted.

    Duplicate pages, and those without a cached position, are free at once;
    after `detach` all that no other page table uses.
    """
    self.share(table, ids)
    node, prefixes = _open_node(table), table.prefixes
    assert prefixes is not None
    self._free += table.duplicate_pages
    self._free += table.pages[node.depth :]
    prefixes.release(node)
    if not self.shares(table):
      self._drop_idle(prefixes)
    self._num_tables -= 1
    table.node, table.pages, table.duplicate_pages = None, [], []

  def cancel(self, table: PageTable) -> None:
    """Undoes `begin`, before a page was copied and anything was fed."""
    table.cached = _open_node(table).length  # The copy is not part of it.
    self.end(table, np.zeros(0, np.int32))

  def _insert(self, table: PageTable, ids: Int32[np.ndarray, " N"]) -> None:
    """Adds ids[: table.cached] to the prefix cache."""
    node, prefixes, size = _open_node(table), self._prefixes, self._page_bytes
    version = _checked_oldest_kv(table, len(ids), self._page_size)
    if len(node.ids) % size:
      # The page that this table took over: it comes back with more ids.
      node = prefixes.cut(node)
    data = _as_bytes(ids[node.length : table.cached])
    for start in range(0, len(data), size):
      page_ids = data[start : start + size]
      page = table.pages[node.depth]
      child = node.children.get(page_ids)
      if child is None:
        node = prefixes.add(node, page_ids, page, version)
      elif len(page_ids) == size:
        prefixes.descend(child)
        table.duplicate_pages.append(page)
        node = child
      else:
        # Another request may write that page, so this one cannot hold it, and
        # looks again when it ends.
        prefixes.touch(child)
    table.node = node

  def flush(self) -> None:
    """Drops every prefix that no page table uses."""
    self._drop_idle(self._prefixes)

  def _drop_idle(self, prefixes: prefix_cache.PrefixTree) -> None:
    while prefixes.idle:
      self._free.append(prefixes.evict())

  def detach(self) -> None:
    """Leaves the prefixes to the page tables that use them, for new weights.

    Requests that begin later find none of them.
    """
    self.flush()
    self._prefixes = prefix_cache.PrefixTree(self._page_size)

  def shares(self, table: PageTable) -> bool:
    """Returns whether later requests may find this table's prefix."""
    return table.prefixes is self._prefixes

  def restart(self, tables: Iterable[PageTable]) -> None:
    """Drops every prefix, for new weights, and empties the page tables.

    Args:
      tables: all that have not ended.
    """
    tables = list(tables)
    if len(tables) != self._num_tables:
      raise ValueError(
        f"{len(tables)} page tables of {self._num_tables}; pass all of them"
      )
    self._prefixes = prefix_cache.PrefixTree(self._page_size)
    self._free = list(range(self.num_pages - 1, -1, -1))
    for table in tables:
      self._prefixes.use(self._prefixes.root)
      table.pages, table.cached, table.oldest_kv = [], 0, None
      table.node, table.duplicate_pages = self._prefixes.root, []
      table.prefixes = self._prefixes


def simultaneous_copies(
  copies: Iterable[tuple[int, int]],
) -> list[tuple[int, int]]:
  """Turns (source, target) copies in order into equal ones made at once.

  Each target occurs once, and gets what its source held before all of them.
  """
  origin: dict[int, int] = {}
  for source, target in copies:
    origin[target] = origin.get(source, source)
  return [(source, target) for target, source in origin.items()]


def _open_node(table: PageTable) -> prefix_cache.Node:
  if table.node is None:
    raise RuntimeError(f"{table} has ended")
  return table.node


def _as_bytes(ids: Int32[np.ndarray, " N"]) -> bytes:
  if ids.dtype != np.int32:
    raise ValueError(f"ids are of type {ids.dtype}; use int32")
  return ids.tobytes()


def _checked_oldest_kv(table: PageTable, num_ids: int, page_size: int) -> int:
  """Returns `oldest_kv` of a table whose fields fit its ids and pages."""
  room = min(num_ids, page_size * len(table.pages))
  if table.cached > room or table.oldest_kv is None:
    raise ValueError(
      f"{table} of {num_ids} ids in pages of {page_size}: cached must be at "
      f"most {room}, and oldest_kv set when the first id is fed"
    )
  return table.oldest_kv
