"""Kernels that attend to pages.

gpu   `paged_triton`: ids and chunks
tpu   jax.experimental.pallas.ops.tpu.paged_attention, in Mosaic: one new id of
      every row

tpu.ragged_paged_attention also takes chunks, but wants the keys and values of a
token side by side, which the other does not. So chunks go by tiles on a TPU.
jax's kernel for a GPU takes no chunks, and Triton does not read its keys ahead:
2.4 TB/s at best on an H200.

Letters: R rows, C queries of each, W pages of a table, H heads, d head width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models import kv_cache
from models.attention import backend

_WIDEST = 256
"""Head that a GPU's kernel has room for."""
_TPU_BLOCK = 512
"""Positions that a program of the kernel reads at once."""
_MAX_TABLE = 2**17
"""Pages in the tables of one call on a TPU: half a MiB of scalar memory."""


def refusal(
  platform: str,
  *,
  queries: int,
  head_dim: int,
  page_size: int,
  dtypes: frozenset[str],
  windowed: bool = False,
  form: str = "auto",
) -> str | None:
  """Returns why no kernel does this, or None.

  Args:
    form: of the setting: one of `backend.UNIVERSAL` asks for plain jnp.
  """
  if form in backend.UNIVERSAL:
    return f"attention={form} asks for no kernel"
  if platform not in ("gpu", "tpu"):
    return f"there is no kernel for a {platform}"
  if platform == "tpu" and queries > 1:
    return "the kernel takes one id a row"
  if platform == "tpu" and windowed:
    return "the kernel knows no window"
  if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
    return f"the kernel has no {' with '.join(sorted(dtypes))}"
  if platform == "gpu":
    if not _is_power(head_dim, 16) or not _is_power(page_size, 1):
      sizes = f"head_dim={head_dim} and page_size={page_size}"
      return f"the kernel needs powers of 2, not {sizes}"
    if head_dim > _WIDEST:
      return f"the kernel takes heads of up to {_WIDEST}, not {head_dim}"
    return None
  if dtypes != {"bfloat16"}:
    return "the kernel has bfloat16 alone"
  if head_dim % 128 or page_size % 16:
    sizes = f"head_dim={head_dim} and page_size={page_size}"
    return f"the kernel needs multiples of 128 and 16, not {sizes}"
  return None


def attend(
  query: Float[Array, "R C H d"],
  positions: Int32[Array, "R C"],
  cache: kv_cache.Cache,
  layer: Int32[Array, ""],
  tables: Int32[Array, "R W"],
  oldest: Int32[Array, "R C"] | None = None,
  *,
  platform: str,
) -> Float[Array, "R C H d"]:
  """Returns what `paged.attend` does, on one device, within `refusal`."""
  # Not on top: importing kernels takes long.
  if platform == "gpu":
    from models.attention import paged_triton

    return paged_triton.attend(query, positions, cache, layer, tables, oldest)
  from jax.experimental.pallas.ops.tpu import paged_attention

  num_pages, page_size, width = cache.k.shape[2:]
  block = max(1, _TPU_BLOCK // page_size)
  tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % block)))
  tables = tables + layer * num_pages
  # The page of all layers: merging two axes of an array moves nothing.
  pages = [x.reshape(len(x), -1, page_size, width) for x in cache]
  scaled = (query[:, 0].astype(jnp.float32) * width**-0.5).astype(query.dtype)
  lengths = positions[:, 0] + 1
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


def _is_power(number: int, least: int) -> bool:
  return number >= least and number & (number - 1) == 0
