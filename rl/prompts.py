"""The stream of tasks: seeded, infinite, with a cursor that is checkpointed."""

from collections.abc import Mapping
from typing import Any

import grain

from envs import base

_SPAN = 2**31 - 1


class Prompts:
  """A grain pipeline of training tasks in a seeded order.

  The coordinator calls `next`; `cursor` and `seek` save and restore the place.
  """

  def __init__(self, source: base.Source, seed: int):
    pipeline = (
      grain.MapDataset.range(_SPAN)
      .seed(seed)
      .shuffle()
      .map(lambda index: source.task(int(index), "train"))
      .repeat()
    )
    # No read threads: tasks are made on demand and the order is exact.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._stream = iter(pipeline.to_iter_dataset(options))

  def next(self) -> base.Task:
    """Returns the next task."""
    return next(self._stream)

  @property
  def cursor(self) -> dict[str, Any]:
    """JSON data from which `seek` goes on."""
    return dict(self._stream.get_state())

  def seek(self, cursor: Mapping[str, Any]) -> None:
    """Goes to a saved place."""
    self._stream.set_state(dict(cursor))
