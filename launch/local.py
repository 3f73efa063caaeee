"""One process: every role a task on one event loop.

restore or start afresh -> engine up -> evaluate -> rounds -> evaluate
                                          |  (metrics, checkpoints)
                          Ctrl-C, SIGTERM -+-> save, say how to go on

However it ends, what its log shows is said.
"""

import asyncio
import contextlib
import dataclasses
import gc
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float32

from launch import check, display, report, run_files, workdir
from models import load, tokenizer_files
from rl import (
  assemble,
  checkpoint,
  config,
  coordinator,
  evaluate,
  quarantine,
  recorder,
  trace,
  trajectory,
  watchdog,
)
from rl import metrics as metrics_lib
from rl import progress as progress_lib

_EPISODES_KEPT = 4
_LOOP_LAG_S = 30.0


def train(experiment: config.Experiment, path: str | os.PathLike) -> int:
  """Runs an experiment in its claimed directory; returns the exit code.

  0: all rounds are done and every invariant held. 1: an invariant broke,
  something stalled, gradients were no longer finite, or a checkpoint could not
  be written or read. 2: what `initial` holds cannot be used. 128 + signal:
  stopped; what was saved stays.
  """
  run_dir = pathlib.Path(path)
  screen = display.Display(experiment.rounds, sys.stdout)
  screen.start()
  try:
    return asyncio.run(_Run(experiment, run_dir, screen).train())
  except load.Unusable as error:
    screen.note(f"error: initial={error}")
    return 2
  except (watchdog.Stalled, checkpoint.Mismatch, Unsaved) as error:
    screen.note(f"error: {error}")
    return 1
  except FloatingPointError as error:
    screen.note(f"error: {error}")
    for path in quarantine.kept(run_dir / "skipped")[-1:]:
      screen.note(f"what is wrong with it:\n  python -m launch.replay {path}")
    return 1
  finally:
    screen.close()


class Unsaved(Exception):
  """A checkpoint could not be written, or none of those there can be read."""


class _Run:
  """The coordinator's observer: metrics, evaluations and checkpoints."""

  def __init__(
    self,
    experiment: config.Experiment,
    run_dir: pathlib.Path,
    screen: display.Display,
  ):
    self._experiment = experiment
    self._dir = run_dir
    self._screen = screen
    self._parts = assemble.build(experiment, run_dir, screen.note)
    self._checkpoints = checkpoint.Checkpoints(
      run_dir / "checkpoints", experiment.keeping.checkpoints
    )
    self._closing = contextlib.ExitStack()
    self._saved = -1
    self._evaluated = -1
    self._signal = 0
    self._meter = trace.Meter()

  async def train(self) -> int:
    """Runs to the last round, or to a signal."""
    parts = self._parts
    loop = asyncio.get_running_loop()
    current = asyncio.current_task()
    assert current is not None
    self._stop = current.cancel
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.add_signal_handler(number, self._on_signal, number)
    try:
      return await self._train(parts)
    except (asyncio.CancelledError, KeyboardInterrupt):
      if not self._signal:
        raise
      return self._cut_off()
    finally:
      await parts.close()
      self._closing.close()
      self._checkpoints.close()

  def _on_signal(self, number: int) -> None:
    if self._signal:  # The user insists.
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
    self._signal = number
    self._screen.note("stopping at the next safe point; again to end at once")
    self._stop()

  async def _train(self, parts: assemble.Parts) -> int:
    progress = await self._begin()
    with self._checked_on_failure():
      if progress.trained >= self._experiment.rounds:
        return await self._complete(progress)
      await self._open(progress)
      await self._evaluate_apart(progress.trained)
      await self._rounds(progress)
      if self._signal:
        return self._stopped()
      await self._evaluate_apart(self._experiment.rounds)
      return self._finish()

  async def _rounds(self, progress: progress_lib.Progress) -> None:
    """Returns after the last round, or where a signal stopped the loop."""
    parts = self._parts
    parts.spans.listeners.append(self._meter.add)
    loop = assemble.coordinate(parts, self)
    cancel, self._stop = self._stop, loop.stop
    # What lives as long as the run need not be looked at again: the event loop
    # would stand still for 0.1 s each time.
    gc.collect()
    gc.freeze()
    try:
      with parts.dog.guard(loop_lag_s=_LOOP_LAG_S):
        await loop.run(progress)
    except coordinator.Stopped:
      pass
    finally:
      self._stop = cancel
      parts.spans.listeners.remove(self._meter.add)

  async def _complete(self, progress: progress_lib.Progress) -> int:
    """Makes up for what a kill after the last checkpoint left undone.

    Of a run of no rounds that is all there is after its warm start.
    """
    code = 0
    await self.on_boundary(progress)
    if not self._is_evaluated(progress.trained):
      await self._open(progress)
      await self._evaluate_apart(progress.trained)
      code = self._finish()
    elif not self._is_reported(progress.trained):
      code = self._finish()
    self._screen.note(
      f"{self._dir} has all its {progress.trained} rounds; raise "
      "--config.rounds to go on"
    )
    return code

  def _is_evaluated(self, trained: int) -> bool:
    if not self._experiment.evaluation.episodes:
      return True
    rows = run_files.lines(self._dir / "evaluations.jsonl", [])
    return trained in [row["round"] for row in rows]

  def _is_reported(self, trained: int) -> bool:
    page = self._dir / "report.html"
    saved = self._dir / "checkpoints" / str(trained)
    return page.exists() and page.stat().st_mtime >= saved.stat().st_mtime

  async def _open(self, progress: progress_lib.Progress) -> None:
    """Opens the metrics and lets the engine serve."""
    self._metrics = metrics_lib.MetricsWriter(
      self._dir, first_round=progress.trained + 1
    )
    self._closing.callback(self._metrics.close)
    await self._parts.start(
      progress.state,
      trajectory.PolicyVersion(progress.trained),
      self._screen.phase,
    )

  async def _begin(self) -> progress_lib.Progress:
    parts = self._parts
    self._screen.phase("looking for a checkpoint")
    found = await assemble.restore(parts, self._checkpoints)
    if found is None:
      self._check_none_damaged()
      self._note_tokenizer()
      state = await assemble.initial_state(parts, self._screen.phase)
      return progress_lib.beginning(state, parts.tasks.cursor)
    for name in found.skipped:
      self._screen.note(f"checkpoint {name} is damaged and was left out")
    self._screen.note(f"going on after {found.step} rounds")
    self._saved = found.step
    parts.tasks.seek(found.host["cursor"])
    return progress_lib.from_host(found.state, found.host)

  def _note_tokenizer(self) -> None:
    """Says so when initial weights meet their words under other ids."""
    source, chat = self._experiment.initial, self._parts.chat
    if source is not None and tokenizer_files.is_other(chat, source):
      self._screen.note(
        f"initial={source}: its tokenizer is not used; the words of "
        f"{self._experiment.environment.name} take the ids from "
        f"{chat.vocab_size - len(chat.words)} on"
      )

  def _check_none_damaged(self) -> None:
    """Raises when there are checkpoints: a run must not start over unasked."""
    names = workdir.checkpoints(self._dir)
    if names:
      raise Unsaved(
        f"no checkpoint in {self._dir}/checkpoints can be read; all are "
        f"damaged: {', '.join(names)}. Put a copy of one back, or move that "
        "directory away to start over"
      )

  # The observer.

  async def on_round(
    self,
    metrics: Mapping[str, float],
    groups: Sequence[trajectory.Group],
    values: Sequence[Float32[np.ndarray, " G"]],
  ) -> None:
    """Writes and shows the numbers of a round and a few of its episodes."""
    time_s = time.monotonic() - self._parts.spans.origin
    metrics = {**metrics, "time_s": time_s}
    self._metrics.write(int(metrics["round"]), metrics)
    self._screen.update(metrics)
    every = self._experiment.keeping.episodes_every
    if (number := int(metrics["round"])) % every == 1 % every:
      if (gap := self._parts.trainer.gap) is not None:
        recorder.write_gap(self._dir, number, gap)
      recorder.write(
        self._dir,
        number,
        groups[:_EPISODES_KEPT],
        values[:_EPISODES_KEPT],
        self._parts.chat,
      )
    self._parts.log.flush()
    self._parts.spans.flush()

  async def on_published(self, version: trajectory.PolicyVersion) -> None:
    """Evaluates now and then."""
    every = self._experiment.evaluation.every
    if every and version % every == 0:
      await self._evaluate(int(version))

  async def on_boundary(self, progress: progress_lib.Progress) -> None:
    """Saves every few rounds, at the end and when asked to stop."""
    trained = progress.trained
    due = trained % self._experiment.keeping.checkpoint_every == 0
    last = trained == self._experiment.rounds
    if trained == self._saved or not (due or last or self._signal):
      return
    with self._parts.spans.span("host", "checkpoint", round=trained):
      try:
        assemble.save(self._checkpoints, progress)
      except Exception as error:  # Orbax raises all kinds.
        raise Unsaved(
          f"the checkpoint of round {trained}, or that before it, could not "
          f"be saved: {error!r}"
        ) from error
    self._saved = trained

  async def _evaluate_apart(self, version: int) -> None:
    """As `_evaluate`, outside of the rounds, where nobody else waits for it."""
    await self._parts.dog.wait(
      self._evaluate(version),
      owner="the run",
      what=f"the evaluation of version {version}",
      deadline_s=self._experiment.stall_s,
      in_steps=True,
    )

  async def _evaluate(self, version: int) -> None:
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
      )
    time_s = time.monotonic() - self._parts.spans.origin
    row = {"version": version, "time_s": time_s, **dataclasses.asdict(outcome)}
    self._metrics.evaluation(version, row)
    self._screen.evaluation(outcome.success, outcome.low, outcome.high)

  def _wait_for_save(self) -> None:
    try:
      self._checkpoints.wait()
    except Exception as error:  # Orbax raises all kinds.
      raise Unsaved(
        f"the checkpoint of round {self._saved} could not be saved: {error!r}"
      ) from error

  def _cut_off(self) -> int:
    """Ends a run that a signal cancelled outside of its rounds."""
    self._wait_for_save()
    if self._saved < 0:
      self._screen.note("stopped before the first round: nothing to save")
    else:
      self._screen.note(
        f"stopped: the checkpoint of round {self._saved} stays; to go on:\n"
        f"  {workdir.command()}"
      )
    return 128 + self._signal

  def _stopped(self) -> int:
    """Ends a run that a signal stopped between rounds, where it can go on."""
    self._end_at_signals()
    self._wait_for_save()
    self._screen.note(
      f"saved after {self._saved} rounds; to go on:\n  {workdir.command()}"
    )
    return self._conclude() or 128 + self._signal

  def _finish(self) -> int:
    self._end_at_signals()
    self._wait_for_save()
    return self._conclude()

  def _end_at_signals(self) -> None:
    """Lets a signal interrupt code that does not await, as it comes."""

    def interrupt(number: int, frame: object) -> None:
      del frame
      signal.signal(number, signal.SIG_DFL)
      self._signal = number
      raise KeyboardInterrupt

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.remove_signal_handler(number)
      signal.signal(number, interrupt)

  @contextlib.contextmanager
  def _checked_on_failure(self) -> Iterator[None]:
    """Says what the log shows before an exception of the body goes on."""
    try:
      yield
    except Exception:
      try:
        self._parts.log.flush()
        self._tell(check.of_run(self._dir))
      except (OSError, check.Unreadable) as error:  # Not what ended the run.
        self._screen.note(f"the log was not checked: {error}")
      raise

  def _tell(self, verdict: check.Verdict) -> int:
    """Says what the log shows; returns 1 when an invariant broke."""
    self._screen.note(verdict.summary)
    for line in verdict.violations:
      self._screen.note(f"error: {line}")
    return 1 if verdict.violations else 0

  def _conclude(self) -> int:
    """Leaves trace and report; returns 1 when an invariant broke."""
    parts = self._parts
    parts.log.flush()
    parts.spans.flush()
    both = self._meter.take()
    self._screen.note(
      f"learner busy {both.first_s:.1f} s, decode busy {both.second_s:.1f} s,"
      f" both at once {both.both_s:.1f} s ({both.share:.0%} of the shorter)"
    )
    trace.write_chrome(
      trace.File(self._dir / "spans.jsonl"), self._dir / "trace.json"
    )
    verdict = check.of_run(self._dir)
    self._screen.note(f"report: {report.write(self._dir, verdict)}")
    return self._tell(verdict)
