"""launch.sweep: runs every variation in its own process and directory."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import threading
import time

import pytest

from launch import sweep as sweep_lib
from launch.cli import flags, workdir
from launch.report import comparison
from rl.backends import local
from rl.settings import overrides
from tests.helpers import backends_under_test as under_test
from tests.helpers import commands, viewed_runs

SWEEP = """
import sys
sys.path.insert(0, {root!r})
from configs import guess_number_moe

get_config = guess_number_moe.get_config

def sweep():
  return {runs}
"""
GIVEN = commands.TINY | {"rounds": "1", "evaluation.episodes": "8"}
# The sweep sets these; a setting given twice is refused.
del GIVEN["rollout.group_size"], GIVEN["evaluation.every"]


def sweep(tmp_path, runs, run=commands.run):
  config = tmp_path / "swept.py"
  config.write_text(SWEEP.format(root=str(commands.ROOT), runs=runs))
  return run(
    "launch.sweep",
    f"--config={config}",
    f"--workdir={tmp_path / 'out'}",
    *flags.arguments(GIVEN),
  )


@pytest.mark.slow
def test_every_run_gets_its_overrides_and_a_directory(tmp_path):
  # The command line's evaluation.episodes=8 applies to the sweep's Evaluation.
  whole = {"evaluation": "rl.experiment.Evaluation(every=7)"}
  small = {"rollout.group_size": 4}
  runs = [{"seed": 3} | small, small | whole]
  result = sweep(tmp_path, runs, commands.launch)
  assert result.returncode == 0, result.stdout + result.stderr
  first, second = (
    json.loads((tmp_path / "out" / name / "config.json").read_text())
    for name in ("run_000", "run_001")
  )
  assert (first["seed"], first["rounds"]) == (3, 1)
  assert second["rollout"]["group_size"] == 4
  assert second["evaluation"]["every"] == 7
  assert second["evaluation"]["episodes"] == 8
  assert "best success" in result.stdout
  assert "evaluation.every" in result.stdout
  assert (tmp_path / "out" / "compare.html").exists()


def test_a_run_that_cannot_work_is_found_before_any_starts(tmp_path):
  result = sweep(tmp_path, [{"seed": 1}, {"rollout.gruop_size": 4}])
  assert result.returncode == 2
  point = "run_001 (rollout.gruop_size=4) of sweep(): --config.rollout.gru"
  assert point in result.stderr
  assert "rollout.group_size" in result.stderr
  result = sweep(tmp_path, [{"initial": "nowhere"}])
  assert "run_000 (initial=nowhere) of sweep(): initial=n" in result.stderr
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("out", "out cannot be written: "),
    ("out/run_000", "run_000 must be the directory of a run; move away"),
    # A page over runs would show that run alone.
    ("out/config.json", "out is the directory of a run; choose another"),
  ],
)
def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path, name, words):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).touch()
  result = sweep(tmp_path, [{"seed": 1}])
  assert result.returncode == 2
  assert words in result.stderr
  assert "TM-C05" in result.stderr


def test_settings_of_something_else_are_refused(tmp_path):
  config = "--config=configs/fleet_small.py"
  result = commands.run("launch.sweep", config, f"--workdir={tmp_path}")
  assert result.returncode == 2
  assert "takes a rl.experiment.Experiment, not Planning" in result.stderr


def test_a_config_without_variations_says_so(tmp_path):
  result = sweep(tmp_path, [])
  assert result.returncode == 2
  assert "has no sweep()" in result.stderr


def test_a_setting_that_the_sweep_sets_too_is_refused(tmp_path):
  result = sweep(tmp_path, [{"seed": 1}, {"rounds": 2}])
  assert result.returncode == 2
  assert "--config.rounds=1 is given, but sweep() sets rounds" in result.stderr
  assert not (tmp_path / "out").exists()


def test_a_point_in_the_place_of_another_is_refused(tmp_path):
  sweep(tmp_path, [])  # Writes the file.
  place = tmp_path / "out" / "run_001"
  before = flags.load(str(tmp_path / "swept.py"), GIVEN | {"seed": "2"})
  workdir.claim(place, before.with_auto_dtype("float32")).close()
  (place / "checkpoints" / "1").mkdir(parents=True)
  result = sweep(tmp_path, [{"seed": 1}, {"seed": 5}])
  assert result.returncode == 2
  assert f"{place} holds a run with other settings" in result.stderr
  assert "lists for it (seed=5):\n  seed: 2 -> 5\n" in result.stderr
  assert not (tmp_path / "out" / "run_000").exists()


@pytest.mark.parametrize("text", ["adamw(learning_rate=1e-3)", "muon"])
def test_a_part_of_what_the_sweep_sets_is_given_unless_it_sets_it(
  tmp_path, text
):
  given = {"optimizer.learning_rate": "5e-4"}
  path = tmp_path / "swept.py"
  runs = [{"optimizer": text}]
  path.write_text(SWEEP.format(root=str(commands.ROOT), runs=runs))
  if text == "muon":
    (run,) = sweep_lib._listed(tmp_path, str(path), given)
    assert flags.load(str(path), run.overrides).optimizer.learning_rate == 5e-4
  else:
    words = "learning_rate=5e-4 is given, but sweep.. sets optimizer.learning_r"
    with pytest.raises(overrides.SettingError, match=words):
      sweep_lib._listed(tmp_path, str(path), given)


def test_two_runs_of_the_same_settings_are_refused(tmp_path):
  result = sweep(tmp_path, [{"seed": 1}, {"seed": 2}, {"seed": "1.0"}])
  assert result.returncode == 2
  assert "run_000 (seed=1) and run_002 (seed=1.0) of sweep() have" in (
    result.stderr
  )
  assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_a_sweep_whose_runs_all_fail_at_once_has_failed(tmp_path):
  # Its own errors find no room, and the platform is not there.
  with open("/dev/full", "w") as full:
    run = functools.partial(commands.run, stderr=full)
    result = sweep(tmp_path, [{"placement.platform": "tpu"}], run)
  assert result.returncode == 1
  failed = "run_000: failed with 2, see log.txt: placement.platform=tpu"
  assert failed in result.stdout
  log = (tmp_path / "out" / "run_000" / "log.txt").read_text()
  assert "Traceback" not in log


class Scripted(sweep_lib.Run):
  """A run that is a script: it writes metrics, and ends as it is told."""

  def program(self):
    program = under_test.scripted(
      self.directory,
      "script",
      f"import sys; del sys.argv[1:3]\n{self.path}",
      str(self.directory),
    )
    return dataclasses.replace(program, log=super().program().log)


def play(runs, parallel, attempts, rule=None, report=lambda text: None):
  launcher = local.Local().open(pathlib.Path())
  return sweep_lib.Sweep(
    runs, parallel, attempts, rule, launcher, report
  ).play()


def scripted(tmp_path, *scripts):
  return [
    Scripted(tmp_path / f"run_{number:03d}", script, {})
    for number, script in enumerate(scripts)
  ]


@pytest.mark.process
def test_it_tells_how_many_runs_have_ended(tmp_path):
  told = []
  runs = scripted(tmp_path, "", "sys.exit(1)")
  play(runs, 1, 1, report=told.append)
  assert told == [f"runs that have ended: {ended}/2" for ended in (0, 1, 2)]


FAILS_ONCE = """
import pathlib, sys
marker = pathlib.Path(sys.argv[1], "been_here")
if not marker.exists():
  marker.touch()
  sys.exit(1)
"""
WAITS = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(2, lambda *_: 0); time.sleep(60)"


@pytest.mark.process
@pytest.mark.parametrize(
  ("script", "attempts", "failed", "starts"),
  [
    (FAILS_ONCE, 2, False, 2),
    (FAILS_ONCE, 1, True, 1),
    ("import sys; sys.exit(1)", 3, True, 3),
    # Settings that cannot work do not work the second time.
    ("import sys; sys.exit(2)", 3, True, 1),
  ],
)
def test_a_run_that_fails_is_started_again(
  tmp_path, script, attempts, failed, starts
):
  (run,) = runs = scripted(tmp_path, script)
  assert play(runs, 1, attempts) == 0
  assert (run.failed, run.attempts) == (failed, starts)


@pytest.mark.process
def test_a_run_that_fails_is_told_with_its_last_error(tmp_path, capsys):
  run, silent, raised = scripted(
    tmp_path,
    "print('20:01:02 error: rounds=0'); sys.exit(2)",
    "sys.exit(1)",
    "open(sys.argv[1] + '/failure.txt', 'w').write('KeyError(7)'); 1 / 0",
  )
  for one in (run, silent, raised):
    one.directory.mkdir()
    (one.directory / "log.txt").write_text("error: of a sweep before\n")
  play([run, silent, raised], 1, 1)
  told = capsys.readouterr().out
  assert f"{run.directory}: failed with 2, see log.txt: rounds=0\n" in told
  assert f"{silent.directory}: failed with 1, see log.txt\n" in told
  why = "see log.txt: KeyError(7)"
  assert f"{raised.directory}: failed with 1, {why}\n" in told
  # So that a table does not pass off results of before as theirs.
  notes = [comparison.remark(one.directory) for one in (run, silent)]
  assert notes == ["see log.txt: rounds=0", "see log.txt"]


@pytest.mark.process
def test_a_run_of_another_is_not_said_to_have_failed(tmp_path, capsys):
  (run,) = scripted(tmp_path, "print('error: in use'); sys.exit(2)")
  write_metrics(run.directory, [0.5])
  (run.directory / "config.json").write_text("{}")
  play([run], 1, 1)
  assert workdir.failure(run.directory) == ""
  sweep_lib.compare(tmp_path, "success", False, {"run_000": run.why})
  assert "0.5           see log.txt: in use\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["out", "out/run_000"])
def test_a_directory_of_another_process_is_refused(tmp_path, name):
  with workdir.locked(tmp_path / name):
    result = sweep(tmp_path, [{"seed": 1}])
  assert result.returncode == 2
  assert f"{name} is in use by another process; wait for it" in result.stderr
  assert not [*tmp_path.glob("out/*/log.txt")]


@pytest.mark.process
@pytest.mark.parametrize(("script", "signals"), [(WAITS, 1), (STUBBORN, 2)])
def test_a_signal_stops_what_runs_and_starts_nothing_more(
  tmp_path, script, signals, capsys
):
  runs = scripted(tmp_path, script, script, script)
  before = signal.getsignal(signal.SIGINT)

  def interrupt():
    while not all(run.process for run in runs[:2]):
      time.sleep(0.01)
    time.sleep(0.5)  # Until the script has its handler.
    for _ in range(signals):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(0.3)

  threading.Thread(target=interrupt).start()
  began, phases = time.monotonic(), []
  assert play(runs, 2, 3, report=phases.append) == signal.SIGINT
  assert time.monotonic() < began + 30
  assert phases == ["runs that have ended: 0/3"]
  assert [run.attempts for run in runs] == [1, 1, 0]
  processes = [run.process for run in runs[:2]]
  assert all(one and one.code() is not None for one in processes)
  assert signal.getsignal(signal.SIGINT) is before
  told = capsys.readouterr().out
  assert told.count("stopping at the next safe point; again to end at") == 1


@pytest.mark.process
def test_a_signal_that_comes_while_a_run_starts_stops_it(tmp_path):
  class Interrupted(Scripted):
    def start(self, launcher):
      os.kill(os.getpid(), signal.SIGINT)
      super().start(launcher)

  runs = [Interrupted(tmp_path / f"run_{i}", WAITS, {}) for i in range(2)]
  began = time.monotonic()
  assert play(runs, 2, 1) == signal.SIGINT
  assert time.monotonic() < began + 30
  assert [run.attempts for run in runs] == [1, 0]


REMOVES_ITSELF = "import shutil, sys; shutil.rmtree(sys.argv[1]); sys.exit(1)"


@pytest.mark.process
def test_a_run_whose_directory_is_removed_ends_no_other(tmp_path):
  runs = scripted(tmp_path, REMOVES_ITSELF, "")
  assert play(runs, 1, 1) == 0
  assert [run.failed for run in runs] == [True, False]


@pytest.mark.process
def test_a_run_that_cannot_be_started_ends_no_other(tmp_path, capsys):
  class Absent(Scripted):
    def start(self, launcher):
      self.attempts += 1
      raise OSError("no place for its log")

  absent = Absent(tmp_path / "run_000", "", {})
  (other,) = scripted(tmp_path / "more", FAILS_ONCE)
  assert play([absent, other], 1, 2) == 0
  assert (absent.failed, other.failed) == (True, False)
  assert (absent.attempts, other.attempts) == (2, 2)
  why = "run_000: failed with 1, it cannot be started: no place for its log"
  assert f"{why}; it goes on" in capsys.readouterr().out


SAVES = """
import pathlib, signal, time
here = pathlib.Path(sys.argv[1])
def save(*_):
  time.sleep(0.5)
  (here / "saved").touch()
  sys.exit(130)
signal.signal(signal.SIGINT, save)
(here / "ready").touch()
time.sleep(60)
"""


@pytest.mark.process
def test_runs_save_before_an_error_ends_their_sweep(tmp_path):
  class Broken:
    def verdict(self, run, runs):
      if all((run.directory / "ready").exists() for run in runs):
        raise ArithmeticError("of the rule")
      run.due_s = 0
      return ""

  runs = scripted(tmp_path, SAVES, SAVES)
  with pytest.raises(ArithmeticError, match="of the rule"):
    play(runs, 2, 1, Broken())
  assert all((run.directory / "saved").exists() for run in runs)


TELLS_ITS_NUMBER = """
import os
print("pid", os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.parametrize("name", under_test.EACH)
def test_a_sweep_repeats_and_stops_runs_on_every_backend(tmp_path, name):
  scripts = [FAILS_ONCE, TELLS_ITS_NUMBER, TELLS_ITS_NUMBER]
  runs = scripted(tmp_path, *scripts)
  programs = [run.program() for run in runs]
  pids = []

  def interrupt():
    for program in programs[1:]:
      pids.append(int(under_test.says(program, "\n").split()[1]))
    while runs[0].attempts < 2:
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  threading.Thread(target=interrupt).start()
  with under_test.up(name, tmp_path) as backend:
    launcher = backend.open(tmp_path / "files")
    sweep = sweep_lib.Sweep(runs, 3, 2, None, launcher)
    assert sweep.play() == signal.SIGINT
  assert [run.attempts for run in runs] == [2, 1, 1]
  assert all(map(under_test.is_gone, pids))


def write_metrics(directory, values):
  directory.mkdir(parents=True, exist_ok=True)
  rows = [
    json.dumps({"round": number + 1, "success": value})
    for number, value in enumerate(values)
  ]
  (directory / "metrics.jsonl").write_text("\n".join(rows))


@pytest.mark.process
def test_all_runs_can_be_compared_in_a_file(tmp_path, browser):
  for number, level in enumerate((0.0, 0.3, 0.1)):
    path = tmp_path / f"run_{number:03d}"
    viewed_runs.run(path, level=level, name=viewed_runs.EVIL * (number > 0))
  (tmp_path / "run_001" / "report.html").touch()
  sweep_lib.compare(tmp_path, "success", less=False)
  browser.open(f"file://{tmp_path / 'compare.html'}")
  rows = browser.values("tbody tr", "data-run")
  assert rows == ["run_001", "run_002", "run_000"]
  assert browser.values("tbody a", "href") == ["run_001/report.html"]
  # Runs 1 and 2 differ in nothing.
  assert browser.count("#curves .curve") == 2
  assert browser.do("document.body.dataset.hurt") is None
  browser.choose("#metric", "entropy")
  browser.wait("document.querySelector('[aria-label^=\"entropy\"]') !== null")
  for name in ("run_000", "run_001"):
    browser.click(f"[aria-label='Tick {name}']")
  browser.click("#compare")
  browser.wait("document.querySelector('#metrics td') !== null")
  cells = browser.text("#metrics tbody tr").split()
  # The mean of 0.1 to 0.4, and 0.3 more.
  assert cells == ["success", "0.25", "0.55", "0.3"]


def test_a_run_below_the_median_of_two_others_is_found(tmp_path):
  runs = scripted(tmp_path, "", "", "")
  write_metrics(runs[0].directory, [0.2] * 4)
  write_metrics(runs[1].directory, [0.6] * 5)
  rule = sweep_lib.MedianRule(4, "success", less=False)
  assert rule.verdict(runs[0], runs) == ""  # One other is no median.
  write_metrics(runs[2].directory, [0.4] * 4)
  assert rule.verdict(runs[0], runs) == ""  # It was compared at round 4.
  write_metrics(runs[0].directory, [0.2] * 8)
  assert rule.verdict(runs[0], runs) == ""  # No other has come to round 8.
  runs[0].looked = 0
  write_metrics(runs[0].directory, [0.2] * 4)
  # Median of 0.6 and 0.4.
  assert rule.verdict(runs[0], runs) == (
    "stopped after round 4: mean success 0.2, median of the others 0.5"
  )
  assert rule.verdict(runs[1], runs) == ""
  less = sweep_lib.MedianRule(4, "success", less=True)
  runs[0].looked = runs[1].looked = 0
  assert less.verdict(runs[0], runs) == ""
  assert less.verdict(runs[1], runs).startswith("stopped after round 4")


@pytest.mark.process
def test_a_run_that_a_rule_stops_is_told_and_stays_so(tmp_path, capsys):
  runs = scripted(tmp_path, WAITS, "", "")
  for run, value in zip(runs, (0.1, 0.8, 0.9), strict=True):
    write_metrics(run.directory, [value] * 4)
  rule = sweep_lib.MedianRule(2, "success", less=False)
  began = time.monotonic()
  assert play(runs, 3, 2, rule) == 0
  assert time.monotonic() < began + 30
  assert not runs[0].failed
  assert comparison.note(runs[0].directory).startswith("stopped after round 4")
  again = scripted(tmp_path, WAITS, "", "")
  play(again, 3, 2, rule)
  assert [run.attempts for run in again] == [0, 1, 1]
  assert "run_000: left out, as it was stopped after" in capsys.readouterr().out
  again[0].path = ""
  play(again, 3, 2)
  assert [run.attempts for run in again] == [1, 2, 2]


@pytest.mark.process
def test_a_note_about_another_point_leaves_nothing_out(tmp_path):
  (run,) = scripted(tmp_path, "")
  run.point = {"seed": "5"}
  run.directory.mkdir()
  comparison.write_note(run.directory, "stopped", {"seed": "1"})
  rule = sweep_lib.MedianRule(2, "success", less=False)
  assert play([run], 1, 1, rule) == 0
  assert run.attempts == 1
  # Nor does a table take it for one about this run.
  assert comparison.note(run.directory) == ""


def test_runs_are_compared_while_they_go_on(tmp_path):
  write_metrics(tmp_path / "run_000", [0.5, 0.7])
  (tmp_path / "run_000" / "config.json").write_text('{"seed": 1}')
  result = commands.run("launch.sweep", f"--workdir={tmp_path}", "--table")
  assert result.returncode == 0, result.stderr
  assert "run_000  2       0.6           0.6" in result.stdout
  assert (tmp_path / "compare.html").exists()


def test_a_comparison_that_cannot_be_written_says_so(tmp_path):
  write_metrics(tmp_path / "run_000", [0.5])
  (tmp_path / "run_000" / "config.json").write_text("{}")
  (tmp_path / "compare.html").mkdir()
  result = commands.run("launch.sweep", f"--workdir={tmp_path}", "--table")
  assert result.returncode == 2
  assert "compare.html cannot be used: Is a directory\n" in result.stderr
  assert "run_000  1       0.5" in result.stdout


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--workdir=nowhere"], "there are no runs"),
    (["--metric=succes"], "no run has a metric succes; did you mean success?"),
  ],
)
def test_a_comparison_of_nothing_is_refused(tmp_path, arguments, words):
  write_metrics(tmp_path / "run_000", [0.5])
  (tmp_path / "run_000" / "config.json").write_text("{}")
  result = commands.run(
    "launch.sweep", f"--workdir={tmp_path}", "--table", *arguments
  )
  assert result.returncode == 2
  assert words in result.stderr


def test_a_sweep_by_a_metric_that_no_run_can_have_is_not_begun(tmp_path):
  result = commands.run(
    "launch.sweep",
    "--config=configs/guess_number_moe.py",
    f"--workdir={tmp_path}",
    "--metric=-evaluation/sucess",
  )
  assert result.returncode == 2
  assert "no run has a metric evaluation/sucess; did you mean eval" in (
    result.stderr
  )
  assert "TM-D12" in result.stderr
  assert [*tmp_path.iterdir()] == []
