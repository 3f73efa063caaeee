"""What every engine must do, whichever it is: sampling, and ends."""

import asyncio
import contextlib
import dataclasses
import math

import numpy as np
import pytest

from rl.engine import contract
from tests.helpers import engines_under_test
from tests.helpers.engines_under_test import CLOSE, LONG, check_shape


@pytest.fixture(scope="module", params=engines_under_test.parameters())
def served(request):
  with engines_under_test.serve(request.param) as served:
    yield served


@pytest.fixture(params=engines_under_test.parameters())
def breakable(request):
  with engines_under_test.serve(request.param) as served:
    yield served


@pytest.fixture(autouse=True)
def nothing_is_left(request):
  yield
  if "served" in request.fixturenames:
    served = request.getfixturevalue("served")
    stats = served.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, 12, count)
  return [rng.integers(0, 24, length).tolist() for length in lengths]


def test_greedy_answers_are_those_of_a_plain_forward(served):
  async def scenario():
    # Five times as many as there are slots, of many lengths.
    return await asyncio.gather(
      *(served.answer(p, 1 + i) for i, p in enumerate(prompts(20)))
    )

  for i, (prompt, done) in enumerate(
    zip(prompts(20), served.run(scenario()), strict=True)
  ):
    assert done.tokens.tolist() == served.greedy(prompt, 1 + i)
    assert done.stop == "length"
    expected = served.logprobs(prompt, done.tokens.tolist(), 0.0)
    np.testing.assert_allclose(done.logprobs, expected, atol=CLOSE)


@pytest.mark.parametrize(
  "filters",
  [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 1}],
  ids=str,
)
def test_logprobs_are_those_before_filters(served, filters):
  async def scenario():
    return await asyncio.gather(
      *(served.answer(p, 20, temperature=0.7, **filters) for p in prompts(4))
    )

  for prompt, done in zip(prompts(4), served.run(scenario()), strict=True):
    tokens = done.tokens.tolist()
    expected = served.logprobs(prompt, tokens, 0.7)
    np.testing.assert_allclose(done.logprobs, expected, atol=CLOSE)
    ranks = [
      int((logits > logits[token]).sum())
      for logits, token in zip(
        served.logits([*prompt, *tokens])[len(prompt) - 1 :],
        tokens,
        strict=False,
      )
    ]
    if "top_k" in filters:
      assert max(ranks) < filters["top_k"]
    elif not filters:
      assert max(ranks) > 0


def test_frequencies_are_the_probabilities(served):
  # Of 600 draws a frequency is off by 3 * sqrt(p (1 - p) / 600) < 0.062, and
  # half of the sum over 24 ids by about 0.08 at most.
  async def scenario():
    return await asyncio.gather(
      *(served.answer([5, 6], 1, temperature=1.0, seed=i) for i in range(600))
    )

  logits = served.logits([5, 6])[-1]
  expected = np.exp(logits - logits.max())
  expected /= expected.sum()
  counts = np.bincount(
    [int(done.tokens[0]) for done in served.run(scenario())], minlength=24
  )
  assert abs(counts / 600 - expected).sum() / 2 < 0.12


def test_a_seed_decides_the_tokens_whatever_else_is_decoded(served):
  if not served.engine.capabilities.seeds:
    pytest.skip("knows no seeds")

  async def scenario():
    alone = await served.answer([1, 2], 30, temperature=1.0, seed=7)
    others = [
      served.answer(p, 12, temperature=1.0, seed=i)
      for i, p in enumerate(prompts(6))
    ]
    again = served.answer([1, 2], 30, temperature=1.0, seed=7)
    other = served.answer([1, 2], 30, temperature=1.0, seed=-8)
    *_, again, other = await asyncio.gather(*others, again, other)
    return alone, again, other

  alone, again, other = served.run(scenario())
  assert alone.tokens.tolist() == again.tokens.tolist()
  assert alone.tokens.tolist() != other.tokens.tolist()
  np.testing.assert_allclose(alone.logprobs, again.logprobs, atol=CLOSE)


def test_sampling_ends_behind_a_stop_id_which_is_kept(served):
  plain = served.greedy([3, 1, 4], 20)
  stop = plain[-1]
  end = plain.index(stop) + 1
  done = served.run(served.answer([3, 1, 4], 20, stop_ids=(23, stop)))
  assert done.tokens.tolist() == plain[: min(end, _index(plain, 23))]
  assert done.stop == "stop"


def _index(values: list[int], value: int) -> int:
  return values.index(value) + 1 if value in values else len(values)


def test_long_answers_come_once(served):
  done = served.run(served.answer([2, 3], LONG))
  check_shape(done, LONG)
  assert done.tokens.tolist() == served.greedy([2, 3], LONG)


def test_a_conversation_may_be_as_long_as_the_model_allows(served):
  longest = served.engine.capabilities.max_length
  done = served.run(served.answer([1] * (longest - 1), 1))
  check_shape(done, 1)
  done = served.run(served.answer([1], longest - 1))
  check_shape(done, longest - 1)


def test_deltas_add_up_to_the_completion(served):
  async def scenario():
    request = served.request([4, 5], LONG, temperature=1.0)
    return [delta async for delta in served.engine.stream(request)]

  deltas = served.run(scenario())
  done = deltas[-1].completion
  assert [delta.completion for delta in deltas[:-1]] == [None] * (
    len(deltas) - 1
  )
  assert len(deltas) > 3
  for field in ("tokens", "logprobs", "versions"):
    parts = [getattr(delta, field) for delta in deltas]
    np.testing.assert_array_equal(np.concatenate(parts), getattr(done, field))
  check_shape(done, LONG)


def test_a_second_turn_encodes_only_what_is_new(served):
  async def scenario():
    prompt = [9, 8, 7, 6, 5, 4, 3, 2]
    first = await served.answer(prompt, 9, session="talk")
    ids = [*prompt, *first.tokens.tolist(), 11, 12]
    return ids, await served.answer(ids, 5, session="talk")

  ids, second = served.run(scenario())
  # The last sampled id was never fed, and pages hold 4 ids at most.
  assert 17 - 1 - 4 <= second.cached_tokens <= 16
  assert second.tokens.tolist() == served.greedy(ids, 5)


def test_aborting_one_leaves_the_others(served):
  async def scenario():
    request, task = served.begin([1, 2, 3], LONG)
    other = served.begin([4, 5], 20)[1]
    await served.first_token(request)
    served.engine.abort(request.request_id)
    return await task, await other

  done, other = served.run(scenario())
  assert done.stop == "abort"
  assert 0 < len(done.tokens) < LONG
  check_shape(done, len(done.tokens))
  assert (
    done.tokens.tolist() == served.greedy([1, 2, 3], LONG)[: len(done.tokens)]
  )
  assert other.tokens.tolist() == served.greedy([4, 5], 20)


def test_aborting_one_that_waits_leaves_those_that_run(served):
  async def scenario():
    running = [served.begin([i], 30)[1] for i in range(4)]
    await served.begun(4)
    request, task = served.begin([9], 30)
    await asyncio.sleep(0)
    served.engine.abort(request.request_id)
    return await task, await asyncio.gather(*running)

  waiting, done = served.run(scenario())
  assert waiting.stop == "abort"
  check_shape(waiting, 0)
  for i, one in enumerate(done):
    assert one.tokens.tolist() == served.greedy([i], 30)


def test_every_token_that_was_sampled_is_in_an_answer_aborted_ones_too(served):
  async def scenario():
    before = served.engine.stats().sampled_tokens
    begun = [served.begin([i, 2], LONG) for i in range(7)]
    for request, _ in begun[:3]:
      await served.first_token(request)
      served.engine.abort(request.request_id)
    await served.begun(10)
    served.engine.abort(None)
    ended = [await task for _, task in begun]
    return ended, served.engine.stats().sampled_tokens - before

  ended, sampled = served.run(scenario())
  assert {done.stop for done in ended} == {"abort"}
  assert all(len(done.tokens) for done in ended[:3])
  assert sum(len(done.tokens) for done in ended) == sampled


def test_an_aborted_stream_ends_with_all_that_it_has(served):
  async def scenario():
    request, deltas = served.request([4, 5], LONG), []
    async for delta in served.engine.stream(request):
      deltas.append(delta)
      if len(deltas) == 2:
        served.engine.abort(request.request_id)
    return deltas

  deltas = served.run(scenario())
  done = deltas[-1].completion
  assert done.stop == "abort"
  assert 2 <= len(done.tokens) < LONG
  tokens = np.concatenate([delta.tokens for delta in deltas])
  assert tokens.tolist() == done.tokens.tolist()


def test_a_request_any_started_with_its_first_token(served):
  async def scenario():
    await served.engine.pause()
    request, task = served.begin([1, 2, 3], LONG)
    await asyncio.sleep(0)
    before = served.engine.begun(request.request_id)
    served.engine.resume()
    version = await served.first_token(request)
    served.engine.abort(request.request_id)
    with pytest.raises(ValueError, match="is not in flight"):
      served.engine.begun(request.request_id)
    return before, version, await task

  before, version, done = served.run(scenario())
  assert (before, version) == (None, done.versions[0])


def test_new_weights_do_not_change_what_a_request_any_started_with(served):
  async def scenario():
    request, task = served.begin([1, 2, 3], LONG)
    old = await served.first_token(request)
    await served.engine.pause()
    late, waiting = served.begin([5], 3)
    new = await served.publish("recompute")
    held = served.engine.begun(request.request_id)
    served.engine.resume()
    begun = await served.first_token(late)
    ends = await waiting, await task
    return old, new, held, begun, [done.versions.tolist() for done in ends]

  old, new, held, begun, (waited, went_on) = served.run(scenario())
  assert (held, begun) == (old, new)
  assert set(waited) == {new}
  assert (went_on[0], went_on[-1]) == (old, new)


def test_the_first_token_comes_between_acceptance_and_the_last(served):
  async def scenario():
    asked = await asyncio.gather(
      *(served.answer(p, LONG) for p in prompts(9)), served.answer([1], 1)
    )
    await served.engine.pause()
    request, task = served.begin([1, 2, 3], LONG)
    await asyncio.sleep(0)
    served.engine.abort(request.request_id)
    served.engine.resume()
    return asked, await task

  asked, none = served.run(scenario())
  for done in asked:
    assert 0 < done.first_token_s <= done.decode_s
  # The first of 60 tokens comes dispatches before the last.
  assert all(done.first_token_s < done.decode_s for done in asked[:-1])
  assert (len(none.tokens), none.first_token_s) == (0, 0.0)


def test_aborting_all_ends_all(served):
  async def scenario():
    tasks = [served.begin([i, 3], LONG)[1] for i in range(9)]
    await served.begun(4)
    served.engine.abort(None)
    ended = await asyncio.gather(*tasks)
    return ended, await served.answer([1, 2], 5)

  ended, after = served.run(scenario())
  assert {done.stop for done in ended} == {"abort"}
  assert after.tokens.tolist() == served.greedy([1, 2], 5)


def test_cancelling_aborts(served):
  async def scenario():
    _, task = served.begin([1, 2, 3], LONG)
    await served.begun(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    stream = served.engine.stream(served.request([3, 2], LONG))
    await anext(stream)
    await stream.aclose()
    return served.engine.stats(), await served.answer([2], 3)

  stats, after = served.run(scenario())
  assert stats.running == stats.waiting == 0
  assert after.tokens.tolist() == served.greedy([2], 3)


@pytest.mark.parametrize(
  "changes",
  [
    {"tokens": np.zeros(0, np.int32)},
    {"tokens": np.zeros(90, np.int32)},
    {"tokens": np.asarray([24], np.int32)},
    {"tokens": np.asarray([-1], np.int32)},
    {"max_tokens": 0},
    {"temperature": math.nan},
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"top_k": -1},
    {"stop_ids": (24,)},
    {"request_id": "first"},
  ],
  ids=str,
)
def test_what_cannot_be_served_is_refused_and_others_go_on(served, changes):
  async def scenario():
    _, first = served.begin([1, 2], 12, request_id="first")
    await asyncio.sleep(0)
    bad = dataclasses.replace(served.request([1], 10), **changes)
    with pytest.raises(ValueError, match="request"):
      await served.engine.generate(bad)
    with pytest.raises(ValueError, match="request"):
      await anext(served.engine.stream(bad))
    return await first

  done = served.run(scenario())
  assert done.tokens.tolist() == served.greedy([1, 2], 12)


def test_aborting_what_is_not_there_is_refused(served):
  with pytest.raises(ValueError, match="no one"):
    served.engine.abort("no one")


def test_a_flushed_cache_remembers_nothing(served):
  async def scenario():
    prompt = [5, 5, 5, 5, 6, 6, 6, 6, 7]
    await served.answer(prompt, 2)
    known = await served.answer(prompt, 2)
    await served.engine.flush_cache()
    return known, await served.answer(prompt, 2)

  known, forgotten = served.run(scenario())
  assert known.cached_tokens > 0
  assert forgotten.cached_tokens == 0
  assert forgotten.tokens.tolist() == known.tokens.tolist()


def test_closing_ends_what_is_in_flight(breakable):
  async def scenario():
    tasks = [breakable.begin([i], LONG)[1] for i in range(6)]
    await breakable.begun(3)
    await breakable.engine.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    with contextlib.suppress(contract.EngineClosed):
      ended.append(await breakable.answer([1], 1))
    return ended

  ended = breakable.run(scenario())
  assert [type(one) for one in ended] == [contract.EngineClosed] * 6
