"""Trajectories -> packed rows of a fixed shape. Host data, numpy.

Letters: B rows, L row length. Several trajectories share a row, each with its
own segment id; 0 is padding. Index t scores token t.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from rl import trajectory


class Batch(NamedTuple):
  """One micro-batch; also what the learner puts on its mesh.

  Attributes:
    positions: of the token in its own trajectory.
    segments: 1, 2, ... within a row; 0 is padding.
    versions: policy that sampled the token, where `sampled`.
    sampled: True on the tokens of the policy and nowhere else.
    behaviour: log-probability under the policy that sampled it, in nats.
    advantages: of the token's trajectory.
  """

  tokens: Int32[np.ndarray, "B L"]
  positions: Int32[np.ndarray, "B L"]
  segments: Int32[np.ndarray, "B L"]
  versions: Int32[np.ndarray, "B L"]
  sampled: Bool[np.ndarray, "B L"]
  behaviour: Float32[np.ndarray, "B L"]
  advantages: Float32[np.ndarray, "B L"]


def empty(rows: int, length: int) -> Batch:
  """Returns a batch that is all padding."""
  shape = (rows, length)
  return Batch(
    tokens=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    segments=np.zeros(shape, np.int32),
    versions=np.zeros(shape, np.int32),
    sampled=np.zeros(shape, bool),
    behaviour=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
  )


def pack(
  trajectories: Sequence[trajectory.Trajectory],
  advantages: Sequence[float],
  *,
  rows: int,
  length: int,
) -> list[Batch]:
  """Packs whole trajectories into batches of shape [rows, length].

  Longest first into the first row with room; the order depends on nothing but
  the arguments.

  Raises:
    ValueError: a trajectory is longer than a row.
  """
  sizes = [len(t.ids) for t in trajectories]
  if sizes and max(sizes) > length:
    raise ValueError(
      f"a trajectory of {max(sizes)} tokens does not fit batch.length="
      f"{length}; raise it or lower rollout.max_tokens"
    )
  places = _first_fit(sizes, length)
  num_rows = 1 + max((row for row, _ in places), default=-1)
  batches = [empty(rows, length) for _ in range(-(-num_rows // rows))]
  segments = [0] * num_rows
  for i in sorted(range(len(sizes)), key=lambda i: places[i]):
    row, start = places[i]
    segments[row] += 1
    _write(
      batches[row // rows],
      row % rows,
      slice(start, start + sizes[i]),
      trajectories[i],
      segment=segments[row],
      advantage=advantages[i],
    )
  return batches


def _first_fit(sizes: Sequence[int], length: int) -> list[tuple[int, int]]:
  """Returns (row, start) of each size, with as many rows as it takes."""
  used: list[int] = []
  places = [(0, 0)] * len(sizes)
  for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
    row = next((r for r, n in enumerate(used) if n + sizes[i] <= length), None)
    if row is None:
      row = len(used)
      used.append(0)
    places[i] = (row, used[row])
    used[row] += sizes[i]
  return places


def _write(
  batch: Batch,
  row: int,
  at: slice,
  episode: trajectory.Trajectory,
  *,
  segment: int,
  advantage: float,
) -> None:
  sampled = episode.sampled
  batch.tokens[row, at] = episode.ids
  batch.positions[row, at] = np.arange(len(sampled))
  batch.segments[row, at] = segment
  batch.sampled[row, at] = sampled
  batch.advantages[row, at] = np.where(sampled, np.float32(advantage), 0)
  batch.versions[row, at][sampled] = np.concatenate(
    [turn.versions for turn in episode.turns]
  )
  batch.behaviour[row, at][sampled] = np.concatenate(
    [turn.logprobs for turn in episode.turns]
  )
