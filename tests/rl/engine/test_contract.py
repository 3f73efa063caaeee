"""The contract of decode engines, which every installed engine must keep.

Sampling, ends of requests, new weights; every test runs on each engine.
"""

import asyncio
import dataclasses
import math
import re

import numpy as np
import pytest

from rl.engine import contract
from rl.engine.builtin import engine as builtin_engine
from rl.runtime import checksum
from tests.helpers import engines_under_test, json_letters
from tests.helpers.engines_under_test import CLOSE, LONG, check_shape

pytestmark = pytest.mark.compiled


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


async def test_the_most_probable_ids_are_listed_with_the_logprobs_of_the_policy(
  served,
):
  if not served.engine.capabilities.top_logprobs:
    pytest.skip("lists none")
  mask = {"constraint": json_letters.constraint({"type": "boolean"})}
  kinds = (
    {"top_logprobs": 3},
    {"top_logprobs": 1, "temperature": 0.7, "top_k": 2},
    {"top_logprobs": 20, "temperature": 1.5, "stop_ids": (0,), **mask},
  )
  if not served.engine.capabilities.constraints:
    kinds = kinds[:2]

  async def streamed(request):
    return [delta async for delta in served.engine.stream(request)]

  requests = [served.request([3, i], 7, **kind) for i, kind in enumerate(kinds)]
  answers, plain = await asyncio.gather(
    asyncio.gather(*map(streamed, requests)), served.answer([3, 4], 7)
  )
  assert plain.top is None
  for request, deltas in zip(requests, answers, strict=True):
    done, count = deltas[-1].completion, request.top_logprobs
    tokens = done.tokens.tolist()
    logits = served.logits([*request.tokens.tolist(), *tokens])
    exact = logits[1 : 1 + len(tokens)].astype(np.float64)
    exact /= request.temperature or 1.0
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    best = -np.sort(-exact, -1)[:, :count]
    listed = np.take_along_axis(exact, done.top.ids, -1)
    for values in (best, listed):
      np.testing.assert_allclose(done.top.logprobs, values, atol=CLOSE)
    for name in ("ids", "logprobs"):
      parts = [getattr(delta.top, name) for delta in deltas]
      whole = getattr(done.top, name)
      np.testing.assert_array_equal(np.concatenate(parts), whole)
    # A constraint forces "true" or "false" on a policy that says neither.
    if request.constraint is not None:
      assert len(tokens) in (5, 6)
      assert (done.logprobs < done.top.logprobs[:, 0]).any()


async def test_frequencies_are_the_probabilities(served):
  # Of 600 draws a frequency is off by 3 * sqrt(p (1 - p) / 600) < 0.062, and
  # half of the sum over 24 ids by about 0.08 at most.
  logits = served.logits([5, 6])[-1]
  expected = np.exp(logits - logits.max())
  expected /= expected.sum()
  found = await asyncio.gather(
    *(served.answer([5, 6], 1, temperature=1.0, seed=i) for i in range(600))
  )
  counts = np.bincount([int(done.tokens[0]) for done in found], minlength=24)
  assert abs(counts / 600 - expected).sum() / 2 < 0.12


async def test_a_seed_decides_the_tokens_whatever_else_is_decoded(served):
  if not served.engine.capabilities.seeds:
    pytest.skip("knows no seeds")
  alone = await served.answer([1, 2], 30, temperature=1.0, seed=7)
  others = [
    served.answer(p, 12, temperature=1.0, seed=i)
    for i, p in enumerate(prompts(6))
  ]
  again = served.answer([1, 2], 30, temperature=1.0, seed=7)
  other = served.answer([1, 2], 30, temperature=1.0, seed=-8)
  *_, again, other = await asyncio.gather(*others, again, other)
  assert alone.tokens.tolist() == again.tokens.tolist()
  assert alone.tokens.tolist() != other.tokens.tolist()
  np.testing.assert_allclose(alone.logprobs, again.logprobs, atol=CLOSE)


async def test_sampling_ends_behind_a_stop_id_which_is_kept(served):
  plain = served.greedy([3, 1, 4], 20)
  stop = plain[-1]
  end = plain.index(stop) + 1
  done = await served.answer([3, 1, 4], 20, stop_ids=(23, stop))
  assert done.tokens.tolist() == plain[: min(end, _index(plain, 23))]
  assert done.stop == "stop"


def _index(values: list[int], value: int) -> int:
  return values.index(value) + 1 if value in values else len(values)


async def test_long_answers_come_once(served):
  done = await served.answer([2, 3], LONG)
  check_shape(done, LONG)
  assert done.tokens.tolist() == served.greedy([2, 3], LONG)


async def test_a_conversation_may_be_as_long_as_the_model_allows(served):
  longest = served.engine.capabilities.max_length
  done = await served.answer([1] * (longest - 1), 1)
  check_shape(done, 1)
  done = await served.answer([1], longest - 1)
  check_shape(done, longest - 1)
  assert done.tokens.tolist() == served.greedy([1], longest - 1)


async def test_deltas_add_up_to_the_completion(served):
  request = served.request([4, 5], LONG, temperature=1.0, seed=3)
  deltas = [delta async for delta in served.engine.stream(request)]
  again = await served.answer([4, 5], LONG, temperature=1.0, seed=3)
  done = deltas[-1].completion
  assert done.tokens.tolist() == again.tokens.tolist()
  assert [delta.completion for delta in deltas[:-1]] == [None] * (
    len(deltas) - 1
  )
  assert len(deltas) > 3
  for field in ("tokens", "logprobs", "versions"):
    parts = [getattr(delta, field) for delta in deltas]
    np.testing.assert_array_equal(np.concatenate(parts), getattr(done, field))
  check_shape(done, LONG)


async def test_a_second_turn_encodes_only_what_is_new(served):
  prompt = [9, 8, 7, 6, 5, 4, 3, 2]
  first = await served.answer(prompt, 9, session="talk")
  ids = [*prompt, *first.tokens.tolist(), 11, 12]
  second = await served.answer(ids, 5, session="talk")
  # The last sampled id was never fed, and pages hold 4 ids at most.
  assert 17 - 1 - 4 <= second.cached_tokens <= 16
  assert second.tokens.tolist() == served.greedy(ids, 5)


async def test_aborting_one_leaves_the_others(served):
  request, task = served.begin([1, 2, 3], LONG)
  other = served.begin([4, 5], 20)[1]
  await served.first_token(request)
  served.engine.abort(request.request_id)
  done = await task
  other = await other
  assert done.stop == "abort"
  assert 0 < len(done.tokens) < LONG
  check_shape(done, len(done.tokens))
  assert (
    done.tokens.tolist() == served.greedy([1, 2, 3], LONG)[: len(done.tokens)]
  )
  assert other.tokens.tolist() == served.greedy([4, 5], 20)


async def test_aborting_one_that_waits_leaves_those_that_run(served):
  running = [served.begin([i], 30)[1] for i in range(4)]
  await served.begun(4)
  request, task = served.begin([9], 30)
  await asyncio.sleep(0)
  served.engine.abort(request.request_id)
  waiting = await task
  done = await asyncio.gather(*running)
  assert waiting.stop == "abort"
  check_shape(waiting, 0)
  for i, one in enumerate(done):
    assert one.tokens.tolist() == served.greedy([i], 30)


async def test_every_token_that_was_sampled_is_in_an_answer_aborted_ones_too(
  served,
):
  before = served.engine.stats().sampled_tokens
  begun = [served.begin([i, 2], LONG) for i in range(7)]
  for request, _ in begun[:3]:
    await served.first_token(request)
    served.engine.abort(request.request_id)
  await served.begun(10)
  served.engine.abort(None)
  ended = [await task for _, task in begun]
  sampled = served.engine.stats().sampled_tokens - before
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


async def test_a_request_any_started_with_its_first_token(served):
  await served.engine.pause()
  request, task = served.begin([1, 2, 3], LONG)
  await asyncio.sleep(0)
  before = served.engine.begun(request.request_id)
  served.engine.resume()
  version = await served.first_token(request)
  served.engine.abort(request.request_id)
  with pytest.raises(ValueError, match="is not in flight"):
    served.engine.begun(request.request_id)
  done = await task
  assert (before, version) == (None, done.versions[0])


async def test_new_weights_do_not_change_what_a_request_any_started_with(
  served,
):
  request, task = served.begin([1, 2, 3], LONG)
  old = await served.first_token(request)
  await served.engine.pause()
  late, waiting = served.begin([5], LONG)
  new = await served.publish("recompute")
  held = served.engine.begun(request.request_id)
  served.engine.resume()
  begun = await served.first_token(late)
  ends = await waiting, await task
  (waited, went_on) = [done.versions.tolist() for done in ends]
  assert (held, begun) == (old, new)
  assert set(waited) == {new}
  assert (went_on[0], went_on[-1]) == (old, new)


async def test_the_first_token_comes_between_acceptance_and_the_last(served):
  asked = await asyncio.gather(
    *(served.answer(p, LONG) for p in prompts(9)), served.answer([1], 1)
  )
  await served.engine.pause()
  request, task = served.begin([1, 2, 3], LONG)
  await asyncio.sleep(0)
  served.engine.abort(request.request_id)
  served.engine.resume()
  none = await task
  for done in asked:
    assert 0 <= done.queue_s <= done.first_token_s <= done.decode_s
    assert done.first_token_s > 0
  # There are fewer slots: the last to get one waited for a whole answer.
  assert max(d.queue_s for d in asked) > min(d.first_token_s for d in asked)
  # The first of 60 tokens comes dispatches before the last.
  assert all(done.first_token_s < done.decode_s for done in asked[:-1])
  assert (len(none.tokens), none.first_token_s) == (0, 0.0)


async def test_aborting_all_ends_all(served):
  tasks = [served.begin([i, 3], LONG)[1] for i in range(9)]
  await served.begun(4)
  served.engine.abort(None)
  ended = await asyncio.gather(*tasks)
  served.engine.abort(None)
  after = await served.answer([1, 2], 5)
  assert {done.stop for done in ended} == {"abort"}
  assert after.tokens.tolist() == served.greedy([1, 2], 5)


async def test_cancelling_aborts(served):
  _, task = served.begin([1, 2, 3], LONG)
  await served.begun(2)
  task.cancel()
  with pytest.raises(asyncio.CancelledError):
    await task
  request = served.request([3, 2], 20)
  stream = served.engine.stream(request)
  await anext(stream)
  await stream.aclose()
  with pytest.raises(StopAsyncIteration):
    await anext(stream)
  # Its name is free again.
  stats = served.engine.stats()
  after = await served.engine.generate(request)
  assert stats.running == stats.waiting == 0
  assert after.tokens.tolist() == served.greedy([3, 2], 20)


CONSTRAINT = json_letters.constraint({"type": "boolean"})
ABLE = contract.Capabilities(
  in_flight=frozenset(),
  max_length=32,
  vocab_size=24,
  max_stop_ids=4,
  seeds=True,
  bias=True,
  constraints=True,
  experts=False,
  top_logprobs=5,
)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tokens": np.zeros(0, np.int32)}, "no tokens; send at least one"),
    ({"tokens": np.array([1, 24], np.int32)}, r"outside \[0, 24\)"),
    ({"tokens": np.array([-1], np.int32)}, r"outside \[0, 24\)"),
    ({"tokens": np.array([1])}, r"tokens must be int32\[N\]"),
    # 30 + 3 = 33 is one more than max_length.
    ({"tokens": np.ones(30, np.int32)}, "do not fit model.max_length=32"),
    ({"max_tokens": 0}, "max_tokens=0 is below 1"),
    ({"max_tokens": 1.5}, "must be integers, not 1.5"),
    ({"temperature": math.nan}, "temperature=nan must be 0 or in"),
    ({"temperature": -1.0}, "temperature=-1.0 must be 0 or in"),
    ({"temperature": math.inf}, "temperature=inf must be 0 or in"),
    ({"temperature": 1e-40}, "temperature=1e-40 must be 0 or in"),
    ({"temperature": "hot"}, "must be numbers, not 'hot'"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_logprobs": 6}, r"top_logprobs=6 must be in \[0, 5\]"),
    ({"top_logprobs": -1}, "top_logprobs=-1 must be in"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"min_p": math.nan}, "min_p=nan"),
    ({"stop_ids": (1, 2, 3, 4, 5)}, "5 stop ids, at most 4"),
    ({"stop_ids": (24,)}, r"stop_ids=\(24,\) must be in \[0, 24\)"),
    ({"seed": 2**31}, "seed=2147483648 needs more than 32 bits"),
    ({"bias": np.zeros(23, np.float32)}, "use one value for each of 24 ids"),
    ({"bias": np.zeros(24)}, r"bias must be float32\[V\]"),
    ({"bias": np.full(24, -np.inf, np.float32)}, "forbids every id"),
    ({"bias": np.full(24, np.nan, np.float32)}, r"at most 1e\+06, or -inf"),
    ({"experts": True}, "experts are not recorded"),
    (
      {"bias": np.zeros(24, np.float32), "constraint": CONSTRAINT},
      "bias may forbid what its constraint demands",
    ),
  ],
  # Not of values, which may show an address.
  ids=lambda x: "+".join(x) if isinstance(x, dict) else x,
)
def test_a_request_beyond_the_capabilities_is_refused(changes, message):
  request = contract.DecodeRequest(
    request_id="one",
    session="one",
    tokens=np.array([1, 2], np.int32),
    max_tokens=3,
  )
  contract.check_request(request, ABLE)
  with pytest.raises(ValueError, match=f"request one: .*{message}"):
    contract.check_request(dataclasses.replace(request, **changes), ABLE)


def test_what_the_engine_has_not_is_refused():
  request = contract.DecodeRequest(
    request_id="one",
    session="one",
    tokens=np.array([1, 2], np.int32),
    max_tokens=3,
  )
  able = dataclasses.replace(ABLE, seeds=False, bias=False, constraints=False)
  contract.check_request(request, able)
  bias = np.zeros(24, np.float32)
  for changes in ({"seed": 1}, {"bias": bias}, {"constraint": CONSTRAINT}):
    with pytest.raises(ValueError, match="this engine"):
      contract.check_request(dataclasses.replace(request, **changes), able)


async def test_a_refused_request_fails_alone(served):
  refused = [{"max_tokens": 0}, {"stop_ids": (24,)}, {"request_id": "first"}]

  _, first = served.begin([1, 2], 12, request_id="first")
  await asyncio.sleep(0)
  for changes in refused:
    bad = dataclasses.replace(served.request([1], 10), **changes)
    with pytest.raises(ValueError, match="request"):
      await served.engine.generate(bad)
    with pytest.raises(ValueError, match="request"):
      await anext(served.engine.stream(bad))
  done = await first
  assert done.tokens.tolist() == served.greedy([1, 2], 12)


async def test_aborting_what_is_not_in_flight_is_refused(served):
  ended = served.request([9], 1)
  await served.engine.generate(ended)
  for name in ("no one", ended.request_id):
    with pytest.raises(ValueError, match=f"{name} is not in flight"):
      served.engine.abort(name)


async def test_a_flushed_cache_remembers_nothing(served):
  prompt = [5, 5, 5, 5, 6, 6, 6, 6, 7]
  await served.answer(prompt, 2)
  known = await served.answer(prompt, 2)
  await served.engine.flush_cache()
  forgotten = await served.answer(prompt, 2)
  assert known.cached_tokens > 0
  assert forgotten.cached_tokens == 0
  assert forgotten.tokens.tolist() == known.tokens.tolist()


async def _updated(served, in_flight):
  """Publishes while four answers are sampled and three requests wait."""
  tasks = [served.begin([i, 2, 3], LONG)[1] for i in range(7)]
  await served.begun(8)
  await served.engine.pause()  # Lest an answer ends before the update.
  old = served.version
  new = await served.publish(in_flight)
  served.engine.resume()
  return await asyncio.gather(*tasks), old, new


def cut_of(done, old, new):
  """Asserts that old versions come before new ones; returns their number."""
  cut = int((done.versions == old).sum())
  assert 0 < cut < LONG
  assert done.versions.tolist() == [old] * cut + [new] * (LONG - cut)
  return cut


async def test_recomputed_answers_go_on_under_the_new_weights(served):
  (done, *_), old, new = await _updated(served, "recompute")
  check_shape(done, LONG)
  cut, tokens = cut_of(done, old, new), done.tokens.tolist()
  so_far = [0, 2, 3, *tokens[:cut]]
  assert tokens[:cut] == served.greedy([0, 2, 3], cut, old)
  assert tokens[cut:] == served.greedy(so_far, LONG - cut, new)
  expected = served.logprobs(so_far, tokens[cut:], 0.0)
  np.testing.assert_allclose(done.logprobs[cut:], expected, atol=CLOSE)
  assert done.oldest_kv in (new, -1)


def test_weights_may_come_while_others_are_decoded(served):
  starts = [[i, 2 * i, 5] for i in range(6)]

  async def scenario():
    tasks = []
    for i in range(0, 6, 2):  # Some may end while the weights are on their way.
      tasks += [served.begin(prompt, LONG)[1] for prompt in starts[i : i + 2]]
      await served.begun(8)
      await served.publish("recompute")
    return await asyncio.gather(*tasks)

  versions = set()
  for prompt, done in zip(starts, served.run(scenario()), strict=True):
    check_shape(done, LONG)
    tokens = done.tokens.tolist()
    for version in np.unique(done.versions).tolist():
      start, end = np.searchsorted(done.versions, [version, version + 1])
      so_far = [*prompt, *tokens[:start]]
      expected = served.greedy(so_far, end - start, version)
      assert tokens[start:end] == expected
      versions.add(version)
  assert len(versions) > 1


async def test_a_drain_ends_running_answers_and_keeps_the_queue(served):
  answers, old, new = await _updated(served, "drain")
  versions = [set(done.versions.tolist()) for done in answers]
  assert versions == [{old}] * 4 + [{new}] * 3
  for i, done in enumerate(answers):
    (version,) = versions[i]
    assert done.tokens.tolist() == served.greedy([i, 2, 3], LONG, version)
  after = await served.answer([0, 2, 3], 9)
  assert after.tokens.tolist() == served.greedy([0, 2, 3], 9)
  assert after.cached_tokens == 0
  assert after.oldest_kv == new


async def test_aborted_answers_keep_their_tokens_and_the_queue_goes_on(served):
  answers, old, new = await _updated(served, "abort")
  assert [done.stop for done in answers] == ["abort"] * 4 + ["length"] * 3
  for i, done in enumerate(answers):
    version = old if i < 4 else new
    assert set(done.versions.tolist()) <= {version}
    expected = served.greedy([i, 2, 3], len(done.tokens), version)
    assert done.tokens.tolist() == expected
  assert all(len(done.tokens) < LONG for done in answers[:4])
  assert any(len(done.tokens) for done in answers[:4])


async def test_kept_keys_and_values_show_in_versions(served):
  (done, *_), old, new = await _updated(served, "keep_kv")
  check_shape(done, LONG)
  cut, tokens = cut_of(done, old, new), done.tokens.tolist()
  # sglang-jax does not always know.
  built_in = isinstance(served.engine, builtin_engine.BuiltinEngine)
  assert done.oldest_kv in ([old] if built_in else [old, -1])
  assert np.unique(done.versions).tolist() == [old, new]
  assert tokens[:cut] == served.greedy([0, 2, 3], cut, old)
  # What was kept matters: these are not the log-probabilities of either.
  expected = served.logprobs([0, 2, 3, *tokens[:cut]], tokens[cut:], 0.0)
  assert abs(done.logprobs[cut:] - expected).max() > 10 * CLOSE
  # A prefix of sglang-jax may be from before, but not in secret.
  after = await served.answer([0, 2, 3], 9)
  if built_in or after.oldest_kv == new:
    assert after.oldest_kv == new
    assert after.tokens.tolist() == served.greedy([0, 2, 3], 9)
  else:
    assert after.cached_tokens > 0
  # The next recomputation leaves nothing old.
  newest = await served.publish("recompute")
  after = await served.answer([0, 2, 3], 9)
  assert (after.cached_tokens, after.oldest_kv) == (0, newest)
  assert after.tokens.tolist() == served.greedy([0, 2, 3], 9)


async def test_wrong_weights_are_refused_by_name_and_the_old_ones_serve(served):
  old = served.version
  new, good = old + 1, served.placed(old + 1)
  norm = good["final_norm"]
  missing = {name: leaf for name, leaf in good.items() if name != "embed"}
  misshaped = good | {"final_norm": norm[:-1]}
  shapes = re.escape("((32,), ") + ".*, got " + re.escape("((31,), ")
  cases = [
    (old, good, "recompute", f"version {old} is not above the served {old}"),
    (old - 1, good, "keep_kv", f"{old - 1} is not above the served {old}"),
    (new, missing, "recompute", "'embed'.*, got None"),
    (new, good | {"more": norm}, "abort", "'more'.*: expected None, got"),
    (new, misshaped, "drain", "'final_norm'.*: expected " + shapes),
    (new, good, "never", "in_flight='never'.*; use .*abort"),
  ]

  request, running = served.begin([1, 2, 3], LONG)
  await served.first_token(request)
  await served.engine.pause()  # Lest it ends before the last refusal.
  for version, params, in_flight, words in cases:
    with pytest.raises(ValueError, match=words):
      await served.engine.update_weights(version, params, in_flight)
  served.engine.resume()
  done = await running
  after = await served.answer([1, 2], 6)
  assert served.version == old
  assert set(done.versions.tolist()) == {old}
  assert done.tokens.tolist() == served.greedy([1, 2, 3], LONG)
  assert after.tokens.tolist() == served.greedy([1, 2], 6)


async def test_a_cancelled_update_leaves_the_old_weights(served):
  version = served.version
  _, running = served.begin([1, 2, 3], LONG)
  await served.begun(3)
  update = asyncio.create_task(served.publish("drain"))
  await served.begun(3)
  update.cancel()
  with pytest.raises(asyncio.CancelledError):
    await update
  done = await running
  after = await served.answer([3], 4)
  assert served.version == version
  assert done.tokens.tolist() == served.greedy([1, 2, 3], LONG)
  assert after.tokens.tolist() == served.greedy([3], 4)


async def test_the_checksum_is_that_of_the_weights(served):
  version, number = await served.engine.checksum()
  assert (version, number) == (
    served.version,
    checksum.of(engines_under_test.weights(version % 5)),
  )


@pytest.mark.parametrize(
  "in_flight", ["drain", "abort", "recompute", "keep_kv"]
)
async def test_a_paused_engine_takes_weights_and_stays_paused(
  served, in_flight
):
  _, task = served.begin([2, 3, 4], LONG)
  await served.begun(5)
  await served.engine.pause()
  _, late = served.begin([5], 5)
  new = await served.publish(in_flight)
  before = served.engine.stats().sampled_tokens
  await asyncio.sleep(0.1)
  held = served.engine.stats().sampled_tokens - before
  waits = not late.done()
  served.engine.resume()
  done, late = await asyncio.gather(task, late)
  await served.engine.flush_cache()
  assert held == 0
  assert waits
  assert done.stop == ("abort" if in_flight == "abort" else "length")
  check_shape(done, len(done.tokens))
  assert set(late.versions.tolist()) == {new}
  assert late.tokens.tolist() == served.greedy([5], 5)


async def test_a_pause_holds_everything_until_the_resume(served):
  _, task = served.begin([6, 7], LONG)
  await served.begun(5)
  await served.engine.pause()
  before = served.engine.stats().sampled_tokens
  _, late = served.begin([8], 5)
  await asyncio.sleep(0.1)
  held = served.engine.stats().sampled_tokens - before
  assert served.engine.stats().waiting == 1
  served.engine.resume()
  done = await task
  late = await late
  assert held == 0
  assert done.tokens.tolist() == served.greedy([6, 7], LONG)
  assert late.tokens.tolist() == served.greedy([8], 5)


async def test_an_abort_while_paused_answers_at_once(served):
  request, task = served.begin([3], LONG)
  await served.begun(1)
  await served.engine.pause()
  served.engine.abort(request.request_id)
  done = await task
  served.engine.resume()
  assert done.stop == "abort"
  assert 0 < len(done.tokens) < LONG


async def test_closing_ends_what_is_in_flight_and_refuses_what_follows(
  breakable,
):
  tasks = [breakable.begin([i], LONG)[1] for i in range(6)]
  await breakable.begun(3)
  await breakable.engine.close()
  later = (
    breakable.answer([1], 1),
    breakable.engine.pause(),
    breakable.engine.checksum(),
    breakable.engine.flush_cache(),
    breakable.engine.update_weights(1, breakable.placed(1)),
  )
  ended = await asyncio.gather(*tasks, *later, return_exceptions=True)
  assert [type(one) for one in ended] == [contract.EngineClosed] * 11
  await breakable.engine.close()
