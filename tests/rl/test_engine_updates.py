"""New weights under the built-in engine, and its end."""

import asyncio

import jax
import numpy as np
import pytest

from rl import dispatch, engine, engine_jax, engine_plan, trace, trajectory


def test_new_weights_go_on_in_the_middle_of_an_answer(served):
  async def scenario():
    # One in the middle of its answer, one in the middle of its prompt: chunks
    # are of 6 ids.
    prompts = ([4, 5], list(range(19)))
    _, early = served.begin(prompts[0], 20)
    await served.begun(3)
    _, late = served.begin(prompts[1], 8)
    await asyncio.sleep(0.003)
    old = served.version
    await served.publish("recompute")
    answers = await asyncio.gather(early, late)
    for ids, answer in zip(prompts, answers, strict=True):
      tokens, versions = answer.tokens.tolist(), answer.versions.tolist()
      assert versions == sorted(versions)
      kept = versions.count(old)
      assert tokens[:kept] == served.greedy(ids, kept, version=old)
      rest = len(tokens) - kept
      assert versions[kept:] == [old + 1] * rest
      assert tokens[kept:] == served.greedy([*ids, *tokens[:kept]], rest)
    assert [len(answer.tokens) for answer in answers] == [20, 8]
    assert set(answers[0].versions) == {old, old + 1}

  served.run(scenario())


def test_what_idled_is_encoded_again_under_new_weights(served):
  async def scenario():
    ids, session = [1, 2, 3], served.name()
    ids += (await served.answer(ids, 3, session=session)).tokens.tolist()
    await served.publish("recompute")
    answer = await served.answer(ids, 4, session=session)
    assert answer.cached_tokens == 0
    assert answer.tokens.tolist() == served.greedy(ids, 4)

  served.run(scenario())


@pytest.mark.parametrize("first", [None, "recompute"])
def test_drain_finishes_what_runs_and_keeps_the_queue(served, first):
  async def scenario():
    before = served.version
    tasks = [served.begin([i + 1], 20)[1] for i in range(7)]
    await served.begun(1)
    if first:
      await served.engine.pause(first)
    await served.publish("drain")
    # Four rows ran under the old weights to their end; three had to wait.
    versions = [set((await task).versions) for task in tasks]
    assert versions == [{before}] * 4 + [{before + 1}] * 3

  served.run(scenario())


def test_requests_made_while_paused_wait_for_resume(served):
  async def scenario():
    await served.engine.pause("drain")
    _, task = served.begin([1], 2)
    await asyncio.sleep(0.02)
    assert not task.done()
    assert served.engine.stats().waiting == 1
    served.engine.resume()
    assert (await task).tokens.tolist() == served.greedy([1], 2)

  served.run(scenario())


def test_abort_while_paused_answers_at_once(served):
  async def scenario():
    request, task = served.begin([3], 20)
    await served.begun(1)
    await served.engine.pause("recompute")
    served.engine.abort(request.request_id)
    answer = await task
    served.engine.resume()
    assert answer.stop == "abort"
    assert 0 < len(answer.tokens) < 20

  served.run(scenario())


def test_200_updates_under_load_lose_and_repeat_nothing(served):
  start, answers = served.engine.stats(), []

  async def client(seed, finished):
    rng = np.random.default_rng(seed)
    while not finished.is_set():
      prompt = rng.integers(24, size=rng.integers(1, 12))
      count = int(rng.integers(1, 9))
      answer = await served.answer(prompt, count)
      assert (answer.stop, len(answer.tokens)) == ("length", count)
      assert (np.diff(answer.versions) >= 0).all()
      answers.append(answer)

  async def scenario():
    finished = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
      for seed in range(6):
        clients.create_task(client(seed, finished))
      for i in range(200):
        await served.publish("recompute" if i % 10 else "drain")
        await asyncio.sleep(0.002 * (i % 3))
      finished.set()

  served.run(scenario())
  stats = served.engine.stats()
  assert stats.version == start.version + 200
  delivered = sum(len(answer.tokens) for answer in answers)
  assert stats.sampled_tokens - start.sampled_tokens == delivered
  assert any(len(set(answer.versions)) > 1 for answer in answers)
  assert stats.compilations == start.compilations


def test_weights_that_cannot_be_served_are_refused(served):
  async def scenario():
    old = trajectory.PolicyVersion(served.version)
    new = trajectory.PolicyVersion(old + 1)
    good = served.placed(new)
    update = served.engine.update_weights
    with pytest.raises(RuntimeError, match="await pause"):
      await update(new, good)
    await served.engine.pause("recompute")
    with pytest.raises(ValueError, match=f"not above the served {old}"):
      await update(old, good)
    with pytest.raises(ValueError, match=r"'embed'.*\(24, 32\).*\(23, 32\)"):
      await update(new, {**good, "embed": good["embed"][:-1]})
    with pytest.raises(ValueError, match=r"'head'.*expected None"):
      await update(new, {**good, "head": good["embed"]})
    served.engine.resume()
    assert served.version == old
    answer = await served.answer([1, 2], 3)
    assert answer.tokens.tolist() == served.greedy([1, 2], 3)

  served.run(scenario())


@pytest.mark.parametrize("paused", [False, True])
def test_close_fails_what_is_in_flight_and_all_that_follows(breakable, paused):
  async def scenario():
    tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
    await breakable.begun(1)
    if paused:
      await breakable.engine.pause("recompute")
    await breakable.engine.close()
    for task in (
      *tasks,
      breakable.answer([1], 1),
      breakable.engine.pause("drain"),
      breakable.engine.update_weights(1, breakable.placed(1)),
    ):
      with pytest.raises(engine.EngineClosed, match="was closed"):
        await task

  breakable.run(scenario())


def test_close_before_the_start_returns(config, one_device):
  thread = dispatch.MeshThread("decode", trace.Trace(None))
  settings = engine_plan.EngineSettings()
  unborn = engine_jax.JaxEngine(config, settings, one_device, thread)
  asyncio.run(unborn.close())
  thread.close()


def test_a_device_program_that_fails_fails_the_requests(breakable):
  async def scenario():
    tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
    await breakable.begun(1)
    await breakable.engine.pause("recompute")
    # On another device than the cache: the next dispatch raises.
    elsewhere = jax.device_put(breakable.placed(1), jax.devices()[1])
    await breakable.engine.update_weights(1, elsewhere)
    breakable.engine.resume()
    for task in (*tasks, breakable.answer([1], 1)):
      with pytest.raises(engine.EngineClosed, match="decoding raised Value"):
        await task

  breakable.run(scenario())
