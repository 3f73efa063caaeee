"""Rows of 32,768 tokens: one device against four that share them."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import policy, sharding
from rl.algorithms import losses, objective, references
from rl.data import batch
from rl.train import learner
from tests.helpers import absent_devices

pytestmark = [
  pytest.mark.compiled,
  pytest.mark.slow,
  pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices"),
]

LENGTH = 32_768
CONFIG = config_lib.tiny(
  vocab_size=64,
  num_layers=1,
  d_model=8,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  d_ff=16,
  max_length=LENGTH,
  compute=config_lib.Compute(remat="layer", logprob_chunk=1024),
)


def programs(
  context, optimizer_memory: references.Memory = "device", config=CONFIG
):
  layout = sharding.Layout(sharding.make_mesh(context=context))
  return learner.Learner(
    config,
    layout,
    objective.Objective(loss=losses.NegativeLogLikelihood()),
    optax.adam(0.01),
    optimizer_memory=optimizer_memory,
  )


def long_row(length=LENGTH):
  """Returns a row of two conversations and some padding."""
  rng = np.random.default_rng(0)
  row = batch.empty(1, length)
  row.tokens[:] = rng.integers(0, 64, (1, length))
  for segment, (start, stop) in enumerate(
    [(0, length // 4), (length // 4, length - 100)], start=1
  ):
    row.segments[0, start:stop] = segment
    row.positions[0, start:stop] = np.arange(stop - start)
    row.sampled[0, start + 1 : stop] = True
  return row


def test_four_devices_that_share_a_row_train_as_one_does():
  updates = []
  for one in (programs(1), programs(4, "host")):
    state = one.init(jax.random.key(0))
    total = one.accumulate(state.params, None, long_row())
    grads = jax.device_get(total.grads)
    _, metrics = one.step(state, total)
    updates.append((grads, metrics))
  (grads, metrics), (shared_grads, shared_metrics) = updates
  # 32,768 - 100 tokens but for the first of each of two conversations.
  assert metrics["tokens"] == shared_metrics["tokens"] == 32_666
  assert shared_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
  for leaf, other in zip(
    jax.tree.leaves(shared_grads), jax.tree.leaves(grads), strict=True
  ):
    atol = 1e-5 * np.abs(other).max()
    np.testing.assert_allclose(leaf, other, rtol=0, atol=atol)


def temporary_bytes(context, length, **compute):
  """Returns what a device takes for the gradient beside its in- and outputs."""
  config = dataclasses.replace(
    CONFIG, compute=dataclasses.replace(CONFIG.compute, **compute)
  )
  one = programs(context, config=config)
  places = one.abstract.params
  layout = sharding.Layout(sharding.make_mesh(context=context))
  tokens = layout.sharding("batch", "length")
  row = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=tokens),
    batch.empty(1, length),
  )

  def loss(params, row):
    scored = learner.score_tokens(
      params, None, row, config=config, layout=layout, temperature=1.0
    )
    return jnp.where(row.sampled, scored.logprobs, 0).sum()

  compiled = jax.jit(jax.grad(loss)).lower(places, row).compile()
  analysis = compiled.memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_no_array_of_an_accelerators_program_is_as_large_as_a_mask(
  platform, share_prompts, monkeypatch
):
  kind = "gpu" if platform == "cuda" else platform
  monkeypatch.setattr(sharding, "platform", lambda layout: kind)
  # Sizes that the kernels of both platforms take.
  config = dataclasses.replace(
    CONFIG,
    head_dim=128,
    compute=dataclasses.replace(CONFIG.compute, dtype="bfloat16"),
  )
  layout = sharding.Layout(sharding.make_mesh())

  def loss(params, row):
    scored = learner.score_tokens(
      params, None, row, config=config, layout=layout, temperature=1.0
    )
    return jnp.where(row.sampled, scored.logprobs, 0).sum()

  row = batch.empty(1, LENGTH, share_prompts=share_prompts)
  with absent_devices.described(platform):
    traced = jax.jit(jax.grad(loss)).trace(policy.of(config).shapes, row)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
  # With shared prompts, which they do not know, plain tiles take their place.
  kernel = {"cuda": "gpu.triton", "tpu": "@tpu_custom_call"}[platform]
  assert (kernel in text) != share_prompts
  shapes = re.findall(r"tensor<((?:\d+x)+)\w", text)
  largest = max(
    math.prod(map(int, shape.split("x")[:-1])) for shape in {*shapes}
  )
  # A row of two heads; a mask would have 1,073,741,824 entries.
  assert largest == LENGTH * 2 * 128


def test_memory_grows_with_the_length_of_a_row_and_not_with_its_square():
  short, long = (temporary_bytes(1, n) for n in (LENGTH // 4, LENGTH))
  assert long < 4.5 * short
  # One head's scores alone would be 4 GiB.
  assert long < LENGTH**2 // 8


def test_memory_halves_with_each_doubling_of_the_devices_that_share_a_row():
  one, two, four = (temporary_bytes(n, LENGTH) for n in (1, 2, 4))
  # Keys and values that go round, and the parameters, do not halve: a tenth.
  assert two < 1.1 * one / 2
  assert four < 1.1 * two / 2
