"""The built-in engine on the device: the cache, and the compiled programs.

All methods but `shapes` run on the thread of the mesh, one after the other, so
that each sees the effects of those before.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8

from models import config as model_config
from models import definition, kv_cache, memory_report, sharding
from models import policy as policy_lib
from rl.engine.builtin import block_manager, decode_step, dispatch_shapes

_MAX_COPIES = 8
"""Pages that one program copies."""
_MAX_MASKS = 8
"""Masks that one program writes."""
_MAX_HANDED = 32
"""Pages that one program reads for another engine, or writes from one."""

_NO_COPIES = {
  "xla_gpu_enable_triton_gemm": False,
  "xla_gpu_dot_merger_threshold_mb": 0,
}
"""XLA's options for scanned layers on a GPU: cuBLAS reads a layer's weights
where they lie in the stack. Products of Triton, and two matrices in one, would
get copies of them in every step: three times the bytes."""

Shape = tuple[int, tuple[int, int]]
"""Rows, and (rows with chunks, ids of a chunk)."""


class ModelRunner:
  """Holds the cache of one mesh and runs `decode_step.advance` on it.

  Args:
    layout: rows are split over its data and expert axes; pages are replicated
      over these, and their heads are split over tensor.
    bias_slots: rows of the bias table, beside the one of zeros.
    record_experts: return the experts of every id.
    num_drafts, draft_rows: drafts of each row, in dispatches of at most so many
      rows.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    shapes: dispatch_shapes.DispatchShapes,
    layout: sharding.Layout,
    *,
    bias_slots: int,
    record_experts: bool = False,
    num_drafts: int = 0,
    draft_rows: int = 0,
  ):
    self._num_drafts, self._draft_rows = num_drafts, draft_rows
    self._config = config
    self._shapes = shapes
    self._bias_slots = bias_slots
    self._whole = layout.sharding()
    self._pages = layout.sharding(*kv_cache.AXES)
    self._layout = layout
    scans = config.scans_layers and layout.platform == "gpu"
    options = _NO_COPIES if scans else None
    # Any: `_cache_size` is the only count of compilations that jax has.
    self._programs: dict[tuple[int, int], Any] = {
      chunks: jax.jit(
        functools.partial(
          decode_step.advance,
          config=config,
          layout=layout,
          chunks=chunks,
          max_steps=shapes.steps_per_dispatch,
          record_experts=record_experts,
        ),
        static_argnames=("top_logprobs", "num_drafts"),
        donate_argnums=(1, 2),
        out_shardings=(self._pages, self._whole, self._whole),
        compiler_options=options,
      )
      for chunks in {chunks for _, chunks in self.shapes}
    }
    self._copy = _in_place(kv_cache.copy, self._pages)
    self._gather: Any = jax.jit(
      functools.partial(kv_cache.gather), out_shardings=self._pages
    )
    self._scatter = _in_place(kv_cache.scatter, self._pages)
    self._set_bias = _in_place(_with_bias, self._whole)
    self._set_masks = _in_place(_with_masks, self._whole)
    self._set_history = _in_place(decode_step.set_history, self._whole)

  @property
  def shapes(self) -> list[Shape]:
    """Every shape of a dispatch."""
    return [
      (rows, chunks)
      for rows in self._shapes.rows
      for chunks in self._shapes.chunks(rows, self._layout.num_batch)
    ]

  def allocate(self) -> None:
    """Makes an empty cache."""
    self._cache = jax.jit(self._no_tokens, out_shardings=self._pages)()
    rest = jax.jit(self._no_requests, out_shardings=self._whole)()
    self._carry, self._biases = rest

  def free(self) -> None:
    """Frees the cache and all else that it holds on the devices."""
    self._cache = self._carry = self._biases = None

  def idle_plan(self, shape: Shape) -> decode_step.DispatchPlan:
    """Returns a plan of idle rows."""
    width = self._shapes.width(self._config.max_length)
    return decode_step.empty_plan(*shape, width, slots=self._shapes.slots)

  def warm_up(self, params: definition.Params, shape: Shape) -> None:
    """Compiles one shape, by a dispatch of idle rows."""
    self.advance(params, self.idle_plan(shape), shape[1])

  def lower(self, params: definition.Params, shape: Shape) -> Any:
    """Returns the lowered program of a shape; nothing is on a device for it.

    Args:
      params: or their shapes and shardings.
    """
    cache, rest = map(jax.eval_shape, (self._no_tokens, self._no_requests))
    return self._programs[shape[1]].lower(
      params,
      memory_report.placed(cache, self._pages),
      *memory_report.placed(rest, self._whole),
      self.idle_plan(shape),
      top_logprobs=0,
      num_drafts=self._drafts(shape[0]),
    )

  def warm_up_rest(self) -> None:
    """Compiles the programs beside the dispatches."""
    self.copy([(0, 0)])
    self.set_bias(0, np.zeros(self._config.vocab_size, np.float32))
    if self._bias_slots:
      self.set_masks([(self._bias_slots, b"")])
    if self._num_drafts:
      self.set_history(0, np.zeros(0, np.int32))

  def advance(
    self,
    params: definition.Params,
    plan: decode_step.DispatchPlan,
    chunks: tuple[int, int],
    copies: Sequence[tuple[int, int]] = (),
    top_logprobs: int = 0,
  ) -> decode_step.Sampled:
    """Runs one dispatch and returns its tokens, on the host.

    Args:
      copies: (source, target) pages, copied before it.
      top_logprobs: see `decode_step.advance`; each number is a program.
    """
    if copies:
      self.copy(copies)
    if self._layout.mesh.size > 1:
      plan = jax.device_put(plan, self._whole)
    # One device gets the plan with the call, a tenth of the time of a put.
    with jax.transfer_guard_host_to_device("allow"):
      self._cache, self._carry, sampled = self._programs[chunks](
        params,
        self._cache,
        self._carry,
        self._biases,
        plan,
        top_logprobs=top_logprobs,
        num_drafts=self._drafts(plan.rows),
      )
    return jax.device_get(sampled)

  def _no_tokens(self) -> Any:
    pages = self._shapes.num_pages(self._config.max_length)
    policy = policy_lib.of(self._config).module
    return policy.init_cache(pages, self._shapes.page_size)

  def _no_requests(self) -> tuple[decode_step.Carry, Array]:
    biases = jnp.zeros((self._bias_slots + 1, self._config.vocab_size))
    history = self._config.max_length if self._num_drafts else 0
    return decode_step.init_carry(self._shapes.slots, history), biases

  def _drafts(self, rows: int) -> int:
    return self._num_drafts if rows <= self._draft_rows else 0

  def copy(self, copies: Sequence[tuple[int, int]]) -> None:
    """Copies pages, as if one after the other."""
    copies = block_manager.simultaneous_copies(copies)
    past_end = self._shapes.num_pages(self._config.max_length)
    for start in range(0, len(copies), _MAX_COPIES):
      some = copies[start : start + _MAX_COPIES]
      pairs = np.full((2, _MAX_COPIES), past_end, np.int32)
      pairs[:, : len(some)] = np.asarray(some, np.int32).T
      self._cache = self._copy(
        self._cache, *jax.device_put(tuple(pairs), self._whole)
      )

  def read_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
    """Returns one or more pages of each array of the cache, on the host."""
    parts = []
    for some, padded in self._handed(pages):
      read = jax.device_get(self._gather(self._cache, padded))
      parts.append([x[:, :, : len(some)] for x in jax.tree.leaves(read)])
    return [np.concatenate(x, axis=2) for x in zip(*parts, strict=True)]

  def write_pages(
    self, pages: Sequence[int], values: Sequence[np.ndarray]
  ) -> None:
    """Replaces pages by those that another engine has read."""
    tree, done = jax.tree.structure(self._cache), 0
    for some, padded in self._handed(pages):
      parts = [x[:, :, done : done + len(some)] for x in values]
      room = [(0, 0), (0, 0), (0, _MAX_HANDED - len(some)), (0, 0), (0, 0)]
      new = tree.unflatten([np.pad(part, room) for part in parts])
      self._cache = self._scatter(
        self._cache, padded, jax.device_put(new, self._pages)
      )
      done += len(some)

  def _handed(
    self, pages: Sequence[int]
  ) -> Iterator[tuple[Sequence[int], Int32[Array, " n"]]]:
    """Yields the pages of each program, and those padded past the end."""
    past_end = self._shapes.num_pages(self._config.max_length)
    for start in range(0, len(pages), _MAX_HANDED):
      some = pages[start : start + _MAX_HANDED]
      padded = np.full(_MAX_HANDED, past_end, np.int32)
      padded[: len(some)] = some
      yield some, jax.device_put(padded, self._whole)

  def set_history(self, slot: int, ids: Int32[np.ndarray, " n"]) -> None:
    """Tells the ids of a slot whose keys and values came from the cache."""
    padded = np.zeros(self._config.max_length, np.int32)
    padded[: len(ids)] = ids
    args = jax.device_put((np.int32(slot), padded), self._whole)
    self._carry = self._set_history(self._carry, *args)

  def set_bias(self, row: int, bias: Float32[np.ndarray, " V"]) -> None:
    """Sets one row of the bias table."""
    args = jax.device_put((np.int32(row), bias), self._whole)
    self._biases = self._set_bias(self._biases, *args)

  def set_masks(self, masks: Sequence[tuple[int, bytes]]) -> None:
    """Sets rows of the bias table to 0 where a bit is 1, and -inf elsewhere.

    Args:
      masks: (row, a bit for each id); missing bits are 0.
    """
    num_bytes = -(-self._config.vocab_size // 8)
    for start in range(0, len(masks), _MAX_MASKS):
      some = masks[start : start + _MAX_MASKS]
      rows = np.full(_MAX_MASKS, self._bias_slots + 1, np.int32)
      rows[: len(some)] = [row for row, _ in some]
      bits = np.zeros((_MAX_MASKS, num_bytes), np.uint8)
      for i, (_, mask) in enumerate(some):
        found = np.frombuffer(mask, np.uint8)[:num_bytes]
        bits[i, : len(found)] = found
      args = jax.device_put((rows, bits), self._whole)
      self._biases = self._set_masks(self._biases, *args)

  @property
  def compilations(self) -> int:
    """Programs compiled so far."""
    others = [self._copy, self._set_bias, self._set_masks, self._set_history]
    programs = [*self._programs.values(), *others, self._gather, self._scatter]
    return sum(program._cache_size() for program in programs)


def _in_place(
  function: Callable[..., Any], place: jax.sharding.Sharding
) -> Any:
  """Returns a program that takes the memory of its first argument."""
  # A function of its own, or all engines would share one count.
  own = functools.partial(function)
  return jax.jit(own, donate_argnums=0, out_shardings=place)


def _with_bias(
  biases: Float32[Array, "slots V"], row: Int32[Array, ""], bias: Array
) -> Float32[Array, "slots V"]:
  return biases.at[row].set(bias)


def _with_masks(
  biases: Float32[Array, "slots V"],
  rows: Int32[Array, " M"],
  bits: UInt8[Array, "M bytes"],
) -> Float32[Array, "slots V"]:
  """Returns the table with masks in some rows; rows past its end vanish."""
  allowed = jnp.unpackbits(
    bits, axis=1, count=biases.shape[1], bitorder="little"
  )
  masks = jnp.where(allowed > 0, 0.0, -jnp.inf)
  return biases.at[rows].set(masks, mode="drop")
