"""Drafts: what is proposed, and that they change no token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kv_cache, sharding
from models import policy as policy_lib
from rl.engine.builtin import decode_step, drafts
from tests.helpers import tiny_engine

pytestmark = pytest.mark.compiled


def proposed(history, known, num_drafts=3):
  found = drafts.propose(
    jnp.asarray([history], jnp.int32), jnp.asarray([known]), num_drafts
  )
  return found[0].tolist()


def test_a_draft_is_what_followed_the_last_two_ids():
  # 1 2 stand at 0 and at 4; 3 9 1 followed.
  assert proposed([1, 2, 3, 9, 1, 2, 0, 0], 6) == [3, 9, 1]


def test_the_last_place_counts():
  assert proposed([1, 2, 3, 1, 2, 4, 1, 2], 8) == [4, 1, 2]


def test_ids_behind_the_known_ones_are_not_looked_at():
  history = [1, 2, 3, 1, 2, 4, 1, 2]
  assert proposed(history, 5) == [3, 1, 2]
  # Of 7 7 the second is all that follows the first.
  assert proposed([7, 7, 7, 5, 5, 5], 3) == [7, -1, -1]
  # Nor behind a conversation that is shorter than the drafts.
  assert proposed([7, 7, 7], 3, num_drafts=5) == [7, -1, -1, -1, -1]


def test_nothing_is_drafted_where_nothing_repeats():
  assert proposed([1, 2, 3, 4], 4) == [-1] * 3
  assert proposed([1, 0, 0, 0], 1) == [-1] * 3
  # Ids 0 that mean nothing are no pair.
  assert proposed([0, 0, 0, 0], 1) == [-1] * 3


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_drafts_are_right_up_to_the_first_that_is_wrong(wrap):
  ids = jnp.asarray([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
  fed = jnp.asarray([[True] * 3, [True, False, False], [True] * 3])
  tokens = jnp.asarray([[5, 9, 7, 1], [5, 6, 7, 1], [5, 6, 7, 1]])
  found = wrap(drafts.num_right)(ids, fed, tokens)
  assert found.tolist() == [1, 1, 3]


def conversations(served):
  """Two turns of requests of all kinds; the second repeats the first."""
  rng = np.random.default_rng(0)

  async def play(seed):
    ids = rng.integers(24, size=4).tolist() * 2
    answers = []
    for temperature, stops in ((0.0, ()), (0.7, (3,))):
      request = served.request(
        ids,
        9,
        temperature=temperature,
        seed=seed,
        stop_ids=stops,
        experts=served.engine.capabilities.experts,
      )
      done = await served.engine.generate(request)
      answers.append((done.tokens.tolist(), done.logprobs, done.experts))
      ids = [*ids, *done.tokens.tolist(), 5]
    return answers

  async def all_of_them():
    return [answer for seed in range(6) for answer in await play(seed)]

  return served.run(all_of_them())


@pytest.mark.parametrize(
  "model", ["dense", pytest.param("sparse", marks=pytest.mark.slow)]
)
def test_answers_are_those_of_an_engine_without_drafts(model):
  sparse = model == "sparse"
  settings = {
    "config": tiny_engine.CONFIG if sparse else tiny_engine.DENSE,
    "record_experts": sparse,
    "steps_per_dispatch": 6,
    # One request at a time: few programs.
    "row_buckets": (2,),
    "chunk_buckets": (6,),
    "compile_ahead": False,
  }
  with tiny_engine.serve(**settings) as served:
    expected = conversations(served)
    plain = served.engine.stats()
  with tiny_engine.serve(**settings, speculative_tokens=3) as served:
    found = conversations(served)
    stats = served.engine.stats()
    served.check()
  assert plain.drafted_tokens == 0
  assert 0 < stats.right_drafts < stats.drafted_tokens
  assert stats.sampled_tokens == plain.sampled_tokens
  assert stats.cached_tokens == plain.cached_tokens > 0
  for one, other in zip(found, expected, strict=True):
    assert one[0] == other[0]
    np.testing.assert_allclose(one[1], other[1], atol=1e-5)
    assert (one[2] is not None) == sparse
    np.testing.assert_array_equal(one[2], other[2])


def test_steps_with_drafts_copy_no_pages():
  config, chunks = tiny_engine.DENSE, (0, 1)
  layout = sharding.Layout(sharding.make_mesh())
  shaped = functools.partial(
    jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  )
  program = jax.jit(
    functools.partial(
      decode_step.advance,
      config=config,
      layout=layout,
      chunks=chunks,
      max_steps=4,
      num_drafts=3,
    ),
    donate_argnums=(1, 2),
  )

  def temporary(pages):
    lowered = program.lower(
      policy_lib.of(config).shapes,
      jax.eval_shape(lambda: kv_cache.init_cache(config, pages, 4)),
      jax.eval_shape(lambda: decode_step.init_carry(2, 32)),
      jax.ShapeDtypeStruct((1, config.vocab_size), jnp.float32),
      shaped(decode_step.empty_plan(2, chunks, 8, slots=2)),
    )
    plan = lowered.compile().memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes

  # 4,000 more pages hold 4 x 8 floats twice: 1 MiB.
  assert temporary(4096) - temporary(96) < 10_000
