"""launch.serve: serves a run, or a Hugging Face directory."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
from typing import Any

import jax
import jsonschema
import openai
import pytest

from launch import served_model
from models import config as model_config
from models import policy as policy_lib
from models.chat import hf_chat
from models.hf import export
from rl.data import trajectory
from tests.helpers import commands, machine_speed
from tests.helpers.chat_messages import GOLDEN

# The ids at which answers of the tokenizer's chat stop.
NEVER_ENDS = {"0": -100, "2": -100}
ENGINE = {
  "engine.slots": "4",
  "engine.row_buckets": "4,",
  "engine.chunk_buckets": "8,",
}
WEATHER = {
  "type": "object",
  "properties": {"warm": {"type": "boolean"}, "city": {"enum": ["Ulm"]}},
  "required": ["warm", "city"],
  "additionalProperties": False,
}
SIZES = {
  "vocab_size": 768,
  "num_layers": 1,
  "d_model": 16,
  "num_heads": 2,
  "num_kv_heads": 1,
  "head_dim": 8,
  "d_expert": 16,
}


class Command:
  """A `launch.serve` process, killed at the end of the `with`."""

  def __init__(self, *arguments):
    self.process = commands.start(
      "launch.serve", *arguments, stderr=subprocess.PIPE
    )
    self.out = self.err = ""
    self.code = 0

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.process.kill()
    self.process.communicate()

  def address(self):
    """Waits until it serves."""
    killer = threading.Timer(100, self.process.kill)
    killer.start()
    assert self.process.stdout is not None
    self.out = self.process.stdout.readline()
    killer.cancel()
    found = re.search(r"is served at (http://127\.0\.0\.1:\d+)/v1\n", self.out)
    assert found, self.end()
    return found[1]

  def end(self, number=signal.SIGTERM):
    """Sends a signal; returns standard error after the end."""
    with contextlib.suppress(ProcessLookupError):
      self.process.send_signal(number)
    _, self.err = self.process.communicate(timeout=machine_speed.scaled(60))
    self.code = self.process.returncode
    return self.err


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
  """A tiny checkpoint with a tokenizer and a template that knows tools."""
  directory = tmp_path_factory.mktemp("models") / "tiny"
  config = model_config.tiny_moe(max_length=512, **SIZES)
  params = policy_lib.of(config).init(jax.random.key(0))
  export.export(directory, params, config, GOLDEN)
  return directory


@pytest.mark.slow
def test_a_run_is_served_and_its_sessions_are_recorded(finished, tmp_path):
  record = tmp_path / "sessions.jsonl"
  given = (f"--run={finished.path}", "--port=0", f"--record={record}")
  with Command(*given) as command:
    address = command.address()
    assert "run, version 4, is served" in command.out
    sampled = []
    for name, reward in (("won", 1.0), ("open", None)):
      url = f"{address}/sessions/{name}/v1"
      client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
      with client:
        reply: Any = client.chat.completions.create(
          model="any",
          messages=[{"role": "user", "content": "guess"}],
          max_tokens=4,
        )
        sampled.append(reply.choices[0].token_ids)
        assert reply.choices[0].versions == [4] * len(sampled[-1])
        if reward is not None:
          client.post("../finish", cast_to=object, body={"reward": reward})
    err = command.end()
  assert (command.code, "Traceback" in err) == (0, False), err
  assert "1 session was not finished" in err
  left = [
    trajectory.trajectory_from_json(json.loads(line))
    for line in record.read_text().splitlines()
  ]
  assert [(one.task_id, one.reward) for one in left] == [
    ("won", 1.0),
    ("open", None),
  ]
  assert [one.status.value for one in left] == ["completed", "truncated"]
  assert [one.turns[0].tokens.tolist() for one in left] == sampled


@pytest.mark.slow
def test_a_hugging_face_directory_is_served_with_its_tools(hugging_face):
  changes = ENGINE | {"chat.thinking": "false"}
  given = [f"--config.{key}={value}" for key, value in changes.items()]
  with Command(f"--model={hugging_face}", "--port=0", *given) as command:
    client = openai.OpenAI(
      base_url=f"{command.address()}/v1", api_key="none", max_retries=0
    )
    with client:
      assert client.models.list().data[0].id == "tiny"
      stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is 1 + 1?"}],
        tools=[{"type": "function", "function": {"name": "add"}}],
        max_tokens=8,
        stream=True,
      )
      chunks = list(stream)
      formed: Any = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Is it warm in Ulm?"}],
        response_format={
          "type": "json_schema",
          "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
        },
        max_tokens=100,
        n=6,
        seed=1,
      )
      # A stop lets answers under way come to their end.
      drained = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "On?"}],
        logit_bias=NEVER_ENDS,
        max_tokens=100,
        stream=True,
      )
      next(drained)
      ending = threading.Thread(target=command.end, args=(signal.SIGINT,))
      ending.start()
      end: Any = list(drained)[-1].choices[0]
      assert end.finish_reason == "length"
      assert len(end.token_ids) == 100
      ending.join()
    ended = [one for one in formed.choices if one.finish_reason == "stop"]
    # White space may take the room of some.
    assert len(ended) >= 2
    # The template is told not to think, and closes the thinking itself.
    chat = hf_chat.HfChat.load(GOLDEN)
    assert chat.decode(formed.prompt_token_ids).endswith("</think>\n\n")
    for one in ended:
      jsonschema.validate(json.loads(one.message.content or ""), WEATHER)
    last: Any = chunks[-1].choices[0]
    assert 1 <= len(last.token_ids) <= 8
    assert last.finish_reason in ("stop", "length")
  err = command.err
  assert (command.code, "Traceback" in err) == (0, False), err
  # 4 slots of 512 tokens, and a page.
  assert "KV cache, 2,064 tokens in 129 pages" in err


@pytest.mark.process
@pytest.mark.parametrize(
  ("read", "directory", "changes", "words"),
  [
    ("run", "nowhere", {}, "nowhere does not exist"),
    ("directory", "nowhere", {}, r"config\.json cannot be read"),
    ("run", "finished", {"engine.slotz": "4"}, r"engine\.slots"),
    ("directory", "hugging_face", {"engine.slotz": "4"}, r"engine\.slots"),
    (
      "run",
      "finished",
      {"engine.slots": "0"},
      r"engine\.slots=0 must be at least 1",
    ),
    (
      *("directory", "hugging_face"),
      *({"model.max_length": "9999"}, "use 512 or less"),
    ),
    (
      *("directory", "hugging_face"),
      *({"placement.decode.data": "64"}, "64"),
    ),
    (
      *("directory", "hugging_face"),
      # A slot takes 32 KiB and more: 512 tokens of two heads of 8 numbers.
      *({"engine.slots": str(2**28)}, "slots=268435456 for conversations of"),
    ),
  ],
)
def test_settings_that_cannot_work_are_refused_before_loading(
  request, read, directory, changes, words
):
  if directory != "nowhere":
    directory = request.getfixturevalue(directory)
    directory = getattr(directory, "path", directory)
  with pytest.raises(ValueError, match=words):
    getattr(served_model, f"read_{read}")(directory, changes)


def test_flags_that_cannot_work_are_said_at_once():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    cases = {
      ("--port=0",): "name one of --run=DIR and --model=DIR",
      ("--run=a", f"--port={port}"): "Address already in use",
      ("--port=0", "--record=no/such/file"): "cannot be written",
      ("--prot=0",): "Did you mean: port",
      ("--host=0.0.0.0", "--port=0"): "give --api_key_file=FILE, or use",
      ("--host=::", "--port=0"): "anyone there would be answered",
      ("--port=0", "--api_key_file=no/such/file"): "No such file",
      ("--port=0", "--tls_key=key.pem"): "give both",
    }
    for given, words in cases.items():
      result = commands.run("launch.serve", *given)
      assert result.returncode != 0
      assert words in result.stdout + result.stderr
