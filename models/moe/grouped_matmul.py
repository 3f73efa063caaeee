"""A grouped matmul: rows sorted by group into whole blocks, one weight a block.

  assignments[T, k] -> plan: slots, side by side by expert, every expert's part
                       rounded up to whole blocks
  x[T, D]           -> spread: rows[N, block, D], zeros where a slot is empty
                    -> matmul: each block times the weights of its owner
                    -> collect: each token sums its k rows

Shapes are static and hold the worst case; the work follows `starts[-1]`, the
blocks in use. Every backward pass is a gather or a grouped matmul again: no
scatter adds rows, so that sums have one order on every platform.

Letters: T tokens, k assignments of a token, E experts, N blocks, S slots of all
blocks, D width in, F width out.

Source: MegaBlocks, arXiv 2211.15841, section 5.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models import quantize

_CHUNK_BLOCKS = 8
_CHUNK_ROWS = 512


class Form(NamedTuple):
  """The way `matmul` is computed.

  Attributes:
    kernel: "blocks" is plain jax, a loop over the blocks in use; "triton" and
      "mosaic" are kernels for GPU and TPU.
    interpret: runs a kernel as plain jax, on any platform and slowly.
  """

  kernel: Literal["blocks", "triton", "mosaic"]
  interpret: bool = False


def choose(experts: str, platform: str) -> Form:
  """Returns the form for `Compute.experts` on "cpu", "gpu" or "tpu"."""
  if experts == "blocks" or (experts == "auto" and platform == "cpu"):
    return Form("blocks")
  if platform == "cpu":
    return Form("mosaic", interpret=True)
  return Form("mosaic" if platform == "tpu" else "triton")


def block_rows(
  form: Form, num_assignments: int, num_experts: int, least: int
) -> int:
  """Returns how many rows a block has.

  Every block reads its owner's weights, so larger is faster, as long as
  filling up the last one of every expert costs little: a third of an expert's
  mean share, and no more than what keeps the unit busy.
  """
  most = 64
  if form.kernel != "blocks":
    # What the matrix units take: powers of 2, and 16 at least.
    least, most = max(16, 1 << (least - 1).bit_length()), 128
  rows = least
  while 2 * rows <= most and 6 * rows * num_experts <= num_assignments:
    rows *= 2
  return rows


class Places(NamedTuple):
  """The slots of assignments, and back.

  Attributes:
    slots: of each assignment; S for one that has none.
    source: assignment t * k + j in each slot; T * k for an empty one.
  """

  slots: Int32[Array, "T k"]
  source: Int32[Array, " S"]


class Plan(NamedTuple):
  """The blocks of each expert.

  Attributes:
    owner: expert of each block, ascending.
    starts: first block of each expert, and last the number of blocks in use.
  """

  places: Places
  owner: Int32[Array, " N"]
  starts: Int32[Array, " starts"]


def plan(
  experts: Int32[Array, "T k"],
  num_experts: int,
  block: int,
  most: int | None = None,
) -> Plan:
  """Sorts assignments by expert into blocks.

  Args:
    experts: k different ones; others than [0, num_experts) mean no assignment.
    most: bound on the number of assignments, None for T * k; beyond it some
      would get no slot.
  """
  most = experts.size if most is None else min(most, experts.size)
  # No expert gets more than T assignments.
  num_blocks = min(
    (most + num_experts * (block - 1)) // block,
    num_experts * -(-experts.shape[0] // block),
    most,
  )
  chunk = chunk_blocks(block)
  if num_blocks > chunk:
    num_blocks = -(-num_blocks // chunk) * chunk
  order, firsts = by_group(experts.reshape(-1), num_experts)
  counts = jnp.diff(firsts)
  ends = jnp.cumsum(-(-counts // block), dtype=jnp.int32)
  starts = jnp.concatenate([ends[:1] * 0, ends])
  blocks = jnp.arange(num_blocks, dtype=jnp.int32)
  # Compared with all: blocks beyond those in use fall to the last expert.
  owner = jnp.sum(blocks[:, None] >= ends[None, :-1], -1, dtype=jnp.int32)
  inside = jnp.arange(block, dtype=jnp.int32)
  rank = (blocks - starts[owner])[:, None] * block + inside
  filled = rank < counts[owner][:, None]
  at = firsts[owner][:, None] + rank
  return Plan(place(order, at, filled, experts.shape), owner, starts)


def chunk_blocks(rows: int) -> int:
  """Returns how many blocks are worked on together, of so many rows each."""
  return max(1, min(_CHUNK_BLOCKS, _CHUNK_ROWS // rows))


def by_group(
  groups: Int32[Array, " A"], num_groups: int
) -> tuple[Int32[Array, " A"], Int32[Array, " {num_groups}+1"]]:
  """Returns a stable order by group, and where in it each group starts.

  Those outside of [0, num_groups) come last; the final entry is their start.
  """
  outside = (groups < 0) | (groups >= num_groups)
  keys = jnp.where(outside, num_groups, groups)
  keys, order = jax.lax.sort_key_val(keys, jnp.arange(len(keys)))
  names = jnp.arange(num_groups + 1, dtype=jnp.int32)
  firsts = jnp.searchsorted(keys, names, method="compare_all")
  return order.astype(jnp.int32), firsts.astype(jnp.int32)


def place(
  order: Int32[Array, " A"],
  at: Int32[Array, "*slots"],
  filled: Array,
  shape: tuple[int, ...],
) -> Places:
  """Returns the places when slot s takes the assignment `order[at[s]]`.

  Args:
    filled: which slots do; the others stay empty.
    shape: [T, k] of the assignments.
  """
  taken = order.at[at].get(mode="clip")
  source = jnp.where(filled, taken, order.size).reshape(-1)
  slots = jnp.full_like(order, source.size)
  numbers = jnp.arange(source.size, dtype=jnp.int32)
  # An assignment is in one slot; the empty ones lie past the end.
  slots = slots.at[source].set(numbers, mode="drop")
  return Places(slots.reshape(shape), source)


def num_placed(places: Places) -> Int32[Array, ""]:
  """Returns how many assignments have a slot."""
  return jnp.sum(places.source < places.slots.size, dtype=jnp.int32)


@jax.custom_vjp
def spread(x: Float[Array, "T D"], places: Places) -> Float[Array, "S D"]:
  """Returns each slot's copy of its token; zeros in empty slots."""
  token = places.source // places.slots.shape[1]
  return x.at[token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: Float[Array, "S D"], places: Places) -> Float[Array, "T D"]:
  """Returns the sum of the slots of each token, taken in float32."""
  parts = rows.at[places.slots].get(mode="fill", fill_value=0)
  return jnp.sum(parts, 1, dtype=jnp.float32).astype(rows.dtype)


spread.defvjp(
  lambda x, places: (spread(x, places), places),
  lambda places, dy: (collect(dy, places), None),
)
collect.defvjp(
  lambda rows, places: (collect(rows, places), places),
  lambda places, dy: (spread(dy, places), None),
)


@jax.custom_vjp
def spread_values(
  values: Float[Array, "T k"], places: Places
) -> Float[Array, " S"]:
  """Returns the value of each slot's assignment; 0 in empty slots."""
  return values.reshape(-1).at[places.source].get(mode="fill", fill_value=0)


spread_values.defvjp(
  lambda values, places: (spread_values(values, places), places),
  lambda places, dy: (
    dy.at[places.slots].get(mode="fill", fill_value=0),
    None,
  ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def matmul(
  rows: Float[Array, "S D"],
  weights: Float[Array, "E D F"] | quantize.Quantized,
  plan: Plan,
  form: Form,
) -> Float[Array, "S F"]:
  """Returns every block times the weights of its owner, summed in float32.

  Args:
    weights: quantised ones have no gradient.
    form: one of the kernels.
  """
  return _product(rows, weights, plan, form, transpose=False)


def _matmul_forward(rows, weights, plan, form):
  return matmul(rows, weights, plan, form), (rows, weights, plan)


def _matmul_backward(form, saved, dy):
  rows, weights, plan = saved
  drows = _product(dy, weights, plan, form, transpose=True)
  outer = getattr(_kernels(), f"outer_{form.kernel}")
  dw = outer(
    _blocks(rows, plan),
    _blocks(dy, plan),
    plan.owner,
    plan.starts,
    interpret=form.interpret,
  )
  return drows, dw.astype(weights.dtype), None


matmul.defvjp(_matmul_forward, _matmul_backward)


def _kernels() -> Any:
  """Returns the module of the kernels, which a CPU needs in tests only."""
  # Not on top: Pallas takes as long to import as half of jax.
  from models.moe import grouped_matmul_pallas

  return grouped_matmul_pallas


def _product(
  rows: Float[Array, "S I"],
  weights: Float[Array, "E D F"] | quantize.Quantized,
  plan: Plan,
  form: Form,
  *,
  transpose: bool,
) -> Float[Array, "S O"]:
  """Returns rows @ weights[owner], or by the transpose of the weights."""
  product = getattr(_kernels(), f"product_{form.kernel}")
  scale = None
  if isinstance(weights, quantize.Quantized):
    weights, scale = weights
  out = product(
    _blocks(rows, plan),
    weights,
    scale,
    plan.owner,
    plan.starts,
    transpose=transpose,
    interpret=form.interpret,
  )
  return out.reshape(len(rows), -1)


def _blocks(rows: Array, plan: Plan) -> Array:
  return rows.reshape(len(plan.owner), -1, rows.shape[-1])
