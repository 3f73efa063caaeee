"""The command of the simulator: its table, its timeline, its errors."""

import json

import pytest
from absl.testing import flagsaver

from launch import simulate, simulated_timeline
from launch.cli import flags
from rl.runtime import trace
from rl.settings import overrides
from rl.simulation import result as simulation_result
from rl.simulation import simulate as simulate_lib
from rl.simulation import workload
from tests.helpers import commands

SMALL = '''
"""Two engines, four groups of two."""
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload


def get_config():
  """Returns a run of a second."""
  return simulate.Simulation(
    cluster=simulate.Cluster(pools=(simulate.EnginePool(engines=2),)),
    workloads=(
      workload.Workload(
        answer_tokens=distributions.LogNormal(mean=200.0, sigma=0.5)
      ),
    ),
    overlap=overlap.sync(4),
    rollout=group_rollout.Rollout(
      group_size=2, max_turns=1, turn_tokens=4000, max_tokens=8000, step_s=60.0
    ),
    rounds=4,
  )
'''


@pytest.fixture
def config(tmp_path):
  file = tmp_path / "small.py"
  file.write_text(SMALL)
  return file


@pytest.fixture
def record(config):
  return simulate_lib.simulate(flags.load(str(config), check=simulate.check))


@pytest.mark.process
def test_the_command_prints_a_table_and_writes_a_timeline(config, tmp_path):
  out = commands.launch(
    "launch.simulate",
    f"--config={config}",
    "--config.cluster.learner.accelerators=6",
    f"--timeline={tmp_path / 'out'}",
  )
  assert out.returncode == 0, out.stderr
  for words in (
    "8 accelerators",  # 6 of the learner and 2 engines.
    "step time T",
    "on-policy bound",
    "staleness of groups",
    "0: 100.0%",
    "error 0",
    "learner |",
  ):
    assert words in out.stdout
  chrome = json.loads((tmp_path / "out" / "timeline.json").read_text())
  names = {event["args"].get("name") for event in chrome["traceEvents"]}
  assert {"learner", "host", "decode 0", "decode 1"} <= names


@pytest.mark.process
def test_a_setting_that_cannot_work_ends_it_before_it_begins(config):
  out = commands.run(
    "launch.simulate", f"--config={config}", "--config.rounds=1"
  )
  assert out.returncode == 2
  assert "rounds=1 leaves none to measure" in out.stderr
  assert "use rounds=5" in out.stderr
  assert out.stdout == ""


@pytest.mark.parametrize(
  ("arguments", "code", "words"),
  [
    (["--timeline={config}"], 2, "error: --timeline={config} cannot be wri"),
    (["--timeline={config}/deep"], 2, "cannot be written: Not a directory"),
    (
      ["--config.progress_timeout_s=0"],
      2,
      "error: progress_timeout_s=0.0 must be above 0",
    ),
    (
      ["--config.progress_timeout_s=0.5"],
      1,
      "error: progress_timeout_s=0.5: learner waited 0.5 s for 4 groups, the "
      "first of them 0",
    ),
  ],
)
def test_what_cannot_end_well_ends_with_its_reason(
  capsys, config, arguments, code, words
):
  with flagsaver.flagsaver():
    given = [argument.format(config=config) for argument in arguments]
    flags.parse(["simulate", f"--config={config}", *given])
    with pytest.raises(SystemExit) as ended:
      simulate.main([])
  assert ended.value.code == code
  said = capsys.readouterr()
  assert words.format(config=config) in said.err
  assert said.out == ""


def test_an_interrupted_simulation_ends_with_a_word(
  config, monkeypatch, capsys
):
  def interrupt(chosen, listener, keep_turns):
    raise KeyboardInterrupt

  monkeypatch.setattr(simulate_lib, "simulate", interrupt)
  with flagsaver.flagsaver():
    flags.parse(["simulate", f"--config={config}"])
    with pytest.raises(SystemExit) as ended:
      simulate.main(["simulate"])
  assert ended.value.code == 130
  assert capsys.readouterr().err.endswith(" interrupted\n")


def test_rounds_that_measure_half_a_turn_are_named(config, capsys):
  # With a bound of 1, and without those at both ends, of 4 rounds one counts.
  bound = ["wait_for_round=false", "max_staleness=1"]
  given = [f"--config={config}", *(f"--config.overlap.{one}" for one in bound)]
  with flagsaver.flagsaver():
    flags.parse(["simulate", *given])
    simulate.main(["simulate"])
  assert (
    "note: with overlap.max_staleness=1 up to 2 rounds take turns, and 1 are "
    "measured; rounds=7 measures whole turns\n"
  ) in capsys.readouterr().err


def test_a_run_that_trains_nothing_fails_with_the_fault(config, capsys):
  # The context is longer than rollout.max_tokens=8000.
  prompt = "--config.workloads.0.prompt_tokens=fixed(value=9000)"
  with flagsaver.flagsaver():
    flags.parse(["simulate", f"--config={config}", prompt])
    with pytest.raises(SystemExit) as ended:
      simulate.main(["simulate"])
  assert ended.value.code == 1
  # Four rounds of four groups of two.
  assert (
    "error: no token was trained: 32 episodes ended with a fault, 32 of them "
    "with: a context of 9000 ids leaves no room"
  ) in capsys.readouterr().err


def test_faults_are_told_by_their_status():
  task = workload.Workload(start_fault=1.0)
  record = simulate_lib.simulate(simulate_lib.Simulation(workloads=(task,)))
  result = simulation_result.measure(record)
  assert result.faults == {"env_fault": result.episodes}
  (said,) = (
    value for name, value in simulate.lines(result) if name == "faults"
  )
  assert (
    said == f"env_fault {result.episodes:,}, of {result.episodes:,} episodes"
  )


def test_preferences_of_tasks_that_do_not_exist_are_refused(config):
  prefer = '{"maths": "compute"}'
  with pytest.raises(
    ValueError, match=r"routing\.prefer=maths is unknown; use"
  ):
    flags.load(str(config), {"routing.prefer": prefer})


def test_settings_of_a_training_run_are_refused():
  with pytest.raises(
    overrides.SettingError, match=r"simulate\.Simulation, not Experiment"
  ):
    flags.load(str(commands.ROOT / commands.CONFIG), check=simulate.check)


def test_the_cluster_of_3000_accelerators_is_one():
  chosen = flags.load(
    str(commands.ROOT / "configs/simulated_3000.py"), check=simulate.check
  )
  assert chosen.cluster.accelerators == 3000
  # One trains for five that decode.
  assert 3000 / chosen.cluster.learner.accelerators == pytest.approx(
    6, rel=0.01
  )
  assert chosen.overlap.max_staleness == 1
  assert sum(pool.engines for pool in chosen.cluster.pools) == 39


@pytest.mark.parametrize("pause_s", [0.0, 1e6])
def test_progress_is_told_when_it_is_due(record, pause_s):
  told = []
  progress = simulate.SimulationProgress(4, told.append, pause_s)
  for event in record.events:
    progress.note(event)
  if pause_s:
    assert told == []
    return
  sampled = simulation_result.measure(record).ledger.sampled
  # A first token is logged later than it was sampled.
  seconds = [int(line.split(": ")[1].partition(" s")[0]) for line in told]
  assert seconds == sorted(seconds)
  # 4 rounds of 4 groups of 2.
  assert told[-1].startswith("simulating round 4/4: ")
  assert told[-1].endswith(f" s, 32 episodes, {sampled:,} tokens")


def test_parts_of_a_cluster_are_overridden_by_their_path(config):
  changes = {
    "cluster.pools.0.engines": "3",
    "workloads.0.answer_tokens": "fixed(value=50)",
    "overlap.max_staleness": "1",
    "overlap.on_publish": "recompute",
    "overlap.wait_for_round": "false",
  }
  chosen = flags.load(str(config), changes, simulate.check)
  assert chosen.cluster.pools[0].engines == 3
  assert chosen.workloads[0].answer_tokens.value == 50.0
  assert overrides.from_json(overrides.to_json(chosen)) == chosen


def test_the_table_has_every_cause_of_idle_time(record):
  result = simulation_result.measure(record)
  table = dict(simulate.lines(result))
  for cause in (*result.decode_idle, *result.learner_idle):
    assert f"  {cause}" in table
  assert table["step time T"] == f"{result.step_s:,.1f} s"
  assert table["T* / T"] == f"{result.efficiency:.1%}"


def test_the_drawn_timeline_shows_who_worked_when(record):
  rows = simulated_timeline.text(record, 60).splitlines()
  assert [row.split("|")[0].strip() for row in rows[:-1]] == [
    "learner",
    "decode",
    "publish",
  ]
  assert {len(row) for row in rows[:-1]} == {60}
  learner, decode, publish = (row.split("|")[1] for row in rows[:-1])
  # A synchronous run begins with decoding and ends with a publish.
  assert decode[0] != " "
  assert learner[0] == publish[0] == " "
  assert publish[-1] != " "


def test_spans_of_an_engine_add_up_to_its_work(record):
  spans = simulated_timeline.spans(record)
  states = [*record.states[0], (record.virtual_s, "end")]
  decode = [
    states[i + 1][0] - start
    for i, (start, state) in enumerate(states)
    if state == "decode"
  ]
  drawn = trace.busy([s for s in spans if s.name == "decode"], "decode 0")
  assert sum(end - start for start, end in drawn) == pytest.approx(sum(decode))
