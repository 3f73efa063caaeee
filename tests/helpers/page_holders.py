"""Checks that each page of a KV cache is held once, and the cache is whole."""

import collections

from rl.engine.builtin import block_manager, prefix_cache, request_queue


def check_queue(queue: request_queue.RequestQueue) -> None:
  """Checks the pages of all running requests."""
  tables = (state.page_table for state in queue.running)
  check_blocks(queue.blocks, [t for t in tables if t is not None])


def check_blocks(
  blocks: block_manager.BlockManager, tables: list[block_manager.PageTable]
) -> None:
  """Raises AssertionError unless every page has one holder, or is free.

  Args:
    tables: all that have not ended.
  """
  count = blocks._num_tables
  assert len(tables) == count, f"{len(tables)} page tables of {count}"
  nodes = [table.node for table in tables if table.node is not None]
  assert len(nodes) == len(tables), "a page table has ended"
  ends = {blocks._prefixes: []}
  for table, node in zip(tables, nodes, strict=True):
    assert table.prefixes is not None
    ends.setdefault(table.prefixes, []).append(node)
  holders = collections.Counter(blocks._free)
  for tree, some in ends.items():
    holders.update(check_tree(tree, some))
    assert tree is blocks._prefixes or not tree.idle, "unused pages of before"
  for table, node in zip(tables, nodes, strict=True):
    holders.update(table.duplicate_pages + table.pages[node.depth :])
    while node.parent is not None:
      page = table.pages[node.depth - 1]
      is_held = page == node.page or page in table.duplicate_pages
      assert is_held, f"{table} reads page {page}, which it does not hold"
      node = node.parent
  assert holders == dict.fromkeys(range(blocks.num_pages), 1), "page holders"


def check_tree(
  tree: prefix_cache.PrefixTree, ends: list[prefix_cache.Node]
) -> list[int]:
  """Returns the pages of all nodes.

  Args:
    ends: the node at which each page table ends.

  Raises:
    AssertionError: a node's users are not these page tables and its children
      in use, or an index or the order of eviction is wrong.
  """
  users = collections.Counter([tree.root, *ends])
  age = {node: i for i, node in enumerate(tree.idle)}
  pages, num_idle, below = [], 0, [tree.root]
  while below:
    node = below.pop()
    children = node.children.values()
    below += children
    pages += [child.page for child in children]
    num_idle += not node.users
    users[node] += sum(child.users > 0 for child in children)
    oldest_child = max((age.get(child, -1) for child in children), default=-1)
    wrong = {
      "users": node.users != users[node],
      "idle": (node in age) != (not node.users),
      "evicted before a child": oldest_child > age.get(node, len(age)),
      "index": node.order != sorted(node.children),
      "children of part of a page": bool(children)
      and len(node.ids) % tree._page_bytes > 0,
    }
    bad = [name for name, is_so in wrong.items() if is_so]
    assert not bad, f"page {node.page} of the prefix cache: {bad}"
  unused = f"{len(age)} pages in `idle`, {num_idle} without users"
  assert len(age) == num_idle, unused
  return pages
