"""Hosts of environments, their queue and outages, with numbers by hand."""

import asyncio
import dataclasses

import pytest

from rl.rollout import starting
from rl.runtime import virtual_clock
from rl.schedule import overlap
from rl.simulation import distributions, hosts, simulate, workload
from rl.simulation import result as simulation_result
from tests.helpers import simulated_runs

pytestmark = pytest.mark.virtual_time

close = pytest.approx


def played(settings, starts_s, work_s=2.0):
  """Returns (place, end, fault) of each environment, and the use."""

  async def main():
    pool = hosts.HostPool(settings)

    async def one(start_s):
      await asyncio.sleep(start_s)
      place, fault = await pool.admit(), False
      try:
        await pool.run(place, work_s)
      except OSError:
        fault = True
      finally:
        pool.release(place)
      return place.host, asyncio.get_running_loop().time(), fault

    found = await asyncio.gather(*map(one, starts_s))
    return found, pool.use()

  return virtual_clock.run(main())


def test_environments_take_the_emptiest_host_and_then_wait_in_order():
  found, use = played(hosts.Hosts(count=2, slots=1, cost=3600.0), [0.0] * 5)
  assert found == [
    (0, 2.0, False),
    (1, 2.0, False),
    (0, 4.0, False),
    (1, 4.0, False),
    (0, 6.0, False),
  ]
  # 5 x 2 s of 2 x 6 s; they wait 0, 0, 2, 2 and 4 s.
  assert use.use == close(10 / 12)
  assert (use.mean_wait_s, use.max_wait_s) == close((8 / 5, 4.0))
  assert (use.environments, use.lost, use.cost) == (5, 0, close(12.0))


def test_an_outage_takes_what_runs_on_its_host_and_nothing_else():
  down = hosts.Outage(start_s=1.0, down_s=9.0, host=0)
  found, use = played(hosts.Hosts(count=2, slots=2, outages=(down,)), [0.0] * 4)
  # Hosts 0 and 1 in turn; the first two of host 0 are lost after 1 s.
  assert found == [
    (0, 1.0, True),
    (1, 2.0, False),
    (0, 1.0, True),
    (1, 2.0, False),
  ]
  assert use.lost == 2


def test_who_finds_every_host_down_waits_until_one_is_back():
  down = hosts.Outage(start_s=1.0, down_s=9.0)
  found, _ = played(hosts.Hosts(count=2, slots=1, outages=(down,)), [0.0, 3.0])
  assert found == [(0, 1.0, True), (0, 12.0, False)]


async def test_a_wait_that_is_given_up_leaves_its_slot_to_the_next():
  pool = hosts.HostPool(hosts.Hosts(count=1, slots=1))
  first = await pool.admit()
  given_up, next_one = (asyncio.create_task(pool.admit()) for _ in "12")
  await asyncio.sleep(1.0)
  pool.release(first)  # Granted, and given up before it could go on.
  given_up.cancel()
  await asyncio.wait([given_up])
  assert (given_up.cancelled(), (await next_one).begun_s) == (True, 1.0)


def test_random_outages_have_their_mean_and_follow_from_the_seed():
  def outages(seed):
    return hosts.random_outages(
      count=4, every_s=100.0, down_s=10.0, until_s=110_000.0, seed=seed
    )

  one = outages(0)
  # Every 110 s of 4 hosts for 110,000 s: 4,000, with a deviation near 60.
  assert len(one) == close(4_000, abs=250)
  assert one == outages(0) != outages(1)
  assert {outage.host for outage in one} == {0, 1, 2, 3}


GAME = workload.Workload(
  name="game",
  answer_tokens=distributions.Fixed(10.0),
  start_s=distributions.Fixed(5.0),
  restarts=True,
)


def simulated(chosen, task=GAME, attempts=3):
  """Returns the result of synchronous rounds of 4 groups of 2."""
  settings = simulated_runs.settings(overlap.sync(4), task, hosts=chosen)
  retries = starting.Starting(attempts=attempts, first_wait_s=3.0, breaker=99)
  settings = dataclasses.replace(
    settings, rollout=dataclasses.replace(settings.rollout, starting=retries)
  )
  return simulation_result.measure(simulate.simulate(settings))


def use(played):
  """Returns the use of the hosts, of a run that has any."""
  assert played.hosts is not None
  return played.hosts


def test_rounds_wait_for_slots():
  free, scarce = simulated(None), simulated(hosts.Hosts(count=2, slots=2))
  assert free.hosts is None
  # A slot is held for the start and the answer, and there are two shifts.
  assert scarce.step_s > free.step_s + 5.0
  assert use(scarce).max_wait_s > 5.0
  assert not scarce.faults


@pytest.mark.parametrize(("attempts", "faults"), [(3, 0), (1, 4)])
def test_starts_on_a_host_that_fails_are_tried_again_elsewhere(
  attempts, faults
):
  # Half of the 8 environments of the first round are on host 0.
  down = hosts.Outage(start_s=2.0, down_s=1.0, host=0)
  found = simulated(
    hosts.Hosts(count=2, slots=8, outages=(down,)), attempts=attempts
  )
  assert use(found).lost == 4
  assert sum(found.faults.values()) == faults


def test_an_episode_whose_host_fails_later_ends_with_a_fault():
  slow = dataclasses.replace(
    GAME,
    turns=distributions.Fixed(3.0),
    step_s=distributions.Fixed(50.0),
    start_s=distributions.Fixed(0.0),
  )
  down = hosts.Outage(start_s=30.0, down_s=1.0)
  found = simulated(hosts.Hosts(count=2, slots=8, outages=(down,)), slow)
  assert use(found).lost == sum(found.faults.values()) == 8


def test_an_outage_of_starts_leaves_started_environments_alone():
  # Starts take 5 s; those of the first round are over, or all fail at 2 s and
  # wait for its end.
  def of(start_s):
    down = hosts.Outage(start_s=start_s, down_s=40.0, starts_only=True)
    return simulated(hosts.Hosts(count=2, slots=8, outages=(down,)))

  early, late = of(2.0), of(5.1)
  assert (use(early).lost, use(late).lost) == (8, 0)
  assert not early.faults


def test_only_the_named_sources_need_a_slot():
  named = hosts.Hosts(count=1, slots=1, sources=("other",))
  other = dataclasses.replace(GAME, name="other", share=1e-9)
  settings = simulated_runs.settings(overlap.sync(4), GAME, other, hosts=named)
  record = simulate.simulate(settings)
  assert use(record).environments < 8


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"count": 0}, r"hosts\.count=0 must be at least 1"),
    ({"sources": ("gmae",)}, "hosts.sources=gmae is unknown"),
    (
      {"outages": (hosts.Outage(start_s=0.0, down_s=1.0, host=8),)},
      r"hosts\.outages\.0\.host=8 is none of hosts\.count=8; use 0 to 7",
    ),
    (
      {"outages": (hosts.Outage(start_s=0.0, down_s=float("inf")),)},
      r"hosts\.outages\.0\.down_s=inf must be a finite number above 0",
    ),
  ],
)
def test_hosts_that_cannot_be_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    simulate.Simulation(hosts=hosts.Hosts(**change)).validate()
