"""What stops, hangs or starves asynchronous trainers elsewhere does not here.

All in virtual time: a deadlock raises at once, and a share of time is exact.
"""

import collections
import dataclasses

import numpy as np
import pytest

from rl.algorithms import advantages, group_filters
from rl.data import trajectory
from rl.rollout import episode
from rl.schedule import overlap
from rl.simulation import engine as simulated_engine
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.testing import fakes
from tests.helpers import played_members, virtual_run
from tests.helpers import players_under_test as players

ASYNCHRONOUS = {
  "drain": overlap.bounded(4, 2, 1),
  "recompute": overlap.in_flight(4, 2, 1),
  "keep kv": overlap.in_flight(4, 2, 1, on_publish="keep_kv"),
  "drop": dataclasses.replace(overlap.in_flight(4, 2, 1), consume="drop"),
}


# Concurrency.


def narrow(slots):
  """An engine that decodes so many sequences at once, ten ids a second."""
  return lambda: simulated_engine.SimulatedEngine(
    simulated_processor.Speed(tau0_s=0.1, b0=8.0, slots=slots, update_s=0.5),
    lambda request: 2 + request.seed % 9,
  )


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_fewer_slots_than_episodes_in_flight_do_not_deadlock(name, slots):
  # 12 groups of 4 may be in flight: 48 episodes of 2 turns for a few slots.
  run = virtual_run.Run(
    ASYNCHRONOUS[name],
    rounds=6,
    group_size=4,
    build=narrow(slots),
    source=fakes.Counting(turns=2, delay_s=lambda index, step: 0.3),
    max_graders=1,
  ).start()
  assert run.observer.published == list(range(1, 7))
  assert run.violations() == []
  assert run.ledger.error == 0
  assert run.ledger.sampled == run.sampled_by_engines


# Environments.


@pytest.mark.parametrize(
  "fault", ["start", "step", "hang_start", "hang", "hang_close", "word"]
)
@pytest.mark.parametrize("name", ["sync", *ASYNCHRONOUS])
def test_an_environment_that_raises_or_hangs_neither_ends_nor_holds_a_run(
  name, fault
):
  step_s = 10.0
  run = virtual_run.Run(
    {"sync": overlap.sync(4), **ASYNCHRONOUS}[name],
    source=fakes.Counting(fault=fault, member=lambda member: member == 1),
    step_s=step_s,
    group_size=3,
  ).start()
  assert len(run.groups) == 4 * 4
  # Every round waits for one deadline, two answers, an update and a close.
  assert run.seconds < 4 * (2 * step_s + 5)
  faults = [t.fault for g in run.groups for t in g.trajectories if t.fault]
  assert len(faults) == (0 if fault == "hang_close" else 16)
  for group in run.groups:
    values, trained = played_members.of_group(group, advantages.Reinforce())
    assert trained.sum() == 3 - (fault != "hang_close")
    assert not values[~trained].any()
  assert run.ledger.error == 0
  assert run.violations() == []


# Stragglers.

STRAGGLER_S = 8.0
# For which a synchronous learner waits 60 % of a round: 8 / (8 + W).
UPDATE_S = STRAGGLER_S / 0.6 - STRAGGLER_S


def straggling(schedule, rounds=40):
  """One of eight members takes eight times as long in its environment."""
  return virtual_run.Run(
    schedule,
    rounds=rounds,
    group_size=8,
    delay_s=lambda priority: 0.0,
    source=fakes.Counting(
      turns=1, lag_s=lambda index, member: STRAGGLER_S if member == 5 else 1.0
    ),
    learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=UPDATE_S),
  )


def waiting(run):
  """Returns the share of all rounds in which the learner waited."""
  updates = run.of("update")
  busy = sum(e["end"] - e["start"] for e in updates)
  return 1 - busy / updates[-1]["end"]


def test_a_learner_in_step_waits_for_a_straggler_in_every_round():
  run = straggling(overlap.sync(2), rounds=10)
  # Of each round 8 s wait and 5.33 s work.
  assert waiting(run.start()) == pytest.approx(0.6, abs=1e-6)


def test_with_two_rounds_in_flight_it_waits_under_five_percent():
  run = straggling(overlap.in_flight(2, 2, 2)).start()
  # Only for the first round: later ones had two updates, 10.67 s, to come in.
  # 8 s of 8 + 40 * 5.33 are 3.6 %.
  share = STRAGGLER_S / (STRAGGLER_S + 40 * UPDATE_S)
  assert waiting(run) == pytest.approx(share, abs=1e-6)
  assert waiting(run) < 0.05
  waits = [e["start"] for e in run.of("update")]
  before = [e["end"] for e in run.of("update")]
  later = [a - b for a, b in zip(waits[1:], before, strict=False)]
  assert max(later) == pytest.approx(0.0, abs=1e-6)
  assert run.violations() == []


# Members that are alike.


def test_members_of_a_group_sample_different_answers():
  run = virtual_run.Run(
    overlap.in_flight(4, 2, 1),
    group_size=8,
    source=fakes.Counting(turns=1),
  ).start()
  for group in run.groups:
    assert len({tuple(t.ids.tolist()) for t in group.trajectories}) == 2


@pytest.mark.parametrize("name", ["sync", "drop"])
def test_a_group_of_equal_answers_teaches_nothing_and_is_seen_to(name):
  refills = 3
  run = virtual_run.Run(
    {"sync": overlap.sync(4), **ASYNCHRONOUS}[name],
    group_size=4,
    source=fakes.Counting(turns=1),
    answers=(players.YES,),
    dynamic_sampling=group_filters.DynamicSampling(max_refills=refills),
  ).start()
  # Each place is played again as often as it may; the last try is trained.
  reasons = collections.Counter(e["reason"] for e in run.of("dropped"))
  assert reasons == {"zero_variance": refills * 16}
  assert {e["attempt"] for e in run.of("trained")} == {refills}
  assert len(run.groups) == 4 * len(run.observer.metrics)
  for group in run.groups:
    values, _ = played_members.of_group(group, advantages.Grpo())
    assert np.array_equal(values, np.zeros(4, np.float32))
  assert run.ledger.error == 0
  assert run.violations() == []


# The end.


@pytest.mark.parametrize("name", virtual_run.SCHEDULES)
def test_the_last_evaluation_is_of_the_last_policy_and_comes(name):
  seen = []

  async def evaluate(version):
    task = run.source.task(len(seen), "eval")
    played = await run.player().play_alone(
      episode.Episode(task, len(seen), 0, run.seed)
    )
    seen.append((version, played.versions, played.status))

  run = virtual_run.Run(
    virtual_run.SCHEDULES[name],
    rounds=5,
    observer=virtual_run.Observer(evaluate),
    transfer_s=3.0,
    num_engines=2,
  )
  run.start()
  done = trajectory.Status.COMPLETED
  # Two answers of two ids each, all of the policy that is evaluated.
  assert seen == [(v, [(v, 4)], done) for v in range(1, 6)]
  assert run.observer.published == [1, 2, 3, 4, 5]


# Lost prompts.

PROMPTS = 512


@pytest.mark.parametrize(
  "schedule",
  [
    overlap.one_step_off(32, 8),
    overlap.in_flight(32, 3, 8),
  ],
  ids=["one step off", "in flight"],
)
def test_of_512_prompts_each_is_trained_exactly_once(schedule):
  run = virtual_run.Run(
    schedule,
    rounds=PROMPTS // 32,
    pool=PROMPTS,
    source=fakes.Counting(turns=1, fault="step", faulty=lambda i: i % 9 == 0),
    delay_s=lambda priority: 1.0 + priority[0] % 7,
    num_engines=2,
  ).start()
  tasks = [group.task.index for group in run.groups]
  assert sorted(tasks) == list(range(PROMPTS))


def test_where_groups_are_dropped_every_prompt_is_trained_or_accounted_for():
  schedule = dataclasses.replace(
    overlap.in_flight(32, 1, 8),
    consume="drop",
    redundancy=overlap.Redundancy(extra_groups=2),
  )
  run = virtual_run.Run(
    schedule,
    rounds=8,
    source=fakes.Counting(turns=1),
    delay_s=lambda priority: 1.0 + 20 * (priority[0] % 7 == 0),
    num_engines=2,
  ).start()
  drawn = {(e["group"], e["attempt"]) for e in run.of("submitted")}
  trained = {(e["group"], e["attempt"]) for e in run.of("trained")}
  dropped = {(e["group"], e["attempt"]) for e in run.of("dropped")}
  # When the run ended two more than it needed were ready or being played.
  left = {
    (e["group"], e["attempt"])
    for e in [*run.of("aborted", reason="stopped"), *run.of("ready")]
  }
  left -= trained | dropped
  assert len(trained) == len(run.of("trained")) == 8 * 32
  assert trained | dropped | left == drawn
  assert not trained & dropped
  assert len(left) == 2
  assert {e["reason"] for e in run.of("dropped")} == {"stale"}
  assert run.ledger.error == 0
  assert run.violations() == []
