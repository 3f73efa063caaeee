"""A real server of a scripted engine on a loopback port, and its clients."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from typing import Any

import openai

from launch.gateway import app as openai_app
from launch.http import admission, http_server
from models.chat import hf_chat, word_chat
from rl.agents import sessions
from rl.testing import scripted_engine
from tests.helpers import machine_speed
from tests.helpers.chat_messages import GOLDEN

HF = hf_chat.HfChat.load(GOLDEN)
WORDS = word_chat.WordChat(("go", "on", "yes", "no"))
END, AGENT, GO, ON, YES, NO = range(1, 7)
ADD = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {}},
  },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Server:
  """A server on an event loop in a thread.

  `text` is the engine's next answer: text of the chat, or ids.
  """

  def __init__(self, chat, step_s=0.0, rules=None, admitted=None, **settings):
    self.chat = chat
    self.text: str | list[int] = "yes"
    self.kept = []
    self.engine = scripted_engine.ScriptedEngine(
      self._answer, lambda request, i: step_s
    )
    self.sessions = sessions.Sessions(
      chat, keep=self.kept.extend, max_sessions=64
    )
    serving = openai_app.Serving(**{"model": "tiny", **settings})
    self.admitted = admitted or admission.Admission()
    self.app = openai_app.app(
      self.engine, self.sessions, serving, rules, self.admitted
    )
    self.address = ""

  def _answer(self, request):
    if isinstance(self.text, str):
      return self.chat.encode_answer(self.text).tolist()
    return self.text

  def client(self, session="", kind: Any = openai.OpenAI, **settings) -> Any:
    path = f"/sessions/{session}/v1" if session else "/v1"
    return kind(
      base_url=self.address + path,
      **{"api_key": "none", "max_retries": 0, "timeout": 20.0, **settings},
    )

  def ask(self, *turns, client=None, **options) -> Any:
    """Returns the reply to turns of the user and the assistant."""
    roles = ("user", "assistant")
    conversation = [
      {"role": roles[i % 2], "content": text} if isinstance(text, str) else text
      for i, text in enumerate(turns)
    ]
    return (client or self.client()).chat.completions.create(
      model="any", messages=conversation, **options
    )

  def connect(self):
    """Returns a plain HTTP connection."""
    where = urllib.parse.urlsplit(self.address)
    assert where.hostname
    link = http.client.HTTPConnection(
      where.hostname, where.port, timeout=machine_speed.scaled(20)
    )
    return contextlib.closing(link)

  def send(self, method, path, body: Any = b"", **headers):
    """Sends a plain HTTP request; returns (status, JSON)."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    with self.connect() as link:
      sent = {"content-type": "application/json"}
      link.request(method, path, body, {**sent, **headers})
      reply = link.getresponse()
      return reply.status, json.loads(reply.read())

  def until(self, condition):
    """Waits until a condition holds, 10 s at most."""
    deadline = time.monotonic() + machine_speed.scaled(10)
    while not condition():
      assert time.monotonic() < deadline
      time.sleep(0.005)


@contextlib.contextmanager
def serve(chat, **settings):
  """Yields a `Server` that listens."""
  server = Server(chat, **settings)
  ready, stop = threading.Event(), asyncio.Event()
  loop = asyncio.new_event_loop()

  async def run():
    async with http_server.listening(
      server.app, http_server.bind(), grace_s=1
    ) as address:
      server.address = address
      ready.set()
      await stop.wait()

  thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
  thread.start()
  try:
    assert ready.wait(machine_speed.scaled(10))
    yield server
  finally:
    loop.call_soon_threadsafe(stop.set)
    thread.join(machine_speed.scaled(20))
    assert not thread.is_alive()
    loop.close()
