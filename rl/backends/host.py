"""A host that starts programs for whoever knows its token.

  addresses.KnownAddresses <== lines of JSON ==> Host, one connection a program

  there: {"token", "program"}, then {"signal": number}, and {} as a heartbeat
  back: {"pid"} or {"refused"}, then {"output": text}, {} and {"code", "reason"}

A connection that closes, or is silent, ends its program. Who knows the token
can run any code here: it is to be kept like a password, and the connection is
not encrypted, so it is for a private network, or for a tunnel of ssh.
"""

import contextlib
import dataclasses
import hmac
import json
import pathlib
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from rl.backends import contract, local

BEAT_S = 5.0
SILENCE_S = 30.0
_LOOK_S = 0.1
_END_S = 30.0
_MAX_LINE = 1 << 24
_MIN_TOKEN = 16
_CHUNK = 1 << 16


class JsonLines:
  """Lines of JSON on a socket, which it closes; one thread reads."""

  def __init__(self, stream: socket.socket):
    self._stream = stream
    self._rest = b""
    self._sent_s = self._heard_s = time.monotonic()

  def send(self, **data: Any) -> None:
    """Sends a line; raises OSError when the other side is gone."""
    self._stream.settimeout(SILENCE_S)
    self._stream.sendall(json.dumps(data).encode() + b"\n")
    self._sent_s = time.monotonic()

  def take(self, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yields the lines that have come, once one has or the time is over.

    It also sends heartbeats, so it is to be called often.

    Raises:
      OSError: the other side is gone, silent, or sends something else.
    """
    now = time.monotonic()
    if now > self._sent_s + BEAT_S:
      self.send()
    self._stream.settimeout(timeout_s)
    try:
      data = self._stream.recv(_CHUNK)
    except TimeoutError:
      if now > self._heard_s + SILENCE_S:
        raise OSError(f"it is silent for {SILENCE_S:g} s") from None
      return
    if not data:
      raise OSError("it has closed the connection")
    self._heard_s = now
    *lines, self._rest = (self._rest + data).split(b"\n")
    if len(self._rest) > _MAX_LINE:
      raise OSError("it sends no lines")
    for line in lines:
      try:
        told = json.loads(line)
      except ValueError as error:
        raise OSError(f"it sends no JSON: {error}") from error
      if not isinstance(told, dict):
        raise OSError("it sends no mappings")
      yield told

  def close(self) -> None:
    """Closes the socket."""
    self._stream.close()


def read_token(path: pathlib.Path) -> str:
  """Returns the token in a file.

  Raises:
    ValueError: it cannot be read, is short, or is there for others to read.
  """
  try:
    mode, token = path.stat().st_mode, path.read_text().strip()
  except OSError as error:
    raise ValueError(f"{path} cannot be read: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} cannot be read: it is no text") from error
  if mode & 0o077:
    raise ValueError(
      f"{path} can be read by others, and its token lets them run programs; "
      f"use chmod 600 {path}"
    )
  if len(token) < _MIN_TOKEN:
    raise ValueError(
      f"{path} has {len(token)} characters; use {_MIN_TOKEN} or more, such as "
      "those of: openssl rand -hex 32"
    )
  return token


def address_of(text: str, where: str) -> tuple[str, int]:
  """Returns host and port of an address HOST:PORT.

  Raises:
    ValueError: it has none; `where` names the setting.
  """
  host, _, port = text.rpartition(":")
  is_number = port.isascii() and port.isdecimal()
  # Parts of a name between dots are neither empty nor of over 63 letters.
  with contextlib.suppress(UnicodeError):
    if host.encode("idna") and is_number and int(port) < 1 << 16:
      return host.strip("[]"), int(port)
  raise ValueError(f"{where}={text} is no address; use HOST:PORT")


def joined(host: str, port: int) -> str:
  """Returns the address that `address_of` reads."""
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_address(host: str) -> str:
  """Returns an address of this host with a free port.

  Raises:
    OSError, UnicodeError: it is another one.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  with socket.socket(family) as free:
    free.bind((host, 0))
    return joined(host, free.getsockname()[1])


class Host(socketserver.ThreadingTCPServer):
  """Starts programs that others ask for; `serve_forever`, then `close`.

  Args:
    where: host and port at which it listens; port 0 takes a free one.
    slots: programs at once; whoever asks for more is refused.
    only: the name of the programs that it takes, or its first words; "" is all.
  """

  allow_reuse_address = True

  def __init__(
    self, where: tuple[str, int], token: str, slots: int, only: str = ""
  ):
    self._token = token
    self._only = only
    self._slots = threading.BoundedSemaphore(slots)
    self._num_slots = slots
    self._closing = threading.Event()
    found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    # IPv4, which is the lesser number, for a name that has both.
    self.address_family = min(family for family, *_ in found)
    super().__init__(where, socketserver.BaseRequestHandler)

  @property
  def address(self) -> str:
    """The address at which it listens, as HOST:PORT."""
    host, port = self.server_address[:2]
    return joined(str(host), port)

  def finish_request(self, request: Any, client_address: Any) -> None:
    """Serves one connection, in a thread of its own."""
    lines = JsonLines(request)
    # Who has asked is gone, and the program with it.
    with contextlib.suppress(OSError), contextlib.closing(lines):
      self._serve(lines)

  def _serve(self, lines: JsonLines) -> None:
    told = self._first(lines)
    given = str(told.get("token", "")).encode()
    if not hmac.compare_digest(given, self._token.encode()):
      lines.send(refused="unknown token; give it a copy of its token_file")
      return
    try:
      kept = tempfile.TemporaryDirectory()
    except OSError as error:
      lines.send(refused=f"it has no place for a log: {error}", full=True)
      return
    with kept as folder:
      log = pathlib.Path(folder) / "log"
      log.touch()
      try:
        program = read_program(told["program"], log)
        takes = f"{program.name} ".startswith(self._only and f"{self._only} ")
      except (AttributeError, KeyError, TypeError, ValueError) as error:
        lines.send(refused=f"this is no program: {error!r}")
        return
      if not takes:
        lines.send(refused=f"it takes {self._only!r} only", full=True)
      elif not self._slots.acquire(blocking=False):
        lines.send(refused=f"all {self._num_slots} places are taken", full=True)
      else:
        try:
          self._play(lines, local.LocalProcess(program), log)
        finally:
          self._slots.release()

  def _first(self, lines: JsonLines) -> dict[str, Any]:
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline and not self._closing.is_set():
      for told in lines.take(_LOOK_S):
        if told:
          return told
    raise OSError("it says nothing")

  def _play(
    self, lines: JsonLines, process: local.LocalProcess, log: pathlib.Path
  ) -> None:
    """Passes output and signals on until the program ends."""
    try:
      with log.open("rb") as output:
        lines.send(pid=process.pid)
        closing_s = time.monotonic()
        while True:
          # Its last words come before its code.
          code = process.code()
          while text := output.read(_CHUNK):
            lines.send(output=text.decode(errors="replace"))
          if code is not None:
            break
          for told in lines.take(_LOOK_S):
            if "signal" in told:
              process.signal(int(told["signal"]))
          if not self._closing.is_set():
            closing_s = time.monotonic()
          elif time.monotonic() < closing_s + _END_S:
            process.hang_up()  # A run saves.
          else:
            process.kill()
        lines.send(code=code, reason=process.reason)
    except OSError:
      process.hang_up()
      contract.wait(process, 0 if self._closing.is_set() else _END_S)
      raise
    finally:
      process.close()

  def close(self) -> None:
    """Ends all programs, which have a while to save, and waits for that."""
    self._closing.set()
    self.server_close()


def sent(program: contract.Program) -> dict[str, Any]:
  """Returns a program as JSON, but for its log, which stays here."""
  data = dataclasses.asdict(program)
  del data["log"]
  return data


def read_program(data: dict[str, Any], log: pathlib.Path) -> contract.Program:
  """Returns the program that another host asks for, with a log here.

  Raises:
    TypeError, ValueError: it is not a program, or not one of this project.
  """
  arguments, variables = data["arguments"], data["environment"]
  texts = [data["told"], *arguments, *variables, *variables.values()]
  if not all(isinstance(text, str) for text in texts):
    raise TypeError("it has other arguments than texts")
  if data["module"] not in contract.MODULES:
    raise ValueError(f"{data['module']} is none of {contract.MODULES}")
  return contract.Program(**{**data, "log": log, "arguments": tuple(arguments)})
