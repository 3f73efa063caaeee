"""What a run sets of its engine: which one, and of what size."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from models import config as model_config
from models import sharding
from rl.runtime import mesh_thread

if TYPE_CHECKING:
  from rl.engine.builtin import engine as builtin_engine


_WHOLE = 16
_WASTE = 256
"""Ids of padding that are cheaper than another program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
  """Size of the built-in engine.

  Attributes:
    slots: requests decoded at once; more wait.
    page_size: positions of a page of the KV cache.
    pages: of the cache; None is enough for every slot at full length.
    least_copied: ids that two conversations have in common within a page for it
      to be copied; fewer are encoded again.
    row_buckets: compiled numbers of rows; `slots` is always one of them.
    chunk_buckets: compiled numbers of new ids of a row and dispatch.
    prefill_tokens: new ids of one dispatch, about: rows with chunks of C ids
      are this over C at most.
    length_buckets: compiled lengths of the conversations of a dispatch; the
      model's longest is always one of them.
    steps_per_dispatch: tokens sampled at most before the host looks again.
    linger_s: how long a dispatch may wait for sessions that come back at once.
    bias_slots: different biases in use at once; requests with more wait.
    record_experts: tell which experts were chosen to who asks.
  """

  short_name: ClassVar[str] = "built_in"

  slots: int = 256
  page_size: int = 16
  pages: int | None = None
  least_copied: int = 16
  row_buckets: tuple[int, ...] = (8, 32, 64, 128)
  chunk_buckets: tuple[int, ...] = (4, 32)
  prefill_tokens: int = 1024
  length_buckets: tuple[int, ...] = (128, 512, 2048, 8192)
  steps_per_dispatch: int = 8
  linger_s: float = 0.002
  bias_slots: int = 4
  record_experts: bool = False

  def validate(self) -> None:
    """Raises ValueError on a size that cannot work."""
    for name in (
      "slots",
      "page_size",
      "least_copied",
      "prefill_tokens",
      "steps_per_dispatch",
    ):
      if getattr(self, name) < 1:
        raise ValueError(f"engine.{name}={getattr(self, name)} is below 1")
    for name in ("row_buckets", "chunk_buckets", "length_buckets"):
      sizes = getattr(self, name)
      if not sizes or min(sizes) < 1:
        raise ValueError(f"engine.{name}={sizes} needs positive sizes")
    if not 0 <= self.linger_s < 1:
      raise ValueError(f"engine.linger_s={self.linger_s} is not in [0, 1)")
    if self.bias_slots < 0:
      raise ValueError(f"engine.bias_slots={self.bias_slots} is below 0")

  def validate_model(self, config: model_config.ModelConfig) -> None:
    """Raises ValueError when one conversation would not fit the pages, or
    experts are to be recorded of a model without.
    """
    # One more: while a page is copied, its source is still in use.
    least = self.width(config.max_length) + 1
    if self.pages is not None and self.pages < least:
      raise ValueError(
        f"engine.pages={self.pages} of {self.page_size} positions cannot hold "
        f"one conversation of model.max_length={config.max_length}; use "
        f"{least} or more"
      )
    if self.record_experts and not config.num_experts:
      raise ValueError(
        "engine.record_experts=true: the model has no experts; use false"
      )

  def validate_installed(self) -> None:
    """Accepts: it is part of this project."""

  @property
  def split_rows(self) -> dict[str, int]:
    """Numbers of rows that are split over the mesh, by their setting."""
    used = {
      f"engine.row_buckets[{place}]": rows
      for place, rows in enumerate(self.row_buckets)
      if rows in self.rows
    }
    return {"engine.slots": self.slots} | used

  @property
  def rows(self) -> tuple[int, ...]:
    """The row buckets in use, ascending."""
    return _within(self.row_buckets, self.slots)

  def lengths(self, longest: int) -> tuple[int, ...]:
    """Returns the length buckets in use, ascending."""
    return _within(self.length_buckets, longest)

  def width(self, length: int) -> int:
    """Returns how many pages hold so many positions."""
    return -(-length // self.page_size)

  def num_pages(self, longest: int) -> int:
    """Returns the size of the cache."""
    return self.pages or self.slots * self.width(longest) + 1

  def chunks(self, rows: int, parts: int = 1) -> tuple[tuple[int, int], ...]:
    """Returns every (P, C) of dispatches with so many rows.

    Args:
      parts: of the mesh over which rows are split; they divide P.
    """
    forms = {(0, 1)}
    for size in self.chunk_buckets:
      counts = [min(rows, max(1, self.prefill_tokens // size))]
      # A burst of new contexts, or a few among rows that decode.
      few = max(1, rows // 4)
      if (counts[0] - few) * size > _WASTE:
        counts.append(few)
      # Then the bits of a row do not depend on how many there are, on a CPU:
      # XLA's loops over multiples of this have no tails.
      unit = math.lcm(parts, _WHOLE if rows % _WHOLE == 0 else 1)
      for count in counts:
        forms.add((min(rows, -(-count // unit) * unit), size))
    return tuple(sorted(forms, key=lambda form: form[::-1]))

  def bucket(self, ready: int, fixed: int) -> int:
    """Returns how many rows to dispatch when so many are ready.

    Idle rows cost as much as others, and what does not fit goes with the next
    dispatch.

    Args:
      fixed: rows that cost as much as a step costs anyway, by reading weights.
    """
    return max(
      self.rows, key=lambda rows: (min(ready, rows) / (fixed + rows), rows)
    )

  def efficiency(self, ready: int, fixed: int) -> float:
    """Returns the share of a dispatch's cost that so many rows make use of."""
    rows = self.bucket(ready, fixed)
    return min(ready, rows) / (fixed + rows)

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> "builtin_engine.JaxEngine":
    """Returns an engine of this size, not started."""
    # The engine reads these settings, so it cannot be imported before them.
    from rl.engine.builtin import engine as builtin_engine

    return builtin_engine.JaxEngine(config, self, layout, thread)


def _within(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
  return (*sorted(size for size in set(sizes) if size < largest), largest)
