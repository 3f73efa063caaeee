import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import lora, sharding
from models.moe import expert_parallel
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

# No experts apart, one on each of 8 devices, and both beside other axes; then
# other rules for parameters.
LAYOUTS = [
  pytest.param((1, 1, 8), sharding.Rules(), marks=pytest.mark.slow),
  ((1, 8, 1), sharding.Rules()),
  ((2, 2, 2), sharding.Rules()),
  pytest.param((2, 4, 1), sharding.DECODE, marks=pytest.mark.slow),
  ((2, 4, 1), sharding.Rules(experts=None, mlp=None)),
]
TOKENS, WIDTH = 512, 16

CONFIG = config_lib.tiny_moe(
  d_model=WIDTH, d_expert=8, num_experts=8, experts_per_token=2
)


# Batches and weights are of numpy: of arrays of jax every slice that goes to a
# device, and every value made from them, would be a program.
def noise(seed, *shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return (0.3 * values).astype(np.float32)


def weights(config):
  experts, hidden = config.num_experts, config.d_expert
  return {
    "router": {"kernel": noise(0, WIDTH, experts)},
    "gate": noise(1, experts, WIDTH, hidden),
    "up": noise(2, experts, WIDTH, hidden),
    "down": noise(3, experts, hidden, WIDTH),
  }


def layout_of(sizes):
  return sharding.Layout(sharding.make_mesh(*sizes))


def stepper(config, layout):
  """Returns a jitted (gradients, (results, aux, experts)) of the layer."""

  def loss(params, x, copies, chosen, target):
    y, aux, took = small_models.moe(config).bind(params)(
      x, copies, layout, chosen
    )
    losses = aux.load_balance + aux.z_loss + aux.router_entropy
    return jnp.vdot(y.astype(jnp.float32), target) + losses, (y, aux, took)

  return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


def agree(got, want, tolerance=1e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.asarray(a, np.float32),
      np.asarray(b, np.float32),
      atol=tolerance,
      rtol=tolerance,
    ),
    got,
    want,
  )


def batches():
  """Yields (name, x, copies, chosen) of one shape, easy ones and others."""
  x, ones = noise(5, TOKENS, WIDTH), np.ones(TOKENS, np.int32)
  free = np.full((TOKENS, 2), -1, np.int32)
  yield "spread", x, ones, free
  # All on experts 0 and 1, which one device has wherever experts are split.
  yield (
    "same experts",
    x,
    ones,
    np.tile(np.array([[1, 0]], np.int32), (TOKENS, 1)),
  )
  yield "same token", np.tile(x[:1], (TOKENS, 1)), ones, free
  # Padding on whole devices, which may hold anything.
  some = np.arange(TOKENS) < 100
  padded = np.where(some[:, None], x, np.nan)
  yield "padding", padded, 3 * some.astype(np.int32), free
  yield "nothing", x, 0 * ones, free
  recorded = np.random.default_rng(6).random((TOKENS, 8)).argsort(1)
  recorded = recorded[:, :2].astype(np.int32)
  yield "replay", x, ones, np.where(some[:, None], recorded, -1)


@pytest.fixture(scope="module")
def wanted():
  step = stepper(CONFIG, None)
  target = noise(7, TOKENS, WIDTH)
  return {
    name: step(weights(CONFIG), x, copies, chosen, target)
    for name, x, copies, chosen in batches()
  }


@pytest.mark.parametrize(("sizes", "rules"), LAYOUTS)
def test_a_mesh_computes_what_one_device_does(sizes, rules, wanted):
  layout = dataclasses.replace(layout_of(sizes), rules=rules)
  params = jax.device_put(
    weights(CONFIG), layout.tree(small_models.moe(CONFIG).axes)
  )
  step, target = stepper(CONFIG, layout), noise(7, TOKENS, WIDTH)
  for name, x, copies, chosen in batches():
    found = step(params, x, copies, chosen, target)
    agree(found, wanted[name])
    _, (_, aux, took) = found
    assert aux.dropped == 0, name
    np.testing.assert_array_equal((took < 0).all(1), copies == 0)


def test_the_batches_take_both_ways_through_the_exchange():
  # At 8 devices of one expert each: 64 tokens, of which a quarter goes to each,
  # times 1.5; and 128 assignments, times 1.5. All of them want one device.
  usual, worst = expert_parallel.capacities(64, 2, 8, 8)
  assert usual == (24, 192, 1)
  assert usual.rows < 64
  # 192 assignments are 24 rows from each of 8: 3 rounds for 64 tokens.
  assert worst == (24, 192, 3)
  # Few tokens are not worth two ways.
  few = expert_parallel.capacities(8, 2, 8, 8)
  assert few == ((8, 64, 1), (8, 64, 1))


@pytest.mark.parametrize("num_chosen", [1, 2, 8])
@pytest.mark.parametrize("num_experts", [8, 64])
def test_the_rounds_have_room_for_any_choice(num_experts, num_chosen):
  for tokens, parts in itertools.product((1, 37, 4096), (2, 4, 8)):
    usual, worst = expert_parallel.capacities(
      tokens, num_chosen, num_experts, parts
    )
    most = min(num_chosen, num_experts // parts)
    assert worst.rows * worst.rounds >= tokens
    assert worst.assignments >= worst.rows * parts * most
    assert worst.assignments <= usual.assignments
    assert worst.rows <= usual.rows <= tokens


def lowered(sizes, tokens, dtype: Any = "float32", *, backward=False):
  compute = config_lib.Compute(dtype=dtype)
  config = dataclasses.replace(CONFIG, compute=compute)
  layout = layout_of(sizes)

  def apply(params, x):
    counts = jnp.ones(tokens, jnp.int32)
    return small_models.moe(config).bind(params)(x, counts, layout)[0]

  def gradient(params, x):
    return jax.grad(lambda *args: apply(*args).sum(), (0, 1))(params, x)

  x, params = jax.tree.map(
    lambda leaf: leaf.astype(dtype), (noise(5, tokens, WIDTH), weights(config))
  )
  x = jax.device_put(x, layout.sharding("batch"))
  params = jax.device_put(params, layout.tree(small_models.moe(config).axes))
  return jax.jit(gradient if backward else apply).lower(params, x)


def test_tokens_are_exchanged_and_never_gathered():
  text = str(lowered((2, 4, 1), 4096).compile().as_text())
  # 512 tokens of a device, of 8 experts 2 on each of 4: a token meets one with
  # 1 - (6 * 5) / (8 * 7) = 0.464, so 1.5 * 0.464 * 512 rounds up to 360 rows.
  assert re.search(r"f32\[1,360,16\].* all-to-all\(", text)
  gathered = re.findall(r"= (\S+?)\{\S* all-gather\(", text)
  assert set(gathered) == {"f32[16,8]", "f32[2,16,8]", "f32[2,8,16]"}
  # And no array has all tokens.
  assert "[4096," not in text


@pytest.mark.parametrize(
  ("dtype", "name"),
  [
    pytest.param("float32", "f32", marks=pytest.mark.slow),
    ("bfloat16", "bf16"),
  ],
)
def test_tokens_travel_in_the_dtype_of_the_model(dtype, name):
  text = lowered((2, 4, 1), 4096, dtype).as_text()
  # There and back, in the usual case and in rounds; 16 is their width.
  pattern = r"all_to_all.*-> tensor<\S*x16x(\w+)>"
  assert re.findall(pattern, text) == [name] * 4
  text = lowered((2, 4, 1), 4096, dtype, backward=True).as_text()
  moved = re.findall(pattern, text)
  assert set(moved) == {name}
  assert len(moved) > 4


def test_a_few_tokens_need_not_divide_over_the_devices():
  # Over four: 2, 2, 2 and none.
  layout = layout_of((2, 2, 2))
  x, ones, target = noise(5, 6, WIDTH), np.ones(6, np.int32), noise(7, 6, WIDTH)
  args = (weights(CONFIG), x, ones, None, target)
  agree(stepper(CONFIG, layout)(*args), stepper(CONFIG, None)(*args))


def test_bfloat16_agrees_up_to_its_rounding():
  compute = config_lib.Compute(dtype="bfloat16")
  config = dataclasses.replace(CONFIG, compute=compute)
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(config))
  x = noise(5, TOKENS, WIDTH).astype(jnp.bfloat16)
  ones, target = np.ones(TOKENS, np.int32), noise(7, TOKENS, WIDTH) / 20
  args = (params, x, ones, None, target)
  # Partial sums over devices are rounded to 8 bits each: 2^-8 of values and
  # gradients of up to 4.
  agree(
    stepper(config, layout_of((2, 2, 2)))(*args),
    stepper(config, None)(*args),
    tolerance=0.02,
  )


def test_adapters_are_split_as_their_experts_are():
  layout = layout_of((2, 2, 2))
  adapters = {
    "gate": {"a": noise(10, 8, WIDTH, 3), "b": noise(11, 8, 3, 8)},
    "down": {"a": noise(12, 8, 8, 3), "b": noise(13, 8, 3, WIDTH)},
  }
  of_router = {"a": noise(14, WIDTH, 3), "b": noise(15, 3, 8)}
  params: Any = weights(CONFIG) | {"lora": adapters}
  params["router"]["lora"] = {"kernel": of_router}
  settings = lora.Lora(rank=3, alpha=3.0, targets=(*adapters, "router"))
  config = dataclasses.replace(CONFIG, lora=settings)
  x, ones = noise(5, TOKENS, WIDTH), np.ones(TOKENS, np.int32)
  args = (params, x, ones, None, noise(7, TOKENS, WIDTH))
  agree(stepper(config, layout)(*args), stepper(config, None)(*args))


def test_interpreted_kernels_are_refused_on_a_mesh():
  compute = config_lib.Compute(experts="pallas")
  config = dataclasses.replace(CONFIG, compute=compute)
  with pytest.raises(ValueError, match=r"experts=pallas .* use auto"):
    small_models.moe(config).bind(weights(config))(
      jnp.asarray(noise(5, 8, WIDTH)),
      jnp.ones(8, jnp.int32),
      layout_of((8, 1, 1)),
    )
