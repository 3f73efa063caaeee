"""Scanned layers against unrolled ones: values, files, trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models import config as config_lib
from models import kv_cache, layer_stack, lora, quantize, sharding
from models import policy as policy_lib
from models.hf import export, load, peft
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

SIZES = {
  "vocab_size": 16,
  "num_layers": 5,
  "dense_layers": (0, 2),
  "d_model": 16,
  "head_dim": 4,
  "d_ff": 8,
  "d_expert": 12,
  "tie_embeddings": False,
}
# A sparse layer, a dense one, and two sparse ones side by side.
SHORT = {"num_layers": 4, "dense_layers": (1,)}
ADAPTED = lora.Lora(rank=2, alpha=3.0, targets=lora.TARGETS)


def pair(**overrides):
  """The same model with layers unrolled and with layers scanned."""
  config = config_lib.tiny_moe(**{**SIZES, **overrides})
  forms = ("unroll", "scan")
  return [
    dataclasses.replace(
      config, compute=dataclasses.replace(config.compute, layers=form)
    )
    for form in forms
  ]


noisy = functools.partial(small_models.noisy, of_norms=0.0)


stack = functools.partial(layer_stack.stack, join=np.stack)


def assert_equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_is_of_neighbours_of_one_kind():
  unrolled, scanned = pair()
  assert unrolled.layer_runs == [range(i, i + 1) for i in range(5)]
  # Layers 0 and 2 are dense; 3 and 4 have experts side by side.
  bounds = [(run.start, run.stop) for run in scanned.layer_runs]
  assert bounds == [(0, 1), (1, 2), (2, 3), (3, 5)]


def test_deep_models_scan_unless_told_otherwise():
  assert not config_lib.tiny(num_layers=15).scans_layers
  assert config_lib.tiny(num_layers=16).scans_layers
  compute = config_lib.Compute(layers="unroll")
  assert not config_lib.tiny(num_layers=16, compute=compute).scans_layers


def test_a_seed_draws_the_same_parameters_for_both():
  unrolled, scanned = pair(lora=ADAPTED)
  key = jax.random.key(0)
  one, other = (
    jax.device_get(policy_lib.of(c).init(key)) for c in (unrolled, scanned)
  )
  assert_equal(layer_stack.unstack(other, scanned), one)
  assert_equal(stack(one, scanned), other)


def outcome(config, params, chosen):
  """Returns loss, hidden states and gradients of two rows of 12."""
  tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 16)
  positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
  segments = jnp.ones((2, 12), jnp.int32)

  def loss(params):
    model = policy_lib.of(config).bind(params)
    hidden, aux = model.hidden(tokens, positions, segments, experts=chosen)
    return jnp.mean(hidden**2) + aux.load_balance, (hidden, aux)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def recorded():
  """Experts of three sparse layers; -1 leaves the choice to the router."""
  return jax.random.randint(jax.random.key(2), (2, 12, 3, 2), -1, 4)


@functools.cache
def of_unrolled_layers():
  """That computing parts again changes nothing there is shown elsewhere."""
  unrolled, scanned = pair(**SHORT, lora=ADAPTED)
  value, gradient = outcome(unrolled, noisy(unrolled), recorded())
  return value, stack(gradient, scanned)


@pytest.mark.parametrize(
  "remat",
  [
    "none",
    pytest.param("dots", marks=pytest.mark.slow),
    pytest.param("layer", marks=pytest.mark.slow),
    pytest.param("host", marks=pytest.mark.slow),
  ],
)
def test_values_and_gradients_are_those_of_unrolled_layers(remat):
  unrolled, scanned = pair(**SHORT, lora=ADAPTED)
  params = stack(noisy(unrolled), scanned)
  compute = dataclasses.replace(scanned.compute, remat=remat)
  config = dataclasses.replace(scanned, compute=compute)
  found = outcome(config, params, recorded())
  for one, other in zip(
    jax.tree.leaves(found),
    jax.tree.leaves(of_unrolled_layers()),
    strict=True,
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_program_does_not_grow_with_the_layers():
  compute = config_lib.Compute(layers="scan")

  def text(num_layers):
    config = config_lib.tiny(num_layers=num_layers, compute=compute)
    shape = jax.ShapeDtypeStruct((2, 12), jnp.int32)

    def hidden(params, tokens):
      model = policy_lib.of(config).bind(params)
      return model.hidden(tokens, tokens, tokens)[0].sum()

    lowered = jax.jit(jax.grad(hidden)).lower(
      policy_lib.of(config).shapes, shape
    )
    return lowered.as_text().count("\n")

  assert text(48) == text(4)


@pytest.mark.parametrize(
  "quantized", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_cache_is_fed_as_by_unrolled_layers(quantized):
  unrolled, scanned = pair(**SHORT, lora=ADAPTED)
  single = noisy(unrolled)
  feed = jax.jit(small_models.feed, static_argnames=("config", "chunks"))
  # Two rows of two pages of 4. A chunk of 6 ids of one and an id of the other,
  # and then the other way round, each behind what its row has.
  tables = np.asarray([[0, 1], [2, 3]], np.int32)
  ids = np.random.default_rng(1).integers(16, size=(2, 7), dtype=np.int32)
  positions = np.asarray([[*range(6), 0], [*range(1, 7), 6]], np.int32)

  def outcome(config, params):
    if quantized:
      params = jax.jit(quantize.quantize)(params)
    cache, fed = kv_cache.init_cache(config, 4, 4), []
    for turn, rows in enumerate((tables, tables[::-1])):
      hidden, cache, experts = feed(
        params, config, cache, rows, ids[turn], positions[turn], (1, 6)
      )
      fed += [hidden, experts]
    return fed, cache

  found = outcome(scanned, stack(single, scanned))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    found,
    outcome(unrolled, single),
  )


def test_a_scan_copies_no_pages():
  config = config_lib.tiny(
    num_layers=6, compute=config_lib.Compute(layers="scan")
  )
  params = policy_lib.of(config).shapes

  def temporary(pages):
    shapes = jax.eval_shape(lambda: kv_cache.init_cache(config, pages, 16))
    table = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    row = jax.ShapeDtypeStruct((2,), jnp.int32)
    lowered = jax.jit(
      small_models.feed,
      static_argnames=("config", "chunks"),
      donate_argnames="cache",
    ).lower(
      params,
      config,
      cache=shapes,
      tables=table,
      tokens=row,
      positions=row,
      chunks=(0, 1),
    )
    plan = lowered.compile().memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes

  # Pages of 8 times as many tokens, 3 MiB more of them.
  assert temporary(512) - temporary(64) < 100_000


def test_files_are_the_same_and_load_into_both(tmp_path):
  unrolled, scanned = pair()
  single = noisy(unrolled)
  params = stack(single, scanned)
  export.export(tmp_path / "unrolled", single, unrolled)
  export.export(tmp_path / "scanned", params, scanned)
  one, other = (
    safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
    for name in ("unrolled", "scanned")
  )
  assert_equal(one, other)
  assert_equal(load.load(tmp_path / "unrolled", scanned), params)
  layout = sharding.Layout(sharding.make_mesh(2, 2, 2))
  assert_equal(load.load(tmp_path / "unrolled", scanned, layout), params)


def test_adapters_are_the_same_files_and_load_into_both(tmp_path):
  unrolled, scanned = pair(lora=ADAPTED)
  single = noisy(unrolled)
  single, params = jax.tree.map(jnp.asarray, (single, stack(single, scanned)))
  peft.export(tmp_path / "unrolled", single, unrolled)
  peft.export(tmp_path / "scanned", params, scanned)
  one, other = (
    (tmp_path / name / peft.TENSORS).read_bytes()
    for name in ("unrolled", "scanned")
  )
  assert one == other
  adapters, _ = lora.split(params)
  assert_equal(peft.load(tmp_path / "unrolled", scanned), adapters)


@pytest.mark.parametrize(
  "change",
  [quantize.quantize, lambda params: lora.merge(params, ADAPTED)],
  ids=["quantised", "merged"],
)
def test_each_layer_changes_as_if_it_were_alone(change):
  unrolled, scanned = pair(lora=ADAPTED)
  single = noisy(unrolled)
  found = jax.jit(change)(stack(single, scanned))
  expected = stack(jax.jit(change)(single), scanned)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
    found,
    expected,
  )


@pytest.mark.slow
def test_a_mesh_changes_neither_values_nor_gradients():
  _, scanned = pair(num_layers=3, dense_layers=(0,), lora=ADAPTED)
  params = noisy(scanned)
  layout = sharding.Layout(sharding.make_mesh(2, 2, 2))
  places = layout.tree(policy_lib.of(scanned).axes)
  tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, 16)
  ones = jnp.ones((4, 12), jnp.int32)
  positions = jnp.cumsum(ones, 1) - 1

  def loss(params, layout):
    model = policy_lib.of(scanned).bind(params)
    hidden, aux = model.hidden(tokens, positions, ones, layout=layout)
    return jnp.mean(hidden**2) + aux.load_balance

  compiled = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  found = compiled(jax.device_put(params, places), layout)
  expected = compiled(params, None)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    *jax.device_get((found, expected)),
  )
