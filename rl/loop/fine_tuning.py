"""Fine-tuning on recorded conversations: supervised, or on preferences.

  rows --chat--> Examples --order of each epoch--> steps --> packed batches
                     '---- held out ------------------------> measured

All is encoded before the first step, so a row that cannot be used ends the run
before anything is trained.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from envs import base
from models import config as model_config
from rl.algorithms import losses, preference_loss, references
from rl.data import batch as batch_lib
from rl.data import trajectory
from rl.loop import warm_start
from rl.rollout import episode, recordings
from rl.settings import checks
from rl.train import optimizers

_Example = tuple[trajectory.Trajectory, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
  """Supervised steps on the recorded conversations of the environment.

  Attributes:
    loss: of single conversations or, as `preference_loss.Dpo`, of pairs.
    epochs: times that each example is trained.
    steps: optimizer steps; None are those of the epochs.
    examples: of a step, in an order that the seed decides for each epoch.
    too_long: "drop" leaves out examples that do not fit batch.length, and says
      how many.
    optimizer: its own; the run's starts afresh afterwards.
    eval_every: steps between measurements of the loss on held-out rows; 0: only
      after the last.
    held_out: at most so many held-out examples are measured; 0 measures none.
    checkpoint_every: steps between checkpoints, until the run has its own.
  """

  loss: losses.NegativeLogLikelihood | preference_loss.Dpo = (
    losses.NegativeLogLikelihood()
  )
  epochs: int = 1
  steps: int | None = None
  examples: int = 32
  too_long: recordings.TooLong = "error"
  optimizer: optimizers.Optimizer = optimizers.AdamW(learning_rate=1e-5)
  eval_every: int = 50
  held_out: int = 500
  checkpoint_every: int = 100

  def validate(self) -> None:
    """Raises ValueError on counts below their bounds."""
    names = ("epochs", "steps", "examples", "checkpoint_every")
    checks.at_least(self, 1, *names, where="warm_start")
    checks.at_least(self, 0, "eval_every", "held_out", where="warm_start")


def recorded(source: base.Source, settings: FineTuning) -> base.Recorded:
  """Returns a source that has what the loss is of.

  Raises:
    ValueError: it has not.
  """
  if not isinstance(source, base.Recorded):
    raise ValueError(
      f"environment {source.name} has no recorded conversations for "
      "warm_start=fine_tuning; use one of envs.recordings"
    )
  pairs = isinstance(settings.loss, preference_loss.Dpo)
  if source.paired != pairs:
    wanted, out = ("pairs", "Pairs") if pairs else ("conversations", "Chats")
    checks.refuse(
      settings,
      "loss",
      why=f"it is of {wanted}, which environment {source.name} has not",
      out=f"use envs.recordings.{out}, or the loss that fits",
      where="warm_start",
    )
  return source


def reference(
  settings: FineTuning, model: model_config.ModelConfig
) -> references.Reference | None:
  """Returns the policy that ratios of the loss are against, if it has any."""
  if not settings.loss.has_ratio:
    return None
  return references.Initial() if model.lora is None else references.Base()


def supervision(
  settings: FineTuning,
  source: base.Recorded,
  chat: episode.Chat,
  report: Callable[[str], None],
  *,
  rows: int,
  length: int,
  max_length: int,
  seed: int,
) -> warm_start.Supervision:
  """Returns the batches of all steps, in ids of the chat.

  Args:
    report: told how many examples there are.
    rows, length: shape of the packed batches.
    max_length: tokens of the longest conversation that the model takes.

  Raises:
    recordings.UnusableRow: a row cannot be encoded or does not fit.
  """

  def load(split: base.Split, most: int | None = None) -> Sequence[_Example]:
    found = recordings.load(
      source,
      chat,
      split,
      most,
      length=length,
      max_length=max_length,
      too_long=settings.too_long,
    )
    report(
      f"{len(found.examples)} examples for {split}, {found.dropped} too long"
    )
    return found.examples

  def pack(examples: Sequence[_Example]) -> Sequence[batch_lib.Batch]:
    return _packed(examples, source.paired, rows, length)

  async def batches(step: int) -> Sequence[batch_lib.Batch]:
    first = step * settings.examples
    places = range(first, min(first + settings.examples, total))
    return pack([train[i] for i in order(len(train), places, seed)])

  train = load("train")
  total = len(train) * settings.epochs
  if settings.steps is not None:
    total = settings.steps * settings.examples
  most = settings.held_out
  return warm_start.Supervision(
    steps=math.ceil(total / settings.examples),
    batches=batches,
    held_out=pack(load("eval", most)) if most else (),
    eval_every=settings.eval_every,
  )


def order(count: int, places: range, seed: int) -> list[int]:
  """Returns the examples at some places of the stream of all epochs.

  An epoch has each of `count` examples once, in an order of its own.
  """
  found = []
  for epoch, group in itertools.groupby(places, lambda place: place // count):
    shuffled = np.random.default_rng((seed, epoch)).permutation(count)
    found += [int(shuffled[place % count]) for place in group]
  return found


def _packed(
  examples: Sequence[_Example], paired: bool, rows: int, length: int
) -> Sequence[batch_lib.Batch]:
  """Returns batches; pairs lie side by side, with advantages of +1 and -1."""
  members = [*itertools.chain.from_iterable(examples)]
  packed = batch_lib.pack(
    members, rows=rows, length=length, version=0, pairs=paired
  )
  signs = [
    np.full(one.num_sampled, 1 - 2 * one.index, np.float32) for one in members
  ]
  return batch_lib.with_column(packed, "advantages", signs).batches
