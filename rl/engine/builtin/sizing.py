"""The sizes of an engine that follow from its model and its devices' memory.

slots x (pages of a conversation + its logits) + biases + a dispatch <= room
"""

import bisect
import dataclasses
import functools
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


class Extras(NamedTuple):
  """Settings that take memory beside the sizes, as in `ModelRunner`."""

  bias_slots: int = 0
  num_drafts: int = 0
  draft_rows: int = 0


def lines(
  sizes: dispatch_shapes.DispatchShapes,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  extras: Extras,
) -> dict[str, int]:
  """Returns bytes on one device, by purpose: what is kept, and a dispatch."""
  slots, drafts = sizes.slots, extras.num_drafts
  pages, size = sizes.num_pages(config.max_length), sizes.page_size
  parts = layout.num_batch
  # A step of drafted rows samples after each draft too.
  drafted = min(slots, extras.draft_rows) if drafts else 0
  rows, sampled = (
    -(-count // parts) for count in (slots, max(slots, drafted * (1 + drafts)))
  )
  held = {
    f"KV cache, {pages * size:,} tokens in {pages:,} pages": (
      memory_report.cache_bytes(config, layout, pages=pages, page_size=size)
    ),
    "biases of requests": 4 * (extras.bias_slots + 1) * config.vocab_size,
  }
  if drafts:
    held["ids of conversations, for drafts"] = 4 * slots * config.max_length
  # A dispatch has those of its rows, twice more where it proposes drafts.
  copies = max(slots, 3 * drafted) if drafts else 0
  activations = memory_report.dispatch_bytes(
    config,
    layout,
    rows=rows,
    ids=max(-(-sizes.prefill_tokens // parts) + rows, sampled),
    sampled=sampled,
  )
  return held | {
    "activations of a dispatch, about": (
      activations + 4 * copies * config.max_length
    )
  }


def fit(
  sizes: dispatch_shapes.DispatchShapes,
  config: model_config.ModelConfig,
  rooms: Sequence[Room],
  longest: int,
  extras: Extras,
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
  for layout, room_bytes in rooms:
    if room_bytes is None:
      continue
    taken = functools.partial(_taken, sizes, config, layout, extras)
    num_slots, num_pages = sizes.slots, sizes.num_pages(config.max_length)
    if slots:
      counts = range(unit, num_slots + 1, unit)
      num_slots = unit * bisect.bisect_right(
        counts,
        room_bytes,
        key=lambda n: taken(n, n * width + 1 if pages else num_pages),
      )
    if pages and num_slots:
      most = max(num_slots * width + 1, least)
      # Bytes are linear in pages.
      first, second = (taken(num_slots, count) for count in (1, 2))
      fitting = 1 + (room_bytes - first) // (second - first)
      num_pages = min(num_pages, most, fitting)
    if num_slots < unit or num_pages < least:
      count = unit if slots else num_slots
      raise ValueError(
        f"engine: slots={count} for conversations of {longest} tokens take "
        f"{text(taken(count, least))} of a device, where {text(room_bytes)} "
        "are left beside the weights and training; lower engine.slots, "
        "rollout.max_tokens, model.max_length, batch.rows or "
        "overlap.max_staleness, or split placement over more devices"
      )
    sizes = dataclasses.replace(sizes, slots=num_slots, pages=num_pages)
  return sizes


def _taken(
  sizes: dispatch_shapes.DispatchShapes,
  config: model_config.ModelConfig,
  layout: sharding.Layout,
  extras: Extras,
  slots: int,
  pages: int,
) -> int:
  """Returns bytes on one device of an engine with so many slots and pages."""
  sizes = dataclasses.replace(sizes, slots=slots, pages=pages)
  return sum(lines(sizes, config, layout, extras).values())
