"""Episodes of whose tokens everything is known that a batch has room for."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl.data import batch, trajectory
from rl.train import scoring

VERSION = 7
"""At which they are trained."""
MAX_LAG = 3
COLUMNS: tuple[batch.Column, ...] = (
  "advantages",
  "old",
  "reference",
  "values",
  "returns",
)


class Episodes(NamedTuple):
  """Trajectories, and for each an array of its tokens by column."""

  members: list[trajectory.Trajectory]
  columns: dict[batch.Column, scoring.Tokens]

  @property
  def sizes(self) -> list[int]:
    """Sampled tokens of each member."""
    return [member.num_sampled for member in self.members]


def draw(
  seed: int, *, groups: int = 4, size: int = 4, vocab_size: int = 24
) -> Episodes:
  """Groups with a prompt each, of 6 to 16 ids in one to three turns.

  Log-probabilities of all policies are up to a nat apart, and tokens of an
  episode come from up to `MAX_LAG` versions ago.
  """
  draws = np.random.default_rng(seed)
  members = []
  for number in range(groups):
    prompt = draws.integers(vocab_size, size=draws.integers(2, 5))
    for index in range(size):
      turns = [
        _turn(draws, prompt if not k else draws.integers(vocab_size, size=1), k)
        for k in range(draws.integers(1, 4))
      ]
      members.append(
        trajectory.Trajectory(
          "t", number, index, turns, trajectory.Status.COMPLETED, 0.0
        )
      )
  return about(members, scoring.behaviour(members), seed)


def _turn(draws, context, number) -> trajectory.Turn:
  count = int(draws.integers(2, 4)) + (not number)
  return trajectory.Turn(
    context=np.asarray(context, np.int32),
    tokens=draws.integers(24, size=count).astype(np.int32),
    logprobs=draws.uniform(-3, -1, count).astype(np.float32),
    versions=np.sort(
      draws.integers(VERSION - MAX_LAG, VERSION + 1, count)
    ).astype(np.int32),
    stop="stop",
  )


def about(
  members: Sequence[trajectory.Trajectory], policy: scoring.Tokens, seed: int
) -> Episodes:
  """Episodes whose other policies are up to half a nat off `policy`."""
  draws = np.random.default_rng([seed, 1])

  def near(spread: float = 0.5) -> scoring.Tokens:
    return [
      (own + draws.uniform(-spread, spread, own.shape)).astype(np.float32)
      for own in policy
    ]

  def normal() -> scoring.Tokens:
    return [draws.normal(size=own.shape).astype(np.float32) for own in policy]

  columns: dict[batch.Column, scoring.Tokens] = {
    "old": near(),
    "reference": near(1.0),
    "values": normal(),
    "returns": normal(),
    # One a member, and of both signs, as most estimators give them.
    "advantages": [
      np.full_like(own, draws.choice([-1.5, -0.5, 0.5, 2.0])) for own in policy
    ],
  }
  moved = [
    _with_logprobs(member, own)
    for member, own in zip(members, near(), strict=True)
  ]
  return Episodes(moved, columns)


def _with_logprobs(member, logprobs) -> trajectory.Trajectory:
  ends = np.cumsum([len(turn.tokens) for turn in member.turns])[:-1]
  turns = [
    dataclasses.replace(turn, logprobs=own)
    for turn, own in zip(member.turns, np.split(logprobs, ends), strict=True)
  ]
  return dataclasses.replace(member, turns=turns)


def pack(
  episodes: Episodes,
  *,
  rows: int,
  length: int,
  tail_rows: int | None = None,
  share_prompts: bool = False,
) -> batch.Packed:
  """Packed as in a run, with all columns."""
  packed = batch.pack(
    episodes.members,
    rows=rows,
    length=length,
    version=VERSION,
    tail_rows=tail_rows,
    share_prompts=share_prompts,
  )
  for name, values in episodes.columns.items():
    packed = batch.with_column(packed, name, values)
  return packed


def alone(episodes: Episodes, *, rows: int, length: int) -> batch.Packed:
  """Every trajectory in a row of its own, in batches of `rows`."""
  batches: list[batch.Batch] = []
  places: list[batch.TokenPlace | None] = []
  singles = [
    pack(only(episodes, i), rows=1, length=length)
    for i in range(len(episodes.members))
  ]
  for start in range(0, len(singles), rows):
    some = [single.batches[0] for single in singles[start : start + rows]]
    batches.append(stacked(some, rows))
  for i, single in enumerate(singles):
    (place,) = single.places
    assert place is not None
    places.append(batch.TokenPlace(i // rows, i % rows, place.index))
  return batch.Packed(batches, places)


def only(episodes: Episodes, index: int) -> Episodes:
  """One of them."""
  return Episodes(
    [episodes.members[index]],
    {name: [own[index]] for name, own in episodes.columns.items()},
  )


def stacked(batches: Sequence[batch.Batch], rows: int) -> batch.Batch:
  """One batch of all their rows, filled up with padding to `rows`."""
  fields = {}
  for name in batch.Batch._fields:
    parts = [getattr(b, name) for b in batches]
    if parts[0] is None or name == "prefix":
      continue
    whole = np.concatenate(parts)
    missing = rows - len(whole)
    fields[name] = np.pad(whole, [(0, missing)] + [(0, 0)] * (whole.ndim - 1))
  return batch.empty(rows, batches[0].tokens.shape[1])._replace(**fields)


def poisoned(packed: batch.Batch, poison: float) -> batch.Batch:
  """The same with nonsense wherever nothing was sampled.

  Args:
    poison: what all log-probabilities, values and the like are there.
  """
  sampled = packed.sampled
  planted = {
    name: np.where(sampled, getattr(packed, name), np.float32(poison))
    for name in (*COLUMNS, "behaviour")
  }
  return packed._replace(
    **planted,
    tokens=np.where(packed.segments == 0, np.int32(7), packed.tokens),
    versions=np.where(sampled, packed.versions, np.int32(10**9)),
    lags=np.where(sampled, packed.lags, np.int32(-(10**9))),
  )


def difference(actual, expected) -> float:
  """The largest difference, relative to the largest entry."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert actual.shape == expected.shape
  assert np.isfinite(expected).all()
  return float(np.abs(actual - expected).max() / np.abs(expected).max())
