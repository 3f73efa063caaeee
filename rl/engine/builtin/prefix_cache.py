"""Cached prefixes of conversations: a tree of pages.

            [ids of one page]        [ids of the next]
    root ---- a b c d: page 7 ---+--- e f g h: page 2 ---- ...
                                 +--- e x: page 5, half of it

Pure bookkeeping. Ids are bytes, four each, so that one look-up finds a page.
Children that have only a part of a page in common are neighbours in the order
of those bytes.
"""

import bisect
import collections
import dataclasses

ID_BYTES = 4


@dataclasses.dataclass(slots=True, eq=False)
class Node:
  """A page and the ids whose keys and values it holds.

  Attributes:
    parent: node of the page before; None for the root, which has no page.
    ids: fewer than a page only in a leaf.
    depth: pages from the root to this one, itself included.
    length: ids from the root to the end of this page.
    oldest_kv: lowest policy version from the root to here; None for the root.
    users: page tables that end here, and children that have users. A page
      that is not full has at most one: the request that writes it.
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
  """Prefixes whose keys and values are in pages.

  A user of a node keeps it and its ancestors. All other nodes are in `idle`,
  each after its children, so that the first is always a leaf.

  Attributes:
    root: the empty prefix; always in use.
    idle: nodes without users, the least recently used first.
  """

  def __init__(self, page_size: int):
    self.root = Node(None, b"", -1, 0, 0, None)
    self.idle: collections.OrderedDict[Node, None] = collections.OrderedDict()
    self._page_bytes = ID_BYTES * page_size

  def whole_pages(self, ids: bytes) -> tuple[list[int], Node]:
    """Returns the whole pages that are a prefix of `ids`, and the last node."""
    node, pages, size = self.root, [], self._page_bytes
    for start in range(0, len(ids) - size + 1, size):
      child = node.children.get(ids[start : start + size])
      if child is None:
        break
      node = child
      pages.append(node.page)
    return pages, node

  def nearest(self, parent: Node, ids: bytes) -> tuple[Node, int] | None:
    """Returns the child with the longest prefix of `ids`, and its length.

    Of several, the child that has no further ids. None if no child has the
    first id.
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

  def longest_idle(self, parent: Node, ids: bytes) -> Node | None:
    """Returns the child with the most ids, all of them a prefix of `ids`.

    None if there is no such child without users.
    """
    for size in range(len(ids), 0, -ID_BYTES):
      child = parent.children.get(ids[:size])
      if child is not None and not child.users:
        return child
    return None

  def use(self, node: Node) -> None:
    """Adds a user, which keeps the node until `release`."""
    node.users += 1
    while node.users == 1:
      del self.idle[node]
      assert node.parent is not None
      node = node.parent
      node.users += 1

  def release(self, node: Node) -> None:
    """Removes a user; nodes left without one become the most recently used."""
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
      # The parent loses one user and gains another: this child.
      del self.idle[child]
    else:
      assert child.parent is not None
      child.parent.users -= 1

  def add(self, parent: Node, ids: bytes, page: int, version: int) -> Node:
    """Returns a new child, to which one user of the parent moves.

    Args:
      ids: at most a page, that no child has.
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
    """Removes a leaf and moves its one user to the parent, which it returns."""
    assert leaf.parent is not None
    self._unlink(leaf)
    return leaf.parent

  def touch(self, node: Node) -> None:
    """Makes an idle node the most recently used one."""
    if not node.users:
      self.idle.move_to_end(node)

  def evict(self) -> int:
    """Removes the least recently used node and returns its page.

    Raises:
      KeyError: every node is in use.
    """
    node, _ = self.idle.popitem(last=False)
    self._unlink(node)
    return node.page

  def _unlink(self, leaf: Node) -> None:
    assert leaf.parent is not None
    order = leaf.parent.order
    del leaf.parent.children[leaf.ids]
    del order[bisect.bisect_left(order, leaf.ids)]


def _common(one: bytes, other: bytes) -> int:
  """Returns the length of the common prefix, in ids."""
  size = min(len(one), len(other))
  differ = int.from_bytes(one[:size], "little") ^ int.from_bytes(
    other[:size], "little"
  )
  if not differ:
    return size // ID_BYTES
  # The lowest bit that differs is in the first id that differs.
  return ((differ & -differ).bit_length() - 1) // (8 * ID_BYTES)
