"""Trains in one process: every role is a task on one event loop.

_restore, or _begin (warm start) -> _open (engine up) -> _evaluate_alone
  -> _rounds -> _evaluate_alone -> _conclude (trace, report, verdict)

The coordinator calls `on_round`, `on_published` and `on_boundary`. Ctrl-C or
SIGTERM ends the rounds at a boundary, in `_stopped`, and all else at once, in
`_cancelled`. On every path the event log is checked and its verdict printed.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import jax

from launch.cli import config_file, output, workdir
from launch.gateway import agent_server
from launch.report import log_check, run_files
from launch.run import (
  blocked_loop,
  display,
  log_retention,
  memory_use,
  metrics_writer,
  rollout_samples,
  round_warnings,
  signals,
  startup,
  status_server,
  summary,
  warm_start_files,
)
from models.chat import word_chat
from models.hf import load, tokenizer_files
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.audit import event_log
from rl.backends import contract as backends
from rl.engine import contract
from rl.loop import coordinator, trackers, warm_start
from rl.loop import progress as progress_lib
from rl.rollout import evaluate, grading, prompts, recordings
from rl.runtime import checkpoint, disk, logical_clock, segments, trace
from rl.runtime import watchdog as watchdog_lib
from rl.train import learner, skipped_updates, train_state
from twinmesh import error_codes

_EPISODES_KEPT = 4
_NO_VERSION = -1
"""The version of weights before the first; nothing is played with these."""


@output.dropping()
def train(
  experiment: experiment_lib.Experiment,
  path: str | os.PathLike,
  began_s: float | None = None,
  quiet: bool = False,
) -> int:
  """Runs an experiment in its claimed directory; returns the exit code.

  0: all rounds are done and every invariant held. 1: an invariant broke,
  something stalled, all engines were lost for good, gradients were no longer
  finite, faults left nothing to train, an environment made no task, a
  checkpoint could not be written or read, a segment of the log was damaged, the
  disk took nothing more, or another directory took the path of this one. 2: the
  weights of `initial`, a recorded conversation, or the backend, cannot be used.
  128 + signal: stopped; checkpoints stay. A run goes on if nobody reads its
  output.

  Args:
    began_s: reading of time.monotonic() when the command began, if not now.
    quiet: shows warnings and the result only.
  """
  begun = startup.Startup(time.monotonic() if began_s is None else began_s)
  run_dir = pathlib.Path(path)
  screen = display.Display(experiment.rounds, sys.stdout, quiet=quiet)
  screen.start()
  try:
    loop = logical_clock.LogicalEventLoop if experiment.repeatable else None
    with (
      workdir.held(run_dir) as check,
      asyncio.Runner(loop_factory=loop) as runner,
    ):
      clock = runner.get_loop().time
      run = _Run(experiment, run_dir, check, screen, clock, begun)
      code = runner.run(run.train())
    if code == 1:
      workdir.keep_failure(run_dir, "its log breaks a promise; see report.html")
    return code
  except workdir.Moved as error:  # Not kept: it would be in another directory.
    screen.note(error_codes.text(error))
    return 1
  except load.Unusable as error:
    code = error_codes.code_of(error)
    _fail(run_dir, screen, error_codes.text(f"initial={error}", code))
    return 2
  except (backends.Unreachable, recordings.UnusableRow) as error:
    _fail(run_dir, screen, error_codes.text(error))
    return 2
  except (
    watchdog_lib.Stalled,
    contract.EngineClosed,
    checkpoint.Mismatch,
    checkpoint.Unsaved,
    round_warnings.Hopeless,
    grading.RewardUnreachable,
    learner.LearnerLost,
    trackers.TrackerFailed,
    warm_start.NoDemonstration,
    prompts.NoTask,
    log_check.UnreadableLog,
  ) as error:
    _fail(run_dir, screen, error_codes.text(error))
    return 1
  except FloatingPointError as error:
    _fail(run_dir, screen, error_codes.text(error))
    for path in skipped_updates.updates(run_dir / "skipped")[-1:]:
      screen.note(f"to find the cause:\n  python -m launch.replay {path}")
    return 1
  except Exception as error:
    if not isinstance(error, OSError) or not disk.is_cause(error, run_dir):
      workdir.keep_failure(run_dir, repr(error))
      raise
    failure = disk.failure(error, run_dir)
    _fail(run_dir, screen, error_codes.text(failure, "TM-D09"))
    if rounds := workdir.saved_rounds(run_dir):
      screen.note(f"the last checkpoint is that of round {rounds[-1]}")
    return 1
  finally:
    screen.close()


def _fail(run_dir: pathlib.Path, screen: display.Display, text: str) -> None:
  """Shows the error that ends a run, and keeps it in its directory."""
  screen.note(text)
  workdir.keep_failure(run_dir, text)


class _Run(progress_lib.RunObserver):
  """One run; also the observer that the coordinator calls."""

  def __init__(
    self,
    experiment: experiment_lib.Experiment,
    run_dir: pathlib.Path,
    check: Callable[[], None],
    screen: display.Display,
    clock: Callable[[], float],
    begun: startup.Startup,
  ):
    self._experiment = experiment
    self._dir, self._check = run_dir, check
    self._screen = screen
    self._parts = assemble.build(
      experiment, run_dir, screen.note, agent_server.listen, clock
    )
    self._startup = begun if experiment.log_startup else None
    if self._startup is not None:
      self._startup.follow(self._parts.spans)
    self._checkpoints = checkpoint.Checkpoints(
      run_dir / "checkpoints", experiment.retention.checkpoints
    )
    self._retention = log_retention.LogRetention(
      run_dir, experiment.retention.log_bytes, screen.warn
    )
    self._closing = contextlib.ExitStack()
    self._closing.callback(self._retention.close)
    self._closing.callback(self._close_checkpoints)
    self._unwritable: OSError | None = None
    self._saved = -1
    self._has_warned = False
    self._is_guarded = False
    self._engines: asyncio.Task[None] | None = None
    # What they do, shown once nothing else is waited for.
    self._engines_phase, self._awaits_engines = "compiling the engines", False
    self._evaluated = -1
    self._meter = trace.Meter()
    self._warnings = round_warnings.RoundWarnings(
      run_dir,
      experiment.max_skipped,
      experiment.resolved_bounds,
      experiment.overlap.max_staleness,
      experiment.warm_start is not None,
    )

  async def train(self) -> int:
    """Runs to the last round, or to a signal."""
    current = asyncio.current_task()
    assert current is not None
    self._signals = signals.Signals(current.cancel, self._screen.note)
    loop = asyncio.get_running_loop()

    def give_up(error: OSError) -> None:
      self._unwritable = self._unwritable or error
      loop.call_soon_threadsafe(current.cancel)

    for file in (self._parts.log.file, self._parts.spans.file):
      assert file is not None
      file.on_unwritable, file.check = give_up, self._check
    try:
      with status_server.serving(
        self._dir,
        self._parts.watchdog,
        self._screen.doing,
        self._parts.router.roll,
      ):
        return await self._train()
    except (asyncio.CancelledError, KeyboardInterrupt):
      if self._unwritable is not None:
        raise self._unwritable from None
      if not self._signals.number:
        raise
      return self._cancelled()
    except warm_start_files.WarmStartStopped as stopped:
      self._screen.note(f"{stopped}; to go on:\n  {workdir.command()}")
      return 128 + self._signals.number
    finally:
      if self._engines is not None:
        self._engines.cancel()
      with self._closing:
        await self._parts.close()

  async def _train(self) -> int:
    self._tracker = self._open_tracker()
    with self._guarding():
      progress = await self._restore() or await self._begin()
    with summary.report_on_failure(self._dir, self._flush, self._screen.note):
      if progress.trained >= self._experiment.rounds:
        return await self._complete(progress)
      with self._guarding():
        await self._open(progress)
        await self._parts.admit()
        await self._evaluate_alone(progress.trained)
        await self._rounds(progress)
      if self._signals.number:
        return self._stopped()
      await self._evaluate_alone(self._experiment.rounds)
      return self._finish()

  def _open_tracker(self) -> trackers.Tracker | None:
    chosen = self._experiment.tracker
    if chosen is None:
      return None
    opened = trackers.Background(
      chosen.open(self._dir, config_file.to_json(self._experiment)),
      self._screen.warn,
    )
    self._closing.callback(opened.close)
    return opened

  async def _rounds(self, progress: progress_lib.Progress) -> None:
    """Runs the rounds up to the last one, or up to a signal."""
    parts = self._parts
    parts.spans.listeners.append(self._meter.add)
    parts.log.listeners.append(self._warn_once)
    loop = assemble.coordinate(parts, self)
    self._screen.play()
    # Objects that live as long as the run need no further collections, which
    # would stop the event loop for 0.1 s each.
    gc.collect()
    gc.freeze()
    try:
      with self._signals.calling(loop.stop):
        await loop.run(progress)
    except coordinator.Stopped:
      pass
    finally:
      parts.log.listeners.remove(self._warn_once)
      parts.spans.listeners.remove(self._meter.add)

  def _warn_once(self, event: event_log.Event) -> None:
    """Warns of the first episode in flight that a restart cannot continue."""
    if event["kind"] == "begun_anew" and not self._has_warned:
      self._has_warned = True
      self._screen.warn(
        f"an episode that was in flight begins anew: {event['reason']}; "
        "events.jsonl names each, as begun_anew"
      )

  async def _complete(self, progress: progress_lib.Progress) -> int:
    """Evaluates and reports if a kill after the last checkpoint prevented it.

    A run of zero rounds ends here after its warm start.
    """
    code = 0
    await self.on_boundary(progress)
    if not self._is_evaluated(progress.trained):
      await self._open(progress)
      await self._evaluate_alone(progress.trained)
      code = self._finish()
    elif not self._is_reported(progress.trained):
      code = self._finish()
    done = f"all its {progress.trained} rounds; "
    if not self._experiment.rounds:
      done = "no rounds, and its warm start is done; launch.export it, or "
    self._screen.note(f"{self._dir} has {done}raise --config.rounds to go on")
    return code

  def _is_evaluated(self, trained: int) -> bool:
    if not self._experiment.evaluation.episodes:
      return True
    rows = run_files.lines(self._dir / "evaluations.jsonl", [], round=int)
    return trained in [row["round"] for row in rows]

  def _is_reported(self, trained: int) -> bool:
    page = self._dir / "report.html"
    saved = self._dir / "checkpoints" / str(trained)
    return page.exists() and page.stat().st_mtime >= saved.stat().st_mtime

  async def _open(self, progress: progress_lib.Progress) -> None:
    """Opens the metrics and starts the engines, or waits until they have."""
    self._metrics = metrics_writer.MetricsWriter(
      self._dir, first_round=progress.trained + 1, tracker=self._tracker
    )
    self._closing.callback(self._metrics.close)
    await self._parts.player.graders.open()
    if self._engines is None:
      await self._parts.start(
        progress.state, progress.trained, self._screen.phase
      )
      return
    self._awaits_engines = True
    self._screen.phase(self._engines_phase)
    await self._engines
    await self._parts.replace(progress.state, progress.trained)

  def _start_engines(self, state: train_state.TrainState) -> None:
    """Starts the engines beside a warm start, which leaves cores free."""
    if self._experiment.rounds:
      started = self._parts.start(state, _NO_VERSION, self._on_engines_phase)
      self._engines = asyncio.create_task(started)

  def _on_engines_phase(self, text: str) -> None:
    self._engines_phase = text
    if self._awaits_engines:
      self._screen.phase(text)

  async def _restore(self) -> progress_lib.Progress | None:
    """Returns the progress of the newest checkpoint; None without one."""
    parts = self._parts
    self._screen.phase("looking for a checkpoint")
    found = await initial_state.restore(parts, self._checkpoints)
    if found is None:
      workdir.check_none_damaged(self._dir)
      return None
    warm_start_files.forget(self._dir)
    for name in found.skipped:
      self._screen.note(f"checkpoint {name} is damaged and was left out")
    done = f"{found.step} rounds" if found.step else self._checkpoint_name(0)
    self._screen.note(f"going on after {done}")
    self._saved = found.step
    parts.tasks.seek(found.host["cursor"])
    progress = progress_lib.from_host(found.state, found.host)
    if progress.trained < self._experiment.rounds:
      state = await initial_state.place(parts, found.state)
      progress = dataclasses.replace(progress, state=state)
    log = self._dir / "events.jsonl"
    if not progress.next_group and segments.num_bytes(log):
      # The coordinator sees a fresh run and cannot know that a killed process
      # has logged part of its first round.
      parts.log.emit(
        "resumed",
        trained=progress.trained,
        next_group=0,
        engines=len(parts.engines),
      )
    return progress

  def _note_tokenizer(self) -> None:
    """Notes that the tokenizer of the initial weights is not used."""
    source, chat = self._experiment.initial, self._parts.chat
    if source is None or not isinstance(chat, word_chat.WordChat):
      return
    if tokenizer_files.is_other(chat, source):
      self._screen.note(
        f"initial={source}: its tokenizer is not used; the words of "
        f"{self._experiment.environment.name} take the ids from "
        f"{chat.vocab_size - len(chat.words)} on"
      )

  async def _begin(self) -> progress_lib.Progress:
    """Returns a run before its first round; a warm start is saved."""
    self._note_tokenizer()
    parts, experiment = self._parts, self._experiment
    if experiment.warm_start is None:
      state = await initial_state.create(parts, self._screen.phase)
      return progress_lib.beginning(state, parts.tasks.cursor)
    files = warm_start_files.WarmStartFiles(
      self._dir,
      experiment,
      parts.spans,
      self._screen.note,
      functools.partial(initial_state.fetched, parts),
      self._check,
      self._tracker,
    )
    with contextlib.closing(files), self._signals.calling(files.stop):
      state = await initial_state.create(
        parts, self._screen.phase, files, self._start_engines
      )
    progress = progress_lib.beginning(state, parts.tasks.cursor)
    await self.on_boundary(progress)
    self._wait_for_save()
    warm_start_files.forget(self._dir)
    if self._signals.number:  # It came after the last step.
      raise asyncio.CancelledError
    return progress

  def _checkpoint_name(self, trained: int) -> str:
    """Returns "round 3" or "the warm start"."""
    if trained or self._experiment.warm_start is None:
      return f"round {trained}"
    return "the warm start"

  # The observer.

  async def on_round(self, trained: progress_lib.TrainedRound) -> None:
    """Writes and shows the metrics of a round and a few of its episodes."""
    self._check()
    groups = trained.groups
    time_s = time.monotonic() - self._parts.spans.origin
    repetition = rollout_samples.repetition(groups)
    metrics = {
      **trained.metrics,
      **memory_use.metrics(jax.local_devices()),
      "repetition": repetition,
      "time_s": time_s,
    }
    self._metrics.write(int(metrics["round"]), metrics)
    self._screen.update(metrics, str(round_warnings.of_groups(groups) or ""))
    if self._startup is not None:
      self._screen.note("\n".join(self._startup.end()))
      self._startup = None
    warnings = self._warnings.after(metrics, groups)
    for line in [*warnings, *self._parts.player.starts.warnings()]:
      self._screen.warn(line)
    every = self._experiment.retention.episodes_every
    if (number := int(metrics["round"])) % every == 1 % every:
      if trained.gap is not None:
        rollout_samples.write_gap(self._dir, number, trained.gap)
      rollout_samples.write(
        self._dir,
        number,
        groups[:_EPISODES_KEPT],
        trained.advantages[:_EPISODES_KEPT],
        trained.by_token[:_EPISODES_KEPT],
        self._parts.chat,
      )
      rollout_samples.keep_newest(
        self._dir, self._experiment.retention.episodes
      )
    self._flush()

  def held(self) -> str:
    """Returns why publishing is held back, if a metric left its bound."""
    return self._warnings.held

  def _flush(self) -> None:
    self._parts.log.flush()
    self._parts.spans.flush()

  async def on_published(self, version: int) -> None:
    """Evaluates every few versions."""
    every = self._experiment.evaluation.every
    if every and version % every == 0:
      await self._evaluate(version)

  async def on_boundary(self, progress: progress_lib.Progress) -> None:
    """Saves every few rounds, at the end and after a signal.

    Raises:
      round_warnings.Hopeless: this round is saved.
    """
    trained, hopeless = progress.trained, self._warnings.hopeless
    due = trained % self._experiment.retention.checkpoint_every == 0
    last = trained == self._experiment.rounds
    if due or last or self._signals.number or hopeless:
      await self._save(progress)
      self._trim_logs()
    if hopeless:
      raise hopeless

  def _trim_logs(self) -> None:
    """Deletes what logs have too much, as far as no checkpoint needs it."""
    if rounds := workdir.saved_rounds(self._dir):
      self._retention.trim_later(rounds[0])

  async def _save(self, progress: progress_lib.Progress) -> None:
    """Starts a checkpoint, unless this round is saved already."""
    trained = progress.trained
    if trained == self._saved:
      return
    what = (
      f"the checkpoint of {self._checkpoint_name(trained)}, or that before it,"
    )
    if not self._experiment.repeatable:
      # The loop goes on meanwhile: workers leave a run that does not answer.
      await self._parts.watchdog.wait(
        self._checkpoints.written(),
        owner="the run",
        what=f"{what} to be written",
        deadline_s=self._experiment.progress_timeout_s,
      )
    now = await initial_state.fetched(self._parts, progress)
    self._check()
    with (
      self._parts.spans.span("host", "checkpoint", round=trained),
      self._waiting_for_disk(what),
      self._checkpoints.saving(what),
    ):
      initial_state.save(self._checkpoints, now)
    self._saved = trained

  async def _evaluate_alone(self, version: int) -> None:
    """Evaluates outside the rounds, where only this watches the deadline."""
    with self._guarding():
      await self._parts.watchdog.wait(
        self._evaluate(version, self._screen.phase),
        owner="the run",
        what=f"the evaluation of version {version}",
        deadline_s=self._experiment.progress_timeout_s,
        renew_on_heartbeat=True,
      )

  async def _evaluate(
    self, version: int, report: Callable[[str], None] = lambda text: None
  ) -> None:
    settings = self._experiment.evaluation
    if not settings.episodes or version == self._evaluated:
      return
    self._evaluated = version
    with self._parts.spans.span("host", "evaluate", version=version):
      outcome, _ = await evaluate.evaluate(
        self._parts.player,
        episodes=settings.episodes,
        temperature=settings.temperature,
        success=settings.success,
        seed=self._experiment.seed,
        report=report,
      )
    time_s = time.monotonic() - self._parts.spans.origin
    row = {"version": version, "time_s": time_s, **dataclasses.asdict(outcome)}
    self._check()
    self._metrics.evaluation(version, row)
    self._screen.evaluation(outcome.success, outcome.low, outcome.high)
    if warning := round_warnings.of_evaluation(version, outcome):
      self._screen.warn(warning)

  def _wait_for_save(self) -> None:
    with self._saving_last():
      self._checkpoints.wait()

  @contextlib.contextmanager
  def _saving_last(self) -> Iterator[None]:
    name = f"the checkpoint of {self._checkpoint_name(self._saved)}"
    # After the rounds as well, where nothing else ends a disk that hangs.
    with (
      self._guarding(),
      self._waiting_for_disk(name),
      self._checkpoints.saving(name),
    ):
      yield

  def _waiting_for_disk(self, what: str) -> watchdog_lib.Listed:
    return self._parts.watchdog.track(
      owner="the run",
      what=f"{what} to be written",
      deadline_s=self._experiment.progress_timeout_s,
    )

  @contextlib.contextmanager
  def _guarding(self) -> Iterator[None]:
    """Ends a run whose event loop is blocked for too long; may be nested."""
    if self._is_guarded:
      yield
      return
    self._is_guarded = True
    try:
      with blocked_loop.guard(
        self._parts.watchdog,
        self._experiment.progress_timeout_s,
        functools.partial(_fail, self._dir, self._screen),
        f"; to go on:\n  {workdir.command()}",
      ):
        yield
    finally:
      self._is_guarded = False

  def _close_checkpoints(self) -> None:
    with self._saving_last():
      self._checkpoints.close()

  def _cancelled(self) -> int:
    """Ends a run that a signal cancelled outside its rounds."""
    self._wait_for_save()
    if not workdir.has_saved(self._dir):
      self._screen.note("stopped before the first round: nothing to save")
    else:
      saved = self._checkpoint_name(max(0, self._saved))
      self._screen.note(
        f"stopped: the checkpoint of {saved} stays; to go on:\n"
        f"  {workdir.command()}"
      )
    return 128 + self._signals.number

  def _stopped(self) -> int:
    """Ends a run that a signal stopped between two rounds."""
    self._signals.interrupt()
    self._wait_for_save()
    is_last = self._saved >= self._experiment.rounds
    note = f"saved after {'all ' * is_last}{self._saved} rounds"
    if not (is_last and self._is_evaluated(self._saved)):
      aim = "evaluate" if is_last else "go on"
      note += f"; to {aim}:\n  {workdir.command()}"
    self._screen.note(note)
    return self._conclude() or 128 + self._signals.number

  def _finish(self) -> int:
    self._signals.interrupt()
    self._wait_for_save()
    return self._conclude()

  def _conclude(self) -> int:
    """Writes trace and report; returns 1 if an invariant broke, else 0."""
    self._retention.close()
    self._flush()
    self._screen.phase("checking the log and writing the report")
    try:
      return summary.conclude(self._dir, self._meter.take(), self._screen.note)
    finally:
      self._screen.play()
