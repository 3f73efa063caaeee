"""Between the parts of the built-in engine: who shares, waits, and leaves."""

import asyncio
import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models import config as model_config
from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import (
  decode_step,
  dispatch_plan,
  request_queue,
  scheduler,
)
from rl.engine.builtin import settings as engine_settings

SAMPLED = 7


class Flown:
  """A schedule whose flights sample all that they may, two at a time."""

  def __init__(self, loop, settings, longest):
    config = model_config.tiny(vocab_size=8, max_length=longest)
    self.loop = loop
    self.batch = request_queue.Batch(config, settings)
    self.schedule = scheduler.Schedule(
      self.batch, settings, longest=longest, parts=1, platform="cpu"
    )
    self.settings = settings
    self.air = collections.deque[dispatch_plan.Flight]()
    self.flights = self.names = 0

  def ask(self, ids, most, **fields):
    self.names += 1
    name = f"name {self.names}"
    request = contract.DecodeRequest(
      **{
        "request_id": name,
        "session": name,
        "tokens": np.asarray(ids, np.int32),
        "max_tokens": most,
        **fields,
      }
    )
    return self.batch.accept(request, self.loop.create_future())

  def step(self):
    """Fills the air, lands one; False when there is nothing to do."""
    while len(self.air) < 2:
      self.batch.admit()
      choice = self.schedule.next(self.air[-1] if self.air else None)
      if choice is None:
        break
      version = trajectory.PolicyVersion(0)
      self.air.append(dispatch_plan.build(choice, self.settings, version))
      self.batch.take_errands()
      self.flights += 1
    if not self.air:
      return False
    flight = self.air.popleft()
    rows, steps = len(flight.plan.integers), self.settings.steps_per_dispatch
    sampled = decode_step.Sampled(
      tokens=jnp.full((rows, steps), SAMPLED, jnp.int32),
      logprobs=jnp.zeros((rows, steps), jnp.float32),
      counts=jnp.asarray(flight.plan.integers[:, decode_step.BUDGET]),
    )
    self.schedule.landed(flight, self.batch.absorb(flight, sampled))
    self.batch.check()
    return True


@pytest.fixture
def flown():
  """Settings and longest -> `Flown`."""
  loop = asyncio.new_event_loop()
  yield lambda settings, longest: Flown(loop, settings, longest)
  loop.close()


@pytest.mark.parametrize("seed", range(20))
def test_pages_for_one_conversation_are_enough_whoever_repeats_whom(
  flown, seed
):
  rng = np.random.default_rng(seed)
  settings = engine_settings.EngineSettings(
    slots=4,
    page_size=int(rng.choice([1, 2, 4])),
    row_buckets=(4,),
    chunk_buckets=(4, 16),
    prefill_tokens=64,
    length_buckets=(32,),
    steps_per_dispatch=int(rng.choice([2, 8])),
  )
  least = settings.width(32) + 1
  sky = flown(dataclasses.replace(settings, pages=least), 32)
  for _ in range(120):
    if rng.random() < 0.3 and len(sky.batch.requests) < 8:
      # A prompt of what others sample: both encode it at once.
      given = int(rng.integers(1, 28))
      sky.ask(
        [1, *[SAMPLED] * (given - 1)],
        int(rng.integers(1, 33 - given)),
        priority=(int(rng.integers(3)),),
      )
    sky.step()
  for _ in range(1000):
    if not sky.batch.requests:
      break
    assert sky.step()
  assert not sky.batch.requests
  assert sky.batch.paging.num_free + sky.batch.paging.num_idle == least


def test_rows_that_do_not_fit_take_turns(flown):
  settings = engine_settings.EngineSettings(length_buckets=(512,))
  sky = flown(settings, 512)
  nine = [sky.ask([i], 400) for i in range(9)]
  for _ in range(20):
    sky.step()
  # 8 rows are worth most; the ninth waits for none of them to end.
  sampled = [one.num_sampled for one in nine]
  assert max(sampled) - min(sampled) <= 2 * settings.steps_per_dispatch
  while sky.step():
    pass
  # 9 * 400 tokens in 8 rows of 8 steps are 57 flights; 100 one after another.
  assert sky.flights <= 60


def test_context_beside_many_that_decode_comes_in_long_chunks(flown):
  settings = engine_settings.EngineSettings(length_buckets=(2048,))
  sky = flown(settings, 2048)
  for i in range(40):
    sky.ask([i, i], 2000)
  for _ in range(10):
    sky.step()
  late = sky.ask([*range(300)], 10)
  before = sky.flights
  while not late.num_sampled:
    assert sky.step()
  # 10 chunks of 32, one of 7 flights; in chunks of 4 it would be over 500.
  assert sky.flights - before <= 7 * 11


def test_the_queue_keeps_none_of_those_that_left_it(flown):
  settings = engine_settings.EngineSettings(slots=1)
  sky = flown(settings, 64)
  batch = sky.batch
  sky.ask([1], 2, request_id="runs")
  batch.admit()
  stays = [sky.ask([1], 2, request_id=f"stays {i}") for i in range(3)]
  for i in range(100):
    batch.finish(sky.ask([1], 2, request_id=f"leaves {i}"), "abort")
  assert len(batch._waiting) <= 2 * len(stays) + settings.slots
  batch.finish(batch.running[0], "abort")
  batch.admit()
  # The order is the same.
  assert batch.running == stays[:1]


def test_an_update_after_which_nothing_can_fly_ends_the_engine(breakable):
  async def scenario():
    await breakable.engine.pause()
    _, task = breakable.begin([1, 2], 5)
    await asyncio.sleep(0)
    breakable.engine.resume()
    breakable.thread.close()
    # The update is the first that wants to fly.
    with pytest.raises(contract.EngineClosed, match="thread was closed"):
      await breakable.publish("recompute")
    with pytest.raises(contract.EngineClosed, match="thread was closed"):
      await asyncio.wait_for(task, 10)

  breakable.run(scenario())
