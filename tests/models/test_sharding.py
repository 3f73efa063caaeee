"""One model on meshes of eight devices, and layouts that cannot be."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import logprobs as logprobs_lib
from models import lora, sharding
from models import policy as policy_lib
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

needs_devices = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs 8 devices"
)

# Each axis alone, and all of them.
SHAPES = [(1, 1, 8), (1, 8, 1), (8, 1, 1), (2, 2, 2)]
# No parameter has a dimension of 5, so that tells activations.
ROWS, LENGTH = 16, 5


def make_config(**overrides):
  """One dense layer, then one of experts; every axis divides by 8."""
  sizes = {
    "vocab_size": 24,
    "num_layers": 2,
    "dense_layers": (0,),
    "d_model": 16,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 2,
    "d_ff": 48,
    "d_expert": 32,
    "num_experts": 8,
    "tie_embeddings": False,
    "compute": config_lib.Compute(moe_block=4),
  }
  return config_lib.tiny_moe(**sizes | overrides)


def make_layout(data=1, expert=1, tensor=1, rules=sharding.TRAIN):
  return sharding.Layout(sharding.make_mesh(data, expert, tensor), rules)


def make_plan(data=1, expert=1, tensor=1, **rules):
  mesh = sharding.plan_mesh(data, expert, tensor)
  return sharding.Layout(mesh, sharding.Rules(**rules))


@functools.cache
def make_params(config):
  return jax.tree.map(jnp.asarray, small_models.noisy(config))


def batch():
  tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH), 0, 24)
  positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, 1))
  # Rows end in 0 to 3 tokens of padding.
  segments = positions < LENGTH - jnp.arange(ROWS)[:, None] % 4
  return tokens, positions, segments.astype(jnp.int32)


def train(params, tokens, positions, segments, *, config, layout=None):
  """Returns the loss, its log-probabilities, and all gradients."""

  def loss(params):
    model = policy_lib.of(config).bind(params)
    hidden, aux = model.hidden(tokens, positions, segments, layout=layout)
    logits = logprobs_lib.logits(model.terms(hidden, layout=layout))
    logprobs = jax.nn.log_softmax(logits)
    hit = jnp.arange(24) == tokens[..., None]
    chosen = jnp.sum(jnp.where(hit & (segments[..., None] > 0), logprobs, 0))
    total = aux.load_balance - chosen / segments.sum()
    return total, jnp.where(segments[..., None] > 0, logprobs, 0)

  return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def on_one_device(config):
  run = jax.jit(functools.partial(train, config=config))
  return run(make_params(config), *batch())


def on_mesh(config, layout):
  """Returns what `train` does there, and the compiled program's text."""
  places = layout.tree(policy_lib.of(config).axes)
  rows = jax.device_put(batch(), layout.sharding("batch"))
  params = jax.device_put(make_params(config), places)
  run = jax.jit(
    functools.partial(train, config=config, layout=layout),
    out_shardings=(None, places),
  )
  compiled = run.lower(params, *rows).compile()
  return compiled(params, *rows), compiled.as_text() or ""


def moves(program):
  """Returns what XLA has devices exchange whole, outside of shard_map."""
  exchange = re.compile(r"(all-gather|all-to-all|collective-permute)\S*\(")
  return [
    exchange.split(line)[0]
    for line in program.splitlines()
    if exchange.search(line) and "shard_map" not in line
  ]


def assert_equal(actual, expected):
  # 1e-5, absolute and relative: the largest gradients are of order 1.
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    actual,
    expected,
  )


@needs_devices
@pytest.mark.parametrize(
  "shape",
  [
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:-1]),
    SHAPES[-1],
  ],
  ids=str,
)
def test_loss_and_every_gradient_are_those_of_one_device(shape):
  config, layout = make_config(), make_layout(*shape)
  axes = policy_lib.of(config).axes
  sharding.validate(config, axes, layout, rows={"rows": ROWS})
  actual, program = on_mesh(config, layout)
  assert_equal(actual, on_one_device(config))
  # A gradient lies as its parameter: each device has its part and no more.
  data, expert, tensor = shape
  parts = {
    "embed": (24 // tensor, 16 // data),
    "head": (16 // data, 24 // tensor),
    "final_norm": (16,),
  }
  sparse = {
    "up": (8 // expert, 16 // data, 32 // tensor),
    "down": (8 // expert, 32 // tensor, 16 // data),
  }
  gradients = actual[1]
  layers = gradients["layers"]
  for tree, expected in (
    (gradients, parts),
    (layers[0]["mlp"], {"gate": (16 // data, 48 // tensor)}),
    (layers[1]["moe"], sparse),
    (layers[1]["moe"]["router"], {"kernel": (16 // data, 8)}),
    (layers[1]["attention"], {"out": (8 // tensor, 2, 16 // data)}),
  ):
    for name, part in expected.items():
      leaf = tree[name]
      assert leaf.sharding.shard_shape(leaf.shape) == part, name
  # Parameters come to the rows; rows never leave their device, but for experts.
  moved = moves(program)
  assert bool(moved) == (data > 1)
  assert not [x for x in moved if re.search(rf"[\[,]{LENGTH}[,\]]", x)]


@needs_devices
def test_a_tied_table_serves_both_ends_of_the_model():
  config = make_config(tie_embeddings=True, num_layers=1)
  actual, _ = on_mesh(config, make_layout(2, 2, 2))
  assert_equal(actual, on_one_device(config))


@needs_devices
@pytest.mark.parametrize(
  "changes",
  [
    # Both heads of keys on every device, beside the 8 / 4 that ask them.
    {"kv_heads": None},
    {"embed": None, "vocab": None, "norm": "data", "router": "tensor"},
    pytest.param(
      {"embed": None, "vocab": None, "mlp": None, "experts": None},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"embed": ("data", "expert"), "experts": None}, marks=pytest.mark.slow
    ),
  ],
  ids=str,
)
def test_rules_change_where_things_lie_and_nothing_else(changes):
  config = make_config(num_kv_heads=2 if "kv_heads" in changes else 8)
  shape = (2, 1, 4) if "kv_heads" in changes else (2, 2, 2)
  layout = make_layout(*shape, rules=sharding.Rules(**changes))
  sharding.validate(config, policy_lib.of(config).axes, layout)
  actual, _ = on_mesh(config, layout)
  assert_equal(actual, on_one_device(config))


def test_gathered_parameters_are_whole_where_rows_are_split():
  layout = make_plan(2, 2, 2)
  assert layout.whole("vocab", "embed").spec == jax.P("tensor", None)
  assert layout.whole("experts", "mlp", "embed").spec == jax.P(
    "expert", "tensor", None
  )
  assert not layout.is_whole((24, 16), "vocab", "embed")
  # An axis of one device splits nothing.
  assert make_plan(1, 2, 2).is_whole((24, 16), "vocab", "embed")
  both = make_plan(2, 2, 2, mlp=("data", "tensor"), embed=None)
  assert both.whole("embed", "mlp").spec == jax.P(None, "tensor")


def test_without_a_mesh_nothing_is_moved():
  params = {"embed": jnp.ones((2, 4))}
  axes = {"embed": ("vocab", "embed")}
  for layout in (None, make_layout()):
    assert sharding.gathered(layout, params, axes) is params


def validate(config, plan, **others):
  axes = policy_lib.of(config).axes
  sharding.validate(config, axes, plan, where="placement.learner", **others)


@pytest.mark.parametrize(
  ("sizes", "mesh", "message"),
  [
    (
      {"vocab_size": 29},
      {"tensor": 2},
      "model.vocab_size=29 does not divide over placement.learner.tensor=2; "
      "use placement.learner.tensor=1 or placement.learner.rules.vocab=none "
      "or model.vocab_size=30",
    ),
    (
      {"d_model": 20},
      {"data": 8},
      "model.d_model=20 does not divide over placement.learner.data=8; use "
      "placement.learner.data=5 or placement.learner.rules.embed=none",
    ),
    # 4 divides the heads and 2 those of keys, but everything else 8.
    (
      {"num_kv_heads": 2},
      {"tensor": 8},
      "model.num_kv_heads=2 does not divide over placement.learner.tensor=8; "
      "use placement.learner.tensor=2 or "
      "placement.learner.rules.kv_heads=none",
    ),
    (
      {"d_ff": 12},
      {"tensor": 8},
      "model.d_ff=12 does not divide over placement.learner.tensor=8; use "
      "placement.learner.tensor=4 or placement.learner.rules.mlp=none",
    ),
    (
      {"d_expert": 12},
      {"tensor": 8},
      "model.d_expert=12 does not divide over placement.learner.tensor=8; use "
      "placement.learner.tensor=4",
    ),
    (
      {"num_experts": 6},
      {"expert": 4},
      "model.num_experts=6 does not divide over placement.learner.expert=4; "
      "use placement.learner.expert=3",
    ),
    # There is no one size to name of a rule with two axes.
    (
      {"d_model": 20},
      {"data": 2, "expert": 8, "embed": ("data", "expert"), "experts": None},
      "model.d_model=20 does not divide over placement.learner.data * expert "
      "= 16; use placement.learner.rules.embed=none",
    ),
    (
      {"lora": lora.Lora(rank=3)},
      {"data": 2, "rank": "data", "embed": None},
      "model.lora.rank=3 does not divide over placement.learner.data=2; use "
      "placement.learner.data=1 or placement.learner.rules.rank=none",
    ),
  ],
)
def test_a_mesh_that_does_not_divide_is_refused_with_a_way_out(
  sizes, mesh, message
):
  with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
    validate(make_config(**sizes), make_plan(**mesh))


def test_what_no_layer_has_need_not_divide():
  dense = make_config(num_experts=0, dense_layers=(), d_expert=7)
  validate(dense, make_plan(2, 2, 2))
  validate(make_config(dense_layers=(), d_ff=7), make_plan(2, 2, 2))


def test_rows_that_do_not_divide_are_refused_with_a_way_out():
  # The next multiple of 2 * 4 above 22 is 24.
  message = (
    "batch.rows=22 does not divide over placement.learner.data * expert = 8; "
    "use batch.rows=24"
  )
  with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
    validate(make_config(), make_plan(2, 4), rows={"batch.rows": 22})


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    (
      {"mlp": "tensr"},
      "rules.mlp=tensr: a mesh has the axes data, expert, context, tensor; did "
      "you mean tensor?",
    ),
    (
      {"embed": ("data", "data")},
      "rules.embed=data,data names an axis twice; use data",
    ),
    (
      {"embed": "tensor"},
      "rules.vocab and mesh.rules.embed are both tensor, but there are "
      "parameters of axes (vocab, embed); set one of the two to none",
    ),
    (
      {"mlp": ("tensor", "expert")},
      "rules.experts and mesh.rules.mlp are both expert, but there are "
      "parameters of axes (experts, mlp, embed); set one of the two to none",
    ),
    # Logits would have rows and words on one axis.
    ({"vocab": "data"}, "rules.vocab=data: rows are split over data, and so"),
    ({"length": None}, "rules.length=none: tokens of a row are split over con"),
    ({"batch": None}, "rules.batch=none: rows are split over data and expert"),
  ],
)
def test_a_rule_that_no_mesh_can_follow_is_refused(rules, message):
  config = make_config()
  axes = policy_lib.of(config).axes
  with pytest.raises(ValueError, match=f"^{re.escape('mesh.' + message)}"):
    sharding.validate(config, axes, make_plan(2, 2, 2, **rules))


def test_a_mesh_of_other_axes_is_refused():
  config = make_config()
  one = np.array(jax.devices()[:1]).reshape(1, 1, 1, 1)
  names = ("data", "expert", "context", "model")
  other = jax.sharding.Mesh(one, names)
  with pytest.raises(ValueError, match=r"'context', 'tensor'\)$"):
    validate(config, sharding.Layout(other))
  explicit = (jax.sharding.AxisType.Explicit,) * 4
  mesh = jax.sharding.Mesh(one, sharding.MESH_AXES, axis_types=explicit)
  with pytest.raises(ValueError, match=r"use jax.sharding.AxisType.Auto"):
    validate(config, sharding.Layout(mesh))
