"""Which requests fly next, by worked examples and without a device."""

import asyncio
import dataclasses

import numpy as np
import pytest

from models import config as model_config
from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import dispatch_plan, request_queue, scheduler
from rl.engine.builtin import settings as engine_settings

CONFIG = model_config.tiny(vocab_size=8, max_length=64)
SETTINGS = engine_settings.EngineSettings(
  slots=16,
  page_size=4,
  row_buckets=(8,),
  chunk_buckets=(8,),
  steps_per_dispatch=4,
)
VERSION = trajectory.PolicyVersion(0)


@dataclasses.dataclass
class Case:
  """A schedule over requests that run, in order of their numbers."""

  batch: request_queue.Batch
  schedule: scheduler.Schedule
  loop: asyncio.AbstractEventLoop

  def ask(self, count, most=16, length=2):
    for number in range(count):
      request = contract.DecodeRequest(
        request_id=str(len(self.batch.requests)),
        session="",
        tokens=np.full(length, number % 8, np.int32),
        max_tokens=most,
      )
      self.batch.accept(request, self.loop.create_future())
    self.batch.admit()

  def launch(self, last=None):
    """The next flight, which is then on its way; None when there is none."""
    choice = self.schedule.next(last)
    if choice is None:
      return None
    return dispatch_plan.build(choice, SETTINGS, VERSION)


def names(flight):
  return [one.request.request_id for one in flight.rows]


@pytest.fixture
def case():
  loop = asyncio.new_event_loop()
  batch = request_queue.Batch(CONFIG, SETTINGS)
  schedule = scheduler.Schedule(
    batch, SETTINGS, longest=64, parts=1, platform="cpu"
  )
  yield Case(batch, schedule, loop)
  loop.close()


def test_nothing_flies_when_nothing_runs(case):
  assert case.launch() is None


def test_the_same_rows_follow_while_most_of_them_go_on(case):
  case.ask(8)
  first = case.launch()
  assert names(first) == list("01234567")
  # All of 16 tokens are wanted, and 4 are on their way.
  following = case.launch(first)
  assert names(following) == list("01234567")
  assert following.plan.integers[:, 7].tolist() == [1] * 8


def test_rows_that_end_with_their_flight_do_not_follow(case):
  case.ask(8, most=4)
  assert case.launch(case.launch()) is None


def test_where_most_end_early_the_next_flight_waits(case):
  case.ask(8)
  first = case.launch()
  # An average moves by a tenth of the way: after 3 such landings it is 0.73,
  # and below three quarters nobody follows.
  for _ in range(2):
    case.schedule.landed(first, 0)
  assert case.launch(first) is not None
  for _ in range(3):
    case.schedule.landed(first, 0)
  assert case.launch(first) is None


def test_others_fly_beside_when_they_fill_a_dispatch_of_their_own(case):
  case.ask(16, most=4)
  first = case.launch()
  # 16 rows in one dispatch use 16 / (8 + 16) of its cost, 8 use 8 / (8 + 8).
  assert len(first.rows) == 16
  assert case.launch(first) is None
  for one in first.rows[:8]:
    one.flights = 0
    one.settle()
  assert len(case.launch(first).rows) == 8


def test_a_few_wait_for_more(case):
  case.ask(16, most=4)
  first = case.launch()
  for one in first.rows[:2]:
    one.flights = 0
    one.settle()
  assert case.launch(first) is None


def test_a_request_that_cannot_get_its_pages_says_so(case):
  case.ask(1)
  lease = case.batch.running[0].lease
  hoard, _ = case.batch.paging.begin(np.ones(2, np.int32))
  total = case.batch.paging.num_pages
  assert case.batch.paging.grow(hoard, 4 * total)
  assert not lease.pages
  with pytest.raises(RuntimeError, match=f"gets no pages: of {total}, 0 are"):
    case.launch()
