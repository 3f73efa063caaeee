"""The protocol of a backend: it starts programs, here or on other hosts.

  Backend.open --> Launcher.start(Program) --> Started: code, signal, kill
                   Launcher.close ends all that are left

A backend places and starts processes, and nothing else: tokens and weights go
over connections that these open themselves. Every backend is held to what is
said here by `tests/rl/backends/test_contract.py`.
"""

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

MODULES = ("launch.worker", "launch.train")
"""Programs that a host may be asked to run."""
NEVER_RAN = 1
"""Code of a program that could not be started."""
_LOOK_S = 0.02


class Unreachable(ValueError):
  """A backend that a run cannot use from here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A command of this project, to be run by the Python of its host.

  Its standard input stays open until the program is to end, and closes at the
  latest when whoever has started it is gone. So nothing is left of a run.

  Attributes:
    name: in errors.
    module: of `MODULES`.
    log: file of this host that its output is appended to.
    told: first line of its standard input: may be secret.
    environment: variables that are different there.
    python: the program that runs it; None is that of the host.
    directory: that it runs in; None is that of whoever starts it there.
  """

  name: str
  module: str
  log: pathlib.Path
  arguments: tuple[str, ...] = ()
  told: str = ""
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  python: str | None = None
  directory: str | None = None


class Started(Protocol):
  """A program that was started, or waits for its place."""

  @property
  def reason(self) -> str:
    """The cause, if a backend could not start it or has lost it, or ""."""
    ...

  @property
  def place(self) -> str:
    """The host that runs it, once one does; "" for this one."""
    ...

  def code(self) -> int | None:
    """Returns its exit code, minus the number of a signal; None while it runs.

    It is `NEVER_RAN`, or higher, if the backend has lost it.
    """
    ...

  def signal(self, number: int) -> None:
    """Sends a signal, unless it has ended; does not wait.

    SIGINT and SIGTERM end a program that waits for its place.
    """
    ...

  def kill(self) -> None:
    """Ends it at once, or before it starts; does not wait for the end."""
    ...


class Launcher(Protocol):
  """Starts the programs of one run or sweep; any thread may call it."""

  @property
  def host(self) -> str:
    """The address of this host for programs that it starts."""
    ...

  def start(self, program: Program) -> Started:
    """Starts a program; does not wait for its place."""
    ...

  def close(self) -> None:
    """Ends every process that is left; returns once they have ended."""
    ...


@runtime_checkable
class Backend(Protocol):
  """Settings of a backend, a frozen dataclass.

  Attributes:
    shares_memory: its programs run on this host, and see its memory.
    place_s: longest wait for a place of a program.
  """

  @property
  def shares_memory(self) -> bool:
    """See the class."""
    ...

  @property
  def place_s(self) -> float:
    """See the class."""
    ...

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    ...

  def validate_installed(self) -> None:
    """Raises ValueError when its package is missing."""
    ...

  def open(self, folder: pathlib.Path) -> Launcher:
    """Returns what starts programs, for the caller to close.

    Args:
      folder: for its own files.

    Raises:
      ValueError: it cannot be reached.
    """
    ...


def wait(process: Started, timeout_s: float) -> int | None:
  """Returns the code of a process that ends in time; None if it does not."""
  deadline = time.monotonic() + timeout_s
  while (code := process.code()) is None and time.monotonic() < deadline:
    time.sleep(_LOOK_S)
  return code
