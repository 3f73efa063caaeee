"""What the next dispatch of the built-in engine does. Pure bookkeeping.

Letters: S slots (rows of the cache), L longest conversation.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from rl import decode_step, engine, trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
  """Size of the built-in engine.

  Attributes:
    slots: rows of the KV cache, which bounds the requests decoded at once;
      sessions beyond it wait, or take the row of one that idles.
    row_buckets: compiled numbers of rows; `slots` is always one of them.
    chunk_buckets: compiled numbers of new context ids a row and dispatch.
    steps_per_dispatch: tokens sampled at most before the host looks again.
    linger_s: how long a dispatch may wait to fill the smallest bucket.
  """

  slots: int = 256
  row_buckets: tuple[int, ...] = (32, 64, 128, 256)
  chunk_buckets: tuple[int, ...] = (4, 32)
  steps_per_dispatch: int = 2
  linger_s: float = 0.002

  def validate(self) -> None:
    """Raises ValueError on a size that cannot work."""
    for name in ("slots", "steps_per_dispatch"):
      if getattr(self, name) < 1:
        raise ValueError(f"engine.{name}={getattr(self, name)} is below 1")
    for name in ("row_buckets", "chunk_buckets"):
      sizes = getattr(self, name)
      if not sizes or min(sizes) < 1:
        raise ValueError(f"engine.{name}={sizes} needs positive sizes")
    if not 0 <= self.linger_s < 1:
      raise ValueError(f"engine.linger_s={self.linger_s} is not in [0, 1)")

  @property
  def rows(self) -> tuple[int, ...]:
    """The row buckets in use, ascending."""
    smaller = sorted(r for r in set(self.row_buckets) if r < self.slots)
    return (*smaller, self.slots)

  def bucket(self, ready: int) -> int:
    """Returns how many rows to dispatch when so many are ready.

    The largest bucket that is nearly full: idle rows cost as much as others,
    and what does not fit goes with the next dispatch.
    """
    full = [rows for rows in self.rows if self.worthwhile(ready, rows)]
    return full[-1] if full else self.rows[0]

  def worthwhile(self, ready: int, rows: int | None = None) -> bool:
    """Whether a bucket, by default the smallest, is three quarters full."""
    return 4 * ready >= 3 * (self.rows[0] if rows is None else rows)


@dataclasses.dataclass(slots=True, eq=False)
class Running:
  """A request inside the engine.

  Attributes:
    started: time.monotonic() of its arrival.
    row: of the cache; -1 while it waits.
    known: ids of the row that are the conversation: given and sampled.
    cached_tokens: ids of the request that were not encoded again.
    logprobs, versions: of the tokens sampled so far.
  """

  request: engine.DecodeRequest
  future: asyncio.Future[engine.Completion]
  started: float
  row: int = -1
  known: int = 0
  cached_tokens: int = 0
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)

  @property
  def sampled(self) -> int:
    """Number of tokens sampled so far."""
    return len(self.versions)

  def why_ended(self, newest: int) -> trajectory.Stop | None:
    """Returns why sampling is over after the id `newest`, or None."""
    if self.sampled and newest in self.request.stop_ids:
      return "stop"
    return "length" if self.sampled >= self.request.max_tokens else None

  def completion(
    self, tokens: Int32[np.ndarray, " T"], stop: trajectory.Stop
  ) -> engine.Completion:
    """Returns the result of the request."""
    return engine.Completion(
      tokens=tokens,
      logprobs=np.asarray(self.logprobs, np.float32),
      versions=np.asarray(self.versions, np.int32),
      stop=stop,
      cached_tokens=self.cached_tokens,
      decode_s=time.monotonic() - self.started,
    )


def plan(
  running: Sequence[Running],
  ids: Int32[np.ndarray, "S L"],
  cached: Int32[np.ndarray, " S"],
  settings: EngineSettings,
  turn: int,
) -> tuple[list[Running], decode_step.Plan]:
  """Returns the requests of one dispatch, in the order of their plan.

  Those whose new ids fit the same chunk go together; chunk sizes take turns,
  so that none starves; the longest in the engine go first. A plan with as many
  rows as the cache has is in the cache's order, and the others' rows are idle.

  Args:
    running: in the order of admission.
    ids, cached: what each row knows, and how much of it the cache holds.
    turn: number of the dispatch.
  """
  sizes = sorted(settings.chunk_buckets)
  by_chunk: dict[int, list[Running]] = {}
  for one in running:
    new = one.known - int(cached[one.row])
    chunk = next((c for c in sizes if c >= new), sizes[-1])
    by_chunk.setdefault(chunk, []).append(one)
  chunk = sorted(by_chunk)[turn % len(by_chunk)]
  ready = by_chunk[chunk]
  rows = settings.bucket(len(ready))
  chosen = sorted(ready[:rows], key=lambda one: one.row)
  result = decode_step.empty_plan(rows, chunk, idle_row=settings.slots)
  for i, one in enumerate(chosen):
    at = one.row if rows == settings.slots else i
    past = int(cached[one.row])
    new = min(one.known - past, chunk)
    complete = past + new == one.known
    left = one.request.max_tokens - one.sampled
    budget = min(left, settings.steps_per_dispatch) if complete else 0
    stop_ids = one.request.stop_ids
    result.integers[at, :5] = (one.row, past, new, budget, one.request.seed)
    result.integers[at, 5 : 5 + len(stop_ids)] = stop_ids
    result.chunk[at, :new] = ids[one.row, past : past + new]
    result.temperature[at] = one.request.temperature
  return chosen, result
