"""The gradient of one update, as its trajectories come in.

  add -> waiting -+-> full batches -> accumulate      flush: the rest -> step
                  +-> wait for others to fill a batch with

Letters: T sampled tokens of a trajectory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from rl.data import batch as batch_lib
from rl.data import segment_index, trajectory
from rl.runtime import mesh_thread
from rl.train import learner, scoring, train_state

_Values = Float32[np.ndarray, " _"]


class _Waiting(NamedTuple):
  member: trajectory.Trajectory
  columns: dict[batch_lib.Column, _Values]


class Accumulation:
  """Sums the gradient of one update on a mesh.

  `trainer.Training` calls `add` any number of times, `flush`, and `step`; for
  another epoch it calls `repeat` and `step`.

  Attributes:
    batches: what was accumulated.
    owners: whose the segments of these batches are.
  """

  def __init__(
    self,
    programs: learner.Learner,
    thread: mesh_thread.MeshThread,
    pack: Callable[..., batch_lib.Packed],
  ):
    """Does nothing yet.

    Args:
      pack: (trajectories, only_full=) -> rows; see `batch.pack`.
    """
    self.batches: list[batch_lib.Batch] = []
    self.owners: list[segment_index.Owner] = []
    self._programs = programs
    self._thread = thread
    self._pack = pack
    self._waiting: list[_Waiting] = []
    self._total: learner.Accumulator | None = None

  @property
  def fill(self) -> float:
    """Share of the places in all batches that hold a token."""
    places = sum(packed.segments.size for packed in self.batches)
    return sum(
      np.count_nonzero(packed.segments) for packed in self.batches
    ) / max(places, 1)

  async def add(
    self,
    state: train_state.TrainState,
    members: Sequence[trajectory.Trajectory],
    columns: Mapping[batch_lib.Column, scoring.Tokens],
  ) -> None:
    """Accumulates whatever fills a batch now; the rest waits."""
    for i, member in enumerate(members):
      own: dict[batch_lib.Column, _Values] = {
        name: values[i] for name, values in columns.items()
      }
      self._waiting.append(_Waiting(member, own))
    await self._train(state, only_full=True)

  async def flush(self, state: train_state.TrainState) -> None:
    """Accumulates what still waits."""
    await self._train(state, only_full=False)

  async def repeat(self, state: train_state.TrainState) -> None:
    """Accumulates the same batches once more, after a step."""
    self._total = None
    await self._accumulate(state, self.batches)

  async def step(
    self, state: train_state.TrainState, flat_count: float
  ) -> tuple[train_state.TrainState, dict[str, float]]:
    """Returns the state after an optimizer step, and its metrics.

    Args:
      flat_count: what groups that were not accumulated add to the divisor.
    """
    return await self._thread.run(
      "update", step, self._programs, state, self._total, flat_count
    )

  async def _train(
    self, state: train_state.TrainState, *, only_full: bool
  ) -> None:
    waiting = self._waiting
    members = [w.member for w in waiting]
    packed = self._pack(members, only_full=only_full)
    for name in waiting[0].columns if waiting else ():
      packed = batch_lib.with_column(
        packed,
        name,
        [
          w.columns[name][: 0 if place is None else None]
          for w, place in zip(waiting, packed.places, strict=True)
        ],
      )
    self._waiting = [
      w
      for w, place in zip(waiting, packed.places, strict=True)
      if place is None
    ]
    self.owners += segment_index.of(packed, members, first=len(self.batches))
    self.batches += packed.batches
    await self._accumulate(state, packed.batches)

  async def _accumulate(
    self,
    state: train_state.TrainState,
    batches: Sequence[batch_lib.Batch],
  ) -> None:
    if self._total is None:
      self._total = await self._thread.run("zero", self._programs.zero)
    for packed in batches:
      self._total = await self._thread.run(
        "accumulate", accumulate, self._programs, state, self._total, packed
      )


def accumulate(
  programs: learner.Learner,
  state: train_state.TrainState,
  total: learner.Accumulator,
  packed: batch_lib.Batch,
) -> learner.Accumulator:
  """Returns the sums with one more batch in them; on the mesh's thread."""
  placed = programs.place(packed)
  return programs.accumulate(state.params, total, placed, state.critic)


def step(
  programs: learner.Learner,
  state: train_state.TrainState,
  total: learner.Accumulator,
  flat_count: float = 0.0,
) -> tuple[train_state.TrainState, dict[str, float]]:
  """Returns the state after an optimizer step, and its metrics; likewise."""
  state, sums = programs.update(state, total, flat_count)
  sums = jax.device_get(sums)
  return state, {name: float(value) for name, value in sums.items()}
