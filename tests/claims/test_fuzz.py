"""Files, settings, frames and requests of others, searched for a crash.

Whatever is read is taken or refused with the error that its reader promises.
"""

import contextlib
import json

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from configs import guess_number_moe
from launch.report import log_check
from rl.audit import event_log
from rl.remote import wire
from rl.schedule import overlap
from rl.settings import overrides
from tests.helpers import event_logs, openai_server, searches

SCHEDULE = overlap.in_flight(4, 1, 1)
LOG = event_logs.run(SCHEDULE, 3)
NUMBERS = (
  st.integers(-3, 40)
  | st.sampled_from([2**31, 2**63, -(2**64), 10**30])
  | st.floats()
)
VALUES = st.recursive(
  st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=6,
)


def _changed(data, event):
  """Returns an event with a field that is gone, or has another value."""
  fields = sorted(event)
  field = data.draw(st.sampled_from(fields), label="field")
  if data.draw(st.booleans(), label="leave out"):
    return {name: event[name] for name in fields if name != field}
  return event | {field: data.draw(VALUES, label="value")}


@searches.examples(100)
@hypothesis.given(data=st.data())
def test_a_log_of_others_is_checked_or_refused(data, tmp_path_factory):
  log = list(LOG)
  for _ in range(data.draw(st.integers(1, 3), label="changes")):
    at = data.draw(st.integers(0, len(log) - 1), label="at")
    match data.draw(st.sampled_from(["change", "lose", "repeat", "resume"])):
      case "change":
        log[at] = _changed(data, log[at])
      case "lose":
        del log[at]
      case "repeat":
        log.insert(data.draw(st.integers(0, len(log))), log[at])
      case "resume":
        trained = data.draw(st.integers(0, 3), label="trained")
        resumed = {"t": 1.0, "kind": "resumed", "trained": trained}
        log.insert(at, resumed | {"next_group": 4 * trained})
  path = tmp_path_factory.mktemp("run") / "events.jsonl"
  path.write_text("".join(json.dumps(event) + "\n" for event in log))
  with contextlib.suppress(log_check.UnreadableLog):
    log_check.read(path, SCHEDULE, event_logs.GROUP_SIZE)


@searches.examples(200)
@hypothesis.given(lines=st.lists(st.binary(max_size=60) | st.text().map(
  lambda text: text.encode("utf-8", "replace")), max_size=5))  # fmt: skip
def test_lines_of_any_bytes_are_events_or_left_out(lines, tmp_path_factory):
  path = tmp_path_factory.mktemp("run") / "events.jsonl"
  path.write_bytes(b"\n".join(lines))
  assert all(event["t"] >= 0 for event in event_log.LogFile(path))


def _paths(tree, path=()):
  """Yields the path of every value below a JSON value."""
  yield path
  items = tree.items() if isinstance(tree, dict) else ()
  items = enumerate(tree) if isinstance(tree, list) else items
  for name, value in items:
    yield from _paths(value, (*path, name))


@pytest.fixture(scope="module")
def settings():
  return guess_number_moe.get_config()


@searches.examples(80)
@hypothesis.given(data=st.data())
def test_settings_in_json_are_read_or_refused(data, settings):
  config = json.loads(json.dumps(overrides.to_json(settings)))
  paths = [path for path in _paths(config) if path]
  *way, last = data.draw(st.sampled_from(paths), label="path")
  part = config
  for name in way:
    part = part[name]
  if data.draw(st.booleans(), label="another field"):
    last = data.draw(st.text(max_size=5)) if isinstance(part, dict) else last
  part[last] = data.draw(VALUES, label="value")
  with contextlib.suppress(ValueError):
    overrides.from_json(config).validate()


@pytest.mark.slow
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30])
def test_each_number_may_be_too_large(settings, value):
  config = json.loads(json.dumps(overrides.to_json(settings)))
  for *way, last in [path for path in _paths(config) if path]:
    part = config
    for name in way:
      part = part[name]
    known = part[last]
    if isinstance(known, int | float) and not isinstance(known, bool):
      part[last] = value
      with contextlib.suppress(ValueError):
        overrides.from_json(config).validate()
      part[last] = known


@searches.examples(80)
@hypothesis.given(data=st.data())
def test_settings_of_the_command_line_are_read_or_refused(data, settings):
  config = overrides.to_json(settings)
  known = [".".join(map(str, path)) for path in _paths(config) if path]
  path = data.draw(st.sampled_from(known) | st.text("ab.0_", max_size=6))
  words = ["none", "inf", "-1", "1e400", "2,4", "gspo(clip_low=2)", "{", "[1]"]
  text = data.draw(st.none() | st.sampled_from(words) | st.text(max_size=9))
  with contextlib.suppress(ValueError):
    overrides.override(settings, path, text).validate()


SENT = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**63), 2**64 - 1)
  | st.floats(allow_nan=False)
  | st.text(max_size=9)
  | st.binary(max_size=9),
  lambda inner: (
    st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text(max_size=4), inner, max_size=4)
  ),
)


@searches.examples(80)
@hypothesis.given(value=SENT)
def test_what_is_sent_comes_back(value):
  assert wire.unpack(wire.pack(value)) == value


@searches.examples(300)
@hypothesis.given(
  frame=st.binary(max_size=60)
  | st.tuples(
    st.sampled_from([1, 2, 3]),
    st.tuples(
      st.sampled_from(["int32", "Delta", "DecodeRequest", "object", ""]),
      st.lists(st.integers(-2, 5), max_size=3) | VALUES,
      st.binary(max_size=16),
    ).map(lambda parts: msgpack.packb(parts, default=str)),
  ).map(lambda parts: msgpack.packb(msgpack.ExtType(*parts)))
  | st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=4
  ).map(lambda changes: _spoilt(changes)),
)
def test_frames_of_any_bytes_are_values_or_refused(frame):
  with contextlib.suppress(wire.Malformed):
    wire.unpack(frame)


def _spoilt(changes):
  whole = {"x": np.arange(9, dtype=np.int32), "y": ("text", 3)}
  frame = bytearray(wire.pack(whole))
  for at, byte in changes:
    frame[at % len(frame)] = byte
  return bytes(frame)


@pytest.fixture(scope="module")
def words():
  with openai_server.serve(openai_server.WORDS) as server:
    yield server


MESSAGE = st.fixed_dictionaries(
  {},
  optional={
    "role": st.sampled_from(["user", "assistant", "system", "tool"]) | VALUES,
    "content": st.sampled_from(["go", "yes", "nothing known"]) | VALUES,
    "tool_calls": VALUES,
    "name": VALUES,
  },
)
BODY = st.fixed_dictionaries(
  {"model": st.just("tiny") | VALUES},
  optional={
    "messages": st.lists(MESSAGE, max_size=3) | VALUES,
    "max_tokens": NUMBERS | VALUES,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "logprobs": VALUES,
    "stop": VALUES,
    "n": NUMBERS,
    "tools": VALUES,
    "response_format": VALUES,
    "logit_bias": VALUES,
    "system": VALUES,
    "prompt": VALUES,
  },
)
PATHS = st.sampled_from(
  [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/sessions/one/v1/chat/completions",
    "/sessions/one/finish",
  ]
)


@searches.examples(120)
@hypothesis.given(path=PATHS, body=BODY | VALUES)
def test_a_request_of_any_json_is_answered_or_refused(words, path, body):
  status, _ = words.send("POST", path, body)
  assert status < 500, (status, path, body)


@searches.examples(60)
@hypothesis.given(path=PATHS, body=st.binary(max_size=40))
def test_a_request_of_any_bytes_is_refused(words, path, body):
  status, told = words.send("POST", path, body)
  assert 400 <= status < 500, (status, told)
