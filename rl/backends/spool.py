"""A program that another process runs, told and watched through files.

  here: SpooledProcess --job.json, signals, beat--> directory
  there: run(directory) --code--> directory, and the log

The directory is on a disk that both hosts mount, as the directory of the run
is. Where a queue decides when and where a job runs, this is the one way that
needs neither an open port nor a right to signal.
"""

import itertools
import json
import os
import pathlib
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from rl.backends import contract, followed, host, local
from rl.runtime import log_line

_LOOK_S = 0.1
_BEAT_S = 1.0
_LOST_S = 30.0
_END_S = 30.0
_SKEW_S = 300.0
"""Longest difference of two hosts' clocks; Slurm's keys allow no more."""
_KILL_S = 10.0
"""Within the wait of `followed.Followed.close`."""


class QueuedJob(Protocol):
  """A job of some queue that calls `run`."""

  def ended(self) -> bool:
    """Returns whether the queue takes it as ended, in whatever way."""
    ...

  def cancel(self) -> None:
    """Takes it out of the queue, or ends it."""
    ...

  def describe(self) -> str:
    """Returns its name, and what the queue says of it."""
    ...


class SpooledProcess(followed.Followed):
  """A program that a job of a queue runs; see `contract.Started`.

  Args:
    folder: of which it makes a directory, that its user alone can read.
    silence_s: time without a beat after which the program ends.
    submit: returns a job that is to call `run` with a directory.
  """

  def __init__(
    self,
    program: contract.Program,
    folder: pathlib.Path,
    silence_s: float,
    submit: Callable[[pathlib.Path], QueuedJob],
  ):
    super().__init__(program)
    self._silence_s = silence_s
    self._submit = submit
    name = program.name.replace(" ", "_").replace("/", "_")
    self._directory = folder / f"{name}-{uuid.uuid4().hex[:8]}"

  def _follow(self) -> int:
    directory = self._directory
    directory.mkdir(parents=True, mode=0o700)
    told = {
      "program": host.sent(self.program),
      "log": str(self.program.log.resolve()),
      "silence_s": self._silence_s,
    }
    (directory / "job.json").write_text(json.dumps(told))
    _beat(directory)
    job = self._submit(directory.resolve())
    try:
      return self._watch(directory, job)
    except BaseException:
      job.cancel()
      raise

  def _watch(self, directory: pathlib.Path, job: QueuedJob) -> int:
    beat_s = ended_s = killed_s = time.monotonic()
    has_ended = False
    looks = itertools.count()
    while True:
      time.sleep(_LOOK_S)
      if place := _text(directory / "began"):
        self.place = place
        self._begun.set()
      if (code := _read_code(directory)) is not None:
        return code
      now = time.monotonic()
      if now > beat_s + _BEAT_S:
        _beat(directory)
        beat_s = now
      with (directory / "signals").open("a") as file:
        file.writelines(f"{number}\n" for number in self._taken())
      # A job that has ended has told its code, but disks may show it late.
      if not next(looks) % 10:
        has_ended = job.ended()
      if not has_ended:
        ended_s = now
      elif self._killed.is_set() or now > ended_s + _LOST_S:
        raise followed.NotPlaced(f"{job.describe()}, and it has told no code")
      if not self._killed.is_set():
        killed_s = now
      elif not self._begun.is_set():
        raise followed.NotPlaced(
          f"it was ended before it had a place; {job.describe()}"
        )
      # Its host is lost, or the queue has put its job back for another one.
      elif now > killed_s + _KILL_S:
        raise followed.NotPlaced(f"it was ended; {job.describe()}")


def _beat(directory: pathlib.Path) -> None:
  (directory / "beat").write_text(str(time.time()))


def _read_code(directory: pathlib.Path) -> int | None:
  code = _text(directory / "code")
  return int(code) if code else None


def run(directory: str) -> int:
  """Runs the program of a directory to its end; returns its code.

  The program ends with whoever has asked for it, and as if they were gone
  where the queue ends its job by SIGTERM, or announces that by SIGUSR2: a run
  saves, and an engine is lost, so that another job takes its place. One that
  was asked to leave would stay away.
  """
  folder = pathlib.Path(directory)
  if (code := _read_code(folder)) is not None:
    return code  # Of a job that was put back into the queue while it ended.
  told: dict[str, Any] = json.loads((folder / "job.json").read_text())
  # Empty while it is written.
  silent_s = time.time() - float(_text(folder / "beat") or "inf")
  if silent_s > told["silence_s"] + _SKEW_S:
    log_line.tell(
      f"nobody has waited for this program for {silent_s:.0f} s, by the clock "
      "of this host",
      sys.stdout,
    )
    return contract.NEVER_RAN
  (folder / "began").write_text(socket.gethostname())
  program = host.read_program(told["program"], pathlib.Path(told["log"]))
  process = local.LocalProcess(program)

  def withdraw(*_: object) -> None:
    with program.log.open("a") as log:
      # A sweep looks there for the cause.
      log_line.tell("error: the queue ends the job of this program", log)
    process.hang_up()

  for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, withdraw)
  try:
    code = _forward(folder, process, told["silence_s"])
  finally:
    process.close()
  if process.reason:
    with program.log.open("a") as log:
      log_line.tell(process.reason, log)
  (folder / "code.partial").write_text(str(code))
  (folder / "code.partial").replace(folder / "code")
  return code


def _forward(
  folder: pathlib.Path, process: local.LocalProcess, silence_s: float
) -> int:
  """Passes signals on until the program ends; returns its code."""
  passed, beat, heard_s = 0, "", time.monotonic()
  while (code := process.code()) is None:
    time.sleep(_LOOK_S)
    now = time.monotonic()
    if (text := _text(folder / "beat")) != beat:
      beat, heard_s = text, now
    if now > heard_s + silence_s:
      log_line.tell("nobody waits for this program any more", sys.stdout)
      process.hang_up()
      if (code := contract.wait(process, _END_S)) is None:
        process.close()
    numbers = _text(folder / "signals").split()
    for number in numbers[passed:]:
      process.signal(int(number))
    passed = len(numbers)
  return code


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except FileNotFoundError:
    return ""


if __name__ == "__main__":
  sys.exit(os.EX_OK if run(sys.argv[1]) == 0 else 1)
