"""The built-in engine: what is shared, waited for, swapped and given back."""

import asyncio
import collections
import contextlib
import dataclasses

import jax
import jsonschema
import numpy as np
import pytest

from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.runtime import mesh_thread, trace
from tests.helpers import engine_load, json_letters, machine_speed, tiny_engine

pytestmark = pytest.mark.compiled


def some_ids(rng, low, high):
  return rng.integers(24, size=rng.integers(low, high)).tolist()


def prefilled(served):
  return served.engine.stats().prefilled_tokens


# Prefixes, pages and rows.


async def test_a_session_that_changes_its_past_is_encoded_from_there(served):
  await served.engine.flush_cache()
  await served.answer([1, 2, 3, 4, 5], 3)
  for ids in ([1, 2, 9, 4, 5, 6], [1, 2, 9]):
    changed = await served.answer(ids, 3)
    # [1, 2] stay; of a prompt that is all there the last id is fed again.
    assert changed.cached_tokens == 2
    assert served.is_greedy(ids, changed.tokens)


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


async def test_requests_of_one_session_may_overlap(served):
  session = served.name()
  begun = [served.begin([5, i], 6, session=session) for i in range(3)]
  for request, task in begun:
    assert served.is_greedy(request.tokens, (await task).tokens)


async def test_more_sessions_than_slots_are_served_by_priority(served):
  order = []

  async def one(priority):
    await served.answer([1, 2], 6, priority=(priority,))
    order.append(priority)

  await asyncio.gather(*(one(p) for p in reversed(range(12))))
  # Four rows at a time: each later wave has higher numbers.
  waves = [sorted(order[i : i + 4]) for i in range(0, 12, 4)]
  assert waves == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


async def test_least_recently_used_prefixes_make_room(dense):
  # 24 pages of 4 positions: of these conversations three.
  rng = np.random.default_rng(4)
  first, *others = [some_ids(rng, 31, 32) for _ in range(5)]

  before = dense.engine.stats().preemptions
  await dense.engine.flush_cache()
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
  await dense.engine.flush_cache()
  stats = dense.engine.stats()
  assert stats.free_pages == stats.pages == 24


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
async def test_a_group_that_fills_all_pages_outlives_new_weights(pressed, mode):
  prompt = some_ids(np.random.default_rng(8), 15, 16)

  before = pressed.engine.stats()
  # 3 of 10 pages are shared, and each needs 5 of its own.
  begun = [
    pressed.begin(prompt, 17, temperature=1.0, seed=seed) for seed in range(4)
  ]
  for _ in range(3):
    await pressed.begun(6)
    await pressed.publish(mode)
    pressed.check()
  for _, task in begun:
    answer = await task
    assert (answer.stop, len(answer.tokens)) == ("length", 17)
  assert pressed.engine.stats().preemptions > before.preemptions


# Sampling.


async def test_a_bias_forbids_and_more_of_them_than_rows_wait(served):
  begun = []
  for i in range(8):
    bias = np.full(24, -np.inf, np.float32)
    bias[[i, i + 8, i + 16]] = 0
    begun.append(served.begin([1, 2], 9, bias=bias, temperature=2.0, seed=i))
  plain = served.begin([1, 2], 9, priority=(1,))
  for i, (_, task) in enumerate(begun):
    assert {token % 8 for token in (await task).tokens.tolist()} == {i}
  assert served.is_greedy([1, 2], (await plain[1]).tokens)


async def test_constrained_answers_fit_their_schemas_and_keep_plain_logprobs(
  served,
):
  alone = await served.answer([1, 2], 28, temperature=1.0, seed=5)
  begun, kinds = [], ({}, {"top_k": 2}, {"temperature": 0.0})
  for seed, kind in enumerate(kinds * 3):
    schema = json_letters.SCHEMAS[seed // 3]
    own = {"temperature": 1.5, "stop_ids": (0,), "seed": seed, **kind}
    own["constraint"] = json_letters.constraint(schema)
    begun.append((schema, *served.begin([3, seed], 28, **own)))
  beside = served.answer([1, 2], 28, temperature=1.0, seed=5)
  for schema, request, task in begun:
    done = await task
    jsonschema.validate(json_letters.value(done.tokens), schema)
    args = [3, request.seed], done.tokens.tolist(), request.temperature
    expected = served.logprobs(*args)
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
  # A request beside them samples what it samples alone.
  assert (await beside).tokens.tolist() == alone.tokens.tolist()
  served.check()


async def test_a_constrained_answer_is_the_one_that_masks_alone_would_give(
  served,
):
  schema, begun = json_letters.SCHEMAS[0], []
  for seed in range(12):
    own = {"seed": seed, "temperature": 1.5, "stop_ids": (0,)}
    own["constraint"] = json_letters.constraint(schema)
    # A filter that all ids pass makes it choose every id under a mask.
    for min_p in (0.0, 1e-30):
      begun.append(served.begin([seed, 5], 28, min_p=min_p, **own)[1])
  answers = [(await task).tokens.tolist() for task in begun]
  assert answers[::2] == answers[1::2]
  assert len({tuple(answer) for answer in answers}) > 3


async def test_a_greedy_constrained_answer_takes_the_best_of_what_is_allowed(
  served,
):
  constraint = json_letters.constraint(json_letters.SCHEMAS[0])
  given = {"constraint": constraint, "stop_ids": (0,)}
  done = await served.answer([7, 7], 28, **given)
  matcher, ids = constraint.deep_copy(), [7, 7]
  for token in done.tokens.tolist():
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(bits, count=24, bitorder="little") > 0
    logits = np.where(allowed, served.logits(ids)[-1], -np.inf)
    assert token == logits.argmax()
    matcher.consume_token(token)
    ids.append(token)


@pytest.mark.parametrize("engine", ["served", "pressed"])
def test_a_constraint_outlives_pauses_new_weights_and_lost_pages(
  engine, request
):
  served = request.getfixturevalue(engine)

  async def scenario():
    schema, begun = json_letters.SCHEMAS[0], []
    for seed in range(8):
      own = {"temperature": 1.0, "seed": seed, "stop_ids": (0,)}
      own["constraint"] = json_letters.constraint(schema)
      begun.append(served.begin([4, 4, 4, 4, 4, seed], 24, **own))
    for mode in ("recompute", "keep_kv"):
      await served.begun(4)
      await served.engine.pause()
      served.engine.resume()
      await served.publish(mode)
    # These leave their rows of the bias table to others.
    served.engine.abort(begun[6][0].request_id)
    begun[7][1].cancel()
    answers = [await task for _, task in begun[:6]]
    for done in answers:
      jsonschema.validate(json_letters.value(done.tokens), schema)
    assert max(len(set(done.versions)) for done in answers) > 1

  served.run(scenario())
  served.check()


class Failing:
  """Allows every id, and fails after two."""

  def __init__(self):
    self.left = 2

  def deep_copy(self):
    return Failing()

  def compute_bitmask(self):
    return b"\xff" * 4

  def try_consume_tokens(self, tokens):
    self.left -= 1
    return len(tokens) if self.left > 0 else 0

  def is_accepting(self):
    return False

  def get_error(self):
    return "" if self.left else "too complex"


@pytest.mark.parametrize("filters", [{}, {"top_k": 9}], ids=["free", "masked"])
async def test_stop_ids_inside_a_constraint_stop_and_its_end_does_without(
  served, filters
):
  booleans = {"type": "boolean"}
  constraint = json_letters.constraint(
    {"type": "array", "items": booleans, "minItems": 2, "maxItems": 2}
  )
  comma = 1 + json_letters.LETTERS.index(",")

  async def answers(stop_ids):
    return [
      await served.answer(
        [7, 7],
        20,
        constraint=constraint,
        stop_ids=stop_ids,
        temperature=1.0,
        seed=seed,
        **filters,
      )
      for seed in range(4)
    ]

  whole = await answers((0,))
  for done, same in zip(whole, (await answers(())), strict=True):
    assert done.stop == same.stop == "stop"
    assert len(json_letters.value(same.tokens)) == 2
    assert same.tokens.tolist() == done.tokens.tolist()
  for done, cut in zip(whole, (await answers((0, comma))), strict=True):
    tokens = done.tokens.tolist()
    assert cut.stop == "stop"
    assert cut.tokens.tolist() == tokens[: tokens.index(comma) + 1]


async def test_a_constraint_that_fails_ends_its_own_request_only(served):
  beside = served.begin([1, 2], 9)
  with pytest.raises(ValueError, match="its constraint failed: too complex"):
    await served.answer([1, 3], 9, constraint=Failing())
  assert served.is_greedy([1, 2], (await beside[1]).tokens)
  served.check()


async def sampled(served, requests, order=None, gap_s=0.0):
  """The answers to requests that arrive in an order; order of the requests."""
  tasks = {}
  for at in range(len(requests)) if order is None else order:
    own = dataclasses.replace(requests[at], request_id=served.name())
    tasks[at] = asyncio.create_task(served.engine.generate(own))
    await asyncio.sleep(gap_s)
  return [await tasks[at] for at in range(len(requests))]


def test_the_same_seeds_give_the_same_tokens_under_any_schedule(
  served, pressed
):
  while (pressed.version - served.version) % 5:
    pressed.run(pressed.publish("recompute"))
  requests = tiny_engine.mixture(served, 21)
  first = served.run(sampled(served, requests))
  alone = [served.run(sampled(served, [one]))[0] for one in requests[::5]]
  order = np.random.default_rng(5).permutation(21).tolist()
  slow = served.run(sampled(served, requests, order, gap_s=0.002))
  # Other rows, chunks and steps of a dispatch; and pages run out.
  before = pressed.engine.stats().preemptions
  other = pressed.run(sampled(pressed, requests, order[::-1]))
  assert pressed.engine.stats().preemptions > before
  for answers, expected in (
    (alone, first[::5]),
    (slow, first),
    (other, first),
  ):
    for answer, same in zip(answers, expected, strict=True):
      assert answer.tokens.tolist() == same.tokens.tolist()
      np.testing.assert_allclose(answer.logprobs, same.logprobs, atol=1e-4)


# Aborts and cancellation.


async def test_an_abort_of_all_requests_before_a_dispatch_is_harmless(served):
  # One of two sessions that idle makes the engine delay its dispatch.
  await asyncio.gather(served.answer([8], 1), served.answer([9], 1))
  request, task = served.begin([3], 20)
  await served.begun(1)
  served.engine.abort(request.request_id)
  await asyncio.sleep(0.02)
  assert (await task).stop == "abort"
  assert (await served.answer([3], 2)).stop == "length"


@pytest.mark.parametrize("position", ["running", "waiting"])
async def test_a_cancelled_request_gives_back_its_name_and_its_row(
  served, position
):
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


# Dispatches that queue up behind one on the device.


async def test_the_next_dispatch_is_planned_while_one_runs(queueing):
  begun = [queueing.begin([i + 1], 20) for i in range(4)]
  async with queueing.held(2):
    for _ in range(100):
      await asyncio.sleep(0)
    # And no third one.
    now = queueing.engine.stats()
    assert (now.dispatches, now.sampled_tokens) == (2, 0)
  for request, task in begun:
    assert queueing.is_greedy(request.tokens, (await task).tokens)


@pytest.mark.parametrize("stopping", [1, 2, 3])
async def test_rows_go_on_where_the_dispatch_before_stopped(queueing, stopping):
  # The first id of an answer stops some: with half of them the dispatch
  # ends, though the next one was planned as if all had gone on.
  begun = []
  for i in range(4):
    (first,) = queueing.greedy([i + 1], 1)
    stop_ids = (first,) if i < stopping else ()
    begun.append(queueing.begin([i + 1], 20, stop_ids=stop_ids))
  async with queueing.held(2):
    # New requests take the rows and pages of the stopped ones.
    begun += [queueing.begin([i + 9], 20) for i in range(4)]
  for i, (request, task) in enumerate(begun):
    answer = await task
    assert queueing.is_greedy(request.tokens, answer.tokens)
    assert len(answer.tokens) == (1 if i < stopping else 20)
  queueing.check()


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_rows_and_pages_of_the_aborted_are_used_during_their_dispatch(
  queueing, how
):
  await queueing.engine.flush_cache()
  prompts = [[i, *range(14)] for i in range(4)]
  begun = [queueing.begin(ids, 17) for ids in prompts]
  async with queueing.held(2):
    for request, task in begun[:3]:
      if how == "abort":
        queueing.engine.abort(request.request_id)
      else:
        task.cancel()
    # 33 pages: the new ones need those of the old ones.
    later = [queueing.begin([i, *range(20)], 11) for i in range(9, 13)]
    again = [queueing.begin(ids, 17) for ids in prompts[:3]]
  for request, task in [begun[3], *later, *again]:
    answer = await task
    assert answer.stop == "length"
    assert queueing.is_greedy(request.tokens, answer.tokens)
  for _, task in begun[:3]:
    if how == "cancel":
      with pytest.raises(asyncio.CancelledError):
        await task
    else:
      assert len((await task).tokens) == 0
  queueing.check()


# New weights.


async def test_new_weights_in_the_middle_of_a_prompt_encode_all_of_it_again(
  served,
):
  _, early = served.begin([4, 5], 20)
  await served.begun(3)
  # Chunks are of 6 ids.
  prompt = list(range(19))
  _, late = served.begin(prompt, 8)
  old = served.version
  async with served.held(1):
    publishing = asyncio.create_task(served.publish("recompute"))
  await publishing
  await early
  done = await late
  tokens, kept = done.tokens.tolist(), done.versions.tolist().count(old)
  assert tokens[:kept] == served.greedy(prompt, kept, version=old)
  assert done.versions.tolist() == [old] * kept + [old + 1] * (8 - kept)
  assert served.is_greedy([*prompt, *tokens[:kept]], tokens[kept:])
  assert done.oldest_kv == old + 1


async def test_requests_after_a_swap_find_nothing_of_those_that_keep_theirs(
  served,
):
  prompt = list(range(10))

  await served.engine.flush_cache()
  free, running = served.engine.stats().free_pages, []
  # Each is still decoded when the next version comes.
  for _ in range(3):
    request, task = served.begin(prompt, 16)
    await served.first_token(request)
    running.append((request, task, served.version))
    await served.publish("keep_kv")
    done = await served.answer(prompt, 3)
    assert (done.cached_tokens, done.oldest_kv) == (0, served.version)
    assert served.is_greedy(prompt, done.tokens)
  for _, task, version in running:
    done = await task
    assert done.oldest_kv == done.versions[0] == version
    assert done.versions[-1] > version
  # Nor does the next turn of a session find its own.
  request, task, _ = running[-1]
  turn = [*prompt, *task.result().tokens.tolist(), 1]
  later = await served.answer(turn, 3, session=request.session)
  assert later.oldest_kv == served.version
  assert served.is_greedy(turn, later.tokens)
  await served.engine.flush_cache()
  assert served.engine.stats().free_pages == free


async def test_weights_that_are_not_finite_leave_nothing_behind(dense):
  prompts = [[i, 5, *range(20)] for i in range(8)]

  bad = jax.tree.map(lambda x: x * np.nan, dense.placed(dense.version))
  await dense.engine.update_weights(dense.version + 1, bad)
  # More than all pages hold.
  for ids in prompts:
    done = await dense.answer(ids, 8)
    assert np.isnan(done.logprobs).all()
  await dense.publish("recompute")
  for ids in prompts:
    done = await dense.answer(ids, 8)
    assert np.isfinite(done.logprobs).all()
    assert dense.is_greedy(ids, done.tokens)


async def test_a_drain_finishes_preempted_requests_and_admits_no_new_ones(
  pressed,
):
  before = pressed.engine.stats()
  begun = [pressed.begin([i, *range(9)], 21) for i in range(6)]
  await pressed.until(lambda now: now.preemptions > before.preemptions)
  run = [one.request for one in pressed.engine._queue.running]
  draining = asyncio.create_task(pressed.publish("drain"))
  await asyncio.sleep(0)
  late = pressed.begin([7], 3, priority=(-1,))
  await draining
  assert pressed.version == before.version + 1
  for request, task in begun:
    answer = await task
    assert pressed.is_greedy(
      request.tokens, answer.tokens, version=answer.oldest_kv
    )
    assert len(set(answer.versions)) == 1
    if request in run:
      assert answer.oldest_kv == before.version
  assert set((await late[1]).versions) == {before.version + 1}


async def test_a_cancelled_update_and_one_that_waits_for_it_change_nothing(
  served,
):
  old = served.version
  for mode in ("recompute", "keep_kv", "abort"):
    _, task = served.begin([2, 4], 20)
    await served.begun(1)
    async with served.held(1):
      publishing = asyncio.create_task(served.publish(mode))
      queued = asyncio.create_task(served.publish("recompute"))
      await asyncio.sleep(0.005)
      assert not publishing.done()
      for update in (queued, publishing):
        update.cancel()
      await asyncio.wait([publishing, queued])
      assert publishing.cancelled()
      assert queued.cancelled()
    answer = await task
    assert (answer.stop, set(answer.versions)) == ("length", {old})
    assert served.is_greedy([2, 4], answer.tokens)
  await served.publish("recompute")
  assert served.version == old + 1


async def test_a_pause_during_an_update_holds_what_comes_after_it(served):
  _, task = served.begin([2, 4], 25)
  await served.begun(1)
  async with served.held(1):
    publishing = asyncio.create_task(served.publish("recompute"))
    pausing = asyncio.create_task(served.engine.pause())
    await asyncio.sleep(0.005)
    assert not publishing.done()
    assert not pausing.done()
  await asyncio.gather(publishing, pausing)
  before = served.engine.stats().dispatches
  await asyncio.sleep(0.02)
  assert served.engine.stats().dispatches == before
  served.engine.resume()
  assert (await task).stop == "length"


# Load.


async def episode(served, seed, check):
  """Three turns of a session, of which some are stopped in the middle."""
  rng = np.random.default_rng(seed)
  # Sessions of a group of four have the same prompt.
  session = served.name()
  ids = some_ids(np.random.default_rng(seed // 4), 1, 16)
  for _ in range(3):
    await asyncio.sleep(rng.choice([0, 0, 0.01]))
    count = int(rng.integers(1, 33 - len(ids)))
    request, answer = served.begin(ids, count, session=session)
    fate = rng.choice(["whole", "whole", "whole", "abort", "cancel"])
    await asyncio.sleep(0 if fate == "whole" else rng.choice([0, 0.004, 0.01]))
    if fate == "cancel":
      answer.cancel()
    elif fate == "abort" and not answer.done():
      with contextlib.suppress(ValueError):  # It may have ended just now.
        served.engine.abort(request.request_id)
    try:
      done = await answer
    except asyncio.CancelledError:
      check(fate, request, None)
      continue
    check(fate, request, done)
    ids = [*ids, *done.tokens.tolist(), *some_ids(rng, 1, 5)]
    if len(ids) > 27:
      break


@pytest.mark.parametrize("engine", ["served", "pressed"])
def test_200_greedy_answers_are_those_of_the_plain_model(engine, request):
  served = request.getfixturevalue(engine)
  before = served.engine.stats()
  seen = dict.fromkeys(("asked", "whole", "cached", "stopped"), 0)

  def check(fate, request, done):
    seen["asked"] += 1
    if done is None:
      return
    assert len(done.logprobs) == len(done.versions) == len(done.tokens)
    assert done.stop == "length" or fate == "abort"
    if done.stop == "length":
      assert len(done.tokens) == request.max_tokens
    if len(done.tokens):
      assert served.is_greedy(request.tokens, done.tokens)
      assert set(done.versions) == {done.oldest_kv} == {served.version}
    seen["whole"] += done.stop == "length"
    seen["cached"] += done.cached_tokens > 0
    seen["stopped"] += done.stop == "abort"

  async def load():
    # At times more sessions than rows, at times as many.
    for start in range(0, 120, 24):
      seeds = range(start, start + 20), range(start + 20, start + 24)
      for some in seeds:
        await asyncio.gather(*(episode(served, s, check) for s in some))
      served.check()

  served.run(load())
  assert seen["asked"] >= 200
  # How many are stopped in time depends on the clock.
  assert seen["whole"] > 100
  assert seen["cached"] > 50
  assert seen["stopped"] > 4
  stats = served.engine.stats()
  # 2 numbers of rows times 3 forms of chunks, or 1 times 2, and three more.
  compiled = {"served": 2 * 3 + 3, "pressed": 1 * 2 + 3}[engine]
  assert stats.compilations == before.compilations == compiled
  preempted = stats.preemptions - before.preemptions
  assert preempted > 10 if engine == "pressed" else preempted == 0


SIZES = {
  "pages of one id": {
    "slots": 3,
    "pages": 33,
    "page_size": 1,
    "chunk_buckets": (5,),
    "prefill_tokens": 5,
    "steps_per_dispatch": 1,
  },
  "drafts": {
    "slots": 3,
    "pages": 18,
    "page_size": 2,
    "row_buckets": (3,),
    "chunk_buckets": (4,),
    "steps_per_dispatch": 4,
    "speculative_tokens": 3,
  },
  "several lengths": {
    "slots": 8,
    "pages": 14,
    "page_size": 3,
    "row_buckets": (8,),
    "chunk_buckets": (2,),
    "steps_per_dispatch": 5,
  },
}


@pytest.fixture(params=["few pages", *SIZES])
def loaded(request):
  if request.param == "few pages":
    yield request.getfixturevalue("pressed")
  else:
    with tiny_engine.serve(
      config=tiny_engine.DENSE, **SIZES[request.param]
    ) as served:
      yield served
      served.check()


def test_every_answer_is_right_whatever_else_happens(loaded):
  num_clients, turns = 10, 10

  async def load():
    finished = asyncio.Event()
    operating = asyncio.create_task(engine_load.operate(loaded, finished))
    answers = await asyncio.gather(
      *(engine_load.client(loaded, seed, turns) for seed in range(num_clients))
    )
    finished.set()
    await operating
    return sum(answers)

  before = loaded.engine.stats()
  assert loaded.run(load()) > num_clients * turns // 2
  stats = loaded.engine.stats()
  assert stats.version > before.version + 5
  assert stats.preemptions > before.preemptions
  assert stats.compilations == before.compilations


@pytest.mark.parametrize(
  "updates", [200, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_updates_under_load_lose_and_repeat_nothing(dense, updates):
  start, answers = dense.engine.stats(), []
  modes = ["recompute", "keep_kv", "recompute", "drain", "recompute"]

  async def client(seed, finished):
    rng = np.random.default_rng(seed)
    while not finished.is_set():
      prompt = rng.integers(24, size=rng.integers(1, 12))
      count = int(rng.integers(1, 9))
      answer = await dense.answer(prompt, count)
      assert (answer.stop, len(answer.tokens)) == ("length", count)
      assert (np.diff(answer.versions) >= 0).all()
      assert answer.oldest_kv <= answer.versions[-1]
      answers.append((prompt, answer))

  async def scenario():
    finished = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
      for seed in range(5):
        clients.create_task(client(seed, finished))
      for i in range(updates):
        # At times half-way: then nothing has happened, and it comes again.
        publishing = asyncio.create_task(dense.publish(modes[i % 5]))
        await asyncio.sleep(0)
        if i % 9 == 0 and not publishing.done():
          publishing.cancel()
          await asyncio.wait([publishing])
          if publishing.cancelled():
            await dense.publish(modes[i % 5])
        await publishing if not publishing.done() else None
        await asyncio.sleep(0 if i % 7 else 0.002)
      finished.set()

  dense.run(scenario())
  stats = dense.engine.stats()
  assert stats.version == start.version + updates
  delivered = sum(len(answer.tokens) for _, answer in answers)
  assert stats.sampled_tokens - start.sampled_tokens == delivered
  assert any(len(set(answer.versions)) > 1 for _, answer in answers)
  assert stats.compilations == start.compilations
  # Of one version and none of it older: the plain model's.
  whole = [
    (prompt, answer)
    for prompt, answer in answers
    if len({answer.oldest_kv, *answer.versions}) == 1
  ]
  assert len(whole) > updates // 10
  for prompt, answer in whole[:200]:
    assert dense.is_greedy(prompt, answer.tokens, version=answer.oldest_kv)


@pytest.mark.parametrize(
  "asked", [2_800, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_requests_leak_no_page_and_compile_nothing(dense, asked):
  before = dense.engine.stats()

  async def client(seed):
    rng = np.random.default_rng(seed)
    done = 0
    for number in range(asked // 40):
      length = 1 + int(rng.integers(2 if number % 10 else 28))
      ids = rng.integers(24, size=length)
      count = 12 if number % 10 == 5 else 1 + number % 3
      answer = asyncio.create_task(dense.answer(ids, count))
      if number % 7 == 0:
        await asyncio.sleep(0)
        answer.cancel()
      await asyncio.wait([answer])
      done += not answer.cancelled() and len(answer.result().tokens) > 0
    return done

  async def load():
    return sum(await asyncio.gather(*map(client, range(40))))

  done = dense.run(load())
  assert 0.85 * asked < done < asked
  after = dense.engine.stats()
  assert after.preemptions > before.preemptions
  # 1 number of rows, 2 forms of chunks, and three more.
  assert after.compilations == before.compilations == 1 * 2 + 3
  dense.check()
  dense.run(dense.engine.flush_cache())
  stats = dense.engine.stats()
  assert stats.free_pages == stats.pages


def test_shapes_compile_when_they_are_first_needed_unless_told_otherwise():
  with tiny_engine.serve(
    config=tiny_engine.DENSE, compile_ahead=False
  ) as served:
    engine = served.engine
    assert engine.stats().compilations == 0
    # One form with chunks of 2, and one without for the tokens that follow.
    for first in (1, 9):
      served.run(served.answer([first, 2], 5))
      assert engine.stats().compilations == 2
    # A chunk of 6; after it there is nothing new.
    served.run(served.answer([3, 4, 5, 6, 7, 8], 5))
    assert engine.stats().compilations == 3
    names = [span.name for span in served.thread._spans.spans]
    assert (names.count("warm up"), names.count("decode") > 2) == (1 + 3, True)
    # Who asks for the most probable ids needs programs that list them.
    for _ in range(2):
      done = served.run(served.answer([1, 2], 5, top_logprobs=2))
      assert done.tokens.tolist() == done.top.ids[:, 0].tolist()
      assert engine.stats().compilations == 3 + 2
    served.run(served.answer([9, 2], 5))
    assert engine.stats().compilations == 3 + 2


# Failures and the end.


async def test_closing_a_paused_engine_fails_its_requests_and_all_that_follows(
  breakable,
):
  tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
  await breakable.begun(1)
  await breakable.engine.pause()
  await breakable.engine.close()
  for task in (
    *tasks,
    breakable.answer([1], 1),
    breakable.engine.pause(),
    breakable.engine.checksum(),
    breakable.engine.flush_cache(),
    breakable.engine.update_weights(1, breakable.placed(1)),
  ):
    with pytest.raises(contract.EngineClosed, match="was closed"):
      await task
  await breakable.engine.close()


async def test_close_ends_every_update_that_waits(breakable):
  _, task = breakable.begin([1], 20)
  await breakable.begun(1)
  async with breakable.held(1):
    # The second waits for the first.
    updates = [
      asyncio.create_task(breakable.publish(mode))
      for mode in ("drain", "recompute")
    ]
    pausing = asyncio.create_task(breakable.engine.pause())
    await asyncio.sleep(0.005)
    await breakable.engine.close()
    for waiting in (*updates, pausing, task):
      with pytest.raises(contract.EngineClosed, match="was closed"):
        await waiting


def test_close_before_the_start_returns(config, one_device):
  thread = mesh_thread.MeshThread("decode", trace.Trace(None))
  unborn = engine_settings.EngineSettings().build(config, one_device, thread)
  asyncio.run(unborn.close())
  thread.close()


async def test_a_device_program_that_fails_fails_the_requests(breakable):
  tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
  await breakable.begun(1)
  # On another device than the cache: the next dispatch raises.
  elsewhere = jax.device_put(breakable.placed(1), jax.devices()[1])
  await breakable.engine.update_weights(1, elsewhere)
  for task in (
    *tasks,
    breakable.answer([1], 1),
    breakable.publish("recompute"),
  ):
    with pytest.raises(
      contract.EngineClosed, match="decoding raised Value"
    ) as raised:
      await task
    assert isinstance(raised.value.__cause__, ValueError)


async def test_an_update_after_which_nothing_can_be_launched_ends_the_engine(
  breakable,
):
  await breakable.engine.pause()
  _, task = breakable.begin([1, 2], 5)
  await asyncio.sleep(0)
  breakable.engine.resume()
  breakable.thread.close()
  # The update is the first that launches a dispatch.
  with pytest.raises(contract.EngineClosed, match="thread was closed"):
    await breakable.publish("recompute")
  with pytest.raises(contract.EngineClosed, match="thread was closed"):
    await asyncio.wait_for(task, machine_speed.scaled(10))


# Prefixes that one engine encodes for another.


@pytest.fixture(scope="module")
def _pair():
  kind = {"config": tiny_engine.DENSE, "compile_ahead": False, "pages": 12}
  with tiny_engine.serve(**kind) as encodes, tiny_engine.serve(**kind) as takes:
    yield encodes, takes


@pytest.fixture
def pair(_pair):
  """Two engines of 12 pages of 4 ids, both with nothing cached."""
  for served in _pair:
    served.run(served.engine.flush_cache())
  yield _pair
  for served in _pair:
    served.check()
    assert served.engine.stats().waiting == 0


def exported(served, ids, start=0):
  """Returns the pages of a prompt."""

  async def scenario():
    async with served.engine.export_prefix(
      np.asarray(ids, np.int32), start
    ) as found:
      return found

  return served.run(scenario())


def given(served, prefix):
  return served.run(served.engine.import_prefix(prefix))


def test_an_engine_decodes_what_another_encoded_as_if_it_had_done_both(pair):
  encodes, takes = pair
  ids, more = some_ids(np.random.default_rng(5), 19, 20), [1, 2, 3, 4, 5]
  asked = {"temperature": 1.0, "seed": 8}
  alone = takes.run(takes.answer(ids, 5, **asked))
  takes.run(takes.engine.flush_cache())
  before = prefilled(takes)
  prefix = exported(encodes, ids)
  # All but the last id: 5 pages of 4; keys and values, a head of 8 floats.
  assert (len(prefix.ids), prefix.start, prefix.version) == (18, 0, 0)
  assert prefix.nbytes == 20 * 2 * 8 * 4
  assert given(takes, prefix) == ""
  apart = takes.run(takes.answer(ids, 5, **asked))
  assert (alone.cached_tokens, apart.cached_tokens) == (0, 18)
  assert prefilled(takes) - before == 1
  assert apart.tokens.tolist() == alone.tokens.tolist()
  np.testing.assert_allclose(apart.logprobs, alone.logprobs, atol=1e-4)
  # A later turn of 29 ids: the pages from that of id 23 on.
  turn = [*ids, *apart.tokens.tolist(), *more]
  prefix = exported(encodes, turn, 23)
  assert (len(prefix.ids), prefix.start) == (28, 20)
  assert prefix.pages[0].shape == (1, 1, 2, 4, 8)
  assert given(takes, prefix) == ""
  done = takes.run(takes.answer(turn, 2))
  assert done.cached_tokens == 28
  assert takes.is_greedy(turn, done.tokens)


def test_what_is_cached_is_neither_encoded_nor_written_again(pair):
  encodes, takes = pair
  ids = some_ids(np.random.default_rng(6), 17, 18)
  takes.run(takes.answer(ids[:9], 1))
  first = exported(encodes, ids)
  before = prefilled(encodes), takes.engine.stats().free_pages
  again = exported(encodes, ids)
  assert prefilled(encodes) == before[0]
  for one, other in zip(first.pages, again.pages, strict=True):
    np.testing.assert_array_equal(one, other)
  # Of four pages two are there, and the third, of one id, is taken over.
  assert given(takes, first) == given(takes, first) == ""
  assert before[1] - takes.engine.stats().free_pages == 1


@pytest.mark.parametrize("publishes", ["source", "target", "both"])
def test_pages_of_another_version_are_refused(pair, publishes):
  encodes, takes = pair
  ids = some_ids(np.random.default_rng(7), 18, 19)
  for served in pair:
    while served.version < max(x.version for x in pair):
      served.run(served.publish())
  prefix = exported(encodes, ids)
  if publishes != "target":
    encodes.run(encodes.publish())
  if publishes != "source":
    takes.run(takes.publish())
  free = takes.engine.stats().free_pages
  reason = given(takes, prefix)
  assert reason == ("" if publishes == "source" else "version")
  assert takes.engine.stats().free_pages == free - 5 * (not reason)
  done = takes.run(takes.answer(ids, 4))
  assert done.cached_tokens == (0 if reason else 17)
  assert takes.is_greedy(ids, done.tokens)


def test_pages_that_a_request_kept_from_old_weights_are_not_exported(pair):
  served, _ = pair
  ids = some_ids(np.random.default_rng(9), 12, 13)

  async def scenario():
    request, answer = served.begin(ids, 19)
    await served.first_token(request)
    await served.publish("keep_kv")
    async with served.engine.export_prefix(
      np.array([*ids, 1], np.int32)
    ) as found:
      assert (len(found.ids), found.version) == (12, served.version)
      prefilled = served.engine.stats().prefilled_tokens - before
      assert prefilled == 24
    await answer

  before = served.engine.stats().prefilled_tokens
  served.run(scenario())


def test_pages_without_room_or_without_those_before_are_refused(pair):
  encodes, takes = pair
  for served in pair:
    while served.version < max(x.version for x in pair):
      served.run(served.publish())
  ids = some_ids(np.random.default_rng(10), 29, 30)
  prefix, rest = exported(encodes, ids), exported(encodes, ids, 9)
  assert given(takes, rest) == "gap"
  assert takes.engine.stats().free_pages == 12

  # 24 ids and one to come hold 7 of 12 pages.
  others = np.asarray(some_ids(np.random.default_rng(1), 24, 25), np.int32)
  blocks = takes.engine._queue.blocks
  table, _ = blocks.begin(others)
  assert blocks.grow(table, 25)
  assert given(takes, prefix) == "room"
  blocks.end(table, others)
  takes.run(takes.engine.flush_cache())
  assert takes.engine.stats().free_pages == 12
  assert given(takes, prefix) == ""


def test_an_export_that_is_cancelled_leaves_no_request_and_no_page(pair):
  served, _ = pair
  ids = some_ids(np.random.default_rng(11), 29, 30)

  async def scenario():
    async with served.held(0):
      export = served.engine.export_prefix(np.asarray(ids, np.int32))
      asked = asyncio.create_task(export.__aenter__())
      await served.until(lambda stats: stats.running == 1)
      asked.cancel()
      await asyncio.wait([asked])
      assert served.engine.stats().running == 0
    await served.engine.flush_cache()
    assert served.engine.stats().free_pages == 12

  served.run(scenario())


def test_pages_that_cannot_be_written_end_the_engine():
  with tiny_engine.serve(
    config=tiny_engine.DENSE, compile_ahead=False
  ) as served:
    prefix = exported(served, list(range(9)))
    served.run(served.engine.flush_cache())
    short = prefix._replace(pages=[x[:, :, :, :2] for x in prefix.pages])
    with pytest.raises(contract.EngineClosed, match="decoding raised"):
      given(served, short)
    with pytest.raises(contract.EngineClosed, match="decoding raised"):
      served.run(served.answer([1, 2], 1))


async def hand_over(served, finished):
  """Exports prompts, and gives them back later, whatever they are worth."""
  rng, kept, reasons = np.random.default_rng(3), [], []
  while not finished.is_set():
    await asyncio.sleep(rng.choice([0, 0.002]))
    alike, count = rng.random() < 0.7, int(rng.integers(4, 28))
    ids = np.arange(count) % 24 if alike else rng.integers(24, size=count)
    try:
      async with served.engine.export_prefix(ids.astype(np.int32)) as found:
        kept.append(found)
    except contract.EngineClosed:
      break
    for prefix in kept[-3:]:
      if prefix.nbytes:
        reasons.append(await served.engine.import_prefix(prefix))
    served.check()
  return reasons


def test_answers_are_right_while_prefixes_come_and_go():
  with tiny_engine.serve(
    config=tiny_engine.DENSE,
    compile_ahead=False,
    slots=6,
    pages=14,
    row_buckets=(6,),
    chunk_buckets=(4,),
    steps_per_dispatch=5,
  ) as served:

    async def load():
      finished = asyncio.Event()
      operating = asyncio.create_task(engine_load.operate(served, finished))
      handing = asyncio.create_task(hand_over(served, finished))
      await asyncio.gather(
        *(engine_load.client(served, seed, 8) for seed in range(8))
      )
      finished.set()
      await operating
      return collections.Counter(await handing)

    reasons = served.run(load())
    served.check()
  # How many it takes depends on the clock.
  assert reasons[""] > 4
  assert {*reasons} <= {"", "version", "room"}
