"""Parts of a result, worked out by hand."""

import dataclasses

import pytest

from rl.schedule import overlap
from rl.simulation import distributions, simulate
from rl.simulation import learner as simulated_learner
from rl.simulation import result as simulation_result
from tests.helpers import simulated_runs

CONSTANT, HEAVY = simulated_runs.CONSTANT, simulated_runs.HEAVY
SPEED, close = simulated_runs.SPEED, simulated_runs.close
run = simulated_runs.run


def test_the_on_policy_bound_is_the_tail_and_the_last_batch():
  # Groups are ready at 1, 2, 3 and 50 s; two batches of 4 s, an update of 1 s.
  work = [("accumulate", 4.0), ("accumulate", 4.0), ("update", 1.0)]
  bound = simulation_result.on_policy_s([1.0, 2.0, 3.0, 50.0], work, 2)
  assert bound == pytest.approx(50.0 + 4.0 + 1.0)


def test_the_on_policy_bound_is_the_first_batch_and_all_work():
  work = [("accumulate", 40.0), ("update", 1.0)] * 2
  bound = simulation_result.on_policy_s([1.0, 2.0, 3.0, 5.0], work, 2)
  # Nothing can begin before 2 s, and 82 s of work follow.
  assert bound == pytest.approx(2.0 + 82.0)


def test_the_first_round_of_a_run_has_no_publish():
  # 2 s of decoding and 1.816 s of training; later ones begin with 5 s more.
  first = run(overlap.sync(4), rounds=1, warmup=0)
  assert (first.step_s, first.on_policy_s) == (close(3.816), close(3.816))
  assert first.ideal_s <= first.step_s
  both = run(overlap.sync(4), rounds=2, warmup=0)
  step_s = close(3.816 + 5.0 / 2)
  assert (both.step_s, both.on_policy_s) == (step_s, step_s)
  assert both.publish_s == close(5.0)
  # Decoding stands for 2 s of them.
  assert both.ideal_s == close(2.0 + 2.0 / 2)


def test_what_is_described_before_may_hold_up_the_first_batch_alone():
  work = [("accumulate", 4.0), ("update", 1.0)]
  ready = [1.0, 2.0]
  assert simulation_result.on_policy_s(ready, work, 2, 1.5) == 2.0 + 5.0
  assert simulation_result.on_policy_s(ready, work, 2, 30.0) == 30.0 + 5.0


def test_an_engine_is_in_a_state_until_the_next_or_the_end():
  states = [(0.0, "gate"), (1.0, "decode"), (3.0, "gate"), (4.0, "decode")]
  assert simulation_result.in_state(states, 9.0, "decode") == [
    (1.0, 3.0),
    (4.0, 9.0),
  ]
  assert simulation_result.in_state(states, 9.0, "publish") == []


def test_decoding_is_used_as_far_as_tokens_are_sampled():
  # Nothing is sampled in one round and trained in another, so this is D / T,
  # however few of the slots are in use at the end of a round.
  result = run(overlap.sync(4), HEAVY)
  assert result.decode_use == close(result.decode_s / result.step_s)
  assert result.decode_use < 0.5


def test_slots_that_are_always_in_use_are_all_of_decoding():
  # A learner that takes no time, and four rounds of groups to decode at once.
  result = run(
    overlap.in_flight(4, 4),
    rounds=14,
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=0.0),
      pools=(
        simulate.EnginePool(
          engines=1, speed=dataclasses.replace(SPEED, update_s=0.0)
        ),
      ),
      transfer_s=0.0,
    ),
  )
  assert result.decode_use == close(1.0)


def test_idle_time_while_rewards_are_called_is_theirs():
  slow = dataclasses.replace(CONSTANT, reward_s=distributions.Fixed(20.0))
  result = run(overlap.sync(4), slow)
  step_s = 8.816 + 20.0
  assert result.step_s == close(step_s)
  assert result.decode_idle["rewards"] == close(20.0 / step_s)
  assert result.decode_idle["gate"] == close((1.816 + 3.0) / step_s)


def test_idle_time_while_a_reward_is_called_again_is_its_too():
  broken = dataclasses.replace(
    CONSTANT, reward_s=distributions.Fixed(1.0), reward_fault=1.0
  )
  result = run(overlap.sync(4), broken)
  # Three calls, and 0.5 and 1 s between them; nothing is left to train.
  step_s = 2.0 + 4.5 + 1.0 + 5.0
  assert result.step_s == close(step_s)
  assert result.decode_idle["rewards"] == close(4.5 / step_s)


def _published(schedule, transfer_s, update_s=0.0):
  """Runs a learner of 10 s; the groups of a round decode in 2 s."""
  speed = dataclasses.replace(SPEED, update_s=update_s)
  return run(
    schedule,
    rounds=15,
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=10.0),
      pools=(simulate.EnginePool(engines=1, speed=speed),),
      transfer_s=transfer_s,
    ),
  )


_KEEP_KV = overlap.in_flight(4, 2, on_publish="keep_kv")


@pytest.mark.parametrize(
  "schedule",
  [
    overlap.in_flight(4, 1),
    overlap.in_flight(4, 4),
    _KEEP_KV,
    dataclasses.replace(overlap.in_flight(4, 1), consume="drop"),
    overlap.one_step_off(4),
    overlap.bounded(4, 4),
  ],
)
def test_a_publish_behind_training_reaches_the_ideal_step(schedule):
  # 8 s on the way and 2 s of decoding fit into 10 s of training, to the second.
  result = _published(schedule, 8.0)
  assert (result.step_s, result.ideal_s) == (close(10.0), close(10.0))
  assert result.learner_idle == {"publish": close(0.0), "data": close(0.0)}
  assert max(result.group_lags) == schedule.max_staleness
  assert list(result.violations) == []


@pytest.mark.parametrize("eta", [1, 3])
def test_decoding_that_stands_still_is_hidden_behind_training_too(eta):
  # A learner of 10 s hides 2 s of decoding and 5 s in which nothing decodes.
  for schedule in (overlap.bounded(4, eta), overlap.in_flight(4, eta)):
    result = _published(schedule, 0.0, update_s=5.0)
    assert (result.step_s, result.ideal_s) == (close(10.0), close(10.0))
    assert result.blocked_s == 5.0


def test_what_a_bound_of_1_cannot_hide_is_half_of_what_is_too_long():
  # Admission to publish is 2 s of decoding, 10 of training and 9 on the way:
  # two rounds take turns, so a step is (2 + 10 + 9) / 2. A bound of 2 hides it.
  result = _published(overlap.in_flight(4, 1), 9.0)
  assert (result.step_s, result.ideal_s) == (close(10.5), close(10.0))
  assert result.learner_idle["data"] == close(0.5 / 10.5)
  assert _published(overlap.in_flight(4, 2), 9.0).step_s == close(10.0)


def test_publishes_follow_one_another_and_the_learner_waits_for_the_last():
  result = _published(overlap.in_flight(4, 4), 11.0, update_s=1.0)
  assert (result.step_s, result.ideal_s) == (close(12.0), close(12.0))
  assert result.learner_idle == {
    "publish": close(2.0 / 12.0),
    "data": close(0.0),
  }


def test_with_a_bound_of_0_the_learner_waits_for_its_weights():
  result = _published(overlap.sync(4), 8.0)
  assert result.step_s == close(2.0 + 10.0 + 8.0)
  assert result.learner_idle["publish"] == close(8.0 / 20.0)


def test_decoding_is_blocked_for_as_long_as_its_engines_are_on_average():
  # One samples 400 a second and stands for 2 s; two more, of a slot each, 8 s.
  slow = dataclasses.replace(SPEED, slots=1, update_s=8.0)
  cluster = simulate.Cluster(
    pools=(
      simulate.EnginePool(name="a", engines=1, speed=SPEED),
      simulate.EnginePool(name="b", engines=2, speed=slow),
    )
  )
  one = 1 / (0.01 * (1 + 1 / 8))
  assert cluster.blocked_s == close((400 * 2 + 2 * one * 8) / (400 + 2 * one))


@pytest.mark.parametrize("describe_s", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("name", ["sync", "pipe"])
def test_nothing_on_policy_is_faster_than_its_bound(name, describe_s):
  # Groups whose environments do not start are ready when weights arrive, and
  # 8/3 s are not whole microseconds: neither may move work to another round.
  schedule = overlap.sync(4) if name == "sync" else overlap.rollout_pipe(4, 2)
  result = run(
    schedule,
    dataclasses.replace(HEAVY, start_fault=0.6),
    seed=3,
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(
        token_s=1e-3, update_s=8 / 3, describe_s=describe_s
      ),
      pools=(simulate.EnginePool(engines=1, speed=SPEED),),
      transfer_s=0.0,
    ),
  )
  assert result.on_policy_efficiency is not None
  assert 0.9 < result.on_policy_efficiency <= 1.0 + 1e-6
