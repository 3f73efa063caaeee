"""The programs of a GPU, in bfloat16, against float32 ones on the CPU.

Relative errors are ||found - expected|| / ||expected||. bfloat16 keeps 8 bits:
0.002 to 0.01 is typical of one kernel, and 0.01 of the gradient of a few
layers. float32 kernels that round to TF32, 10 bits, have 0.0003.
"""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kv_cache, quantize, sharding
from models import policy as policy_lib
from models.attention import attention, mask, paged, paged_kernels
from models.moe import grouped_matmul
from models.moe import layer as moe_layer
from rl.algorithms import losses, objective
from rl.data import batch
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.runtime import mesh_thread, trace
from rl.train import learner, optimizers
from tests.helpers import accelerator_models, machine_speed

pytestmark = [pytest.mark.gpu, pytest.mark.compiled]

MODELS = accelerator_models.MODELS
LENGTH = 256


def noise(seed, *shape, dtype=jnp.bfloat16):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, dtype)


def error(found, expected):
  """The relative error of all leaves together, or of one array."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  off = size = 0.0
  for a, b in pairs:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    off, size = off + np.sum((a - b) ** 2), size + np.sum(b**2)
  return (off / size) ** 0.5


def with_dtype(config, dtype, **changes):
  compute = dataclasses.replace(config.compute, dtype=dtype, **changes)
  return dataclasses.replace(config, compute=compute)


def on(platform):
  """The layout of one device."""
  return placement.MeshSpec().layout(jax.devices(platform)[:1])


def attended(query, keys, values):
  """The softmax of one query over its keys, in float64; a row at a time."""
  group = query.shape[0] // keys.shape[1]
  out = np.zeros(query.shape)
  for head in range(len(query)):
    scores = keys[:, head // group] @ query[head] / np.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max())
    out[head] = weights / weights.sum() @ values[:, head // group]
  return out


@pytest.mark.parametrize("chunk", [1, 64])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("groups", [1, 4])
def test_pages_are_attended_to_as_in_float64(groups, width, chunk):
  kv_heads, layers, pages, page_size, table = 2, 3, 300, 16, 128
  cache = kv_cache.Cache(
    *(noise(i, kv_heads, layers, pages, page_size, width) for i in range(2))
  )
  rng = np.random.default_rng(2)
  tables = rng.integers(pages, size=(4, table)).astype(np.int32)
  ends = np.array([chunk - 1, 130, 1000, table * page_size - 1])
  positions = ends[:, None] + np.arange(1 - chunk, 1)
  query = noise(3, 4, chunk, groups * kv_heads, width)
  refused = paged_kernels.refusal(
    "gpu",
    queries=chunk,
    head_dim=width,
    page_size=page_size,
    dtypes=frozenset({"bfloat16"}),
  )
  assert refused is None
  found = jax.jit(functools.partial(paged.attend, layout=on("gpu")))(
    query, jnp.asarray(positions, jnp.int32), cache, jnp.int32(1), tables
  )
  wide = [np.asarray(x[:, 1], np.float64) for x in cache]
  expected = np.zeros(query.shape)
  for row, at in np.ndindex(4, chunk):
    keys, values = (
      x[:, tables[row]].reshape(kv_heads, -1, width).swapaxes(0, 1)
      for x in wide
    )
    seen = slice(0, positions[row, at] + 1)
    expected[row, at] = attended(
      np.asarray(query[row, at], np.float64), keys[seen], values[seen]
    )
  assert error(found, expected) < 0.01


def test_pages_behind_2_to_the_32_bytes():
  kv_heads, layers, pages, page_size, width = 8, 28, 20_000, 16, 128
  num_bytes = 4 * kv_heads * layers * pages * page_size * width
  stats = jax.devices()[0].memory_stats() or {}
  if stats.get("bytes_limit", 0) < 1.2 * num_bytes:
    pytest.skip(f"needs {num_bytes / 1e9:.0f} GB")
  shape = kv_heads, layers, pages, page_size, width
  cache = jax.jit(
    lambda: kv_cache.Cache(*(jnp.full(shape, 3.0, jnp.bfloat16),) * 2)
  )()
  length, layer = 200, jnp.int32(layers - 1)
  tables = jnp.arange(pages - 13, pages, dtype=jnp.int32)[None]
  k, v = (noise(i, length, kv_heads, width) for i in range(2))
  at = kv_cache.addresses(
    cache,
    tables,
    jnp.zeros(length, jnp.int32),
    jnp.arange(length, dtype=jnp.int32),
  )
  write = jax.jit(kv_cache.write, donate_argnums=0)
  cache = write(cache, layer, at, k, v)
  keys, values = (np.asarray(x, np.float64) for x in (k, v))
  for chunk in (1, 8):
    query = noise(3, 1, chunk, 2 * kv_heads, width)
    positions = jnp.arange(length - chunk, length, dtype=jnp.int32)[None]
    found = jax.jit(paged.attend)(query, positions, cache, layer, tables)
    expected = [
      attended(np.asarray(q, np.float64), keys[: end + 1], values[: end + 1])
      for q, end in zip(query[0], positions[0].tolist(), strict=True)
    ]
    assert error(found[0], np.array(expected)) < 0.01


PACKED = {
  "few": np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], LENGTH // 4, 1),
  "uneven": np.sort(np.random.default_rng(0).integers(1, 9, (2, LENGTH)), 1),
  "one": np.ones((2, LENGTH), int),
  "many": np.repeat(np.arange(1, 65)[None], LENGTH // 64, 1).repeat(2, 0),
  "pieces": np.repeat([[1, 2, 1, 3], [0, 1, 0, 2]], LENGTH // 4, 1),
}


@pytest.mark.parametrize(
  ("form", "ids"),
  [
    *((form, "few") for form in ("fused", "triton", "blockwise")),
    *(("packed", name) for name in PACKED),
  ],
)
def test_packed_rows_and_their_gradients(form, ids):
  args = [noise(i, 2, LENGTH, heads, 64) for i, heads in enumerate((8, 2, 2))]
  cotangent = noise(9, 2, LENGTH, 8, 64)
  ids = PACKED[ids]
  token_mask = mask.packed_mask(jnp.asarray(ids, jnp.int32))

  @functools.partial(jax.jit, static_argnames="form")
  def run(args, cotangent, form):
    def attend(q, k, v):
      source = mask.KeyValues(k, v, token_mask)
      return attention.attend(q, token_mask, [source], form=form)

    out, pull = jax.vjp(attend, *args)
    # What padding sees is nobody's concern.
    return out * (ids > 0)[:, :, None, None], *pull(
      cotangent * (ids > 0)[:, :, None, None].astype(cotangent.dtype)
    )

  found = run(args, cotangent, form)
  with jax.default_matmul_precision("highest"):
    wide = [x.astype(jnp.float32) for x in args]
    expected = run(wide, cotangent.astype(jnp.float32), "reference")
  for one, same in zip(found, expected, strict=True):
    assert error(one, same) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("width", "hidden"), [(256, 128), (48, 24)])
@pytest.mark.parametrize("tokens", [40, 3000])
def test_experts_and_their_gradients(tokens, width, hidden, dtype):
  form = grouped_matmul.choose("auto", "gpu")
  assert form == grouped_matmul.Form("triton")
  rng = np.random.default_rng(0)
  experts = np.argsort(rng.random((tokens, 8)), 1)[:, :2].astype(np.int32)
  experts[experts == 5] = -1
  experts = jnp.asarray(experts)
  gates = jax.nn.softmax(noise(2, tokens, 2, dtype=jnp.float32))
  x, dy = noise(1, tokens, width, dtype=dtype), noise(9, tokens, width)
  shapes = {name: (8, width, hidden) for name in ("gate", "up")}
  shapes["down"] = (8, hidden, width)
  params = {
    name: noise(seed, *shape, dtype=dtype) / np.sqrt(shape[1]).astype(dtype)
    for seed, (name, shape) in enumerate(shapes.items(), 3)
  }

  @functools.partial(jax.jit, static_argnames="form")
  def run(params, x, gates, form):
    def loss(params, x, gates):
      y, _ = moe_layer.mix(params, x, gates, experts, form=form, least=16)
      return jnp.vdot(y.astype(jnp.float32), dy.astype(jnp.float32)), y

    return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, gates)

  found = run(params, x, gates, form)
  with jax.default_matmul_precision("highest"):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, x, gates))
    expected = run(*wide, grouped_matmul.Form("blocks"))
  bound = {"bfloat16": 0.02, "float32": 1e-3}[dtype]
  for one, same in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    assert error(one, same) < bound


def test_experts_of_8_bits():
  rng = np.random.default_rng(0)
  scores = rng.random((64, 4))
  experts = jnp.asarray(np.argsort(scores, 1)[:, :2], jnp.int32)
  params = {
    "gate": noise(1, 4, 256, 128, dtype=jnp.float32) / 16,
    "up": noise(2, 4, 256, 128, dtype=jnp.float32) / 16,
    "down": noise(3, 4, 128, 256, dtype=jnp.float32) / 11,
  }
  small = quantize.quantize(params)
  x, gates = noise(4, 64, 256), jnp.full((64, 2), 0.5)

  @functools.partial(jax.jit, static_argnames="form")
  def run(params, x, form):
    y, _ = moe_layer.mix(params, x, gates, experts, form=form, least=16)
    return y

  found = run(small, x, grouped_matmul.Form("triton"))
  wide = quantize.dequantize(small, jnp.float32)
  with jax.default_matmul_precision("highest"):
    blocks = grouped_matmul.Form("blocks")
    expected = run(wide, x.astype(jnp.float32), blocks)
  assert error(found, expected) < 0.02


def packed(config):
  """Three trajectories in two rows, with the experts of each token."""
  rng = np.random.default_rng(0)
  data = batch.empty(2, LENGTH)
  for row, number, at in (
    (0, 1, (0, 100)),
    (0, 2, (100, 228)),
    (1, 1, (0, 256)),
  ):
    at = slice(*at)
    count = at.stop - at.start
    data.tokens[row, at] = rng.integers(512, size=count)
    data.positions[row, at] = np.arange(count)
    data.segments[row, at] = number
    data.sampled[row, at] = np.arange(count) >= 20
    data.behaviour[row, at] = -np.log(512) + rng.normal(size=count) * 0.1
    data.advantages[row, at] = rng.normal(size=count)
  if not config.num_sparse:
    return data
  scores = rng.random((2, LENGTH, config.num_sparse, config.num_experts))
  return data._replace(experts=np.argsort(scores)[..., :2].astype(np.int8))


def programs(config, platform):
  # Ratios far from any clip: no rounding decides for a gradient or none.
  surrogate = losses.ClippedSurrogate(clip_low=0.999, clip_high=99.0)
  return learner.Learner(
    config,
    on(platform),
    objective.Objective(loss=surrogate),
    optimizers.AdamW()(),
  )


@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_scores_of_a_model(name, remat):
  narrow = with_dtype(MODELS[name], "bfloat16", remat=remat)
  wide = with_dtype(MODELS[name], "float32")
  data = packed(narrow)
  sides = programs(narrow, "gpu"), programs(wide, "cpu")
  params = jax.device_get(policy_lib.of(narrow).init(jax.random.key(0)))
  grads, scores = [], []
  for side in sides:
    own = jax.tree.map(
      lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding),
      params,
      side.abstract.params,
    )
    grads.append(side.accumulate(own, None, data).grads)
    scores.append(np.asarray(side.score(own, data))[data.sampled])
  assert np.abs(scores[0] - scores[1]).mean() < 0.02
  assert error(*grads) < 0.05
  found, expected = (
    {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    for leaves in (jax.tree_util.tree_flatten_with_path(x)[0] for x in grads)
  )
  off = {key: error(leaf, expected[key]) for key, leaf in found.items()}
  # Each leaf, of which a few are small sums of large addends.
  assert max(off.values()) < 0.2, sorted(off.items(), key=lambda x: -x[1])[:5]


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_decodes_as_the_learner_scores(name):
  config = with_dtype(MODELS[name], "bfloat16")
  settings = engine_settings.EngineSettings(
    slots=8, row_buckets=(8,), chunk_buckets=(32,), steps_per_dispatch=4
  )
  side, thread = (
    programs(config, "gpu"),
    mesh_thread.MeshThread("decode", trace.Trace(None)),
  )
  layout = dataclasses.replace(on("gpu"), rules=sharding.DECODE)
  engine = settings.build(config, layout, thread)
  params = side.init(jax.random.key(0)).params
  rng = np.random.default_rng(0)
  requests = [
    contract.DecodeRequest(
      request_id=f"{size}",
      session=f"{size}",
      tokens=rng.integers(512, size=size).astype(np.int32),
      max_tokens=40,
      seed=size,
    )
    for size in (3, 30, 90, 150, 33, 16, 7)
  ]

  async def answers():
    await engine.start(params, 0)
    async with asyncio.timeout(machine_speed.scaled(180)):
      found = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    return found

  data = batch.empty(len(requests), LENGTH)
  for row, (request, answer) in enumerate(
    zip(requests, asyncio.run(answers()), strict=True)
  ):
    ids = np.concatenate([request.tokens, answer.tokens])
    at = np.arange(len(ids))
    data.tokens[row, at], data.positions[row, at] = ids, at
    data.segments[row, at] = 1
    own = at[len(request.tokens) :]
    data.sampled[row, own], data.behaviour[row, own] = True, answer.logprobs
  thread.close()
  gap = np.abs(np.asarray(side.score(params, data)) - data.behaviour)
  gap = gap[data.sampled]
  assert len(gap) == 7 * 40
  # Routers that round differently choose other experts now and then.
  assert gap.mean() < 0.03
