"""What is played beyond need ends the moment it is known not to be needed."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rl.algorithms import advantages
from rl.loop import coordinator
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import fakes
from tests.helpers import fake_run, played_members, virtual_run

GROUP = 3
DELAYS_S = (1.0, 50.0, 2.0, 40.0, 3.0)
"""Of five members; 0, 2 and 4 are the first three."""
FIRST = [0, 2, 4]


def members(extra=2, **changes):
  return dataclasses.replace(
    overlap.strict_pipeline(2, 1),
    redundancy=overlap.Redundancy(extra_members=extra),
    **changes,
  )


def groups(extra=2, wait_for_round=False, extra_members=0):
  return dataclasses.replace(
    overlap.strict_pipeline(4, 1),
    consume="ready",
    wait_for_round=wait_for_round,
    redundancy=overlap.Redundancy(
      extra_groups=extra, extra_members=extra_members
    ),
  )


def with_members(schedule, turns=1, **settings):
  return virtual_run.Run(
    schedule,
    group_size=GROUP,
    delay_s=lambda priority: DELAYS_S[priority[1]],
    source=virtual_run.Watched(fakes.Counting(turns=turns)),
    **settings,
  )


def slow_groups(schedule, **settings):
  """Of any six groups in a row the second and the fourth take 500 s."""
  return virtual_run.Run(
    schedule,
    delay_s=lambda priority: 500.0 if priority[0] % 6 in (1, 3) else 1.0,
    source=settings.pop("source", virtual_run.Watched(fakes.Counting(turns=1))),
    **settings,
  )


# Members.


def test_a_group_is_the_first_g_of_its_members_and_the_rest_is_aborted_then():
  run = with_members(members(), rounds=2).start()
  for group in run.groups:
    assert [t.index for t in group.trajectories] == FIRST
  for event in run.of("trained"):
    assert event["members"] == FIRST
    # Three answers of two ids.
    assert (event["tokens"], event["masked"]) == (6, 0)
  ready = {e["group"]: e["t"] for e in run.of("ready")}
  # The third of the first three answers takes 3 s; then an update of 1 s.
  assert ready == {0: 3.0, 1: 3.0, 2: 7.0, 3: 7.0}
  aborted = run.of("aborted")
  assert len(aborted) == 4 * 2
  for event in aborted:
    assert (event["reason"], event["index"] in FIRST) == ("redundant", False)
    assert event["t"] == ready[event["group"]]
    # Its first token, and no stop id.
    assert event["tokens"] == 1
  assert run.ledger.dropped == {"redundant": 8}
  assert run.ledger.error == 0
  assert run.sampled_by_engines == run.ledger.sampled
  assert run.violations() == []


def test_the_engine_and_the_environments_are_rid_of_a_redundant_member():
  seen = []

  async def watch(run):
    await asyncio.sleep(2.9)
    seen.append(run.engines[0].stats().running)
    await asyncio.sleep(0.2)
    seen.append(run.engines[0].stats().running)
    for group in (0, 1):
      for env in run.environments({"group": group, "attempt": 0}):
        assert env.closed

  with_members(members(), rounds=1, disturb=watch).start()
  # Of five in each of two groups two have ended; a moment later all have.
  assert seen == [6, 0]


def test_advantages_are_over_exactly_the_g_that_make_up_the_group():
  seen = []

  class Values(fake_run.Recorder):
    async def on_round(self, trained):
      seen.extend(zip(trained.groups, trained.advantages, strict=True))

  schedule = members(extra=2)
  run = fake_run.Run(
    schedule,
    rounds=4,
    group_size=GROUP,
    observer=Values(),
    estimator=advantages.Grpo(),
    source=fakes.Counting(turns=1),
    decode_s=lambda priority: 0.2 * (priority[1] not in FIRST),
  )
  run.start()
  assert len(seen) == 4 * 2
  varied = 0
  for group, values in seen:
    rewards = np.array([t.reward for t in group.trajectories], np.float64)
    assert rewards.shape == values.shape == (GROUP,)
    varied += bool(np.ptp(rewards))
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
  assert varied
  assert run.violations() == []
  assert run.ledger.error == 0


def test_a_member_with_a_fault_is_replaced_by_a_redundant_one():
  source = fakes.Counting(turns=1, fault="step", member=lambda m: m in (0, 4))
  run = with_members(members(), rounds=2)
  run.source = source
  run.start()
  for group in run.groups:
    # 0 and 4 are at fault; the others come in after 2, 40 and 50 s.
    assert [t.index for t in group.trajectories] == [1, 2, 3]
    assert all(t.status.trainable for t in group.trajectories)
  assert run.of("aborted") == []
  assert all(e["masked"] == 0 for e in run.of("trained"))
  # What the two of each group had sampled is in no update.
  assert run.ledger.dropped == {"redundant": 4 * 2 * 2}
  assert run.ledger.error == 0
  assert run.violations() == []


def test_with_more_faults_than_redundancy_they_fill_the_group_up():
  source = fakes.Counting(turns=1, fault="step", member=lambda m: m != 2)
  run = with_members(members(), rounds=2)
  run.source = source
  run.start()
  for group in run.groups:
    trainable = [t.index for t in group.trajectories if t.status.trainable]
    assert trainable == [2]
    assert len(group.trajectories) == GROUP
    values, trained = played_members.of_group(group, advantages.Grpo())
    assert not values.any()
    assert not trained.any()
  assert run.ledger.error == 0
  assert run.violations() == []


@pytest.mark.parametrize("fault", ["start", "step", "hang", "close", "nan"])
@pytest.mark.parametrize(
  "schedule",
  [
    members(1),
    groups(2, extra_members=1),
    groups(1, wait_for_round=True, extra_members=2),
    dataclasses.replace(
      overlap.in_flight(4, 2, 1),
      consume="drop",
      redundancy=overlap.Redundancy(extra_groups=2, extra_members=1),
    ),
  ],
  ids=["members", "both", "whole rounds", "drop"],
)
def test_faults_and_redundancy_together_lose_no_token(schedule, fault):
  source = fakes.Counting(
    turns=2, fault=fault, member=lambda member: member % 2 == 0
  )
  run = virtual_run.Run(
    schedule,
    group_size=GROUP,
    source=source,
    step_s=20.0,
    delay_s=lambda priority: 1.0 + (3 * priority[0] + 5 * priority[1]) % 7,
  ).start()
  assert len(run.groups) == 4 * schedule.groups_per_round
  assert {len(group.trajectories) for group in run.groups} == {GROUP}
  assert run.ledger.error == 0
  assert run.ledger.sampled == run.sampled_by_engines
  assert run.violations() == []


def test_a_slow_close_of_a_redundant_member_holds_nobody_up():
  source = virtual_run.Watched(
    fakes.Counting(turns=1),
    close_s=lambda member: 0.0 if member in FIRST else 40.0,
  )
  run = with_members(members(), rounds=2)
  run.source = source
  run.start()
  assert [e["t"] for e in run.of("ready")] == [3.0, 3.0, 7.0, 7.0]
  assert [e["t"] for e in run.of("published")] == [4.0, 8.0]
  # The run waits for what closes at its end, as long as it has patience.
  assert run.violations() == []


# Groups.


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
def test_redundant_groups_are_aborted_as_soon_as_the_round_has_its_own(whole):
  run = slow_groups(groups(2, wait_for_round=whole), rounds=3).start()
  assert run.seconds < 50
  for round_ in range(3):
    mine = range(6 * round_, 6 * round_ + 6)
    ready = [e for e in run.of("ready") if e["group"] in mine]
    dropped = [e for e in run.of("dropped") if e["group"] in mine]
    assert {e["group"] - 6 * round_ for e in ready} == {0, 2, 4, 5}
    assert {e["group"] - 6 * round_ for e in dropped} == {1, 3}
    assert {e["reason"] for e in dropped} == {"redundant"}
    # In the moment in which the last of the four was ready.
    assert {e["t"] for e in dropped} == {max(e["t"] for e in ready)}
    for event in dropped:
      assert all(env.closed for env in run.environments(event))
  assert run.violations() == []
  assert run.ledger.error == 0
  # Two members of two groups of three rounds had begun an answer.
  assert run.ledger.dropped == {"redundant": 3 * 2 * 2}


def test_tasks_of_redundant_groups_are_given_back():
  run = slow_groups(groups(2), rounds=3).start()
  assert len(run.of("submitted")) == 3 * 6
  # Slots that count: those of the groups that were trained.
  assert run.tasks.cursor["slots"] == {"counting": 3 * 4}


def test_a_round_with_extra_groups_does_not_wait_for_its_slowest():
  alone = slow_groups(groups(0), rounds=3).start()
  spared = slow_groups(groups(2), rounds=3).start()
  # Of twelve groups 1, 3, 7 and 9 are slow: each of three rounds has one.
  assert alone.seconds > 3 * 500
  assert spared.seconds < 3 * 10
  assert [len(round_) for round_ in spared.observer.rounds] == [4, 4, 4]


def test_a_run_that_stopped_with_its_round_complete_goes_on_within_its_bound():
  async def stop(run):
    while len(run.of("ready")) < 4:
      await asyncio.sleep(0.1)
    run.loop.stop()

  settings = {
    "learner": simulated_learner.LearnerSpeed(token_s=1.0),
    "rounds": 3,
  }
  first = slow_groups(groups(2), disturb=stop, **settings)
  with pytest.raises(coordinator.Stopped):
    first.start()
  saved = first.observer.last
  assert saved is not None
  assert saved.trained == 0
  assert len(saved.untrained) == 4
  again = slow_groups(groups(2), **settings).start(saved)
  assert len(again.groups) == 3 * 4
  assert again.seconds < 500
  assert again.violations() == []
  assert again.ledger.error == 0
