"""The scripted engine keeps the contract of engines."""

import asyncio

import numpy as np
import pytest

from rl.engine import contract
from rl.runtime import virtual_clock
from rl.testing import scripted_engine


def request(name="a", **changes):
  fields = {
    "request_id": name,
    "session": name,
    "tokens": np.array([3], np.int32),
    "max_tokens": 8,
    "stop_ids": (1,),
  }
  return contract.DecodeRequest(**{**fields, **changes})


def say(*ids, **settings):
  return scripted_engine.ScriptedEngine(lambda request: ids, **settings)


@pytest.mark.parametrize(
  ("ids", "max_tokens", "tokens", "stop"),
  [
    ((4, 5, 1, 6), 8, [4, 5, 1], "stop"),
    ((4, 5, 1), 2, [4, 5], "length"),
    ((4, 5), 8, [4, 5], "abort"),
    ((), 8, [], "abort"),
  ],
)
def test_deltas_add_up_to_the_answer(ids, max_tokens, tokens, stop):
  async def both():
    one = say(*ids)
    asked = request(max_tokens=max_tokens)
    whole = await one.generate(asked)
    return whole, [delta async for delta in one.stream(asked)]

  whole, deltas = asyncio.run(both())
  assert (whole.tokens.tolist(), whole.stop) == (tokens, stop)
  for name in ("tokens", "logprobs", "versions"):
    pieces = [getattr(delta, name) for delta in deltas]
    assert np.array_equal(np.concatenate(pieces), getattr(whole, name))
  assert [d.completion is not None for d in deltas].index(True) == (
    len(deltas) - 1
  )


def test_an_aborted_request_has_what_was_said_until_then():
  async def scenario():
    one = say(4, 5, 1, step_s=2.0)
    with pytest.raises(ValueError, match="request a is not in flight"):
      one.begun("a")
    answers = [asyncio.create_task(one.generate(request(x))) for x in "ab"]
    await asyncio.sleep(1)
    assert one.begun("a") is None
    one.abort("b")
    await asyncio.sleep(2)
    one.version = 7
    assert one.begun("a") == 0
    await asyncio.sleep(2)
    one.abort("a")
    return [await answer for answer in answers]

  first, none = virtual_clock.run(scenario())
  assert first.tokens.tolist() == [4, 5]
  assert first.versions.tolist() == [0, 7]
  assert (first.stop, none.stop, len(none.tokens)) == ("abort", "abort", 0)
  # An id every 2 s; one request is aborted after 5 s, the other after 1 s.
  assert (first.first_token_s, first.decode_s) == (2.0, 5.0)
  assert (none.first_token_s, none.decode_s) == (0.0, 1.0)


def test_requests_end_by_an_abort_or_by_the_end_of_the_engine():
  async def scenario():
    one = say(4, 5, 1, step_s=30.0)
    answers = [asyncio.create_task(one.generate(request(x))) for x in "abc"]
    await asyncio.sleep(0.01)
    assert one.stats().running == 3
    with pytest.raises(ValueError, match="already in flight"):
      await one.generate(request("a"))
    one.abort("a")
    assert (await answers[0]).stop == "abort"
    answers[1].cancel()
    await asyncio.wait([answers[1]])
    assert one.stats().running == 1
    with pytest.raises(ValueError, match="request b is not in flight"):
      one.abort("b")
    await one.close()
    for answer in (answers[2], one.generate(request("d"))):
      with pytest.raises(contract.EngineClosed):
        await answer

  asyncio.run(scenario())
