"""One number for weights, wherever they lie, and another for any others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import quantize
from rl.runtime import checksum

pytestmark = pytest.mark.compiled

DTYPES = ["float32", "bfloat16", "int8"]


@pytest.fixture
def tree():
  rng = np.random.default_rng(0)
  one, other = rng.integers(-9, 9, (2, 4, 6))
  return {
    "layers": tuple({"w": jnp.asarray(x, jnp.float32)} for x in (one, other)),
    "half": jnp.asarray(rng.normal(size=(8, 2)), jnp.bfloat16),
    "embed": quantize.quantize_matrix(
      jnp.asarray(rng.normal(size=(4, 6))), (1,)
    ),
  }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  "spec",
  [jax.P(), jax.P("a"), jax.P(None, ("b", "a")), jax.P("b", None, "a")],
  ids=str,
)
def test_a_sharding_does_not_change_the_number(spec, dtype):
  if jax.device_count() < 4:
    pytest.skip("needs 4 devices")
  mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
  leaf = jnp.arange(4 * 4 * 6).reshape(4, 4, 6).astype(dtype)
  placed = jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))
  assert checksum.of({"w": placed}) == checksum.of({"w": leaf})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_changes_the_number(dtype):
  leaf = np.arange(1, 13).reshape(3, 4).astype(jnp.dtype(dtype))
  totals = {checksum.of(leaf)}
  size = leaf.dtype.itemsize
  for place in range(leaf.nbytes):
    flipped = leaf.copy()
    flipped.view(np.uint8).reshape(-1)[place] ^= 1 << (place % 8)
    totals.add(checksum.of(flipped))
  # No two of them are alike.
  assert len(totals) == 12 * size + 1


def test_the_sign_of_zero_and_the_bits_of_nan_count():
  zeros = {checksum.of(np.float32(x)) for x in (0.0, -0.0)}
  assert len(zeros) == 2
  nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
  assert len({checksum.of(nans[i : i + 1]) for i in range(2)}) == 2


def test_swapped_elements_change_the_number():
  leaf = jnp.arange(24.0).reshape(4, 6)
  others = [leaf[::-1], leaf[:, ::-1], leaf.reshape(6, 4), leaf.reshape(24)]
  swapped = leaf.at[0, 0].set(leaf[3, 5]).at[3, 5].set(leaf[0, 0])
  others += [leaf.reshape(6, 4).T, swapped]
  totals = {checksum.of(other) for other in [leaf, *others]}
  assert len(totals) == 7


def test_swapped_leaves_change_the_number(tree):
  total = checksum.of(tree)
  first, second = tree["layers"]
  assert checksum.of(tree | {"layers": (first, second)}) == total
  assert checksum.of(tree | {"layers": (second, first)}) != total
  renamed = {"other" if k == "half" else k: leaf for k, leaf in tree.items()}
  assert checksum.of(renamed) != total


def test_the_same_bits_of_another_dtype_are_another_number():
  bits = np.array([1, 2], np.int32)
  same = [bits, bits.view(np.uint32), bits.view(np.float32)]
  assert len({checksum.of(leaf) for leaf in same}) == 3


def test_parts_of_a_tree_and_of_its_leaves_are_the_same(tree):
  parts = checksum.parts(tree)
  # Two layers, one half, values and scale.
  assert len(parts) == 5
  assert checksum.combine(parts) == checksum.of(tree)
  alone = checksum.parts(tree["embed"])
  assert {f"['embed']{name}": x for name, x in alone.items()}.items() <= (
    parts.items()
  )


def test_weights_are_read_where_they_are_under_the_transfer_guard(tree):
  with jax.transfer_guard("disallow"):
    first = checksum.of(tree | {"updates": 3})
    assert first != checksum.of(tree | {"updates": 4})
  assert 0 <= first < 2**64


def test_the_program_needs_no_memory_of_the_size_of_a_leaf():
  leaf = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
  analysis = checksum._sums.lower(leaf).compile().memory_analysis()
  # A leaf has 256 KiB.
  assert analysis is not None
  assert analysis.temp_size_in_bytes < 2**14


def test_what_has_more_than_32_bits_is_refused():
  with jax.enable_x64(True), pytest.raises(ValueError, match="at most 32 bits"):
    checksum.of({"w": np.arange(3.0, dtype=np.float64)})
