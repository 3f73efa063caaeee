"""Files of a warm start in the directory of its run, and its stops.

warm_start.jsonl         one line per step
warm_start/N             checkpoint after N steps, until the run has its own
tensorboard/warm_start   the numbers of the lines, as warm_start/loss and so on
"""

import pathlib
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping

from launch.cli import workdir
from launch.run import metrics_writer
from rl import experiment as experiment_lib
from rl import initial_state
from rl.loop import trackers, warm_start
from rl.runtime import checkpoint, line_file, trace

_COLUMNS = ("loss", "grad_norm", "tokens", "entropy", "skipped")
_OPTIONAL = (
  *("accuracy", "margin"),
  *(f"{warm_start.EVAL}{name}" for name in warm_start.MEASURED),
)


class WarmStartStopped(Exception):
  """The warm start was stopped; the message names the saved step."""


class WarmStartFiles(warm_start.WarmStartObserver):
  """The observer of a warm start, and the only writer of its files.

  `initial_state.create` calls the `on_` methods. A line has `step` (counted
  from 1), `loss` in nats, `grad_norm`, sampled `tokens`, `entropy` in
  nats, whether it was `skipped`, `step_s` since the line before, and `time_s`
  since the run began; of pairs their `accuracy` and `margin`; and `eval/<name>`
  of held-out rows where they were measured.
  The file has each step once: a continued run cuts lines after its checkpoint.

  Attributes:
    checkpoints: of the warm start.
  """

  def __init__(
    self,
    run_dir: pathlib.Path,
    experiment: experiment_lib.Experiment,
    spans: trace.Trace,
    note: Callable[[str], None],
    fetched: Callable[[warm_start.Imitation], Awaitable[warm_start.Imitation]],
    check: Callable[[], None] = lambda: None,
    tracker: trackers.Tracker | None = None,
  ):
    """Opens the checkpoints only; `on_begin` opens the lines.

    Args:
      experiment: has a warm start.
      note: shows a line to the user.
      fetched: see `initial_state.fetched`.
      check: called before each write; see `workdir.held`.
      tracker: takes the numbers too; whoever opened it closes it.
    """
    assert experiment.warm_start is not None
    self.checkpoints = self._saved = checkpoint.Checkpoints(
      run_dir / workdir.WARM_START, experiment.retention.checkpoints
    )
    self._dir, self._settings = run_dir, experiment.warm_start
    self._spans, self._note = spans, note
    self._fetched, self._check = fetched, check
    self._trackers = [] if tracker is None else [tracker]
    self._board = None
    self._stopping = False
    self._lines = None

  def stop(self) -> None:
    """Ends the warm start after the current step."""
    self._stopping = True

  def close(self) -> None:
    """Waits for the last checkpoint; all of them stay on disk."""
    self._saved.close()
    if self._board is not None:
      self._board.close()

  def on_begin(self, found: checkpoint.Restored | None, steps: int) -> None:
    """Cuts the lines back to the step from which the warm start continues.

    Raises:
      checkpoint.Unsaved: all checkpoints are damaged.
    """
    taken, self._steps = 0, steps
    if found is None:
      workdir.check_none_damaged(self._dir, workdir.WARM_START)
    else:
      taken = found.step
      for name in found.skipped:
        self._note(f"warm start: checkpoint {name} is damaged and was left out")
      self._note(f"going on after {self._of(taken)}")
    path = self._dir / workdir.WARM_START_LINES
    metrics_writer.cut_back(path, taken + 1, "step")
    self._lines = line_file.LineFile(path)
    # In a place of its own: rounds, which count anew, would purge it.
    board = self._dir / "tensorboard" / workdir.WARM_START
    self._board = metrics_writer.Board(board, taken + 1)
    self._trackers.append(self._board)
    self._mark_s = time.monotonic()

  def on_step(self, number: int, metrics: Mapping[str, float]) -> None:
    """Writes one line, and tells what was measured on held-out rows."""
    assert self._lines is not None
    self._check()
    before_s, self._mark_s = self._mark_s, time.monotonic()
    names = [*_COLUMNS, *(n for n in _OPTIONAL if n in metrics)]
    row = {name: metrics[name] for name in names} | {
      "step_s": self._mark_s - before_s,
      "time_s": self._mark_s - self._spans.origin,
    }
    self._lines.append([metrics_writer.json_line(number, row, "step")])
    numbers = metrics_writer.finite_numbers(row)
    numbers = {f"{workdir.WARM_START}/{name}": x for name, x in numbers.items()}
    for tracker in self._trackers:
      tracker.write(numbers, number)
    measured = [
      f"{name.removeprefix(warm_start.EVAL)} {row[name]:.3f}"
      for name in names
      if name.startswith(warm_start.EVAL)
    ]
    if measured:
      words = ", ".join(measured)
      self._note(f"held-out rows after {self._of(number)}: {words}")

  async def on_boundary(self, now: warm_start.Imitation) -> None:
    """Saves every few steps and when stopped.

    After the last step the run saves a checkpoint of its own.

    Raises:
      WarmStartStopped: `stop` was called.
      checkpoint.Unsaved: the checkpoint could not be saved.
    """
    due = now.trained % self._settings.checkpoint_every == 0
    due = due and now.trained < self._steps
    if not (due or self._stopping):
      return
    now = await self._fetched(now)
    self._check()
    what = f"the checkpoint after {self._of(now.trained)}, or that before it,"
    with (
      self._saved.saving(what),
      self._spans.span("host", "checkpoint", step=now.trained),
    ):
      initial_state.save(self._saved, now)
      if self._stopping:
        self._saved.wait()
    if self._stopping:
      raise WarmStartStopped(f"saved after {self._of(now.trained)}")

  def _of(self, taken: int) -> str:
    return f"{taken} of {self._steps} steps of the warm start"


def forget(run_dir: pathlib.Path) -> None:
  """Removes the checkpoints of the warm start once the run has its own."""
  shutil.rmtree(run_dir / workdir.WARM_START, ignore_errors=True)
