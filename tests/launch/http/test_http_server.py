"""Sockets, certificates and connections of a server."""

import asyncio
import contextlib
import logging
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest
from starlette import responses

from launch.http import connections, http_server
from rl.settings import annotations
from tests.helpers import machine_speed

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
  """Files of a certificate of 127.0.0.1 that has signed itself, and its key."""
  root = tmp_path_factory.mktemp("tls")
  files = [str(root / name) for name in ("certificate.pem", "key.pem")]
  subprocess.run(
    [
      *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
      *("-days", "2", "-subj", "/CN=127.0.0.1"),
      *("-addext", "subjectAltName=IP:127.0.0.1"),
      *("-out", files[0], "-keyout", files[1]),
    ],
    check=True,
    capture_output=True,
  )
  return files


def serving(ask, app=None, **settings):
  """Returns what `ask` returns, in a thread, for the address of a server."""
  app = app or responses.PlainTextResponse("here")

  async def run():
    async with http_server.listening(
      app, http_server.bind(), grace_s=1, **settings
    ) as address:
      return await asyncio.to_thread(ask, address)

  return asyncio.run(run())


def test_a_certificate_serves_https(certified):
  def ask(address):
    assert address.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=certified[0])
    with urllib.request.urlopen(
      address, context=trusting, timeout=machine_speed.scaled(20)
    ) as got:
      return got.read()

  tls = http_server.read_tls(*certified)
  assert serving(ask, tls=tls) == b"here"


def test_files_of_tls_that_cannot_be_used_are_refused(certified, tmp_path):
  certificate, key = certified
  (tmp_path / "junk").write_text("junk")
  junk, none = str(tmp_path / "junk"), str(tmp_path / "none")
  assert http_server.read_tls(None, None) is None
  for given, words in {
    (certificate, None): "give both",
    (None, key): "give both",
    (none, key): "No such file",
    (certificate, certificate): "cannot be used",
    (certificate, junk): "cannot be used",
    (key, certificate): "cannot be used",
  }.items():
    with pytest.raises(annotations.SettingError, match=words):
      http_server.read_tls(*given)


def link(address, size=None):
  """Returns an open connection; `size` bytes wait for it at most."""
  where = urllib.parse.urlsplit(address)
  sock = socket.socket()
  if size is not None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
  sock.settimeout(machine_speed.scaled(20))
  sock.connect((where.hostname, where.port))
  return contextlib.closing(sock)


def rest(sock):
  """Returns all that comes until the end of a connection."""
  pieces = []
  with contextlib.suppress(ConnectionError):
    while piece := sock.recv(1 << 16):
      pieces.append(piece)
  return b"".join(pieces)


GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HASTY = connections.Patience(head_s=0.05, unread_s=0.05, chunks=False)


@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2], GET + GET[:-2]])
def test_half_a_head_ends_the_connection(sent):
  def ask(address):
    with link(address) as sock:
      sock.sendall(sent)
      return rest(sock)

  assert serving(ask, patience=HASTY).count(b"here") == sent.count(GET)


def test_a_request_may_take_longer_than_its_head():
  async def slow(scope, receive, send):
    await asyncio.sleep(0.2)
    await responses.PlainTextResponse("here")(scope, receive, send)

  def ask(address):
    with link(address) as sock:
      sock.sendall(GET)
      return rest(sock)

  assert b"here" in serving(ask, slow, patience=HASTY)


@pytest.mark.parametrize(
  ("body", "last"),
  [(b"0123", "http.disconnect"), (b"0123456789", "http.request")],
)
def test_half_a_body_does_not_hold_up_the_end(body, last):
  begun, received = threading.Event(), []

  async def read(scope, receive, send):
    begun.set()
    while (message := await receive()).get("more_body"):
      pass
    received.append(message["type"])
    if message["type"] == "http.request":  # It is here as a whole.
      await asyncio.sleep(0.05)
      await responses.PlainTextResponse("here")(scope, receive, send)

  head = GET[:-2].replace(b"GET", b"POST") + b"content-length: 10\r\n\r\n"
  with contextlib.ExitStack() as stack:

    def ask(address):
      sock = stack.enter_context(link(address))
      sock.sendall(head + body)
      assert begun.wait(machine_speed.scaled(20))
      return sock

    sock = serving(ask, read)
    # At the end of its time a request that is waited for would be cancelled.
    assert received == [last]
    assert (b"here" in rest(sock)) == (len(body) == 10)


def test_a_client_that_does_not_read_is_cut_off():
  ended = []

  async def endless(scope, receive, send):
    await receive()
    gone = asyncio.ensure_future(receive())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    piece = {"type": "http.response.body", "body": b"x" * 4096}
    while not gone.done():
      await send({**piece, "more_body": True})
    ended.append((await gone)["type"])

  def ask(address):
    with link(address, 4096) as sock:
      sock.sendall(GET)
      deadline = time.monotonic() + machine_speed.scaled(20)
      while not ended and time.monotonic() < deadline:
        time.sleep(0.005)

  serving(ask, endless, patience=HASTY)
  assert ended == ["http.disconnect"]


def test_one_connection_too_many_is_ended():
  def ask(address):
    with link(address) as one, link(address) as two, link(address) as three:
      assert rest(three) == b""
      for sock in (one, two):
        sock.sendall(GET)
        assert b"200 OK" in sock.recv(1000)

  serving(ask, patience=connections.Patience(max_connections=2))


@pytest.mark.parametrize("taken", [True, False])
def test_bodies_in_chunks_are_refused_where_clients_are_strangers(taken):
  head = GET[:-2].replace(b"GET", b"POST")
  sent = head + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"

  def ask(address):
    with link(address) as sock:
      sock.sendall(sent)
      return sock.recv(1000)

  status = b"200 OK" if taken else b"400"
  patience = connections.Patience(chunks=taken)
  assert status in serving(ask, patience=patience)


def test_bad_requests_do_not_fill_the_log(caplog):
  def ask(address):
    for _ in range(20):
      with link(address) as sock:
        sock.sendall(b"\0\r\n\r\n")
        assert b"400" in rest(sock)

  with caplog.at_level(logging.WARNING):
    serving(ask)
  said = [one for one in caplog.messages if "Invalid HTTP" in one]
  assert len(said) == 5
