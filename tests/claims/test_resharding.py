"""From any mesh to any other: what arrives of a model, bit by bit."""

import asyncio
import dataclasses
import functools
import itertools
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import logprobs as logprobs_lib
from models import lora, quantize, sharding
from models import policy as policy_lib
from rl.audit import event_log
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import router, weight_publisher, weight_transfer
from rl.runtime import mesh_thread, trace
from rl.testing import scripted_engine
from tests.helpers import small_models

pytestmark = pytest.mark.compiled

CONFIG = dataclasses.replace(small_models.CONFIG, lora=lora.Lora(rank=2))
DTYPES = get_args(weight_transfer.Dtype)
MESHES = list(itertools.product((1, 2), repeat=3))


@pytest.fixture
def spans():
  return trace.Trace(None)


@pytest.fixture
def thread(spans):
  thread = mesh_thread.MeshThread("learner", spans)
  yield thread
  thread.close()


@pytest.fixture
def log():
  return event_log.EventLog()


@pytest.fixture
def make(thread, spans, log):
  """Returns a publisher to an engine, whose weights lie so."""

  def make(where, dtype, served=None):
    served = served or scripted_engine.ScriptedEngine(lambda request: ())
    transfer = weight_transfer.MeshTransfer(
      [where], thread, thread, weight_transfer.Publishing(dtype=dtype)
    )
    return weight_publisher.WeightPublisher(
      router.Router([served]), transfer, log, spans
    )

  return make


@pytest.fixture(scope="module")
def model():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype),
    policy_lib.of(CONFIG).shapes,
  )


@pytest.fixture(scope="module")
def expected(model):
  """What pools have of it, by dtype."""
  return {
    dtype: jax.device_get(weight_transfer.cast(model, dtype))
    for dtype in DTYPES
  }


def num_bytes(tree):
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def layout(sizes, rules):
  """Of the first devices, or for decoding of the last ones."""
  devices = jax.devices()[:: -1 if rules is sharding.DECODE else 1]
  mesh = sharding.make_mesh(*sizes, devices=devices[: math.prod(sizes)])
  return sharding.Layout(mesh, rules)


@functools.cache
def pool_shardings(sizes, dtype):
  pool = layout(sizes, sharding.DECODE)
  return weight_transfer.pool_shardings(CONFIG, pool, dtype)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
  "sizes",
  [
    # An even number of axes that split: each of them does, or does not.
    sizes
    if math.prod(sizes) in (1, 4)
    else pytest.param(sizes, marks=pytest.mark.slow)
    for sizes in MESHES
  ],
  ids=str,
)
def test_any_sharding_becomes_any_other_bit_by_bit(
  make, model, expected, sizes
):
  learner = layout(sizes, sharding.TRAIN).tree(policy_lib.of(CONFIG).axes)
  params = jax.device_put(model, learner)

  async def scenario(dtype, pool):
    publisher = make(pool, dtype)
    return await publisher.place(params)

  for dtype, pool_sizes in itertools.product(("same", "int8"), MESHES):
    places = pool_shardings(pool_sizes, dtype)
    copy, moved = asyncio.run(scenario(dtype, places))
    assert moved == num_bytes(expected[dtype])
    jax.tree.map(np.testing.assert_array_equal, copy, expected[dtype])
    assert jax.tree.map(lambda leaf: leaf.sharding, copy) == places


@pytest.mark.parametrize("dtype", DTYPES)
async def test_of_a_model_with_adapters_only_those_are_cast_and_move(
  make, log, model, expected, dtype
):
  params = jax.device_put(model)
  trained, frozen = lora.split(params)
  after = lora.join(jax.tree.map(lambda x: x + 1, trained), frozen)
  adapters = lora.split(expected[dtype])[0]
  where = pool_shardings((1, 1, 1), dtype)

  served = scripted_engine.ScriptedEngine(lambda request: ())
  publisher = make(where, dtype, served)
  await publisher.publish(7, params, "drain")
  await publisher.publish(8, after, "drain")
  sizes = [e["moved_bytes"] for e in log.events if e["kind"] == "staged"]
  assert sizes == [num_bytes(expected[dtype]), num_bytes(adapters)]
  # 8 bits leave adapters as they are: 4 bytes a number.
  count = sum(leaf.size for leaf in jax.tree.leaves(trained))
  assert sizes[1] == count * (2 if dtype == "bfloat16" else 4)
  cast = weight_transfer.cast(after, dtype)
  jax.tree.map(np.testing.assert_array_equal, served.params, cast)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_an_engine_decodes_what_int8_stands_for_on_a_mesh(
  model, expected, spans, make
):
  places = pool_shardings((2, 1, 2), "int8")
  prompt = np.arange(1, 7, dtype=np.int32)
  request = contract.DecodeRequest(
    request_id="a", session="a", tokens=prompt, max_tokens=6, temperature=0.0
  )
  settings = engine_settings.EngineSettings(
    slots=2, row_buckets=(2,), chunk_buckets=(6,)
  )
  decode = mesh_thread.MeshThread("decode", spans)

  async def scenario():
    pool = layout((2, 1, 2), sharding.DECODE)
    served = settings.build(CONFIG, pool, decode)
    copy, _ = await make(places, "int8").place(jax.device_put(model))
    await served.start(copy, 0)
    answer = await served.generate(request)
    await served.close()
    return answer

  answer = asyncio.run(scenario())
  decode.close()
  ids = jnp.asarray(np.concatenate([prompt, answer.tokens]))[None]
  whole = quantize.dequantize(jax.device_put(expected["int8"]), jnp.float32)
  model = policy_lib.of(CONFIG).bind(whole)
  hidden, _ = model.hidden(
    ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
  )
  logprobs = jax.nn.log_softmax(logprobs_lib.logits(model.terms(hidden)))[
    0, 5:-1
  ]
  # 1e-4 nats: sums in another order, of logits of order 10.
  at = answer.tokens[:, None]
  np.testing.assert_allclose(
    np.take_along_axis(np.asarray(logprobs), at, 1)[:, 0],
    answer.logprobs,
    atol=1e-4,
  )


def test_bfloat16_is_for_what_is_wider_and_for_a_pool_that_computes_in_it():
  rest = {"n": 3, "i": jnp.arange(3), "h": jnp.zeros(2, jnp.float16)}
  cast = weight_transfer.cast(rest | {"w": jnp.full(2, 1 + 2**-9)}, "bfloat16")
  assert all(cast[name] is rest[name] for name in rest)
  # To the nearest, and of two to the even one.
  assert cast["w"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(cast["w"].astype(jnp.float32), [1, 1])
  pool = weight_transfer.pool_model(CONFIG, "bfloat16")
  assert pool.compute.dtype == "bfloat16"
  assert weight_transfer.pool_model(CONFIG, "int8") is CONFIG
