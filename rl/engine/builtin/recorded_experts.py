"""The experts chosen for every id, on the host.

Pages have those of the keys and values that they hold now: after new weights
both are computed again. A request keeps the experts with which its tokens were
sampled, and takes from pages those of context that was cached before it.
"""

import numpy as np
from jaxtyping import Int, Int32

from models import config as model_config
from rl.engine.builtin import block_manager, decode_step
from rl.engine.builtin import request as request_lib


class RecordedExperts:
  """Experts beside the keys and values: pages have the same numbers."""

  def __init__(
    self, config: model_config.ModelConfig, num_pages: int, page_size: int
  ):
    sparse = sum(map(config.is_sparse, range(config.num_layers)))
    shape = (num_pages, page_size, sparse, config.experts_per_token)
    self._pages: Int[np.ndarray, "pages page_size S k"] = np.full(
      shape, -1, config.expert_dtype
    )

  def copy(self, source: int, target: int) -> None:
    """Copies a page."""
    self._pages[target] = self._pages[source]

  def begin(self, state: request_lib.RequestState) -> None:
    """Takes the experts of the ids that a request found in the cache."""
    table = state.page_table
    assert table is not None
    self._keep(state, 0, self._pages[self._places(table, 0, table.cached)])

  def record(
    self,
    state: request_lib.RequestState,
    start: int,
    sampled: decode_step.Sampled,
    row: int,
    fed: slice,
  ) -> None:
    """Keeps the experts of the ids that a row fed from position `start` on.

    Call it when the request has the row's tokens and their place in its table.

    Args:
      fed: place of the row's new ids among those of the dispatch.
    """
    assert sampled.fed is not None
    assert sampled.stepped is not None
    table = state.page_table
    assert table is not None
    # Tokens that did not fit were fed as well.
    experts = np.concatenate([sampled.fed[fed], sampled.stepped[row]])
    experts = experts[: table.cached - start]
    self._pages[self._places(table, start, table.cached)] = experts
    self._keep(state, start, experts)
    if state.num_sampled:
      state.num_routed = max(state.num_routed, table.cached)

  def _keep(
    self,
    state: request_lib.RequestState,
    start: int,
    experts: Int[np.ndarray, "n S k"],
  ) -> None:
    """Gives a request the experts of some ids, but where it has sampled."""
    if not state.request.experts:
      return
    if state.experts is None:
      state.experts = self._unknown(len(state.ids))
    first = max(start, state.num_routed)
    state.experts[first : start + len(experts)] = experts[first - start :]

  def of_conversation(
    self, state: request_lib.RequestState
  ) -> Int[np.ndarray, "ids S k"]:
    """Returns the experts of a request's ids, -1 where none are known."""
    if state.experts is None:
      return self._unknown(state.known)
    return state.experts[: state.known].copy()

  def _unknown(self, num_ids: int) -> Int[np.ndarray, "ids S k"]:
    return np.full((num_ids, *self._pages.shape[2:]), -1, self._pages.dtype)

  def _places(
    self, table: block_manager.PageTable, start: int, stop: int
  ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    size = self._pages.shape[1]
    positions = np.arange(start, stop, dtype=np.int32)
    pages = np.asarray(table.pages, np.int32)
    return pages[positions // size], positions % size
