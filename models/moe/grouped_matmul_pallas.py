"""Kernels of the grouped matmul: Mosaic on TPU, Triton on GPU.

Rows lie in whole blocks with one owner each, so a kernel is a tiled matmul
that picks its tile of weights by `owner[n]`. Blocks from `starts[-1]` on are
skipped.
Products are summed in float32; those of float32 are not rounded before.

Letters: N blocks of b rows, E experts, I width in, O width out of a product,
D and F widths of the weights.

Source: the scheme of megablox, MegaBlocks, arXiv 2211.15841, section 5.1.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

_LANES = 128
_MOSAIC_TILE = 512


class ExpertTiling(NamedTuple):
  """Sizes of a kernel in Triton; `benchmarks/kernel_tilings.py` compares them.

  Attributes:
    columns: of the results of a program, and rows of those of `outer_triton`.
    depth: of which products are summed at once.
    warps, stages: of a program; see Triton. None goes by the results.
  """

  columns: int = 128
  depth: int = 64
  warps: int | None = None
  stages: int = 3


_PRODUCT = ExpertTiling()
# The faster one on an H200, with 8 experts and with 128.
_OUTER = ExpertTiling(warps=4)


def product_mosaic(
  blocks: Float[Array, "N b I"],
  weights: Shaped[Array, "E D F"],
  scale: Float32[Array, "E 1 F"] | None,
  owner: Int32[Array, " N"],
  starts: Int32[Array, " starts"],
  *,
  transpose: bool,
  interpret: bool = False,
) -> Float[Array, "N b O"]:
  """Returns blocks[n] @ weights[owner[n]], or by the transpose of those.

  Args:
    scale: of weights in 8 bits, which are multiplied out tile by tile, so that
      only bytes are read; those are not transposed.
  """
  num_blocks, rows, width = blocks.shape
  out = weights.shape[1 if transpose else 2]
  inner, outer = _tile_mosaic(width), _tile_mosaic(out)
  last_o, last_i = out // outer - 1, width // inner - 1

  # A skipped block names the tiles of the step before: nothing is fetched.
  def at_rows(o, n, i, owner, starts):
    del o, owner
    used = n < starts[-1]
    return _last_used(n, starts), 0, jnp.where(used, i, last_i)

  def at_weights(o, n, i, owner, starts):
    used = n < starts[-1]
    expert = owner[_last_used(n, starts)]
    i = jnp.where(used, i, last_i)
    return (expert, o, i) if transpose else (expert, i, o)

  def at_scale(o, n, i, owner, starts):
    del i
    return owner[_last_used(n, starts)], 0, o

  tile = (outer, inner) if transpose else (inner, outer)
  scales = [] if scale is None else [scale]
  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=2,
    # Blocks inside of output tiles: an owner's weights stay for all of its
    # blocks when the sum has one tile.
    grid=(last_o + 1, num_blocks, last_i + 1),
    in_specs=[
      pl.BlockSpec((None, rows, inner), at_rows),
      pl.BlockSpec((None, *tile), at_weights),
      *(pl.BlockSpec((None, 1, outer), at_scale) for _ in scales),
    ],
    out_specs=pl.BlockSpec((None, rows, outer), lambda o, n, i, *_: (n, 0, o)),
    scratch_shapes=[pltpu.VMEM((rows, outer), jnp.float32)],
  )
  call = pl.pallas_call(
    functools.partial(_product_kernel, transpose=transpose),
    out_shape=_like((num_blocks, rows, out), blocks.dtype, blocks),
    grid_spec=grid_spec,
    interpret=interpret,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary")
    ),
  )
  return call(owner, starts, blocks, weights, *scales)


def _product_kernel(
  owner: Any, starts: Any, x: Any, w: Any, *rest: Any, transpose: bool
):
  del owner
  *scales, y, acc = rest
  i, used = pl.program_id(2), pl.program_id(1) < starts[starts.shape[0] - 1]

  @pl.when(i == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)

  @pl.when(used)
  def _():
    tile = _multiplied_out(w[...], x.dtype, *(s[...] for s in scales))
    acc[...] += _dot(x[...], tile, 1, 1 if transpose else 0)

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    y[...] = acc[...].astype(y.dtype)


def outer_mosaic(
  blocks: Float[Array, "N b D"],
  dy: Float[Array, "N b F"],
  owner: Int32[Array, " N"],
  starts: Int32[Array, " starts"],
  *,
  interpret: bool = False,
) -> Float[Array, "E D F"]:
  """Returns the sum over the blocks n of each expert of blocks[n]^T @ dy[n]."""
  num_blocks, rows, width = blocks.shape
  num_experts, out = len(starts) - 1, dy.shape[2]
  inner, outer = _tile_mosaic(width), _tile_mosaic(out)

  def at(tile):
    def index(d, f, n, owner, starts):
      del owner
      return _last_used(n, starts), 0, (d, f)[tile]

    return index

  def at_weights(d, f, n, owner, starts):
    return owner[_last_used(n, starts)], d, f

  call = pl.pallas_call(
    _outer_kernel,
    out_shape=_like((num_experts, width, out), blocks.dtype, blocks),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(width // inner, out // outer, num_blocks),
      in_specs=[
        pl.BlockSpec((None, rows, inner), at(0)),
        pl.BlockSpec((None, rows, outer), at(1)),
      ],
      out_specs=pl.BlockSpec((None, inner, outer), at_weights),
      scratch_shapes=[pltpu.VMEM((inner, outer), jnp.float32)],
    ),
    interpret=interpret,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
  )
  # No block ever wrote to an expert without rows: its memory holds anything.
  used = jnp.diff(starts) > 0
  dw = call(owner, starts, blocks, dy)
  return jnp.where(used[:, None, None], dw, 0)


def _outer_kernel(owner: Any, starts: Any, x: Any, y: Any, dw: Any, acc: Any):
  n = pl.program_id(2)
  expert = owner[n]
  first, end = starts[expert], starts[expert + 1]

  @pl.when(n == first)
  def _():
    acc[...] = jnp.zeros_like(acc)

  @pl.when(n < end)
  def _():
    acc[...] += _dot(x[...], y[...], 0, 0)

  @pl.when(n == end - 1)
  def _():
    dw[...] = acc[...].astype(dw.dtype)


def product_triton(
  blocks: Float[Array, "N b I"],
  weights: Shaped[Array, "E D F"],
  scale: Float32[Array, "E 1 F"] | None,
  owner: Int32[Array, " N"],
  starts: Int32[Array, " starts"],
  *,
  transpose: bool,
  tiling: ExpertTiling = _PRODUCT,
  interpret: bool = False,
) -> Float[Array, "N b O"]:
  """Returns what `product_mosaic` does."""
  out = weights.shape[1 if transpose else 2]
  blocks, weights = _pad(blocks, 2), _pad(_pad(weights, 1), 2)
  scales = [] if scale is None else [_pad(scale, 2)]
  num_blocks, rows, width = blocks.shape
  padded = weights.shape[1 if transpose else 2]
  inner = _tile_triton(width, tiling.depth)
  outer = _tile_triton(padded, tiling.columns)

  def kernel(owner, starts, x, w, *rest):
    *scales, y = rest
    n, o = pl.program_id(0), pl.program_id(1)
    at_o = pl.ds(o * outer, outer)

    def add(i, acc):
      at_i = pl.ds(i * inner, inner)
      tile = w[owner[n], at_o, at_i] if transpose else w[owner[n], at_i, at_o]
      own = (s[owner[n], :, at_o] for s in scales)
      tile = _multiplied_out(tile, x.dtype, *own)
      return acc + _dot(x[:, at_i], tile, 1, 1 if transpose else 0)

    used = n < starts[starts.shape[0] - 1]
    # A `where` of two literals would be one of booleans to Triton.
    turns = used.astype(jnp.int32) * (width // inner)
    acc = jnp.zeros((rows, outer), jnp.float32)
    y[...] = jax.lax.fori_loop(0, turns, add, acc).astype(y.dtype)

  call = pl.pallas_call(
    kernel,
    out_shape=_like((num_blocks, rows, padded), blocks.dtype, blocks),
    # Consecutive programs share the tile of an owner's weights.
    grid=(num_blocks, padded // outer),
    in_specs=[
      pl.BlockSpec(),
      pl.BlockSpec(),
      pl.BlockSpec((None, rows, width), lambda n, o: (n, 0, 0)),
      *(pl.BlockSpec() for _ in [weights, *scales]),
    ],
    out_specs=pl.BlockSpec((None, rows, outer), lambda n, o: (n, 0, o)),
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(
      num_warps=tiling.warps or (8 if rows * outer >= 128**2 else 4),
      num_stages=tiling.stages,
    ),
    name="grouped_product",
  )
  return call(owner, starts, blocks, weights, *scales)[..., :out]


def outer_triton(
  blocks: Float[Array, "N b D"],
  dy: Float[Array, "N b F"],
  owner: Int32[Array, " N"],
  starts: Int32[Array, " starts"],
  *,
  tiling: ExpertTiling = _OUTER,
  interpret: bool = False,
) -> Float[Array, "E D F"]:
  """Returns what `outer_mosaic` does."""
  del owner
  shape = (len(starts) - 1, blocks.shape[2], dy.shape[2])
  blocks, dy = _pad(blocks, 2), _pad(dy, 2)
  # Halves of large blocks: as deep as the tiles of a product.
  depth = math.gcd(blocks.shape[1], tiling.depth)
  starts = starts * (blocks.shape[1] // depth)
  blocks, dy = (x.reshape(-1, depth, x.shape[2]) for x in (blocks, dy))
  width, out = blocks.shape[2], dy.shape[2]
  inner = _tile_triton(width, tiling.columns)
  outer = _tile_triton(out, tiling.columns)

  def kernel(starts, x, y, dw):
    expert, d, f = (pl.program_id(axis) for axis in range(3))
    at_d, at_f = pl.ds(d * inner, inner), pl.ds(f * outer, outer)

    def add(n, acc):
      return acc + _dot(x[n, :, at_d], y[n, :, at_f], 0, 0)

    acc = jnp.zeros((inner, outer), jnp.float32)
    acc = jax.lax.fori_loop(starts[expert], starts[expert + 1], add, acc)
    dw[...] = acc.astype(dw.dtype)

  call = pl.pallas_call(
    kernel,
    out_shape=_like((shape[0], width, out), blocks.dtype, blocks),
    grid=(shape[0], width // inner, out // outer),
    in_specs=[pl.BlockSpec()] * 3,
    out_specs=pl.BlockSpec((None, inner, outer), lambda e, d, f: (e, d, f)),
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(
      num_warps=tiling.warps, num_stages=tiling.stages
    ),
    name="grouped_outer",
  )
  return call(starts, blocks, dy)[:, : shape[1], : shape[2]]


def _multiplied_out(
  tile: Array, dtype: jax.typing.DTypeLike, scale: Array | None = None
) -> Array:
  """Returns a tile of weights as `quantize.dequantize` does."""
  if scale is None:
    return tile
  return (tile.astype(jnp.float32) * scale).astype(dtype)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
  """Returns the product that sums one axis of each, in float32."""
  # The default would round float32 to TF32 or bfloat16 first.
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a,
    b,
    (((a_axis,), (b_axis,)), ((), ())),
    precision=exact,
    preferred_element_type=jnp.float32,
  )


def _last_used(n: Array, starts: Any) -> Array:
  """Returns n, or the last block in use where n is not."""
  return jnp.minimum(n, jnp.maximum(starts[starts.shape[0] - 1] - 1, 0))


def _tile_mosaic(size: int) -> int:
  """Returns the largest tile of whole lanes, or all where there is none."""
  tiles = range(_MOSAIC_TILE, 0, -_LANES)
  return next((tile for tile in tiles if size % tile == 0), size)


def _tile_triton(size: int, most: int) -> int:
  """Returns the largest power of 2 up to `most` that divides."""
  return min(most, size & -size)


def _pad(x: Array, axis: int) -> Array:
  """Returns x with zeros up to 16, the least that Triton multiplies."""
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, -x.shape[axis] % 16)
  return jnp.pad(x, pads) if pads[axis][1] else x


def _like(shape: tuple[int, ...], dtype: Any, like: Array) -> Any:
  """Returns the shape, varying over a shard_map's axes as `like` does."""
  kind: Any = jax.typeof(like)
  # The name of the argument changed within the versions of jax in use.
  if hasattr(kind, "manual_axis_type"):
    varying = {"manual_axis_type": kind.manual_axis_type}
  else:
    varying = {"vma": kind.vma}
  return jax.ShapeDtypeStruct(shape, dtype, **varying)
