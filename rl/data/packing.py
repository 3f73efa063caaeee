"""Plans rows and micro-batches from the sizes of trajectories. Pure.

  sizes --best fit, longest first--> rows --deal, costliest first--> batches

A batch is split over data shards in contiguous blocks of rows, and all shards
wait for the one with the most attention.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class RowPart(NamedTuple):
  """Trajectories that begin with the same `prompt` ids, kept once in a row.

  Attributes:
    members: their indices.
    prompt: 0 where a trajectory lies on its own.
  """

  members: list[int]
  prompt: int


def plan(
  sizes: Sequence[int],
  alike: Sequence[RowPart] = (),
  *,
  rows: int,
  length: int,
  shards: int = 1,
  tail_rows: int | None = None,
  only_full: bool = False,
  pairs: bool = False,
) -> list[list[list[RowPart]]]:
  """Returns batches, their rows, and the parts of each row in order.

  A trajectory is never split, and one of no ids is left out. The order depends
  on nothing but the arguments.

  Args:
    sizes: ids of each trajectory.
    alike: trajectories that may share a prompt: each with ids is in one of
      these, or there are none. They share it as long as that takes no more
      rows than not sharing.
    rows: of a batch; see `heights` for `tail_rows`, which are `rows` where
      None.
    shards: blocks of rows of a batch that are computed side by side.
    only_full: leaves out the emptiest rows, as many as do not make a batch of
      `rows`.
    pairs: trajectories 0 and 1, 2 and 3, .. lie in one row each, side by side.

  Raises:
    ValueError: a trajectory is longer than a row, or rows do not divide.
  """
  units = [[i] for i, n in enumerate(sizes) if n]
  if pairs:
    units = [[i, i + 1] for i in range(0, len(sizes), 2)]
  whole = [sum(sizes[i] for i in unit) for unit in units]
  if whole and max(whole) > length:
    what = "pair of trajectories" if pairs else "trajectory"
    raise ValueError(
      f"a {what} of {max(whole)} tokens does not fit batch.length={length}; "
      "raise it or lower rollout.max_tokens"
    )
  tail = tail_rows or rows
  for name, height in (("rows", rows), ("tail_rows", tail)):
    if height % shards:
      raise ValueError(
        f"batch.{name}={height} does not divide over {shards} data shards; use "
        f"{-(-height // shards) * shards}"
      )
  alone = [RowPart([number], 0) for number in range(len(units))]
  filled = [
    [RowPart(units[number], 0) for part in row for number in part.members]
    for row in best_fit(alone, whole, length)
  ]
  if alike:
    # Best fit can need one row more when prompts are short; keep the better.
    filled = min(best_fit(alike, sizes, length), filled, key=len)
  if only_full:
    fullest = sorted(filled, key=lambda row: -num_ids(row, sizes))
    filled = fullest[: len(filled) // rows * rows]
  batches: list[list[list[RowPart]]] = [
    [[] for _ in range(height)] for height in heights(len(filled), rows, tail)
  ]
  slots = deal(
    [cost(row, sizes) for row in filled], list(map(len, batches)), shards
  )
  for parts, (batch, row) in zip(filled, slots, strict=True):
    batches[batch][row] = parts
  return batches


def heights(count: int, rows: int, tail: int) -> list[int]:
  """Returns the rows of each batch that it takes to hold `count` rows.

  The rest behind the full batches goes to batches of `tail` rows, a second
  program, as long as these have fewer rows than one more full batch.
  """
  full, rest = divmod(count, rows)
  short = -(-rest // tail)
  if short * tail < rows:
    return [rows] * full + [tail] * short
  return [rows] * (full + 1)


def num_ids(row: Sequence[RowPart], sizes: Sequence[int]) -> int:
  """Returns how many places of a row are taken."""
  return sum(
    prompt + sum(sizes[i] - prompt for i in members) for members, prompt in row
  )


def best_fit(
  groups: Sequence[RowPart], sizes: Sequence[int], length: int
) -> list[list[RowPart]]:
  """Returns the parts of each row, with as many rows as it takes.

  Largest first, each into the row that has the least room left afterwards: of
  the rows that hold its prompt already, or else of all.
  """
  room = np.full(len(sizes), length)
  rows: list[list[RowPart]] = [[] for _ in sizes]

  for members, prompt in sorted(
    groups, key=lambda group: -num_ids([group], sizes)
  ):
    parts: dict[int, RowPart] = {}
    for i in sorted(members, key=lambda i: -sizes[i]):
      rest = sizes[i] - prompt
      row = _tightest(room, list(parts), rest)
      if row is None:
        # There is one: as many rows as trajectories, and none is longer.
        row = _tightest(room, range(len(room)), sizes[i])
        assert row is not None
        parts[row] = RowPart([], prompt)
        rows[row].append(parts[row])
        room[row] -= prompt
      parts[row].members.append(i)
      room[row] -= rest
  # Rows without anything have the most room, so they were opened in order.
  return [row for row in rows if row]


def _tightest(
  room: Int[np.ndarray, " rows"], among: Iterable[int], need: int
) -> int | None:
  """Returns the row with the least room that suffices; the first of equals."""
  rows = np.fromiter(among, int)
  rows = rows[room[rows] >= need]
  return int(rows[np.argmin(room[rows])]) if len(rows) else None


def cost(row: Sequence[RowPart], sizes: Sequence[int]) -> int:
  """Returns the attention cost of a row: pairs of tokens that see each other.

  A conversation of n ids costs n^2, which is twice its causal pairs. With a
  shared prompt of p ids each further one costs n^2 - p^2: the prompt is
  computed once, and their own ids still attend to it. All other costs are the
  same for every row of a length, full or not.
  """
  return sum(
    prompt**2 + sum(sizes[i] ** 2 - prompt**2 for i in members)
    for members, prompt in row
  )


def deal(
  costs: Sequence[int], heights: Sequence[int], shards: int
) -> list[tuple[int, int]]:
  """Returns the (batch, row in it) of each row.

  The costliest rows make the first batch, so that rows of one batch are alike;
  within it each goes, costliest first, to the shard that has the least so far.

  Args:
    heights: rows of each batch: multiples of `shards`, in all enough.
  """
  slots = [(0, 0)] * len(costs)
  order = iter(sorted(range(len(costs)), key=lambda row: -costs[row]))
  for batch, height in enumerate(heights):
    block = height // shards
    load, taken = [0] * shards, [0] * shards
    for row in itertools.islice(order, height):
      free = (shard for shard in range(shards) if taken[shard] < block)
      shard = min(free, key=load.__getitem__)
      slots[row] = batch, shard * block + taken[shard]
      load[shard] += costs[row]
      taken[shard] += 1
  return slots
