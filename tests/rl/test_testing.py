"""Tests of the fake engine, where it keeps a contract of the real one."""

import asyncio

import numpy as np
import pytest

from models import chat as chat_lib
from rl import engine, testing, trajectory


@pytest.mark.parametrize(
  ("mode", "versions"), [("recompute", [0, 1]), ("drain", [0, 0])]
)
def test_the_fake_engine_treats_answers_under_way_as_told(mode, versions):
  fake = testing.FakeEngine((5,), chat_lib.END, lambda priority: 0.02)
  request = engine.DecodeRequest(
    request_id="a", session="a", tokens=np.array([3], np.int32), max_tokens=2
  )

  async def run():
    answer = asyncio.create_task(fake.generate(request))
    await asyncio.sleep(0)
    await fake.pause(mode)
    await asyncio.sleep(0.05)
    # Nothing is sampled between pause and resume.
    assert answer.done() == (mode == "drain")
    await fake.update_weights(trajectory.PolicyVersion(1), None)
    fake.resume()
    return (await answer).versions.tolist()

  assert asyncio.run(run()) == versions
