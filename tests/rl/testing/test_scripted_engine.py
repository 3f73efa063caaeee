"""The scripted engine keeps the contract of engines."""

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from rl.engine import contract
from rl.runtime import checksum
from rl.testing import scripted_engine

pytestmark = pytest.mark.virtual_time

FIRST = 1
STOP = 1


def request(name="a", **changes):
  fields = {
    "request_id": name,
    "session": name,
    "tokens": np.array([3, 1], np.int32),
    "max_tokens": 8,
    "stop_ids": (STOP,),
  }
  return contract.DecodeRequest(**{**fields, **changes})


def say(*ids, step_s=0.0, **settings):
  """An engine with one answer, whose ids come every `step_s`."""
  return scripted_engine.ScriptedEngine(
    lambda request: ids, lambda request, i: step_s, **settings
  )


def slow(**settings):
  """An engine whose first id comes at once, and the stop id after 2 s."""
  return scripted_engine.ScriptedEngine(
    lambda request: (5, STOP), lambda request, i: 2.0 * i, **settings
  )


async def begun(engine, name="a", **fields):
  """Returns the task of an answer whose first id may have come."""
  answer = asyncio.create_task(engine.generate(request(name, **fields)))
  await asyncio.sleep(0)
  return answer


def test_it_keeps_the_protocols():
  assert isinstance(slow(), contract.DecodeEngine)
  assert isinstance(slow(), contract.SessionRouter)


def test_the_seed_chooses_one_of_some_words():
  script = scripted_engine.one_of((5, 6), STOP)
  assert [script(request(seed=seed)) for seed in range(3)] == [
    (5, STOP),
    (6, STOP),
    (5, STOP),
  ]


@pytest.mark.parametrize(
  ("ids", "max_tokens", "tokens", "stop"),
  [
    ((4, 5, 1, 6), 8, [4, 5, 1], "stop"),
    ((4, 5, 1), 3, [4, 5, 1], "stop"),
    ((4, 5, 1), 2, [4, 5], "length"),
    ((4, 5), 8, [4, 5], "abort"),
    ((), 8, [], "abort"),
  ],
)
async def test_deltas_add_up_to_the_answer(ids, max_tokens, tokens, stop):
  one = say(*ids)
  asked = request(max_tokens=max_tokens)
  whole = await one.generate(asked)
  deltas = [delta async for delta in one.stream(asked)]
  assert (whole.tokens.tolist(), whole.stop) == (tokens, stop)
  for name in ("tokens", "logprobs", "versions"):
    pieces = [getattr(delta, name) for delta in deltas]
    assert np.array_equal(np.concatenate(pieces), getattr(whole, name))
  assert [delta.completion is None for delta in deltas] == (
    [True] * (len(deltas) - 1) + [False]
  )
  # Id by id; what ends without a last id has a delta more.
  assert len(deltas) == len(tokens) + (stop == "abort")


async def test_an_aborted_request_has_what_was_said_until_then():
  one = say(4, 5, 1, step_s=2.0)
  with pytest.raises(ValueError, match="request a is not in flight"):
    one.begun("a")
  answers = [await begun(one, name) for name in "ab"]
  await asyncio.sleep(1)
  assert one.begun("a") is None
  one.abort("b")
  await asyncio.sleep(2)
  one.version = FIRST
  assert one.begun("a") == 0
  await asyncio.sleep(2)
  one.abort("a")
  first, none = [await answer for answer in answers]
  with pytest.raises(ValueError, match="request a is not in flight"):
    one.begun("a")
  assert first.tokens.tolist() == [4, 5]
  assert first.versions.tolist() == [0, 1]
  assert (first.stop, none.stop, len(none.tokens)) == ("abort", "abort", 0)
  # An id every 2 s; one request is aborted after 5 s, the other after 1 s.
  assert (first.first_token_s, first.decode_s) == (2.0, 5.0)
  assert (none.first_token_s, none.decode_s) == (0.0, 1.0)


@pytest.mark.parametrize(
  ("mode", "versions", "stop", "oldest_kv"),
  [
    ("drain", [0, 0], "stop", 0),
    ("abort", [0], "abort", 0),
    ("recompute", [0, 1], "stop", 1),
    ("keep_kv", [0, 1], "stop", 0),
  ],
)
async def test_answers_under_way_are_treated_as_told(
  mode, versions, stop, oldest_kv
):
  one = slow(update_s=1.0)
  answer = await begun(one)
  update = asyncio.create_task(one.update_weights(FIRST, None, mode))
  await asyncio.sleep(0)
  later = await begun(one, "b")
  # One that comes meanwhile waits for the new weights.
  assert (one.stats().running, one.stats().waiting) == (1, 1)
  await update
  answer = await answer
  later = await later
  assert answer.versions.tolist() == versions
  assert len(answer.tokens) == len(answer.logprobs) == len(versions)
  assert (answer.stop, answer.oldest_kv) == (stop, oldest_kv)
  assert later.versions.tolist() == [1, 1]


@pytest.mark.parametrize("mode", ["recompute", "drain"])
async def test_what_is_paused_stays_so_through_an_update(mode):
  one = slow()
  answer = await begun(one)
  await one.pause()
  later = await begun(one, "b")
  await asyncio.sleep(5)
  assert not answer.done()
  await one.update_weights(FIRST, None, mode)
  await asyncio.sleep(5)
  # Draining lets it finish, and nothing else begin.
  assert answer.done() == (mode == "drain")
  if mode != "drain":
    assert one.begun("a") == 0
  assert (one.stats().waiting, one.begun("b")) == (1, None)
  one.resume()
  ends = await answer, await later
  # The other began after 10 s: 8 s when the first could be drained at 5 s.
  assert ([end.versions.tolist() for end in ends], ends[1].first_token_s) == (
    [[0, int(mode != "drain")], [1, 1]],
    10.0,
  )


async def test_the_time_in_which_decoding_stands_still_is_counted():
  one, seen = slow(update_s=0.5), []
  await one.generate(request())
  seen.append(one.stats().paused_s)
  await one.update_weights(FIRST, None)
  seen.append(one.stats().paused_s)
  await one.generate(request())
  await one.pause()
  await asyncio.sleep(3)
  assert [*seen, one.stats().paused_s] == [0.0, 0.5, 3.5]


async def test_an_update_that_fails_or_is_cancelled_leaves_the_old_version():
  one = slow()
  await one.update_weights(FIRST, {"w": np.zeros(2)})
  one.capabilities = dataclasses.replace(
    one.capabilities, in_flight=frozenset({"drain"})
  )
  refused: list[tuple[int, int, contract.InFlight, str]] = [
    (1, 2, "drain", "version 1 is not above the served 1"),
    (2, 3, "drain", "expected"),
    (2, 2, "keep_kv", "in_flight='keep_kv'; use drain"),
  ]
  for version, shape, mode, words in refused:
    params = {"w": np.zeros(shape)}
    with pytest.raises(ValueError, match=re.escape(words)):
      await one.update_weights(version, params, mode)
  first = await begun(one)
  params = {"w": np.ones(2)}
  draining = one.update_weights(2, params, "drain")
  with pytest.raises(TimeoutError):
    await asyncio.wait_for(draining, 0.1)
  second = await begun(one, "b")
  found = [(await task).versions.tolist() for task in (first, second)]
  assert found == [[1, 1], [1, 1]]


async def test_requests_end_by_an_abort_of_one_or_all_or_when_nobody_waits():
  one = slow()
  answers = [await begun(one, name) for name in "abc"]
  one.abort("b")
  ends = [await answers.pop(1)]
  assert one.stats().running == 2
  answers[0].cancel()
  await asyncio.wait([answers.pop(0)])
  stream = one.stream(request("d"))
  await anext(stream)
  assert one.stats().running == 2
  await stream.aclose()
  assert (one.stats().running, one.stats().sampled_tokens) == (1, 4)
  for name in "abd":
    with pytest.raises(ValueError, match=f"request {name} is not in flight"):
      one.abort(name)
  await one.pause()
  answers.append(await begun(one, "e"))
  one.abort(None)
  ends = [*ends, *[await answer for answer in answers]]
  assert [end.stop for end in ends] == ["abort"] * 3
  assert [len(end.tokens) for end in ends] == [1, 1, 0]


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"request_id": "b"}, "request b is already in flight"),
    ({"max_tokens": 0}, "max_tokens=0 is below 1"),
    ({"experts": True}, "experts are not recorded"),
  ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_cannot_be_served_is_refused(
  fields, words, streamed
):
  one = slow()
  other = await begun(one, "b")
  mine = request(**fields)
  ask = anext(one.stream(mine)) if streamed else one.generate(mine)
  with pytest.raises(ValueError, match=words):
    await ask
  assert (await other).stop == "stop"


async def test_an_engine_that_is_closed_fails_every_request():
  one = slow()
  answers = [await begun(one)]
  await one.pause()
  answers.append(await begun(one, "b"))
  await one.close()
  answers.append(await begun(one, "c"))
  done = await asyncio.gather(*answers, return_exceptions=True)
  assert [type(error) for error in done] == [contract.EngineClosed] * 3


async def test_what_a_session_has_said_is_cached_until_a_flush_or_an_update():
  one = slow()
  ids = np.array([3, 1, 5, STOP, 4, 1], np.int32)
  cached = []
  for tokens in (ids[:2], ids, ids):
    answer = await one.generate(request(tokens=tokens, max_tokens=1))
    cached.append(answer.cached_tokens)
  await one.flush_cache()
  cached.append((await one.generate(request(tokens=ids))).cached_tokens)
  await one.update_weights(FIRST, None)
  cached.append((await one.generate(request(tokens=ids))).cached_tokens)
  # Of 2 ids and a third that was sampled and not fed, 2 are known; of 6 all
  # but the last, which is always fed: 2 + 4 + 1 are encoded, and then 6 twice.
  assert (cached, one.stats().prefilled_tokens) == ([0, 2, 5, 0, 0], 19)


@pytest.mark.compiled
async def test_the_checksum_is_that_of_the_served_weights():
  expected = checksum.of({"w": np.arange(3.0, dtype=np.float32)})
  one = slow()
  await one.update_weights(FIRST, {"w": np.arange(3.0, dtype=np.float32)})
  assert await one.checksum() == (1, expected)
  assert expected != checksum.of({"w": np.zeros(3, np.float32)})
