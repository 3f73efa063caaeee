"""Dispatches of the built-in engine that queue up behind one on the device."""

import asyncio

import pytest

from rl.engine import contract


def test_the_next_dispatch_is_planned_while_one_flies(flying):
  async def scenario():
    begun = [flying.begin([i + 1], 20) for i in range(4)]
    async with flying.held(2):
      for _ in range(100):
        await asyncio.sleep(0)
      # And no third one.
      now = flying.engine.stats()
      assert (now.dispatches, now.sampled_tokens) == (2, 0)
    for request, task in begun:
      assert flying.is_greedy(request.tokens, (await task).tokens)

  flying.run(scenario())


@pytest.mark.parametrize("stopping", [1, 2, 3])
def test_followers_go_on_where_the_one_before_stopped(flying, stopping):
  async def scenario():
    # The first id of an answer stops some: with half of them the dispatch
    # ends, though the next one was planned as if all had gone on.
    begun = []
    for i in range(4):
      (first,) = flying.greedy([i + 1], 1)
      stop_ids = (first,) if i < stopping else ()
      begun.append(flying.begin([i + 1], 20, stop_ids=stop_ids))
    async with flying.held(2):
      # Who comes now takes the rows of those that stopped, and their pages.
      begun += [flying.begin([i + 9], 20) for i in range(4)]
    for i, (request, task) in enumerate(begun):
      answer = await task
      assert flying.is_greedy(request.tokens, answer.tokens)
      assert len(answer.tokens) == (1 if i < stopping else 20)
    flying.check()

  flying.run(scenario())


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_rows_and_pages_of_the_aborted_are_used_while_it_still_flies(
  flying, how
):
  async def scenario():
    await flying.engine.flush_cache()
    prompts = [[i, *range(14)] for i in range(4)]
    begun = [flying.begin(ids, 17) for ids in prompts]
    async with flying.held(2):
      for request, task in begun[:3]:
        if how == "abort":
          flying.engine.abort(request.request_id)
        else:
          task.cancel()
      # 33 pages: the new ones need those of the old ones.
      later = [flying.begin([i, *range(20)], 11) for i in range(9, 13)]
      again = [flying.begin(ids, 17) for ids in prompts[:3]]
    for request, task in [begun[3], *later, *again]:
      answer = await task
      assert answer.stop == "length"
      assert flying.is_greedy(request.tokens, answer.tokens)
    for _, task in begun[:3]:
      if how == "cancel":
        with pytest.raises(asyncio.CancelledError):
          await task
      else:
        assert len((await task).tokens) == 0
    flying.check()

  flying.run(scenario())


def test_closing_with_flights_in_the_air_fails_who_waits(flying):
  async def read():
    return [d async for d in flying.engine.stream(flying.request([7], 20))]

  async def scenario():
    tasks = [flying.begin([i + 1], 20)[1] for i in range(6)]
    tasks.append(asyncio.create_task(read()))
    async with flying.held(2):
      await flying.engine.close()
      for task in tasks:
        with pytest.raises(contract.EngineClosed, match="was closed"):
          await task

  flying.run(scenario())
