"""Sockets, certificates and connections of a server."""

import asyncio
import ssl
import subprocess
import urllib.request

import pytest
from starlette import responses

from launch.gateway import http_server
from rl.settings import annotations


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


@pytest.mark.process
def test_a_certificate_serves_https(certified):
  def ask(address):
    assert address.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=certified[0])
    with urllib.request.urlopen(address, context=trusting, timeout=20) as got:
      return got.read()

  tls = http_server.read_tls(*certified)
  assert serving(ask, tls=tls) == b"here"


@pytest.mark.process
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
