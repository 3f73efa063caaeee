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

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from models.attention import mask
from rl.data import packing, trajectory

_PREFIX = "prefix/"
_INTEGERS = ("tokens", "positions", "segments", "versions", "lags")
_LINKS = ("parents", "previous", "copies")
# The others are float32.
_TYPES: dict[str, type[np.generic]] = {
  **dict.fromkeys(_INTEGERS, np.int32),
  **dict.fromkeys((f"{_PREFIX}{name}" for name in _LINKS), np.int32),
  "sampled": np.bool_,
  "experts": np.integer,
}


class Prefix(NamedTuple):
  """Links the members of a group to the one copy of their prompt in a row.

  Attributes:
    parents: segment of the prompt that the token's conversation began with,
      or -1; see `models.attention.mask.TokenMask`.
    previous: index in the row of the token before this one; any index where
      there is none.
    copies: trajectories that the token belongs to; 0 is padding.
  """

  parents: Int32[np.ndarray, "B L"]
  previous: Int32[np.ndarray, "B L"]
  copies: Int32[np.ndarray, "B L"]


Column = Literal[
  "advantages", "old", "reference", "values", "returns", "entropy_weights"
]
"""Values of sampled tokens that come after packing."""


class Batch(NamedTuple):
  """One micro-batch; also what the learner puts on its mesh.

  Attributes:
    positions: of the token in its own trajectory.
    segments: 1, 2, ... within a row; 0 is padding.
    versions: policy that sampled the token, where `sampled`.
    sampled: True on the tokens of the policy and nowhere else.
    behaviour: log-probability under the policy that sampled it, in nats.
    advantages: 0 where not sampled; they may differ within a trajectory.
    lags: version it is trained at, minus `versions`; 0 where not sampled.
    prefix: None when rows never share a prompt.
    experts: those that the engine chose for the token, or -1 where the
      routers are free; None when they are everywhere. Of a shared prompt:
      those of the first trajectory that has it in the row.
    old, reference: log-probability under the policy that a ratio is against,
      and under the one to stay close to, in nats; None if not needed, like the
      next two.
    values: the critic's, before the token.
    returns: targets of the critic.
    entropy_weights: of the entropy bonus; None is 1 everywhere.
  """

  tokens: Int32[np.ndarray, "B L"]
  positions: Int32[np.ndarray, "B L"]
  segments: Int32[np.ndarray, "B L"]
  versions: Int32[np.ndarray, "B L"]
  sampled: Bool[np.ndarray, "B L"]
  behaviour: Float32[np.ndarray, "B L"]
  advantages: Float32[np.ndarray, "B L"]
  lags: Int32[np.ndarray, "B L"]
  prefix: Prefix | None = None
  experts: Int[np.ndarray, "B L S k"] | None = None
  old: Float32[np.ndarray, "B L"] | None = None
  reference: Float32[np.ndarray, "B L"] | None = None
  values: Float32[np.ndarray, "B L"] | None = None
  returns: Float32[np.ndarray, "B L"] | None = None
  entropy_weights: Float32[np.ndarray, "B L"] | None = None


def empty(
  rows: int,
  length: int,
  *,
  share_prompts: bool = False,
  experts: Int[np.ndarray, "S k"] | None = None,
) -> Batch:
  """Returns a batch that is all padding.

  Args:
    share_prompts: whether there is a `prefix`.
    experts: those of any token, for their shape and dtype; None for a batch
      without experts.
  """
  shape = (rows, length)
  prefix = None
  if share_prompts:
    before = np.maximum(np.arange(length, dtype=np.int32) - 1, 0)
    prefix = Prefix(
      parents=np.full(shape, mask.NO_PARENT, np.int32),
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
    lags=np.zeros(shape, np.int32),
    prefix=prefix,
    experts=None
    if experts is None
    else np.full(shape + experts.shape, -1, experts.dtype),
  )


def columns(batch: Batch) -> dict[str, np.ndarray]:
  """Returns the columns of a batch by name, such as "prefix/copies"."""
  named = batch._asdict()
  prefix = named.pop("prefix")
  if prefix is not None:
    named |= {f"{_PREFIX}{name}": x for name, x in prefix._asdict().items()}
  return {
    name: np.asarray(column)
    for name, column in named.items()
    if column is not None
  }


def of_columns(named: Mapping[str, Any]) -> Batch:
  """Returns the batch of these columns; inverse of `columns`."""
  parts = {
    name.removeprefix(_PREFIX): column
    for name, column in named.items()
    if name.startswith(_PREFIX)
  }
  own = {x: named[x] for x in named if not x.startswith(_PREFIX)}
  return Batch(**own, prefix=Prefix(**parts) if parts else None)


def check(batch: Batch) -> None:
  """Checks shapes and types of a batch that comes from a file.

  Raises:
    ValueError: names the column.
  """
  shape = batch.tokens.shape
  for name, column in columns(batch).items():
    wanted = _TYPES.get(name, np.float32)
    is_odd = len(shape) != 2 or column.shape[:2] != shape
    if is_odd or column.ndim != (4 if name == "experts" else 2):
      raise ValueError(
        f"column {name} has the shape {column.shape}, and tokens {shape}; all "
        "must be [rows, length]"
      )
    if not np.issubdtype(column.dtype, wanted):
      raise ValueError(
        f"column {name} has the type {column.dtype}; it must be "
        f"{wanted.__name__}"
      )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenPlace:
  """The positions of the T sampled tokens of a trajectory, in order."""

  batch: int
  row: int
  index: Int32[np.ndarray, " T"]


class Packed(NamedTuple):
  """Trajectories in micro-batches.

  Attributes:
    places: of each trajectory; None for one without ids or left out.
  """

  batches: list[Batch]
  places: list[TokenPlace | None]


def pack(
  trajectories: Sequence[trajectory.Trajectory],
  *,
  rows: int,
  length: int,
  version: int,
  share_prompts: bool = False,
  shards: int = 1,
  tail_rows: int | None = None,
  only_full: bool = False,
  pairs: bool = False,
) -> Packed:
  """Packs whole trajectories into batches of shape [rows, length].

  `packing.plan` says where each lies. Advantages are 0 until `with_column`
  writes them.

  Args:
    version: that the tokens are trained at; `lags` count from it.
    share_prompts: whether trajectories of one group whose first contexts are
      equal share it within a row. Batches then always have a `prefix`, so that
      all of them are one program.
    shards: contiguous blocks of rows that lie on different devices, between
      which the cost of attention is balanced.
    tail_rows: of the last, smaller batches; see `packing.heights`. None: all
      batches have one shape.
    only_full: leaves out trajectories that do not fill a batch; they have no
      place, and are to be packed with later ones.
    pairs: trajectories 0 and 1, 2 and 3, .. are in one row each, as segments
      whose numbers are odd and the next.

  Raises:
    ValueError: a trajectory is longer than a row, they carry experts of
      different models, or rows do not divide over the shards.
  """
  plan = packing.plan(
    [t.num_ids for t in trajectories],
    _by_prompt(trajectories) if share_prompts else (),
    rows=rows,
    length=length,
    shards=shards,
    tail_rows=tail_rows,
    only_full=only_full,
    pairs=pairs,
  )
  experts = _experts_of_a_token(trajectories)
  batches: list[Batch] = []
  places: list[TokenPlace | None] = [None] * len(trajectories)
  for number, planned in enumerate(plan):
    batch = empty(
      len(planned), length, share_prompts=share_prompts, experts=experts
    )
    for row, parts in enumerate(planned):
      for member, index in _fill(batch, row, parts, trajectories, version):
        places[member] = TokenPlace(number, row, index)
    batches.append(batch)
  return Packed(batches, places)


def with_column(
  packed: Packed, name: Column, values: Sequence[Float32[np.ndarray, " _T"]]
) -> Packed:
  """Returns the same with a column that holds these values.

  Args:
    values: by trajectory, one for each of its sampled tokens. The column is 0
      wherever nothing was sampled.

  Raises:
    ValueError: a trajectory has another number of sampled tokens.
  """
  columns = [np.zeros(b.tokens.shape, np.float32) for b in packed.batches]
  for i, (place, own) in enumerate(zip(packed.places, values, strict=True)):
    size = 0 if place is None else len(place.index)
    if len(own) != size:
      raise ValueError(
        f"{len(own)} {name} for the {size} sampled tokens of trajectory {i}; "
        "give one for each"
      )
    if place is not None:
      columns[place.batch][place.row, place.index] = own
  batches = [
    batch._replace(**{name: column})
    for batch, column in zip(packed.batches, columns, strict=True)
  ]
  return packed._replace(batches=batches)


def collect(
  packed: Packed, scores: Sequence[Float32[np.ndarray, "B L"]]
) -> list[Float32[np.ndarray, " _T"]]:
  """Returns the `scores` of the sampled tokens of each trajectory.

  Args:
    scores: of each batch, on the host.
  """
  return [
    np.zeros(0, np.float32)
    if place is None
    else scores[place.batch][place.row, place.index]
    for place in packed.places
  ]


def collect_states(
  packed: Packed, scores: Sequence[Float32[np.ndarray, "B L"]]
) -> list[Float32[np.ndarray, " _states"]]:
  """Returns the scores of the states that each trajectory went through.

  They are those before each of its T sampled tokens, and that after its last
  id; one 0 for a trajectory without a place.

  Args:
    scores: of the state after each id, of each batch, on the host.
  """
  found = []
  for place in packed.places:
    if place is None or not len(place.index):
      found.append(np.zeros(1, np.float32))
      continue
    batch, row = packed.batches[place.batch], place.row
    before = place.index - 1
    if batch.prefix is not None:
      before = batch.prefix.previous[row, place.index]
    segments = batch.segments[row]
    last = np.flatnonzero(segments == segments[place.index[0]])[-1]
    found.append(scores[place.batch][row, np.append(before, last)])
  return found


def _by_prompt(
  trajectories: Sequence[trajectory.Trajectory],
) -> list[packing.RowPart]:
  """Returns all trajectories with ids, grouped where they may share."""
  found: dict[tuple[int, bytes], packing.RowPart] = {}
  for i, episode in enumerate(trajectories):
    if episode.num_ids:
      prompt = episode.turns[0].context
      part = packing.RowPart([], len(prompt))
      key = (episode.group_id, prompt.tobytes())
      found.setdefault(key, part).members.append(i)
  return list(found.values())


def _fill(
  batch: Batch,
  row: int,
  parts: Sequence[packing.RowPart],
  trajectories: Sequence[trajectory.Trajectory],
  version: int,
) -> Iterator[tuple[int, Int32[np.ndarray, " T"]]]:
  """Lays parts side by side, each with its prompt first.

  Yields:
    Each member and the positions of its sampled tokens.
  """
  start = segment = 0
  for members, prompt in parts:
    columns = [_columns(trajectories[i], version) for i in members]
    parent, end = mask.NO_PARENT, start
    if len(members) > 1 and prompt:
      first = {name: column[:prompt] for name, column in columns[0].items()}
      columns = [
        {name: column[prompt:] for name, column in own.items()}
        for own in columns
      ]
      parent = segment = segment + 1
      _write(batch, row, start, segment, first, copies=len(members))
      end = start = start + prompt
    for member, own in zip(members, columns, strict=True):
      yield member, start + np.flatnonzero(own["sampled"]).astype(np.int32)
      if len(own["tokens"]):
        segment += 1
        _write(batch, row, start, segment, own, parent=parent)
        if batch.prefix is not None and parent != mask.NO_PARENT:
          batch.prefix.previous[row, start] = end - 1
        start += len(own["tokens"])


def _columns(
  episode: trajectory.Trajectory, version: int
) -> dict[str, np.ndarray]:
  """Returns the columns of its ids, by field of the batch."""
  ids, sampled = episode.ids, episode.sampled
  versions = np.zeros(len(ids), np.int32)
  behaviour = np.zeros(len(ids), np.float32)
  versions[sampled] = np.concatenate([t.versions for t in episode.turns])
  behaviour[sampled] = np.concatenate([t.logprobs for t in episode.turns])
  columns = {
    "tokens": ids,
    "positions": np.arange(len(ids)),
    "versions": versions,
    "sampled": sampled,
    "behaviour": behaviour,
    "lags": np.where(sampled, version - versions, 0),
  }
  experts = episode.experts
  return columns if experts is None else columns | {"experts": experts}


def _write(
  batch: Batch,
  row: int,
  start: int,
  segment: int,
  columns: Mapping[str, np.ndarray],
  *,
  parent: int = mask.NO_PARENT,
  copies: int = 1,
) -> None:
  """Writes a segment into the row, from `start` on."""
  at = slice(start, start + len(columns["tokens"]))
  batch.segments[row, at] = segment
  for name, column in columns.items():
    getattr(batch, name)[row, at] = column
  if batch.prefix is not None:
    batch.prefix.parents[row, at] = parent
    batch.prefix.copies[row, at] = copies


def _experts_of_a_token(
  trajectories: Sequence[trajectory.Trajectory],
) -> Int[np.ndarray, "S k"] | None:
  """Returns unknown ones, in a dtype for all trajectories; None without any."""
  known = [x for t in trajectories if (x := t.experts) is not None]
  if not known:
    return None
  shapes = {x.shape[1:] for x in known}
  if len(shapes) > 1:
    raise ValueError(
      f"trajectories have experts of shapes {sorted(shapes)} a token; all "
      "must come from one model"
    )
  (shape,) = shapes
  return np.full(shape, -1, np.result_type(*(x.dtype for x in known)))
