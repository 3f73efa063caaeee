"""Calibration on directories of simulated runs, whose rates are known."""

import dataclasses
import json

import numpy as np
import pytest

from configs import guess_number_moe
from rl import (
  calibration,
  distributions,
  measured,
  overlap,
  placement,
  settings,
  simulated_learner,
  simulated_processor,
  simulation,
  workload,
)
from tests.rl import planned_fleets

SPEED = simulated_processor.Speed(
  tau0_s=0.02, b0=16.0, slots=32, kv_tokens=100_000, update_s=0.4
)
TASKS = (
  workload.Workload(
    name="one",
    share=3.0,
    prompt_tokens=distributions.Constant(30.0),
    answer_tokens=distributions.LogNormal(mean=60.0, sigma=0.6),
    reward_s=distributions.Constant(0.25),
    correlation=0.5,
  ),
  workload.Workload(
    name="many",
    turns=distributions.LogNormal(mean=3.0, sigma=0.4),
    prompt_tokens=distributions.Constant(12.0),
    reply_tokens=distributions.Constant(7.0),
    answer_tokens=distributions.LogNormal(mean=20.0, sigma=0.3),
    start_s=distributions.Constant(0.5),
    step_s=distributions.LogNormal(mean=1.0, sigma=0.8),
    correlation=0.5,
  ),
)


def write(directory, schedule, engines=2, learner=4, size=1):
  """Writes what a run with known rates leaves in its directory."""
  record = simulation.simulate(
    simulation.Simulation(
      cluster=simulation.Cluster(
        learner=simulated_learner.Learner(token_s=1e-3, update_s=0.3),
        pools=(simulation.Pool(engines=engines, speed=SPEED),),
        transfer_s=0.7,
      ),
      workloads=TASKS,
      overlap=schedule,
      rollout=dataclasses.replace(
        planned_fleets.question().rollout, max_turns=12, max_tokens=2000
      ),
      rounds=7,
    )
  )
  lines = [json.dumps(event) for event in record.events]
  # What a crash leaves of the last line.
  (directory / "events.jsonl").write_text("\n".join([*lines, '{"t": 1.0, "ki']))
  spans = [json.dumps(dataclasses.asdict(span)) for span in record.spans]
  (directory / "spans.jsonl").write_text("\n".join(spans))
  experiment = dataclasses.replace(
    guess_number_moe.get_config(),
    placement=placement.Placement(
      learner=placement.MeshSpec(data=learner),
      decode=placement.MeshSpec(data=size),
      replicas=engines,
    ),
  )
  data = json.dumps(settings.to_json(experiment))
  (directory / "config.json").write_text(data)
  return directory


@pytest.mark.parametrize(
  "schedule",
  [overlap.sync(16), overlap.in_flight(16, 1), overlap.bounded(16, 1)],
  ids=["sync", "in_flight", "bounded"],
)
def test_rates_are_found_whatever_the_schedule(tmp_path, schedule):
  rates = calibration.rates(calibration.read(write(tmp_path, schedule)))
  assert rates.token_s == pytest.approx(1e-3, rel=0.01)
  assert rates.update_s == pytest.approx(0.3)
  assert rates.transfer_s == pytest.approx(0.7, abs=0.01)
  # At 8 sequences an engine, in the middle of what was seen.
  tau_s = rates.tau0_s * (1.0 + 8.0 / rates.b0)
  assert tau_s == pytest.approx(SPEED.tau_s(8), rel=0.1)
  if not schedule.drains:
    assert rates.stand_s == pytest.approx(0.4, abs=0.01)


def test_decoding_stands_still_for_as_long_as_the_metrics_say(tmp_path):
  write(tmp_path, overlap.bounded(16, 1))
  rows = [{"round": r, "publish_stall_s": s} for r, s in ((1, 0.4), (2, 0.4))]
  text = "\n".join(json.dumps(row) for row in rows)
  (tmp_path / "metrics.jsonl").write_text(text)
  assert calibration.rates(calibration.read(tmp_path)).stand_s == 0.4


def test_tasks_draw_what_was_played(tmp_path):
  run = calibration.read(write(tmp_path, overlap.sync(16)))
  many, one = calibration.tasks(run)
  assert (many.name, one.name) == ("many", "one")
  assert one.share / many.share == pytest.approx(3.0)
  assert distributions.mean(one.turns) == pytest.approx(1.0)
  assert distributions.mean(one.answer_tokens) == pytest.approx(60.0, rel=0.15)
  assert distributions.mean(many.turns) == pytest.approx(3.0, rel=0.15)
  # Without decoding: only these seconds are the environment's.
  assert distributions.mean(many.start_s) == pytest.approx(0.5, abs=1e-3)
  assert distributions.mean(many.step_s) == pytest.approx(1.0, rel=0.25)
  assert distributions.mean(one.reward_s) == pytest.approx(0.25, abs=1e-3)
  assert distributions.mean(many.prompt_tokens) == pytest.approx(12.0, abs=0.5)
  assert distributions.mean(many.reply_tokens) == pytest.approx(7.0, abs=0.2)
  assert 0.2 < one.correlation < 0.8


def test_a_question_gets_the_speeds_of_its_kind_and_keeps_the_rest(tmp_path):
  write(tmp_path, overlap.sync(16), learner=4)
  asked = planned_fleets.question()
  found = calibration.apply(asked, tmp_path, "quick")
  quick, wide = found.fleet.kinds
  assert wide == asked.fleet.kinds[1]
  assert [w.name for w in found.workloads] == ["many", "one"]
  assert found.fleet.transfer_s == pytest.approx(0.7, abs=0.01)
  assert quick.speed.slots == asked.fleet.kinds[0].speed.slots
  # The run trained on 4 devices: as fast again on 4 of this kind.
  assert quick.learner(4).token_s == pytest.approx(1e-3, rel=0.01)
  found.validate()


def test_correlation_within_groups_is_that_of_the_numbers():
  draws = np.random.default_rng(0).normal(size=(400, 5))
  shared = np.random.default_rng(1).normal(size=(400, 1))
  alike = np.sqrt(0.3) * shared + np.sqrt(0.7) * draws
  assert measured.intraclass(alike.tolist()) == pytest.approx(0.3, abs=0.07)
  assert measured.intraclass([[1.0, 1.0], [1.0, 1.0]]) == 0.0


def test_a_line_never_falls_and_never_starts_below_zero():
  x = np.array([1.0, 2.0, 3.0, 4.0])
  assert measured.line(x, 2.0 + 3.0 * x) == pytest.approx((2.0, 3.0))
  for y in (5.0 - x, 4.0 * x - 3.0, np.full(4, 2.0)):
    at_zero, slope = measured.line(x, y)
    assert at_zero > 0
    assert slope > 0


def test_what_cannot_calibrate_is_refused_with_the_way_out(tmp_path):
  asked = planned_fleets.question()
  with pytest.raises(
    ValueError, match=r"--kind=None is no kind.*quick or wide"
  ):
    calibration.apply(asked, tmp_path)
  with pytest.raises(ValueError, match=r"there is no config.json; name the"):
    calibration.apply(asked, tmp_path, "quick")
  write(tmp_path, overlap.sync(16), size=2)
  with pytest.raises(ValueError, match=r"engines have 2 devices.*; use 2"):
    calibration.apply(asked, tmp_path, "quick")
  (tmp_path / "events.jsonl").write_text("")
  with pytest.raises(ValueError, match="it has trained no round; let it run"):
    calibration.apply(asked, tmp_path, "quick")
