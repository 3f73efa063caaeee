"""Repairs of release 0.0.2 of sglang-jax, which main does not need.

Each function names the defect that it repairs. As released, exactly 0.0.2
computes no log-probabilities, cannot start on a CPU and takes no new weights;
the next release makes this file superfluous.

sgl_jax is imported by `_module` only, here and in `upstream`.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

RELEASE = "0.0.2"
"""The only version that `apply` and `building` are for."""


def apply() -> None:
  """Changes the classes of sgl_jax; calling it again changes nothing."""
  import_attention_twice()
  leave_out_prompt_logprobs()
  run_experts_on_one_device()
  expose_leaves_and_multiply_the_head_in_full()
  flush_and_tell_idleness()


@contextlib.contextmanager
def building(devices: Sequence[Any]) -> Iterator[None]:
  """Surrounds the construction of an engine on some of the devices.

  Defects: the mesh is always of all devices; and parameters are annotated
  with axes outside of any mesh, for which flax from 0.12.1 on raises "An auto
  mesh context or metadata is required".
  """
  nnx = importlib.import_module("flax.nnx")
  scheduler = _module("managers.scheduler")
  create = scheduler.create_device_mesh
  eager = getattr(nnx, "use_eager_sharding", None)
  scheduler.create_device_mesh = functools.partial(
    create, devices=list(devices)
  )
  try:
    with eager(False) if eager else contextlib.nullcontext():
      yield
  finally:
    scheduler.create_device_mesh = create


def import_attention_twice() -> None:
  """Imports the module of native attention.

  Defect: its class is a module of flax, which registers it as a pytree from
  0.12.0 on, and is registered once more by a decorator: "Duplicate custom
  PyTreeDef type registration".
  """
  register = jax.tree_util.register_pytree_node_class

  def tolerant(cls: type) -> type:
    with contextlib.suppress(ValueError):
      register(cls)
    return cls

  jax.tree_util.register_pytree_node_class = tolerant
  try:
    _module("layers.attention.native_backend")
  finally:
    jax.tree_util.register_pytree_node_class = register


def leave_out_prompt_logprobs() -> None:
  """Computes log-probabilities of sampled ids only.

  Defect: with them, as many logits as the prompt asks for meet as many
  temperatures as there are requests ("Temperature batch size 8 doesn't match
  logits batch size 1"), lengths are static and other shapes are not padded, so
  that every prompt compiles anew, and what is missing of the prompt fails an
  assertion.
  """
  metadata = _module("layers.logits_processor").LogitsMetadata
  prompts = (
    "top_logprobs_nums",
    "token_ids_logprobs",
    "extend_input_logprob_token_ids",
  )
  made = metadata.__dict__["from_model_worker_batch"].__func__
  if hasattr(made, "plain"):
    return

  def plain(cls: type, batch: Any, mesh: Any = None) -> Any:
    # Prompts of another length would have another shape, and compile again.
    nothing = {"return_logprob": False, **dict.fromkeys(prompts)}
    kept = {name: getattr(batch, name) for name in nothing}
    vars(batch).update(nothing)
    result = made(cls, batch, mesh)
    vars(batch).update(kept)
    return result

  def append(self, i, req, pt, next_token_ids, num_input_logprobs, output):
    req.output_token_logprobs_val.append(output.next_token_logprobs[i])
    req.output_token_logprobs_idx.append(next_token_ids[i])
    return num_input_logprobs

  plain.plain = True  # type: ignore[attr-defined]
  metadata.from_model_worker_batch = classmethod(plain)
  processor = _module("managers.scheduler_output_processor_mixin")
  mixin = processor.SchedulerOutputProcessorMixin
  mixin.add_logprob_return_values = append
  mixin.add_input_logprob_return_values = lambda self, *args, **kwargs: None


def run_experts_on_one_device() -> None:
  """Computes a mixture of experts where it is not split over devices.

  Defect: `_single_device_forward` calls itself, with one argument too many.
  """

  def forward(
    self: Any, inputs: Float[Array, "T D"], logits: Float[Array, "T E"]
  ) -> Float[Array, "T D"]:
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    gates, experts = jax.lax.top_k(probs, self.num_experts_per_tok)
    if getattr(self.config, "norm_topk_prob", True):
      gates /= gates.sum(-1, keepdims=True)
    rows = jnp.arange(len(inputs))[:, None]
    weights = jnp.zeros_like(probs).at[rows, experts].set(gates)
    # Every expert computes every token: only TPUs have its grouped matmul.
    hidden = jnp.einsum("td,edf->tef", inputs, self.wi_0.value)
    hidden = jax.nn.silu(hidden)
    hidden *= jnp.einsum("td,edf->tef", inputs, self.wi_1.value)
    weighted = hidden * weights[..., None].astype(hidden.dtype)
    return jnp.einsum("tef,efd->td", weighted, self.wo.value).astype(self.dtype)

  _module("layers.moe").EPMoE._single_device_forward = forward


def expose_leaves_and_multiply_the_head_in_full() -> None:
  """Gives the runner `model_state_leaves`, and the head the model's dtype.

  Defects: the leaves are a list that only the closure around the compiled
  program holds, so new weights cannot be set; and the output projection is
  always multiplied in bfloat16, an error of 0.01 nats.
  """
  nnx = importlib.import_module("flax.nnx")
  embeddings = _module("layers.embeddings")
  runner = _module("model_executor.model_runner").ModelRunner
  if hasattr(runner, "model_state_leaves"):
    return
  compile_ = runner.initialize_jit

  def initialize_jit(self: Any) -> None:
    for _, node in nnx.iter_graph(self.model):
      if isinstance(node, embeddings.Embed):
        node.dtype = self.dtype
        node.embedding.value = node.embedding.value.astype(self.dtype)
    compile_(self)

  def captured(self: Any) -> list[Array]:
    program = self.jitted_run_model
    at = program.__code__.co_freevars.index("model_state_leaves")
    return program.__closure__[at].cell_contents

  def replace(self: Any, leaves: list[Array]) -> None:
    captured(self)[:] = leaves

  runner.initialize_jit = initialize_jit
  runner.model_state_leaves = property(captured, replace)


def flush_and_tell_idleness() -> None:
  """Gives the scheduler `is_fully_idle` and `flush_cache`.

  Defect: the message that flushes has no handler, so that keys and values of
  old weights would serve new ones, an error of nats.
  """
  scheduler = _module("managers.scheduler").Scheduler

  def is_fully_idle(self: Any) -> bool:
    return (
      not self.waiting_queue
      and self.running_batch.is_empty()
      and self.chunked_req is None
      and self.cur_batch is None
      and self.last_batch is None
    )

  def flush_cache(self: Any) -> tuple[bool, str, int]:
    if not is_fully_idle(self):
      return False, "requests are in flight", 0
    self.tree_cache.reset()
    self.req_to_token_pool.clear()
    self.token_to_kv_pool_allocator.clear()
    return True, "", self.token_to_kv_pool_allocator.available_size()

  scheduler.is_fully_idle = is_fully_idle
  scheduler.flush_cache = flush_cache


def _module(name: str) -> Any:
  return importlib.import_module(f"sgl_jax.srt.{name}")
