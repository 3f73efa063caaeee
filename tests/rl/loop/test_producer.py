"""Tests of the producer: replays, dropped and recycled groups, redundancy."""

import asyncio
import collections
import dataclasses
import json

import pytest

from envs import mixture
from rl.algorithms import group_filters
from rl.audit import event_log
from rl.loop import coordinator, progress
from rl.schedule import overlap
from rl.simulation import engine as simulated_engine
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.testing import fakes
from tests.helpers import virtual_run

EAGER_DROP = dataclasses.replace(
  overlap.in_flight(4, 1, 1),
  consume="drop",
  redundancy=overlap.Redundancy(extra_groups=4),
  too_slow_after=9,
)


def stopped(run, saved=None):
  """Returns what a run leaves behind that stops, after its way to the disk."""
  with pytest.raises(coordinator.Stopped):
    run.start(saved)
  last = run.observer.last
  return progress.from_host(last.state, json.loads(json.dumps(last.to_host())))


def test_what_was_too_old_does_not_use_up_the_refills_of_a_place():
  refills = 2
  this = virtual_run.Run(
    EAGER_DROP,
    rounds=30,
    source=fakes.Counting(turns=1),
    dynamic_sampling=group_filters.DynamicSampling(max_refills=refills),
    learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=5.0),
  ).start()
  reasons = collections.defaultdict(collections.Counter)
  for event in this.of("dropped"):
    reasons[event["group"]][event["reason"]] += 1
  assert any(dropped["stale"] for dropped in reasons.values())
  equal = [
    group.group_id
    for group in this.groups
    if len({t.reward for t in group.trajectories}) == 1
  ]
  assert equal
  assert {reasons[group]["zero_variance"] for group in equal} == {refills}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together(fakes.Counting):
  """A source whose members play each other, as it says."""

  members_together: int = 2


@pytest.mark.parametrize(
  ("schedule", "source", "reason"),
  [
    (
      overlap.in_flight(4, 1, 2),
      Together(),
      "members of its group play each other",
    ),
    (
      overlap.bounded(4, 1, 2),
      fakes.Counting(),
      "engines drain, so that its tokens",
    ),
  ],
)
def test_members_that_cannot_go_on_are_begun_anew_and_named(
  schedule, source, reason
):
  settings = {
    "rounds": 4,
    "delay_s": lambda p: 1.0 + (7 * p[0] + 3 * p[1]) % 11,
  }

  def stop(event):
    if event["kind"] == "publish_start":
      asyncio.get_running_loop().call_later(0.5, run.loop.stop)

  run = virtual_run.Run(schedule, source=source, **settings, listeners=(stop,))
  saved = stopped(run)
  rest = virtual_run.Run(schedule, source=source, **settings).start(saved)
  lost = rest.of("begun_anew")
  assert any(event["tokens"] for event in lost)
  assert all(reason in event["reason"] for event in lost)
  assert rest.ledger.error == 0


def test_a_run_that_stops_as_soon_as_it_is_resumed_forgets_no_group():
  schedule = overlap.in_flight(4, 1, 1)
  settings = {"rounds": 4, "delay_s": lambda priority: 1.0 + priority[0] % 3}

  def stop_at(kind, version):
    def listen(event):
      if event["kind"] == kind and event.get("version", version) == version:
        run.loop.stop()

    return listen

  run = virtual_run.Run(
    schedule, **settings, listeners=(stop_at("published", 2),)
  )
  saved = stopped(run)
  assert saved.in_flight
  run = virtual_run.Run(
    schedule, **settings, listeners=(stop_at("resumed", saved.trained),)
  )
  again = stopped(run, saved)
  assert again.to_host()["in_flight"] == saved.to_host()["in_flight"]
  last = virtual_run.Run(schedule, **settings).start(again)
  assert len(last.groups) == (4 - saved.trained) * 4
  assert last.ledger.error == 0


def test_what_an_attempt_has_gone_through_is_saved_with_it():
  schedule = dataclasses.replace(EAGER_DROP, redundancy=overlap.Redundancy())

  def listen(event):
    if event["kind"] == "submitted" and event["attempt"] == 3:
      run.loop.stop()

  run = virtual_run.Run(
    schedule,
    rounds=9,
    delay_s=lambda priority: 1000.0 if priority[0] == 0 else 1.0,
    listeners=(listen,),
  )
  saved = stopped(run)
  assert (saved.in_flight[0].number, saved.in_flight[0].stale) == (3, 3)


# Groups that are dropped or recycled.


DROP = dataclasses.replace(overlap.in_flight(4, 1, 1), consume="drop")
RECYCLE = dataclasses.replace(DROP, consume="recycle")
FOREVER_S = 1000.0


def run(schedule=DROP, slow=(0,), turns=1, **settings):
  """Slots in `slow` take forever, at every attempt; others take 1 s."""
  return virtual_run.Run(
    schedule,
    delay_s=lambda priority: FOREVER_S if priority[0] in slow else 1.0,
    source=virtual_run.Watched(fakes.Counting(turns=turns)),
    **settings,
  )


def stale_at(run, group):
  """Returns when attempt 0 of a group had to go: too old for the next round."""
  (first,) = {e["version"] for e in run.of("first_token", group=group)[:2]}
  doomed = first + run.schedule.max_staleness
  return run.of("update", version=doomed)[0]["end"]


@pytest.mark.parametrize("schedule", [DROP, RECYCLE], ids=["drop", "recycle"])
def test_what_can_no_longer_make_it_is_cancelled_at_once(schedule):
  left = []

  async def watch(run):
    while not run.of("dropped"):
      await asyncio.sleep(0.25)
    left.extend(env.closed for env in run.environments(run.of("dropped")[0]))

  this = run(schedule, rounds=4, disturb=watch).start()
  dropped = this.of("dropped", group=0, attempt=0)[0]
  aborted = this.of("aborted", group=0, attempt=0)
  assert dropped["reason"] == "stale"
  assert [e["reason"] for e in aborted] == ["stale", "stale"]
  # In the moment in which the round that it could have joined was trained.
  assert {dropped["t"], *(e["t"] for e in aborted)} == {stale_at(this, 0)}
  assert dropped["t"] < FOREVER_S / 10
  # Each member had its first token, which nobody will train.
  assert dropped["tokens"] == sum(e["tokens"] for e in aborted) == 2
  assert left == [True, True]


def test_drop_plays_another_task_of_the_same_source():
  one, two = fakes.Counting(turns=1), fakes.Counting(turns=1, name="other")
  parts = (mixture.Part(one), mixture.Part(two))
  this = run(rounds=6, slow=(0, 1))
  this.source = mixture.Mixture(parts)
  this.start()
  for group in (0, 1):
    tries = this.of("submitted", group=group)
    assert len(tries) > 1
    sources = {e["source"] for e in tries[: DROP.too_slow_after]}
    assert len(sources) == 1
    tasks = [e["task"] for e in tries]
    assert len(set(tasks)) == len(tasks)
  assert {e["source"] for e in this.of("submitted")} == {"counting", "other"}


def test_recycle_plays_the_same_task_with_other_noise():
  this = run(RECYCLE, rounds=6)
  again = []
  this.delay_s = lambda priority: (
    FOREVER_S if priority[0] == 0 and not this.of("dropped") else 1.0
  )
  this.start()
  again = this.of("submitted", group=0)
  assert [e["attempt"] for e in again] == [0, 1]
  assert len({e["task"] for e in again}) == 1
  trained = this.of("trained", group=0)
  assert [e["attempt"] for e in trained] == [1]
  assert this.violations() == []
  assert this.ledger.dropped == {"stale": 2}
  assert this.ledger.error == 0


@pytest.mark.parametrize("consume", ["drop", "recycle"])
def test_a_place_that_is_always_too_slow_is_reported_and_the_run_ends(consume):
  schedule = dataclasses.replace(DROP, consume=consume, too_slow_after=2)
  this = run(schedule, rounds=12)
  # It may take as long as it likes until its source was too slow twice.
  this.delay_s = lambda priority: (
    FOREVER_S
    if priority[0] == 0 and len(this.of("source_too_slow")) < 2
    else 1.0
  )
  this.start()
  too_slow = this.of("source_too_slow")
  assert [e["attempts"] for e in too_slow] == [2, 2]
  assert len(this.of("dropped", reason="stale")) == 4
  # What was too slow is replaced: the third and fifth attempts are new tasks.
  tasks = [e["task"] for e in this.of("submitted", group=0)]
  assert [e["task"] for e in too_slow] == [tasks[1], tasks[3]]
  assert len(set(tasks)) == (3 if consume == "recycle" else 5)
  assert len(this.groups) == 12 * 4
  assert this.violations() == []


@pytest.mark.parametrize("eta", [1, 2, 3])
@pytest.mark.parametrize("consume", ["drop", "recycle"])
@pytest.mark.parametrize("on_publish", ["drain", "recompute"])
def test_the_bound_holds_at_every_turn_of_what_is_trained(
  eta, consume, on_publish
):
  schedule = dataclasses.replace(
    overlap.in_flight(4, eta, 2), consume=consume, on_publish=on_publish
  )
  # Each place has its own pace, from one round to ten.
  this = virtual_run.Run(
    schedule,
    rounds=10,
    source=fakes.Counting(turns=3),
    delay_s=lambda priority: 1.0 + (priority[0] * 7 + priority[1]) % 11,
  ).start()
  for number, round_ in enumerate(this.observer.rounds):
    for group in round_:
      for member in group.trajectories:
        for turn in member.turns:
          assert number - eta <= turn.versions.min() <= number
  assert max(event_log.staleness(this.log.events)) <= eta
  assert this.violations() == []
  assert this.ledger.error == 0


def test_dropping_spares_the_learner_the_wait_for_a_straggler():
  kept = run(overlap.in_flight(4, 1, 1), rounds=4).start()
  dropped = run(DROP, rounds=4, slow=(0,))
  dropped.delay_s = lambda priority: (
    FOREVER_S if priority[0] == 0 and not dropped.of("dropped") else 1.0
  )
  dropped.start()
  assert kept.seconds > FOREVER_S
  assert dropped.seconds < FOREVER_S / 10


def test_a_stopped_run_begins_no_further_attempt():
  async def stop(run):
    while not run.of("aborted", reason="stale"):
      await asyncio.sleep(0.1)
      if run.of("trained", version=1):
        run.loop.stop()

  this = run(slow=(0, 8), rounds=10, disturb=stop)
  with pytest.raises(coordinator.Stopped):
    this.start()
  last = this.of("submitted")[-1]
  stopped = this.of("aborted", reason="stopped")
  assert stopped
  assert last["t"] <= min(e["t"] for e in stopped)
  assert this.ledger.error == 0
  assert this.sampled_by_engines == this.ledger.sampled
  assert this.violations() == []


def test_an_answer_that_is_ready_when_its_play_is_aborted_is_not_lost():
  ready_s = 2.0
  engine = []

  def build():
    # Answers of two ids, one a second, which come through a future.
    speed = simulated_processor.Speed(tau0_s=1.0, b0=1e18)
    engine.append(simulated_engine.SimulatedEngine(speed, lambda request: 2))
    return engine[0]

  async def abort(run):
    await asyncio.sleep(1.0)
    # After the engine's own timer of that moment, before anyone wakes up.
    loop = asyncio.get_running_loop()
    for rollout in run.loop._producer._rollouts.values():
      loop.call_at(ready_s, rollout.abort, "stale")

  this = virtual_run.Run(
    DROP,
    rounds=2,
    build=build,
    source=fakes.Counting(turns=1),
    disturb=abort,
  ).start()
  aborted = this.of("aborted", reason="stale")
  assert {e["t"] for e in aborted} == {ready_s}
  assert {e["tokens"] for e in aborted} == {2}
  assert this.sampled_by_engines == this.ledger.sampled
  assert this.ledger.error == 0


# Redundant groups and members.


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
