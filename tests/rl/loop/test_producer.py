"""What fills the place of a dropped group, and what a stop leaves behind."""

import collections
import dataclasses
import json

import pytest

from rl.algorithms import dynamic_sampling
from rl.loop import coordinator, progress
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import fakes
from tests.helpers import virtual_run

DROP = dataclasses.replace(
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
    DROP,
    rounds=30,
    source=fakes.Counting(turns=1),
    sampling=dynamic_sampling.DynamicSampling(max_refills=refills),
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
  assert again.in_flight == saved.in_flight
  last = virtual_run.Run(schedule, **settings).start(again)
  assert len(last.groups) == (4 - saved.trained) * 4
  assert last.ledger.error == 0


def test_what_an_attempt_has_gone_through_is_saved_with_it():
  schedule = dataclasses.replace(DROP, redundancy=overlap.Redundancy())

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
