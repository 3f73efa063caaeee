"""Every file of configs/ loads and holds what its name promises."""

import dataclasses
import pathlib
import re
import typing

import pytest

from configs import guess_number_moe, guess_number_schedules
from launch import flags
from models import config as model_config
from rl import overlap, settings

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_FILES = sorted(p for p in _CONFIGS.glob("*.py") if p.stem != "__init__")
_SCHEDULES = guess_number_schedules.SCHEDULES
_ONE = f"{_CONFIGS / 'guess_number_schedules.py'}"


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_a_config_is_valid(file):
  tree = flags.load(str(file))
  assert settings.is_setting(type(tree))
  # Nothing is checked behind the back of `load`.
  tree.validate()


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_a_config_says_how_to_run_it(file):
  name = f"configs/{file.name}"
  commands = re.findall(r"python -m (\S+) .*?--config=(\S+)", file.read_text())
  assert commands
  assert {module.partition(".")[0] for module, _ in commands} == {"launch"}
  assert {path.partition(":")[0] for _, path in commands} == {name}


@pytest.mark.parametrize("name", sorted(_SCHEDULES))
def test_a_schedule_is_all_that_differs(name):
  run = flags.load(f"{_ONE}:{name}")
  assert run.overlap == _SCHEDULES[name]
  base = guess_number_moe.get_config()
  assert dataclasses.replace(run, overlap=base.overlap) == base


def test_every_way_to_overlap_has_a_run():
  runs = _SCHEDULES.values()
  consume = set(typing.get_args(overlap.Consume))
  assert {r.consume for r in runs} == consume
  assert {r.on_publish for r in runs} == {"drain", "recompute", "keep_kv"}
  assert {r.wait_for_round for r in runs} == {True, False}
  assert {r.max_staleness for r in runs} == {0, 1, 2}
  assert {r.updates_per_round for r in runs} == {1, 2}
  assert "hard_frontier" in {r.admission for r in runs}


def test_the_runs_differ():
  assert len(set(map(repr, _SCHEDULES.values()))) == len(_SCHEDULES)


def test_the_base_run_is_one_of_them():
  assert guess_number_moe.get_config().overlap in _SCHEDULES.values()


def test_an_unknown_schedule_is_told_the_others():
  with pytest.raises(settings.SettingError, match="sync or strict_pipeline"):
    flags.load(f"{_ONE}:synchronous")


def test_the_student_is_much_smaller_than_the_teacher_that_it_names(
  monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  file = _CONFIGS / "guess_number_distill.py"
  student, teacher = (flags.load(f"{file}:{r}") for r in ("student", "teacher"))
  own, theirs = (
    model_config.num_params(each.model)[0] for each in (student, teacher)
  )
  assert theirs > 5 * own
  assert student.algorithm.reference.model == teacher.model
  # Its words are the teacher's ids.
  assert student.environment == teacher.environment
  with pytest.raises(ValueError, match=r"reference\.directory=.*teacher-hf"):
    student.validate_initial()


def test_an_unknown_role_is_told_the_others():
  with pytest.raises(settings.SettingError, match="student or teacher"):
    flags.load(f"{_CONFIGS / 'guess_number_distill.py'}:pupil")


def test_the_supervised_run_ends_with_its_warm_start():
  run = flags.load(str(_CONFIGS / "guess_number_sft.py"))
  assert run.rounds == 0
  assert run.warm_start is not None
  assert run.warm_start.exploration == 0  # The oracle's answers alone.
