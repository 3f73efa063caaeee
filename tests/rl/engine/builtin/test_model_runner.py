"""The device's side of the engine: programs, pages, and what is computed.

Tolerances of log-probabilities against the learner's score of the same tokens,
in nats: 1e-4 in float32, where 2e-5 is typical; in bfloat16 0.25, and 0.03 on
average, where 0.1 and 0.01 are typical of these two layers of large weights.
"""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import logprobs, memory_report
from models import policy as policy_lib
from rl.data import batch, trajectory
from rl.engine.builtin import decode_step, dispatch_shapes, model_runner
from rl.train import learner
from tests.helpers import tiny_engine

# Compilations are counted.
pytestmark = [pytest.mark.compiled, pytest.mark.own_programs]

SHAPES = dispatch_shapes.DispatchShapes(
  slots=4,
  page_size=4,
  pages=12,
  row_buckets=(2, 4),
  chunk_buckets=(2, 6),
  prefill_tokens=8,
)


@pytest.fixture
def fresh(dense_config, one_device):
  fresh = model_runner.ModelRunner(
    dense_config, SHAPES, one_device, bias_slots=1
  )
  fresh.allocate()
  return fresh


def test_every_form_of_every_number_of_rows_is_a_shape(fresh):
  # Rows of 2 with up to 2 chunks of 2 or one of 6; 4 with 4 or 1.
  forms = {2: [(0, 1), (2, 2), (1, 6)], 4: [(0, 1), (4, 2), (1, 6)]}
  assert fresh.shapes == [
    (rows, form) for rows in (2, 4) for form in forms[rows]
  ]


def test_compilations_are_those_of_this_engine(
  fresh, dense_config, dense_params, one_device
):
  other = model_runner.ModelRunner(
    dense_config, SHAPES, one_device, bias_slots=1
  )
  other.allocate()
  other.warm_up_rest()
  assert (other.compilations, fresh.compilations) == (3, 0)
  rows, chunks = shape = fresh.shapes[0]
  fresh.warm_up(dense_params, shape)
  fresh.warm_up_rest()
  assert (other.compilations, fresh.compilations) == (3, 4)
  # What was warmed up does not compile again.
  plan = decode_step.empty_plan(rows, chunks, 8, slots=4)
  fresh.advance(dense_params, plan, chunks, [(0, 1)])
  fresh.set_bias(1, np.ones(24, np.float32))
  fresh.set_masks([(1, b"\1")])
  assert fresh.compilations == 4


@pytest.mark.parametrize("chunks", [(0, 1), (2, 2)])
def test_a_program_is_lowered_as_it_runs_and_without_a_cache(
  fresh, dense_config, dense_params, one_device, chunks
):
  other = model_runner.ModelRunner(
    dense_config, SHAPES, one_device, bias_slots=1
  )
  places = one_device.tree(policy_lib.of(dense_config).axes)
  params = jax.device_put(dense_params, places)
  shapes = memory_report.placed(params, places)
  lowered = other.lower(shapes, (2, chunks))
  assert other.compilations == 0
  real = fresh._programs[chunks].lower(
    params,
    fresh._cache,
    fresh._carry,
    fresh._biases,
    fresh.idle_plan((2, chunks)),
    top_logprobs=0,
    num_drafts=0,
  )
  assert lowered.as_text() == real.as_text()


def test_a_mask_forbids_what_has_no_bit(fresh):
  # Ids 0, 9 and 17; one mask more than a program writes, and row 1 stays.
  mask = np.packbits(np.isin(np.arange(24), [0, 9, 17]), bitorder="little")
  fresh.set_masks([(1, b""), *[(0, mask.tobytes())] * 8])
  allowed = [[0, 9, 17], []]
  for row, ids in zip(np.asarray(fresh._biases), allowed, strict=True):
    assert row[ids].tolist() == [0.0] * len(ids)
    assert (np.delete(row, ids) == -np.inf).all()


@pytest.mark.parametrize("seed", range(4))
def test_pages_are_copied_as_if_one_after_the_other(fresh, seed):
  rng = np.random.default_rng(seed)

  def number(pages):
    marks = np.arange(12, dtype=np.float32)[:, None, None]
    return jax.device_put(np.broadcast_to(marks, pages.shape), pages.sharding)

  fresh._cache = jax.tree.map(number, fresh._cache)
  expected = list(range(12))
  # More than one program copies at once; most pages are source and target.
  copies = [tuple(rng.permutation(12)[:2].tolist()) for _ in range(21)]
  for source, target in copies:
    expected[target] = expected[source]
  fresh.copy(copies)
  for pages in jax.tree.leaves(fresh._cache):
    assert np.asarray(pages)[0, 0, :, 0, 0].tolist() == expected
    assert (np.ptp(np.asarray(pages), (0, 1, 3, 4)) == 0).all()


async def answered(served, requests):
  return await asyncio.gather(*map(served.engine.generate, requests))


def some_ids(rng, low, high):
  return rng.integers(24, size=rng.integers(low, high)).tolist()


def as_trajectory(request, answer):
  turn = trajectory.Turn(
    context=request.tokens,
    tokens=answer.tokens,
    logprobs=answer.logprobs,
    versions=answer.versions,
    stop=answer.stop,
  )
  return trajectory.Trajectory(
    task_id="",
    group_id=0,
    index=0,
    turns=[turn],
    status=trajectory.Status.COMPLETED,
  )


def gaps(served, layout, requests):
  """How far log-probabilities are from the learner's, of every token."""
  answers = served.run(answered(served, requests))
  turns = list(map(as_trajectory, requests, answers))
  packed, *_ = batch.pack(turns, rows=len(turns), length=32, version=0).batches
  score = functools.partial(
    learner.score_tokens,
    config=served.config,
    layout=layout,
    temperature=requests[0].temperature,
  )
  scored, *_ = jax.jit(score)(served.placed(served.version), None, packed)
  assert set(packed.versions[packed.sampled]) == {served.version}
  return np.abs(np.asarray(scored) - packed.behaviour)[packed.sampled]


def test_logprobs_are_the_learners_before_filters_and_bias(exact, one_device):
  requests = [
    dataclasses.replace(request, temperature=0.7)
    for request in tiny_engine.mixture(exact, 14)
    if request.temperature
  ]
  gap = gaps(exact, one_device, requests)
  assert len(gap) == sum(request.max_tokens for request in requests)
  assert gap.max() < 1e-4


def test_logprobs_in_bfloat16_are_near_the_learners(one_device, bfloat16):
  rng = np.random.default_rng(0)
  requests = [
    bfloat16.request(some_ids(rng, 1, 16), 12, temperature=0.7, seed=seed)
    for seed in range(16)
  ]
  gap = gaps(bfloat16, one_device, requests)
  assert len(gap) == 192
  assert gap.max() < 0.25
  assert gap.mean() < 0.03


@functools.partial(jax.jit, static_argnums=0)
def routed(config, params, tokens, experts):
  positions = jnp.arange(tokens.shape[1])[None]
  ones = jnp.ones_like(tokens)
  model = policy_lib.of(config).bind(params)
  hidden, _ = model.hidden(tokens, positions, ones, experts=experts)
  return logprobs.logits(model.terms(hidden))


def test_a_mesh_gives_the_answers_and_experts_of_one_device(meshed):
  config: config_lib.ModelConfig = meshed.config

  async def load():
    rng = np.random.default_rng(0)
    prompts = [some_ids(rng, 5, 20) for _ in range(5)]
    begun = [meshed.begin(ids, 8, experts=True) for ids in prompts * 2]
    return [(request, await task) for request, task in begun]

  for mode in (None, "recompute"):
    if mode:
      meshed.run(meshed.publish(mode))
    for request, answer in meshed.run(load()):
      assert meshed.is_greedy(request.tokens, answer.tokens)
      ids = np.concatenate([request.tokens, answer.tokens])
      experts = answer.experts
      assert experts.shape == (len(ids), config.num_layers, 2)
      assert experts.dtype == np.int8
      assert (experts[-1] == -1).all()
      assert (experts[:-1] >= 0).all()
      # Told to take them the routers do what they do anyway.
      padded = np.zeros((1, 32), np.int32)
      padded[0, : len(ids)] = ids
      told = np.full((1, 32, *experts.shape[1:]), -1, experts.dtype)
      told[0, : len(ids)] = experts
      params = meshed.placed(meshed.version)
      plain, same = (
        np.asarray(routed(config, params, padded, choice))[0, : len(ids)]
        for choice in (np.full_like(told, -1), told)
      )
      np.testing.assert_allclose(plain, same, atol=1e-4)
      told[0, : len(ids) - 1] = (experts[:-1] + 1) % config.num_experts
      others = np.asarray(routed(config, params, padded, told))
      assert np.abs(others[0, : len(ids)] - plain).max() > 0.1
  assert meshed.engine.stats().cached_tokens > 0
  meshed.check()


def test_pages_are_read_and_written_whatever_their_number(
  dense_config, one_device
):
  # More than a program takes; 33 is one of them alone.
  shapes = dataclasses.replace(SHAPES, pages=80)
  source, target = (
    model_runner.ModelRunner(dense_config, shapes, one_device, bias_slots=1)
    for _ in range(2)
  )
  rng = np.random.default_rng(0)
  for runner in (source, target):
    runner.allocate()
    whole = [rng.normal(size=x.shape) for x in jax.tree.leaves(runner._cache)]
    tree = jax.tree.structure(runner._cache)
    runner._cache = jax.device_put(
      tree.unflatten([x.astype(np.float32) for x in whole]), runner._pages
    )
  before = [np.asarray(x) for x in jax.tree.leaves(target._cache)]
  taken, given = rng.permutation(80)[:33].tolist(), rng.permutation(80)
  source.copy([(taken[0], taken[1])])
  values = source.read_pages(taken)
  pages, rest = given[:33].tolist(), given[33:]
  target.write_pages(pages, values)
  after = jax.tree.leaves(target._cache)
  for value, old, new in zip(values, before, after, strict=True):
    np.testing.assert_array_equal(value[:, :, 0], value[:, :, 1])
    np.testing.assert_array_equal(new[:, :, np.asarray(pages)], value)
    np.testing.assert_array_equal(new[:, :, rest], old[:, :, rest])
