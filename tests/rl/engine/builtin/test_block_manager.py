"""Pages of the cache: what is shared, copied, evicted, and given back."""

import collections

import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from rl.engine.builtin import block_manager
from tests.helpers import page_device, page_holders, searches

WAYS = ["restart", "detach", "flush", "keep"]


def _ids(text):
  return np.array([ord(letter) for letter in text], np.int32)


def _run(pages, text, *, version=0):
  """Runs a request whose ids are all fed; returns what was known of it."""
  table, _ = pages.begin(_ids(text))
  known = table.cached
  _feed(pages, table, text, version=version)
  pages.end(table, _ids(text))
  return known


def _feed(pages, table, text, *, version=0):
  assert pages.grow(table, len(text))
  table.cached = len(text)
  if table.oldest_kv is None:
    table.oldest_kv = version


def test_whole_pages_are_shared_and_one_id_is_always_left_to_feed():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdefgh")
  one, copy = pages.begin(_ids("abcdefgh+"))
  assert (one.cached, copy) == (8, None)
  other, copy = pages.begin(_ids("abcdefgh-"))
  assert (other.pages, copy) == (one.pages, None)
  # 7 of 8: the second page is shared in part, so it is copied.
  same, copy = pages.begin(_ids("abcdefgh"))
  assert same.cached == 7
  assert copy == (one.pages[1], same.pages[1])
  assert same.pages[0] == one.pages[0]
  page_holders.check_blocks(pages, [one, other, same])


def test_the_end_of_a_conversation_goes_on_in_its_page():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdef")
  table, copy = pages.begin(_ids("abcdefgh"))
  assert (table.cached, copy, len(table.pages)) == (6, None, 2)
  _feed(pages, table, "abcdefgh")
  pages.end(table, _ids("abcdefgh"))
  assert (pages.num_idle, pages.num_free) == (2, 6)
  assert _run(pages, "abcdefghi") == 8


def test_only_the_first_goes_on_in_a_page_and_others_get_a_copy():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdef")
  first, _ = pages.begin(_ids("abcdefX"))
  second, copy = pages.begin(_ids("abcdefY"))
  assert copy == (first.pages[1], second.pages[1])
  assert first.pages[1] != second.pages[1]
  assert second.cached == 6
  _feed(pages, first, "abcdefX")
  _feed(pages, second, "abcdefY")
  pages.end(first, _ids("abcdefX"))
  pages.end(second, _ids("abcdefY"))
  # abcd, efX and efY; the page of "ef" is that of "efX".
  assert pages.num_idle == 3
  table, copy = pages.begin(_ids("abcdeX"))
  assert (table.cached, copy is None) == (5, False)
  pages.end(table, _ids("abcdeX"))
  assert _run(pages, "abcdefX+") == 7
  assert _run(pages, "abcdefY+") == 7
  page_holders.check_blocks(pages, [])


def test_a_conversation_goes_on_in_its_page_beside_a_longer_one():
  pages = block_manager.BlockManager(8, 4, min_copied_ids=3)
  _run(pages, "abcdefgh")
  _run(pages, "abcdef")
  # Three ids of "efgh" would do, but only one more than its own "ef" has.
  table, copy = pages.begin(_ids("abcdefgz"))
  assert (table.cached, copy) == (6, None)
  other, copy = pages.begin(_ids("abcdefgy"))
  assert (other.cached, copy is None) == (7, False)
  page_holders.check_blocks(pages, [table, other])


def test_a_page_that_was_not_copied_is_not_cached():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdefgh")
  table, copy = pages.begin(_ids("abcdefX"))
  assert copy is not None
  pages.cancel(table)
  # "ef" is still the beginning of "efgh", and has no page of its own.
  assert (pages.num_idle, pages.num_free) == (2, 6)
  assert pages.begin(_ids("abcdefX"))[1] == copy


def test_without_a_page_for_the_copy_whole_pages_are_all():
  pages = block_manager.BlockManager(3, 4)
  _run(pages, "abcdef")
  first, _ = pages.begin(_ids("abcdefX"))
  other, _ = pages.begin(_ids("x"))
  assert pages.grow(other, 4)
  second, copy = pages.begin(_ids("abcdefY"))
  assert (second.cached, copy) == (4, None)
  assert second.pages == first.pages[:1]
  assert not pages.grow(second, 7)
  page_holders.check_blocks(pages, [first, second, other])


def test_the_last_page_that_can_go_is_used_in_place_of_its_copy():
  pages = block_manager.BlockManager(2, 4)
  _run(pages, "abcdefgh")
  # The copy of "efgh" can only have the page of "efgh" itself.
  table, copy = pages.begin(_ids("abcdefX"))
  assert (table.cached, copy, len(table.pages)) == (6, None, 2)
  page_holders.check_blocks(pages, [table])
  pages.end(table, _ids("abcdefX"))
  assert _run(pages, "abcdefgh") == 6


def test_a_group_shares_its_prompt_while_it_runs():
  pages = block_manager.BlockManager(16, 4)
  first, _ = pages.begin(_ids("abcdef"))
  assert first.cached == 0
  _feed(pages, first, "abcdef", version=3)
  assert pages.begin(_ids("abcdef"))[0].cached == 0
  pages.share(first, _ids("abcdef"))
  pages.share(first, _ids("abcdef"))
  second, copy = pages.begin(_ids("abcdef"))
  assert (second.cached, second.oldest_kv) == (5, 3)
  assert copy == (first.pages[1], second.pages[1])
  # What the first writes behind its prompt belongs to it alone.
  _feed(pages, first, "abcdefXYZ")
  assert pages.begin(_ids("abcdefXYZ"))[0].cached == 6


def test_of_two_requests_with_the_same_ids_the_cache_keeps_the_first():
  pages = block_manager.BlockManager(8, 4)
  first, _ = pages.begin(_ids("abcdefgh"))
  second, _ = pages.begin(_ids("abcdefghijkl"))
  _feed(pages, first, "abcdefgh")
  _feed(pages, second, "abcdefghijkl")
  pages.share(first, _ids("abcdefgh"))
  # Its own third page is shared behind the two pages of the first.
  pages.share(second, _ids("abcdefghijkl"))
  third, _ = pages.begin(_ids("abcdefghijkl+"))
  assert third.pages == [*first.pages, second.pages[2]]
  page_holders.check_blocks(pages, [first, second, third])
  pages.end(second, _ids("abcdefghijkl"))
  assert pages.num_free == 8 - 3
  page_holders.check_blocks(pages, [first, third])


def test_pages_beyond_what_was_fed_are_free_at_the_end():
  pages = block_manager.BlockManager(8, 4)
  table, _ = pages.begin(_ids("abc"))
  assert pages.grow(table, 30)
  table.cached, table.oldest_kv = 2, 0
  pages.end(table, _ids("abc"))
  assert (pages.num_free, pages.num_idle) == (7, 1)
  assert _run(pages, "abc") == 2


def test_growing_evicts_no_more_than_it_needs_or_nothing():
  pages = block_manager.BlockManager(4, 4)
  _run(pages, "aaaa")
  _run(pages, "bbbb")
  table, _ = pages.begin(_ids("c"))
  assert not pages.grow(table, 17)
  assert (pages.num_free, pages.num_idle, table.pages) == (2, 2, [])
  assert pages.grow(table, 12)
  assert (pages.num_free, pages.num_idle, len(table.pages)) == (0, 1, 3)
  assert pages.grow(table, 1)
  assert len(table.pages) == 3
  assert _known_of(pages, "aaaa+") == 0
  assert _known_of(pages, "bbbb+") == 4


def _known_of(pages, text):
  table, _ = pages.begin(_ids(text))
  pages.end(table, _ids(text))
  return table.cached


@pytest.mark.parametrize("seed", range(3))
def test_the_least_recently_used_goes_first(seed):
  draws = np.random.default_rng(seed)
  pages = block_manager.BlockManager(20, 4)
  # (conversation, depth) of the pages of whole ids, as they were last used.
  idle: collections.OrderedDict[tuple[str, int], None] = (
    collections.OrderedDict()
  )
  evicted = 0
  for _ in range(2000):
    letter = "abcdefghij"[draws.integers(10)]
    length = int(draws.integers(1, 6))
    text = letter * (4 * length) + "+"
    table, _ = pages.begin(_ids(text))
    had = next(d for d in range(6) if d == length or (letter, d) not in idle)
    assert table.cached == 4 * had
    for depth in range(had):
      del idle[letter, depth]
    while len(idle) + length > 20:
      idle.popitem(last=False)
      evicted += 1
    _feed(pages, table, text[:-1])
    pages.end(table, _ids(text))
    # A page is evicted after the pages behind it.
    idle |= dict.fromkeys((letter, d) for d in reversed(range(length)))
    assert pages.num_idle == len(idle)
  assert evicted > 1000


def test_what_is_copied_or_fed_again_counts_as_used():
  pages = block_manager.BlockManager(5, 4)
  again, _ = pages.begin(_ids("aaa"))
  _feed(pages, again, "aaa")
  for text in ("aaa", "bbbb", "cccc"):
    _run(pages, text)
  assert pages.begin(_ids("bbX"))[1] is not None
  # Its "aaa" is there already.
  pages.end(again, _ids("aaa"))
  assert (pages.num_free, pages.num_idle) == (1, 3)
  assert pages.grow(pages.begin(_ids("x"))[0], 8)
  known = [_known_of(pages, text) for text in ("aaaa+", "bbbb+", "cccc+")]
  assert known == [3, 4, 0]


def test_a_flush_spares_pages_in_use():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdefgh")
  _run(pages, "xyz")
  table, _ = pages.begin(_ids("abcd+"))
  pages.flush()
  assert (pages.num_free, pages.num_idle) == (7, 0)
  assert _known_of(pages, "abcdefgh") == 4
  assert _known_of(pages, "xyz+") == 0
  page_holders.check_blocks(pages, [table])


def test_new_weights_empty_the_page_tables_and_the_cache():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdefgh", version=1)
  table, _ = pages.begin(_ids("abcdefghi"))
  assert table.oldest_kv == 1
  pages.restart([table])
  assert (table.pages, table.cached, table.oldest_kv) == ([], 0, None)
  assert (pages.num_free, pages.num_idle) == (8, 0)
  assert _known_of(pages, "abcdefghi") == 0
  _feed(pages, table, "abcdefghi", version=2)
  pages.end(table, _ids("abcdefghi"))
  table, _ = pages.begin(_ids("abcdefghij"))
  assert (table.cached, table.oldest_kv) == (9, 2)


def test_detached_pages_stay_with_their_tables_and_then_are_free():
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcdefgh", version=1)
  _run(pages, "xyz", version=1)
  one, _ = pages.begin(_ids("abcd+"))
  two, _ = pages.begin(_ids("abcd-"))
  pages.detach()
  # "abcd" is kept; "efgh" and "xyz" nobody used.
  assert (one.pages, one.cached, one.oldest_kv) == (two.pages, 4, 1)
  assert (pages.num_free, pages.num_idle) == (7, 0)
  _feed(pages, one, "abcd+efgh")
  pages.share(one, _ids("abcd+efgh"))
  assert _known_of(pages, "abcd+efgh") == 0
  page_holders.check_blocks(pages, [one, two])
  pages.end(one, _ids("abcd+efgh"))
  assert (pages.num_free, pages.num_idle) == (7, 0)
  assert _run(pages, "abcd-", version=2) == 0
  pages.end(two, _ids("abcd-"))
  assert (pages.num_free, pages.num_idle) == (6, 2)
  assert pages.begin(_ids("abcd-+"))[0].oldest_kv == 2


def test_kept_keys_and_values_tell_their_lowest_version():
  pages = block_manager.BlockManager(16, 4)
  _run(pages, "abcd", version=1)
  table, _ = pages.begin(_ids("abcdefgh"))
  _feed(pages, table, "abcdefgh", version=2)
  pages.end(table, _ids("abcdefgh"))
  _run(pages, "xbcdefgh", version=2)
  assert pages.begin(_ids("abcdefghi"))[0].oldest_kv == 1
  assert pages.begin(_ids("xbcdefghi"))[0].oldest_kv == 2
  assert pages.begin(_ids("other"))[0].oldest_kv is None


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match="at least 1"):
    block_manager.BlockManager(0, 4)
  pages = block_manager.BlockManager(4, 4)
  with pytest.raises(ValueError, match="ids is empty"):
    pages.begin(_ids(""))
  table, _ = pages.begin(_ids("abcde"))
  table.cached = 1
  with pytest.raises(ValueError, match="at most 0"):
    pages.share(table, _ids("abcde"))
  assert pages.grow(table, 5)
  with pytest.raises(ValueError, match="oldest_kv"):
    pages.end(table, _ids("abcde"))
  with pytest.raises(ValueError, match="0 page tables of 1"):
    pages.restart([])
  table.oldest_kv = 0
  pages.end(table, _ids("abcde"))
  with pytest.raises(RuntimeError, match="has ended"):
    pages.end(table, _ids("abcde"))


@pytest.mark.parametrize(
  "spoil",
  [
    lambda table, other: table.pages.append(other.pages[-1]),
    lambda table, other: table.pages.pop(),
    lambda table, other: table.pages.__setitem__(0, table.pages[1]),
    lambda table, other: table.pages.append(99),
  ],
)
def test_pages_that_do_not_add_up_are_found(spoil):
  pages = block_manager.BlockManager(8, 4)
  _run(pages, "abcd")
  table, _ = pages.begin(_ids("abcdefgh"))
  other, _ = pages.begin(_ids("x"))
  _feed(pages, table, "abcdefgh")
  _feed(pages, other, "x")
  page_holders.check_blocks(pages, [table, other])
  with pytest.raises(AssertionError, match="1 page tables of 2"):
    page_holders.check_blocks(pages, [table])
  spoil(table, other)
  with pytest.raises(AssertionError, match="page"):
    page_holders.check_blocks(pages, [table, other])


def test_copies_in_order_are_the_same_made_at_once():
  draws = np.random.default_rng(0)
  for _ in range(200):
    copies = [tuple(draws.permutation(6)[:2].tolist()) for _ in range(8)]
    one_by_one = list(range(6))
    for source, target in copies:
      one_by_one[target] = one_by_one[source]
    at_once = list(range(6))
    for source, target in block_manager.simultaneous_copies(copies):
      at_once[target] = source
    assert at_once == one_by_one


@pytest.mark.parametrize("seed", range(3))
def test_nothing_known_is_missed_while_there_is_room(seed):
  draws = np.random.default_rng(seed)
  pages = block_manager.BlockManager(4000, 4)
  # Every prefix of ids that were ended or shared.
  known = {""}
  running = []
  for _ in range(1500):
    if draws.random() < 0.5 or not running:
      text = "".join("abc"[i] for i in draws.integers(3, size=12))
      table, _ = pages.begin(_ids(text))
      expected = max(n for n in range(len(text)) if text[:n] in known)
      assert table.cached == expected
      running.append((table, text))
      continue
    at = int(draws.integers(len(running)))
    table, text = running[at]
    _feed(pages, table, text[: draws.integers(table.cached, len(text) + 1)])
    known |= {text[:n] for n in range(table.cached + 1)}
    if draws.random() < 0.5:
      pages.share(table, _ids(text))
    else:
      pages.end(table, _ids(text))
      del running[at]
  page_holders.check_blocks(pages, [table for table, _ in running])
  assert pages.num_free > 0


def _text(draws, length):
  return "".join("ab"[i] for i in draws.integers(2, size=length))


@pytest.mark.parametrize(
  ("num_pages", "page_size", "min_copied_ids", "most"),
  [(12, 4, 1, 5), (40, 4, 2, 8), (9, 1, 1, 3), (6, 8, 5, 4), (200, 3, 2, 8)],
)
def test_every_request_finds_its_own_ids_whatever_happens(
  num_pages, page_size, min_copied_ids, most
):
  draws = np.random.default_rng(num_pages)
  device = page_device.Device(num_pages, page_size, min_copied_ids)
  running, begun = device.requests, 0
  while begun < 1000:
    action = draws.random()
    one = running[draws.integers(len(running))] if running else None
    if one is None or (action < 0.3 and len(running) < most):
      text = _text(draws, draws.integers(1, 20))
      device.begin(one.text if one and draws.random() < 0.3 else text)
      begun += 1
    elif action < 0.35:
      device.look(one.text)
    elif action < 0.7:
      length = int(draws.integers(one.table.cached, len(one.text) + 1))
      device.feed(one, length)
      if length == len(one.text):
        one.text += _text(draws, draws.integers(1, 4))
    elif action < 0.8:
      device.share(one)
    elif action < 0.99:
      device.end(one)
    else:
      device.new_weights(draws.choice(WAYS))
    device.check()
  assert device.cached > 1000
  device.end_all()


class _Pages(stateful.RuleBasedStateMachine):
  """Requests in any order, on as few pages as show a mistake."""

  @stateful.initialize(
    num_pages=st.integers(1, 12),
    page_size=st.integers(1, 4),
    min_copied_ids=st.integers(1, 4),
  )
  def make(self, num_pages, page_size, min_copied_ids):
    self.device = page_device.Device(num_pages, page_size, min_copied_ids)

  @stateful.rule(text=st.text("ab", min_size=1, max_size=12))
  def begin(self, text):
    self.device.begin(text)

  @stateful.precondition(lambda self: self.device.requests)
  @stateful.rule(data=st.data())
  def begin_as_another(self, data):
    self.device.begin(self._any(data).text)

  @stateful.rule(text=st.text("ab", min_size=1, max_size=12))
  def look(self, text):
    self.device.look(text)

  @stateful.precondition(lambda self: self.device.requests)
  @stateful.rule(data=st.data(), answer=st.text("ab", min_size=1, max_size=3))
  def feed(self, data, answer):
    one = self._any(data)
    lengths = st.integers(one.table.cached, len(one.text))
    length = data.draw(lengths, label="length")
    self.device.feed(one, length)
    if length == len(one.text):
      one.text += answer

  @stateful.precondition(lambda self: self.device.requests)
  @stateful.rule(data=st.data())
  def share(self, data):
    self.device.share(self._any(data))

  @stateful.precondition(lambda self: self.device.requests)
  @stateful.rule(data=st.data())
  def end(self, data):
    self.device.end(self._any(data))

  @stateful.rule(way=st.sampled_from(WAYS))
  def new_weights(self, way):
    self.device.new_weights(way)

  @stateful.invariant()
  def holds(self):
    if hasattr(self, "device"):
      self.device.check()

  def teardown(self):
    if hasattr(self, "device"):
      self.device.end_all()

  def _any(self, data):
    numbers = st.integers(0, len(self.device.requests) - 1)
    return self.device.requests[data.draw(numbers, label="request")]


@pytest.mark.hypothesis
def test_no_order_of_requests_loses_a_page_or_finds_ids_of_another():
  searches.run(_Pages, count=60, steps=40)
