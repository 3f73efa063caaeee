"""Answers, against the plain model: a whole forward pass for every token."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from rl import batch, engine_plan, learner, trajectory


def some_ids(rng, low, high):
  return rng.integers(24, size=rng.integers(low, high)).tolist()


async def episode(served, seed, check):
  """Three turns of a session that may be aborted, cancelled or released."""
  rng = np.random.default_rng(seed)
  session, ids = served.name(), some_ids(rng, 1, 12)
  for _ in range(3):
    await asyncio.sleep(rng.choice([0, 0, 0.01]))
    count = int(rng.integers(1, 6))
    request, answer = served.begin(ids, count, session=session)
    fate = rng.choice(["whole", "whole", "whole", "abort", "cancel", "release"])
    await asyncio.sleep(0 if fate == "whole" else rng.choice([0, 0.004, 0.01]))
    if fate == "abort":
      served.engine.abort(request.request_id)
    elif fate == "cancel":
      answer.cancel()
      served.engine.release(session)
    elif fate == "release":
      served.engine.release(session)
    try:
      done = await answer
    except asyncio.CancelledError:
      continue
    check(fate, request, done)
    ids = [*ids, *done.tokens.tolist(), *some_ids(rng, 1, 5)]
    if len(ids) > 27:
      break
  served.engine.release(session)


def test_greedy_answers_are_those_of_the_plain_model_under_any_load(served):
  before = served.engine.stats().compilations
  seen = {"whole": 0, "cached": 0, "stopped": 0}

  def check(fate, request, done):
    expected = served.greedy(request.tokens, request.max_tokens)
    assert done.tokens.tolist() == expected[: len(done.tokens)]
    assert len(done.logprobs) == len(done.versions) == len(done.tokens)
    assert done.stop == "length" or fate in ("abort", "release")
    if done.stop == "length":
      assert len(done.tokens) == request.max_tokens
    seen["whole"] += fate == "whole"
    seen["cached"] += done.cached_tokens > 0
    seen["stopped"] += done.stop == "abort"

  async def load():
    # 12 sessions on 4 rows take each other's rows; 4 sessions keep theirs.
    for seeds in (range(12), range(12, 16), range(16, 20)):
      await asyncio.gather(*(episode(served, seed, check) for seed in seeds))

  served.run(load())
  # Of about 50 requests; how many are stopped in time depends on the clock.
  assert seen["whole"] > 20
  assert seen["cached"] > 4
  assert seen["stopped"] > 2
  stats = served.engine.stats()
  assert (stats.running, stats.waiting) == (0, 0)
  # 2 numbers of rows times 2 chunk sizes, all compiled by `start`.
  assert stats.compilations == before == 4


def test_a_mesh_of_four_devices_gives_the_same_answers(sharded):
  async def load():
    rng = np.random.default_rng(0)
    begun = [sharded.begin(some_ids(rng, 1, 20), 8) for _ in range(8)]
    for request, task in begun:
      expected = sharded.greedy(request.tokens, 8)
      assert (await task).tokens.tolist() == expected

  sharded.run(load())
  sharded.run(sharded.publish("recompute"))
  sharded.run(load())
  assert sharded.engine.stats().compilations == 1


def test_a_later_turn_feeds_only_what_is_new(served):
  async def turns():
    session, ids = served.name(), [1, 2, 3, 4, 5]
    first = await served.answer(ids, 3, session=session)
    ids += [*first.tokens.tolist(), 7, 8]
    before = served.engine.stats().prefilled_tokens
    second = await served.answer(ids, 3, session=session)
    # 5 of the prompt and 2 of the 3 sampled: the last was never fed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 7)
    # That one and the context [7, 8].
    assert served.engine.stats().prefilled_tokens - before == 3
    assert second.tokens.tolist() == served.greedy(ids, 3)

  served.run(turns())


def test_a_session_that_changes_its_past_is_encoded_from_there(served):
  async def turns():
    session = served.name()
    await served.answer([1, 2, 3, 4, 5], 3, session=session)
    for ids in ([1, 2, 9, 4, 5, 6], [1, 2, 9]):
      changed = await served.answer(ids, 3, session=session)
      # [1, 2] stay; of a prompt that is all there the last id is fed again.
      assert changed.cached_tokens == 2
      assert changed.tokens.tolist() == served.greedy(ids, 3)

  served.run(turns())


def test_a_conversation_may_fill_the_whole_length(served):
  ids = some_ids(np.random.default_rng(1), 20, 21)
  answer = served.run(served.answer(ids, 12))
  assert answer.tokens.tolist() == served.greedy(ids, 12)


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


def as_trajectory(request, answer):
  turn = trajectory.Turn(
    context=request.tokens,
    tokens=answer.tokens,
    logprobs=answer.logprobs,
    versions=answer.versions,
    stop=answer.stop,
  )
  return trajectory.Trajectory(
    task_id="",
    group_id=0,
    index=0,
    turns=[turn],
    status=trajectory.Status.COMPLETED,
  )


def test_logprobs_and_versions_are_the_learners(served, config, one_device):
  async def load():
    rng = np.random.default_rng(0)
    begun = [
      served.begin(some_ids(rng, 1, 16), 8, temperature=0.7, seed=seed)
      for seed in range(8)
    ]
    return [as_trajectory(request, await task) for request, task in begun]

  (packed,) = batch.pack(served.run(load()), [0.0] * 8, rows=8, length=24)
  score = functools.partial(
    learner.token_logprobs, config=config, layout=one_device, temperature=0.7
  )
  scored, _, _ = jax.jit(score)(served.placed(served.version), packed)
  gap = np.abs(np.asarray(scored) - packed.behaviour)[packed.sampled]
  assert len(gap) == 64
  assert gap.max() < 1e-4  # 1.3e-5 is typical.
  assert set(packed.versions[packed.sampled]) == {served.version}


def test_noise_follows_from_the_seed_and_not_from_the_batch(served):
  async def load(*seeds):
    begun = [
      served.begin([1, 2, 3], 12, temperature=1.0, seed=seed) for seed in seeds
    ]
    return [(await task).tokens.tolist() for _, task in begun]

  (alone,) = served.run(load(5))
  crowd = served.run(load(5, 6, -7, 5, 8))
  assert crowd[0] == crowd[3] == alone
  assert len(set(map(tuple, crowd))) == 4


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


def test_abort_ends_running_and_waiting_requests_and_no_other(served):
  async def scenario():
    begun = [served.begin([i + 1], 20) for i in range(6)]
    await served.begun(4)
    for i in (1, 5):  # A running one, and one that waits for a row.
      served.engine.abort(begun[i][0].request_id)
    served.engine.abort("unknown")
    answers = [await task for _, task in begun]
    served.engine.abort(begun[0][0].request_id)  # It has finished.
    for (request, _), answer in zip(begun, answers, strict=True):
      expected = served.greedy(request.tokens, 20)
      assert answer.tokens.tolist() == expected[: len(answer.tokens)]
    ends = [answer.stop for answer in answers]
    assert ends == ["length", "abort", *["length"] * 3, "abort"]
    sizes = [len(answer.tokens) for answer in answers]
    assert 0 < sizes[1] < 20
    assert [*sizes[:1], *sizes[2:]] == [20, 20, 20, 20, 0]

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
    served.engine.release(request.session)
    again = await served.engine.generate(request)
    assert again.tokens.tolist() == served.greedy([9], 20)
    await asyncio.gather(*others)

  served.run(scenario())


@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.001, 0.003])
def test_the_row_of_a_session_released_while_it_runs_has_one_owner(
  served, delay_s
):
  async def scenario():
    # A session that idles lets the engine linger before it dispatches.
    idle = served.name()
    await served.answer([9], 1, session=idle)
    begun = [served.begin([i + 1], 20) for i in range(3)]
    await served.begun(3)
    await asyncio.sleep(delay_s)
    served.engine.release(begun[0][0].session)
    begun.append(served.begin([8], 20))
    answers = [await task for _, task in begun]
    assert [a.stop for a in answers] == ["abort", *["length"] * 3]
    for (request, _), answer in zip(begun, answers, strict=True):
      expected = served.greedy(request.tokens, 20)
      assert answer.tokens.tolist() == expected[: len(answer.tokens)]
    served.engine.release(idle)

  served.run(scenario())


def test_release_ends_a_request_that_waits(served):
  async def scenario():
    others = [served.begin([i + 1], 8)[1] for i in range(4)]
    request, task = served.begin([9], 8, priority=(1,))
    await served.begun(1)
    served.engine.release(request.session)
    assert (await task).stop == "abort"
    assert served.engine.stats().waiting == 0
    await asyncio.gather(*others)

  served.run(scenario())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokens": np.zeros(0, np.int32)}, "no tokens"),
    ({"tokens": np.array([1, 24], np.int32)}, r"outside \[0, 24\)"),
    ({"tokens": np.array([-1], np.int32)}, r"outside \[0, 24\)"),
    # 30 + 3 = 33 is one more than max_length.
    ({"tokens": np.ones(30, np.int32)}, "do not fit model.max_length=32"),
    ({"max_tokens": 0}, "max_tokens=0 is below 1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"stop_ids": (1, 2, 3, 4, 5)}, "5 stop ids, at most 4"),
    ({"stop_ids": (24,)}, r"stop_ids=\(24,\) leave \[0, 24\)"),
    ({"seed": 2**31}, "seed=2147483648 needs more than 32 bits"),
    ({"request_id": "taken"}, "already in flight"),
    ({"session": "busy"}, "already has a request"),
  ],
)
def test_a_request_that_cannot_be_served_fails_alone(served, change, message):
  async def scenario():
    _, other = served.begin([5], 6, request_id="taken", session="busy")
    await asyncio.sleep(0)
    bad = dataclasses.replace(served.request([1, 2], 3), **change)
    with pytest.raises(ValueError, match=message):
      await served.engine.generate(bad)
    assert (await other).tokens.tolist() == served.greedy([5], 6)

  served.run(scenario())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"slots": 0}, "engine.slots=0 is below 1"),
    ({"steps_per_dispatch": 0}, "engine.steps_per_dispatch=0 is below 1"),
    ({"row_buckets": ()}, r"engine.row_buckets=\(\) needs positive"),
    ({"chunk_buckets": (4, 0)}, r"engine.chunk_buckets=\(4, 0\) needs"),
  ],
)
def test_sizes_that_cannot_work_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    engine_plan.EngineSettings(**change).validate()
