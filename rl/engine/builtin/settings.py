"""Settings of the built-in engine, and the sizes that follow from them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from models import config as model_config
from models import sharding
from rl.engine import contract
from rl.engine.builtin import decode_step, dispatch_shapes, engine, sizing
from rl.runtime import mesh_thread
from rl.settings import checks

_SLOTS = 256
_ROWS = (8, 32, 128)
_CHUNKS = (4, 32, 256)
_LONG = 1024
"""Length from which on prompts are fed in larger chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
  """The built-in engine: the shapes that it compiles, and its policies.

  Attributes:
    slots, page_size, pages, row_buckets, chunk_buckets, prefill_tokens,
      steps_per_dispatch: see `dispatch_shapes.DispatchShapes`. None follows
      from the model, the longest conversation and the memory of the devices;
      see `sizes`.
    min_copied_ids: a page is copied for a request if that saves the encoding of
      so many ids; fewer are encoded again.
    batching_delay_s: longest wait before a dispatch for sessions whose next
      turn may come at once.
    bias_slots: different biases, and requests with a constraint, in use at
      once; more wait.
    speculative_tokens: drafts of each row and step, or 0: ids that followed the
      last two before (`drafts.py`). Answers stay the same; it pays where text
      repeats itself and few rows decode.
    speculative_rows: most rows of a dispatch that has drafts.
    record_experts: return the chosen experts with answers that ask for them.
    compile_ahead: compile every shape before serving. Otherwise each is
      compiled when it is first needed, and rows wait for it.
  """

  short_name: ClassVar[str] = "built_in"

  slots: int | None = None
  page_size: int = 16
  pages: int | None = None
  row_buckets: tuple[int, ...] | None = None
  chunk_buckets: tuple[int, ...] | None = None
  prefill_tokens: int | None = None
  steps_per_dispatch: int = 8
  min_copied_ids: int = 16
  batching_delay_s: float = 0.002
  bias_slots: int = 32
  speculative_tokens: int = 0
  speculative_rows: int = 8
  record_experts: bool = False
  compile_ahead: bool = False

  def validate(self) -> None:
    """Raises ValueError on a size that cannot work."""
    sizes = ("slots", "page_size", "min_copied_ids", "prefill_tokens")
    checks.at_least(self, 1, *sizes, "steps_per_dispatch", where="engine")
    names = ("bias_slots", "speculative_tokens")
    checks.at_least(self, 0, *names, where="engine")
    checks.at_least(self, 1, "speculative_rows", where="engine")
    if self.speculative_tokens:
      # One token comes before the first draft, and one after it.
      out = "to feed drafts, or use engine.speculative_tokens=0"
      checks.at_least(self, 3, "steps_per_dispatch", where="engine", out=out)
    checks.below(self, 1, "batching_delay_s", where="engine")
    names = ("row_buckets", "chunk_buckets")
    out = "name one or more, or none to have them chosen"
    checks.all_at_least(self, 1, *names, where="engine", out=out)

  def validate_model(self, config: model_config.ModelConfig) -> None:
    """Raises ValueError on a model that such an engine cannot serve.

    One conversation must fit the pages, and only a model with experts can have
    them recorded.
    """
    # One more: while a page is copied, its source is still in use.
    least = -(-config.max_length // self.page_size) + 1
    length, size = config.max_length, f"{self.page_size} positions"
    out = f"one conversation of model.max_length={length} in pages of {size}"
    checks.at_least(self, least, "pages", where="engine", out=f"to hold {out}")
    if self.record_experts and not config.num_experts:
      why = "the model has no experts; use false"
      checks.refuse(self, "record_experts", why=why, where="engine")

  def validate_installed(self, python: str | None = None) -> None:
    """Accepts: it is part of this project."""

  @property
  def split_rows(self) -> dict[str, int]:
    """Numbers of rows that are split over the mesh, by their setting."""
    most = math.inf if self.slots is None else self.slots
    used = {
      f"engine.row_buckets[{place}]": rows
      for place, rows in enumerate(self.row_buckets or ())
      if rows <= most
    }
    return used if self.slots is None else {"engine.slots": self.slots} | used

  @property
  def extras(self) -> sizing.Extras:
    """Settings that take memory beside the sizes."""
    return sizing.Extras(
      self.bias_slots, self.speculative_tokens, self.speculative_rows
    )

  def sizes(
    self,
    config: model_config.ModelConfig,
    rooms: Sequence[sizing.Room],
    longest: int | None = None,
  ) -> dispatch_shapes.DispatchShapes:
    """Returns every size; those that are not set follow.

    There are as many slots, up to 256, as whole conversations fit into the
    room; and pages for all slots, or as many as fit.

    Args:
      rooms: one for each pool that has such engines.
      longest: conversation to expect; None is the longest of the model.

    Raises:
      ValueError: not one conversation for each part of a mesh fits, or no
        dispatch is small enough for drafts.
    """
    longest = min(longest or config.max_length, config.max_length)
    is_long = longest >= _LONG
    unit = math.lcm(*(room.layout.num_batch for room in rooms))
    slots = self.slots or _whole(_SLOTS, unit)
    rows = tuple(_whole(size, unit) for size in (*_ROWS, slots))
    sizes = dispatch_shapes.DispatchShapes(
      slots=slots,
      page_size=self.page_size,
      row_buckets=self.row_buckets or rows,
      chunk_buckets=self.chunk_buckets or _CHUNKS[: 3 if is_long else 2],
      prefill_tokens=self.prefill_tokens or (4096 if is_long else 1024),
      steps_per_dispatch=self.steps_per_dispatch,
    )
    pages = sizes.slots * sizes.width(longest), sizes.width(config.max_length)
    sizes = dataclasses.replace(sizes, pages=self.pages or max(pages) + 1)
    sizes = sizing.fit(
      sizes,
      config,
      rooms,
      longest,
      self.extras,
      slots=self.slots is None,
      pages=self.pages is None,
    )
    if self.speculative_tokens:
      fewest = sizes.rows[0]
      bound = f"the fewest rows of a dispatch, {fewest}: none would have drafts"
      out = f"use {fewest} or more, or fewer rows in engine.row_buckets"
      name, rows = "engine.speculative_rows", self.speculative_rows
      checks.enough(name, rows, fewest, bound, out)
    return sizes

  def capabilities(
    self, config: model_config.ModelConfig
  ) -> contract.Capabilities:
    """Returns the abilities of such an engine."""
    most_listed = min(decode_step.MAX_TOP_LOGPROBS, config.vocab_size)
    return contract.Capabilities(
      in_flight=frozenset({"drain", "abort", "recompute", "keep_kv"}),
      max_length=config.max_length,
      vocab_size=config.vocab_size,
      max_stop_ids=decode_step.MAX_STOP_IDS,
      seeds=True,
      bias=self.bias_slots > 0,
      constraints=self.bias_slots > 0,
      experts=self.record_experts,
      top_logprobs=most_listed,
      # Experts are recorded on the host, beside the pages.
      prefixes=not self.record_experts,
    )

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> engine.BuiltinEngine:
    """Returns an engine of this size, not started."""
    self.validate()
    self.validate_model(config)
    return engine.BuiltinEngine(
      config,
      self.sizes(config, [sizing.Room(layout)]),
      layout,
      thread,
      self.capabilities(config),
      self,
    )


def _whole(rows: int, parts: int) -> int:
  """Returns the next number of rows that so many parts divide."""
  return -(-rows // parts) * parts
