"""Tests of what a router remembers of aborts."""

import asyncio

import pytest

from rl.pools import aborts
from rl.runtime import virtual_clock


def test_an_abort_is_remembered_until_its_request_is_answered():
  known = aborts.Aborts()
  with known.asking("a"), known.asking("b"):
    assert not known.aborted("a")
    known.abort("a")
    known.abort("a")
    assert (known.aborted("a"), known.aborted("b")) == (True, False)
  with known.asking("a"):
    assert not known.aborted("a")


def test_an_abort_of_all_is_one_of_each_that_is_asked_by_then():
  known = aborts.Aborts()
  with known.asking("a"), known.asking("b"):
    known.abort(None)
    with known.asking("c"):
      assert [known.aborted(name) for name in "abc"] == [True, True, False]


def test_what_is_not_asked_cannot_be_aborted_and_nothing_twice_asked():
  known = aborts.Aborts()
  with pytest.raises(ValueError, match="request a is not in flight"):
    known.abort("a")
  with known.asking("a"):
    with (
      pytest.raises(ValueError, match="request a is already in flight"),
      known.asking("a"),
    ):
      pass
    assert not known.aborted("a")


def test_the_answer_to_what_was_never_sent_has_no_token():
  async def run():
    await asyncio.sleep(7)
    return aborts.unsent(4.0)

  answer = virtual_clock.run(run())
  assert (answer.stop, answer.decode_s) == ("abort", 3.0)
  delta = aborts.last(answer)
  assert delta.completion is answer
  for ids in (answer.tokens, answer.logprobs, answer.versions, delta.tokens):
    assert len(ids) == 0
