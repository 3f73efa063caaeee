"""sgl_jax: the only module beside `compat_0_0_2` that imports it.

Its primary target is sglang-jax's main; of the releases it takes 0.0.2, by
`rl.engine.sglang.compat_0_0_2`.
"""

import atexit
import importlib
import json
import logging
import pathlib
import tempfile
from typing import Any

import jax

from models import config as model_config
from models import sharding
from rl.engine.sglang import compat_0_0_2 as compat
from rl.engine.sglang import process_isolation, scheduler_thread
from rl.engine.sglang import requests as sglang_requests
from rl.engine.sglang import weights as sglang_weights

SPARE_IDS = 8
"""Positions that its checks of lengths keep free after a conversation."""
# Its watchdog kills our parent process; we have our own.
_NEVER_S = 1e8


class Upstream:
  """The installed sgl_jax: its engine, and the messages to its scheduler.

  Args:
    released: it is release 0.0.2, not main.
  """

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
      # It warns of settings that we choose on purpose.
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
      # The engine takes and gives ids only.
      entry.run_detokenizer_thread = lambda *args: None
      with tempfile.TemporaryDirectory() as directory:
        args = self._arguments(directory)
        if self._released:
          with compat.building(self._layout.devices):
            self._engine = entry.Engine(**args)
        else:
          self._engine = entry.Engine(**args)
      # It would kill all children of this process at the exit.
      atexit.unregister(self._engine.shutdown)
      for owner in (self._engine, self._engine.tokenizer_manager):
        process_isolation.close_sockets(owner, zmq.Socket)
    held = self._engine.scheduler_info["max_total_num_tokens"]
    if held < self._sizes.min_tokens:
      raise RuntimeError(
        f"sglang-jax has memory for {held} ids, but two of the longest "
        f"conversations have {self._sizes.min_tokens}; raise "
        f"engine.memory_fraction={self._sizes.memory_fraction} or lower "
        "model.max_length"
      )

  def release(self) -> None:
    """Forgets an engine that has ended, so that its memory can be freed."""
    self._engine = None

  def _arguments(self, directory: str) -> dict[str, Any]:
    sizes, layout = self._sizes, self._layout
    length = self._config.max_length + SPARE_IDS
    data = sglang_weights.config_json(self._config, length)
    text = json.dumps(data)
    pathlib.Path(directory, "config.json").write_text(text, "utf-8")
    arguments: dict[str, Any] = {
      "model_path": directory,
      "load_format": "dummy",
      "skip_tokenizer_init": True,
      "dtype": self._config.dtype,
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

  def request(
    self, tracked: sglang_requests.TrackedRequest, version: int
  ) -> Any:
    """Returns the message that submits a request under served weights."""
    request = tracked.request
    params = self._sampling.SamplingParams(
      max_new_tokens=tracked.remaining,
      stop_token_ids=list(request.stop_ids),
      top_p=request.top_p,
      min_p=request.min_p,
      sampling_seed=request.seed,
    )
    # Set after the constructor, which would change small temperatures.
    params.temperature = request.temperature
    params.top_k = request.top_k or self._sampling.TOP_K_ALL
    params.normalize(None)
    message = {
      "rid": tracked.rid,
      "text": "",
      "input_ids": tracked.ids,
      "sampling_params": params,
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

  def evict_argument(self, count: int) -> Any:
    """Returns the argument of an eviction of so many ids."""
    return count if self._released else self._prefixes.EvictParams(count)


def _module(name: str) -> Any:
  return importlib.import_module(f"sgl_jax.srt.{name}")
