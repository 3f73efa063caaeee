"""Adapters: where they lie, what they add, merging, and their settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import kv_cache, logprobs, lora, memory_report, sharding
from models import policy as policy_lib
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

EVERYWHERE = lora.Lora(rank=2, alpha=3.0, targets=lora.TARGETS)


def model(**changes):
  """A sparse layer and a dense one, adapted wherever one can be."""
  sizes = {
    "vocab_size": 12,
    "num_layers": 2,
    "dense_layers": (1,),
    "d_model": 16,
    "head_dim": 4,
    "d_ff": 8,
    "d_expert": 8,
    "tie_embeddings": False,
    "compute": config_lib.Compute(moe_block=2),
    "lora": EVERYWHERE,
  }
  config = config_lib.tiny_moe(**(sizes | changes))
  config.validate()
  return config


def noisy(config, seed=0):
  """Parameters of which none is idle, adapters included."""
  return jax.tree.map(jnp.asarray, small_models.noisy(config, seed=seed))


def rows(num_rows=2):
  tokens = np.random.default_rng(1).integers(1, 12, (num_rows, 8))
  positions = np.tile([0, 1, 2, 3, 0, 1, 2, 0], (num_rows, 1))
  segments = np.tile([1, 1, 1, 1, 2, 2, 2, 0], (num_rows, 1))
  return [jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments)]


def logits(params, config, tokens, positions, segments, layout=None):
  model = policy_lib.of(config).bind(params)
  hidden, _ = model.hidden(tokens, positions, segments, layout=layout)
  return logprobs.logits(model.terms(hidden))[:, :7]  # The last is padding.


# With `model()` and `rows()`, and without adapters, one program for all tests.
LOGITS = jax.jit(logits, static_argnames=("config", "layout"))


def plain(config):
  return dataclasses.replace(config, lora=None)


def same(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("num_in", [1, 2])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_product_is_that_with_the_sum_of_weights_and_adapter(num_in, wrap):
  rng = np.random.default_rng(0)
  x, weight = rng.normal(size=(5, 2, 3)), rng.normal(size=(2, 3, 4))
  a, b = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 4))
  change = np.einsum("hdr,ro->hdo", a, b)
  if num_in == 1:
    weight, a, change = weight[0], a[0], change[0]
  module = {"w": weight, "lora": {"w": {"a": a, "b": b}}}
  module = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), module)
  product = wrap(lambda m, x: lora.matmul(m, "w", x, num_in))
  expected = np.tensordot(x, weight + change, num_in)
  got = product(module, jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_common_word_has_the_gradient_of_all_its_tokens(wrap):
  # 16,384 tokens of 4 words: a sum in bfloat16 stops at 256 times an addend.
  rng = np.random.default_rng(0)
  ids = jnp.asarray(rng.integers(4, size=(16, 1024)), jnp.int32)
  weights = jnp.asarray(1 + 0.1 * rng.normal(size=(16, 1024, 8)), jnp.bfloat16)
  module = {
    "w": jnp.ones((5, 8), jnp.bfloat16),
    "lora": {
      "w": {
        "a": jnp.ones((5, 2), jnp.bfloat16),
        "b": jnp.full((2, 8), 0.5, jnp.bfloat16),
      }
    },
  }

  def loss(module):
    rows = lora.lookup(module, "w", ids).astype(jnp.float32)
    return jnp.sum(rows * weights.astype(jnp.float32))

  found = wrap(jax.grad(loss))(module)
  exact = np.zeros((5, 8))
  np.add.at(exact, np.asarray(ids), np.asarray(weights, np.float64))
  assert found["w"].dtype == jnp.bfloat16
  # The fifth word is nowhere. A rounding is 2^-8; those of A's are two.
  np.testing.assert_allclose(np.asarray(found["w"], float), exact, rtol=2**-8)
  np.testing.assert_allclose(
    np.asarray(found["lora"]["w"]["a"], float),
    np.repeat(exact.sum(-1, keepdims=True) / 2, 2, -1),
    rtol=2**-7,
  )


@pytest.mark.skipif(
  jax.__version_info__ < (0, 9), reason="XLA of jax 0.8 fuses otherwise"
)
def test_fresh_adapters_add_nothing_to_the_same_weights():
  config = model()
  key = jax.random.key(0)
  adapted, bare = (policy_lib.of(c).init(key) for c in (config, plain(config)))
  same(lora.drop(adapted), bare)
  got = LOGITS(adapted, config, *rows())
  np.testing.assert_array_equal(got, LOGITS(bare, plain(config), *rows()))
  # x A would vanish as well, and with it every gradient, were A zero too.
  adapters = jax.tree.leaves_with_path(lora.split(adapted)[0])
  for path, leaf in adapters:
    assert np.any(leaf) == (path[-1].key == "a"), jax.tree_util.keystr(path)


def test_fresh_adapters_are_drawn_by_the_width_that_they_sum_over():
  # PEFT draws from +-1 / sqrt(width): a deviation of 1 / sqrt(3 width). Of
  # experts "down" sums over 8, and attention's "out" over 4 heads of 4.
  config = model(lora=lora.Lora(rank=256, targets=("out", "down", "query")))
  layer = policy_lib.of(config).init(jax.random.key(0))["layers"][0]
  for part, name, width in (
    ("attention", "query", 16),
    ("attention", "out", 16),
    ("moe", "down", 8),
  ):
    std = np.std(layer[part]["lora"][name]["a"])
    # Of 4096 draws and more: standard error 1 / sqrt(2 * 4096) = 1.1 %.
    assert std == pytest.approx((3 * width) ** -0.5, rel=0.05)


def test_all_that_can_be_adapted_is_where_its_weights_are():
  axes = policy_lib.of(model()).axes
  layer = axes["layers"][0]
  assert layer["attention"]["lora"]["out"] == {
    "a": ("heads", "head_dim", "rank"),
    "b": ("rank", "embed"),
  }
  assert layer["moe"]["lora"]["gate"] == {
    "a": ("experts", "embed", "rank"),
    "b": ("experts", "rank", "mlp"),
  }
  assert layer["moe"]["router"]["lora"]["kernel"]["b"] == ("rank", "router")
  assert axes["layers"][1]["mlp"]["lora"]["down"]["a"] == ("mlp", "rank")
  assert axes["lora"]["embed"]["a"] == ("vocab", "rank")
  assert axes["lora"]["head"]["b"] == ("rank", "vocab")


@pytest.mark.parametrize("changes", [{}, {"lora": None}], ids=["lora", "none"])
def test_the_number_of_parameters_is_that_of_the_tree(changes):
  config = model(**changes)
  shapes = policy_lib.of(config).shapes
  total, active, trained = memory_report.num_params(config)
  assert total == sum(leaf.size for leaf in jax.tree.leaves(shapes))
  trainable, _ = lora.split(shapes)
  assert trained == sum(leaf.size for leaf in jax.tree.leaves(trainable))
  # 2 of 4 experts are idle, with 3 matrices of 16 x 8 each, and adapters of
  # rank 2 and 16 + 8 a side.
  idle = 2 * 3 * (16 * 8 + (2 * (16 + 8) if config.lora else 0))
  assert total - active == idle


def test_joining_undoes_splitting():
  params = noisy(model())
  trainable, frozen = lora.split(params)
  same(lora.join(trainable, frozen), params)
  same(frozen, lora.drop(params))
  # The very same arrays: nothing is copied on the way.
  joined = jax.tree.leaves(lora.join(trainable, frozen))
  assert all(
    a is b for a, b in zip(joined, jax.tree.leaves(params), strict=True)
  )
  names = [path for path, _ in jax.tree.leaves_with_path(trainable)]
  # Of attention twice, of experts and router, of the MLP, and of both tables.
  assert len(names) == 2 * (2 * 4 + 4 + 3 + 2)
  targets = {*lora.TARGETS, "kernel"}  # The router's.
  assert all(path[-2].key in targets for path in names)


def test_without_adapters_all_is_trained():
  params = noisy(model(lora=None))
  trainable, frozen = lora.split(params)
  assert trainable is params
  assert frozen is None
  assert lora.join(trainable, frozen) is params
  assert lora.merge(params, None) is params


def test_axes_and_shapes_split_as_parameters_do():
  config = model()
  axes, _ = lora.split(policy_lib.of(config).axes)
  shapes, _ = lora.split(policy_lib.of(config).shapes)
  ranks = jax.tree.map(len, axes, is_leaf=sharding.is_axes)
  assert ranks == jax.tree.map(lambda leaf: leaf.ndim, shapes)


def test_merged_weights_compute_what_the_adapters_do():
  config = model()
  params = noisy(config)
  adapted = LOGITS(params, config, *rows())
  merged = jax.jit(lambda p: lora.merge(p, config.lora))(params)
  same(
    jax.tree.map(jnp.shape, merged),
    jax.tree.map(jnp.shape, policy_lib.of(plain(config)).shapes),
  )
  expected = LOGITS(merged, plain(config), *rows())
  # Rounding alone, of logits up to about 5.
  np.testing.assert_allclose(adapted, expected, atol=1e-5)
  without = LOGITS(lora.drop(params), plain(config), *rows())
  assert np.max(np.abs(adapted - without)) > 0.1


def test_merging_is_exact_in_float64():
  config = model()
  params = noisy(config)
  merged = lora.merge(params, config.lora)
  layers = params["layers"]
  for module, name, subscripts in (
    (layers[0]["attention"], "query", "dr,rhe->dhe"),
    (layers[0]["attention"], "out", "hdr,re->hde"),
    (layers[0]["moe"], "down", "edr,erf->edf"),
    (layers[1]["mlp"], "gate", "dr,rf->df"),
    (params, "embed", "vr,rd->vd"),
  ):
    a, b = (np.float64(module["lora"][name][k]) for k in "ab")
    # alpha / rank = 3 / 2.
    exact = np.float64(module[name]) + 1.5 * np.einsum(subscripts, a, b)
    leaves = [
      leaf
      for leaf in jax.tree.leaves(merged)
      if leaf.shape == exact.shape and np.allclose(leaf, exact, atol=1e-6)
    ]
    assert len(leaves) == 1, name


def test_merging_rounds_bfloat16_once():
  # 1 + 2 ** -7 is the next bfloat16 after 1, and half of that step rounds to
  # even. Rounded factors would make 3 * 2 ** -10 * 1.5 = 4.5 * 2 ** -10 of it.
  params = {
    "w": jnp.ones((1, 1), jnp.bfloat16),
    "lora": {
      "w": {
        "a": jnp.full((1, 2), 2.0**-5, jnp.bfloat16),
        "b": jnp.full((2, 1), 1.5 * 2.0**-5, jnp.bfloat16),
      }
    },
  }
  # 2 * 1.5 * 2 ** -10 * 1.5 = 4.5 * 2 ** -10 > 4 * 2 ** -10: it rounds up.
  merged = lora.merge(params, lora.Lora(rank=2, alpha=3.0))
  assert merged["w"].dtype == jnp.bfloat16
  assert float(merged["w"][0, 0]) == 1 + 2.0**-7


def test_decoding_with_adapters_agrees_with_merged_rows():
  config = model()
  params = noisy(config)
  tokens, positions, _ = (np.asarray(x)[:1, :4] for x in rows())
  # The first segment of a row has 4 tokens.
  merged = lora.merge(params, config.lora)
  expected = LOGITS(merged, plain(config), *rows())[:1, :4]
  tables = jnp.array([[1, 0]], jnp.int32)
  cache = kv_cache.init_cache(config, 2, 2)

  @jax.jit
  def step(params, cache, token, position):
    model = policy_lib.of(config).bind(params)
    hidden, cache, _ = model.feed(cache, tables, token, position, (0, 1))
    return logprobs.logits(model.terms(hidden)), cache

  got = []
  for t in range(4):
    out, cache = step(params, cache, tokens[:, t], positions[:, t])
    got.append(out)
  np.testing.assert_allclose(np.stack(got, 1), expected, atol=1e-5)


def test_adapters_on_eight_devices_agree_with_one_and_all_have_a_gradient():
  config = model(vocab_size=16, num_kv_heads=2)
  params = noisy(config)
  batch = rows(8)
  layout = sharding.Layout(sharding.make_mesh(2, 2, 2))

  def loss(trainable, frozen, layout=None):
    params = lora.join(trainable, frozen)
    out = logits(params, config, *batch, layout=layout)
    return jnp.mean(jnp.sin(out)), out

  def both(layout):
    return jax.jit(
      jax.value_and_grad(lambda t, f: loss(t, f, layout), has_aux=True)
    )

  parts = lora.split(params)
  (_, expected), grads = both(None)(*parts)
  shardings = layout.tree(policy_lib.of(config).axes)
  placed = lora.split(jax.device_put(params, shardings))
  (_, out), sharded = both(layout)(*placed)
  np.testing.assert_allclose(out, expected, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sharded, grads
  )
  for path, leaf in jax.tree.leaves_with_path(grads):
    assert np.any(leaf), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"rank": 0}, r"lora.rank=0 must be at least 1"),
    ({"alpha": 0.0}, r"lora.alpha=0.0 must be a finite number above 0; use 8"),
    ({"alpha": float("nan")}, r"lora.alpha=nan"),
    ({"targets": ()}, r"lora.targets is empty"),
    ({"targets": ("gate_proj",)}, r"'gate_proj'; did you mean 'gate'\?"),
    ({"targets": ("querry",)}, r"'querry'; did you mean 'query'\?"),
    ({"targets": ("key", "key")}, r"lora.targets names 'key' twice"),
  ],
)
def test_settings_that_cannot_work_say_what_can(settings, message):
  with pytest.raises(ValueError, match=message):
    lora.Lora(**settings).validate()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tie_embeddings": True}, "names 'embed', which tie_embeddings=true"),
    (
      {"num_experts": 0, "lora": lora.Lora(targets=("router",))},
      "names 'router', but no layer has one with num_experts=0",
    ),
  ],
)
def test_targets_that_the_model_lacks_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    model(**changes)
