"""Tests of where a session may go that has to keep its version."""

import pytest

from rl.pools import affinity, routing_table


def one_version(count, *, sampled):
  """Returns a table of which session "a" has lost engine 0 at version 5."""
  seats = [affinity.Seat("decode")] * count
  table = routing_table.Routes(seats, affinity.Routing())
  table.one_version = True
  table.assign("a", "")
  if sampled:
    table.measure("a", 0, affinity.Sample(), 5)
  table.lose(0, 5)
  return table


def test_a_session_with_tokens_moves_where_their_version_is_or_not_at_all():
  table = one_version(4, sampled=True)
  table.drain(1)
  assert table.move("a", [5, 5, 6, 6]) == (1, "")
  table.lose(1, 5)
  # 2 is to have that version yet.
  assert table.move("a", [5, 5, 4, 6]) is None
  assert table.move("a", [5, 5, 5, 6]) == (2, "")
  table.lose(2, 5)
  with pytest.raises(ValueError, match="tokens of version 5, which no engine"):
    table.move("a", [5, 5, 5, 6])
  table.lose(3, 6)
  assert table.move("a", [5, 5, 5, 6]) is None


def test_a_session_without_tokens_may_begin_with_newer_weights():
  table = one_version(2, sampled=False)
  assert table.move("a", [5, 4]) is None
  assert table.move("a", [5, 6]) == (1, "")


def test_no_session_that_is_waited_for_moves_to_an_engine_in_its_update():
  tables = [one_version(2, sampled=sampled) for sampled in (False, True)]
  for table in tables:
    table.drain(1)
    table.update(1)
  # It could get a token of the old weights there, and then of the new ones.
  assert tables[0].move("a", [5, 5]) is None
  with pytest.raises(ValueError, match="tokens of version 5, which no engine"):
    tables[1].move("a", [5, 5])
  tables[0].reopen(1)
  assert tables[0].move("a", [5, 6]) == (1, "")


def test_tokens_count_whose_engine_was_lost_meanwhile():
  table = one_version(2, sampled=False)
  table.measure("a", 0, affinity.Sample(), 5)
  with pytest.raises(ValueError, match="tokens of version 5, which no engine"):
    table.move("a", [5, 6])
