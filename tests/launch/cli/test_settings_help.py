"""Every setting is told with type, value and meaning."""

import dataclasses
import json

import pytest

from launch.cli import flags, settings_help
from rl import experiment
from rl.settings import overrides
from tests.helpers import commands


@dataclasses.dataclass(frozen=True)
class Base:
  """A part.

  Attributes:
    size: of it,
      in metres.
    low, high: bounds: both included.

  Source: somewhere: else.
  """

  size: int = 3
  low: float = 0.0


@dataclasses.dataclass(frozen=True)
class Part(Base):
  """Another part.

  Attributes:
    size: of all parts.
  """

  name: str | None = None


@dataclasses.dataclass(frozen=True)
class Whole:
  part: Part = Part()


def test_meanings_are_those_of_docstrings_the_nearest_class_first():
  assert settings_help.meanings(Base) == {
    "size": "of it, in metres.",
    "low": "bounds: both included.",
    "high": "bounds: both included.",
  }
  assert settings_help.meanings(Part)["size"] == "of all parts."


def test_parts_are_told_with_all_that_is_in_them():
  assert settings_help.text(Whole()).splitlines() == [
    "--config.part=part  (Part)",
    "--config.part.size=3  (int)",
    "    of all parts.",
    "--config.part.low=0.0  (float)",
    "    bounds: both included.",
    "--config.part.name=none  (none | str)",
  ]
  assert len(settings_help.text(Whole(), "part.size").splitlines()) == 2


def test_a_part_that_does_not_exist_is_refused():
  with pytest.raises(overrides.SettingError, match=r"help=x: .*there are part"):
    settings_help.text(Whole(), "x")


def test_settings_of_a_run_have_a_meaning():
  tree = flags.load(str(commands.ROOT / "configs/next_letter.py"))
  told = {one.path: one for one in settings_help.entries(tree)}
  assert "grpo" not in told["algorithm.loss"].others
  assert "gspo" in told["algorithm.loss"].others
  assert told["rollout.group_size"].meaning
  without = [path for path, one in told.items() if not one.meaning]
  # Names that say all, as `seed` or `evaluation`, need no words.
  assert len(without) < len(told) / 2
  assert {f.name for f in dataclasses.fields(experiment.Experiment)} <= {*told}


@pytest.mark.process
def test_a_command_prints_settings_and_ends():
  config = "--config=configs/next_letter.py"
  told = commands.run("launch.train", config, "--config.help=rollout")
  assert told.returncode == 0
  assert "--config.rollout.group_size=8  (int)\n" in told.stdout
  assert "learning_rate" not in told.stdout
  told = commands.run("launch.train", config, "--config.help")
  assert "--config.optimizer.learning_rate=" in told.stdout


@pytest.mark.process
def test_printed_settings_are_a_config(tmp_path):
  config = "--config=configs/guess_number_moe.py"
  told = commands.run(
    "launch.train", config, "--print_config", "--config.seed=7"
  )
  assert json.loads(told.stdout)["seed"] == 7
  file = tmp_path / "again.json"
  file.write_text(told.stdout)
  again = flags.load(str(file))
  assert again == flags.load(
    str(commands.ROOT / "configs/guess_number_moe.py"), {"seed": "7"}
  )
