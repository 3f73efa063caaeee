"""The benchmarks on simulated hardware, as small as they can be."""

import asyncio

import pytest

from benchmarks import (
  rollart_affinity,
  rollart_failures,
  rollart_ladder,
  rollart_pd,
  rollart_redundancy,
  rollart_rewards,
  rollart_trajectories,
  rollart_weights,
  rollout_pipe,
  simulated,
)
from rl.simulation import distributions, resources
from scripts import make_docs


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


@pytest.mark.slow
def test_rewards_elsewhere_free_their_accelerators_for_the_rollout():
  more = {"tau0_s": 0.005, "sigma": 0.0, "seed": 0, "rounds": 1}
  before_s, dedicated = rollart_rewards.play(
    [rollart_rewards.settings(4, **more)], rollart_rewards.DEDICATED
  )
  after_s, elastic = rollart_rewards.play(
    [rollart_rewards.settings(8, **more)],
    resources.Seats(count=1000, elastic=True),
  )
  # Equal lengths: twice the accelerators, and no wait for the graders.
  assert before_s / after_s == pytest.approx(158 / 77, rel=0.02)
  assert elastic.use > dedicated.use


# What is published beside a paper's numbers: none may move by 3 points unseen.
POINTS = 0.03


def kept(name, **chosen):
  """Returns the rows of a kept result that have these values."""
  rows = make_docs.result(name)["rows"]
  return [row for row in rows if chosen.items() <= row.items()]


def test_predicted_weight_transfers_are_the_kept_ones():
  before, now = kept("rollart_weights"), rollart_weights.rows()
  assert [row["error"] for row in now] == [
    pytest.approx(row["error"], abs=POINTS) for row in before
  ]


def test_published_seconds_give_the_published_gain_where_a_step_hides_a_push():
  # 14B: (67.8 + 14.4) / (67.8 + 5.1) = 1.128 against TCP.
  gains = [
    row["gain"] for row in rollart_weights.declared() if row["exposed"] == "TCP"
  ]
  assert gains == [pytest.approx(x, abs=1e-3) for x in (1.163, 1.128, 1.146)]
  low, high = rollart_weights.GAIN
  assert all(low <= round(gain, 2) <= high for gain in gains)


@pytest.mark.slow
def test_hiding_a_transfer_behind_decoding_gains_what_is_kept():
  result = make_docs.result("rollart_weights")
  now = rollart_weights.steps(rollart_weights.decoding, "8B", result["rounds"])
  before = [
    row["gain"]
    for row in result["gains"]
    if (row["played"], row["model"]) == ("decoding", "8B")
  ]
  assert [row["gain"] for row in now] == [
    pytest.approx(gain, abs=POINTS) for gain in before
  ]


def test_latencies_alone_give_the_kept_gains_of_trajectories():
  for row in kept("rollart_trajectories"):
    gain = rollart_trajectories.model(row["sigma_s"], draws=40)
    assert gain / row["published"] == pytest.approx(
      row["model"] / row["published"], abs=POINTS
    )


def test_cells_that_were_held_out_are_predicted_as_kept():
  split = make_docs.result("rollart_redundancy")["held_out"]
  # Draws of the fitted numbers alone: the fit itself takes seconds.
  lengths = rollart_redundancy.Lengths(draws=100)
  fitted = lengths.gains(split["prompt"], split["member"])
  for row in split["rows"]:
    cell = row["group size"], row["groups"]
    slower = (cell[0] * cell[1] / 256) ** split["exponent"]
    gain = fitted[cell] / slower
    assert simulated.deviation(gain, row["published"]) == pytest.approx(
      row["deviation"], abs=POINTS
    )


@pytest.mark.slow
def test_a_step_with_a_failure_takes_what_is_kept():
  kept_result = make_docs.result("rollart_failures")
  rates = rollart_failures.Rates(**kept_result["fitted"])
  now = rollart_failures.gone(rates, 16)
  (row,) = kept("rollart_failures", failure=now["failure"])
  assert now["error"] == pytest.approx(row["error"], abs=POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", rollart_pd.MODELS)
def test_splitting_prefill_and_decoding_gains_what_is_kept(model):
  (row,) = kept("rollart_pd", model=model, nodes="1P3D")
  now = rollart_pd.row(model, "1P3D", rounds=1)
  assert now["error"] == pytest.approx(row["error"], abs=POINTS)


def test_a_token_reads_all_weights_and_the_keys_and_values_of_its_batch():
  # A sequence has 4.2 GB, the weights have 66 GB; four H20 read 11.2 TB/s.
  speed = rollart_pd.speed(rollart_pd.MODELS["32B"], rollart_pd.H20, 1.0)
  assert speed.tau_s(16) == pytest.approx((65.6e9 + 16 * 4.19e9) / 11.2e12,
                                          rel=1e-3)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cell", [(8, 34), (10, 32), (12, 36)])
def test_redundancy_gains_what_is_kept(cell):
  (row,) = kept("rollart_redundancy", **{"group size": cell[0],
                                         "groups": cell[1]})  # fmt: skip
  seconds = [
    rollart_redundancy.play(rollart_redundancy.settings(*each, rounds=7))
    for each in ((8, 32), cell)
  ]
  gain = seconds[0]["rollout_s"] / seconds[1]["rollout_s"]
  assert simulated.deviation(gain, row["published"]) == pytest.approx(
    row["deviation"], abs=POINTS
  )


@pytest.mark.slow
def test_trajectories_gain_what_is_kept():
  (row,) = kept("rollart_trajectories", sigma_s=3)
  latency = distributions.Gaussian(mean=10.0, sigma=3.0)
  together, alone = rollart_trajectories.compare(
    rollart_trajectories.settings(latency, rounds=7)
  )
  deviation = simulated.deviation(together / alone, row["published"])
  assert deviation == pytest.approx(row["deviation"], abs=POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serial", "CGP + FGD", "by tokens"])
def test_pipelined_rounds_take_what_is_kept(name):
  (row,) = kept("rollout_pipe", R=32, schedule=name)
  rates = rollout_pipe.Rates(**make_docs.result("rollout_pipe")["rates"])
  schedule = rollout_pipe.schedules(32)[name]
  played = rollout_pipe.play(schedule, rates, rounds=7)
  deviation = simulated.deviation(played["T"], row["published"])
  assert deviation == pytest.approx(row["deviation"], abs=POINTS)
