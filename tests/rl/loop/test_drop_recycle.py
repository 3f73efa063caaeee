"""Groups that would be too old: cancelled at once, replaced, and accounted."""

import asyncio
import dataclasses

import pytest

from envs import mixture
from rl.audit import event_log
from rl.loop import coordinator
from rl.schedule import overlap
from rl.simulation import engine as simulated_engine
from rl.simulation import processor as simulated_processor
from rl.testing import fakes
from tests.helpers import virtual_run

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


def test_the_engine_has_an_aborted_request_no_more():
  seen = []

  async def watch(run):
    engine = run.engines[0]
    await asyncio.sleep(0.5)
    seen.extend(engine.begun(f"train/0/0/{i}/0") for i in range(2))
    while not run.of("dropped"):
      await asyncio.sleep(0.25)
    for i in range(2):
      with pytest.raises(ValueError, match="is not in flight"):
        engine.begun(f"train/0/0/{i}/0")
    seen.append("gone")

  run(rounds=4, disturb=watch).start()
  # Their first tokens were of version 0.
  assert seen == [0, 0, "gone"]


def test_a_play_that_waits_for_its_environment_is_cancelled_as_well():
  source = virtual_run.Watched(
    fakes.Counting(
      turns=2, lag_s=lambda index, member: float(500 * (index == hung[0]))
    )
  )
  hung = [source.task(0, "train").index]
  first = virtual_run.Run(DROP, rounds=1, source=source).start()
  hung[0] = int(first.of("submitted", group=0)[0]["task"].rsplit("/", 1)[1])
  this = virtual_run.Run(DROP, rounds=4, step_s=600.0, source=source).start()
  dropped = this.of("dropped", group=0)[0]
  assert dropped["reason"] == "stale"
  assert dropped["t"] == stale_at(this, 0)
  # An answer of two ids each, which the environment was chewing on.
  assert dropped["tokens"] == 4
  assert all(env.closed for env in this.environments(dropped))
  assert this.violations() == []


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

  this = run(rounds=10, disturb=stop)
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
