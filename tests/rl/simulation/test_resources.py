"""Seats of rewards and links of weights, with numbers worked out by hand."""

import asyncio
import dataclasses

import pytest

from rl.runtime import virtual_clock
from rl.schedule import overlap
from rl.simulation import distributions, resources, simulate, workload
from tests.helpers import simulated_runs

pytestmark = pytest.mark.virtual_time

close = pytest.approx


def graded(seats, starts_s, work_s=1.0):
  """Returns the costs of gradings that begin at these times."""

  async def main():
    pool = resources.SeatPool(seats)

    async def one(start_s):
      await asyncio.sleep(start_s)
      async with pool.seat():
        await asyncio.sleep(work_s)

    await asyncio.gather(*map(one, starts_s))
    return pool.costs()

  return virtual_clock.run(main())


@pytest.mark.parametrize(
  ("starts_s", "count", "use", "waits_s", "to_zero"),
  [
    # Each begins 2 s later; the first two end 1 s after it, the third when it
    # has graded: 3 of 4 + 4 + 3 s are work.
    ((0.0, 0.5, 10.0), 9, 3 / 11, (2.0, 2.0), 1),
    # The second begins when the first ends, at 3 s; the seat lives for 5 s,
    # and the one of the third call for 3 s.
    ((0.0, 0.5, 10.0), 1, 3 / 8, (6.5 / 3, 2.5), 1),
    # The second finds the seat free: it lives for 2 + 1 + 0.5 + 1 s.
    ((0.0, 3.5), 9, 2 / 4.5, (1.0, 2.0), 0),
  ],
)
def test_elastic_seats_begin_and_end_by_the_calls(
  starts_s, count, use, waits_s, to_zero
):
  seats = resources.Seats(count=count, elastic=True, cold_s=2.0, idle_s=1.0)
  costs = graded(seats, starts_s)
  assert costs.use == close(use)
  assert (costs.mean_wait_s, costs.max_wait_s) == close(waits_s)
  assert costs.scaled_to_zero == to_zero


def test_standing_seats_are_paid_from_the_beginning_to_the_end():
  seats = resources.Seats(count=2, cost=3600.0)
  costs = graded(seats, (0.0, 0.0, 0.5, 4.0))
  assert (costs.cold_starts, costs.scaled_to_zero) == (0, 0)
  # 4 s of work of 2 seats for 5 s; the third call waits for 0.5 s.
  assert costs.use == close(4 / 10)
  assert (costs.mean_wait_s, costs.max_wait_s) == close((0.125, 0.5))
  assert costs.cost == close(10.0)


async def test_a_call_that_is_given_up_leaves_its_seat_to_the_next():
  pool = resources.SeatPool(resources.Seats(count=1))
  order = []

  async def one(name, work_s):
    async with pool.seat():
      await asyncio.sleep(work_s)
    order.append(name)

  first = asyncio.create_task(one("first", 5.0))
  given_up = asyncio.create_task(one("given up", 1.0))
  last = asyncio.create_task(one("last", 1.0))
  await asyncio.sleep(1.0)
  given_up.cancel()
  first.cancel()
  await asyncio.wait([first, given_up, last])
  assert (order, asyncio.get_running_loop().time()) == (["last"], close(2.0))


async def test_a_seat_goes_on_to_be_warm_when_its_call_gives_up():
  pool = resources.SeatPool(
    resources.Seats(count=1, elastic=True, cold_s=9.0, idle_s=5.0)
  )

  async def one():
    async with pool.seat():
      pass

  task = asyncio.create_task(one())
  await asyncio.sleep(3.0)
  task.cancel()
  await asyncio.wait([task])
  gave_up = pool.costs()
  await one()
  costs = pool.costs()
  assert (gave_up.calls, gave_up.mean_wait_s) == (0, close(3.0))
  # The second call waits from 3 s to 9 s, when the seat is warm.
  assert (costs.cold_starts, costs.calls) == (1, 1)
  assert (costs.max_wait_s, costs.mean_wait_s) == (close(6.0), close(4.5))


def test_rewards_of_a_run_wait_for_their_seats():
  task = workload.Workload(
    answer_tokens=distributions.Fixed(10.0),
    reward_s=distributions.Fixed(3.0),
  )
  free = simulated_runs.settings(overlap.sync(4), task)
  seated = dataclasses.replace(free, rewards=resources.Seats(count=1))
  records = [simulate.simulate(one) for one in (free, seated)]
  assert records[0].rewards is None
  costs = records[1].rewards
  assert costs is not None
  calls = costs.calls
  # All answers of a round end together and take 3 s each, one by one.
  per_round = calls // seated.rounds
  assert costs.max_wait_s == close(3.0 * (per_round - 1))
  longer_s = records[1].virtual_s - records[0].virtual_s
  assert longer_s == close(3.0 * (per_round - 1) * seated.rounds)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"count": 0}, r"rewards\.count=0 must be at least 1"),
    ({"cold_s": -1.0}, r"rewards\.cold_s=-1\.0"),
    ({"cold_s": 1.0}, r"cold_s=1\.0 with elastic=false: seats"),
  ],
)
def test_seats_that_cannot_be_are_refused(change, words):
  chosen = simulate.Simulation(rewards=resources.Seats(**change))
  with pytest.raises(ValueError, match=words):
    chosen.validate()


@pytest.mark.parametrize(
  ("links", "seconds"),
  [
    # 4 buckets of 1 GB at 1 GB/s.
    ([(1e9, 0.0, 1)], 4.0),
    # The first bucket takes 1 s, then the slower link has 4 of 2 s.
    ([(1e9, 0.0, 1), (0.5e9, 0.0, 1)], 9.0),
    # Eight share the second link: 4 buckets of 2 s at 4 GB/s.
    ([(1e9, 0.0, 1), (4e9, 0.0, 8)], 9.0),
    # A latency of 0.5 s with each bucket.
    ([(1e9, 0.5, 1)], 6.0),
  ],
)
def test_buckets_follow_one_another_over_the_links(links, seconds):
  path = resources.WeightPath(
    size_bytes=4e9,
    links=tuple(
      resources.Link(bytes_per_s=rate, latency_s=latency_s, shared_by=sharers)
      for rate, latency_s, sharers in links
    ),
  )
  assert path.seconds == close(seconds)
  assert simulate.Cluster(transfer_s=99.0, weights=path).hidden_s == seconds


def test_small_buckets_hide_the_second_link():
  def seconds(bucket_bytes):
    links = (resources.Link(bytes_per_s=1e9), resources.Link(bytes_per_s=2e9))
    return resources.WeightPath(
      size_bytes=8e9, links=links, bucket_bytes=bucket_bytes
    ).seconds

  # As one bucket 8 + 4 s; as 8 of them only the last one's 0.5 s is added.
  assert (seconds(8e9), seconds(1e9)) == (close(12.0), close(8.5))
