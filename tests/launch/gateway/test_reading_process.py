"""Long requests are read in a process of their own, with the same results."""

import dataclasses
import gc
import json
import os
import signal
import time

import numpy as np
import pytest

from envs import base
from launch.gateway import body_reader, reading_process
from launch.http import json_fields, limits
from models.chat import byte_chat
from tests.helpers import openai_server, process_chats, processes

pytestmark = pytest.mark.process

HF = openai_server.HF
READER = body_reader.BodyReader(
  chat=HF,
  bounds=limits.of_chat(HF, 1000),
  vocab_size=HF.vocab_size,
  max_length=1000,
)


@pytest.fixture(scope="module")
def process():
  return reading_process.ReadingProcess(READER)


def body(**fields):
  return json.dumps({"model": "any", **fields}).encode()


@pytest.mark.parametrize(
  ("name", "given"),
  [
    ("chat_query", body(messages=[{"role": "user", "content": "go é"}])),
    (
      "message_query",
      body(messages=[{"role": "user", "content": "go"}], max_tokens=4),
    ),
    ("text_query", body(prompt=[1, 2])),
    ("tokenized", body(prompt="go on")),
    ("detokenized", b'{"tokens": [70, 71]}'),
    ("ending", b'{"reward": 0.5}'),
    ("text_ids", "go on"),
  ],
)
def test_it_reads_as_is_done_here(process, name, given):
  there, here = process.call(name, given), getattr(READER, name)(given)
  assert np.array_equal(there, here)


def test_it_encodes_as_is_done_here(process):
  asked = ([base.Message("user", "go")], (), np.array([70, HF.stop_ids[0]]))
  there, here = process.call("encode", *asked), READER.encode(*asked)
  assert there.tolist() == here.tolist()
  assert there.dtype == np.int32


def test_a_refusal_arrives_whole(process):
  with pytest.raises(json_fields.BadRequest, match="shorten prompt") as error:
    process.call("text_query", body(prompt="a" * 100_000))
  assert error.value.code == "context_length_exceeded"
  with pytest.raises(ValueError, match="no encoding"):
    process.call("text_ids", "\ud800")


@pytest.mark.slow
def test_a_process_that_dies_costs_one_request(process):
  chat = dataclasses.replace(READER, chat=process_chats.ProcessChat())
  one = reading_process.ReadingProcess(chat)
  digits = one.call("encode", [], (), None)
  os.kill(int("".join(map(str, digits))), signal.SIGKILL)
  with pytest.raises(json_fields.BadRequest, match="send less") as error:
    one.call("text_ids", "go")
  assert error.value.status == 413
  assert one.call("text_ids", "go").tolist() == list(b"go")


@pytest.mark.slow
def test_a_process_that_hangs_is_late_and_gives_way_to_another():
  one = reading_process.ReadingProcess(
    dataclasses.replace(READER, chat=process_chats.ProcessChat())
  )
  digits = one.call("encode", [], (), None)
  pid = int("".join(map(str, digits)))
  os.kill(pid, signal.SIGSTOP)
  # More than the way holds, so that it is sending that is late.
  for text in ("go", "g" * (1 << 22)):
    with pytest.raises(TimeoutError, match=r"reading took over 0\.1 s"):
      one.call("text_ids", text, within_s=0.1)
    assert not processes.outliving([pid])
  assert one.call("text_ids", "go").tolist() == list(b"go")


def test_a_call_that_has_no_time_left_starts_no_process():
  one = reading_process.ReadingProcess(READER)
  with pytest.raises(TimeoutError, match="no time was left"):
    one.call("text_ids", "go", within_s=0.0)
  assert one._running is None


def test_it_ends_with_its_server():
  chat = dataclasses.replace(READER, chat=process_chats.ProcessChat())
  one = reading_process.ReadingProcess(chat)
  digits = one.call("encode", [], (), None)
  pid = int("".join(map(str, digits)))
  del one
  gc.collect()
  deadline = time.monotonic() + processes.DEADLINE_S
  while processes.runs(pid):
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_a_long_text_is_encoded_in_another_process():
  with openai_server.serve(
    process_chats.ProcessChat(), max_length=1 << 20
  ) as server:
    able = server.engine.capabilities
    server.engine.capabilities = dataclasses.replace(able, max_length=1 << 20)
    pids = []
    for text in ("go", "g" * (1 << 20)):
      server.text = [256]
      server.ask(text, max_tokens=4)
      digits = server.engine.requests[-1].tokens
      pids.append(int("".join(map(str, digits))))
  assert pids[0] == os.getpid()
  assert pids[1] != os.getpid()


def test_long_texts_whose_encoding_hangs_are_answered_in_time():
  chat = process_chats.HangingChat()
  with openai_server.serve(chat, answer_s=0.5, max_length=1 << 20) as server:
    said = {"role": "user", "content": "g" * (1 << 20)}
    for _ in range(2):
      status, told = server.send(
        *("POST", "/v1/chat/completions"), {"model": "m", "messages": [said]}
      )
      assert (status, told["error"]["code"]) == (504, "timeout")
      assert told["error"]["message"] == "the answer took over 0.5 s"


def test_a_chat_that_cannot_be_sent_stays_here():
  class LocalChat(byte_chat.ByteChat):
    pass

  reader = dataclasses.replace(READER, chat=LocalChat())
  assert not reading_process.ReadingProcess(reader).takes_chat()
