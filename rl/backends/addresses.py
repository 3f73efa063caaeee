"""Programs on hosts that are up, at addresses that are known."""

import contextlib
import dataclasses
import pathlib
import socket
import threading
import time
from collections.abc import Sequence

from rl.backends import contract, followed, host
from rl.settings import checks

_CONNECT_S = 5.0
_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownAddresses:
  """Starts programs on hosts that each run `python -m launch.host`.

  They may be pods of Kubernetes, machines of a cloud, or those of a lab. A
  program goes to the host that has the fewest of this run, those that failed or
  were lost there included; one that cannot be reached, or does not take it, is
  passed over.

  Attributes:
    at: the addresses of these hosts, as `10.0.0.2:7000`.
    token_file: has the token that they were started with.
    host: address of this host for them; None is the one that a connection to
      the first of them leaves from, of those that can be found.
    place_s: longest wait until one of them takes a program.
  """

  at: tuple[str, ...] = ()
  token_file: str = "token"
  host: str | None = None
  place_s: float = 60.0

  short_name = "addresses"
  shares_memory = False

  def validate(self) -> None:
    """Raises ValueError on what is not an address."""
    if not self.at:
      raise ValueError(
        "placement.backend.at names no host; start `python -m launch.host` on "
        "one, and name it, as in at=['10.0.0.2:7000']"
      )
    for address in self.at:
      host.address_of(address, "placement.backend.at")
    checks.finite_above(self, 0, "place_s", where="placement.backend")

  def validate_installed(self) -> None:
    """Raises nothing: it needs no package."""

  def open(self, folder: pathlib.Path) -> contract.Launcher:
    """Returns what asks them.

    Raises:
      ValueError: the token cannot be read, or no host can be found.
    """
    del folder
    token = host.read_token(pathlib.Path(self.token_file))
    where = [host.address_of(x, "placement.backend.at") for x in self.at]
    return _AddressesLauncher(
      where, token, self.host or _own_address(where), self.place_s
    )


def _own_address(others: Sequence[tuple[str, int]]) -> str:
  """Returns the address of this host for the first that is found.

  Sends nothing to them.

  Raises:
    ValueError: none is.
  """
  why = []
  for host_port in others:
    try:
      return _address_for(*host_port)
    except OSError as error:
      why.append(f"{host.joined(*host_port)}: {error.strerror}")
  raise ValueError(
    f"placement.backend.at names no host that can be found: {'; '.join(why)}; "
    "correct it, or name this host by placement.backend.host"
  )


def _address_for(name: str, port: int) -> str:
  family, *_, place = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(place)
    return str(probe.getsockname()[0])


class _AddressesLauncher(followed.FollowingLauncher):
  def __init__(
    self,
    where: Sequence[tuple[str, int]],
    token: str,
    own: str,
    place_s: float,
  ):
    super().__init__()
    self.host = own
    self._token = token
    self._place_s = place_s
    self._counts = dict.fromkeys(where, 0)
    self._lock = threading.Lock()

  def _make(self, program: contract.Program) -> followed.Followed:
    return _AddressedProcess(program, self, self._token, self._place_s)

  def by_load(self) -> list[tuple[str, int]]:
    """Returns the hosts, that with the fewest programs first."""
    with self._lock:
      return sorted(self._counts, key=lambda where: self._counts[where])

  @contextlib.contextmanager
  def counted(self, where: tuple[str, int]):
    """Counts a program of a host; a context."""
    self.add(where, 1)
    try:
      yield
    finally:
      self.add(where, -1)

  def add(self, where: tuple[str, int], count: int) -> None:
    """Adds to the programs of a host."""
    with self._lock:
      self._counts[where] += count


class _Refused(Exception):
  """The reason why a host will not take a program, now or later."""


class _Full(Exception):
  """The reason why a host will not take a program now."""


class _AddressedProcess(followed.Followed):
  def __init__(
    self,
    program: contract.Program,
    launcher: _AddressesLauncher,
    token: str,
    place_s: float,
  ):
    super().__init__(program)
    self._launcher = launcher
    self._token = token
    self._place_s = place_s

  def _follow(self) -> int:
    begin_s = time.monotonic()
    refused: dict[tuple[str, int], str] = {}
    while True:
      why = []
      for where in self._launcher.by_load():
        if where in refused:
          continue
        name = host.joined(*where)
        with self._launcher.counted(where):
          try:
            code = self._play(where)
          except _Refused as error:
            refused[where] = f"{name} refuses it: {error}"
          # Through a tunnel, a host that is gone takes a connection.
          except (_Full, OSError) as error:
            if self._begun.is_set():
              self._launcher.add(where, 1)
              raise followed.NotPlaced(f"{name} was lost: {error}") from error
            why.append(f"{name}: {error}")
          else:
            # The next one would come here first, and fail as well.
            self._launcher.add(where, int(code != 0))
            return code
      if len(refused) == len(self._launcher.by_load()):
        raise followed.NotPlaced("; ".join(refused.values()))
      if not self.has_time_left(begin_s, self._place_s):
        why += refused.values()
        raise followed.NotPlaced(
          f"no host has taken it in {self._place_s:g} s; {'; '.join(why)}"
        )

  def _play(self, where: tuple[str, int]) -> int:
    """Returns the code of the program, run by a host."""
    stream = socket.create_connection(where, _CONNECT_S)
    with contextlib.closing(host.JsonLines(stream)) as lines:
      lines.send(token=self._token, program=host.sent(self.program))
      while True:
        # Not before its number is known: then it has begun.
        for number in self._taken() if self._begun.is_set() else []:
          lines.send(signal=number)
        if self._killed.is_set() and not self._begun.is_set():
          raise followed.NotPlaced("it was ended before it had a place")
        for told in lines.take(_LOOK_S):
          if "pid" in told:
            self.place = host.joined(*where)
            self._begun.set()
          if "refused" in told:
            raise (_Full if told.get("full") else _Refused)(told["refused"])
          self._write(str(told.get("output", "")).encode())
          if "code" in told:
            self.reason = str(told.get("reason") or "")
            return int(told["code"])
