"""Kernels of jax that attend to pages, each for one new id of every row.

gpu   jax.experimental.pallas.ops.gpu.paged_attention, in Triton
tpu   jax.experimental.pallas.ops.tpu.paged_attention, in Mosaic

tpu.ragged_paged_attention also takes chunks, but wants the keys and values of a
token side by side, which neither of the two does. So chunks go by tiles.

Letters: R rows, W pages of a table, H heads, d head width.
"""

import functools
import warnings

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models import kv_cache
from models.attention import backend

_BLOCK = {"gpu": 128, "tpu": 512}
"""Positions that a program of a kernel reads at once."""
_MAX_SPLITS = 16
"""Programs that share a row on a GPU."""
_MAX_TABLE = 2**17
"""Pages in the tables of one call on a TPU: half a MiB of scalar memory."""


def refusal(
  platform: str,
  *,
  queries: int,
  head_dim: int,
  page_size: int,
  dtypes: frozenset[str],
  form: str = "auto",
) -> str | None:
  """Returns why no kernel does this, or None.

  Args:
    form: of the setting: one of `backend.UNIVERSAL` asks for plain jnp.
  """
  if form in backend.UNIVERSAL:
    return f"attention={form} asks for no kernel"
  if platform not in _BLOCK:
    return f"there is no kernel for a {platform}"
  if queries > 1:
    return "the kernel takes one id a row"
  if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
    return f"the kernel has no {' with '.join(sorted(dtypes))}"
  if platform == "gpu":
    if not _is_power(head_dim, 16) or not _is_power(page_size, 1):
      sizes = f"head_dim={head_dim} and page_size={page_size}"
      return f"the kernel needs powers of 2, not {sizes}"
    return None
  if dtypes != {"bfloat16"}:
    return "the kernel has bfloat16 alone"
  if head_dim % 128 or page_size % 16:
    sizes = f"head_dim={head_dim} and page_size={page_size}"
    return f"the kernel needs multiples of 128 and 16, not {sizes}"
  return None


def attend(
  query: Float[Array, "R 1 H d"],
  positions: Int32[Array, "R 1"],
  cache: kv_cache.Cache,
  layer: Int32[Array, ""],
  tables: Int32[Array, "R W"],
  *,
  platform: str,
  interpret: bool = False,
) -> Float[Array, "R 1 H d"]:
  """Returns what `paged.attend` does, on one device, within `refusal`.

  Args:
    interpret: runs the GPU's kernel without one; for that of a TPU there is
      `pltpu.force_tpu_interpret_mode`.
  """
  page_size, width = cache.k.shape[3:]
  num_pages = cache.k.shape[2]
  block = max(1, _BLOCK[platform] // page_size)
  splits = 1
  if platform == "gpu":
    splits = max(1, min(_MAX_SPLITS, tables.shape[1] // block))
  tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (block * splits))))
  tables = tables + layer * num_pages
  # The page of all layers: merging two axes of an array moves nothing.
  pages = [x.reshape(len(x), -1, page_size, width) for x in cache]
  scaled = (query[:, 0].astype(jnp.float32) * width**-0.5).astype(query.dtype)
  lengths = positions[:, 0] + 1
  if platform == "gpu":
    kernel = functools.partial(
      _gpu_kernel(),
      pages_per_compute_block=block,
      k_splits=splits,
      interpret=interpret,
    )
    return kernel(scaled, *pages, tables, lengths)[:, None]
  # Not on top: importing it takes long.
  from jax.experimental.pallas.ops.tpu import paged_attention

  each = max(1, _MAX_TABLE // tables.shape[1])
  mixed = [
    paged_attention.paged_attention(
      scaled[rows],
      *pages,
      lengths[rows],
      tables[rows],
      pages_per_compute_block=block,
    )
    for start in range(0, len(tables), each)
    for rows in [slice(start, start + each)]
  ]
  return jnp.concatenate(mixed)[:, None]


def _gpu_kernel():
  with warnings.catch_warnings():
    # It says that it is deprecated, and names nothing in its place.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import paged_attention
  return paged_attention.paged_attention


def _is_power(number: int, least: int) -> bool:
  return number >= least and number & (number - 1) == 0
