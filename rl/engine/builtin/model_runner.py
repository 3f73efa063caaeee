"""The device's side of the built-in engine: pages, programs, and their shapes.

All methods but `shapes` run on the thread of the mesh, one after the other, so
that what is dispatched later sees what was dispatched before.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from models import config as model_config
from models import kv_cache, sharding, transformer
from rl.engine.builtin import block_manager, decode_step
from rl.engine.builtin import settings as engine_settings

_COPIES = 8
"""Pages copied by one program."""

Shape = tuple[int, tuple[int, int], int]
"""Rows, (rows with chunks, ids of a chunk), and length of the longest row."""


class Decoder:
  """Holds the cache of one mesh and runs `decode_step.advance` on it.

  Args:
    layout: rows are split over its data and expert axes; pages lie on every
      device of these, and their heads are split over tensor.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    settings: engine_settings.EngineSettings,
    layout: sharding.Layout,
  ):
    self._config = config
    self._settings = settings
    self._whole = layout.sharding()
    self._pages = layout.sharding(*kv_cache.AXES)
    self._rows = layout.sharding(*kv_cache.ROW_AXES)
    # By the shape of the tables; None where memory needs no clearing.
    self._room: dict[tuple[int, int], kv_cache.Past] | None = (
      {} if layout.platform == "cpu" else None
    )
    forms = {
      form
      for rows in settings.rows
      for form in settings.chunks(rows, layout.num_batch)
    }
    # Any: `_cache_size` is the only count of compilations that jax has.
    self._programs: dict[tuple[int, int], Any] = {
      chunks: jax.jit(
        functools.partial(
          decode_step.advance,
          config=config,
          layout=layout,
          chunks=chunks,
          max_steps=settings.steps_per_dispatch,
          record_experts=settings.record_experts,
        ),
        donate_argnums=(1, 2, 5),
        # Of the room only the memory is used.
        keep_unused=True,
        out_shardings=(self._pages, self._whole, self._whole, self._rows),
      )
      for chunks in forms
    }
    # Its own function, or all engines would share one count of compilations.
    self._copy: Any = jax.jit(
      functools.partial(kv_cache.copy),
      donate_argnums=0,
      out_shardings=self._pages,
    )
    self._set_bias: Any = jax.jit(
      lambda biases, row, bias: biases.at[row].set(bias),
      donate_argnums=0,
      out_shardings=self._whole,
    )
    self._layout = layout

  @property
  def shapes(self) -> list[Shape]:
    """Every shape of a dispatch."""
    settings = self._settings
    return [
      (rows, chunks, length)
      for rows, length in itertools.product(
        settings.rows, settings.lengths(self._config.max_length)
      )
      for chunks in settings.chunks(rows, self._layout.num_batch)
    ]

  def allocate(self) -> None:
    """Makes an empty cache."""
    settings, config = self._settings, self._config
    num_pages = settings.num_pages(config.max_length)

    def cache():
      return kv_cache.init_cache(config, num_pages, settings.page_size)

    def rest():
      biases = jnp.zeros((settings.bias_slots + 1, config.vocab_size))
      return decode_step.init_carry(settings.slots), biases

    self._cache = jax.jit(cache, out_shardings=self._pages)()
    if self._room is not None:
      for rows, _, length in self.shapes:
        width = settings.width(length)
        tables = np.zeros((rows, width), np.int32)
        self._room[rows, width] = jax.jit(
          kv_cache.gather, out_shardings=self._rows
        )(self._cache, jax.device_put(tables, self._whole))
    self._carry, self._biases = jax.jit(rest, out_shardings=self._whole)()

  def warm_up(self, params: transformer.Params, shape: Shape) -> None:
    """Compiles one shape, by a dispatch that does nothing."""
    rows, chunks, length = shape
    width = self._settings.width(length)
    plan = decode_step.empty_plan(
      rows, chunks, width, slots=self._settings.slots
    )
    self.advance(params, plan, chunks)

  def warm_up_rest(self) -> None:
    """Compiles what is no dispatch."""
    self.copy([(0, 0)])
    self.set_bias(0, np.zeros(self._config.vocab_size, np.float32))

  def advance(
    self,
    params: transformer.Params,
    plan: decode_step.Plan,
    chunks: tuple[int, int],
    copies: Sequence[tuple[int, int]] = (),
  ) -> decode_step.Sampled:
    """Returns what one dispatch sampled, on the host.

    Args:
      copies: (source, target) pages, copied before.
    """
    if copies:
      self.copy(copies)
    placed = jax.device_put(plan, self._whole)
    shape = plan.tables.shape
    room = None if self._room is None else self._room[shape]
    self._cache, self._carry, sampled, room = self._programs[chunks](
      params, self._cache, self._carry, self._biases, placed, room
    )
    if self._room is not None:
      self._room[shape] = room
    return jax.device_get(sampled)

  def copy(self, copies: Sequence[tuple[int, int]]) -> None:
    """Copies pages, as if one after the other."""
    copies = block_manager.at_once(copies)
    past_end = self._settings.num_pages(self._config.max_length)
    for start in range(0, len(copies), _COPIES):
      some = copies[start : start + _COPIES]
      pairs = np.full((2, _COPIES), past_end, np.int32)
      pairs[:, : len(some)] = np.asarray(some, np.int32).T
      self._cache = self._copy(
        self._cache, *jax.device_put(tuple(pairs), self._whole)
      )

  def set_bias(self, row: int, bias: Float32[np.ndarray, " V"]) -> None:
    """Sets one row of the table of biases."""
    args = jax.device_put((np.int32(row), bias), self._whole)
    self._biases = self._set_bias(self._biases, *args)

  @property
  def compilations(self) -> int:
    """Programs compiled so far."""
    programs = [*self._programs.values(), self._copy, self._set_bias]
    return sum(program._cache_size() for program in programs)
