"""Calibration on directories of simulated runs, whose rates are known."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from configs import guess_number_moe
from rl.engine.builtin import settings as engine_settings
from rl.planning import calibration, fitting
from rl.pools import placement
from rl.schedule import overlap
from rl.settings import overrides
from rl.simulation import distributions, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from tests.helpers import planned_fleets

SPEED = simulated_processor.Speed(
  tau0_s=0.02, b0=16.0, slots=32, kv_tokens=100_000, update_s=0.4
)
TASKS = (
  workload.Workload(
    name="one",
    share=3.0,
    prompt_tokens=distributions.Fixed(30.0),
    answer_tokens=distributions.LogNormal(mean=60.0, sigma=0.6),
    reward_s=distributions.Fixed(0.25),
    correlation=0.5,
  ),
  workload.Workload(
    name="many",
    turns=distributions.LogNormal(mean=3.0, sigma=0.4),
    prompt_tokens=distributions.Fixed(12.0),
    reply_tokens=distributions.Fixed(7.0),
    answer_tokens=distributions.LogNormal(mean=20.0, sigma=0.3),
    start_s=distributions.Fixed(0.5),
    step_s=distributions.LogNormal(mean=1.0, sigma=0.8),
    correlation=0.5,
  ),
)


SCHEDULES = {
  "sync": overlap.sync(16),
  "in_flight": overlap.in_flight(16, 1),
  "bounded": overlap.bounded(16, 1),
}


def played(schedule, tasks=TASKS):
  """Returns what a run with known rates looks like."""
  return simulate.Simulation(
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(
        token_s=1e-3, update_s=0.3, describe_s=0.2
      ),
      pools=(simulate.EnginePool(engines=2, speed=SPEED),),
      transfer_s=0.7,
    ),
    workloads=tasks,
    overlap=schedule,
    rollout=dataclasses.replace(
      planned_fleets.question().rollout, max_turns=12, max_tokens=2000
    ),
    rounds=7,
  )


@pytest.fixture(scope="module")
def records():
  """One run of each schedule."""
  with planned_fleets.untyped_process() as process:
    runs = process.map(simulate.simulate, map(played, SCHEDULES.values()))
    return dict(zip(SCHEDULES, runs, strict=True))


def write(directory, record, size=1, more=(), slots=None):
  """Writes what a run leaves in its directory; it trained on 4 devices."""
  lines = [json.dumps(event) for event in record.events]
  # What a crash leaves of the last line.
  (directory / "events.jsonl").write_text("\n".join([*lines, '{"t": 1.0, "ki']))
  spans = [json.dumps(dataclasses.asdict(span)) for span in record.spans]
  (directory / "spans.jsonl").write_text("\n".join(spans))
  experiment = dataclasses.replace(
    guess_number_moe.get_config(),
    engine=engine_settings.EngineSettings(slots=slots),
    placement=placement.Placement(
      learner=placement.MeshSpec(data=4),
      decode=placement.MeshSpec(data=size),
      replicas=2,
      more=more,
    ),
  )
  data = json.dumps(overrides.to_json(experiment))
  (directory / "config.json").write_text(data)
  return directory


@pytest.mark.process
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_found_whatever_the_schedule(tmp_path, records, name):
  rates = calibration.rates(calibration.read(write(tmp_path, records[name])))
  assert rates.token_s == pytest.approx(1e-3, rel=0.01)
  assert rates.update_s == pytest.approx(0.3)
  assert rates.describe_s == pytest.approx(0.2)
  assert rates.transfer_s == pytest.approx(0.7, abs=0.01)
  # At 8 sequences an engine, in the middle of what was seen.
  tau_s = rates.tau0_s * (1.0 + 8.0 / rates.b0)
  assert tau_s == pytest.approx(SPEED.tau_s(8), rel=0.1)
  assert rates.stand_s == pytest.approx(0.4, abs=0.01)


def with_slow_rounds(record, *versions):
  """Returns a record whose accumulation in some rounds is 100 times as slow."""
  spans = [
    dataclasses.replace(span, end=span.start + 100 * (span.end - span.start))
    if span.name == "accumulate" and span.args["version"] in versions
    else span
    for span in record.spans
  ]
  return dataclasses.replace(record, spans=spans)


@pytest.mark.process
def test_a_program_that_is_compiled_late_does_not_slow_the_learner(
  tmp_path, records
):
  slow = with_slow_rounds(records["sync"], 4)
  rates = calibration.rates(calibration.read(write(tmp_path, slow)))
  assert rates.token_s == pytest.approx(1e-3, rel=0.01)


@pytest.mark.process
def test_scores_that_gradients_need_are_time_of_the_learner(tmp_path, records):
  spans = []
  for span in records["sync"].spans:
    middle = (span.start + span.end) / 2
    if span.name == "accumulate":
      spans.append(dataclasses.replace(span, name="forward", end=middle))
    start = middle if span.name == "accumulate" else span.start
    spans.append(dataclasses.replace(span, start=start))
  record = dataclasses.replace(records["sync"], spans=spans)
  rates = calibration.rates(calibration.read(write(tmp_path, record)))
  assert rates.token_s == pytest.approx(1e-3, rel=0.01)


@pytest.mark.process
def test_rounds_after_a_restart_do_not_count(tmp_path, records):
  record, restarts = records["sync"], (2, 4, 5)
  events = []
  for event in record.events:
    events.append(event)
    if event["kind"] == "published" and event["version"] in restarts:
      done = {"trained": event["version"], "next_group": 16 * event["version"]}
      events.append({"t": event["t"], "kind": "resumed", **done})
  # Of rounds 1 to 6 they would be half, and decide.
  slow = with_slow_rounds(dataclasses.replace(record, events=events), *restarts)
  run = calibration.read(write(tmp_path, slow))
  assert calibration.rates(run).token_s == pytest.approx(1e-3, rel=0.01)
  ends = {e["version"]: e["end"] for e in run.of("update")}
  assert [end for _, end in run.warming] == [ends[v] for v in (0, *restarts)]


def test_an_answer_begins_when_it_has_a_slot():
  turn = {"t": 2.0, "decode_s": 2.0, "queue_s": 0.0, "env_s": 0.0, "tokens": 10}
  behind = turn | {"t": 3.0, "decode_s": 3.0, "queue_s": 2.0}
  load, token_s = fitting.answers([turn, behind])
  assert load.tolist() == pytest.approx([1.0, 1.0])
  assert token_s.tolist() == pytest.approx([0.2, 0.1])


@pytest.mark.process
def test_a_log_that_hides_waits_for_slots_is_refused(tmp_path, records):
  record = records["sync"]
  old = [{k: e[k] for k in e if k != "queue_s"} for e in record.events]
  old = dataclasses.replace(record, events=old)
  assert calibration.rates(calibration.read(write(tmp_path, old, slots=32)))
  words = r"answers at once had engine\.slots=4, and its turns have no queue_s"
  with pytest.raises(ValueError, match=words):
    calibration.rates(calibration.read(write(tmp_path, old, slots=4)))
  new = calibration.read(write(tmp_path, record, slots=4))
  assert calibration.rates(new)


FAULTY = dataclasses.replace(
  TASKS[1], start_fault=0.2, step_fault=0.15, reward_fault=0.5
)


@pytest.fixture(scope="module")
def faulty():
  """A run in which everything faults now and then."""
  settings = dataclasses.replace(played(SCHEDULES["sync"], (FAULTY,)), seed=3)
  with planned_fleets.untyped_process() as process:
    return process.submit(simulate.simulate, settings).result()


@pytest.mark.process
def test_faults_are_drawn_as_often_as_they_came(tmp_path, faulty):
  run = calibration.read(write(tmp_path, faulty))
  # Only members without fault are trained.
  assert calibration.rates(run).token_s == pytest.approx(1e-3, rel=0.01)
  (task,) = calibration.tasks(run)
  # Of 7 * 16 * 2 episodes and about 400 steps: standard errors of 0.03, 0.02
  # and, of the 3rd root of 1 in 8, 0.05.
  assert task.start_fault == pytest.approx(0.2, abs=0.09)
  assert task.step_fault == pytest.approx(0.15, abs=0.06)
  assert task.reward_fault == pytest.approx(0.5, abs=0.15)
  assert distributions.mean(task.turns) == pytest.approx(3.0, rel=0.15)
  assert distributions.mean(task.prompt_tokens) == pytest.approx(12.0, abs=0.5)
  assert distributions.mean(task.reply_tokens) == pytest.approx(7.0, abs=0.2)


@pytest.mark.process
def test_a_source_without_a_whole_episode_is_named(tmp_path, records):
  broken = [
    e | {"status": "env_fault"} if e["kind"] == "ended" else e
    for e in records["sync"].events
  ]
  record = dataclasses.replace(records["sync"], events=broken)
  run = calibration.read(write(tmp_path, record))
  words = f"--calibrate={tmp_path}: no episode of many ended without a fault"
  with pytest.raises(ValueError, match=words):
    list(calibration.tasks(run))


@pytest.mark.process
def test_tasks_draw_what_was_played(tmp_path, records):
  run = calibration.read(write(tmp_path, records["sync"]))
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
  # Of 84 groups of 2: a standard error of (1 - 0.5 ** 2) / sqrt(84) = 0.08.
  assert one.correlation == pytest.approx(0.5, abs=0.2)


def events_of(source, size=8, groups=200):
  """Returns the turns and ends of groups that are drawn as the source says."""
  draws = workload.Draws(source, 0)
  turns, ended = [], []
  for group, index in itertools.product(range(groups), range(size)):
    member = workload.GroupMember(group, index)
    place = {"group": group, "attempt": 0, "index": index}
    count = draws.count("turns", member)
    ended.append({**place, "turns": count})
    turns += [
      {**place, "tokens": draws.count("answer_tokens", member, turn)}
      for turn in range(count)
    ]
  return turns, ended


ONE = distributions.Fixed(1.0)
EIGHT = distributions.Fixed(8.0)
SOME = distributions.LogNormal(mean=6.0, sigma=0.6)
LONG = distributions.LogNormal(mean=200.0, sigma=1.2)


@pytest.mark.parametrize("correlation", [0.1, 0.6])
@pytest.mark.parametrize(
  ("turns", "tokens"),
  [(ONE, LONG), (EIGHT, LONG), (SOME, LONG), (SOME, EIGHT)],
  ids=["one turn", "eight turns", "some turns", "turns alone"],
)
def test_members_are_as_alike_as_they_were_drawn(turns, tokens, correlation):
  source = workload.Workload(
    turns=turns, answer_tokens=tokens, correlation=correlation
  )
  found = calibration.correlation(*events_of(source))
  # Of 200 groups of 8 the standard error of an intraclass correlation r is
  # sqrt(2 / 200) (1 - r) (1 + 7 r) / sqrt(56): 0.03 at 0.6, where it is most.
  assert found == pytest.approx(correlation, abs=0.06)


def test_what_never_varies_is_alike_in_nothing():
  source = workload.Workload(answer_tokens=EIGHT)
  assert calibration.correlation(*events_of(source, groups=3)) == 0.0


@pytest.mark.process
def test_a_question_gets_the_speeds_of_its_kind_and_keeps_the_rest(
  tmp_path, records
):
  write(tmp_path, records["sync"])
  problem = planned_fleets.question()
  found = calibration.apply(problem, tmp_path, "quick")
  quick, wide = found.fleet.kinds
  assert wide == problem.fleet.kinds[1]
  assert [w.name for w in found.workloads] == ["many", "one"]
  assert problem.routing.prefer
  assert found.routing.prefer == {}  # Its tasks are gone.
  assert found.fleet.transfer_s == pytest.approx(0.7, abs=0.01)
  assert quick.speed.slots == problem.fleet.kinds[0].speed.slots
  # The run trained on 4 devices: as fast again on 4 of this kind.
  assert quick.learner(4).token_s == pytest.approx(1e-3, rel=0.01)
  assert quick.learner(4).describe_s == pytest.approx(0.2)
  found.validate()


def test_correlation_within_groups_is_that_of_the_numbers():
  draws = np.random.default_rng(0).normal(size=(400, 5))
  shared = np.random.default_rng(1).normal(size=(400, 1))
  alike = np.sqrt(0.3) * shared + np.sqrt(0.7) * draws
  assert fitting.intraclass(alike.tolist()) == pytest.approx(0.3, abs=0.07)
  assert fitting.intraclass([[1.0, 1.0], [1.0, 1.0]]) == 0.0


def test_a_line_never_falls_and_never_starts_below_zero():
  x = np.array([1.0, 2.0, 3.0, 4.0])
  assert fitting.line(x, 2.0 + 3.0 * x) == pytest.approx((2.0, 3.0))
  for y in (5.0 - x, 4.0 * x - 3.0, np.full(4, 2.0)):
    at_zero, slope = fitting.line(x, y)
    assert at_zero > 0
    assert slope > 0


def test_ranks_become_normal_and_equals_stay_equal():
  # Ranks 1/8, 3/8, 3/4 and 3/4 of four values.
  found = fitting.scores([2.0, 5.0, 9.0, 9.0])
  assert found.tolist() == pytest.approx(
    [-1.1503, -0.3186, 0.6745, 0.6745], 1e-3
  )


@pytest.mark.process
def test_engines_that_may_differ_are_not_taken_for_one_kind(tmp_path, records):
  pool = placement.DecodePool(
    name="slow", mesh=placement.MeshSpec(data=1, first_device=6)
  )
  write(tmp_path, records["sync"], more=(pool,))
  words = "its pools decode and slow may differ in speed.*decodes on one pool"
  with pytest.raises(ValueError, match=words):
    calibration.apply(planned_fleets.question(), tmp_path, "quick")


OTHER = json.dumps(overrides.to_json(placement.Placement()))


@pytest.mark.process
@pytest.mark.parametrize(
  ("file", "line", "words"),
  [
    ("events.jsonl", '{"t": 1.0}', "events.jsonl has a line without an event"),
    ("events.jsonl", "[1]", "events.jsonl has a line without an event"),
    ("events.jsonl", '{"kind": "turn"}', "events.jsonl has a line without an"),
    (
      "events.jsonl",
      '{"t": 1.0, "kind": "turn"}',
      "without 'tokens'",
    ),
    (
      "events.jsonl",
      '{"t": 1.0, "kind": "update", "version": 3}',
      "events.jsonl has a line without 'start'",
    ),
    (
      "spans.jsonl",
      '{"track": "learner"}',
      "spans.jsonl has a line without a span",
    ),
    ("config.json", OTHER, "config.json holds no rl.experiment.Experiment"),
    ("config.json", "{}", "config.json: config={}: expected object"),
    ("config.json", "{", "config.json is not valid JSON"),
  ],
)
def test_records_that_lack_something_are_refused(
  tmp_path, records, file, line, words
):
  write(tmp_path, records["sync"])
  text = (tmp_path / file).read_text() if file.endswith("l") else ""
  (tmp_path / file).write_text(f"{line}\n{text}")
  with pytest.raises(ValueError, match=f"--calibrate=.*{words}"):
    calibration.apply(planned_fleets.question(), tmp_path, "quick")


@pytest.mark.process
def test_what_cannot_calibrate_is_refused_with_the_way_out(tmp_path, records):
  problem = planned_fleets.question()
  with pytest.raises(
    ValueError, match=r"--kind=None must be a kind.*quick or wide"
  ):
    calibration.apply(problem, tmp_path)
  with pytest.raises(ValueError, match=r"config.json is missing; name the"):
    calibration.apply(problem, tmp_path, "quick")
  write(tmp_path, records["sync"], size=2)
  with pytest.raises(ValueError, match=r"engines have 2 devices.*; use 2"):
    calibration.apply(problem, tmp_path, "quick")
  (tmp_path / "events.jsonl").write_text("")
  with pytest.raises(ValueError, match="it has trained no round; let it run"):
    calibration.apply(problem, tmp_path, "quick")
