"""launch.export: writes a run as a Hugging Face directory."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from launch.cli import flags, workdir
from models import lora
from models import policy as policy_lib
from models.hf import config as hf_config
from models.hf import export, load, peft
from rl import assemble, initial_state
from rl.loop import progress
from rl.runtime import checkpoint
from tests.helpers import commands

pytestmark = pytest.mark.compiled

# The game has 29 ids; the vocabulary is padded to 32.
CHANGES = {
  "model.vocab_size": "32",
  "model.num_layers": "1",
  "model.d_model": "32",
  "batch.rows": "8",
}


def experiment():
  return flags.load(str(commands.ROOT / commands.CONFIG), CHANGES)


def saved_run(directory, settings, change=0.0):
  """Writes the files of a run after 3 rounds; returns its parameters.

  Args:
    change: added to every trained parameter.
  """
  workdir.claim(directory, settings).close()
  parts = assemble.build(settings)
  state = initial_state.fresh_state(parts.programs, settings.seed)
  trained, frozen = lora.split(state.params)
  trained = jax.tree.map(lambda leaf: leaf + change, trained)
  state = state._replace(params=lora.join(trained, frozen))
  saved = checkpoint.Checkpoints(directory / "checkpoints", keep=1)
  now = progress.beginning(state, parts.tasks.cursor)
  initial_state.save(saved, dataclasses.replace(now, trained=3))
  saved.close()
  return jax.device_get(state.params)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run of a larger host, whose initial checkpoint was removed."""
  directory = tmp_path_factory.mktemp("runs")
  source, settings = directory / "source", experiment()
  params = policy_lib.of(settings.model).init(jax.random.key(1))
  export.export(source, params, settings.model)
  settings = dataclasses.replace(settings, initial=str(source))
  params = saved_run(directory / "guesses", settings)
  source.rename(directory / "elsewhere")
  config = directory / "guesses" / "config.json"
  data = json.loads(config.read_text())
  data["batch"]["rows"] = 4_000_000  # Some TiB of activations.
  config.write_text(json.dumps(data))
  return directory / "guesses", params


def test_the_newest_checkpoint_is_written(run, tmp_path):
  directory, params = run
  target = tmp_path / "hf"
  result = commands.run(
    "launch.export", f"--run={directory}", f"--directory={target}"
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout == f"{target}: guess_number after 3 rounds\n"
  model = hf_config.load(target)
  loaded = load.load(target, model)
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))
  vocab = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]
  chat = experiment().build_chat()
  assert {chat.token(i): i for i in range(chat.vocab_size)} == vocab


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
  """A run that trains adapters, of a model that takes 999 tokens."""
  source = tmp_path_factory.mktemp("models") / "source"
  directory = tmp_path_factory.mktemp("runs") / "adapted"
  settings = flags.load(
    str(commands.ROOT / commands.CONFIG),
    CHANGES | {"model.lora": "lora(rank=2)", "initial": str(source)},
  )
  # Fresh adapters add nothing: these are the frozen parameters of the run.
  programs = assemble.build(settings).programs
  fresh = initial_state.fresh_state(programs, settings.seed).params
  model = dataclasses.replace(settings.model, lora=None, max_length=999)
  export.export(source, lora.merge(fresh, settings.model.lora), model)
  # Fresh adapters add nothing, which would look like no adapters.
  return directory, saved_run(directory, settings, 0.1), settings.model


def test_adapters_are_merged_unless_they_are_asked_for(adapted, tmp_path):
  directory, params, model = adapted
  whole, adapter = tmp_path / "whole", tmp_path / "adapter"
  for target, more in ((whole, []), (adapter, ["--adapter"])):
    where = [f"--run={directory}", f"--directory={target}"]
    result = commands.run("launch.export", *where, *more)
    assert result.returncode == 0, result.stderr
  found = hf_config.load(whole)
  assert found.max_length == 999 > model.max_length
  loaded = load.load(whole, found)
  merged = lora.merge(jax.device_put(params), model.lora)
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded, merged))
  loaded = peft.load(adapter, model)
  adapters, _ = lora.split(params)
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded, adapters))


def test_adapters_of_weights_that_the_run_drew_are_refused(tmp_path):
  directory = tmp_path / "run"
  changes = CHANGES | {"model.lora": "lora(rank=2)"}
  settings = flags.load(str(commands.ROOT / commands.CONFIG), changes)
  workdir.claim(directory, settings).close()
  result = commands.run(
    "launch.export",
    f"--run={directory}",
    f"--directory={tmp_path / 'hf'}",
    "--adapter",
  )
  assert result.returncode == 2
  assert "--adapter: the run has no initial model" in result.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--run={run}", "--directory={run}"], "exists; remove it or choose"),
    (
      ["--run={run}/../guesess", "--directory={run}/hf"],
      "guesess does not exist; did you mean {run}/../guesses?",
    ),
    (
      ["--run={run}", "--directory={run}/hf", "--tokenizer={run}/none"],
      "none: no such directory",
    ),
    (
      ["--run={run}", "--directory={run}/hf", "--adapter"],
      "--adapter: the run has no adapters",
    ),
    (
      ["--run={run}", "--directory=/dev/null/hf"],
      "error: /dev/null/hf cannot be written: [Errno 20] Not a directory",
    ),
  ],
  ids=["there already", "no such run", "no tokenizer", "no adapters", "a file"],
)
def test_what_cannot_be_exported_is_refused(run, arguments, message):
  directory, _ = run
  result = commands.run(
    "launch.export", *(text.format(run=directory) for text in arguments)
  )
  assert result.returncode == 2
  assert message.format(run=directory) in result.stderr
  assert not (directory / "hf").exists()
