"""Hurts runs at random moments and lets them go on: make soak.

  python -m scripts.soak [--minutes=10] [--seed=0] [--only=NUMBER]
      [--role=engine] [--schedule=in_flight] [--trials=20]

Each trial is a small run under a random schedule, with or without a warm start,
with its engine here or in a process of its own, some with the learner in two
processes, some with processes of environments and rewards. At a random moment,
at a publish or at a checkpoint it is

  killed, terminated   and the same command is given again
  stopped              for some seconds, as a machine that sleeps, or for longer
                       than a wait of the run may last
  full, out of files   no file may grow further, or no other be opened
  read-only            nothing may be opened for writing, moved or made

  moved in time        the clock of its Python code, `time.time`, jumps a day
                       ahead and two back

or some of its processes, those of engine and learner, of environments or of
rewards, are killed or stopped. A module that a trial puts before all others
moves the clock and refuses to write, as root alone could do otherwise. Some are
hurt in their warm start, others while they write their report, after the last
of a few rounds. Then the run must go on for three rounds, its metrics must have
each round once, its log must keep all promises with a ledger error of 0, no
output may be a traceback, and no process may be left. Logs are in many
segments, of which the oldest are deleted. Deadlines grow with the load of the
machine.

With --role every trial has such a process, which is killed, or in every other
trial stopped until it is missed, and none compares bits: the engine's, one of
the learner's, of environments, of rewards, or the run itself. Within a minute,
which grows with the load, the log must name it, or the output of a run that
ends for it, as it does without a learner; or a run goes on that did not need
the process of an environment or a reward. A trial repeats this --times, in one
run if that goes on. --schedule gives all the same.

Other trials kill a repeatable run, let it end, and compare its last checkpoint
with that of one that was not killed: they must have the same bits.

A trial that fails prints the command that repeats it.
"""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import app, flags

from configs import guess_number_schedules
from launch.report import log_check, run_files
from rl.audit import event_log
from rl.runtime import segments
from tests.helpers import commands, machine_speed, processes

_MINUTES = flags.DEFINE_float("minutes", 10.0, "Time in which trials begin.")
_SEED = flags.DEFINE_integer("seed", 0, "Of all trials.")
_ONLY = flags.DEFINE_integer("only", None, "Number of the one trial to make.")

_ROLE = flags.DEFINE_enum(
  "role", None, (*processes.ROLES, "run"), "Process to hurt; None: any, anyhow."
)
_SCHEDULE = flags.DEFINE_enum(
  "schedule",
  None,
  list(guess_number_schedules.SCHEDULES),
  "Of all trials; None draws it.",
)
_TRIALS = flags.DEFINE_integer("trials", None, "To make at most.", 1)
_TIMES = flags.DEFINE_integer("times", 1, "Losses of the role in a trial.", 1)

_CONFIG = "configs/guess_number_schedules.py"
_ROUNDS_MORE = 3
_LATEST_S, _LATER_S = 40.0, 10.0
"""Into a run, and in trials of a role after the first rounds."""
_PUBLISH, _CHECKPOINT = ", at a publish", ", at a checkpoint"
_PLACES = (" at any moment", _PUBLISH, _CHECKPOINT)
_WARM_START = ", in its warm start"
_STOPPED_S = 8.0
_SHORT_WAITS = {
  "rollout.step_s": "1",
  "rollout.grading.deadline_s": "1",
}
_WAIT_S, _TOO_LONG_S = 30.0, 40.0
_END_S = machine_speed.scaled(200.0)
_NAMED_S = machine_speed.scaled(60.0)
"""Deadlines of calls and heartbeats are shorter."""
_REPORT_S = 3.0
_DAY_S = 86400.0
_REPEATABLE = 0.15
"""Share of the trials that compare bits."""
_GUESTS = {
  "environment": (
    "envs.workers.Processes(source=guess_the_number(high=20, turns=5))"
  ),
  "reward": "envs.offload.process_pool.ProcessPool(reward=outcome())",
}
_REPEATS = {
  "rounds": "6",
  "repeatable": "true",
  "retention.checkpoint_every": "1",
  "overlap.max_staleness": "2",
}
# Python imports a module called sitecustomize before all others. The state is
# mapped, so that reading it costs nothing and takes no further file.
_MODULE = """
import builtins, errno, io, mmap, os, struct, time
with open(os.environ["SOAK_STATE"], "rb") as file:
  _state = mmap.mmap(file.fileno(), 9, access=mmap.ACCESS_READ)
_time, _time_ns = time.time, time.time_ns
_ahead_s = lambda: struct.unpack_from("d", _state)[0]
time.time = lambda: _time() + _ahead_s()
time.time_ns = lambda: _time_ns() + int(1e9 * _ahead_s())

def _refusing(function, writes=lambda *args, **kwargs: True):
  def call(path, *args, **kwargs):
    run = os.environ["SOAK_RUN"]
    if _state[8] and not isinstance(path, int) and writes(*args, **kwargs):
      if os.path.abspath(os.fsdecode(path)).startswith(run):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
    return function(path, *args, **kwargs)
  return call

builtins.open = io.open = _refusing(
  io.open, lambda mode="r", *args, **kwargs: not {*"wax+"}.isdisjoint(mode)
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
os.open = _refusing(os.open, lambda flags, *args, **kwargs: flags & _WRITES)
for _name in ("mkdir", "remove", "rename", "replace", "rmdir", "unlink"):
  setattr(os, _name, _refusing(getattr(os, _name)))
"""
_CLOCK, _READ_ONLY = (0, "d"), (8, "?")
"""Places and formats in the state: seconds of the clock ahead; of the disk."""


class Broken(Exception):
  """A run that did not keep what it promises."""


def main(_: list[str]) -> None:
  """Makes trials until the time is over; exits with 1 if one fails."""
  if _ONLY.value is not None:
    sys.exit(0 if trial(_ONLY.value) else 1)
  number, failed, end_s = 0, 0, time.monotonic() + 60 * _MINUTES.value
  while time.monotonic() < end_s and number != _TRIALS.value:
    failed += not trial(number)
    number += 1
  print(f"{number} passed, 0 failed" if not failed else f"{failed} failed")
  sys.exit(1 if failed else 0)


def trial(number: int) -> bool:
  """Makes a trial, and returns whether its run survived."""
  rng = random.Random(f"{_SEED.value}/{number}")
  role = _ROLE.value
  if rng.random() < _REPEATABLE and role is None:
    return _repeat(number, rng.uniform(0.5, _LATEST_S))
  schedule = rng.choice(list(guess_number_schedules.SCHEDULES))
  is_remote, is_warm = rng.random() < 0.4, rng.random() < 0.4
  is_split, has_guests = rng.random() < 0.2, rng.random() < 0.2
  has_workers = is_remote or is_split or has_guests
  way = rng.choice([*_WAYS, *(_WAYS_OF_WORKERS if has_workers else ())])
  place = rng.choice([*_PLACES, *([_WARM_START] if is_warm else ())])
  is_report = rng.random() < 0.15
  after_s = (
    rng.uniform(0, _REPORT_S) if is_report else rng.uniform(0.5, _LATEST_S)
  )
  if place == _WARM_START and not is_report:
    after_s /= 10  # The whole takes some seconds.
  schedule = _SCHEDULE.value or schedule
  if role is not None:
    after_s = rng.uniform(0.5, _LATER_S)
    way = _WAYS_OF_ROLE[number % len(_WAYS_OF_ROLE)]
    is_report = is_warm = False
    place = place if place in _PLACES else _PLACES[0]
    is_remote |= role == "engine"
    is_split |= role == "learner"
    has_guests |= role in ("environment", "reward")
  title = (
    f"{number:4} {schedule:15} {'warm start' if is_warm else '':10} "
    f"{'process' if is_remote else '':7} {'split' if is_split else '':5} "
    f"{'guests' if has_guests else '':6} "
    f"{f'{role} ' if role else ''}{way.__name__:15} {after_s:4.1f} s"
    f"{' into its report' if is_report else place}"
  )
  settings = {
    name: value
    for name, value in commands.TINY.items()
    if not name.startswith("overlap.")
  } | {
    "rounds": "100000",
    "retention.segment_bytes": "40000",
    "retention.log_bytes": "20000",
  }
  if is_warm:
    del settings["warm_start"]
    settings["warm_start.steps"] = "30"
  if is_remote:
    settings["placement.decode_processes"] = "1"
    # One more than it is lost; none of them serves for long in between.
    settings["recovery.attempts"] = str(max(4, _TIMES.value + 2))
  if is_split:
    settings["placement.learner.data"] = "2"
    settings["placement.learner_processes"] = "2"
  if has_guests:
    settings |= _GUESTS
  few = {"rounds": str(_ROUNDS_MORE)} if is_report else {}
  if has_guests and way in (role_stopped, stopped_too_long):
    # Longer than it takes to start such a process.
    settings |= dict.fromkeys(_SHORT_WAITS, "5")
  elif way is stopped_too_long:
    settings |= _SHORT_WAITS
  if way is stopped_too_long:
    few["progress_timeout_s"] = f"{_WAIT_S:g}"
  workdir = pathlib.Path(tempfile.mkdtemp(prefix="soak_"))
  config = f"{_CONFIG}:{schedule}"
  command = commands.train(workdir, settings, config)
  hurt = commands.train(workdir, settings | few, config)
  try:
    with _in_hand(workdir):
      more_s = [rng.uniform(0.5, _LATER_S) for _ in range(_TIMES.value - 1)]
      moments_s = [after_s, *more_s]
      while moments_s:
        done = _hurt(hurt, way, moments_s, workdir, "" if is_report else place)
        moments_s = moments_s[done:]
      _go_on(command, workdir)
  except Broken as error:
    _tell(title, number, error, workdir)
    return False
  rounds = processes.rounds(workdir)
  print(f"{title}  survived, {rounds} rounds", flush=True)
  shutil.rmtree(workdir)
  return True


def _tell(
  title: str, number: int, error: Broken, workdir: pathlib.Path
) -> None:
  again = f"python -m scripts.soak --seed={_SEED.value} --only={number}"
  for flag in (_ROLE, _SCHEDULE, _TIMES):
    is_given = flag.value != flag.default
    again += f" --{flag.name}={flag.value}" if is_given else ""
  print(f"{title}  BROKEN: {error}\n  its run: {workdir}\n  again: {again}")


def _repeat(number: int, after_s: float) -> bool:
  """Kills a repeatable run, and compares its end with that of another."""
  title = f"{number:4} repeatable, killed after {after_s:4.1f} s"
  workdir = pathlib.Path(tempfile.mkdtemp(prefix="soak_"))
  settings = commands.TINY | _REPEATS
  runs = [workdir / name for name in ("killed", "whole")]
  killed, whole = (commands.train(run, settings) for run in runs)
  try:
    with _begun(killed) as process:
      _workers_until(process, time.monotonic() + after_s)
      process.kill()
      _check_output(_output(process))
    for command in (killed, whole):
      with _begun(command) as process:
        output = _output(process)
        if process.returncode:
          raise Broken(f"it ended with {process.returncode}: {output[-2000:]}")
    last = int(settings["rounds"])
    one, other = (processes.checkpoint(run, last) for run in runs)
    if one != other:
      raise Broken("its last checkpoint is not that of one that was not killed")
  except Broken as error:
    _tell(title, number, error, workdir)
    return False
  print(f"{title}  survived, with the same bits", flush=True)
  shutil.rmtree(workdir)
  return True


@contextlib.contextmanager
def _in_hand(workdir: pathlib.Path) -> Iterator[None]:
  """Lets `_set` change clock and disk of runs that begin meanwhile."""
  with tempfile.TemporaryDirectory(prefix="soak_state_") as directory:
    pathlib.Path(directory, "sitecustomize.py").write_text(_MODULE)
    pathlib.Path(directory, "state").write_bytes(bytes(9))
    before = dict(os.environ)
    paths = [directory, before.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["SOAK_RUN"] = str(workdir)
    os.environ["SOAK_STATE"] = f"{directory}/state"
    try:
      yield
    finally:
      os.environ.clear()
      os.environ.update(before)


def _set(part: tuple[int, str], value: float | bool) -> None:
  place, form = part
  with pathlib.Path(os.environ["SOAK_STATE"]).open("r+b") as file:
    file.seek(place)  # Processes have mapped it.
    file.write(struct.pack(form, value))


def _hurt(
  command: list[str],
  way: Callable[[subprocess.Popen[str]], bool],
  moments_s: Sequence[float],
  workdir: pathlib.Path,
  place: str,
) -> int:
  """Starts a run, hurts it, and returns how often when it has ended.

  Args:
    moments_s: at which it is hurt: seconds since its start; in trials of a
      role, since the rounds after its start or after it was hurt before.
    place: one of `_PLACES`, which comes after the time. It counts from the last
      round if this is "", the report, and from the first step of a warm start.
  """
  done, ends = 0, False
  with _begun(command) as process:
    seen: set[int] = set()
    begun: Mapping[str, Callable[[], bool]] = {
      "": lambda: processes.rounds(workdir) >= _ROUNDS_MORE,
      _WARM_START: (workdir / "warm_start.jsonl").exists,
    }
    if place in begun:
      seen = _workers_until(process, time.monotonic() + _END_S, begun[place])
    for after_s in moments_s:
      if _ROLE.value is not None:
        seen |= _rounds_more(process, workdir)
      seen |= _workers_until(process, time.monotonic() + after_s)
      _wait_for(place, process, workdir)
      ends = process.poll() is not None or way(process)
      done += 1
      if ends or process.poll() is not None:
        break
    is_asked = not ends and process.poll() is None
    if is_asked:
      time.sleep(_STOPPED_S)  # It goes on, and is asked to end.
      process.terminate()
    output = _output(process)
  _check_output(output)
  if not ends and not is_asked and (_ROLE.value or "") not in output:
    raise Broken(f"it ended, and does not name the role: {output[-2000:]}")
  _check_gone(seen)
  return done


def _rounds_more(
  process: subprocess.Popen[str], workdir: pathlib.Path
) -> set[int]:
  """Waits for a few more rounds; returns the workers of the run meanwhile."""
  last = processes.rounds(workdir) + _ROUNDS_MORE
  end_s = time.monotonic() + _END_S
  seen = _workers_until(
    process, end_s, lambda: processes.rounds(workdir) >= last
  )
  if processes.rounds(workdir) < last:
    process.kill()
    raise Broken(f"it does not go on: {_output(process)[-2000:]}")
  return seen


def _wait_for(
  place: str, process: subprocess.Popen[str], workdir: pathlib.Path
) -> None:
  """Waits until a run publishes, or writes a checkpoint."""
  if place not in (_PUBLISH, _CHECKPOINT):
    return

  def state() -> object:
    if place == _CHECKPOINT:
      return sorted((workdir / "checkpoints").glob("*"))
    return processes.rounds(workdir)  # They are counted beside the publish.

  before, end_s = state(), time.monotonic() + _END_S
  while state() == before and process.poll() is None:
    if time.monotonic() > end_s:
      return
    time.sleep(0.002)


def _go_on(command: list[str], workdir: pathlib.Path) -> None:
  """Gives the command again, and checks the run after a few more rounds."""
  _set(_READ_ONLY, False)  # The clock stays wrong.
  with _begun(command) as process:
    seen = _rounds_more(process, workdir)
    process.terminate()
    output = _output(process)
  _check_output(output)
  _check_gone(seen)
  if process.returncode != 128 + signal.SIGTERM:
    raise Broken(f"it ended with {process.returncode}: {output[-2000:]}")
  verdict = log_check.of_run(workdir)
  if verdict.violations or verdict.ledger.error:
    raise Broken(f"{verdict.ledger.error=}; {verdict.violations}")
  rounds = [x["round"] for x in run_files.lines(workdir / "metrics.jsonl", [])]
  if rounds != list(range(1, len(rounds) + 1)):
    raise Broken(f"metrics.jsonl has rounds {rounds}")


@contextlib.contextmanager
def _begun(command: list[str]):
  """Starts a command; whatever happens, it is not left behind."""
  with commands.start(*command) as process:
    try:
      yield process
    finally:
      process.kill()


def _workers_until(
  process: subprocess.Popen[str],
  until_s: float,
  done: Callable[[], bool] = lambda: False,
) -> set[int]:
  """Returns the workers that a run starts up to a time, or to an event."""
  seen: set[int] = set()
  while time.monotonic() < until_s and process.poll() is None and not done():
    seen.update(processes.workers_of(process))
    time.sleep(0.05)
  return seen


def _output(process: subprocess.Popen[str]) -> str:
  try:
    return process.communicate(timeout=_END_S)[0]
  except subprocess.TimeoutExpired:
    process.kill()
    raise Broken(
      f"it did not end in {_END_S:g} s: {process.communicate()[0][-2000:]}"
    ) from None


def _check_output(output: str) -> None:
  if (start := output.find("Traceback")) >= 0:
    raise Broken(f"a traceback: {output[max(0, start - 1000) : start + 3000]}")


def _check_gone(pids: set[int] | list[int]) -> None:
  if left := processes.outliving(pids):
    raise Broken(f"processes {left} outlived their run")


# Ways to hurt a run; each returns whether the run should end by itself.


def killed(process: subprocess.Popen[str]) -> bool:
  """Kills the run."""
  process.kill()
  return True


def terminated(process: subprocess.Popen[str]) -> bool:
  """Asks the run to end."""
  process.terminate()
  return True


def stopped(process: subprocess.Popen[str]) -> bool:
  """Lets no time pass for the run, for some seconds."""
  _stop(process.pid)
  return False


def stopped_too_long(process: subprocess.Popen[str]) -> bool:
  """Lets no time pass for the run, for longer than its waits may last."""
  _stop(process.pid, _TOO_LONG_S)
  return False


def read_only(process: subprocess.Popen[str]) -> bool:
  """Lets the run write no file, make none and move none."""
  del process
  _set(_READ_ONLY, True)
  return False


def full(process: subprocess.Popen[str]) -> bool:
  """Lets no file of the run grow beyond 4 kB."""
  limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
  changed = (4096, limits[1])
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, changed)
  return True


def out_of_files(process: subprocess.Popen[str]) -> bool:
  """Lets the run open no more files than it has, and two."""
  count = len(os.listdir(f"/proc/{process.pid}/fd"))
  limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
  changed = (count + 2, limits[1])
  resource.prlimit(process.pid, resource.RLIMIT_NOFILE, changed)
  return False


def clock_jumped(process: subprocess.Popen[str]) -> bool:
  """Moves the clock of the run ahead by a day, and back by two."""
  del process  # It and its workers have the clock of the trial.
  for offset_s in (_DAY_S, -_DAY_S):
    _set(_CLOCK, offset_s)
    time.sleep(_STOPPED_S / 2)
  return False


def workers_killed(process: subprocess.Popen[str]) -> bool:
  """Kills the processes of the run that are up."""
  for worker in processes.workers_of(process):
    os.kill(worker, signal.SIGKILL)
  return False


def one_worker_killed(process: subprocess.Popen[str]) -> bool:
  """Kills one process of the run, the newest that is up."""
  for worker in processes.workers_of(process)[-1:]:
    os.kill(worker, signal.SIGKILL)
  return False


def workers_stopped(process: subprocess.Popen[str]) -> bool:
  """Lets no time pass for the processes of the run, for some seconds."""
  for worker in processes.workers_of(process):
    _stop(worker)
  return False


def role_killed(process: subprocess.Popen[str]) -> bool:
  """Kills the newest process of the role."""
  return _of_role_signalled(process, signal.SIGKILL)


def role_stopped(process: subprocess.Popen[str]) -> bool:
  """Lets no time pass for it until it was missed; for the run, for a while."""
  return _of_role_signalled(process, signal.SIGSTOP)


def _of_role_signalled(
  process: subprocess.Popen[str], number: signal.Signals
) -> bool:
  role = _ROLE.value
  since_s = max((event["t"] for event in _events()), default=0.0)
  for pid in _of_role(process):
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)
      if role != "run":
        _wait_until_named(process, since_s)
      elif number == signal.SIGSTOP:
        time.sleep(_TOO_LONG_S)
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGCONT)
  return (role, number) == ("run", signal.SIGKILL)


def _wait_until_named(process: subprocess.Popen[str], since_s: float) -> None:
  """Waits until the log names the role, or the run ends.

  Or until it has gone on, where a process without work may not be missed.
  """
  run, role = pathlib.Path(os.environ["SOAK_RUN"]), _ROLE.value
  status = {"environment": "env_fault", "reward": "reward_fault"}.get(
    role or ""
  )
  before, end_s = processes.rounds(run), time.monotonic() + _NAMED_S

  def names(event: event_log.Event) -> bool:
    if status is None:
      return event["kind"] == "engine_lost"
    return event.get("status") == status

  while process.poll() is None:
    if any(event["t"] > since_s and names(event) for event in _events()):
      return
    if status and processes.rounds(run) >= before + _ROUNDS_MORE:
      return
    if time.monotonic() > end_s:
      raise Broken(f"nothing names the {role} in {_NAMED_S:g} s")
    time.sleep(0.5)


def _events() -> list[event_log.Event]:
  path = pathlib.Path(os.environ["SOAK_RUN"], "events.jsonl")
  while True:
    before = segments.deleted(path)
    try:
      return list(event_log.LogFile(path)) if path.exists() else []
    except segments.Damaged:
      # The run has deleted another segment meanwhile.
      if segments.deleted(path) == before:
        raise


def _of_role(process: subprocess.Popen[str]) -> list[int]:
  """Returns the newest process of the role, when one is up."""
  if _ROLE.value == "run":
    return [process.pid]
  end_s = time.monotonic() + _END_S
  while process.poll() is None:
    if found := processes.workers_of(process, _ROLE.value):
      return found[-1:]
    if time.monotonic() > end_s:
      raise Broken(f"no process of role {_ROLE.value} in {_END_S:g} s")
    time.sleep(0.05)
  return []


def _stop(pid: int, seconds: float = _STOPPED_S) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


_WAYS = (
  killed,
  terminated,
  stopped,
  stopped_too_long,
  full,
  read_only,
  out_of_files,
  clock_jumped,
)
_WAYS_OF_ROLE = (role_killed, role_stopped)
_WAYS_OF_WORKERS = (workers_killed, one_worker_killed, workers_stopped)


if __name__ == "__main__":
  app.run(main)
