"""Programs on this host, each in a process of its own."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator

from rl.backends import contract

LOOPBACK = "127.0.0.1"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_END_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
  """Starts programs on this host."""

  shares_memory = True
  place_s = 0.0

  def validate(self) -> None:
    """Raises nothing: there is nothing to set."""

  def validate_installed(self) -> None:
    """Raises nothing: it needs no package."""

  def open(self, folder: pathlib.Path) -> contract.Launcher:
    """Returns what starts them."""
    del folder
    return LocalLauncher()


def _own_path() -> list[str]:
  """Returns the place of our packages, where another Python may look.

  A wheel lies among all packages of this Python, and those are compiled for it:
  another one must have a wheel of its own.
  """
  libraries = pathlib.Path(sysconfig.get_path("purelib")).resolve()
  return [] if libraries == _ROOT else [str(_ROOT)]


@contextlib.contextmanager
def _all_signals() -> Iterator[None]:
  """Lets a program hear signals that this thread does not, as in an actor."""
  before = signal.pthread_sigmask(signal.SIG_SETMASK, [])
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalProcess:
  """A program on this host; see `contract.Started`.

  Attributes:
    pid: number of its process, None if it could not be started.
    reason, place: see `contract.Started`.
  """

  place = ""

  def __init__(self, program: contract.Program):
    self.reason = ""
    self.pid: int | None = None
    self._process: subprocess.Popen | None = None
    # A signal must not go to another process that has got the number.
    self._lock = threading.Lock()
    try:
      self._start(program)
    except OSError as error:
      self.reason = f"it cannot be started: {error}"

  def _start(self, program: contract.Program) -> None:
    if program.module not in contract.MODULES:
      raise OSError(
        f"{program.module} is none of {', '.join(contract.MODULES)}"
      )
    paths = [*_own_path(), *filter(None, [os.environ.get("PYTHONPATH")])]
    program.log.parent.mkdir(parents=True, exist_ok=True)
    with program.log.open("a") as output, _all_signals():
      self._process = subprocess.Popen(
        [
          program.python or sys.executable,
          *("-m", program.module, *program.arguments),
        ],
        cwd=program.directory,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={
          **os.environ,
          "PYTHONPATH": os.pathsep.join(paths),
          **program.environment,
        },
        # Ctrl-C is for this process; the pipe ends the other.
        start_new_session=True,
      )
    self.pid = self._process.pid
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has ended already.
      self._process.stdin.write(f"{program.told}\n".encode())
      self._process.stdin.flush()

  def code(self) -> int | None:
    """Returns its exit code; see `contract.Started`."""
    if self._process is None:
      return contract.NEVER_RAN
    with self._lock:
      return self._process.poll()

  def signal(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if self._process is not None:
      with self._lock:
        self._process.send_signal(number)

  def kill(self) -> None:
    """Ends it at once."""
    self.signal(signal.SIGKILL)

  def hang_up(self) -> None:
    """Closes its standard input, which asks it to end."""
    assert self._process is not None
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It never read a line.
      self._process.stdin.close()

  def close(self) -> None:
    """Ends it, waits for that, and frees its pipe."""
    if self._process is not None:
      self.kill()
      self.hang_up()
      contract.wait(self, _END_S)


class LocalLauncher:
  """Starts programs on this host; see `contract.Launcher`."""

  host = LOOPBACK

  def __init__(self):
    self._processes: list[LocalProcess] = []

  def start(self, program: contract.Program) -> LocalProcess:
    """Starts a program."""
    process = LocalProcess(program)
    self._processes = [x for x in self._processes if x.code() is None]
    self._processes.append(process)
    return process

  def close(self) -> None:
    """Ends every process that is left."""
    for process in self._processes:
      process.close()
    self._processes.clear()
