"""One deadline for all that is done for an answer."""

import asyncio

import pytest

from launch.gateway import deadline


def test_all_that_is_done_for_an_answer_has_one_end():
  limit = deadline.Deadline.after(0.05)

  async def twice():
    async with limit.kept():
      assert 0 < limit.left_s <= 0.05
    with pytest.raises(TimeoutError, match=r"the answer took over 0\.05 s"):
      async with limit.kept():
        await asyncio.Event().wait()
    assert limit.left_s == 0
    with pytest.raises(TimeoutError, match="the answer took"):
      async with limit.kept():
        await asyncio.Event().wait()

  asyncio.run(twice())
