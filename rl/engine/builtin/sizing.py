"""The sizes of an engine that follow from its model and its devices' memory.

slots x (pages of a conversation + its logits) + a dispatch <= room
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from models import config as model_config
from models import memory_report, sharding
from rl.engine.builtin import dispatch_shapes


class Room(NamedTuple):
  """The mesh of a pool, and what is free on each of its devices.

  Attributes:
    num_bytes: for the cache and dispatches; None is not known.
  """

  layout: sharding.Layout
  num_bytes: int | None = None


class Cost(NamedTuple):
  """Bytes on one device: of a page, of each slot beside it, and of the rest."""

  page: int
  slot: float
  rest: int


def lines(
  sizes: dispatch_shapes.DispatchShapes,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
) -> dict[str, int]:
  """Returns bytes on one device, by purpose, of the cache and of a dispatch."""
  pages, size = sizes.num_pages(config.max_length), sizes.page_size
  cached = memory_report.cache_bytes(
    config, layout, pages=pages, page_size=size
  )
  rows = -(-sizes.slots // layout.num_batch)
  ids = -(-sizes.prefill_tokens // layout.num_batch) + rows
  return {
    f"KV cache, {pages * size:,} tokens in {pages:,} pages": cached,
    "activations of a dispatch, about": memory_report.dispatch_bytes(
      config, layout, rows=rows, ids=ids
    ),
  }


def fit(
  sizes: dispatch_shapes.DispatchShapes,
  config: model_config.ModelConfig,
  rooms: Sequence[Room],
  longest: int,
  *,
  slots: bool,
  pages: bool,
) -> dispatch_shapes.DispatchShapes:
  """Returns the sizes with as many slots and pages as fit, up to the given.

  Args:
    rooms: of all pools with such engines.
    slots, pages: which of the two may be fewer.

  Raises:
    ValueError: not one conversation for each part of a mesh fits.
  """
  unit = math.lcm(*(room.layout.num_batch for room in rooms))
  text, width = memory_report.readable, sizes.width(longest)
  least = max(unit * width, sizes.width(config.max_length)) + 1
  for room in rooms:
    if room.num_bytes is None:
      continue
    cost = _cost(sizes, config, room.layout, unit)
    left = room.num_bytes - cost.rest
    num_slots, num_pages = sizes.slots, sizes.num_pages(config.max_length)
    if slots:
      each = cost.slot + (width * cost.page if pages else 0)
      taken = cost.page * (1 if pages else num_pages)
      num_slots = min(num_slots, int((left - taken) // each // unit) * unit)
    if pages:
      most = max(num_slots * width + 1, least)
      num_pages = int((left - num_slots * cost.slot) // cost.page)
      num_pages = min(sizes.num_pages(config.max_length), most, num_pages)
    if num_slots < unit or num_pages < least:
      count = unit if slots else num_slots
      needed = round(cost.rest + count * cost.slot + least * cost.page)
      raise ValueError(
        f"engine: slots={count} for conversations of {longest} tokens take "
        f"{text(needed)} of a device, where {text(room.num_bytes)} are left "
        "beside the weights and training; lower engine.slots, "
        "rollout.max_tokens, model.max_length or batch.rows, or split placement"
        " over more devices"
      )
    sizes = dataclasses.replace(sizes, slots=num_slots, pages=num_pages)
  return sizes


def _cost(
  sizes: dispatch_shapes.DispatchShapes,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  unit: int,
) -> Cost:
  """Returns the cost of each part: bytes are linear in slots and pages."""

  def total(slots, pages):
    tried = dataclasses.replace(sizes, slots=slots, pages=pages)
    return sum(lines(tried, config, layout).values())

  one = total(unit, 1)
  slot = (total(2 * unit, 1) - one) / unit
  page = total(unit, 2) - one
  return Cost(page, slot, round(one - unit * slot - page))
