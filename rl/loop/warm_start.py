"""A short supervised start: imitate noisy demonstrations of an oracle.

oracle -> environment -> Trajectory -> packed rows -> the same learner jits

What a step sees follows from its number and the seed alone, so a warm start
that goes on from a checkpoint repeats one that was never stopped.
"""

import asyncio
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from envs import base
from rl.data import batch as batch_lib
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode
from rl.runtime import checkpoint, mesh_thread
from rl.settings import checks
from rl.train import learner, optimizers, train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
  """Supervised steps before reinforcement learning.

  Attributes:
    steps: optimizer steps, each on fresh demonstrations.
    episodes: demonstrations of a step.
    exploration: share of answers that are random instead of the oracle's.
    optimizer: of its own; the run's starts afresh afterwards.
    checkpoint_every: steps between checkpoints, until the run has its own.
  """

  steps: int = 60
  episodes: int = 64
  exploration: float = 0.7
  optimizer: optimizers.Optimizer = dataclasses.field(
    default_factory=lambda: optimizers.AdamW(learning_rate=1e-3)
  )
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
  """How far a warm start is: all that going on with it needs.

  Attributes:
    state: after `trained` steps; valid until the next one.
    skipped: how many steps in a row were skipped, up to this one.
    loss: of the last step, in nats a token; nan before the first.
  """

  state: train_state.TrainState
  trained: int = 0
  skipped: int = 0
  loss: float = math.nan

  def to_host(self) -> dict[str, Any]:
    """Returns all but the state as JSON data."""
    loss = self.loss if math.isfinite(self.loss) else None
    return {"trained": self.trained, "skipped": self.skipped, "loss": loss}


def from_host(
  state: train_state.TrainState, host: Mapping[str, Any]
) -> Imitation:
  """Returns the imitation that `Imitation.to_host` described."""
  loss = math.nan if host["loss"] is None else host["loss"]
  return Imitation(state, host["trained"], host["skipped"], loss)


class Observer(Protocol):
  """Who is told; called on the event loop, between steps.

  Attributes:
    checkpoints: where the warm start goes on from; None begins afresh.
  """

  checkpoints: checkpoint.Checkpoints | None

  def on_begin(self, found: checkpoint.Restored | None) -> None:
    """The warm start goes on from a checkpoint, or begins without one."""
    ...

  def on_step(self, number: int, metrics: Mapping[str, float]) -> None:
    """A step was taken or skipped; they are counted from 1."""
    ...

  def on_boundary(self, now: Imitation) -> None:
    """It may be saved as it is now; whatever is raised here ends it."""
    ...


class Unobserved:
  """An observer who keeps nothing."""

  checkpoints: checkpoint.Checkpoints | None = None

  def on_begin(self, found: checkpoint.Restored | None) -> None:
    """Does nothing."""

  def on_step(self, number: int, metrics: Mapping[str, float]) -> None:
    """Does nothing."""

  def on_boundary(self, now: Imitation) -> None:
    """Does nothing."""


UNOBSERVED = Unobserved()


@dataclasses.dataclass(eq=False)
class _Demonstrator:
  """A decode engine that answers with the oracle's words.

  It serves one task; `seed` of the request decides which answers are random.

  Attributes:
    messages: what both sides have said; whoever plays extends it.
  """

  source: base.Source
  task: base.Task
  exploration: float
  encode: Callable[[str], Int32[np.ndarray, " T"]]
  messages: list[base.Message]

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    seed = zlib.crc32(request.tokens.tobytes(), request.seed)
    if np.random.default_rng(seed).random() < self.exploration:
      text = self.source.explore(self.task, self.messages, seed)
    else:
      text = self.source.oracle(self.task, self.messages)
    tokens = np.asarray(self.encode(text), np.int32)
    return contract.Completion(
      tokens=tokens,
      logprobs=np.zeros(len(tokens), np.float32),
      versions=np.zeros(len(tokens), np.int32),
      stop="stop",
      cached_tokens=0,
      decode_s=0.0,
    )


async def demonstrate(
  source: base.Source,
  chat: episode.Chat,
  limits: episode.Limits,
  task: base.Task,
  exploration: float,
  seed: int,
) -> trajectory.Trajectory:
  """Returns one episode played by the oracle, with random answers mixed in."""
  record = episode.Record(episode.Episode(task, task.index, 0, seed))
  demonstrator = _Demonstrator(
    source, task, exploration, chat.encode_answer, record.messages
  )
  played, _ = await episode.play(source, demonstrator, chat, limits, record)
  return played


async def run(
  settings: WarmStart,
  programs: learner.Learner,
  now: Imitation,
  thread: mesh_thread.MeshThread,
  *,
  source: base.Source,
  chat: episode.Chat,
  limits: episode.Limits,
  rows: int,
  length: int,
  seed: int,
  max_skipped: int,
  observer: Observer,
  report: Callable[[str], None] = lambda text: None,
) -> train_state.TrainState:
  """Returns the state after `settings.steps` of imitation.

  A step whose loss or gradient is not finite changes nothing.

  Args:
    programs: built with `losses.NegativeLogLikelihood` and the optimizer of
      `settings`.
    now: where it begins, or goes on.
    rows, length: shape of the packed batches.
    max_skipped: steps in a row that may be skipped.

  Raises:
    FloatingPointError: more were.
    RuntimeError: no demonstration could be played.
  """
  for step in range(now.trained, settings.steps):
    report(f"warm start {step + 1}/{settings.steps}")
    usable = await _demonstrations(settings, step, source, chat, limits, seed)
    packed = batch_lib.pack(usable, rows=rows, length=length, version=0)
    state, metrics = await thread.run(
      "warm start", _step, programs, now.state, packed.batches
    )
    skipped = now.skipped + 1 if metrics["skipped"] else 0
    now = Imitation(state, step + 1, skipped, metrics["loss"])
    observer.on_step(now.trained, metrics)
    if skipped > max_skipped:
      raise FloatingPointError(
        f"warm_start: steps in a row whose loss or gradient is not finite: "
        f"{skipped}; the last, step {now.trained}, has loss {now.loss} and "
        f"gradient norm {metrics['grad_norm']}. Use a lower "
        "warm_start.optimizer.learning_rate"
      )
    observer.on_boundary(now)
  report(f"warm start done: loss {now.loss:.3f} nats a token")
  return now.state


async def _demonstrations(
  settings: WarmStart,
  step: int,
  source: base.Source,
  chat: episode.Chat,
  limits: episode.Limits,
  seed: int,
) -> list[trajectory.Trajectory]:
  """Returns those of a step that can be learned from, counted from 0."""
  first = step * settings.episodes
  episodes = await asyncio.gather(
    *(
      demonstrate(
        source,
        chat,
        limits,
        source.task(first + i, "train"),
        settings.exploration,
        seed,
      )
      for i in range(settings.episodes)
    )
  )
  usable = [e for e in episodes if e.num_sampled and e.status.trainable]
  if not usable:
    raise RuntimeError(
      f"no demonstration of {source.name} succeeded: {episodes[0].fault}"
    )
  return usable


def _step(
  programs: learner.Learner,
  state: train_state.TrainState,
  batches: Sequence[batch_lib.Batch],
) -> tuple[train_state.TrainState, dict[str, float]]:
  total = programs.zero()
  for batch in batches:
    total = programs.accumulate(state.params, total, batch, state.critic)
  return programs.step(state, total)
