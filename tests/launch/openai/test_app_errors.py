"""Requests that the server refuses or aborts, and its error replies."""

import asyncio
import threading
from typing import Any

import openai
import pytest

from launch.openai import app as openai_app
from rl.agents import sessions
from rl.engine import contract
from rl.testing import scripted_engine
from tests.helpers import openai_server
from tests.helpers.openai_server import ADD, WORDS, YES


@pytest.fixture(scope="module")
def slow():
  """Takes five seconds per token, beyond its deadline for answers."""
  with openai_server.serve(WORDS, step_s=5.0, answer_s=0.3) as server:
    yield server


@pytest.mark.parametrize(
  ("options", "words_of_it", "param"),
  [
    ({"temperature": -1}, "temperature=-1.0 must be 0 or in", None),
    ({"top_p": 0}, "top_p=0.0 is not in", None),
    ({"max_tokens": 0}, "max_tokens=0 is below 1", None),
    ({"max_tokens": 1 << 16}, "leaves room for 65534", "messages"),
    ({"seed": 1 << 31}, "seed=2147483648 must be in [-2**31", "seed"),
    ({"logit_bias": {"262144": 1}}, "must be below 262144", "logit_bias"),
    ({"tools": [ADD]}, "has no tools", "messages"),
  ],
)
def test_what_the_engine_or_the_chat_cannot_do_is_a_bad_request(
  words, options, words_of_it, param
):
  with pytest.raises(openai.BadRequestError) as error:
    words.ask("go", **options)
  body: Any = error.value.body
  assert words_of_it in body["message"]
  assert body["type"] == "invalid_request_error"
  assert body["param"] == param
  with pytest.raises(openai.BadRequestError):
    words.ask("go", stream=True, **options)
  assert words.ask("go").choices


def test_words_without_an_id_are_a_bad_request(words):
  with pytest.raises(openai.BadRequestError, match="nearest is 'yes'"):
    words.ask("yess")


@pytest.mark.parametrize(
  ("method", "path", "body", "status", "text"),
  [
    ("POST", "/v1/chat/completions", b"{", 400, "not JSON"),
    ("POST", "/v1/chat/completions", b"[]", 400, "JSON array"),
    ("POST", "/v1/chat/completions", b"\xff", 400, "not JSON"),
    ("POST", "/v1/chat/completions", b"[" * 99_999, 400, "not JSON"),
    ("POST", "/v1/chat/completions", b'{"n": NaN}', 400, "NaN"),
    ("POST", "/v1/chat/completions", b'{"model":"\\ud800"}', 400, "not JSON"),
    ("POST", "/v1/embeddings", b"{}", 404, "Not Found"),
    ("GET", "/v1/completions", b"", 405, "Not Allowed"),
    ("GET", "/sessions/none", b"", 404, "no session none"),
    ("POST", "/sessions/none/finish", b"{}", 404, "no session none"),
    ("POST", "/sessions/x/finish", {"reward": "1"}, 400, "of type number"),
    ("POST", "/sessions/x/finish", {"status": "won"}, 400, "use completed"),
    ("POST", "/sessions/x/finish", {"rewrd": 1}, 400, "did you mean reward"),
    (
      *("POST", "/sessions/x/finish"),
      *({"reward": 1, "status": "env_fault"}, 400, "no reward"),
    ),
  ],
)
def test_errors_have_the_form_of_openai(
  words, method, path, body, status, text
):
  got, reply = words.send(method, path, body)
  assert got == status
  assert text in reply["error"]["message"]
  assert set(reply["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_long_is_refused():
  with (
    openai_server.serve(WORDS, max_body=100) as server,
    pytest.raises(openai.BadRequestError, match="over 100 bytes"),
  ):
    server.ask("go " * 100)


def test_a_body_that_never_comes_is_refused_in_time():
  with (
    openai_server.serve(WORDS, body_s=0.05) as server,
    server.connect() as link,
  ):
    link.putrequest("POST", "/v1/completions")
    link.putheader("content-length", "10")
    link.endheaders(b"{")
    reply = link.getresponse()
    assert reply.status == 408
    assert b"took over 0.05 s" in reply.read()


def test_answers_have_a_deadline(slow):
  for stream in (False, True):
    with pytest.raises(openai.InternalServerError, match=r"over 0\.3 s"):
      slow.ask("go", stream=stream)
    slow.until(lambda: slow.engine.stats().running == 0)
  assert not slow.kept


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(stream):
  with openai_server.serve(WORDS, step_s=30.0) as server:
    client = server.client("gone", timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
      server.ask("go", client=client, n=2, stream=stream)
    server.until(lambda: server.engine.stats().running == 0)
    assert len(server.engine.requests) == 2
    _, told = server.send("GET", "/sessions/gone")
    assert (told["running"], told["trajectories"]) == (0, [])


def test_a_client_that_leaves_a_stream_aborts_it_too():
  with openai_server.serve(WORDS, step_s=0.05) as server:
    server.text = [YES] * 10_000
    with server.ask("go", client=server.client("left"), stream=True) as stream:
      for chunk in stream:
        if chunk.choices[0].delta.content:
          break
      assert server.engine.stats().running == 1
    server.until(lambda: server.engine.stats().running == 0)


def test_an_answer_that_the_engine_gives_up_is_a_fault_of_the_trajectory():
  with openai_server.serve(WORDS, step_s=30.0) as server:
    client, replies = server.client("ended"), []
    asking = threading.Thread(
      target=lambda: replies.append(server.ask("go", client=client))
    )
    asking.start()
    server.until(lambda: server.engine.stats().running)
    server.engine.abort(None)
    asking.join(10)
    assert replies[0].choices[0].finish_reason == "abort"
    _, left = server.send("POST", "/sessions/ended/finish", {"reward": 1.0})
    (told,) = left["trajectories"]
    assert (told["status"], told["reward"]) == ("engine_fault", None)


def test_a_session_that_is_finished_meanwhile_takes_no_answer():
  with openai_server.serve(WORDS, step_s=0.3) as server:
    for name, stream in (("over.1", False), ("over.2", True)):
      errors = []

      def ask(name=name, stream=stream, errors=errors):
        try:
          reply = server.ask("go", client=server.client(name), stream=stream)
          list(reply)
        except openai.APIError as error:
          errors.append(error)

      asking = threading.Thread(target=ask)
      asking.start()
      server.until(lambda: server.engine.stats().running)
      status, _ = server.send("POST", f"/sessions/{name}/finish", {})
      assert status == 200
      asking.join(10)
      assert "finished before its answer" in errors[0].message


def test_a_closed_engine_is_unavailable_and_not_asked_again():
  with openai_server.serve(WORDS) as server:
    asyncio.run(server.engine.close())
    with pytest.raises(openai.InternalServerError) as error:
      server.ask("go", client=server.client(max_retries=5))
    assert error.value.status_code == 503
    body: Any = error.value.body
    assert body["code"] == "engine_closed"


def test_one_temperature_may_be_that_of_all():
  with openai_server.serve(
    WORDS, temperature=0.5, one_temperature=True
  ) as server:
    for options in ({}, {"temperature": 0.9}):
      assert server.ask("go", **options).temperature == 0.5
      assert server.engine.requests[-1].temperature == 0.5


def test_an_engine_that_cannot_stop_where_answers_end_is_refused():
  able = scripted_engine.ScriptedEngine(lambda request: []).capabilities
  few = {name: getattr(able, name) for name in able.__slots__}
  unable = contract.Capabilities(**{**few, "max_stop_ids": 0})
  one = scripted_engine.ScriptedEngine(lambda request: [], capabilities=unable)
  with pytest.raises(ValueError, match="end with 1 ids; the engine takes 0"):
    openai_app.app(one, sessions.Sessions(WORDS))


@pytest.mark.parametrize(
  "how", [{"temperature": float("nan")}, {"answer_s": 0.0}, {"max_body": 0}]
)
def test_settings_that_cannot_work_are_refused(how):
  with pytest.raises(ValueError, match=next(iter(how))):
    openai_app.Serving(**how)
