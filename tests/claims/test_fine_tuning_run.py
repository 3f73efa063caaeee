"""Chats and pairs of a user's own, on a model with a tokenizer of text."""

import dataclasses
import json
import math

import jax
import pytest

from launch.cli import workdir
from launch.report import metric_docs
from models import policy as policy_lib
from models.chat import hf_chat
from models.hf import config as hf_config
from models.hf import export, load
from tests.helpers import commands

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

TOOL = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
  },
}
SMALL = {
  "batch.rows": "4",
  "model.lora.rank": "8",
  "warm_start.examples": "4",
  "warm_start.eval_every": "8",
  "warm_start.optimizer.learning_rate": "0.01",
}


def chat(number):
  """One question, a thought, a call of a tool, its result and an answer."""
  call = {"name": "add", "arguments": {"x": number}}
  return {
    "tools": [TOOL],
    "messages": [
      {"role": "user", "content": f"{number} and 1? <|im_end|>"},
      {
        "role": "assistant",
        "reasoning_content": "A sum.",
        "tool_calls": [{"type": "function", "function": call}],
      },
      {"role": "tool", "content": f"{number + 1}"},
      {"role": "assistant", "content": f"{number + 1}"},
    ],
  }


def write(path, table):
  path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
  return str(path)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
  directory = tmp_path_factory.mktemp("published") / "model"
  config = hf_config.load(hf_config.TINY)
  small = dataclasses.replace(config, num_layers=1)
  params = policy_lib.of(small).init(jax.random.key(1))
  export.export(directory, params, small, hf_config.TINY)
  return directory


def train(name, model, file, run_dir, **changes):
  """Trains on a file, all of which is held out, too."""
  settings = {
    **SMALL,
    "data": file,
    "environment.rows.eval_data": file,
    **changes,
  }
  arguments = commands.train(run_dir, settings, f"configs/{name}.py:{model}")
  return commands.run(*arguments)


def lines(run_dir):
  text = (run_dir / workdir.WARM_START_LINES).read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def tuned(model_dir, tmp_path_factory):
  """The export of a model that was fine-tuned on chats, and its run."""
  root = tmp_path_factory.mktemp("tuned")
  file = write(root / "chats.jsonl", map(chat, range(12)))
  result = train("sft_chats", model_dir, file, root / "run")
  assert result.returncode == 0, result.stdout + result.stderr
  done = commands.run(
    "launch.export", f"--run={root / 'run'}", f"--directory={root / 'hf'}"
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return root


def test_chats_with_tools_and_thinking_are_learned_and_exported(
  tuned, model_dir
):
  rows = lines(tuned / "run")
  # Two epochs of 12 chats, 4 a step.
  assert [row["step"] for row in rows] == list(range(1, 7))
  assert rows[-1]["eval/loss"] < rows[0]["loss"] - 0.5
  config = hf_config.load(tuned / "hf")
  assert config == hf_config.load(model_dir)
  load.check(str(tuned / "hf"), config)
  assert hf_chat.HfChat.load(tuned / "hf") == hf_chat.HfChat.load(model_dir)


def test_preferences_are_learned_on_top(tuned, tmp_path):
  file = write(
    tmp_path / "pairs.jsonl",
    [
      {"prompt": f"{i} and 1?", "chosen": f"{i + 1}.", "rejected": "No idea"}
      for i in range(12)
    ],
  )
  rate = {"warm_start.optimizer.learning_rate": "0.003"}
  result = train("dpo_pairs", tuned / "hf", file, tmp_path / "run", **rate)
  assert result.returncode == 0, result.stdout + result.stderr
  rows = lines(tmp_path / "run")
  assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
  assert rows[-1]["eval/accuracy"] > 0.9
  assert rows[-1]["eval/loss"] < 0.6
  found = {name for row in rows for name in row} - {"step", "time_s"}
  names = {row.name for row in metric_docs.entries()}
  told = {name for name in names if name.startswith("warm_start/")}
  assert told == {f"warm_start/{name}" for name in found}


def test_a_row_that_cannot_be_used_ends_the_run_with_its_line(
  model_dir, tmp_path
):
  table = [chat(1), chat(2)]
  table[1]["messages"][0]["content"] = "long " * 300
  file = write(tmp_path / "chats.jsonl", table)
  result = train("sft_chats", model_dir, file, tmp_path / "run")
  assert result.returncode == 2
  assert "error: " in result.stdout
  assert "chats.jsonl:2: its " in result.stdout
  assert "too_long=drop" in result.stdout
  assert "Traceback" not in result.stdout + result.stderr
  dropped = {"warm_start.too_long": "drop", "warm_start.steps": "1"}
  result = train("sft_chats", model_dir, file, tmp_path / "run", **dropped)
  assert result.returncode == 0, result.stdout + result.stderr
  assert "1 examples for train, 1 too long" in result.stdout
