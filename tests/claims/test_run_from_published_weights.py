"""Runs that start from a checkpoint that is odd, damaged or removed."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from launch.cli import flags, workdir
from models import lora
from models import policy as policy_lib
from models.chat import word_chat
from models.hf import export
from tests.helpers import commands

pytestmark = pytest.mark.compiled

CONFIG = str(commands.ROOT / commands.CONFIG)
TINY = commands.TINY | {"rounds": "1", "evaluation.episodes": "0"}


def settings(source, **changes):
  experiment = flags.load(CONFIG, TINY)
  return dataclasses.replace(experiment, initial=str(source), **changes)


@pytest.fixture
def source(tmp_path):
  """A checkpoint with a tokenizer of words that the game does not have."""
  model = flags.load(CONFIG, TINY).model
  params = policy_lib.of(model).init(jax.random.key(1))
  words = word_chat.WordChat(("other", "words"))
  export.export(tmp_path / "source", params, model, words)
  return tmp_path / "source"


@pytest.mark.slow
def test_a_run_goes_on_without_the_weights_that_it_started_from(
  source, tmp_path
):
  run = tmp_path / "run"
  changes = TINY | {"initial": str(source)}
  result = commands.launch(*commands.train(run, changes))
  assert result.returncode == 0, result.stderr
  # Three special tokens come before the words.
  assert (
    f"initial={source}: its tokenizer is not used; the words of guess_number"
    " take the ids from 3 on\n"
  ) in result.stdout
  source.rename(tmp_path / "elsewhere")
  config = run / "config.json"
  result = commands.run(*commands.train(run, {"rounds": "2"}, config))
  assert result.returncode == 0, result.stderr
  assert "going on after 1 rounds" in result.stdout
  assert "its tokenizer" not in result.stdout
  # A new run needs the initial weights.
  result = commands.run(*commands.train(tmp_path / "new", {}, config))
  assert result.returncode == 2
  assert f"error: initial={source} cannot be loaded:" in result.stderr
  assert not (tmp_path / "new").exists()


def test_what_adapters_were_trained_on_must_stay(tmp_path):
  whole = settings(tmp_path / "gone")
  model = dataclasses.replace(whole.model, lora=lora.Lora(rank=2))
  adapted = dataclasses.replace(whole, model=model)
  run = tmp_path / "run"
  (run / "checkpoints" / "3").mkdir(parents=True)
  workdir.check_initial(run, whole)
  for path, experiment in (
    (run, adapted),
    (tmp_path / "fresh", whole),
    ("", whole),
  ):
    with pytest.raises(
      ValueError, match=r"^initial=.*\n.* does not exist"
    ) as e:
      workdir.check_initial(path, experiment)
    hint = f"set initial in {run}/config.json"
    assert str(e.value).endswith(hint) == (path == run)


def test_adapters_go_on_with_a_model_that_was_moved(tmp_path):
  whole = settings(tmp_path / "before")
  model = dataclasses.replace(whole.model, lora=lora.Lora(rank=2))
  adapted = dataclasses.replace(whole, model=model)
  for name, experiment in (("whole", whole), ("adapted", adapted)):
    run = tmp_path / name
    workdir.claim(run, experiment).close()
    (run / "checkpoints" / "3").mkdir(parents=True)
    moved = dataclasses.replace(experiment, initial=str(tmp_path / "now"))
    is_refused = bool(workdir.forbidden_changes(run, moved))
    # Checksums tell whether it is the same, and nothing tells of the other.
    assert is_refused == (experiment is whole)


def test_weights_that_are_no_numbers_end_the_program_with_a_way_out(
  source, tmp_path
):
  file = source / "model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  good = file.read_bytes()
  tensors["model.norm.weight"][3] = np.nan
  safetensors.numpy.save_file(tensors, file)
  changes = TINY | {"initial": str(source)}
  result = commands.run(*commands.train(tmp_path / "run", changes))
  assert result.returncode == 2, result.stdout
  assert (
    f"error: initial={source} cannot be loaded:\n"
    "  NaN or infinity in 1 tensors: model.norm.weight; copy the files again"
  ) in re.sub(r"(?m)^\d\d:\d\d:\d\d ", "", result.stdout)
  # The directory is free for another config.
  file.write_bytes(good)
  other = settings(source, seed=5)
  workdir.claim(tmp_path / "run", other).close()
  assert workdir.read(tmp_path / "run") == other
