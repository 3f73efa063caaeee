"""The experts chosen for every cached position, page by page, on the host."""

import numpy as np
from jaxtyping import Int, Int32

from models import config as model_config
from rl.engine.builtin import block_manager, decode_step


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

  def record(
    self,
    table: block_manager.PageTable,
    start: int,
    sampled: decode_step.Sampled,
    row: int,
    fed: slice,
  ) -> None:
    """Keeps the experts of the ids that a row fed from position `start` on.

    Args:
      fed: place of the row's new ids among those of the dispatch.
    """
    assert sampled.fed is not None
    assert sampled.stepped is not None
    # The last sampled id has not been fed.
    stepped = sampled.stepped[row, : max(int(sampled.counts[row]) - 1, 0)]
    experts = np.concatenate([sampled.fed[fed], stepped])
    self._pages[self._places(table, start, start + len(experts))] = experts

  def of_conversation(
    self, table: block_manager.PageTable | None, num_ids: int
  ) -> Int[np.ndarray, "ids S k"]:
    """Returns the experts of so many ids, -1 where none are known."""
    experts = np.full((num_ids, *self._pages.shape[2:]), -1, self._pages.dtype)
    if table is not None:
      places = self._places(table, 0, table.cached)
      experts[: table.cached] = self._pages[places]
    return experts

  def _places(
    self, table: block_manager.PageTable, start: int, stop: int
  ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    size = self._pages.shape[1]
    positions = np.arange(start, stop, dtype=np.int32)
    pages = np.asarray(table.pages, np.int32)
    return pages[positions // size], positions % size
