"""Trajectories -> packed rows of a fixed shape. Host data, numpy.

Several trajectories share a row, each with its own segment id. Those of one
group may also share their prompt, which then lies in the row once:

  tokens     [ prompt | rest of a | rest of b | c, of another group | padding ]
  segments     1        2           3           4                     0
  parents      -1       1           1           -1                    -1
  copies       2        1           1           1                     0

Letters: B rows, L row length, S layers with experts, k experts of a token.
Index t scores token t.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from models import visibility
from rl import trajectory


class Prefix(NamedTuple):
  """How the members of a group share the one copy of their prompt in a row.

  Attributes:
    parents: segment of the prompt that the token's conversation began with,
      or -1; see `models.visibility.Marks`.
    previous: index in the row of the token before this one; any index where
      there is none.
    copies: trajectories that the token belongs to; 0 is padding.
  """

  parents: Int32[np.ndarray, "B L"]
  previous: Int32[np.ndarray, "B L"]
  copies: Int32[np.ndarray, "B L"]


class Batch(NamedTuple):
  """One micro-batch; also what the learner puts on its mesh.

  Attributes:
    positions: of the token in its own trajectory.
    segments: 1, 2, ... within a row; 0 is padding.
    versions: policy that sampled the token, where `sampled`.
    sampled: True on the tokens of the policy and nowhere else.
    behaviour: log-probability under the policy that sampled it, in nats.
    advantages: of the token's trajectory.
    prefix: None when rows never share a prompt.
    experts: those that the engine chose for the token, or -1 where the
      routers are free; None when they are everywhere. Of a shared prompt:
      those of the first trajectory that has it in the row.
  """

  tokens: Int32[np.ndarray, "B L"]
  positions: Int32[np.ndarray, "B L"]
  segments: Int32[np.ndarray, "B L"]
  versions: Int32[np.ndarray, "B L"]
  sampled: Bool[np.ndarray, "B L"]
  behaviour: Float32[np.ndarray, "B L"]
  advantages: Float32[np.ndarray, "B L"]
  prefix: Prefix | None = None
  experts: Int32[np.ndarray, "B L S k"] | None = None


def empty(
  rows: int,
  length: int,
  *,
  share_prompts: bool = False,
  experts: tuple[int, ...] | None = None,
) -> Batch:
  """Returns a batch that is all padding.

  Args:
    share_prompts: whether there is a `prefix`.
    experts: (S, k), or None for a batch without experts.
  """
  shape = (rows, length)
  prefix = None
  if share_prompts:
    before = np.maximum(np.arange(length, dtype=np.int32) - 1, 0)
    prefix = Prefix(
      parents=np.full(shape, visibility.NO_PARENT, np.int32),
      previous=np.tile(before, (rows, 1)),
      copies=np.zeros(shape, np.int32),
    )
  return Batch(
    tokens=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    segments=np.zeros(shape, np.int32),
    versions=np.zeros(shape, np.int32),
    sampled=np.zeros(shape, bool),
    behaviour=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    prefix=prefix,
    experts=None if experts is None else np.full(shape + experts, -1, np.int32),
  )


def pack(
  trajectories: Sequence[trajectory.Trajectory],
  advantages: Sequence[float],
  *,
  rows: int,
  length: int,
  share_prompts: bool = False,
) -> list[Batch]:
  """Packs whole trajectories into batches of shape [rows, length].

  Longest first into the first row with room; the order depends on nothing but
  the arguments. One without ids takes no place.

  Args:
    share_prompts: whether trajectories of one group whose first contexts are
      equal share it within a row: they go, group by group, to rows that hold
      it already, as long as that takes no more rows than not sharing. Batches
      then always have a `prefix`, so that all of them are one program.

  Raises:
    ValueError: a trajectory is longer than a row, or they carry experts of
      different models.
  """
  sizes = [len(t.ids) for t in trajectories]
  if sizes and max(sizes) > length:
    raise ValueError(
      f"a trajectory of {max(sizes)} tokens does not fit batch.length="
      f"{length}; raise it or lower rollout.max_tokens"
    )
  plan = _first_fit(
    [_Shared([i], 0) for i, n in enumerate(sizes) if n], sizes, length
  )
  if share_prompts:
    shared = _first_fit(_by_prompt(trajectories), sizes, length)
    # First fit has bad days: with short prompts the order may cost a row.
    plan = min(shared, plan, key=len)
  experts = _experts_of_a_token(trajectories)
  batches = [
    empty(rows, length, share_prompts=share_prompts, experts=experts)
    for _ in range(-(-len(plan) // rows))
  ]
  for number, parts in enumerate(plan):
    batch = batches[number // rows]
    _fill(batch, number % rows, parts, trajectories, advantages)
  return batches


class _Shared(NamedTuple):
  """Trajectories that begin with the same `prompt` ids.

  Attributes:
    members: their indices.
  """

  members: list[int]
  prompt: int


def _by_prompt(
  trajectories: Sequence[trajectory.Trajectory],
) -> list[_Shared]:
  """Returns all trajectories with ids, put together where they may share."""
  found: dict[tuple[int, bytes], _Shared] = {}
  for i, episode in enumerate(trajectories):
    if len(episode.ids):
      prompt = episode.turns[0].context
      key = (episode.group_id, prompt.tobytes())
      found.setdefault(key, _Shared([], len(prompt))).members.append(i)
  return list(found.values())


def _first_fit(
  groups: Sequence[_Shared], sizes: Sequence[int], length: int
) -> list[list[_Shared]]:
  """Returns, row by row, what lies in it, with as many rows as it takes."""
  rows: list[list[_Shared]] = []
  room: list[int] = []

  def total(group: _Shared) -> int:
    return group.prompt + sum(sizes[i] - group.prompt for i in group.members)

  for members, prompt in sorted(groups, key=total, reverse=True):
    parts: dict[int, _Shared] = {}
    for i in sorted(members, key=lambda i: -sizes[i]):
      rest = sizes[i] - prompt
      row = next((r for r in parts if room[r] >= rest), None)
      if row is None:
        row = next((r for r, n in enumerate(room) if n >= sizes[i]), len(rows))
        if row == len(rows):
          rows.append([])
          room.append(length)
        parts[row] = _Shared([], prompt)
        rows[row].append(parts[row])
        room[row] -= prompt
      parts[row].members.append(i)
      room[row] -= rest
  return rows


def _fill(
  batch: Batch,
  row: int,
  parts: Sequence[_Shared],
  trajectories: Sequence[trajectory.Trajectory],
  advantages: Sequence[float],
) -> None:
  """Lays parts side by side, each with its prompt first."""
  for members, prompt in parts:
    columns = [_columns(trajectories[i], advantages[i]) for i in members]
    if len(members) == 1 or not prompt:
      for own in columns:
        _append(batch, row, own)
      continue
    first = {name: column[:prompt] for name, column in columns[0].items()}
    parent = _append(batch, row, first, copies=len(members))
    for own in columns:
      rest = {name: column[prompt:] for name, column in own.items()}
      if len(rest["tokens"]):
        _append(batch, row, rest, parent=parent)


def _columns(
  episode: trajectory.Trajectory, advantage: float
) -> dict[str, np.ndarray]:
  """Returns what a batch says of each of its ids, by field of the batch."""
  ids, sampled = episode.ids, episode.sampled
  versions = np.zeros(len(ids), np.int32)
  versions[sampled] = np.concatenate([t.versions for t in episode.turns])
  behaviour = np.zeros(len(ids), np.float32)
  behaviour[sampled] = np.concatenate([t.logprobs for t in episode.turns])
  columns = {
    "tokens": ids,
    "positions": np.arange(len(ids)),
    "versions": versions,
    "sampled": sampled,
    "behaviour": behaviour,
    "advantages": np.where(sampled, np.float32(advantage), 0),
  }
  experts = episode.experts
  return columns if experts is None else columns | {"experts": experts}


def _append(
  batch: Batch,
  row: int,
  columns: Mapping[str, np.ndarray],
  *,
  parent: int = visibility.NO_PARENT,
  copies: int = 1,
) -> int:
  """Writes a segment behind what lies in the row; returns its number."""
  segments = batch.segments[row]
  segment, start = int(segments.max()) + 1, int(np.count_nonzero(segments))
  at = slice(start, start + len(columns["tokens"]))
  segments[at] = segment
  for name, column in columns.items():
    getattr(batch, name)[row, at] = column
  if batch.prefix is not None:
    batch.prefix.parents[row, at] = parent
    batch.prefix.copies[row, at] = copies
    if parent != visibility.NO_PARENT:
      batch.prefix.previous[row, start] = np.flatnonzero(segments == parent)[-1]
  return segment


def _experts_of_a_token(
  trajectories: Sequence[trajectory.Trajectory],
) -> tuple[int, ...] | None:
  """Returns (S, k), or None when no trajectory carries experts."""
  known = [t.experts for t in trajectories]
  shapes = {x.shape[1:] for x in known if x is not None}
  if len(shapes) > 1:
    raise ValueError(
      f"trajectories have experts of shapes {sorted(shapes)} a token; all "
      "must come from one model"
    )
  return next(iter(shapes), None)
