"""The fake engine, where it keeps a contract of the real one."""

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from models.chat import word_chat
from rl.data import trajectory
from rl.engine import contract
from rl.runtime import checksum, virtual_clock
from rl.testing import fake_engine

FIRST = trajectory.PolicyVersion(1)


def request(name="a", **fields):
  return contract.DecodeRequest(
    **{
      "request_id": name,
      "session": name,
      "tokens": np.array([3, 1], np.int32),
      "max_tokens": 2,
      **fields,
    }
  )


def slow(**kwargs):
  """An engine whose answers end after 20 ms."""
  return fake_engine.FakeEngine((5,), word_chat.END, lambda _: 0.02, **kwargs)


def quick(**kwargs):
  return fake_engine.FakeEngine((5,), word_chat.END, **kwargs)


async def begun(fake, name="a", **fields):
  """Returns the task of an answer whose first token has been sampled."""
  answer = asyncio.create_task(fake.generate(request(name, **fields)))
  await asyncio.sleep(0)
  return answer


def run(scenario):
  async def guarded():
    async with asyncio.timeout(10):
      return await scenario

  return asyncio.run(guarded())


def test_it_keeps_the_protocol():
  assert isinstance(quick(), contract.DecodeEngine)


@pytest.mark.parametrize(
  ("mode", "versions", "stop", "oldest_kv"),
  [
    ("drain", [0, 0], "stop", 0),
    ("abort", [0], "abort", 0),
    ("recompute", [0, 1], "stop", 1),
    ("keep_kv", [0, 1], "stop", 0),
  ],
)
def test_answers_under_way_are_treated_as_told(mode, versions, stop, oldest_kv):
  async def scenario():
    fake = slow(update_s=0.01)
    answer = await begun(fake)
    update = asyncio.create_task(fake.update_weights(FIRST, None, mode))
    await asyncio.sleep(0)
    later = await begun(fake, "b")
    # One that comes meanwhile waits for the new weights.
    assert (fake.stats().running, fake.stats().waiting) == (1, 1)
    await update
    return await answer, await later

  answer, later = run(scenario())
  assert answer.versions.tolist() == versions
  assert len(answer.tokens) == len(answer.logprobs) == len(versions)
  assert (answer.stop, answer.oldest_kv) == (stop, oldest_kv)
  assert later.versions.tolist() == [1, 1]


def test_times_are_those_of_the_loop():
  async def scenario():
    fake = fake_engine.FakeEngine((5,), word_chat.END, lambda _: 2.0)
    await fake.pause()
    waiting = asyncio.create_task(fake.generate(request()))
    await asyncio.sleep(3)
    fake.resume()
    whole, aborted = await waiting, await begun(fake, "b")
    await fake.pause()
    none = await begun(fake, "c")
    await asyncio.sleep(1)
    fake.abort(None)
    ends = [whole, await aborted, await none]
    paused_s = fake.stats().paused_s
    return [(one.first_token_s, one.decode_s) for one in ends], paused_s

  # It waits for 3 s and is decoded for 2 s; the others are aborted after 1 s.
  assert virtual_clock.run(scenario()) == (
    [(3.0, 5.0), (0.0, 1.0), (0.0, 1.0)],
    4.0,
  )


def test_a_request_has_begun_with_its_first_token():
  async def scenario():
    fake = slow()
    with pytest.raises(ValueError, match="request a is not in flight"):
      fake.begun("a")
    first = await begun(fake)
    assert fake.begun("a") == 0
    await fake.pause()
    later = await begun(fake, "b")
    await fake.update_weights(FIRST, None, "recompute")
    seen = [fake.begun(name) for name in "ab"]
    fake.resume()
    ends = await first, await later
    with pytest.raises(ValueError, match="request b is not in flight"):
      fake.begun("b")
    return seen, [one.versions.tolist() for one in ends]

  assert run(scenario()) == ([0, None], [[0, 1], [1, 1]])


@pytest.mark.parametrize("mode", ["recompute", "drain"])
def test_what_is_paused_stays_so_through_an_update(mode):
  async def scenario():
    fake = slow()
    answer = await begun(fake)
    await fake.pause()
    later = await begun(fake, "b")
    await asyncio.sleep(0.05)
    assert not answer.done()
    await fake.update_weights(FIRST, None, mode)
    await asyncio.sleep(0.05)
    # Draining lets it finish, and nothing else begin.
    assert answer.done() == (mode == "drain")
    assert fake.stats().waiting == 1
    fake.resume()
    return [(await task).versions.tolist() for task in (answer, later)]

  assert run(scenario()) == [[0, int(mode != "drain")], [1, 1]]


def test_an_update_that_fails_or_is_cancelled_leaves_the_old_version_serving():
  async def scenario():
    fake = slow()
    await fake.update_weights(FIRST, {"w": np.zeros(2)})
    fake.capabilities = dataclasses.replace(
      fake.capabilities, in_flight=frozenset({"drain"})
    )
    refused: list[tuple[int, int, contract.InFlight, str]] = [
      (1, 2, "drain", "version 1 is not above the served 1"),
      (2, 3, "drain", "expected"),
      (2, 2, "keep_kv", "in_flight=keep_kv: this engine can only ['drain']"),
    ]
    for version, shape, mode, words in refused:
      params = {"w": np.zeros(shape)}
      above = trajectory.PolicyVersion(version)
      with pytest.raises(ValueError, match=re.escape(words)):
        await fake.update_weights(above, params, mode)
    first = await begun(fake)
    params = {"w": np.ones(2)}
    draining = fake.update_weights(trajectory.PolicyVersion(2), params, "drain")
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(draining, 0.001)
    second = await begun(fake, "b")
    return [(await task).versions.tolist() for task in (first, second)]

  assert run(scenario()) == [[1, 1], [1, 1]]


def test_the_time_in_which_decoding_stands_still_is_counted():
  async def scenario():
    fake = quick(update_s=0.05)
    await fake.generate(request())
    assert fake.stats().paused_s == 0
    await fake.update_weights(FIRST, None)
    once = fake.stats().paused_s
    await fake.generate(request())
    assert fake.stats().paused_s == once
    return once

  # A clock may be coarse; it never runs backwards.
  assert run(scenario()) > 0.04


def test_deltas_of_a_stream_make_up_its_completion():
  async def scenario():
    return [delta async for delta in quick().stream(request())]

  deltas = run(scenario())
  assert [delta.tokens.tolist() for delta in deltas] == [[5], [word_chat.END]]
  assert [delta.completion is None for delta in deltas] == [True, False]
  whole = deltas[-1].completion
  for name in ("tokens", "logprobs", "versions"):
    parts = [getattr(delta, name) for delta in deltas]
    np.testing.assert_array_equal(np.concatenate(parts), getattr(whole, name))


def test_whoever_leaves_early_aborts_the_request():
  async def scenario():
    fake = slow()
    stream = fake.stream(request())
    await anext(stream)
    assert fake.stats().running == 1
    await stream.aclose()
    assert fake.stats().sampled_tokens == 1
    counts = [fake.stats().running]
    answer = await begun(fake)
    answer.cancel()
    await asyncio.wait([answer])
    with pytest.raises(ValueError, match="request a is not in flight"):
      fake.abort("a")
    return [*counts, fake.stats().running]

  assert run(scenario()) == [0, 0]


def test_an_abort_ends_one_or_all_with_what_they_have():
  async def scenario():
    fake = slow()
    answers = [await begun(fake, name) for name in "abc"]
    fake.abort("b")
    assert len((await answers[1]).tokens) == 1
    assert not answers[0].done()
    await fake.pause()
    waiting = await begun(fake, "d")
    fake.abort(None)
    return [await one for one in (*answers, waiting)]

  answers = run(scenario())
  assert [one.stop for one in answers] == ["abort"] * 4
  assert [len(one.tokens) for one in answers] == [1, 1, 1, 0]


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"request_id": "b"}, "request b is already in flight"),
    ({"max_tokens": 0}, "max_tokens=0 is below 1"),
    ({"experts": True}, "experts are not recorded"),
  ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_cannot_be_served_is_refused(fields, words, streamed):
  async def scenario():
    fake = slow()
    other = await begun(fake, "b")
    mine = request(**fields)
    ask = anext(fake.stream(mine)) if streamed else fake.generate(mine)
    with pytest.raises(ValueError, match=words):
      await ask
    return (await other).stop

  assert run(scenario()) == "stop"


def test_an_engine_that_is_closed_fails_every_request():
  async def scenario():
    fake = slow()
    answers = [await begun(fake)]
    await fake.pause()
    answers.append(await begun(fake, "b"))
    await fake.close()
    answers.append(await begun(fake, "c"))
    done = await asyncio.gather(*answers, return_exceptions=True)
    return [type(error) for error in done]

  assert run(scenario()) == [contract.EngineClosed] * 3


def test_what_a_session_has_said_is_cached_until_a_flush_or_an_update():
  async def scenario():
    fake = quick()
    ids = np.array([3, 1, 5, word_chat.END, 4, 1], np.int32)
    cached = []
    for tokens in (ids[:2], ids, ids):
      answer = await fake.generate(request(tokens=tokens, max_tokens=1))
      cached.append(answer.cached_tokens)
    await fake.flush_cache()
    cached.append((await fake.generate(request(tokens=ids))).cached_tokens)
    await fake.update_weights(FIRST, None)
    cached.append((await fake.generate(request(tokens=ids))).cached_tokens)
    return cached, fake.stats().prefilled_tokens

  # Of 2 ids and a third that was sampled and not fed, 2 are known; of 6 all
  # but the last, which is always fed: 2 + 4 + 1 are encoded, and then 6 twice.
  assert run(scenario()) == ([0, 2, 5, 0, 0], 19)


def test_an_answer_of_one_token_ends_for_its_length():
  answer = run(quick().generate(request(max_tokens=1)))
  assert (answer.tokens.tolist(), answer.stop) == ([5], "length")


@pytest.mark.compiled
def test_the_checksum_is_that_of_the_served_weights():
  async def scenario():
    fake = quick()
    await fake.update_weights(FIRST, {"w": np.arange(3.0, dtype=np.float32)})
    return await fake.checksum()

  expected = checksum.of({"w": np.arange(3.0, dtype=np.float32)})
  assert run(scenario()) == (1, expected)
  assert expected != checksum.of({"w": np.zeros(3, np.float32)})
