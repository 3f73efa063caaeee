import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import quantize
from models.moe import grouped_matmul, grouped_matmul_pallas
from models.moe import layer as moe_layer
from tests.helpers import absent_devices, triton_modules

pytestmark = pytest.mark.compiled

BLOCKS = grouped_matmul.Form("blocks")
KERNELS = [
  grouped_matmul.Form("mosaic", interpret=True),
  grouped_matmul.Form("triton", interpret=True),
]
NAMES = [form.kernel for form in KERNELS]


def noise(seed, *shape, dtype=jnp.float32):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, dtype)


def some_experts(num_tokens=50, num_experts=5, k=2):
  """Expert 2 gets nobody, and every seventh token no expert."""
  scores = np.random.default_rng(0).random((num_tokens, num_experts))
  scores[:, 2] = -1
  experts = np.argsort(-scores, 1)[:, :k]
  experts[::7] = -1
  return jnp.asarray(experts, jnp.int32)


def test_a_plan_sorts_by_expert_and_rounds_up_to_blocks():
  experts = jnp.array([[2, 0], [-1, -1], [0, 5], [2, 0]])
  plan = grouped_matmul.plan(experts, 3, 2)
  # Assignments of expert 0: numbers 1, 4, 7; of 1 none; of 2: 0 and 6. So
  # 2 + 0 + 1 blocks of 2, and 8 stands for an empty slot.
  assert plan.starts.tolist() == [0, 2, 2, 3]
  assert plan.owner[:3].tolist() == [0, 0, 2]
  assert plan.places.source[:6].tolist() == [1, 4, 7, 8, 0, 6]
  np.testing.assert_array_equal(plan.places.source[6:], 8)
  nowhere = len(plan.places.source)
  assert plan.places.slots.tolist() == [
    [4, 0],
    [nowhere, nowhere],
    [1, nowhere],
    [5, 2],
  ]
  assert grouped_matmul.num_placed(plan.places) == 5


@pytest.mark.parametrize("block", [1, 3, 16])
def test_there_is_always_room_for_the_bound(block):
  planned = jax.jit(grouped_matmul.plan, static_argnums=(1, 2, 3))
  # All on one expert, each on its own, and everything in between.
  for num_experts in (2, 8):
    for used in (2, num_experts):
      first = np.arange(40, dtype=np.int32) % used
      experts = np.stack([first, (first + 1) % used], 1)
      plan = planned(experts, num_experts, block)
      assert grouped_matmul.num_placed(plan.places) == 80
      assert plan.starts[-1] <= len(plan.owner)
  experts[20:] = -1
  plan = planned(experts, 8, block, 40)
  assert grouped_matmul.num_placed(plan.places) == 40


def test_what_a_bound_leaves_out_has_no_slot():
  experts = jnp.zeros((8, 1), jnp.int32)
  plan = grouped_matmul.plan(experts, 1, 2, most=6)
  assert grouped_matmul.num_placed(plan.places) == 6
  assert int((plan.places.slots < 6).sum()) == 6


def test_spreading_and_collecting_are_each_others_transpose():
  experts = some_experts()
  plan = grouped_matmul.plan(experts, 5, 4)
  x = noise(1, 50, 3)
  rows = noise(2, len(plan.places.source), 3)
  y, pull = jax.vjp(lambda x: grouped_matmul.spread(x, plan.places), x)
  np.testing.assert_allclose(
    jnp.vdot(y, rows), jnp.vdot(x, pull(rows)[0]), rtol=1e-5
  )
  np.testing.assert_array_equal(
    pull(rows)[0], grouped_matmul.collect(rows, plan.places)
  )
  # Every token comes back once for each of its assignments.
  times = (experts >= 0).sum(1)
  np.testing.assert_allclose(
    grouped_matmul.collect(y, plan.places), x * times[:, None], rtol=1e-6
  )


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("form", KERNELS, ids=NAMES)
def test_kernels_agree_with_a_loop_over_tokens_in_values_and_gradients(
  form, wrap
):
  # 40 and 24 are below a tile, and no multiples of one.
  experts = some_experts()
  x, w, dy = noise(1, 50, 40), noise(2, 5, 40, 24), noise(3, 50, 24)

  def kernel(x, w):
    plan = grouped_matmul.plan(experts, 5, 16)
    rows = grouped_matmul.spread(x, plan.places)
    y = grouped_matmul.matmul(rows, w, plan, form)
    return jnp.vdot(grouped_matmul.collect(y, plan.places), dy)

  def reference(x, w):
    picked = jax.nn.one_hot(experts, 5).sum(1)
    return jnp.einsum("te,td,edf,tf->", picked, x, w, dy)

  got = wrap(jax.value_and_grad(kernel, (0, 1)))(x, w)
  want = jax.jit(jax.value_and_grad(reference, (0, 1)))(x, w)
  # Sums of 40 x 24 products of size 1.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4),
    got,
    want,
  )
  np.testing.assert_array_equal(got[1][1][2], 0)


@pytest.mark.parametrize("form", KERNELS, ids=NAMES)
def test_kernels_sum_bfloat16_in_float32(form):
  # 257 ones: bfloat16 would stop adding at 256, and rounds 257 to 256 at the
  # end; 260 is a number it has.
  experts = jnp.zeros((1, 1), jnp.int32)
  plan = grouped_matmul.plan(experts, 1, 16)
  ones = jnp.ones((1, 260), jnp.bfloat16)
  rows = grouped_matmul.spread(ones, plan.places)
  w = jnp.ones((1, 260, 8), jnp.bfloat16)
  y = grouped_matmul.matmul(rows, w, plan, form)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(y[0].astype(jnp.float32), 260)


def mix(params, x, gates, experts, form):
  y, placed = moe_layer.mix(params, x, gates, experts, form=form, least=4)
  return y.astype(jnp.float32), placed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", KERNELS, ids=NAMES)
def test_all_forms_compute_the_same_experts(form, dtype):
  experts, width = some_experts(), 32
  x, dy = noise(1, 50, width, dtype=dtype), noise(9, 50, width)
  gates = jax.nn.softmax(noise(2, 50, 2))
  params = {
    "gate": noise(3, 5, width, 16, dtype=dtype) / 4,
    "up": noise(4, 5, width, 16, dtype=dtype) / 4,
    "down": noise(5, 5, 16, width, dtype=dtype) / 4,
  }

  def run(form):
    def loss(params, x, gates):
      y, placed = mix(params, x, gates, experts, form)
      return jnp.vdot(y, dy), (y, placed)

    grad = jax.grad(loss, (0, 1, 2), has_aux=True)
    return jax.jit(grad)(params, x, gates)

  # bfloat16 keeps 8 bits, of values up to about 10 here; the loop computes in
  # float32 and rounds once, the kernels round between the products.
  atol = {"float32": 1e-5, "bfloat16": 0.15}[dtype]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a.astype(jnp.float32), b.astype(jnp.float32), atol=atol, rtol=atol
    ),
    run(form),
    run(BLOCKS),
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("platform", "kernel"), [("tpu", "mosaic"), ("cuda", "triton")]
)
def test_kernels_compile_for_their_platform_without_a_device(
  platform, kernel, dtype
):
  # Sizes of Qwen3-30B-A3B, and small ones that fill no tile.
  for width, hidden in ((2048, 768), (48, 24)):
    shapes = {
      "gate": (4, width, hidden),
      "up": (4, width, hidden),
      "down": (4, hidden, width),
    }
    params = {n: jnp.zeros(shape, dtype) for n, shape in shapes.items()}
    form = grouped_matmul.Form(kernel)

    def loss(params, x, form=form):
      experts = jnp.zeros((64, 2), jnp.int32)
      return mix(params, x, jnp.ones((64, 2)), experts, form)[0].sum()

    with absent_devices.described(platform):
      step = jax.jit(jax.grad(loss, (0, 1)))
      traced = step.trace(params, jnp.zeros((64, width), dtype))
      lowered = traced.lower(lowering_platforms=(platform,))
    # For each of three products two backwards, and two of them forwards: the
    # gradient needs no results.
    if platform == "cuda":
      assert triton_modules.check(lowered) == 8
    else:
      assert lowered.as_text().count("@tpu_custom_call") == 8


@pytest.mark.parametrize(
  ("platform", "kernel"), [("tpu", "mosaic"), ("cuda", "triton")]
)
def test_kernels_read_experts_of_8_bits_as_they_are(platform, kernel):
  shapes = {"gate": (4, 256, 128), "up": (4, 256, 128), "down": (4, 128, 256)}
  params = quantize.quantize(
    {name: jnp.ones(shape) for name, shape in shapes.items()}
  )
  form = grouped_matmul.Form(kernel)

  def run(params, x):
    experts = jnp.zeros((64, 2), jnp.int32)
    return mix(params, x, jnp.ones((64, 2)), experts, form)[0]

  with absent_devices.described(platform):
    traced = jax.jit(run).trace(params, jnp.zeros((64, 256), jnp.bfloat16))
    program = traced.lower(lowering_platforms=(platform,))
    lowered = program.as_text()
  if platform == "cuda":
    assert triton_modules.check(program) == 3
  # Outside of the kernels nothing has the shape of all experts but their bytes.
  wide = re.findall(r"tensor<4x(?:256x128|128x256)x(?:bf16|f32)>", lowered)
  assert not wide
  assert "tensor<4x256x128xi8>" in lowered


def test_the_form_goes_by_platform_unless_it_is_forced():
  assert grouped_matmul.choose("auto", "cpu") == BLOCKS
  assert grouped_matmul.choose("auto", "gpu") == grouped_matmul.Form("triton")
  assert grouped_matmul.choose("auto", "tpu") == grouped_matmul.Form("mosaic")
  assert grouped_matmul.choose("blocks", "tpu") == BLOCKS
  assert grouped_matmul.choose("pallas", "gpu") == grouped_matmul.Form("triton")
  assert grouped_matmul.choose("pallas", "cpu").interpret


def test_blocks_grow_with_the_rows_of_an_expert():
  # 12,288 assignments: 1,536 an expert are above 3 * 64, the largest; 96 make
  # room for 32, and 2 experts of 3 rows for no more than the least.
  assert grouped_matmul.block_rows(BLOCKS, 12288, 8, 16) == 64
  assert grouped_matmul.block_rows(BLOCKS, 12288, 128, 16) == 32
  assert grouped_matmul.block_rows(BLOCKS, 6, 2, 4) == 4
  triton = grouped_matmul.Form("triton")
  assert grouped_matmul.block_rows(triton, 12288, 8, 12) == 128
  assert grouped_matmul.block_rows(triton, 6, 2, 4) == 16


def test_the_work_of_the_loop_does_not_grow_with_the_number_of_experts():
  def slots_in_use(num_experts):
    rows = grouped_matmul.block_rows(BLOCKS, 4096, num_experts, 16)
    experts = jnp.arange(4096, dtype=jnp.int32).reshape(-1, 2) % num_experts
    plan = grouped_matmul.plan(experts, num_experts, rows)
    return int(plan.starts[-1]) * rows

  # 4,096 assignments, evenly spread, fill 4,096 slots in either case.
  assert slots_in_use(8) == slots_in_use(128) == 4096


def test_gradients_of_weights_are_summed_over_whole_blocks():
  # Two blocks of 128 rows for the first expert, none for the next, then one.
  starts = jnp.array([0, 2, 2, 3], jnp.int32)
  owner = jnp.array([0, 0, 2], jnp.int32)
  blocks, dy = noise(1, 3, 128, 32), noise(2, 3, 128, 16)
  found = grouped_matmul_pallas.outer_triton(
    blocks, dy, owner, starts, interpret=True
  )
  each = np.einsum("nbd,nbf->ndf", blocks, dy)
  expected = [each[:2].sum(0), np.zeros((32, 16)), each[2]]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
