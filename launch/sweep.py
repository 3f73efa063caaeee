"""Runs every variation of a config: python -m launch.sweep --config=FILE.

  python -m launch.sweep --config=FILE --workdir=DIR --parallel=2 --attempts=2
  python -m launch.sweep --config=FILE --workdir=DIR --backend=slurm
  python -m launch.sweep --workdir=DIR --table

The file's sweep() lists the overrides of each run. Every run is a process,
`launch.train` with its own directory and log, so a failed run does not end the
others. The same command continues a stopped sweep. Ctrl-C and SIGTERM stop
every run at its next safe point; a second one ends them at once. When the sweep
is killed, its runs stop as well.

--backend starts the runs on other hosts, which have this checkout, and mount
the disk of --workdir at the same path; or, with xm, as work units of XManager.

--table compares the runs, also while they go on: it prints them, the best
first, and writes compare.html with their curves. A sweep ends with that.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import app
from absl import flags as absl_flags

from launch.cli import (
  config_file,
  flags,
  known_programs,
  output,
  steps,
  workdir,
)
from launch.report import comparison, frozen, run_files
from launch.view import runs as view_runs
from rl import experiment
from rl.backends import contract
from rl.runtime import log_line
from rl.settings import overrides as overrides_lib
from rl.settings import parsing
from twinmesh import error_codes

_WORKDIR = absl_flags.DEFINE_string(
  "workdir", "", "Parent directory of all runs."
)
_PARALLEL = absl_flags.DEFINE_integer(
  "parallel", 1, "Runs at the same time.", lower_bound=1
)
_ATTEMPTS = absl_flags.DEFINE_integer(
  "attempts",
  1,
  "Starts of a run: one that fails goes on from its newest checkpoint.",
  lower_bound=1,
)
_METRIC = absl_flags.DEFINE_string(
  "metric",
  None,
  "Metric by which runs are compared; less of it is better with a minus, as in"
  " -loss, or where docs/metrics.md calls more of it worse. By default success,"
  " or warm_start/loss of runs without rounds.",
)
_MEDIAN_EVERY = absl_flags.DEFINE_integer(
  "stop_below_median_every",
  None,
  "After every so many rounds, stop a run whose mean --metric so far is worse"
  " than the median of the others after as many.",
  lower_bound=1,
)
_BACKEND = absl_flags.DEFINE_string(
  "backend",
  "local",
  "Starts the runs: local, addresses, slurm, ray or xm, with fields as in"
  " 'slurm(partition=a, gpus=1)'.",
)
_TABLE = absl_flags.DEFINE_bool(
  "table", False, "Only compare the runs that are in --workdir."
)
# Shows --config in --help.
absl_flags.adopt_module_key_flags(flags)
absl_flags.adopt_module_key_flags(known_programs)

_LOOK_S = 0.2
_MEASURE_S = 2.0
_SAVE_S = 600.0
"""Longest wait for the runs of a sweep that an error ends."""
_WRONG_SETTINGS = 2
_ERROR = re.compile(rf"(?:\d\d:\d\d:\d\d )?{error_codes.ERROR}(.*)")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@flags.command
def main() -> None:
  """Checks every run, then starts them; exits with 1 if one failed."""
  if not _WORKDIR.value:
    with flags.exit_on_setting_error():
      raise overrides_lib.SettingError(
        "--workdir is missing; name a directory, as in --workdir=runs/sweep"
      )
  root = pathlib.Path(_WORKDIR.value)
  if _TABLE.value:
    with flags.exit_on_setting_error():
      is_tuning = comparison.are_tuning(_directories(root))
      compare(root, *comparison.metric_of(_METRIC.value, is_tuning))
    return
  path = absl_flags.FLAGS.config
  with flags.exit_on_setting_error():
    given = flags.overrides()
    flags.load_from_command_line(experiment.check_experiment)
    runs, seen = _listed(root, path, given), dict[str, Run]()
    _check_directories(root, runs)
    rounds = []
    for run in runs:
      settings = _loaded(run)
      _check_differs(run, settings, seen)
      _check_place(run, settings)
      rounds.append(settings.rounds)
    metric, less = comparison.metric_of(_METRIC.value, not any(rounds))
    comparison.check_documented(metric)
    backend = flags.read_backend(_BACKEND.value)
    workdir.make_writable(root, f"--workdir={root}")
    lock = workdir.locked(root)
    # The runs of a sweep that was killed take a while to save.
    for run in runs:
      if run.directory.is_dir():
        workdir.locked(run.directory).close()
    launcher = backend.open(root / "backend")
  every = _MEDIAN_EVERY.value
  rule = None if every is None else MedianRule(every, metric, less)
  with lock, output.dropping(), steps.Steps(sys.stderr) as shown:
    sweep = Sweep(
      runs, _PARALLEL.value, _ATTEMPTS.value, rule, launcher, shown.phase
    )
    number = sweep.play()
  if number:
    sys.exit(128 + number)
  # Where no run has come as far, their errors have been told.
  if any(run_files.is_run(run.directory) for run in runs):
    with flags.exit_on_setting_error():
      compare(root, metric, less, {run.directory.name: run.why for run in runs})
  sys.exit(1 if any(run.failed for run in runs) else 0)


def _directories(root: pathlib.Path) -> list[pathlib.Path]:
  with _naming(root):
    return sorted(root.iterdir()) if root.is_dir() else []


def compare(
  root: pathlib.Path,
  metric: str,
  less: bool,
  failures: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
  """Prints a table of all runs below a directory, and writes compare.html.

  Args:
    failures: errors by the names of runs, of which these may hold no word.

  Raises:
    ValueError: there are none, none has the metric, or the directory cannot be
      read or written.
  """
  runs = [
    dataclasses.replace(run, note=failures.get(run.name) or run.note)
    for run in comparison.read(_directories(root), metric)
  ]
  print(comparison.text(runs, metric, less))
  target = root / "compare.html"
  data = view_runs.RunsDirectory(root).frozen(metric, less)
  page = frozen.page(root.resolve().name, data)
  with _naming(target):
    target.write_text(page, "utf-8")
  print(f"curves: {target}")


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """Turns an OSError into a SettingError that names the file."""
  try:
    yield
  except OSError as error:
    raise overrides_lib.SettingError(
      f"{path} cannot be used: {error.strerror}"
    ) from error


def _listed(
  root: pathlib.Path, path: str, given: Mapping[str, str | None]
) -> list["Run"]:
  """Returns the runs of the file's sweep().

  Raises:
    SettingError: there are none, or one sets what the command line sets.
  """
  swept = flags.sweep(path)
  for overrides in swept:
    _check_disjoint(given, overrides)
  if not swept:
    raise overrides_lib.SettingError(
      f"{path} has no sweep() that lists runs; add one, or use launch.train"
    )
  return [
    Run(root / f"run_{number:03d}", path, {**given, **overrides}, overrides)
    for number, overrides in enumerate(swept)
  ]


def _check_disjoint(
  given: Mapping[str, str | None], overrides: Mapping[str, str | None]
) -> None:
  """Raises SettingError for a setting that both would set."""
  for key, text in overrides.items():
    for other in given:
      below = other.removeprefix(f"{key}.")
      if other == key or (below != other and parsing.sets(text or "", below)):
        raise overrides_lib.SettingError(
          f"{overrides_lib.argument(other, given[other])} is given, but sweep()"
          f" sets {other} too; leave it out of one of them"
        )


def _loaded(run: "Run") -> experiment.Experiment:
  """Returns the settings of a run; an error names its point."""
  try:
    settings = flags.load(run.path, run.overrides)
    workdir.check_initial(run.directory, settings)
    settings.validate_teacher()
    return settings
  except ValueError as error:
    error.args = (f"{run} of sweep(): {error}",)
    raise


def _check_differs(
  run: "Run", settings: experiment.Experiment, seen: dict[str, "Run"]
) -> None:
  """Raises SettingError for a run that repeats one that was seen before."""
  text = json.dumps(config_file.to_json(settings))
  before = seen.setdefault(text, run)
  if before is not run:
    raise overrides_lib.SettingError(
      f"{before} and {run} of sweep() have the same settings; leave one out"
    )


def _check_directories(root: pathlib.Path, runs: Sequence["Run"]) -> None:
  """Raises SettingError for one that a sweep, or a run of it, cannot have."""
  if run_files.is_run(root):
    raise overrides_lib.SettingError(
      f"--workdir={root} is the directory of a run; choose another for a sweep"
    )
  for path in (run.directory for run in runs):
    if os.path.lexists(path) and not os.path.isdir(path):
      raise overrides_lib.SettingError(
        f"{path} must be the directory of a run; move away what is there"
      )


def _check_place(run: "Run", settings: experiment.Experiment) -> None:
  """Raises SettingError where the directory of a run holds another one."""
  if changes := workdir.forbidden_changes(run.directory, settings):
    listing = "\n  ".join(changes)
    raise overrides_lib.SettingError(
      f"{run.directory} holds a run with other settings than sweep() lists for "
      f"it ({_words(run.point)}):\n  {listing}\nput new points behind the "
      "others, move that directory away, or choose another --workdir"
    )


@dataclasses.dataclass(eq=False)
class Run:
  """One run of a sweep, in its directory.

  Attributes:
    overrides: of the command line, and its own.
    point: its own, which sweep() lists.
    attempts: starts so far.
    why: the error that it has ended with, with no attempt left; or "".
    looked: last round at which `MedianRule` compared it.
    due_s: time of the next look at its metrics.
  """

  directory: pathlib.Path
  path: str
  overrides: Mapping[str, str | None]
  point: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
  attempts: int = 0
  why: str = ""
  looked: int = 0
  due_s: float = 0.0
  process: contract.Started | None = None
  _log_bytes: int = 0

  def __str__(self) -> str:
    return f"{self.directory.name} ({_words(self.point)})"

  @property
  def failed(self) -> bool:
    """True once it has ended with an error, and has no attempt left."""
    return bool(self.why)

  @property
  def note(self) -> str:
    """The reason why a rule has stopped it, in this sweep or before, or ""."""
    return comparison.note(self.directory, self.point)

  def start(self, launcher: contract.Launcher) -> None:
    """Starts its process, or goes on from its newest checkpoint.

    Raises:
      OSError: its directory or its log cannot be written.
    """
    self.attempts += 1
    self.directory.mkdir(parents=True, exist_ok=True)
    comparison.remove_note(self.directory)
    _tell(f"{self.directory}: {_words(self.overrides)}")
    with self._log.open("a") as log:
      self._log_bytes = log.tell()
    self.process = launcher.start(self.program())

  @property
  def _log(self) -> pathlib.Path:
    return self.directory / "log.txt"

  def last_error(self) -> str:
    """Returns the last error in the log of its newest start, or "".

    The log of one that raised has a traceback, and the run has kept the error.
    """
    try:
      with self._log.open("rb") as log:
        log.seek(self._log_bytes)
        lines = log.read().decode(errors="replace").splitlines()
    except OSError:  # Somebody has removed the run.
      return ""
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return errors[-1] if errors else workdir.failure_line(self.directory)

  def program(self) -> contract.Program:
    """Returns what it runs, in the same directory on every host."""
    return contract.Program(
      # The first word is for `launch.host --only=run`.
      name=f"run {self.directory.name}",
      module="launch.train",
      arguments=(
        f"--config={self.path}",
        *flags.arguments(self.overrides),
        *(["--trust_config"] if absl_flags.FLAGS["trust_config"].value else []),
        f"--workdir={self.directory}",
        "--end_with_stdin",
      ),
      directory=os.getcwd(),
      log=self._log,
    )

  def signal(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if self.process is not None:
      self.process.signal(number)


def _words(overrides: Mapping[str, str | None]) -> str:
  return " ".join(f"{name}={text}" for name, text in overrides.items())


def _keep_failure(run: Run, code: int) -> None:
  """Keeps why a run has failed in its directory, unless that tells it."""
  # With wrong settings it has claimed none: a run that is there is another.
  is_told = code == _WRONG_SETTINGS or workdir.failure(run.directory)
  if not (run_files.is_run(run.directory) and is_told):
    workdir.keep_failure(run.directory, run.why)


def _tell(text: str) -> None:
  log_line.tell(text, sys.stdout)


class MedianRule:
  """Finds runs that do worse than most others.

  The median stopping rule of Golovin et al. (Google Vizier, KDD 2017, 3.2.2),
  by the mean of the metric so far.

  Args:
    every: rounds between two looks at a run.
    less: less of the metric is better.
  """

  def __init__(self, every: int, metric: str, less: bool):
    self._every = every
    self._metric = metric
    self._less = less

  def verdict(self, run: Run, runs: Sequence[Run]) -> str:
    """Returns why a run is to be stopped now; "" if it is to go on.

    Two others must have come as far.
    """
    values = comparison.values(run.directory, self._metric)
    rounds = max(values, default=0) // self._every * self._every
    if rounds <= run.looked:
      return ""
    run.looked = rounds
    own = _mean_until(values, rounds)
    others = [
      mean
      for other in runs
      if other is not run and (mean := self._mean_of(other, rounds)) is not None
    ]
    if own is None or len(others) < 2:
      return ""
    median = statistics.median(others)
    if own <= median if self._less else own >= median:
      return ""
    return (
      f"stopped after round {rounds}: mean {self._metric} {own:.4g}, median of "
      f"the others {median:.4g}"
    )

  def _mean_of(self, run: Run, rounds: int) -> float | None:
    values = comparison.values(run.directory, self._metric)
    if max(values, default=0) < rounds:
      return None
    return _mean_until(values, rounds)


def _mean_until(values: Mapping[int, float], rounds: int) -> float | None:
  seen = [value for number, value in values.items() if number <= rounds]
  return statistics.fmean(seen) if seen else None


class Sweep:
  """Plays runs, some at a time.

  Args:
    attempts: starts of each run.
    rule: stops runs early, and leaves out those that it has stopped before;
      None lets all come to their end.
    launcher: starts them; closed at the end of `play`.
    report: told how many runs have ended.
  """

  def __init__(
    self,
    runs: Sequence[Run],
    parallel: int,
    attempts: int,
    rule: MedianRule | None,
    launcher: contract.Launcher,
    report: Callable[[str], None] = lambda text: None,
  ):
    self._runs = runs
    self._parallel = parallel
    self._attempts = attempts
    self._rule = rule
    self._launcher = launcher
    self._report = report
    self._waiting = collections.deque(
      run for run in runs if rule is None or not run.note
    )
    self._active: list[Run] = []
    self._ended = len(runs) - len(self._waiting)
    self._number = 0
    self._is_told = False

  def play(self) -> int:
    """Plays all runs; returns the signal that stopped them, or 0.

    An error stops them, too, at their next safe point.
    """
    before = {n: signal.signal(n, self._on_signal) for n in _SIGNALS}
    try:
      for run in self._runs:
        if run not in self._waiting:
          _tell(
            f"{run.directory}: left out, as it was {run.note}; without "
            "--stop_below_median_every it goes on"
          )
      self._report_ended()
      while self._active or (self._waiting and not self._number):
        while self._waiting and len(self._active) < self._parallel:
          if self._number:
            break
          self._start(self._waiting.popleft())
        time.sleep(_LOOK_S)
        self._tell_of_signal()
        for run in [*self._active]:
          self._look_at(run)
    except BaseException:
      self._let_save()
      raise
    finally:
      self._launcher.close()
      for number, handler in before.items():
        signal.signal(number, handler)
    return self._number

  def _tell_of_signal(self) -> None:
    # Not in the handler, which may interrupt another print.
    if self._number and not self._is_told:
      self._is_told = True
      _tell("stopping at the next safe point; again to end at once")

  def _start(self, run: Run) -> None:
    self._active.append(run)
    try:
      run.start(self._launcher)
    except OSError as error:
      self._active.remove(run)
      self._on_failure(
        run, contract.NEVER_RAN, f"it cannot be started: {error}"
      )
    if self._number:  # It came before there was a process to signal.
      run.signal(signal.SIGINT)

  def _let_save(self) -> None:
    """Stops the active runs, and waits for their ends."""
    if not self._number:
      self._on_signal(signal.SIGINT, None)
    deadline = time.monotonic() + _SAVE_S
    for run in self._active:
      if run.process is not None:
        contract.wait(run.process, deadline - time.monotonic())

  def _look_at(self, run: Run) -> None:
    assert run.process is not None
    code = run.process.code()
    if code is None:
      self._measure(run)
      return
    self._active.remove(run)
    if code == 0 or run.note:
      self._end()
      return
    if self._number:  # It was stopped, and goes on with the sweep.
      return
    where = run.process.place and f"on {run.process.place}, "
    why = run.process.reason or f"{where}see log.txt"
    if not run.process.reason and (error := run.last_error()):
      why += f": {error}"
    self._on_failure(run, code, why)

  def _on_failure(self, run: Run, code: int, why: str) -> None:
    again = code != _WRONG_SETTINGS and run.attempts < self._attempts
    outcome = "; it goes on" if again else ""
    _tell(f"{run.directory}: failed with {code}, {why}{outcome}")
    if again:
      self._waiting.append(run)
    else:
      run.why = why
      _keep_failure(run, code)
      self._end()

  def _end(self) -> None:
    self._ended += 1
    self._report_ended()

  def _report_ended(self) -> None:
    self._report(f"runs that have ended: {self._ended}/{len(self._runs)}")

  def _measure(self, run: Run) -> None:
    """Stops a run that the rule finds wanting."""
    if self._rule is None or run.note or time.monotonic() < run.due_s:
      return
    run.due_s = time.monotonic() + _MEASURE_S
    if why := self._rule.verdict(run, self._runs):
      _tell(f"{run.directory}: {why}")
      comparison.write_note(run.directory, why, run.point)
      run.signal(signal.SIGINT)

  def _on_signal(self, number: int, frame: object) -> None:
    del frame
    again, self._number = bool(self._number), number
    for run in self._active:
      if again and run.process is not None:
        run.process.kill()
      else:
        run.signal(signal.SIGINT)


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
