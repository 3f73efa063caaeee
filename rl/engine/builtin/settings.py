"""Settings of the built-in engine."""

import dataclasses
from typing import ClassVar

from models import config as model_config
from models import sharding
from rl.engine.builtin import dispatch_shapes, engine
from rl.runtime import mesh_thread
from rl.settings import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings(dispatch_shapes.DispatchShapes):
  """The built-in engine: the shapes that it compiles, and its policies.

  Attributes:
    min_copied_ids: a page is copied for a request if it holds at least so many
      ids of its prefix; fewer are encoded again.
    batching_delay_s: longest wait before a dispatch for sessions whose next
      turn may come at once.
    bias_slots: different biases, and requests with a constraint, in use at
      once; more wait.
    record_experts: return the chosen experts with answers that ask for them.
    compile_ahead: compile every shape before serving. Otherwise each is when it
      is first needed, and rows wait for it.
  """

  short_name: ClassVar[str] = "built_in"

  min_copied_ids: int = 16
  batching_delay_s: float = 0.002
  bias_slots: int = 32
  record_experts: bool = False
  compile_ahead: bool = False

  def validate(self) -> None:
    """Raises ValueError on a size that cannot work."""
    sizes = ("slots", "page_size", "min_copied_ids", "prefill_tokens")
    checks.at_least(self, 1, *sizes, "steps_per_dispatch", where="engine")
    checks.at_least(self, 0, "bias_slots", where="engine")
    checks.below_one(self, "batching_delay_s", where="engine")
    names = ("row_buckets", "chunk_buckets", "length_buckets")
    checks.all_at_least(self, 1, *names, where="engine", out="name one or more")

  def validate_model(self, config: model_config.ModelConfig) -> None:
    """Raises ValueError on a model that such an engine cannot serve.

    One conversation must fit the pages, and only a model with experts can have
    them recorded.
    """
    # One more: while a page is copied, its source is still in use.
    least = self.width(config.max_length) + 1
    length, size = config.max_length, f"{self.page_size} positions"
    out = f"one conversation of model.max_length={length} in pages of {size}"
    checks.at_least(self, least, "pages", where="engine", out=f"to hold {out}")
    if self.record_experts and not config.num_experts:
      why = "the model has no experts; use false"
      checks.refuse(self, "record_experts", why=why, where="engine")

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
      self,
      layout,
      thread,
      min_copied_ids=self.min_copied_ids,
      batching_delay_s=self.batching_delay_s,
      bias_slots=self.bias_slots,
      record_experts=self.record_experts,
      compile_ahead=self.compile_ahead,
    )
