"""The scripted engine keeps to the protocol of engines."""

import asyncio

import numpy as np
import pytest

from rl import engine, scripted


def request(name="a", **changes):
  fields = {
    "request_id": name,
    "session": name,
    "tokens": np.array([3], np.int32),
    "max_tokens": 8,
    "stop_ids": (1,),
  }
  return engine.DecodeRequest(**{**fields, **changes})


def say(*ids, **settings):
  return scripted.ScriptedEngine(lambda request: ids, **settings)


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
      with pytest.raises(engine.EngineClosed):
        await answer

  asyncio.run(scenario())
