"""A run with the tokenizer of the model that it starts from."""

import dataclasses
import json

import jax
import pytest

from envs import base
from launch.cli import flags, workdir
from models import policy as policy_lib
from models.chat import hf_chat
from models.hf import export
from rl.rollout import chats
from tests.helpers import chat_messages, commands

pytestmark = pytest.mark.compiled

LENGTH = 192
CHANGES = commands.TINY | {
  "rounds": "2",
  "model.vocab_size": "768",
  "model.max_length": f"{LENGTH}",
  "rollout.max_tokens": f"{LENGTH}",
  "rollout.turn_tokens": "4",
  "rollout.max_turns": "3",
  "batch.length": f"{LENGTH}",
  "batch.tail_rows": "none",
  "evaluation.episodes": "4",
  "warm_start.steps": "1",
  "warm_start.episodes": "8",
}
del CHANGES["warm_start"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
  """A checkpoint with a byte-level tokenizer and Qwen3's template."""
  directory = tmp_path_factory.mktemp("published") / "model"
  config = flags.load(str(commands.ROOT / commands.CONFIG), CHANGES).model
  params = policy_lib.of(config).init(jax.random.key(1))
  export.export(directory, params, config, chat_messages.GOLDEN)
  return directory


@pytest.fixture(scope="module")
def run(model_dir, tmp_path_factory):
  directory = tmp_path_factory.mktemp("runs") / "free_text"
  changes = CHANGES | {"initial": str(model_dir)}
  result = commands.run(*commands.train(directory, changes))
  assert result.returncode == 0, result.stdout + result.stderr
  assert "its tokenizer is not used" not in result.stdout
  return directory


@pytest.mark.slow
def test_a_run_talks_in_the_template_of_its_model(run):
  file = min((run / "trajectories").glob("*.jsonl"))
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  chat = hf_chat.HfChat.load(chat_messages.GOLDEN)
  said = [base.Message("user", "guess")]
  for row in rows:
    first = row["turns"][0]
    assert first["context"] == chat.open(said).tolist()
    assert first["words"] == [chat.token(i) for i in first["tokens"]]
    for turn in row["turns"]:
      has_ended = turn["tokens"][-1] in chat.stop_ids
      assert has_ended == (turn["stop"] == "stop")
      assert has_ended or len(turn["tokens"]) == 4


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer_and_goes_on_without_the_model(
  run, model_dir, tmp_path
):
  kept = run / chats.KEPT
  assert (kept / "tokenizer.json").read_bytes() == (
    chat_messages.GOLDEN / "tokenizer.json"
  ).read_bytes()
  assert hf_chat.HfChat.load(kept) == hf_chat.HfChat.load(model_dir)
  elsewhere = model_dir.rename(tmp_path / "elsewhere")
  try:
    result = commands.run(
      *commands.train(run, {"rounds": "3"}, run / "config.json")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "going on after 2 rounds" in result.stdout
    result = commands.run("launch.evaluate", f"--run={run}", "--episodes=2")
    assert result.returncode == 0, result.stderr
    assert "on 2 held-out episodes" in result.stdout
    out = tmp_path / "out"
    result = commands.run("launch.export", f"--run={run}", f"--directory={out}")
    assert result.returncode == 0, result.stderr
    assert hf_chat.HfChat.load(out) == hf_chat.HfChat.load(kept)
  finally:
    elsewhere.rename(model_dir)


def test_the_words_of_the_environment_can_be_asked_for(model_dir):
  experiment = flags.load(
    str(commands.ROOT / commands.CONFIG), CHANGES | {"initial": str(model_dir)}
  )
  assert experiment.chosen_chat == chats.Hf(directory=str(model_dir))
  words = dataclasses.replace(experiment, chat=chats.Words())
  assert words.build_chat().vocab_size == 29


def test_the_command_line_names_a_chat(model_dir):
  for text, chat in {
    "words": chats.Words(),
    f"hf(directory='{model_dir}')": chats.Hf(directory=str(model_dir)),
    f"hf(directory='{model_dir}',thinking=false)": chats.Hf(
      directory=str(model_dir), thinking=False
    ),
  }.items():
    config = str(commands.ROOT / commands.CONFIG)
    assert flags.load(config, CHANGES | {"chat": text}).chat == chat


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"chat": "hf"}, "chat=hf has no tokenizer: name the directory"),
    (
      {"chat": "hf(directory='GIVEN')", "model.vocab_size": "300"},
      "model.vocab_size=300 is below the 749 ids of the tokenizer in",
    ),
    (
      {"chat": "hf", "chat.directory": "GIVEN/none"},
      "none: no tokenizer.json",
    ),
  ],
)
def test_a_chat_that_cannot_work_is_refused(
  changes, words, model_dir, tmp_path
):
  changes = {k: v.replace("GIVEN", str(model_dir)) for k, v in changes.items()}
  arguments = commands.train(tmp_path / "run", CHANGES | changes)
  result = commands.run(*arguments)
  assert result.returncode == 2
  assert words in result.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_was_trained_is_read_with_the_tokenizer_of_its_run(run):
  experiment = workdir.read_trained(run)
  assert experiment.initial is None
  assert experiment.chat == chats.Hf(directory=str(run / chats.KEPT))
