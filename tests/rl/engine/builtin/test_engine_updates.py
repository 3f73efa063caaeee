"""New weights under the built-in engine, and its end."""

import asyncio

import jax
import numpy as np
import pytest

from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.runtime import mesh_thread, trace


def test_new_weights_go_on_in_the_middle_of_an_answer(served):
  async def scenario():
    # One in the middle of its answer, one in the middle of its prompt: chunks
    # are of 6 ids.
    prompts = ([4, 5], list(range(19)))
    _, early = served.begin(prompts[0], 20)
    await served.begun(3)
    _, late = served.begin(prompts[1], 8)
    old = served.version
    async with served.held(1):
      publishing = asyncio.create_task(served.publish("recompute"))
    await publishing
    answers = await asyncio.gather(early, late)
    for ids, answer in zip(prompts, answers, strict=True):
      tokens, versions = answer.tokens.tolist(), answer.versions.tolist()
      assert versions == sorted(versions)
      kept = versions.count(old)
      assert tokens[:kept] == served.greedy(ids, kept, version=old)
      rest = len(tokens) - kept
      assert versions[kept:] == [old + 1] * rest
      # As a fresh run of the same beginning.
      fresh = await served.answer([*ids, *tokens[:kept]], rest)
      assert tokens[kept:] == fresh.tokens.tolist()
      assert served.is_greedy([*ids, *tokens[:kept]], tokens[kept:])
      assert answer.oldest_kv == old + 1
    assert [len(answer.tokens) for answer in answers] == [20, 8]
    assert set(answers[0].versions) == {old, old + 1}

  served.run(scenario())


def test_kept_keys_and_values_show_in_tokens_and_in_what_is_told(served):
  async def scenario():
    old, differ = served.version, 0
    begun = [served.begin([i, 5, 7], 24) for i in range(4)]
    await served.begun(12)
    await served.publish("keep_kv")
    for request, task in begun:
      answer = await task
      tokens, versions = answer.tokens.tolist(), answer.versions.tolist()
      kept = versions.count(old)
      assert 0 < kept < 24
      assert versions == [old] * kept + [old + 1] * (24 - kept)
      assert tokens[:kept] == served.greedy(request.tokens, kept, version=old)
      ids = [*request.tokens, *tokens[:kept]]
      differ += tokens[kept:] != served.greedy(ids, 24 - kept)
      assert answer.oldest_kv == old
      assert [span[0] for span in answer.spans] == [old, old + 1]
    assert differ > 0
    # With the next recomputed ones nothing old is left.
    await served.publish("recompute")
    ids = begun[0][0].tokens
    fresh = await served.answer(ids, 8)
    assert (fresh.cached_tokens, fresh.oldest_kv) == (0, old + 2)
    assert served.is_greedy(ids, fresh.tokens)

  served.run(scenario())


def test_aborted_answers_keep_what_they_have_and_the_queue_goes_on(served):
  async def scenario():
    old = served.version
    begun = [served.begin([i + 1], 20) for i in range(7)]
    await served.begun(4)
    await served.publish("abort")
    answers = [await task for _, task in begun]
    assert [a.stop for a in answers] == ["abort"] * 4 + ["length"] * 3
    for (request, _), answer in zip(begun, answers, strict=True):
      (version,) = set(answer.versions)
      assert version == old + (answer.stop == "length")
      assert served.is_greedy(request.tokens, answer.tokens, version=version)
    assert all(0 < len(answer.tokens) < 20 for answer in answers[:4])

  served.run(scenario())


def test_what_idled_is_encoded_again_under_new_weights(served):
  async def scenario():
    ids, session = [1, 2, 3], served.name()
    ids += (await served.answer(ids, 3, session=session)).tokens.tolist()
    await served.publish("recompute")
    answer = await served.answer(ids, 4, session=session)
    assert answer.cached_tokens == 0
    assert served.is_greedy(ids, answer.tokens)

  served.run(scenario())


@pytest.mark.parametrize("paused", [False, True])
def test_drain_finishes_what_runs_and_keeps_the_queue(served, paused):
  async def scenario():
    before = served.version
    tasks = [served.begin([i + 1], 20)[1] for i in range(7)]
    await served.begun(1)
    if paused:
      await served.engine.pause()
    await served.publish("drain")
    if paused:
      assert all(task.done() for task in tasks[:4])
      await asyncio.sleep(0.02)
      assert not any(task.done() for task in tasks[4:])
      served.engine.resume()
    # Four rows ran under the old weights to their end; three had to wait.
    versions = [set((await task).versions) for task in tasks]
    assert versions == [{before}] * 4 + [{before + 1}] * 3

  served.run(scenario())


def test_drain_lets_the_preempted_finish_and_nobody_else(pressed):
  async def scenario():
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

  pressed.run(scenario())


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort"])
def test_an_engine_that_was_paused_takes_weights_and_stays_so(served, mode):
  async def scenario():
    _, task = served.begin([1], 20)
    await served.begun(1)
    await served.engine.pause()
    before = served.engine.stats()
    await served.publish(mode)
    await asyncio.sleep(0.02)
    after = served.engine.stats()
    assert after.version == before.version + 1
    assert after.dispatches == before.dispatches
    assert task.done() == (mode == "abort")
    served.engine.resume()
    assert (await task).stop == ("abort" if mode == "abort" else "length")

  served.run(scenario())


def test_requests_made_while_paused_wait_for_resume(served):
  async def scenario():
    await served.engine.pause()
    _, task = served.begin([1], 2)
    await asyncio.sleep(0.02)
    assert not task.done()
    assert served.engine.stats().waiting == 1
    served.engine.resume()
    assert served.is_greedy([1], (await task).tokens)

  served.run(scenario())


def test_abort_while_paused_answers_at_once(served):
  async def scenario():
    request, task = served.begin([3], 20)
    await served.begun(1)
    await served.engine.pause()
    served.engine.abort(request.request_id)
    answer = await task
    served.engine.resume()
    assert answer.stop == "abort"
    assert 0 < len(answer.tokens) < 20

  served.run(scenario())


def test_1000_updates_under_load_lose_and_repeat_nothing(dense):
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
      for i in range(1000):
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
  assert stats.version == start.version + 1000
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
  assert len(whole) > 100
  for prompt, answer in whole[:200]:
    assert dense.is_greedy(prompt, answer.tokens, version=answer.oldest_kv)


def test_a_cancelled_update_leaves_the_old_weights_serving(served):
  async def scenario():
    old = served.version
    for mode in ("drain", "recompute", "keep_kv", "abort"):
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

  served.run(scenario())


def test_a_pause_during_an_update_holds_what_comes_after_it(served):
  async def scenario():
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

  served.run(scenario())


def test_weights_that_cannot_be_served_are_refused(served):
  async def scenario():
    old = trajectory.PolicyVersion(served.version)
    new = trajectory.PolicyVersion(old + 1)
    good = served.placed(new)
    update = served.engine.update_weights
    _, running = served.begin([1, 2], 20)
    for version in (old, trajectory.PolicyVersion(old - 1)):
      with pytest.raises(ValueError, match=f"not above the served {old}"):
        await update(version, good)
    with pytest.raises(ValueError, match=r"'embed'.*\(24, 32\).*\(23, 32\)"):
      await update(new, {**good, "embed": good["embed"][:-1]})
    with pytest.raises(ValueError, match=r"'head'.*expected None"):
      await update(new, {**good, "head": good["embed"]})
    less = {name: leaf for name, leaf in good.items() if name != "final_norm"}
    with pytest.raises(ValueError, match=r"'final_norm'.*got None"):
      await update(new, less)
    with pytest.raises(ValueError, match="in_flight='wait'; use abort or"):
      await update(new, good, "wait")
    assert served.version == old
    assert served.is_greedy([1, 2], (await running).tokens)

  served.run(scenario())


def test_the_checksum_is_of_the_served_weights(served):
  async def scenario():
    first = await served.engine.checksum()
    await served.publish("recompute")
    second = await served.engine.checksum()
    assert (first[0] + 1, second[0]) == (second[0], served.version)
    assert first[1] != second[1]
    for _ in range(4):
      await served.publish("recompute")
    # Version v serves weights v % 5.
    assert await served.engine.checksum() == (first[0] + 5, first[1])

  served.run(scenario())


@pytest.mark.parametrize("paused", [False, True])
def test_close_fails_what_is_in_flight_and_all_that_follows(breakable, paused):
  async def scenario():
    tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
    await breakable.begun(1)
    if paused:
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

  breakable.run(scenario())


def test_close_ends_every_update_that_waits(breakable):
  async def scenario():
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

  breakable.run(scenario())


def test_close_before_the_start_returns(config, one_device):
  thread = mesh_thread.MeshThread("decode", trace.Trace(None))
  unborn = engine_settings.EngineSettings().build(config, one_device, thread)
  asyncio.run(unborn.close())
  thread.close()


def test_a_device_program_that_fails_fails_the_requests(breakable):
  async def scenario():
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

  breakable.run(scenario())


def test_an_update_after_which_nothing_can_be_launched_ends_the_engine(
  breakable,
):
  async def scenario():
    await breakable.engine.pause()
    _, task = breakable.begin([1, 2], 5)
    await asyncio.sleep(0)
    breakable.engine.resume()
    breakable.thread.close()
    # The update is the first that launches a dispatch.
    with pytest.raises(contract.EngineClosed, match="thread was closed"):
      await breakable.publish("recompute")
    with pytest.raises(contract.EngineClosed, match="thread was closed"):
      await asyncio.wait_for(task, 10)

  breakable.run(scenario())
