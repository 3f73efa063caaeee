"""What the next dispatch of the built-in engine does. Pure bookkeeping.

  running requests -> which rows, how many new ids of each, how many steps

Letters: R rows, P rows with chunks of C ids, W pages of a table.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import block_manager, decode_step
from rl.engine.builtin import settings as engine_settings

_MATMULS = 256
_PATIENCE = 7
"""Of so many dispatches one feeds new context, whatever that is worth: else
one who comes alone would wait until others have ended. Lengths take turns as
well, and there are fewer of them."""
_DISPATCH = 1
"""Steps that a dispatch costs beside its own: pages are gathered, the host
looks."""


@dataclasses.dataclass(slots=True, eq=False)
class Running:
  """A request inside the engine.

  Attributes:
    order: requests that wait are served, and the context of those that run is
      encoded, lowest first; the highest gives up its pages first.
    turn: number of its last dispatch.
    ids: the conversation, with room for all that may be sampled.
    known: ids that are given or sampled.
    started: time.monotonic() of its arrival.
    slot, lease, bias: what it holds while it runs.
    fed, grown: what `lease.cached` and `known` will be after the dispatches in
      flight, if they sample all that they may.
    flights: dispatches in flight that hold it.
    shared: its context is encoded, and known to others.
    cached_tokens: ids that were in the cache when it was admitted first.
    oldest_kv: lowest version that the last token sampled attended to.
    first_token_s: seconds from its arrival to its first token; 0 before.
    logprobs, versions: of the tokens sampled so far.
    deltas: where a stream waits for them, None being the end; `told` of the
      tokens are there.
  """

  request: contract.DecodeRequest
  future: asyncio.Future[contract.Completion]
  order: tuple[tuple[int, ...], int]
  ids: Int32[np.ndarray, " N"]
  known: int
  started: float = dataclasses.field(default_factory=time.monotonic)
  slot: int = -1
  lease: block_manager.Lease | None = None
  bias: int = 0
  fed: int = 0
  grown: int = 0
  flights: int = 0
  turn: int = 0
  shared: bool = False
  cached_tokens: int | None = None
  oldest_kv: int = -1
  first_token_s: float = 0.0
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  deltas: asyncio.Queue[contract.Delta | None] | None = None
  told: int = 0

  @property
  def pending(self) -> int:
    """Ids that the next dispatch may feed."""
    return self.grown - self.fed

  @property
  def left(self) -> int:
    """Tokens to sample after the dispatches in flight."""
    given = len(self.request.tokens)
    return self.request.max_tokens - (self.grown - given)

  def settle(self) -> None:
    """Takes what is absorbed for what will be: nothing is in flight."""
    assert self.lease is not None
    self.fed, self.grown = self.lease.cached, self.known

  @property
  def begun(self) -> bool:
    """Whether it runs or has run."""
    return self.cached_tokens is not None

  @property
  def num_sampled(self) -> int:
    """Tokens sampled so far."""
    return len(self.versions)

  @property
  def first_version(self) -> trajectory.PolicyVersion | None:
    """Version of its first token, if there is one."""
    return trajectory.PolicyVersion(self.versions[0]) if self.versions else None

  def take(
    self, tokens: Sequence[int], logprobs: Sequence[float], version: int
  ) -> None:
    """Appends what one dispatch sampled: one token or more."""
    if not self.versions:
      self.first_token_s = time.monotonic() - self.started
    count = len(tokens)
    self.ids[self.known : self.known + count] = tokens
    self.known += count
    self.logprobs += logprobs
    self.versions += [version] * count

  def why_ended(self) -> trajectory.Stop | None:
    """Returns why sampling is over, or None."""
    sampled = self.num_sampled
    if sampled and int(self.ids[self.known - 1]) in self.request.stop_ids:
      return "stop"
    return "length" if sampled >= self.request.max_tokens else None

  def tell(self, completion: contract.Completion | None = None) -> None:
    """Gives a stream what has been sampled since the last time."""
    if self.deltas is None or (
      self.told == self.num_sampled and not completion
    ):
      return
    given = len(self.request.tokens)
    delta = contract.Delta(
      tokens=self.ids[given + self.told : self.known].copy(),
      logprobs=np.asarray(self.logprobs[self.told :], np.float32),
      versions=np.asarray(self.versions[self.told :], np.int32),
      completion=completion,
    )
    self.told = self.num_sampled
    self.deltas.put_nowait(delta)

  def fail(self, error: Exception) -> None:
    """Ends the request with an error."""
    if not self.future.done():
      self.future.set_exception(error)
    if self.deltas is not None:
      self.deltas.put_nowait(None)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Flight:
  """One dispatch.

  Attributes:
    rows: its requests, in the order of its rows.
    fed: new ids of each, and `starts` where they begin among all new ids.
    chunks: (P, C).
    could_go_on: rows whose requests will want more, unless a stop id comes.
    version: of the weights.
  """

  rows: Sequence[Running]
  fed: Sequence[int]
  starts: Sequence[int]
  chunks: tuple[int, int]
  could_go_on: int
  plan: decode_step.Plan
  version: trajectory.PolicyVersion


class Choice(NamedTuple):
  """The rows of a dispatch and its shape.

  Attributes:
    rows: those with more than one new id come first.
    chunks: (P, C).
    num_rows: R.
    length: bucket of the longest conversation.
    steps: tokens that each row may sample.
  """

  rows: Sequence[Running]
  chunks: tuple[int, int]
  num_rows: int
  length: int
  steps: int

  def need(self, one: Running) -> int:
    """Returns how many positions a row of it must have pages for."""
    return min(
      one.fed + min(one.pending, self.chunks[1]) + self.steps, len(one.ids)
    )


def choose(
  ready: Sequence[Running],
  settings: engine_settings.EngineSettings,
  *,
  longest: int,
  parts: int = 1,
  fixed: int = 8,
  turn: int = 0,
) -> Choice:
  """Returns the rows of the next dispatch, and its shape.

  Args:
    ready: in order; at least one.
    longest: conversation of the model.
    parts: of the mesh over which rows are split.
    fixed: see `EngineSettings.bucket`.
    turn: number of the dispatch: lengths that go apart take turns.
  """
  ready, length = _of_one_length(ready, settings, longest, fixed, turn)
  context = [one for one in ready if one.pending > 1]
  decoding = [one for one in ready if one.pending == 1]
  num_rows, chunks = settings.bucket(len(ready), fixed), (0, 1)
  if context:
    pending = [one.pending for one in context]
    none, *some = settings.chunks(num_rows, parts)
    # What others sample beside it would make the shortest chunks look best.
    forms, beside = [none, *some], len(decoding)
    if turn % _PATIENCE == 0:
      forms, beside = some, 0
    chunks = max(
      forms, key=lambda form: _worth(pending, beside, num_rows, form)
    )
  first = context[: chunks[0]]
  fit = num_rows - len(first)
  if fit < len(decoding):
    # Else some would begin only when others have ended, and end alone.
    decoding.sort(key=lambda one: (one.turn, -one.left))
  rows = [*first, *decoding[:fit]]
  num_rows = next(
    size
    for size in settings.rows
    if size >= len(rows) and chunks in settings.chunks(size, parts)
  )
  lefts = [one.left for one in rows if one.pending <= chunks[1]]
  steps = num_steps(lefts, settings.steps_per_dispatch)
  return Choice(rows, chunks, num_rows, length, steps)


def _worth(
  pending: Sequence[int], decoding: int, rows: int, chunks: tuple[int, int]
) -> float:
  """Returns ids fed for what a dispatch costs.

  Args:
    pending: new ids of rows with context, in order.
    decoding: number of rows with one.
  """
  count, size = chunks
  context = sum(min(ids, size) for ids in pending[:count])
  fed = context + min(decoding, rows - min(count, len(pending)))
  # Reading the weights, and a row's keys and values, cost so many ids.
  return fed / (count * (size - 1) + rows * 6 + 64)


def num_steps(lefts: Sequence[int], most: int) -> int:
  """Returns the steps that give the most tokens for what a dispatch costs.

  Args:
    lefts: tokens that each row still wants.
    most: steps at most.
  """
  counts = [0] * (most + 1)
  for left in lefts:
    counts[min(left, most)] += 1
  best, best_rate, tokens, going_on = 1, 0.0, 0, len(lefts) - counts[0]
  for steps in range(1, most + 1):
    if not going_on:
      break
    tokens += going_on
    going_on -= counts[steps]
    rate = tokens / (steps + _DISPATCH)
    if rate >= best_rate:
      best, best_rate = steps, rate
  return best


def _of_one_length(
  ready: Sequence[Running],
  settings: engine_settings.EngineSettings,
  longest: int,
  fixed: int,
  turn: int,
) -> tuple[Sequence[Running], int]:
  """Returns the rows of one length bucket, and it.

  Every row of a dispatch costs as much as the longest, so lengths go apart
  unless few rows are left alone by that.
  """
  lengths = settings.lengths(longest)
  if len(lengths) == 1:
    return ready, lengths[0]
  most = settings.steps_per_dispatch
  classes: dict[int, list[Running]] = {}
  for one in ready:
    need = min(one.grown + most, longest)
    length = next(size for size in lengths if size >= need)
    classes.setdefault(length, []).append(one)

  def cost(rows: Sequence[Running], length: int) -> int:
    # A step's matmuls are worth the attention to some hundred positions.
    return settings.bucket(len(rows), fixed) * (_MATMULS + length)

  merged: list[tuple[int, list[Running]]] = []
  for length in sorted(classes, reverse=True):
    rows = classes[length]
    if merged:
      above, others = merged[-1]
      apart = cost(others, above) + cost(rows, length)
      if cost([*others, *rows], above) <= apart:
        merged[-1] = (above, sorted([*others, *rows], key=by_order))
        continue
    merged.append((length, rows))
  length, rows = merged[turn % len(merged)]
  return rows, length


def build(
  choice: Choice,
  settings: engine_settings.EngineSettings,
  version: trajectory.PolicyVersion,
) -> Flight:
  """Returns the dispatch and moves its rows ahead by what it may do.

  Every row has the pages that it needs.
  """
  plan = decode_step.empty_plan(
    choice.num_rows,
    choice.chunks,
    settings.width(choice.length),
    slots=settings.slots,
  )
  count, size = choice.chunks
  plan.integers[:, decode_step.STEPS] = choice.steps
  fed, starts = [], []
  for i, one in enumerate(choice.rows):
    assert one.lease is not None
    new = min(one.pending, size if i < count else 1)
    budget = min(one.left, choice.steps) if new == one.pending else 0
    start = i * size if i < count else count * (size - 1) + i
    # What it was last given is not known here yet, but on the device.
    follow = one.flights > 0 and one.grown > one.known
    request = one.request
    plan.integers[i, : decode_step.FOLLOW + 1] = (
      one.slot,
      one.fed,
      new,
      budget,
      request.seed,
      request.top_k,
      one.bias,
      follow,
    )
    plan.stop_ids[i, : len(request.stop_ids)] = request.stop_ids
    pages = one.lease.pages[: plan.tables.shape[1]]
    plan.tables[i, : len(pages)] = pages
    plan.floats[i] = (request.temperature, request.top_p, request.min_p)
    plan.ids[start : start + new] = one.ids[one.fed : one.fed + new]
    one.fed += new + max(budget - 1, 0)
    one.grown += budget
    one.flights += 1
    fed.append(new)
    starts.append(start)
  could_go_on = sum(one.left > 0 for one in choice.rows)
  return Flight(
    choice.rows, fed, starts, choice.chunks, could_go_on, plan, version
  )


def by_order(one: Running) -> tuple[tuple[int, ...], int]:
  """Returns its place among others, for sorting."""
  return one.order
