"""Every file of configs/ loads and holds what its name promises."""

import ast
import dataclasses
import json
import pathlib
import re
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import (
  guess_number_moe,
  guess_number_schedules,
  migrated_sums,
  tool_calculator_hf,
)
from launch.cli import config_file, flags
from models import memory_report
from models import policy as policy_lib
from models.chat import hf_chat
from models.hf import config as hf_config
from models.hf import export
from rl.algorithms import preference_loss
from rl.schedule import overlap
from rl.settings import overrides
from tests.helpers import commands, packed_rows, played_members

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_FILES = sorted(p for p in _CONFIGS.glob("*.py") if p.stem != "__init__")
_SCHEDULES = guess_number_schedules.SCHEDULES
_ONE = f"{_CONFIGS / 'guess_number_schedules.py'}"


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_a_config_is_valid(file):
  tree = flags.load(str(file))
  assert overrides.is_setting(type(tree))
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
  with pytest.raises(overrides.SettingError, match="sync or strict_pipeline"):
    flags.load(f"{_ONE}:synchronous")


def test_the_student_is_much_smaller_than_the_teacher_that_it_names(
  monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  file = _CONFIGS / "guess_number_distill.py"
  student, teacher = (flags.load(f"{file}:{r}") for r in ("student", "teacher"))
  own, theirs = (
    memory_report.num_params(each.model).total for each in (student, teacher)
  )
  assert theirs > 5 * own
  assert student.algorithm.reference.model == teacher.model
  # Its words are the teacher's ids.
  assert student.environment == teacher.environment
  with pytest.raises(ValueError, match=r"reference\.directory=.*hf:") as error:
    student.validate_teacher()
  student.validate_initial()  # A trained one is used without.
  # It names the commands that the file does, in one line.
  text = file.read_text().replace("\\\\\n    ", "")
  commands = re.findall(r"^python -m .*teacher.*$", text, re.MULTILINE)
  assert len(commands) == 2
  assert str(error.value).endswith("; run " + " && ".join(commands))
  # Another directory is told of as ever.
  other = overrides.override(student, "algorithm.reference.directory", "no")
  with pytest.raises(ValueError, match="directory does not exist"):
    other.validate_teacher()


def test_an_unknown_role_is_told_the_others():
  with pytest.raises(overrides.SettingError, match="student or teacher"):
    flags.load(f"{_CONFIGS / 'guess_number_distill.py'}:pupil")


def test_the_supervised_run_ends_with_its_warm_start():
  run = flags.load(str(_CONFIGS / "guess_number_sft.py"))
  assert run.rounds == 0
  assert run.warm_start is not None
  assert run.warm_start.exploration == 0  # The oracle's answers alone.


@pytest.mark.compiled
def test_a_loss_of_ones_own_pulls_back_beyond_its_bound():
  run = flags.load(str(_CONFIGS / "guess_number_own.py"))

  def total(ratio, gain):
    row = packed_rows.make(
      jnp.stack([jnp.nan, jnp.log(ratio)]),
      old=[0.0, 0.0],
      advantages=[np.nan, gain],
      sampled=[False, True],
    )
    return run.algorithm.loss(row).loss.sum()

  slopes = [jax.grad(total)(1.0 + x, 2.0) for x in (0.0, 0.1, 0.2, 0.3)]
  # In units of -A: as without a bound, half of it, nothing, and back.
  assert slopes == pytest.approx([-2.0, -1.0, 0.0, 1.0], abs=1e-5)


def test_an_advantage_of_ones_own_compares_ranks():
  run = flags.load(str(_CONFIGS / "guess_number_own.py"))
  members = [played_members.played(x, (1, 1)) for x in (0.0, 1.0, 1.0, 99.0)]
  found = run.algorithm.advantage(members).advantages
  assert [own.tolist() for own in found] == [
    [-0.75, -0.75],
    [0.0, 0.0],
    [0.0, 0.0],
    [0.75, 0.75],
  ]


def test_no_question_of_the_calculator_is_in_both_splits():
  source: Any = tool_calculator_hf.get_config().environment
  asked = {
    split: {
      source.record(source.task(i, split)).fields["question"]
      for i in range(400)
    }
    for split in ("train", "eval")
  }
  assert len(asked["eval"]) > 300
  assert not asked["train"] & asked["eval"]


@pytest.mark.parametrize(
  "text", ["", "7", "7+", "7/2", "7**9", "2+3*4", "9" * 10 + "*2", "2 - -3"]
)
def test_the_calculator_takes_one_step_of_two_integers(text):
  calculator = tool_calculator_hf.Calculator()
  calculator.reset("", 1, [("+", 2)])
  assert calculator.calculate("-7 * 2") == -14
  with pytest.raises(ValueError, match="write two integers"):
    calculator.calculate(text)


@pytest.mark.parametrize(
  "name", ["own_data", "tool_calculator_hf", "counter", "sums"]
)
def test_a_model_of_ones_own_keeps_what_it_knows(name):
  # Rates for random weights are a thousand times as high.
  run = flags.load(f"{_CONFIGS / name}.py:{hf_config.TINY}")
  assert run.initial == str(hf_config.TINY)
  assert run.optimizer.learning_rate == 1e-6
  assert run.warm_start is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tool_calculator_hf", "counter", "sums"])
def test_a_run_on_the_tiny_model_talks_in_its_template(name, tmp_path):
  changes = {
    "rounds": "2",
    "model.num_layers": "1",
    "rollout.group_size": "4",
    "engine.slots": "16",
    "engine.row_buckets": "16,",
    "engine.chunk_buckets": "32,",
    "overlap.groups_per_round": "2",
    "overlap.groups_per_microbatch": "2",
    "batch.rows": "8",
    "batch.tail_rows": "none",
    "evaluation.episodes": "4",
    "retention.episodes_every": "1",
  }
  if name != "counter":
    changes |= {"warm_start.steps": "2", "warm_start.episodes": "8"}
  config = f"configs/{name}.py"
  if name == "counter":  # From a checkpoint, as a model of one's own.
    model = dataclasses.replace(hf_config.load(hf_config.TINY), num_layers=1)
    params = policy_lib.of(model).init(jax.random.key(0))
    export.export(tmp_path / "model", params, model, hf_config.TINY)
    config += f":{tmp_path / 'model'}"
  result = commands.run(*commands.train(tmp_path / "run", changes, config))
  assert result.returncode == 0, result.stdout + result.stderr
  rows = [
    json.loads(line)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  ]
  assert [row["faults"] for row in rows] == [0, 0]
  file = min((tmp_path / "run" / "trajectories").glob("*.jsonl"))
  turn = json.loads(file.read_text().splitlines()[0])["turns"][0]
  chat = hf_chat.HfChat.load(hf_config.TINY)
  shown = "".join(chat.token(i) for i in turn["context"])
  assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
  assert ("<tools>" in shown) == (name != "sums")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "lines"),
  [
    ("frozen_lake_moe", "metrics.jsonl"),
    ("guess_number_sft", "warm_start.jsonl"),
    ("guess_number_schedules", "metrics.jsonl"),
    ("guess_number_distill", "metrics.jsonl"),
  ],
)
def test_a_recipe_takes_two_steps(name, lines, tmp_path):
  changes = {
    "model.num_layers": "1",
    "engine.row_buckets": "32,",
    "engine.chunk_buckets": "24,",
    "evaluation.episodes": "4",
    "warm_start.steps": "2",
    "warm_start.episodes": "8",
  }
  config, run_dir = f"configs/{name}.py", tmp_path / "run"
  if name != "guess_number_sft":
    changes |= {"rounds": "2", "overlap.groups_per_round": "2"}
    changes |= {"overlap.groups_per_microbatch": "2"}
  if name == "guess_number_distill":  # Without a warm start.
    changes = {k: v for k, v in changes.items() if "warm_start" not in k}
    changes["algorithm.reference.directory"] = str(tmp_path / "teacher")
    teacher = flags.load(f"{config}:teacher").model
    params = policy_lib.of(teacher).init(jax.random.key(0))
    export.export(tmp_path / "teacher", params, teacher)
  result = commands.run(*commands.train(run_dir, changes, config))
  assert result.returncode == 0, result.stdout + result.stderr
  assert len((run_dir / lines).read_text().splitlines()) == 2


def test_rows_of_ones_own_take_the_place_of_those_of_the_file(tmp_path):
  file = tmp_path / "chats.jsonl"
  said = [{"role": r, "content": "a"} for r in ("user", "assistant")]
  row = json.dumps({"messages": said})
  file.write_text("".join(f'{row[:-1]}, "n": {i}}}\n' for i in range(30)))
  config, changes = str(_CONFIGS / "sft_chats.py"), {"data": str(file)}
  run = flags.load(config, changes)
  assert run.environment.rows.data == str(file)
  assert overrides.from_json(config_file.to_json(run)) == run
  with file.open("a") as rows:
    rows.write('{"messages": "a"}\n')
  with pytest.raises(ValueError, match=r"chats\.jsonl:31: field 'messages': "):
    flags.load(config, changes)
  with pytest.raises(
    ValueError, match=r"--config\.data=x: .* has no rows; use"
  ):
    flags.load(str(_CONFIGS / "guess_number_moe.py"), {"data": "x"})
  with pytest.raises(
    ValueError, match=r"absent\.jsonl cannot be read: No such"
  ):
    flags.load(config, {"data": str(tmp_path / "absent.jsonl")})


@pytest.mark.parametrize("peer", ["trl", "tunix", "verl"])
@pytest.mark.parametrize(
  ("answer", "reward"), [("5", 1.0), (" 5", 0.8), ("51", 0.2), ("", 0.0)]
)
def test_the_migration_scripts_grade_as_the_config_does(peer, answer, reward):
  # Of a script whose library is not here, only the function is run.
  path = _CONFIGS.parent / "docs" / "migration" / f"sums_{peer}.py"
  functions: list[ast.stmt] = [
    node
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
  ]
  names: dict[str, Any] = {"rollout": types.SimpleNamespace(seed=0)}
  exec(compile(ast.Module(functions, []), str(path), "exec"), names)
  if peer == "verl":
    theirs = names["compute_score"]("sums", answer, "5")
  else:
    one = answer if peer == "tunix" else [{"content": answer}]
    (theirs,) = names["grade"](prompts=[""], completions=[one], answer=["5"])
  ours = migrated_sums.grade(answer, {"answer": "5"})
  assert ours == theirs == pytest.approx(reward)


@pytest.mark.slow
def test_the_task_of_the_migration_pages_trains(tmp_path):
  changes = {"rounds": "2", "model.num_layers": "1"}
  config = "configs/migrated_sums.py"
  result = commands.run(*commands.train(tmp_path, changes, config))
  assert result.returncode == 0, result.stdout + result.stderr
  rounds = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["groups"] for line in rounds] == [8, 8]


def test_pairs_are_trained_by_dpo_and_chats_are_not():
  chats, pairs = (
    flags.load(str(_CONFIGS / f"{name}.py"))
    for name in ("sft_chats", "dpo_pairs")
  )
  assert isinstance(pairs.warm_start.loss, preference_loss.Dpo)
  assert (chats.rounds, pairs.rounds) == (0, 0)
  with pytest.raises(ValueError, match="loss=dpo: it is of pairs"):
    flags.load(str(_CONFIGS / "sft_chats.py"), {"warm_start.loss": "dpo"})
