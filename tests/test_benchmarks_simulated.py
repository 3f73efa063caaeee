"""The benchmarks on simulated hardware, as small as they can be."""

import asyncio

import pytest

from benchmarks import (
  rollart_affinity,
  rollart_ladder,
  rollart_redundancy,
  rollart_rewards,
  rollart_trajectories,
  rollout_pipe,
  simulated,
)
from rl.simulation import distributions


def test_a_barrier_opens_when_all_who_are_left_have_come():
  async def play() -> list[str]:
    barrier, seen = simulated.Barrier(3), []

    async def one(name: str, turns: int) -> None:
      for turn in range(turns):
        await barrier.wait(leaves=turn == turns - 1)
        seen.append(f"{name}{turn}")

    async with asyncio.TaskGroup() as tasks:
      for name, turns in (("a", 1), ("b", 2), ("c", 2)):
        tasks.create_task(one(name, turns))
    return seen

  seen = asyncio.run(play())
  assert sorted(seen[:3]) == ["a0", "b0", "c0"]
  assert sorted(seen[3:]) == ["b1", "c1"]


def test_episodes_in_lockstep_wait_for_the_slowest_of_each_turn():
  latency = distributions.Gaussian(mean=10.0, sigma=3.0)
  chosen = rollart_trajectories.settings(latency, rounds=1, turns=3, groups=2)
  together, alone = rollart_trajectories.compare(chosen)
  # 16 episodes of 3 turns of 10 s: the slowest of each turn cannot be faster
  # than the slowest sum.
  assert 30.0 < alone < together < 60.0


def test_without_noise_lockstep_costs_nothing():
  latency = distributions.Fixed(10.0)
  chosen = rollart_trajectories.settings(latency, rounds=1, turns=3, groups=2)
  together, alone = rollart_trajectories.compare(chosen)
  assert together == pytest.approx(alone, rel=1e-3)


def test_load_slows_decoding_by_the_power_at_both_ends():
  b0 = rollart_redundancy.load_b0(256, 432, 0.2)
  assert (1 + 432 / b0) / (1 + 256 / b0) == pytest.approx((432 / 256) ** 0.2)


def test_two_h800_and_six_h20_relate_as_they_were_measured():
  # 3.1: H800 time is 0.53 of H20's in FrozenLake, with 82 % of context.
  ratio = rollart_affinity.slowdown(0.82) * 2 / 6
  assert 1 / ratio == pytest.approx(0.53, abs=0.01)


def test_the_limit_of_a_mixed_pool_lies_between_its_parts():
  for one in ("72 H800", "208 H20"):
    assert 1.0 < rollart_affinity.limit(rollart_affinity.MIDDLE, one) < 2.0


def test_ours_costs_as_much_less_as_was_published():
  # 96 H800 and 32 H20 by 128 H800: (96 * 2.85 + 32) / (128 * 2.85) = 0.838.
  ours, other = rollart_ladder.RUNGS["ours"], rollart_ladder.RUNGS["sync"]
  model = rollart_ladder.MODELS["8B"]
  assert rollart_ladder.cost(ours, model) == pytest.approx(0.838, abs=1e-3)
  assert rollart_ladder.cost(other, model) == pytest.approx(1.0)


def test_pipelining_ends_a_round_earlier_than_the_serial_schedule():
  rates = rollout_pipe.Rates(tau0_s=0.01, token_s=2e-4)
  schedules = rollout_pipe.schedules(4)
  serial, piped = (
    rollout_pipe.play(schedules[name], rates, rounds=1)
    for name in ("serial", "CGP + FGD")
  )
  assert piped["T"] < serial["T"]
  assert piped["first"] < serial["first"]


@pytest.mark.parametrize(
  ("starts_s", "max_workers", "use", "waits_s"),
  [
    # Each begins 2 s later and ends its worker 1 s after it: 1 of 4 s is work.
    ((0.0, 0.5, 10.0), 9, 1 / 4, (2.0, 2.0)),
    # The second begins when the first ends, at 3 s; the worker lives for 5 s,
    # the one of the third call for 4 s.
    ((0.0, 0.5, 10.0), 1, 3 / 9, (6.5 / 3, 2.5)),
    # The second finds the worker idle: it lives for 2 + 1 + 0.5 + 1 + 1 s.
    ((0.0, 3.5), 9, 2 / 5.5, (1.0, 2.0)),
  ],
)
def test_a_platform_starts_and_ends_workers_by_the_calls(
  starts_s, max_workers, use, waits_s
):
  calls = [rollart_rewards.Call(start_s, 1.0) for start_s in starts_s]
  platform = rollart_rewards.Platform(max_workers=max_workers)
  costs = rollart_rewards.serve(calls, platform)
  assert costs["use"] == pytest.approx(use)
  assert (costs["mean_wait_s"], costs["max_wait_s"]) == pytest.approx(waits_s)
  assert costs["scaled_to_zero"] == (2 if 10.0 in starts_s else 1)


@pytest.mark.slow
def test_rewards_elsewhere_free_their_accelerators_for_the_rollout():
  more = {"tau0_s": 0.005, "sigma": 0.0, "seed": 0, "rounds": 1}
  dedicated = rollart_rewards.play(
    rollart_rewards.settings(4, **more), rollart_rewards.GRADERS
  )
  serverless = rollart_rewards.play(rollart_rewards.settings(8, **more))
  # Equal lengths: twice the accelerators, and no wait for the graders.
  gain = dedicated.rollout_s / serverless.rollout_s
  assert gain == pytest.approx(158 / 77, rel=0.02)
