"""The choice of a form of attention, by platform and shape.

reference   plain jnp; all scores exist at once
fused       jax.nn.dot_product_attention: cuDNN's kernel on GPU, with a mask
triton      GPU kernels without a mask, see `triton`
blockwise   tiles, see `blockwise`; memory grows with the length of a row
splash      a TPU kernel, see `splash`
"""

import dataclasses

from models.attention import splash, triton

CHOSEN = ("auto", "packed")
"""Settings that leave the form to `choose`."""

UNIVERSAL = ("reference", "blockwise")
"""Forms that take any tokens, also on top of a cache."""

_KERNELS = {
  "splash": (splash.LANES, {"float32", "bfloat16"}),
  "triton": (triton.TILE, {"float32", "bfloat16", "float16"}),
}
"""Forms for whole rows: what divides a row, and their dtypes."""

MAX_SCORES = 2**28
"""Of one call on one accelerator; 1 GiB in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One call of `attention.attend`, as one device sees it.

  Attributes:
    keys: of all sources.
    dtypes: of queries, keys and values.
    in_order: tokens are ordered by their index in the row.
    windowed: queries may see the last tokens alone.
  """

  batch: int
  queries: int
  keys: int
  heads: int
  head_dim: int
  dtypes: frozenset[str]
  sources: int = 1
  parents: bool = False
  in_order: bool = True
  windowed: bool = False


def choose(platform: str, case: Case) -> str:
  """Returns the fastest form that fits into memory.

  Args:
    platform: "cpu", "gpu" or "tpu".
  """
  if platform == "cpu":
    # benchmarks/attention.py: tiles win on what nobody sees, which is half of
    # a row and more of a cache, and lose on starting each of them.
    long = case.keys >= 1024 or case.queries * case.keys >= 2**15
    return "blockwise" if long else "reference"
  num_masked = case.batch * case.queries * case.keys
  # cuDNN's mask is a whole matrix, though one for all heads, and two sources
  # would have to be copied into one. Rows that devices share count as on one:
  # their keys would be gathered, and the plan would no longer halve.
  whole = case.sources == 1 and case.batch * case.keys**2 <= MAX_SCORES
  if platform == "gpu" and whole and cudnn_can(case):
    return "fused"
  if platform == "gpu" and cudnn_can(case) and refusal("triton", case) is None:
    return "triton"
  wide = case.head_dim % splash.LANES == 0
  if platform == "tpu" and wide and refusal("splash", case) is None:
    return "splash"
  many = num_masked * case.heads > MAX_SCORES
  return "blockwise" if many else "reference"


def refusal(form: str, case: Case) -> str | None:
  """Returns why a form cannot do a case, and the way out, or None."""
  if form in UNIVERSAL:
    return None
  out = "use auto, reference or blockwise"
  if len(case.dtypes) > 1:
    return f"needs one dtype and got {', '.join(sorted(case.dtypes))}; {out}"
  if form not in _KERNELS:
    return None
  if case.sources > 1:
    return f"cannot join {case.sources} sources of keys; {out}"
  if case.parents:
    return f"knows no shared prompts; {out}, or do not share them"
  if case.windowed and form != "splash":
    return f"knows no window; {out}"
  if not case.in_order or case.queries != case.keys:
    return f"needs whole rows, in the order of their indices; {out}"
  tile, dtypes = _KERNELS[form]
  if case.queries % tile:
    whole = -(-case.queries // tile) * tile
    return f"needs rows of {whole} tokens, not {case.queries}; pad, or {out}"
  if not case.dtypes <= dtypes:
    return f"does not know {', '.join(case.dtypes)}; {out}"
  return None


def cudnn_can(case: Case) -> bool:
  """Returns whether cuDNN's kernel takes types and sizes, also backward."""
  return (
    case.dtypes in ({"bfloat16"}, {"float16"})
    and case.head_dim % 8 == 0
    and case.head_dim <= 128
    and case.queries % 2 == 0
    and case.keys % 2 == 0
  )
