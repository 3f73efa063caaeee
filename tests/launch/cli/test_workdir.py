"""Claims of a run directory: refusals, clearing, and the command to go on."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
import sys

import pytest

from launch.cli import flags, run_repair, workdir
from rl.settings import overrides
from twinmesh import error_codes

CONFIG = pathlib.Path(__file__).parents[3] / "configs/guess_number_moe.py"


@pytest.fixture(scope="module")
def experiment():
  return flags.load(str(CONFIG))


def other(experiment):
  return dataclasses.replace(experiment, seed=experiment.seed + 1)


@pytest.mark.parametrize(
  "name", ["tensorboard", "trajectories", "events.jsonl", "metrics.jsonl"]
)
def test_records_without_a_config_are_refused_and_kept(
  name, tmp_path, experiment
):
  place = tmp_path / name / "log" if "." not in name else tmp_path / name
  place.parent.mkdir(exist_ok=True)
  place.write_text("of another program")
  with pytest.raises(overrides.SettingError, match=f"holds {name}"):
    workdir.claim(tmp_path, experiment)
  assert place.read_text() == "of another program"
  assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_config_of_something_else_is_refused_and_kept(tmp_path, experiment):
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  (tmp_path / "tensorboard").mkdir()
  with pytest.raises(overrides.SettingError, match="not that of a run"):
    workdir.claim(tmp_path, experiment)
  assert len(list(tmp_path.iterdir())) == 2


def test_a_path_that_checkpoints_cannot_have_is_refused(
  tmp_path, experiment, monkeypatch
):
  (tmp_path / "lr[3]").mkdir()
  monkeypatch.chdir(tmp_path / "lr[3]")
  with pytest.raises(overrides.SettingError) as error:
    workdir.claim("run", experiment)
  assert str(error.value) == (
    f"--workdir=run: the path {tmp_path}/lr[3]/run has [ and ], with which no "
    "checkpoint could be read; choose one without"
  )
  assert not list(pathlib.Path().iterdir())


def test_a_path_that_is_not_utf8_is_refused(tmp_path, experiment):
  path = tmp_path / os.fsdecode(b"\xff")
  with pytest.raises(overrides.SettingError, match="must be UTF-8") as error:
    workdir.claim(path, experiment)
  assert str(error.value).encode()
  assert list(tmp_path.iterdir()) == []


def test_a_directory_of_other_things_may_be_used(tmp_path, experiment):
  (tmp_path / "log.txt").write_text("of the sweep")
  workdir.claim(tmp_path, experiment).close()
  assert (tmp_path / "log.txt").exists()
  assert workdir.read(tmp_path) == experiment


def test_a_run_of_an_older_version_says_why_it_cannot_be_read(tmp_path):
  (tmp_path / "config.json").write_text('{"class": "rl.config.Experiment"}')
  with pytest.raises(overrides.SettingError) as error:
    workdir.read(tmp_path)
  assert str(error.value).startswith(
    f"{tmp_path}/config.json: config: cannot import rl.config.Experiment: "
  )
  assert str(error.value).endswith(
    "; did you mean rl.experiment.Experiment? (If an older version saved this "
    "run, it cannot be loaded, as settings and parameters had other names: "
    "start a new run, or use that version.)"
  )


def test_a_run_that_never_saved_starts_over_with_any_config(
  tmp_path, experiment
):
  workdir.claim(tmp_path, experiment).close()
  (tmp_path / "metrics.jsonl").write_text("{}")
  (tmp_path / "trajectories").mkdir()
  # The first save was cut off, and does not count.
  (tmp_path / "checkpoints" / "25.orbax-checkpoint-tmp-7").mkdir(parents=True)
  workdir.claim(tmp_path, other(experiment)).close()
  assert not (tmp_path / "metrics.jsonl").exists()
  assert not (tmp_path / "trajectories").exists()
  assert workdir.read(tmp_path) == other(experiment)


def test_a_saved_run_tells_what_must_not_change(tmp_path, experiment):
  # As it runs: with a dtype in the place of "auto".
  claimed = experiment.with_auto_dtype("bfloat16")
  workdir.claim(tmp_path, claimed).close()
  assert workdir.forbidden_changes(tmp_path, other(experiment)) == []
  (tmp_path / "checkpoints" / "25").mkdir(parents=True)
  # Among them what errors of a run, such as lost engines, say to change.
  allowed = {
    "rounds": str(experiment.rounds + 1),
    "max_skipped": "7",
    "recovery.start_s": "900",
    "engine.slots": "2",
    "placement.learner.data": "2",
    "placement.replicas": "2",
    "log_startup": "true",
  }
  changed = overrides.apply(experiment, allowed)
  assert workdir.forbidden_changes(tmp_path, changed) == []
  changes = workdir.forbidden_changes(tmp_path, other(experiment))
  assert changes == [f"seed: {experiment.seed} -> {experiment.seed + 1}"]


def test_a_run_without_rounds_goes_on_at_another_rate(tmp_path, experiment):
  tuned = dataclasses.replace(experiment, rounds=0)
  workdir.claim(tmp_path, tuned).close()
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  rate = {"rounds": "9", "optimizer.learning_rate": "1e-6"}
  with_rounds = overrides.apply(tuned, rate)
  workdir.claim(tmp_path, with_rounds).close()
  (change,) = workdir.forbidden_changes(tmp_path, experiment)
  assert change.startswith("optimizer.learning_rate: 1e-06 -> ")


def test_a_saved_run_goes_on_with_files_that_were_moved(tmp_path):
  run, old, new = (tmp_path / name for name in ("run", "old", "new"))
  settings = flags.load(str(CONFIG.with_name("sums.py")))

  def load(file):
    return dataclasses.replace(settings, data=str(file))

  for directory in (old, new):
    directory.mkdir()
    shutil.copy(CONFIG.with_name("sums.jsonl"), directory / "rows.jsonl")
  shutil.copy(new / "rows.jsonl", new / "others.jsonl")
  workdir.claim(run, load(old / "rows.jsonl")).close()
  (run / "checkpoints" / "25").mkdir(parents=True)
  moved, others = load(new / "rows.jsonl"), load(new / "others.jsonl")
  # With the old ones still there these are others.
  named = ["environment.rows.data", "data"]
  found = workdir.forbidden_changes(run, moved)
  assert [line.split(":")[0] for line in found] == named
  (old / "rows.jsonl").unlink()
  assert workdir.forbidden_changes(run, moved) == []
  assert len(workdir.forbidden_changes(run, others)) == 2


def test_the_error_of_a_run_is_kept_until_it_goes_on(tmp_path, experiment):
  workdir.claim(tmp_path, experiment).close()
  assert not workdir.failure(tmp_path)
  workdir.keep_failure(tmp_path, "error: no gradient")
  workdir.keep_failure(tmp_path / "gone", "error: nor a disk")
  assert workdir.failure(tmp_path) == "error: no gradient"
  workdir.claim(tmp_path, experiment).close()
  assert not workdir.failure(tmp_path)


def test_a_disk_that_is_still_full_is_named(tmp_path, experiment, monkeypatch):
  def write(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(run_repair, "write", write)
  with pytest.raises(overrides.SettingError) as error:
    workdir.claim(tmp_path, experiment)
  said = f"{tmp_path} cannot be written: No space left on device; "
  assert str(error.value).startswith(said)
  assert error_codes.code_of(error.value) == "TM-D09"


def test_a_directory_that_is_replaced_is_noticed(tmp_path):
  path, away = tmp_path / "run", tmp_path / "away"
  path.mkdir()
  with workdir.held(path) as check:
    check()
    path.rename(away)
    with pytest.raises(FileNotFoundError):
      check()
    path.symlink_to(away)
    check()
    path.unlink()
    path.mkdir()
    with pytest.raises(workdir.Moved, match="to go on, name it where it is"):
      check()


def test_a_replaced_directory_is_the_error_in_the_place_of_any_other(tmp_path):
  path = tmp_path / "run"
  path.mkdir()

  def fail(replaced: bool):
    path.rmdir()
    if replaced:
      path.mkdir()
    raise ValueError("another")

  with pytest.raises(ValueError, match="another"), workdir.held(path):
    fail(replaced=False)
  path.mkdir()
  with pytest.raises(workdir.Moved), workdir.held(path):
    fail(replaced=True)


@pytest.mark.parametrize("name", ["25", "25.damaged"])
def test_a_checkpoint_whole_or_damaged_keeps_the_records(
  name, tmp_path, experiment
):
  workdir.claim(tmp_path, experiment).close()
  (tmp_path / "checkpoints" / name).mkdir(parents=True)
  (tmp_path / "metrics.jsonl").write_text("{}")
  workdir.claim(tmp_path, experiment).close()
  with pytest.raises(overrides.SettingError, match="other settings:\n  seed"):
    workdir.claim(tmp_path, other(experiment))
  assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {}
  assert workdir.checkpoints(tmp_path) == [name]


def test_what_is_damaged_is_moved_aside_and_named(tmp_path, experiment, capsys):
  workdir.claim(tmp_path, experiment).close()
  (tmp_path / "checkpoints" / "25").mkdir(parents=True)
  for name in ("trajectories", "tensorboard"):
    (tmp_path / name).write_text("a file")
  for name in ("report.html", "events.jsonl"):
    (tmp_path / name).mkdir()
  rows = [b'{"round": 1}', b"null", b'{"round": 2, "x": "\xff"}', b'{"roun']
  (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows))
  workdir.claim(tmp_path, experiment).close()
  told = capsys.readouterr().err
  assert told.count("warning: ") == 5
  assert f"{tmp_path}/metrics.jsonl has 2 lines without a round, first" in told
  assert f"is now {tmp_path}/metrics.jsonl.damaged" in told
  assert (tmp_path / "metrics.jsonl").read_text() == '{"round": 1}\n'
  kept = (tmp_path / "metrics.jsonl.damaged").read_bytes()
  assert kept == b"\n".join(rows)
  assert (tmp_path / "trajectories.damaged").read_text() == "a file"
  assert not (tmp_path / "tensorboard").exists()
  assert (tmp_path / "report.html.damaged").is_dir()
  # Once more, and the name is taken.
  (tmp_path / "trajectories").write_text("another")
  workdir.claim(tmp_path, experiment).close()
  assert (tmp_path / "trajectories.damaged2").read_text() == "another"


@pytest.mark.parametrize("name", ["checkpoints", "warm_start"])
def test_a_file_in_the_place_of_checkpoints_is_refused(
  tmp_path, experiment, name
):
  workdir.claim(tmp_path, experiment).close()
  (tmp_path / name).write_text("")
  with pytest.raises(overrides.SettingError, match=f"{name} must be a direc"):
    workdir.claim(tmp_path, experiment)


def test_a_checkpoint_has_a_plain_number(tmp_path):
  for name in ("7", "\uff17", "x", "12.damaged", "\u0663.damaged"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
  assert workdir.checkpoints(tmp_path) == ["12.damaged", "7"]


def test_engines_may_get_processes_when_a_run_goes_on(tmp_path, experiment):
  workdir.claim(tmp_path, experiment).close()
  (tmp_path / "checkpoints" / "25").mkdir(parents=True)
  place = dataclasses.replace(experiment.placement, decode_processes=1)
  apart = dataclasses.replace(experiment, placement=place)
  workdir.claim(tmp_path, apart).close()
  assert workdir.read(tmp_path) == apart


@pytest.mark.parametrize(
  ("python", "expected"),
  [("venv/bin/python", "venv/bin/python"), ("/elsewhere/a b/python", None)],
)
def test_the_command_names_this_python(python, expected, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "executable", str(tmp_path / python))
  monkeypatch.setattr(sys, "argv", ["train.py", "--workdir=a b"])
  monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
  start = expected or "'/elsewhere/a b/python'"
  assert workdir.command() == f"{start} train.py '--workdir=a b'"


def test_a_directory_that_can_be_written_is_made(tmp_path):
  workdir.make_writable(tmp_path / "a" / "b", "--out=x")
  assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("file", "file is a file"),
    ("link", "link is a file"),
    ("dangling", "dangling is a link to nothing"),
    ("dangling/run", "dangling is a link to nothing"),
  ],
)
def test_what_is_in_the_place_of_a_directory_is_named(
  name, reason, tmp_path, experiment, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("file").touch()
  pathlib.Path("link").symlink_to("file")
  pathlib.Path("dangling").symlink_to("nothing")
  with pytest.raises(overrides.SettingError) as error:
    workdir.make_writable(pathlib.Path(name), "--out=x")
  assert str(error.value) == f"--out=x cannot be written: {reason}"
  with pytest.raises(overrides.SettingError) as error:
    workdir.claim(name, experiment)
  assert str(error.value) == f"--workdir={name} cannot be written: {reason}"
