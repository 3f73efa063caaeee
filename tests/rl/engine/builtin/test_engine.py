"""Requests of the built-in engine: what is shared, waited for and refused."""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest


def some_ids(rng, low, high):
  return rng.integers(24, size=rng.integers(low, high)).tolist()


def prefilled(served):
  return served.engine.stats().prefilled_tokens


def test_a_later_turn_feeds_only_what_is_new(served):
  async def turns():
    session, ids = served.name(), [1, 2, 3, 4, 5]
    first = await served.answer(ids, 3, session=session)
    ids += [*first.tokens.tolist(), 7, 8]
    before = prefilled(served)
    second = await served.answer(ids, 3, session=session)
    # 5 of the prompt and 2 of the 3 sampled: the last was never fed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 7)
    # That one and the context [7, 8].
    assert prefilled(served) - before == 3
    assert second.tokens.tolist() == served.greedy(ids, 3)
    assert served.is_greedy(ids, second.tokens)

  served.run(served.engine.flush_cache())
  served.run(turns())


def test_a_session_that_changes_its_past_is_encoded_from_there(served):
  async def turns():
    await served.answer([1, 2, 3, 4, 5], 3)
    for ids in ([1, 2, 9, 4, 5, 6], [1, 2, 9]):
      changed = await served.answer(ids, 3)
      # [1, 2] stay; of a prompt that is all there the last id is fed again.
      assert changed.cached_tokens == 2
      assert served.is_greedy(ids, changed.tokens)

  served.run(served.engine.flush_cache())
  served.run(turns())


@pytest.mark.parametrize("engine", ["served", "pressed"])
def test_a_group_encodes_its_prompt_once(engine, request):
  served = request.getfixturevalue(engine)
  prompt = some_ids(np.random.default_rng(3), 19, 20)

  async def group():
    before = served.engine.stats()
    begun = [served.begin(prompt, 6, temperature=1.0, seed=i) for i in range(8)]
    answers = [await task for _, task in begun]
    after = served.engine.stats()
    new = after.prefilled_tokens - before.prefilled_tokens
    # One feeds all 19; the seven others what is behind the last whole page, 3
    # of them. Who gives up its pages feeds some again.
    assert 19 <= new <= 19 + 7 * 3 + (engine == "pressed") * 19
    assert after.cached_tokens - before.cached_tokens >= 7 * 16
    assert len({tuple(answer.tokens) for answer in answers}) > 4

  served.run(served.engine.flush_cache())
  served.run(group())


def test_requests_of_one_session_may_overlap(served):
  async def scenario():
    session = served.name()
    begun = [served.begin([5, i], 6, session=session) for i in range(3)]
    for request, task in begun:
      assert served.is_greedy(request.tokens, (await task).tokens)

  served.run(scenario())


def test_a_conversation_may_fill_the_whole_length(served):
  ids = some_ids(np.random.default_rng(1), 20, 21)
  answer = served.run(served.answer(ids, 12))
  assert served.is_greedy(ids, answer.tokens)
  assert (len(answer.tokens), answer.stop) == (12, "length")


def test_more_sessions_than_slots_are_served_by_priority(served):
  order = []

  async def one(priority):
    await served.answer([1, 2], 6, priority=(priority,))
    order.append(priority)

  async def load():
    await asyncio.gather(*(one(p) for p in reversed(range(12))))

  served.run(load())
  # Four rows at a time: each later wave has higher numbers.
  waves = [sorted(order[i : i + 4]) for i in range(0, 12, 4)]
  assert waves == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_least_recently_used_beginnings_make_room(dense):
  # 24 pages of 4 positions: of these conversations three.
  rng = np.random.default_rng(4)
  first, *others = [some_ids(rng, 31, 32) for _ in range(5)]

  async def scenario():
    await dense.answer(first, 1)
    for ids in others[:2]:
      await dense.answer(ids, 1)
    # It is used again, so that the others go before it.
    assert (await dense.answer(first, 1)).cached_tokens == 30
    for ids in others[2:]:
      await dense.answer(ids, 1)
    for ids, cached in ((first, 30), (others[3], 30), (others[0], 0)):
      assert (await dense.answer(ids, 1)).cached_tokens == cached
    assert dense.engine.stats().preemptions == before

  before = dense.engine.stats().preemptions
  dense.run(dense.engine.flush_cache())
  dense.run(scenario())
  dense.run(dense.engine.flush_cache())
  stats = dense.engine.stats()
  assert stats.free_pages == stats.pages == 24


def test_sampling_ends_behind_a_stop_id_and_at_the_limit(served):
  async def scenario():
    ask = functools.partial(served.answer, [1, 2, 3], temperature=3.0, seed=3)
    tokens = (await ask(12)).tokens.tolist()
    # The last place at which an id occurs for the first time.
    last = max(tokens.index(id_) for id_ in tokens)
    assert last > 3
    for room, stop in ((12, "stop"), (last + 1, "stop"), (last, "length")):
      answer = await ask(room, stop_ids=(tokens[last],))
      assert answer.stop == stop
      assert answer.tokens.tolist() == tokens[: min(room, last + 1)]
    for stop_ids, stop in (((), "length"), ((tokens[0],), "stop")):
      answer = await ask(1, stop_ids=stop_ids)
      assert (answer.stop, answer.tokens.tolist()) == (stop, tokens[:1])

  served.run(scenario())


def test_a_bias_forbids_and_more_of_them_than_rows_wait(served):
  async def scenario():
    begun = []
    for i in range(8):
      bias = np.full(24, -np.inf, np.float32)
      bias[[i, i + 8, i + 16]] = 0
      begun.append(served.begin([1, 2], 9, bias=bias, temperature=2.0, seed=i))
    plain = served.begin([1, 2], 9, priority=(1,))
    for i, (_, task) in enumerate(begun):
      assert {token % 8 for token in (await task).tokens.tolist()} == {i}
    assert served.is_greedy([1, 2], (await plain[1]).tokens)

  served.run(scenario())


def test_filters_leave_the_most_probable_alone_if_they_say_so(served):
  async def scenario():
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
      answer = await served.answer([3, 1], 8, temperature=2.0, **filters)
      assert served.is_greedy([3, 1], answer.tokens)

  served.run(scenario())


def test_abort_ends_running_and_waiting_requests_and_no_other(served):
  async def scenario():
    begun = [served.begin([i + 1], 20) for i in range(6)]
    await served.begun(4)
    for i in (1, 5):  # A running one, and one that waits for a row.
      served.engine.abort(begun[i][0].request_id)
    answers = [await task for _, task in begun]
    for (request, _), answer in zip(begun, answers, strict=True):
      if len(answer.tokens):
        assert served.is_greedy(request.tokens, answer.tokens)
    ends = [answer.stop for answer in answers]
    assert ends == ["length", "abort", *["length"] * 3, "abort"]
    sizes = [len(answer.tokens) for answer in answers]
    assert 0 < sizes[1] < 20
    assert [*sizes[:1], *sizes[2:]] == [20, 20, 20, 20, 0]

  served.run(scenario())


def test_abort_of_all_ends_all_and_of_the_unknown_is_refused(served):
  async def scenario():
    finished, task = served.begin([9], 1)
    await task
    begun = [served.begin([i + 1], 20) for i in range(6)]
    await served.begun(1)
    for unknown in ("unknown", finished.request_id):
      with pytest.raises(ValueError, match=f"{unknown} is not in flight"):
        served.engine.abort(unknown)
    served.engine.abort(None)
    assert {(await task).stop for _, task in begun} == {"abort"}
    served.engine.abort(None)
    assert served.engine.stats().waiting == 0

  served.run(scenario())


def test_abort_of_all_that_runs_before_a_dispatch_is_no_failure(served):
  async def scenario():
    # A session that idles lets the engine linger before it dispatches.
    await served.answer([9], 1)
    request, task = served.begin([3], 20)
    await served.begun(1)
    served.engine.abort(request.request_id)
    await asyncio.sleep(0.02)
    assert (await task).stop == "abort"
    assert (await served.answer([3], 2)).stop == "length"

  served.run(scenario())


@pytest.mark.parametrize("position", ["running", "waiting"])
def test_a_cancelled_request_gives_back_its_name_and_its_row(served, position):
  async def scenario():
    priorities = ((0,), (1,)) if position == "running" else ((1,), (0,))
    others = [
      served.begin([i + 1], 20, priority=priorities[1])[1] for i in range(4)
    ]
    request, task = served.begin([9], 20, priority=priorities[0])
    await served.begun(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    again = await served.engine.generate(request)
    assert served.is_greedy([9], again.tokens)
    await asyncio.gather(*others)

  served.run(scenario())


def test_a_stream_tells_everything_once_and_ends_with_all_of_it(served):
  async def read(request):
    return [delta async for delta in served.engine.stream(request)]

  async def scenario():
    requests = [served.request([i], 11, temperature=1.0) for i in range(6)]
    plain = [await served.answer([i], 11, temperature=1.0) for i in range(6)]
    streams = await asyncio.gather(*map(read, requests))
    for deltas, expected in zip(streams, plain, strict=True):
      assert all(delta.completion is None for delta in deltas[:-1])
      done = deltas[-1].completion
      for field in ("tokens", "logprobs", "versions"):
        parts = [getattr(delta, field) for delta in deltas]
        np.testing.assert_array_equal(
          np.concatenate(parts), getattr(done, field)
        )
      np.testing.assert_array_equal(done.tokens, expected.tokens)
      # 3 tokens of a dispatch: 4 of them at least.
      assert len(deltas) >= 4

  served.run(scenario())


def test_a_stream_that_is_closed_early_aborts_its_request(served):
  async def scenario():
    request = served.request([4], 20)
    stream = served.engine.stream(request)
    first = await anext(stream)
    assert 0 < len(first.tokens) < 20
    await stream.aclose()
    assert served.engine.stats().running == 0
    # Its name is free, and it is not missed.
    again = await served.engine.generate(request)
    assert served.is_greedy([4], again.tokens)
    with pytest.raises(StopAsyncIteration):
      await anext(stream)

  served.run(scenario())


def test_an_aborted_stream_ends_with_what_it_has(served):
  async def scenario():
    request = served.request([4], 20)
    told = []
    async for delta in served.engine.stream(request):
      told.append(delta)
      if delta.completion is None and len(told) == 1:
        served.engine.abort(request.request_id)
    done = told[-1].completion
    assert (done.stop, len(told)) == ("abort", 2)
    assert done.tokens.tolist() == told[0].tokens.tolist()

  served.run(scenario())


BAD = [
  ({"tokens": np.zeros(0, np.int32)}, "no tokens"),
  ({"tokens": np.array([1, 24], np.int32)}, r"outside \[0, 24\)"),
  ({"tokens": np.array([-1], np.int32)}, r"outside \[0, 24\)"),
  # 30 + 3 = 33 is one more than max_length.
  ({"tokens": np.ones(30, np.int32)}, "do not fit model.max_length=32"),
  ({"max_tokens": 0}, "max_tokens=0 is below 1"),
  ({"temperature": float("nan")}, "temperature=nan"),
  ({"temperature": -1.0}, "temperature=-1.0"),
  ({"temperature": float("inf")}, "temperature=inf"),
  ({"top_k": -1}, "top_k=-1"),
  ({"top_p": 0.0}, "top_p=0.0"),
  ({"min_p": float("nan")}, "min_p=nan"),
  ({"stop_ids": (1, 2, 3, 4, 5)}, "5 stop ids, at most 4"),
  ({"stop_ids": (24,)}, r"stop_ids=\(24,\) must be in \[0, 24\)"),
  ({"seed": 2**31}, "seed=2147483648 needs more than 32 bits"),
  ({"bias": np.zeros(23, np.float32)}, "shape"),
  ({"bias": np.full(24, -np.inf, np.float32)}, "forbids every id"),
  ({"bias": np.full(24, np.nan, np.float32)}, r"at most 1e\+06, or -inf"),
  ({"experts": True}, "experts are not recorded"),
  ({"temperature": 1e-40}, "temperature=1e-40 must be 0 or in"),
  ({"request_id": "taken"}, "already in flight"),
]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_cannot_be_served_fails_alone(served, streamed):
  async def fail(bad):
    if streamed:
      await anext(served.engine.stream(bad))
    else:
      await served.engine.generate(bad)

  async def scenario():
    _, other = served.begin([5], 20, request_id="taken")
    await asyncio.sleep(0)
    for change, message in BAD:
      bad = dataclasses.replace(served.request([1, 2], 3), **change)
      with pytest.raises(ValueError, match=message):
        await fail(bad)
    assert served.is_greedy([5], (await other).tokens)

  served.run(scenario())
