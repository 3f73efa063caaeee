"""Tools of MCP servers: real ones, and some that are not as they should be."""

import asyncio
import contextlib
import dataclasses
import gzip
import json
import pickle
import socket
import sys
import threading

import pytest
import uvicorn

from envs import base
from envs.tools import mcp
from rl.data import trajectory
from tests.envs.examples import shop
from tests.helpers import scripted_chats

pytestmark = pytest.mark.process

MIB = b"x" * (1 << 20)

# Answers what the client needs to know before its first call.
POOR = """
import json, os, sys, time
def say(id, result):
  print(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}), flush=True)
for line in sys.stdin:
  asked = json.loads(line)
  match asked["method"]:
    case "initialize":
      version = asked["params"]["protocolVersion"]
      say(asked["id"], {"protocolVersion": version,
          "capabilities": {"tools": {}},
          "serverInfo": {"name": "poor", "version": "1"}})
    case "tools/list":
      say(asked["id"], {"tools": [
          {"name": "go", "inputSchema": {"type": "object"}}]})
    case "tools/call":
      %s
    case "server/discover":
      print(json.dumps({"jsonrpc": "2.0", "id": asked["id"],
          "error": {"code": -32601, "message": "no"}}), flush=True)
"""


def poor(reaction, **settings):
  """Returns a server that reacts to calls as told."""
  command = (sys.executable, "-S", "-c", POOR % reaction)
  return mcp.McpServer(command=command, **settings)


def call(server, name="go", **arguments):
  """Returns the result of one call of a server."""

  async def run():
    opened = await server.open()
    try:
      return await opened.call(base.ToolCall(name, json.dumps(arguments)))
    finally:
      await opened.close()

  return asyncio.run(run())


def test_an_episode_of_the_guide_is_played_with_a_basket_of_its_own():
  bought = base.calling("buy", item="apple"), base.calling("buy", item="bread")
  said = (*bought, base.calling("total"), scripted_chats.say("8"))
  for played, text, shown in [
    scripted_chats.play(shop.SHOP, *said) for _ in range(2)
  ]:
    assert played.status is trajectory.Status.COMPLETED, played.fault
    results = [m.content for m in text.messages if m.role == "tool"]
    # 3 + 5: the second episode finds no basket of the first.
    assert results == ["1 in the basket", "2 in the basket", "8"]
    assert played.metrics == {"tool_calls": 3, "tool_errors": 0}
    assert "Puts an item into the basket." in shown
    assert '"item": {"title": "Item", "type": "string"}' in shown


@contextlib.contextmanager
def _served():
  """Serves the shop over HTTP; yields its URL."""
  from tests.envs.examples import shop_server  # Takes long to import.

  app = shop_server.server.streamable_http_app()
  with socket.create_server(("127.0.0.1", 0)) as listener:
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
      yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
      server.should_exit = True
      thread.join()


def test_episodes_over_http_can_share_a_connection():
  async def run(url):
    server = mcp.McpServer(url=url, shared=True, only=("buy", "total"))
    opened = await asyncio.gather(*(server.open() for _ in range(2)))
    asked = base.ToolCall("buy", '{"item": "bread"}')
    first = await opened[0].call(asked)
    await opened[0].close()
    return first, await opened[1].call(base.ToolCall("total", "{}"))

  with _served() as url:
    first, second = asyncio.run(run(url))
  assert first == ("1 in the basket", False)
  assert second == ("5", False)


@pytest.mark.parametrize(
  ("reaction", "words"),
  [
    (
      "print('last words', file=sys.stderr); os._exit(3)",
      r"tool go: it ended with exit code 3: last words",
    ),
    ("os.kill(os.getpid(), 11)", r"tool go: it was ended by SIGSEGV"),
    ("time.sleep(60)", r"tool go took over 1 s"),
    (
      "print('not a message', flush=True); os._exit(0)",
      r"exit code 0; it wrote what is no message: b'not a message",
    ),
    ("say(asked['id'], {'content': 5})", r"tool go: ValidationError"),
    (
      "print('x' * (17 << 20))",
      r"tool go: it wrote a line above 16777216 bytes",
    ),
    (
      "kept = [bytes([1]) * (300 << 20)]; time.sleep(60)",
      r"resident memory of \d+ MiB is above 200 MiB",
    ),
  ],
  ids=["exit", "signal", "hang", "junk", "nonsense", "huge", "leak"],
)
def test_a_server_at_fault_is_named(reaction, words):
  call_s = 1.0 if reaction == "time.sleep(60)" else 30.0
  server = poor(reaction, call_s=call_s, max_rss_mib=200)
  with pytest.raises(mcp.McpServerError, match=rf"MCP server (.|\n)*{words}"):
    call(server)


def test_a_fault_of_a_server_is_that_of_its_episode():
  source = dataclasses.replace(shop.SHOP, toolboxes=(poor("os._exit(4)"),))
  played, _, _ = scripted_chats.play(source, base.calling("go"))
  assert played.status is trajectory.Status.ENV_FAULT
  assert "it ended with exit code 4" in played.fault
  assert len(played.turns) == 1


@pytest.mark.parametrize(
  ("command", "words"),
  [
    (("no-such-command",), "exit code 127: no-such-command: No such file"),
    (("sleep", "60"), "its start took over 1 s"),
    (("cat",), "its start: MCPError: Method not found"),
  ],
)
def test_a_command_that_is_no_server_is_named(command, words):
  start_s = 1.0 if command[0] == "sleep" else 30.0
  with pytest.raises(mcp.McpServerError, match=words):
    call(mcp.McpServer(command=command, start_s=start_s))


@pytest.mark.parametrize(
  ("reply", "words"),
  [
    (b"500 No\r\ncontent-length: 0\r\n\r\n", "returned an error response"),
    (
      b"200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\n"
      b"junk",
      "Failed to parse JSON",
    ),
    (
      b"200 OK\r\ncontent-type: application/json\r\n"
      b"content-length: 99\r\n\r\n{",
      "peer closed connection",
    ),
    (
      b"200 OK\r\ncontent-type: application/json\r\n"
      b"transfer-encoding: chunked\r\n\r\n" + 17 * (b"100000\r\n%s\r\n" % MIB),
      "an answer is above 16777216 bytes",
    ),
    (
      b"200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: " + 17 * MIB,
      "event exceeded the 16777216 byte limit",
    ),
    (
      b"200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
      b"content-length: 20\r\n\r\n" + gzip.compress(b""),
      "it encoded an answer as gzip, unasked",
    ),
    (b"", "its start"),
  ],
  ids=["500", "junk", "half", "huge", "huge event", "encoded", "closed"],
)
async def test_a_url_that_is_no_server_is_named(reply, words):
  async def answer(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 " + reply if reply else b"")
    with contextlib.suppress(ConnectionError):  # It reads no more than 16 MiB.
      await writer.drain()
    writer.close()

  async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
    port = listener.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(mcp.McpServerError, match=rf"{url}: .*{words}"):
      await mcp.McpServer(url=url).open()


async def test_a_shared_server_that_died_is_started_again():
  server = poor("os._exit(5)", shared=True)
  for _ in range(2):
    opened = await server.open()
    with pytest.raises(mcp.McpServerError, match="exit code 5"):
      await opened.call(base.ToolCall("go", "{}"))
    await opened.close()


async def test_a_token_is_sent_to_its_url(monkeypatch):
  monkeypatch.setenv("SHOP_TOKEN", "open sesame")
  seen = []

  async def answer(reader, writer):
    seen.append(await reader.readuntil(b"\r\n\r\n"))
    writer.close()

  async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
    port = listener.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(mcp.McpServerError):
      await mcp.McpServer(url=url, token="SHOP_TOKEN").open()
  assert b"authorization: bearer open sesame\r\n" in seen[0].lower()


async def test_a_wrong_call_is_told_and_ends_no_shared_server():
  refusal = """
      wrong = {"code": -32602, "message": f"go where, {os.getpid()}?"}
      print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": wrong}),
            flush=True)"""
  server = poor(refusal, shared=True)

  told = []
  for _ in range(2):
    opened = await server.open()
    told.append(await opened.call(base.ToolCall("go", "{}")))
    await opened.close()
  first, second = told
  assert first == second
  assert first[1]
  assert first[0].startswith("error: go: go where, ")


def test_a_long_result_is_cut_and_says_so():
  long = "say(asked['id'], {'content': [{'type': 'text', 'text': 'x' * 30}]})"
  text, is_error = call(poor(long, max_chars=10))
  assert (text, is_error) == ("x" * 10 + "\n[20 characters more]", False)


def test_a_tool_that_a_server_lacks_is_named_with_those_that_it_has():
  with pytest.raises(mcp.McpServerError, match=r"no tools \['stop'\], but go"):
    call(poor("pass", only=("stop",)))


def test_a_command_gets_no_secrets_of_the_run(monkeypatch):
  monkeypatch.setenv("SECRET", "1")
  monkeypatch.setenv("KEY", "2")
  tell = (
    "say(asked['id'], {'content': [{'type': 'text', 'text': "
    "repr([os.environ.get(n) for n in ('SECRET', 'KEY')])}]})"
  )
  assert call(poor(tell, variables=("KEY",)))[0] == "[None, '2']"


def test_it_is_a_setting():
  assert pickle.loads(pickle.dumps(shop.SHOP)) == shop.SHOP
  shop.SHOP.validate()


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({}, "give one of the two"),
    ({"command": ("x",), "url": "http://x"}, "give one of the two"),
    ({"url": "localhost:80"}, "must begin with http"),
    ({"command": ("x",), "call_s": 0.0}, "MCP server x: call_s=0.0"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    mcp.McpServer(**fields)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
  monkeypatch.delenv("SHOP_TOKEN", raising=False)
  server = mcp.McpServer(url="http://shop", token="SHOP_TOKEN")
  with pytest.raises(ValueError, match="SHOP_TOKEN is not set"):
    server.validate()
