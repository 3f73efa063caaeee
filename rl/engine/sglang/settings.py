"""sglang-jax as a decode engine: settings, and the only importer of sgl_jax.

  SglangSettings.build -> SglangEngine --start--> sglang-jax's Engine

Its primary target is sglang-jax's main; of the releases it takes 0.0.2, by
`rl.engine.sglang.compat_0_0_2`. Needs `pip install twinmesh[sglang]`.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from models import config as model_config
from models import sharding
from rl.engine.sglang import compat_0_0_2 as compat
from rl.engine.sglang import engine as sglang_engine
from rl.engine.sglang import process_isolation, scheduler_thread
from rl.engine.sglang import requests as sglang_requests
from rl.engine.sglang import weights as sglang_weights
from rl.runtime import mesh_thread

# Positions that its checks of lengths keep free behind a conversation.
_SPARE = 8
# Of all rows, that each row's query is compared with: more rows cost more than
# they save.
_KEYS_ON_CPU = 2560
# Its watchdog kills our parent process; we have our own.
_NEVER_S = 1e8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SglangSettings:
  """Size of an engine of sglang-jax.

  None and () are chosen for the model and the platform: on a CPU its attention
  looks at all conversations of a batch for each of them, so that small batches
  are faster.

  Attributes:
    slots: requests decoded at once.
    row_buckets: compiled numbers of decoded rows; `slots` is always one.
    token_buckets: compiled numbers of ids encoded at once; the largest is the
      most, and a longer prompt is encoded in parts.
    max_total_tokens: ids whose keys and values are kept.
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
    for name in ("slots", "max_total_tokens", "page_size"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"engine.{name}={value} is below 1; use None or more")
    for name in ("row_buckets", "token_buckets"):
      sizes = getattr(self, name)
      if sizes and min(sizes) < 1:
        raise ValueError(f"engine.{name}={sizes} needs positive sizes")
    if not 0 < self.memory_fraction < 1:
      raise ValueError(
        f"engine.memory_fraction={self.memory_fraction} is not in (0, 1)"
      )
    if not 0 < self.patience_s < math.inf:
      raise ValueError(f"engine.patience_s={self.patience_s} is no time")

  def validate_installed(self) -> None:
    """Raises ValueError when sglang-jax is missing."""
    if importlib.util.find_spec("sgl_jax") is None:
      raise ValueError(
        "engine=sglang needs sglang-jax: pip install twinmesh[sglang]"
      )

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
    length = config.max_length + _SPARE
    slots = self.slots or (
      max(4, min(64, _KEYS_ON_CPU // length)) if on_cpu else 256
    )
    page_size = self.page_size or (1 if on_cpu else 128)
    rows = self.row_buckets or ((slots // 4,) if on_cpu else (8, 32, 128))
    tokens = self.token_buckets
    if not tokens:
      tokens = (64, 256) if on_cpu else (512, 2048, 4096)
    # Its own buckets of tokens are no smaller than `slots`, and whole pages.
    tokens = {-(-max(size, slots) // page_size) * page_size for size in tokens}
    # Twice: one that gave up its pages is let in again when its conversation
    # and, once more, all that it may sample fit.
    needed = -(-2 * length // page_size) * page_size
    total = self.max_total_tokens
    if total is None and on_cpu:
      total = max(slots, 32) * needed
    if total is not None and total < needed:
      raise ValueError(
        f"engine.max_total_tokens={total} does not hold model.max_length="
        f"{config.max_length} and {_SPARE} spare ids twice, in pages of "
        f"{page_size}; use {needed} or more"
      )
    return sglang_requests.Sizes(
      slots=slots,
      row_buckets=tuple(sorted({r for r in rows if 0 < r < slots} | {slots})),
      token_buckets=tuple(sorted(tokens)),
      max_total_tokens=total,
      least_tokens=needed,
      page_size=page_size,
      # A CPU's share is of all memory, and `max_total_tokens` bounds it.
      memory_fraction=0.95 if on_cpu else self.memory_fraction,
      patience_s=self.patience_s,
    )

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> sglang_engine.SglangEngine:
    """Returns an engine that `start` will start.

    Raises:
      ValueError: sglang-jax is not installed, or cannot serve this model.
    """
    self.validate()
    self.validate_installed()
    self.validate_model(config)
    sglang_weights.check_split(config, layout.mesh.size)
    released = importlib.metadata.version("sglang-jax") == compat.RELEASE
    if released:
      _check_released(config, layout)
    sizes = self.sizes(config, layout.platform)
    upstream = _Upstream(config, sizes, layout, released)
    return sglang_engine.SglangEngine(config, sizes, layout, thread, upstream)


def _check_released(
  config: model_config.ModelConfig, layout: sharding.Layout
) -> None:
  """Raises ValueError for what release 0.0.2 cannot do."""
  if config.num_sparse and layout.mesh.size > 1:
    raise ValueError(
      f"sglang-jax {compat.RELEASE} serves experts on one device only; "
      "use its main"
    )


class _Upstream:
  """`requests.Upstream` with the installed sgl_jax."""

  def __init__(
    self,
    config: model_config.ModelConfig,
    sizes: sglang_requests.Sizes,
    layout: sharding.Layout,
    released: bool,
  ):
    self._config = config
    self._sizes = sizes
    self._layout = layout
    self._released = released

  def start(self, bridge: scheduler_thread.Bridge) -> None:
    """Starts sglang-jax, whose scheduler the bridge then drives."""
    with process_isolation.contained(self._layout.platform):
      if self._released:
        compat.apply()
      # It warns of what we do on purpose.
      logging.getLogger("sgl_jax").setLevel(logging.ERROR)
      nnx = importlib.import_module("flax.nnx")
      zmq = importlib.import_module("zmq")
      entry = _module("entrypoints.engine")
      self._scheduler = _module("managers.scheduler").Scheduler
      self._messages = _module("managers.io_struct")
      self._sampling = _module("sampling.sampling_params")
      self._prefixes = _module("mem_cache.base_prefix_cache")

      def serve(args: Any, ports: Any) -> dict[str, Any]:
        # Upstream's own thread kills the process when a step fails.
        scheduler = self._scheduler(args, ports)
        process_isolation.close_sockets(scheduler, zmq.Socket)
        bridge.serve(scheduler, nnx.split)
        return {
          "status": "ready",
          "max_total_num_tokens": scheduler.max_total_num_tokens,
          "max_req_input_len": scheduler.max_req_input_len,
        }

      entry.run_scheduler_loop_thread_after_create = serve
      # There is no text to make.
      entry.run_detokenizer_thread = lambda *args: None
      with tempfile.TemporaryDirectory() as directory:
        args = self._arguments(directory)
        if self._released:
          with compat.building(self._layout.devices):
            self._engine = entry.Engine(**args)
        else:
          self._engine = entry.Engine(**args)
      process_isolation.stays_alive(self._engine)
      for owner in (self._engine, self._engine.tokenizer_manager):
        process_isolation.close_sockets(owner, zmq.Socket)
    held = self._engine.scheduler_info["max_total_num_tokens"]
    if held < self._sizes.least_tokens:
      raise RuntimeError(
        f"sglang-jax has memory for {held} ids, but two of the longest "
        f"conversations have {self._sizes.least_tokens}; raise "
        f"engine.memory_fraction={self._sizes.memory_fraction} or lower "
        "model.max_length"
      )

  def _arguments(self, directory: str) -> dict[str, Any]:
    sizes, layout = self._sizes, self._layout
    length = self._config.max_length + _SPARE
    data = sglang_weights.config_json(self._config, length)
    text = json.dumps(data)
    pathlib.Path(directory, "config.json").write_text(text, "utf-8")
    arguments: dict[str, Any] = {
      "model_path": directory,
      "load_format": "dummy",
      "skip_tokenizer_init": True,
      "dtype": self._config.compute.dtype,
      "device": layout.platform,
      "tp_size": layout.mesh.size,
      "attention_backend": "fa" if layout.platform == "tpu" else "native",
      "enable_single_process": True,
      "disable_overlap_schedule": True,
      # Not for its sampler, but to be given the seeds.
      "enable_deterministic_sampling": True,
      "random_seed": 0,
      "log_level": "error",
      "watchdog_timeout": _NEVER_S,
      "mem_fraction_static": sizes.memory_fraction,
      "max_total_tokens": sizes.max_total_tokens,
      "max_running_requests": sizes.slots,
      "context_length": length,
      "page_size": sizes.page_size,
      "max_prefill_tokens": sizes.token_buckets[-1],
      "chunked_prefill_size": sizes.token_buckets[-1],
      "precompile_token_paddings": list(sizes.token_buckets),
      "precompile_bs_paddings": list(sizes.row_buckets),
    }
    if self._released:
      return arguments | {"disable_jax_precompile": True}
    first = min(device.id for device in jax.devices())
    indexes = [device.id - first for device in layout.devices]
    return arguments | {"disable_precompile": True, "device_indexes": indexes}

  def request(self, record: sglang_requests.Record, version: int) -> Any:
    """Returns the message that submits a request."""
    asked = record.request
    knobs = self._sampling.SamplingParams(
      max_new_tokens=record.left,
      stop_token_ids=list(asked.stop_ids),
      top_p=asked.top_p,
      min_p=asked.min_p,
      sampling_seed=asked.seed,
    )
    # As our sampler reads them: the constructor would change small ones.
    knobs.temperature = asked.temperature
    knobs.top_k = asked.top_k or self._sampling.TOP_K_ALL
    knobs.normalize(None)
    message = {
      "rid": record.rid,
      "text": "",
      "input_ids": record.ids,
      "sampling_params": knobs,
      "logprob_start_len": -1,
      "top_logprobs_num": 0,
      "stream": True,
    }
    if self._released:
      message |= {"return_logprob": True}
    else:
      # Prefixes are found among those of the same weights.
      message |= {
        "return_logprob": False,
        "return_output_logprob_only": True,
        "extra_key": str(version),
      }
    return self._messages.TokenizedGenerateReqInput(**message)

  def abort(self, rid: str) -> Any:
    """Returns the message that aborts a request."""
    return self._messages.AbortReq(rid=rid)

  def evicting(self, count: int) -> Any:
    """Returns the argument of an eviction of so many ids."""
    return count if self._released else self._prefixes.EvictParams(count)


def _module(name: str) -> Any:
  return importlib.import_module(f"sgl_jax.srt.{name}")
