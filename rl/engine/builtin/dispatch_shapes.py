"""Shapes of a dispatch: the compiled ones, and the best for given rows."""

import dataclasses
import math

_CPU_VECTOR = 16
"""XLA's loops over multiples of so many rows have no tails on a CPU."""
_MAX_PADDING = 256
"""Ids of padding that cost less than another program."""
_SHORT = 128
"""Positions up to which no conversation is short beside another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchShapes:
  """Sizes of a dispatch and of the cache that it works on.

  `settings.EngineSettings.sizes` makes them fit a model and its devices.

  Attributes:
    slots: requests decoded at once; more wait.
    page_size: positions of a page of the KV cache.
    pages: of the cache; None is enough for every slot at full length.
    row_buckets: compiled numbers of rows; those above `slots` are `slots`. Rows
      that do not fit the largest go with the next dispatch.
    chunk_buckets: compiled numbers of new ids per row and dispatch.
    prefill_tokens: new ids of one dispatch, about: with chunks of C ids, at
      most `prefill_tokens` / C rows have one.
    steps_per_dispatch: tokens per row sampled before the host looks again.
  """

  slots: int = 256
  page_size: int = 16
  pages: int | None = None
  row_buckets: tuple[int, ...] = (8, 32, 64, 128, 256)
  chunk_buckets: tuple[int, ...] = (4, 32)
  prefill_tokens: int = 1024
  steps_per_dispatch: int = 8

  @property
  def rows(self) -> tuple[int, ...]:
    """The row buckets in use, ascending."""
    return tuple(sorted({min(rows, self.slots) for rows in self.row_buckets}))

  def lengths(self, longest: int) -> tuple[int, ...]:
    """Returns bounds between which conversations go together, ascending."""
    bounds = [_SHORT]
    while 4 * bounds[-1] < longest:
      bounds.append(4 * bounds[-1])
    return (*(bound for bound in bounds if bound < longest), longest)

  def width(self, length: int) -> int:
    """Returns the number of pages for so many positions."""
    return -(-length // self.page_size)

  def num_pages(self, longest: int) -> int:
    """Returns the size of the cache."""
    return self.pages or self.slots * self.width(longest) + 1

  def chunks(self, rows: int, parts: int = 1) -> tuple[tuple[int, int], ...]:
    """Returns every (P, C) of dispatches with so many rows.

    Args:
      parts: of the mesh over which rows are split; they divide P.
    """
    shapes = {(0, 1)}
    for size in self.chunk_buckets:
      counts = [min(rows, max(1, self.prefill_tokens // size))]
      # A burst of new contexts, or a few among rows that decode.
      few = max(1, rows // 4)
      if (counts[0] - few) * size > _MAX_PADDING:
        counts.append(few)
      # Without a tail the bits of a row do not depend on the number of rows.
      unit = math.lcm(parts, _CPU_VECTOR if rows % _CPU_VECTOR == 0 else 1)
      for count in counts:
        shapes.add((min(rows, -(-count // unit) * unit), size))
    return tuple(sorted(shapes, key=lambda shape: shape[::-1]))

  def bucket(self, ready: int, fixed: int) -> int:
    """Returns the number of rows to dispatch when so many are ready.

    Idle rows cost as much as others. Rows that do not fit go with the next
    dispatch.

    Args:
      fixed: the fixed cost of a step, such as reading weights, in rows.
    """
    return max(
      self.rows, key=lambda rows: (min(ready, rows) / (fixed + rows), rows)
    )

  def efficiency(self, ready: int, fixed: int) -> float:
    """Returns the share of a dispatch's cost that so many rows make use of."""
    rows = self.bucket(ready, fixed)
    return min(ready, rows) / (fixed + rows)
