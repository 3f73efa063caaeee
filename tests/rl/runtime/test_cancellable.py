"""Tests of work that is cancelled while somebody waits for it."""

import asyncio

import pytest

from rl.runtime import cancellable, virtual_clock

pytestmark = pytest.mark.virtual_time


async def slow(ended):
  try:
    await asyncio.sleep(9)
    return "whole"
  finally:
    await asyncio.sleep(1)
    ended.append(asyncio.get_running_loop().time())


@pytest.mark.parametrize(
  ("cancel_s", "result", "end_s"), [(20.0, "whole", 10.0), (4.0, None, 5.0)]
)
async def test_who_waits_goes_on_when_work_is_cancelled(
  cancel_s, result, end_s
):
  loop, ended, work = (
    asyncio.get_running_loop(),
    [],
    cancellable.Cancellable(),
  )
  loop.call_later(cancel_s, work.cancel)
  assert await work.run(slow(ended)) == result
  assert ended == [loop.time()]
  assert ended == [end_s]


async def test_what_would_be_run_after_a_cancellation_is_not():
  ended, work = [], cancellable.Cancellable()
  work.cancel()
  assert await work.run(slow(ended)) is None
  assert ended == []


def test_work_that_cancels_itself_leaves_its_waiter_alone():
  async def quitting():
    raise asyncio.CancelledError

  assert virtual_clock.run(cancellable.Cancellable().run(quitting())) is None


async def test_work_ends_before_a_waiter_that_is_cancelled():
  loop, ended = asyncio.get_running_loop(), []
  waiter = asyncio.create_task(cancellable.Cancellable().run(slow(ended)))
  await asyncio.sleep(2)
  waiter.cancel()
  await asyncio.wait([waiter])
  assert waiter.cancelled()
  assert ended == [loop.time()]
  assert ended == [3.0]


def test_an_error_of_the_work_is_raised():
  async def broken():
    raise KeyError("no such work")

  with pytest.raises(KeyError, match="no such work"):
    virtual_clock.run(cancellable.Cancellable().run(broken()))
