"""Settings of sglang-jax as a decode engine.

  SglangSettings.build -> SglangEngine --start--> sglang-jax's Engine

Needs `pip install twinmesh[sglang]`.
"""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import ClassVar

from models import config as model_config
from models import sharding
from rl.engine import contract
from rl.engine.sglang import compat_0_0_2 as compat
from rl.engine.sglang import engine as sglang_engine
from rl.engine.sglang import requests as sglang_requests
from rl.engine.sglang import upstream as sglang_upstream
from rl.engine.sglang import weights as sglang_weights
from rl.runtime import mesh_thread
from rl.settings import checks

_KEYS_ON_CPU = 2560
"""Keys of all rows together, with which each query is compared: beyond it more
rows cost more than they save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SglangSettings:
  """Size of an engine of sglang-jax.

  None and () stand for a choice by model and platform: on a CPU its attention
  compares each conversation of a batch with all of them, so small batches are
  faster.

  Attributes:
    slots: requests decoded at once.
    row_buckets: compiled numbers of decoded rows; `slots` is always one.
    token_buckets: compiled numbers of ids encoded at once; a prompt longer than
      the largest is encoded in parts.
    max_total_tokens: ids whose keys and values fit the cache.
    page_size: ids of a page of the cache; prefixes are shared in whole pages.
    memory_fraction: of an accelerator's memory, for weights and cache.
    patience_s: longest step, compilation included, before the engine counts
      as dead.
  """

  short_name: ClassVar[str] = "sglang"

  slots: int | None = None
  row_buckets: tuple[int, ...] = ()
  token_buckets: tuple[int, ...] = ()
  max_total_tokens: int | None = None
  page_size: int | None = None
  memory_fraction: float = 0.8
  patience_s: float = 900.0

  def validate(self) -> None:
    """Raises ValueError on a size that cannot work."""
    sizes = ("slots", "max_total_tokens", "page_size")
    checks.at_least(self, 1, *sizes, where="engine", out="use none or more")
    for sizes in ("row_buckets", "token_buckets"):
      if getattr(self, sizes):  # () leaves the choice to the platform.
        checks.all_at_least(self, 1, sizes, where="engine")
    checks.below(self, 1, "memory_fraction", where="engine")
    checks.finite_above(
      self, 0, "memory_fraction", "patience_s", where="engine"
    )

  def validate_installed(self, python: str | None = None) -> None:
    """Raises ValueError when sglang-jax is missing."""
    checks.installed("engine=sglang", "sglang", "sgl_jax", python=python)

  def validate_model(self, config: model_config.ModelConfig) -> None:
    """Raises ValueError on a model that such an engine cannot serve."""
    sglang_weights.check(config)
    self.sizes(config, "cpu")

  @property
  def split_rows(self) -> Mapping[str, int]:
    """Numbers of rows that are split over the mesh: none."""
    return {}

  def sizes(
    self, config: model_config.ModelConfig, platform: str
  ) -> sglang_requests.Sizes:
    """Returns the sizes for a model on "cpu", "gpu" or "tpu".

    Raises:
      ValueError: the longest conversation does not fit.
    """
    on_cpu = platform == "cpu"
    length = config.max_length + sglang_upstream.SPARE_IDS
    slots = self.slots or (
      max(4, min(64, _KEYS_ON_CPU // length)) if on_cpu else 256
    )
    page_size = self.page_size or (1 if on_cpu else 128)
    rows = self.row_buckets or ((slots // 4,) if on_cpu else (8, 32, 128))
    tokens = self.token_buckets
    if not tokens:
      tokens = (64, 256) if on_cpu else (512, 2048, 4096)
    # Its own buckets of tokens are whole pages, and at least `slots`.
    tokens = {-(-max(size, slots) // page_size) * page_size for size in tokens}
    # Twice: a request that gave up its pages is admitted again when its
    # conversation and, once more, all that it may sample fit.
    needed = -(-2 * length // page_size) * page_size
    total = self.max_total_tokens
    if total is None and on_cpu:
      total = max(slots, 32) * needed
    if total is not None and total < needed:
      raise ValueError(
        f"engine.max_total_tokens={total} does not hold model.max_length="
        f"{config.max_length} and {sglang_upstream.SPARE_IDS} spare ids twice, "
        f"in pages of {page_size}; use {needed} or more"
      )
    return sglang_requests.Sizes(
      slots=slots,
      row_buckets=tuple(sorted({r for r in rows if 0 < r < slots} | {slots})),
      token_buckets=tuple(sorted(tokens)),
      max_total_tokens=total,
      min_tokens=needed,
      page_size=page_size,
      # On a CPU `max_total_tokens` is the bound.
      memory_fraction=0.95 if on_cpu else self.memory_fraction,
      patience_s=self.patience_s,
    )

  def capabilities(
    self, config: model_config.ModelConfig
  ) -> contract.Capabilities:
    """Returns the abilities of such an engine."""
    return contract.Capabilities(
      in_flight=frozenset({"drain", "abort", "recompute", "keep_kv"}),
      max_length=config.max_length,
      vocab_size=config.vocab_size,
      max_stop_ids=config.vocab_size,
      seeds=True,
      bias=False,
      constraints=False,
      experts=False,
      top_logprobs=0,
    )

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> sglang_engine.SglangEngine:
    """Returns an engine, not started.

    Raises:
      ValueError: sglang-jax is not installed, or cannot serve this model.
    """
    self.validate()
    self.validate_installed()
    self.validate_model(config)
    sglang_weights.check_split(config, layout.mesh.size)
    released = importlib.metadata.version("sglang-jax") == compat.RELEASE
    if released and config.num_sparse and layout.mesh.size > 1:
      raise ValueError(
        f"sglang-jax {compat.RELEASE} serves experts on one device only; use "
        "its main"
      )
    sizes = self.sizes(config, layout.platform)
    upstream = sglang_upstream.Upstream(config, sizes, layout, released)
    able = self.capabilities(config)
    return sglang_engine.SglangEngine(
      config, sizes, layout, thread, upstream, able
    )
