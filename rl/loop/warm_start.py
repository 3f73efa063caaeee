"""The warm start: supervised steps, on demonstrations or recorded chats.

Supervision.batches(step) -> packed rows -> the same learner jits

The batches of a step depend only on its number and the seed, so a warm start
resumed from a checkpoint repeats one that was never stopped.
"""

import asyncio
import dataclasses
import math
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from envs import base
from rl.data import batch as batch_lib
from rl.data import fault_summary, trajectory
from rl.engine import contract
from rl.rollout import episode, prompts
from rl.runtime import checkpoint, mesh_thread
from rl.settings import checks
from rl.train import learner, optimizers, train_state

EVAL = "eval/"
"""Prefix of what is measured on held-out rows."""
MEASURED = ("loss", "accuracy", "margin")
"""Metrics of held-out rows, where the loss has them."""


class NoDemonstration(Exception):
  """Faults left a step of the warm start nothing to train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
  """Supervised steps on noisy demonstrations of the environment's oracle.

  Attributes:
    steps: optimizer steps, each on fresh demonstrations.
    episodes: demonstrations of a step.
    exploration: share of random answers instead of the oracle's.
    optimizer: its own; the run's starts afresh afterwards.
    checkpoint_every: steps between checkpoints, until the run has its own.
  """

  steps: int = 60
  episodes: int = 64
  exploration: float = 0.7
  optimizer: optimizers.Optimizer = optimizers.AdamW(learning_rate=1e-3)
  checkpoint_every: int = 25

  def validate(self) -> None:
    """Raises ValueError on counts below 1 or a share outside [0, 1]."""
    out = "set warm_start=none to go without"
    checks.at_least(self, 1, "steps", "episodes", out=out)
    out = f"it counts steps, and {self.steps} saves nothing on the way"
    checks.at_least(self, 1, "checkpoint_every", out=out)
    checks.in_unit(self, "exploration")


@dataclasses.dataclass(frozen=True, eq=False)
class Imitation:
  """The progress of a warm start.

  Attributes:
    state: after `trained` steps; valid until the next one.
    skipped: steps skipped in a row, up to this one.
    loss: of the last step, in nats a token; nan before the first.
  """

  state: train_state.TrainState
  trained: int = 0
  skipped: int = 0
  loss: float = math.nan

  def to_host(self) -> dict[str, Any]:
    """Returns everything but the arrays of the state, as JSON data."""
    loss = self.loss if math.isfinite(self.loss) else None
    return {"trained": self.trained, "skipped": self.skipped, "loss": loss}


def from_host(
  state: train_state.TrainState, host: Mapping[str, Any]
) -> Imitation:
  """Returns the imitation that `Imitation.to_host` described."""
  loss = math.nan if host["loss"] is None else host["loss"]
  return Imitation(state, host["trained"], host["skipped"], loss)


class WarmStartObserver:
  """Hooks of a warm start, called between steps; override some.

  Attributes:
    checkpoints: to continue from; None begins afresh.
  """

  checkpoints: checkpoint.Checkpoints | None = None

  def on_begin(self, found: checkpoint.Restored | None, steps: int) -> None:
    """Called before the first of `steps`, with the checkpoint it continues."""

  def on_step(self, number: int, metrics: Mapping[str, float]) -> None:
    """Called when step `number`, counted from 1, was taken or skipped."""

  async def on_boundary(self, now: Imitation) -> None:
    """Called when it may be saved as it is now; an exception ends it."""


async def demonstrate(
  source: base.Source,
  chat: episode.Chat,
  limits: episode.Limits,
  task: base.Task,
  exploration: float,
  seed: int,
) -> trajectory.Trajectory:
  """Returns one episode played by the oracle, with random answers mixed in."""
  partial = episode.PartialTrajectory(
    episode.Episode(task, task.index, 0, seed)
  )
  player = base.demonstrator(source)

  async def demonstrate_answer(
    request: contract.DecodeRequest,
  ) -> contract.Completion:
    # The seed of the request decides which answers are random.
    answer_seed = zlib.crc32(request.tokens.tobytes(), request.seed)
    if np.random.default_rng(answer_seed).random() < exploration:
      said = player.explore(task, partial.messages, answer_seed)
      said = episode.checked_answer(said, "explore")
    else:
      said = player.oracle(task, partial.messages)
      said = episode.checked_answer(said, "oracle")
    return episode.given_answer(chat, said, request.max_tokens)

  demonstration, _ = await episode.play(
    source, demonstrate_answer, chat, limits, partial
  )
  return demonstration


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Supervision:
  """The batches of supervised steps.

  Attributes:
    steps: their number.
    batches: returns the micro-batches of a step, counted from 0.
    held_out: batches that are only measured, if there are any.
    eval_every: steps between two measurements; the last step has one, too.
  """

  steps: int
  batches: Callable[[int], Coroutine[Any, Any, Sequence[batch_lib.Batch]]]
  held_out: Sequence[batch_lib.Batch] = ()
  eval_every: int = 0


def demonstrations(
  settings: WarmStart,
  source: base.Source,
  chat: episode.Chat,
  limits: episode.Limits,
  *,
  rows: int,
  length: int,
  seed: int,
) -> Supervision:
  """Returns fresh demonstrations of an oracle for each step.

  Its `batches` raises NoDemonstration where no demonstration could be played.

  Args:
    rows, length: shape of the packed batches.
  """

  async def batches(step: int) -> Sequence[batch_lib.Batch]:
    usable = await _demonstrations(settings, step, source, chat, limits, seed)
    packed = batch_lib.pack(usable, rows=rows, length=length, version=0)
    return packed.batches

  return Supervision(steps=settings.steps, batches=batches)


async def _demonstrations(
  settings: WarmStart,
  step: int,
  source: base.Source,
  chat: episode.Chat,
  limits: episode.Limits,
  seed: int,
) -> list[trajectory.Trajectory]:
  """Returns the usable demonstrations of a step, counted from 0."""
  first = step * settings.episodes
  episodes = await asyncio.gather(
    *(
      demonstrate(
        source,
        chat,
        limits,
        prompts.task_of(source, first + i, "train"),
        settings.exploration,
        seed,
      )
      for i in range(settings.episodes)
    )
  )
  usable = [e for e in episodes if e.num_sampled and e.status.trainable]
  if not usable:
    fault = fault_summary.most_frequent(episodes) or "none has an answer"
    raise NoDemonstration(
      f"warm_start: of {len(episodes)} demonstrations of {source.name} none "
      f"can be trained on: {fault}; launch.try_environment plays it without a "
      "model"
    )
  return usable


async def run(
  supervision: Supervision,
  programs: learner.Learner,
  now: Imitation,
  thread: mesh_thread.MeshThread,
  *,
  reference: learner.ScoreProgram | None = None,
  max_skipped: int,
  observer: WarmStartObserver,
  report: Callable[[str], None] = lambda text: None,
) -> train_state.TrainState:
  """Returns the state after all steps.

  A step whose loss or gradient is not finite changes nothing.

  Args:
    programs: with the loss and the optimizer of the warm start.
    now: the progress to start from.
    reference: scores tokens under the policy that ratios are against; None if
      the loss has no ratio.
    max_skipped: steps in a row that may be skipped.

  Raises:
    FloatingPointError: more were skipped.
  """
  metrics: dict[str, float] = {}
  steps = range(now.trained, supervision.steps)
  batches = await supervision.batches(steps.start) if steps else ()
  for step in steps:
    report(f"warm start {step + 1}/{supervision.steps}")
    running = thread.submit(
      "warm start", _step, programs, reference, now.state, batches
    )
    if step + 1 in steps:  # Made while the mesh computes.
      batches = await supervision.batches(step + 1)
    state, metrics = await running
    skipped = now.skipped + 1 if metrics["skipped"] else 0
    now = Imitation(state, step + 1, skipped, metrics["loss"])
    if _is_due(supervision, now.trained):
      metrics |= await thread.run(
        "evaluate", _measure, programs, reference, state, supervision.held_out
      )
    observer.on_step(now.trained, metrics)
    if skipped > max_skipped:
      raise FloatingPointError(
        f"warm_start: steps in a row whose loss or gradient is not finite: "
        f"{skipped}; the last, step {now.trained}, has loss {now.loss} and "
        f"gradient norm {metrics['grad_norm']}. Use a lower "
        "warm_start.optimizer.learning_rate"
      )
    await observer.on_boundary(now)
  report(f"warm start done: loss {now.loss:.3f}")
  return now.state


def _is_due(supervision: Supervision, taken: int) -> bool:
  every, last = supervision.eval_every, taken == supervision.steps
  due = last or (every > 0 and taken % every == 0)
  return due and len(supervision.held_out) > 0


def _step(
  programs: learner.Learner,
  reference: learner.ScoreProgram | None,
  state: train_state.TrainState,
  batches: Sequence[batch_lib.Batch],
) -> tuple[train_state.TrainState, dict[str, float]]:
  total = None
  for batch in batches:
    scored = _with_old(reference, state, batch)
    total = programs.accumulate(state.params, total, scored, state.critic)
  assert total is not None  # There is a batch.
  return programs.step(state, total)


def _measure(
  programs: learner.Learner,
  reference: learner.ScoreProgram | None,
  state: train_state.TrainState,
  batches: Sequence[batch_lib.Batch],
) -> dict[str, float]:
  scored = (_with_old(reference, state, batch) for batch in batches)
  found = programs.measure(state.params, scored)
  return {f"{EVAL}{name}": found[name] for name in MEASURED if name in found}


def _with_old(
  reference: learner.ScoreProgram | None,
  state: train_state.TrainState,
  batch: batch_lib.Batch,
) -> Any:
  """Returns a batch with the reference as the policy that ratios are against.

  What it scores stays on the mesh.
  """
  if reference is None:
    return batch
  return batch._replace(old=reference(state, batch))
