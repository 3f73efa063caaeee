"""A dispatch: its requests, its shape, and the arrays that the device reads.

  Scheduler.next -> DispatchChoice -> build -> Dispatch.plan -> device

Letters: R rows, P rows with chunks of C ids, W pages of a table.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rl.engine import contract
from rl.engine.builtin import decode_step, dispatch_shapes
from rl.engine.builtin import request as request_lib


class DispatchChoice(NamedTuple):
  """The rows of a dispatch and its shape.

  Attributes:
    rows: those with more than one new id come first.
    chunks: (P, C).
    num_rows: R.
    steps: tokens that each row may sample.
  """

  rows: Sequence[request_lib.RequestState]
  chunks: tuple[int, int]
  num_rows: int
  steps: int

  def needed_length(self, state: request_lib.RequestState) -> int:
    """Returns the number of positions for which a row must have pages."""
    new = min(state.pending, self.chunks[1])
    return min(state.planned_cached + new + self.steps, len(state.ids))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
  """One launch of the decode program.

  Attributes:
    rows: its requests, in the order of its rows.
    fed: number of new ids of each.
    starts: place of each row's new ids among those of the dispatch.
    chunks: (P, C).
    num_continuing: rows that will want more tokens, unless a stop id comes.
    version: of the weights.
    masks: (bias row, constraint) of each row that samples under a mask.
    lists_top: a row asks for the most probable ids beside its tokens.
  """

  rows: Sequence[request_lib.RequestState]
  fed: Sequence[int]
  starts: Sequence[int]
  chunks: tuple[int, int]
  num_continuing: int
  plan: decode_step.DispatchPlan
  version: int
  masks: Sequence[tuple[int, contract.TokenMatcher]] = ()
  lists_top: bool = False


def build(
  choice: DispatchChoice,
  shapes: dispatch_shapes.DispatchShapes,
  version: int,
  *,
  longest: int,
) -> Dispatch:
  """Returns the dispatch, and counts it in the planned numbers of its rows.

  Args:
    choice: every row has the pages that it needs.
    longest: conversation of the model.
  """
  plan = decode_step.empty_plan(
    choice.num_rows,
    choice.chunks,
    shapes.width(longest),
    slots=shapes.slots,
  )
  count, size = choice.chunks
  ids, stop_ids, tables = plan.ids, plan.stop_ids, plan.tables
  columns, floats, fed, starts, masks = [], [], [], [], []
  for i, state in enumerate(choice.rows):
    assert state.page_table is not None
    new = min(state.pending, size if i < count else 1)
    budget = min(state.max_steps, choice.steps) if new == state.pending else 0
    start = i * size if i < count else count * (size - 1) + i
    # Its last id is being sampled: known on the device, not yet here.
    follow = state.in_flight > 0 and state.planned_known > state.known
    request, masked = state.request, state.is_masked
    # A bias row may hold the mask of an earlier token.
    bias_row = state.bias_row if masked or state.matcher is None else 0
    first = state.planned_cached
    counts = state.slot, first, new, budget
    columns.append((*counts, request.seed, request.top_k, bias_row, follow))
    floats.append((request.temperature, request.top_p, request.min_p))
    stop_ids[i, : len(request.stop_ids)] = request.stop_ids
    pages = state.page_table.pages
    tables[i, : len(pages)] = pages
    ids[start : start + new] = state.ids[first : first + new]
    state.planned_cached += new + max(budget - 1, 0)
    state.planned_known += budget
    state.in_flight += 1
    if budget and masked and state.matcher is not None:
      masks.append((state.bias_row, state.matcher))
    fed.append(new)
    starts.append(start)
  # At once: numpy takes longer to find a place than to fill it.
  plan.integers[: len(columns), : decode_step.STEPS] = columns
  plan.integers[:, decode_step.STEPS] = choice.steps
  plan.floats[: len(floats)] = floats
  num_continuing = sum(state.remaining > 0 for state in choice.rows)
  return Dispatch(
    rows=choice.rows,
    fed=fed,
    starts=starts,
    chunks=choice.chunks,
    num_continuing=num_continuing,
    plan=plan,
    version=version,
    masks=masks,
    lists_top=any(state.request.top_logprobs for state in choice.rows),
  )
