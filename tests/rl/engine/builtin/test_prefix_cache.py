"""The tree of cached prefixes: neighbours, users, order of eviction."""

import numpy as np
import pytest

from rl.engine.builtin import prefix_cache
from tests.helpers import page_holders


def _ids(*ids: int) -> bytes:
  return np.array(ids, np.int32).tobytes()


def _idle(tree, parent, ids, page):
  """Adds an idle page."""
  tree.use(parent)
  node = tree.add(parent, ids, page, 0)
  tree.release(node)
  return node


def test_whole_pages_are_followed_as_far_as_all_their_ids_agree():
  tree = prefix_cache.PrefixTree(2)
  one = _idle(tree, tree.root, _ids(1, 2), 10)
  two = _idle(tree, one, _ids(3, 4), 11)
  assert tree.whole_pages(_ids(1, 2, 3, 4, 5)) == ([10, 11], two)
  assert tree.whole_pages(_ids(1, 2, 3)) == ([10], one)
  assert tree.whole_pages(_ids(1, 3, 3, 4)) == ([], tree.root)
  assert tree.whole_pages(b"") == ([], tree.root)


# 256 and 1 differ in the second byte, 65537 and 1 in the third.
@pytest.mark.parametrize("seed", range(4))
def test_the_nearest_child_has_the_longest_common_prefix(seed):
  draws = np.random.default_rng(seed)
  some = np.array([0, 1, 256, 65537, 2**31 - 1], np.int32)
  tree = prefix_cache.PrefixTree(4)
  children = {
    tuple(some[draws.integers(5, size=draws.integers(1, 5))].tolist())
    for _ in range(30)
  }
  for page, ids in enumerate(children):
    _idle(tree, tree.root, _ids(*ids), page)
  page_holders.check_tree(tree, [])
  for _ in range(300):
    wanted = tuple(some[draws.integers(5, size=draws.integers(1, 5))].tolist())
    lengths = [_common(wanted, ids) for ids in children]
    found = tree.nearest(tree.root, _ids(*wanted))
    if found is None:
      assert max(lengths) == 0
      continue
    child, common = found
    assert common == max(lengths)
    ids = tuple(np.frombuffer(child.ids, np.int32).tolist())
    assert ids[:common] == wanted[:common]
    # A child that can be written in place is preferred.
    assert (ids == wanted[:common]) == (wanted[:common] in children)


def _common(one, other):
  pairs = zip(one, other, strict=False)
  return next(
    (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
  )


def test_the_longest_idle_page_holds_nothing_but_a_prefix():
  tree = prefix_cache.PrefixTree(4)
  one = _idle(tree, tree.root, _ids(1), 7)
  _idle(tree, tree.root, _ids(1, 2, 3, 4), 8)
  two = _idle(tree, tree.root, _ids(1, 2), 9)
  assert tree.longest_idle(tree.root, _ids(1, 2, 3)) is two
  assert tree.longest_idle(tree.root, _ids(1, 3)) is one
  assert tree.longest_idle(tree.root, _ids(2)) is None
  tree.use(two)
  assert tree.longest_idle(tree.root, _ids(1, 2, 3)) is one


def test_a_node_inherits_the_lowest_version_before_it():
  tree = prefix_cache.PrefixTree(1)
  versions = []
  node = tree.root
  tree.use(node)
  for page, version in enumerate([5, 3, 4]):
    node = tree.add(node, _ids(page), page, version)
    versions.append(node.oldest_kv)
  assert versions == [5, 3, 3]


def test_a_user_keeps_all_pages_before_its_own():
  tree = prefix_cache.PrefixTree(1)
  a = _idle(tree, tree.root, _ids(1), 0)
  b = _idle(tree, a, _ids(2), 1)
  _idle(tree, b, _ids(3), 2)
  tree.use(b)
  assert tree.evict() == 2
  with pytest.raises(KeyError):
    tree.evict()
  page_holders.check_tree(tree, [b])
  tree.release(b)
  assert [tree.evict(), tree.evict()] == [1, 0]
  assert page_holders.check_tree(tree, []) == []


def test_a_page_goes_after_its_children_and_counts_as_used_with_them():
  tree = prefix_cache.PrefixTree(1)
  head = _idle(tree, tree.root, _ids(1), 0)
  _idle(tree, head, _ids(2), 1)
  _idle(tree, tree.root, _ids(9), 2)
  _idle(tree, head, _ids(3), 3)
  # 1 is the oldest; 2 was used before 3, and with 3 its parent 0.
  assert [tree.evict() for _ in range(4)] == [1, 2, 3, 0]


def test_users_move_down_and_up_again():
  tree = prefix_cache.PrefixTree(2)
  child = _idle(tree, tree.root, _ids(1), 0)
  tree.use(tree.root)
  tree.descend(child)
  page_holders.check_tree(tree, [child])
  assert not tree.idle
  assert tree.cut(child) is tree.root
  assert page_holders.check_tree(tree, [tree.root]) == []


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda tree, node: tree.idle.popitem(), "idle"),
    (lambda tree, node: tree.idle.move_to_end(node, last=False), "evicted"),
    (lambda tree, node: node.order.clear(), "index"),
    (lambda tree, node: setattr(node, "users", 2), "users"),
    (lambda tree, node: setattr(node, "ids", _ids(1)), "part of a page"),
    (lambda tree, node: tree.root.children.clear(), "index"),
  ],
)
def test_a_broken_tree_is_found(spoil, message):
  tree = prefix_cache.PrefixTree(2)
  node = _idle(tree, tree.root, _ids(1, 2), 0)
  _idle(tree, node, _ids(3), 1)
  page_holders.check_tree(tree, [])
  spoil(tree, node)
  with pytest.raises(AssertionError, match=message):
    page_holders.check_tree(tree, [])
