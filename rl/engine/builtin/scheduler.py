"""Chooses the requests of the next dispatch. Pure: no clock, task or device.

running --(not in flight)--> ready --+--> choose --> pages --> DispatchChoice
dispatch before --(continuing)-------+
"""

from collections.abc import Sequence

from rl.engine.builtin import dispatch_plan, dispatch_shapes, request_queue
from rl.engine.builtin import request as request_lib

_FIXED_ROWS = {"cpu": 8, "gpu": 512, "tpu": 512}
"""The fixed cost of a step, in rows. Measured on a CPU; elsewhere about the
ratio of arithmetic to memory bandwidth."""
_STEP_POSITIONS = 256
"""The matmuls of a step cost as much as attention to so many positions."""
_PREFILL_EVERY = 7
"""Every seventh dispatch must prefill if it can, so that a lone new request is
not starved. Must exceed the number of lengths, which take turns too."""
_DISPATCH_STEPS = 1
"""The fixed cost of a dispatch, in steps: the host looks."""


class Scheduler:
  """Decides on one dispatch after the other; the engine calls it in turn.

  Args:
    queue: its running requests are scheduled.
    longest: conversation of the model.
    parts: of the mesh over which rows are split.
    platform: of the mesh.
  """

  def __init__(
    self,
    queue: request_queue.RequestQueue,
    shapes: dispatch_shapes.DispatchShapes,
    *,
    longest: int,
    parts: int,
    platform: str,
  ):
    self._queue = queue
    self._shapes = shapes
    self._longest = longest
    self._parts = parts
    self._fixed = _FIXED_ROWS.get(platform, max(_FIXED_ROWS.values()))
    self._turn = 0
    self._survival = 1.0

  def completed(self, dispatch: dispatch_plan.Dispatch, survivors: int) -> None:
    """Learns how many rows of a dispatch sample on."""
    if dispatch.num_continuing:
      share = min(1.0, survivors / dispatch.num_continuing)
      self._survival += 0.1 * (share - self._survival)

  def next(
    self, last: dispatch_plan.Dispatch | None
  ) -> dispatch_plan.DispatchChoice | None:
    """Returns the next dispatch, with pages for all that it may do.

    None: nothing is ready, or it is better to wait for the dispatch before.

    Args:
      last: the dispatch before, if it is in flight.

    Raises:
      RuntimeError: one request alone does not get the pages that it needs.
    """
    ready = self._candidates(last)
    if not ready:
      return None
    self._turn += 1
    choice = self._with_pages(ready)
    if not choice.rows and last is not None:
      return None
    if not choice.rows:
      # Nothing else is under way: the first can take the pages of all others.
      choice = self._with_pages(ready[:1])
      table = ready[0].page_table
      if not choice.rows and table and table.duplicate_pages:
        # Restart the request: that releases duplicate pages.
        self._queue.preempt(ready[0])
        self._queue.admit(started_only=True)
        ready = self._candidates(None)
        if not ready:  # It was cancelled just now.
          return None
        choice = self._with_pages(ready[:1])
    if not choice.rows:
      blocks = self._queue.blocks
      raise RuntimeError(
        f"request {ready[0].request.request_id} gets no pages: of "
        f"{blocks.num_pages}, {blocks.num_free} are free"
      )
    for state in choice.rows:
      state.last_dispatch = self._turn
    return choice

  def _candidates(
    self, last: dispatch_plan.Dispatch | None
  ) -> list[request_lib.RequestState]:
    """Returns the requests that may be dispatched now, in order; none to wait.

    While a dispatch is in flight, the next is worth planning when others fill
    it, or when most of the same requests will continue.
    """
    running = self._queue.running
    ready = sorted(
      (state for state in running if not state.in_flight),
      key=request_lib.by_order,
    )
    if last is None:
      return ready
    if ready:
      alone, together = (
        self._shapes.efficiency(len(rows), self._fixed)
        for rows in (ready, running)
      )
      if 4 * alone >= 3 * together:
        return ready
    continuing = [
      state
      for state in last.rows
      # Under a constraint the host decides which tokens are kept.
      if state.page_table and state.remaining > 0 and not state.matcher
    ]
    if 4 * len(continuing) * self._survival < 3 * len(last.rows):
      return []
    return sorted([*continuing, *ready], key=request_lib.by_order)

  def _with_pages(
    self, ready: Sequence[request_lib.RequestState]
  ) -> dispatch_plan.DispatchChoice:
    choice = choose(
      ready,
      self._shapes,
      longest=self._longest,
      parts=self._parts,
      fixed=self._fixed,
      turn=self._turn,
    )
    rows: list[request_lib.RequestState] = []
    for state in choice.rows:
      # Not if another of these has just taken its pages.
      if state.page_table and self._queue.ensure_pages(
        state, choice.needed_length(state), rows
      ):
        rows.append(state)
    return choice._replace(rows=rows)


def choose(
  ready: Sequence[request_lib.RequestState],
  shapes: dispatch_shapes.DispatchShapes,
  *,
  longest: int,
  parts: int = 1,
  fixed: int = 8,
  turn: int = 0,
) -> dispatch_plan.DispatchChoice:
  """Returns the rows of the next dispatch, and its shape.

  Args:
    ready: in order; at least one.
    longest: conversation of the model.
    parts: of the mesh over which rows are split.
    fixed: see `DispatchShapes.bucket`.
    turn: number of the dispatch: lengths take turns.
  """
  ready = _of_one_length(ready, shapes, longest, fixed, turn)
  context = [state for state in ready if state.pending > 1]
  decoding = [state for state in ready if state.pending == 1]
  num_rows, chunks = shapes.bucket(len(ready), fixed), (0, 1)
  if context:
    pending = [state.pending for state in context]
    none, *some = shapes.chunks(num_rows, parts)
    options, num_decoding = [none, *some], len(decoding)
    if turn % _PREFILL_EVERY == 0:
      # Rows that decode would make the shortest chunks look best.
      options, num_decoding = some, 0
    chunks = max(
      options,
      key=lambda option: _worth(pending, num_decoding, num_rows, option),
    )
  first = context[: chunks[0]]
  room = num_rows - len(first)
  if room < len(decoding):
    # In turns, or some would begin when others have ended, and end alone.
    decoding.sort(key=lambda state: (state.last_dispatch, -state.remaining))
  rows = [*first, *decoding[:room]]
  num_rows = next(
    size
    for size in shapes.rows
    if size >= len(rows) and chunks in shapes.chunks(size, parts)
  )
  remaining = [state.max_steps for state in rows if state.pending <= chunks[1]]
  steps = num_steps(remaining, shapes.steps_per_dispatch)
  return dispatch_plan.DispatchChoice(rows, chunks, num_rows, steps)


def _worth(
  pending: Sequence[int], decoding: int, rows: int, chunks: tuple[int, int]
) -> float:
  """Returns the ids that a dispatch feeds, divided by its cost.

  Args:
    pending: new ids of rows with context, in order.
    decoding: number of rows with one new id.
  """
  count, size = chunks
  context = sum(min(ids, size) for ids in pending[:count])
  fed = context + min(decoding, rows - min(count, len(pending)))
  # Reading the weights costs as much as 64 ids; a row's keys and values, 6.
  return fed / (count * (size - 1) + rows * 6 + 64)


def num_steps(remaining: Sequence[int], max_steps: int) -> int:
  """Returns the steps that sample the most tokens for the cost of a dispatch.

  Args:
    remaining: tokens that each row still wants.
  """
  counts = [0] * (max_steps + 1)
  for tokens in remaining:
    counts[min(tokens, max_steps)] += 1
  best, best_rate, tokens = 1, 0.0, 0
  continuing = len(remaining) - counts[0]
  for steps in range(1, max_steps + 1):
    if not continuing:
      break
    tokens += continuing
    continuing -= counts[steps]
    rate = tokens / (steps + _DISPATCH_STEPS)
    if rate >= best_rate:
      best, best_rate = steps, rate
  return best


def _of_one_length(
  ready: Sequence[request_lib.RequestState],
  shapes: dispatch_shapes.DispatchShapes,
  longest: int,
  fixed: int,
  turn: int,
) -> Sequence[request_lib.RequestState]:
  """Returns rows of about one length.

  Every row of a dispatch costs as much as the longest. So each length has a
  dispatch of its own, unless that would leave too few rows in one.
  """
  lengths = shapes.lengths(longest)
  if len(lengths) == 1:
    return ready
  steps = shapes.steps_per_dispatch
  buckets: dict[int, list[request_lib.RequestState]] = {}
  for state in ready:
    needed = min(state.planned_known + steps, longest)
    length = next(size for size in lengths if size >= needed)
    buckets.setdefault(length, []).append(state)

  def cost(rows: Sequence[request_lib.RequestState], length: int) -> int:
    return shapes.bucket(len(rows), fixed) * (_STEP_POSITIONS + length)

  merged: list[tuple[int, list[request_lib.RequestState]]] = []
  for length in sorted(buckets, reverse=True):
    rows = buckets[length]
    if merged:
      longer, others = merged[-1]
      apart = cost(others, longer) + cost(rows, length)
      if cost([*others, *rows], longer) <= apart:
        together = sorted([*others, *rows], key=request_lib.by_order)
        merged[-1] = (longer, together)
        continue
    merged.append((length, rows))
  _, rows = merged[turn % len(merged)]
  return rows
