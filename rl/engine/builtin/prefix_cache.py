"""Which beginnings of conversations the cache holds: a tree of its pages.

            [ids of one page]        [ids of the next]
    root ---- a b c d: page 7 ---+--- e f g h: page 2 ---- ...
                                 +--- e x: page 5, half of it

Pure bookkeeping. Ids are bytes, four each, so that a page is found by one
look-up; the children that share only a part of a page are neighbours in the
order of those bytes.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable

ID_BYTES = 4


@dataclasses.dataclass(slots=True, eq=False)
class Node:
  """A page and the ids whose keys and values it holds.

  Attributes:
    parent: holds the page before; None for the root, which has no page.
    ids: fewer than a page only in a leaf.
    depth: pages from the root to this one, itself included.
    length: ids from the root to the end of this one.
    oldest_kv: lowest policy version on the way from the root; None for it.
    users: leases that end here, and children that have users. Only the one
      that writes a page which is not full ends there.
    children: by their ids.
    order: the ids of the children, sorted.
  """

  parent: "Node | None"
  ids: bytes
  page: int
  depth: int
  length: int
  oldest_kv: int | None
  users: int = 1
  children: dict[bytes, "Node"] = dataclasses.field(default_factory=dict)
  order: list[bytes] = dataclasses.field(default_factory=list)


class PrefixTree:
  """Known beginnings; those that nobody uses, least recently used first.

  A user of a node keeps it and all before it. `idle` has the others, each
  behind its children, so that its first is always a leaf.

  Attributes:
    root: the empty beginning; always in use.
    idle: nodes without users, in the order in which they lost the last.
  """

  def __init__(self, page_size: int):
    self.root = Node(None, b"", -1, 0, 0, None)
    self.idle: collections.OrderedDict[Node, None] = collections.OrderedDict()
    self._page_bytes = ID_BYTES * page_size

  def whole_pages(self, ids: bytes) -> tuple[list[int], Node]:
    """Returns the whole pages that `ids` begins with, and the last's node."""
    node, pages, size = self.root, [], self._page_bytes
    for start in range(0, len(ids) - size + 1, size):
      child = node.children.get(ids[start : start + size])
      if child is None:
        break
      node = child
      pages.append(node.page)
    return pages, node

  def nearest(self, parent: Node, ids: bytes) -> tuple[Node, int] | None:
    """Returns the child that begins most like `ids`, and in how many ids.

    Among equals the one that ends there, if any. None if every child begins
    with another id.
    """
    at = bisect.bisect_left(parent.order, ids)
    best, common = b"", 0
    for other in parent.order[max(at - 1, 0) : at + 1]:
      length = _common(ids, other)
      if length > common:
        best, common = other, length
    if not common:
      return None
    shorter = ids[: ID_BYTES * common]
    return parent.children.get(shorter, parent.children[best]), common

  def known(self, parent: Node, ids: bytes) -> Node | None:
    """Returns a child whose ids are or begin with `ids`, at most a page."""
    child = parent.children.get(ids)
    if child is not None or len(ids) == self._page_bytes:
      return child
    at = bisect.bisect_left(parent.order, ids)
    if at < len(parent.order) and parent.order[at].startswith(ids):
      return parent.children[parent.order[at]]
    return None

  def use(self, node: Node) -> None:
    """Adds a user, who keeps the node until `release`."""
    node.users += 1
    while node.users == 1:
      del self.idle[node]
      assert node.parent is not None
      node = node.parent
      node.users += 1

  def release(self, node: Node) -> None:
    """Takes a user away; nodes without one are now the most recently used."""
    node.users -= 1
    while not node.users:
      self.idle[node] = None
      assert node.parent is not None
      node = node.parent
      node.users -= 1

  def descend(self, child: Node) -> None:
    """Moves one user from the node's parent to the node."""
    child.users += 1
    if child.users == 1:
      # The parent loses a user and gets one: this child.
      del self.idle[child]
    else:
      assert child.parent is not None
      child.parent.users -= 1

  def add(self, parent: Node, ids: bytes, page: int, version: int) -> Node:
    """Returns a new child, to which one user of the parent moves.

    Args:
      ids: not known below the parent; at most a page.
      version: lowest of the page's keys and values.
    """
    oldest = parent.oldest_kv
    if oldest is None or version < oldest:
      oldest = version
    length = parent.length + len(ids) // ID_BYTES
    child = Node(parent, ids, page, parent.depth + 1, length, oldest)
    parent.children[ids] = child
    bisect.insort(parent.order, ids)
    return child

  def cut(self, leaf: Node) -> Node:
    """Forgets a leaf with one user, who moves to the parent: returned."""
    assert leaf.parent is not None
    self._unlink(leaf)
    return leaf.parent

  def touch(self, node: Node) -> None:
    """Makes a node the most recently used one if nobody uses it."""
    if not node.users:
      self.idle.move_to_end(node)

  def evict(self) -> int:
    """Forgets what was not used for longest; returns its page.

    Raises:
      KeyError: everything is in use.
    """
    node, _ = self.idle.popitem(last=False)
    self._unlink(node)
    return node.page

  def check(self, ends: Iterable[Node]) -> list[int]:
    """Returns the pages of all nodes.

    Args:
      ends: the node at which each lease ends.

    Raises:
      RuntimeError: a node's users are not these leases and its children that
        have some, or an index or the order of eviction is broken.
    """
    users = collections.Counter([self.root, *ends])
    age = {node: i for i, node in enumerate(self.idle)}
    pages, num_idle, below = [], 0, [self.root]
    while below:
      node = below.pop()
      children = node.children.values()
      below += children
      pages += [child.page for child in children]
      num_idle += not node.users
      users[node] += sum(child.users > 0 for child in children)
      wrong = {
        "users": node.users != users[node],
        "idle": (node in age) != (not node.users),
        "evicted before a child": any(
          age.get(child, -1) > age.get(node, len(age)) for child in children
        ),
        "index": node.order != sorted(node.children),
        "children of part of a page": bool(children)
        and len(node.ids) % self._page_bytes > 0,
      }
      if any(wrong.values()):
        bad = [name for name, is_so in wrong.items() if is_so]
        raise RuntimeError(f"page {node.page} of the tree: {bad}")
    if len(age) != num_idle:
      raise RuntimeError(f"{len(age)} pages could be evicted, idle: {num_idle}")
    return pages

  def _unlink(self, leaf: Node) -> None:
    assert leaf.parent is not None
    order = leaf.parent.order
    del leaf.parent.children[leaf.ids]
    del order[bisect.bisect_left(order, leaf.ids)]


def _common(one: bytes, other: bytes) -> int:
  """Returns how many ids two sequences have in common at their beginning."""
  size = min(len(one), len(other))
  differ = int.from_bytes(one[:size], "little") ^ int.from_bytes(
    other[:size], "little"
  )
  if not differ:
    return size // ID_BYTES
  # The lowest bit that differs is in the first id that does.
  return ((differ & -differ).bit_length() - 1) // (8 * ID_BYTES)
