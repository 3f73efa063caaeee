"""A request inside the built-in engine: its ids, and what it holds."""

import asyncio
import dataclasses
import operator
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from rl.data import trajectory
from rl.engine import contract
from rl.engine.builtin import block_manager

_MAX_MASKED = 16
"""Tokens under masks after which a request tries again without."""


def now_s() -> float:
  """Returns the time of the running event loop, which decides what is late.

  That may be a logical one. Without a loop it is the machine's.
  """
  try:
    return asyncio.get_running_loop().time()
  except RuntimeError:
    return time.monotonic()


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
  """A request, waiting or running.

  Under a constraint a request is sampled freely too, several tokens a dispatch,
  of which it keeps those that fit. As an id's noise follows from its position,
  an id that is best of all is best of the allowed: the tokens are those that
  masks would give. After one that does not fit some are sampled under masks,
  one a dispatch; filters, which depend on the mask, allow nothing else.

  The next dispatch is planned while the one before still runs. So two numbers
  come twice: as they are, and as they will be when every dispatch in flight
  has sampled all that it may.

  Attributes:
    order: the lowest is admitted first and has its context encoded first; the
      highest gives up its pages first.
    ids: the conversation, with room for all that may be sampled.
    known: ids that are given or sampled.
    planned_known: `known` after the dispatches in flight.
    planned_cached: `page_table.cached` after the dispatches in flight.
    in_flight: dispatches in flight that have a row for it.
    last_dispatch: number of the last one.
    started: `now_s()` of its arrival.
    slot, page_table, bias_row: held while it runs.
    matcher: the state of its constraint after the ids sampled so far.
    num_masked: tokens to be sampled under masks before it is sampled freely.
    backoff: the number of them after the next one that does not fit.
    constraint_error: why its constraint cannot go on, or "".
    is_complete: an id that its constraint knows as an end was sampled.
    prefix_shared: others find its encoded context in the prefix cache.
    cached_tokens: ids that the cache held when it was first admitted; None
      before.
    oldest_kv: lowest version that the last sampled token attended to.
    first_token_s: seconds from its arrival to its first token; 0 before.
    queue_s: seconds from its arrival to its first slot; 0 before.
    logprobs, versions: of the tokens sampled so far.
    top: the most probable ids beside them, if it asks for some, with room for
      all that may be sampled.
    experts: of every id, if it asks for them; None before it runs.
    num_routed: leading ids whose experts stay: tokens were sampled by them,
      even if new weights choose others when these ids are fed again.
    deltas: queue that a stream reads, None ends it.
    num_emitted: sampled tokens that were put there.
  """

  request: contract.DecodeRequest
  future: asyncio.Future[contract.Completion]
  order: tuple[tuple[int, ...], int]
  ids: Int32[np.ndarray, " N"]
  known: int
  started: float = dataclasses.field(default_factory=now_s)
  slot: int = -1
  page_table: block_manager.PageTable | None = None
  bias_row: int = 0
  matcher: contract.TokenMatcher | None = None
  num_masked: int = 1
  backoff: int = 1
  constraint_error: str = ""
  is_complete: bool = False
  planned_cached: int = 0
  planned_known: int = 0
  in_flight: int = 0
  last_dispatch: int = 0
  prefix_shared: bool = False
  cached_tokens: int | None = None
  oldest_kv: int = -1
  first_token_s: float = 0.0
  queue_s: float = 0.0
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  top: contract.TopLogprobs | None = None
  experts: Int[np.ndarray, "ids S k"] | None = None
  num_routed: int = 0
  deltas: asyncio.Queue[contract.Delta | None] | None = None
  num_emitted: int = 0

  def __post_init__(self):
    request = self.request
    if request.constraint is not None:
      self.matcher = request.constraint.deep_copy()
    if request.top_logprobs:
      shape = request.max_tokens, request.top_logprobs
      self.top = contract.TopLogprobs(
        ids=np.empty(shape, np.int32), logprobs=np.empty(shape, np.float32)
      )

  @property
  def pending(self) -> int:
    """Ids that the next dispatch may feed."""
    return self.planned_known - self.planned_cached

  @property
  def remaining(self) -> int:
    """Tokens to sample after the dispatches in flight."""
    given = len(self.request.tokens)
    return self.request.max_tokens - (self.planned_known - given)

  @property
  def max_steps(self) -> int:
    """Tokens that the next dispatch may sample: one under a mask."""
    return min(self.remaining, 1) if self.is_masked else self.remaining

  @property
  def is_masked(self) -> bool:
    """True if a mask decides on its next token."""
    request = self.request
    filters = request.top_k or request.min_p or request.top_p < 1
    return self.matcher is not None and bool(filters or self.num_masked)

  def num_fitting(self, tokens: Sequence[int]) -> int:
    """Goes on in the constraint by sampled tokens, as far as they fit.

    Returns:
      how many these are; the others are not to be kept.
    """
    if self.matcher is None or not tokens:
      return len(tokens)
    masked = self.is_masked
    ends = tokens[-1] in self.request.stop_ids
    inner = tokens[: len(tokens) - ends]
    count = self.matcher.try_consume_tokens(list(inner))
    if ends and count == len(inner):
      # A stop id may be content, too, and ends the answer in the middle of it.
      fits = self.matcher.is_accepting()
      count += fits or self.matcher.try_consume_tokens([tokens[-1]])
    elif masked and not count and self.matcher.is_accepting():
      # Behind a whole answer a mask allows more of it, or an end.
      count, self.is_complete = 1, True
    self.constraint_error = self.matcher.get_error().partition("\n")[0]
    if masked:
      self.num_masked = max(self.num_masked - 1, 0)
      if not count:
        wrong = "its mask allows an id that does not fit"
        self.constraint_error = self.constraint_error or wrong
    elif count == len(tokens):
      self.backoff = 1
    else:
      self.num_masked = self.backoff
      self.backoff = min(2 * self.backoff, _MAX_MASKED)
    return count

  def sync_counters(self) -> None:
    """Makes the planned numbers the real ones: nothing is in flight."""
    assert self.page_table is not None
    self.planned_cached = self.page_table.cached
    self.planned_known = self.known

  @property
  def has_started(self) -> bool:
    """True if it runs, or did before it gave up its pages."""
    return self.cached_tokens is not None

  @property
  def num_sampled(self) -> int:
    """Tokens sampled so far."""
    return len(self.versions)

  @property
  def first_version(self) -> int | None:
    """Version of its first token, if there is one."""
    return self.versions[0] if self.versions else None

  def append(
    self,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    top: tuple[Any, Any] | None = None,
  ) -> None:
    """Appends the tokens of one dispatch, at least one.

    Args:
      top: ids and log-probabilities of the most probable, t x n: at least as
        many at each place as it asks for.
    """
    if not self.versions:
      self.first_token_s = now_s() - self.started
    start, count = self.num_sampled, len(tokens)
    if self.top is not None:
      assert top is not None
      for kept, new in zip((self.top.ids, self.top.logprobs), top, strict=True):
        kept[start : start + count] = new[:count, : kept.shape[1]]
    self.ids[self.known : self.known + count] = tokens
    self.known += count
    self.logprobs += logprobs
    self.versions += [version] * count

  def stop_reason(self) -> trajectory.Stop | None:
    """Returns why sampling is over, or None."""
    sampled = self.num_sampled
    stops = sampled and int(self.ids[self.known - 1]) in self.request.stop_ids
    if stops or self.is_complete:
      return "stop"
    return "length" if sampled >= self.request.max_tokens else None

  def emit_delta(self, completion: contract.Completion | None = None) -> None:
    """Puts the tokens since the last delta into the stream, if one reads."""
    if self.deltas is None or (
      self.num_emitted == self.num_sampled and not completion
    ):
      return
    given = len(self.request.tokens)
    delta = contract.Delta(
      tokens=self.ids[given + self.num_emitted : self.known].copy(),
      logprobs=np.asarray(self.logprobs[self.num_emitted :], np.float32),
      versions=np.asarray(self.versions[self.num_emitted :], np.int32),
      top=self.top and self.top.span(self.num_emitted, self.num_sampled),
      completion=completion,
    )
    self.num_emitted = self.num_sampled
    self.deltas.put_nowait(delta)

  def fail(self, error: Exception) -> None:
    """Ends the request with an error."""
    if not self.future.done():
      self.future.set_exception(error)
    if self.deltas is not None:
      self.deltas.put_nowait(None)


by_order = operator.attrgetter("order")
"""Returns the order of a request, as a sort key."""
