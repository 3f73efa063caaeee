"""How many answers may be in progress."""

import contextlib

import pytest

from launch.http import admission


def test_there_is_a_limit_for_all_and_one_for_each_client():
  some = admission.Admission(max_answers=5, max_of_client=3)
  with contextlib.ExitStack() as held:
    held.enter_context(some.answering("a", 3))
    with pytest.raises(admission.Busy, match="3 answers to this client"):
      held.enter_context(some.answering("a"))
    held.enter_context(some.answering("b", 2))
    with pytest.raises(admission.Busy, match="5 answers to all clients"):
      held.enter_context(some.answering("c"))
    assert some.running == 5
  assert some.running == 0
  with some.answering("a", 3):
    pass


def test_without_limits_all_are_let_in():
  some = admission.Admission()
  with some.answering("", 1000), some.answering(""):
    assert some.running == 1001
