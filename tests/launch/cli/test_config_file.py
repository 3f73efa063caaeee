"""Classes of a config file outlive the file: its run can be read again."""

import json
import shutil
import sys
import typing

import pytest

from launch.cli import config_file, flags, known_programs, workdir
from rl.settings import checks, overrides
from tests.helpers import commands

OWN = """
import dataclasses

import jax.numpy as jnp

from configs import guess_number_moe
from envs.suites import textarena
from rl.algorithms import advantages, loss_aggregation, losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spo:
  scale: float = 1.0
  aggregate: loss_aggregation.Aggregate = loss_aggregation.TokenMean()
  own_weight = False
  has_ratio = True

  def __call__(self, row):
    # Not finite, so that there is something to replay.
    loss = jnp.where(row.sampled, row.logprobs * jnp.nan, 0.0)
    return losses.Terms(loss, jnp.zeros_like(row.sampled))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Better(advantages.Grpo):
  pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess(textarena.GuessTheNumber):
  pass


def get_config():
  run = guess_number_moe.get_config()
  return dataclasses.replace(
    run,
    environment=Guess(low=1, high=20, turns=5),
    algorithm=dataclasses.replace(
      run.algorithm, loss=Spo(), advantage=Better()
    ),
  )
"""
TINY = commands.TINY | {"rounds": "1", "evaluation.episodes": "0"}


@pytest.fixture(autouse=True)
def forgotten():
  """Forgets the file after each test, as another process would not know it."""
  yield
  sys.modules.pop("_config_my_own", None)


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "my-own.py"
  path.write_text(OWN)
  return path


PLAIN = """
import dataclasses

from configs import guess_number_moe
from envs.tools import tool_environment


@dataclasses.dataclass(frozen=True)
class Counter:
  def reset(self):
    return "Count."

  def add(self) -> int:
    'Adds.'
    return 1

  def validate(self):
    'Is a tool, and no check of settings.'


def get_config():
  return dataclasses.replace(
    guess_number_moe.get_config(),
    environment=tool_environment.ToolEnvironment(make=Counter),
    warm_start=None,
  )
"""


def test_a_class_that_is_a_setting_itself_is_kept_with_its_file(file, tmp_path):
  file.write_text(PLAIN)
  tree = config_file.load(file).get_config()
  checks.validate(tree.environment)
  kept = tmp_path / "config.json"
  data = config_file.to_json(tree)
  known_programs.remember(data)
  kept.write_text(json.dumps(data))
  file.unlink()
  sys.modules.pop("_config_my_own")
  again = config_file.read_json(kept).environment
  assert again.make is sys.modules["_config_my_own"].Counter
  assert sorted(again.tools) == ["add", "validate"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run of classes of a file that is gone by now, with a skipped update."""
  directory = tmp_path_factory.mktemp("runs")
  path = directory / "my-own.py"
  path.write_text(OWN)
  done = commands.launch(*commands.train(directory / "own", TINY, path))
  assert done.returncode == 0, done.stdout + done.stderr
  path.unlink()
  return directory / "own"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("module", "arguments", "code", "told"),
  [
    ("launch.evaluate", "--run={run} --episodes=4", 0, "on 4 held-out"),
    ("launch.export", "--run={run} --directory={new}", 0, "after 1 rounds"),
    ("launch.replay", "{skipped}", 1, "loss nan"),
    (
      "launch.train",
      "--config={run}/config.json --workdir={run}",
      0,
      "has all its 1 rounds",
    ),
    ("launch.train", "--config={run}/config.json --explain", 0, "decode"),
  ],
)
def test_a_launcher_reads_the_run(run, tmp_path, module, arguments, code, told):
  assert "_config_my_own" not in sys.modules
  (skipped,) = (run / "skipped").iterdir()
  words = arguments.format(run=run, skipped=skipped, new=tmp_path / "hf")
  done = commands.run(module, *words.split())
  assert done.returncode == code, done.stderr
  assert told in done.stdout


@pytest.mark.slow
def test_another_process_reads_the_run(run):
  done = commands.launch("launch.report", "--check", run)
  assert done.returncode == 0, done.stderr
  assert "0 violations" in done.stdout


@pytest.mark.slow
def test_the_server_reads_the_run(run):
  # It ends before it loads: the flags are those of a run that it has read.
  done = commands.run(
    "launch.serve", f"--run={run}", "--port=0", "--config.algorithm.loss.scal=2"
  )
  assert done.returncode == 2
  assert "did you mean --config.algorithm.loss.scale (float)?" in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_with_the_file_wherever_it_lies_and_whatever_it_says(
  run, tmp_path
):
  run = shutil.copytree(run, tmp_path / "run")
  path = tmp_path / "my-own.py"
  path.write_text(OWN.replace("jnp.nan", "1.0").replace("# Not", "# No more"))
  done = commands.run(*commands.train(run, TINY | {"rounds": "2"}, path))
  assert done.returncode == 0, done.stderr
  assert "going on after 1 rounds" in done.stdout
  assert "skipped" not in done.stdout
  # What runs now is what is kept from now on.
  kept = json.loads((run / "config.json").read_text())["config_files"]
  entry = kept["_config_my_own"]
  assert entry["path"] == str(path)
  assert entry["lines"] == path.read_text().splitlines()


def test_what_is_read_is_equal_to_what_was_written(file, tmp_path):
  tree = flags.load(str(file))
  workdir.claim(tmp_path / "run", tree).close()
  assert workdir.read(tmp_path / "run") == tree
  # A copy of config.json is enough, of another process or another day.
  sys.modules.pop("_config_my_own")
  copy = tmp_path / "copy.json"
  copy.write_bytes((tmp_path / "run" / "config.json").read_bytes())
  again = flags.load(str(copy), {"algorithm.loss.scale": "2"})
  assert type(again.algorithm.loss).__module__ == "_config_my_own"
  assert again.algorithm.loss.scale == 2.0
  assert again.environment.turns == 5


def test_code_that_changed_since_a_checkpoint_is_named_and_kept(
  file, tmp_path, capsys
):
  run = tmp_path / "run"
  workdir.claim(run, flags.load(str(file))).close()
  (run / "checkpoints" / "7").mkdir(parents=True)
  first = (run / "config.json").read_bytes()
  workdir.claim(run, flags.load(str(file))).close()
  assert "warning" not in capsys.readouterr().err
  file.write_text(OWN + "\n# Another.\n")
  workdir.claim(run, flags.load(str(file))).close()
  assert (
    "warning: my-own.py changed since round 7; the code of the rounds before "
    "is kept in config_until_round_7.json"
  ) in capsys.readouterr().err
  assert (run / "config_until_round_7.json").read_bytes() == first
  # What is changed again before a checkpoint has trained no round of those.
  file.write_text(OWN + "\n# Yet another.\n")
  workdir.claim(run, flags.load(str(file))).close()
  assert (run / "config_until_round_7.json").read_bytes() == first


def test_later_edits_do_not_change_what_a_run_was(file, tmp_path):
  workdir.claim(tmp_path / "run", flags.load(str(file))).close()
  file.write_text(OWN.replace("float = 1.0", "float = 7.0"))
  assert flags.load(str(file)).algorithm.loss.scale == 7.0
  loss: typing.Any = workdir.read(tmp_path / "run").algorithm.loss
  assert (loss.scale, type(loss)().scale) == (1.0, 1.0)


def test_a_class_of_the_file_can_be_typed_and_is_offered(file):
  tree = flags.load(str(file))
  text = "spo(scale=2)"
  again = overrides.override(tree, "algorithm.loss", text)
  assert again == overrides.override(tree, "algorithm.loss.scale", "2")
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(tree, "algorithm.loss", "sppo")
  assert "; did you mean spo? There" in str(error.value)


@pytest.mark.parametrize("kept", [3, {"_config_x": 3}, {"_config_x": {}}])
def test_what_is_kept_must_be_whole(tmp_path, kept):
  file = tmp_path / "config.json"
  file.write_text(json.dumps({"class": "x.Y", "config_files": kept}))
  with pytest.raises(overrides.SettingError) as error:
    config_file.read_json(file)
  assert str(error.value).startswith(f"{file}: config_files: expected path and")


def test_a_config_without_classes_of_its_own_keeps_no_file():
  tree = flags.load(str(commands.ROOT / commands.CONFIG))
  assert config_file.to_json(tree) == overrides.to_json(tree)


def test_a_run_with_other_settings_of_an_own_class_is_told_apart(
  file, tmp_path
):
  tree = flags.load(str(file))
  workdir.claim(tmp_path / "run", tree).close()
  (tmp_path / "run" / "checkpoints" / "25").mkdir(parents=True)
  other = overrides.override(tree, "algorithm.loss.scale", "2")
  with pytest.raises(overrides.SettingError) as error:
    workdir.claim(tmp_path / "run", other)
  assert "\n  algorithm.loss.scale: 1.0 -> 2.0\n" in str(error.value)


def test_settings_of_a_file_that_was_loaded_again_cannot_be_kept(file):
  tree = flags.load(str(file))
  flags.load(str(file))
  with pytest.raises(overrides.SettingError, match="py was loaded again after"):
    config_file.to_json(tree)


@pytest.mark.parametrize(
  ("made", "told"),
  [("local()", "local.<locals>.one has no name"), ("short", "<lambda> has no")],
)
def test_what_has_no_name_at_the_top_of_the_file_cannot_be_kept(
  file, made, told
):
  file.write_text(
    "import dataclasses\n"
    "@dataclasses.dataclass(frozen=True)\n"
    "class Run:\n"
    "  call: object\n"
    "short = lambda: 1\n"
    "def local():\n"
    "  def one(): ...\n"
    "  return one\n"
    "def get_config():\n"
    f"  return Run({made})\n"
  )
  tree = flags.load(str(file))
  with pytest.raises(overrides.SettingError, match=told):
    config_file.to_json(tree)


def test_a_kept_file_that_fails_names_its_line_and_where_it_is_kept(
  file, tmp_path
):
  helper = tmp_path / "elsewhere" / "own_helper.py"
  helper.parent.mkdir()
  helper.write_text("SCALE = 2.0\n")
  file.write_text(
    f"import sys\nsys.path.append({str(helper.parent)!r})\n"
    "import own_helper\n" + OWN.replace("1.0", "own_helper.SCALE", 1)
  )
  workdir.claim(tmp_path / "run", flags.load(str(file))).close()
  sys.path.remove(str(helper.parent))
  for name in ("own_helper", "_config_my_own"):
    sys.modules.pop(name)
  helper.unlink()
  file.write_text("\n")
  with pytest.raises(overrides.SettingError) as error:
    workdir.read(tmp_path / "run")
  sys.path.remove(str(helper.parent))
  assert str(error.value) == (
    f"{tmp_path}/run/config.json: {file}:3: ModuleNotFoundError: No module "
    "named 'own_helper'\n  import own_helper"
  )
