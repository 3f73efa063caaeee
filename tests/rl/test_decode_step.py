"""One dispatch: what it samples, what it writes and what it leaves alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cache as cache_lib
from models import transformer
from rl import decode_step

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)
PROMPTS = ([1, 2, 3], [4, 5], [6])
SLOTS, STEPS = 4, 3


@pytest.fixture(scope="module")
def advance(config, params, one_device):
  """(cache, plan, whole) -> (cache, sampled)."""
  programs = {
    whole: jax.jit(
      functools.partial(
        decode_step.advance,
        params,
        config=config,
        layout=one_device,
        max_steps=STEPS,
        whole=whole,
      )
    )
    for whole in (False, True)
  }
  return lambda cache, plan, whole: programs[whole](cache, plan)


@pytest.fixture(scope="module")
def greedy(config, params):
  """(ids, count) -> the most probable answer of the plain model."""

  @jax.jit
  def forward(ids):
    at = jnp.arange(8)[None]
    hidden, _ = transformer.hidden(params, config, ids, at, jnp.ones_like(ids))
    return transformer.head(params, config, hidden)

  def answer(ids, count):
    ids = list(ids)
    for _ in range(count):
      padded = np.zeros((1, 8), np.int32)
      padded[0, : len(ids)] = ids
      ids.append(int(forward(padded)[0, len(ids) - 1].argmax()))
    return ids[-count:]

  return answer


def marked(config):
  """A cache full of sevens: what is overwritten can be told."""
  return jax.tree.map(
    lambda x: jnp.full_like(x, 7), cache_lib.init_cache(config, SLOTS, 8)
  )


def plan_of(rows, budgets, *, places, size, stops=()):
  """Prompt i is fed to cache row `rows[i]` from place `places[i]`."""
  plan = decode_step.empty_plan(size, 3, idle_row=SLOTS)
  for place, row, ids, budget in zip(
    places, rows, PROMPTS, budgets, strict=True
  ):
    plan.integers[place, :5] = (row, 0, len(ids), budget, 0)
    plan.integers[place, 5 : 5 + len(stops)] = stops
    plan.chunk[place, : len(ids)] = ids
    plan.temperature[place] = 0
  return plan


def written(cache):
  """Which positions of which rows are no longer sevens, in every layer."""
  changed = [np.any(np.asarray(x) != 7, (2, 3)) for x in (*cache.k, *cache.v)]
  for other in changed[1:]:
    np.testing.assert_array_equal(other, changed[0])
  return [np.flatnonzero(row).tolist() for row in changed[0]]


@pytest.mark.parametrize("whole", [False, True])
def test_rows_sample_up_to_their_budget_and_idle_rows_write_nothing(
  advance, config, greedy, whole
):
  rows = (2, 0, 3)
  plan = plan_of(
    rows, (3, 1, 0), places=rows if whole else (0, 1, 2), size=SLOTS
  )
  cache, sampled = advance(marked(config), plan, whole)
  places = rows if whole else (0, 1, 2)
  counts = [int(sampled.counts[place]) for place in places]
  assert counts == [3, 1, 0]
  assert int(sampled.counts.sum()) == 4
  for place, ids, count in zip(places, PROMPTS, counts, strict=True):
    tokens = sampled.tokens[place, :count].tolist()
    assert tokens == greedy(ids, 3)[:count]
  # The last sampled token is never written: 3 + 2 in row 2, 2 in row 0, 1 in
  # row 3 whose budget is 0, and nothing in row 1, which nobody owns.
  assert written(cache) == [[0, 1], [], [0, 1, 2, 3, 4], [0]]


def test_what_was_sampled_goes_on_in_the_next_dispatch(advance, config, greedy):
  plan = plan_of((2, 0, 3), (3, 1, 2), places=(0, 1, 2), size=SLOTS)
  cache, first = advance(marked(config), plan, False)
  following = decode_step.empty_plan(SLOTS, 3, idle_row=SLOTS)
  for place, row in enumerate((2, 0, 3)):
    count = int(first.counts[place])
    past = len(PROMPTS[place]) + count - 1
    following.integers[place, :5] = (row, past, 1, 2, 0)
    following.chunk[place, 0] = first.tokens[place, count - 1]
    following.temperature[place] = 0
  _, second = advance(cache, following, False)
  for place, ids in enumerate(PROMPTS):
    count = int(first.counts[place])
    tokens = [*first.tokens[place, :count], *second.tokens[place, :2]]
    assert list(map(int, tokens)) == greedy(ids, count + 2)


def test_a_stop_id_ends_its_row_and_no_other(advance, config, greedy):
  answers = [greedy(ids, 3) for ids in PROMPTS]
  stop = answers[0][1]
  expected = [
    tokens.index(stop) + 1 if stop in tokens else 3 for tokens in answers
  ]
  plan = plan_of(
    (0, 1, 2), (3, 3, 3), places=(0, 1, 2), size=SLOTS, stops=(23, stop)
  )
  _, sampled = advance(marked(config), plan, True)
  assert sampled.counts[:3].tolist() == expected
  assert min(expected) < max(expected)


def test_an_empty_plan_does_nothing(advance, config):
  plan = decode_step.empty_plan(SLOTS, 3, idle_row=SLOTS)
  for whole in (False, True):
    cache, sampled = advance(marked(config), plan, whole)
    assert written(cache) == [[]] * SLOTS
    assert not sampled.counts.any()
    assert np.isfinite(sampled.logprobs).all()


@WRAPS
def test_sampled_logprobs_are_at_the_temperature(wrap):
  # Temperature 2 turns logits [0, ln 4, ln 16] into weights 1 : 2 : 4; greedy
  # takes the last and scores it at temperature 1, where it has 16 of 21.
  logits = jnp.log(jnp.array([[1.0, 4.0, 16.0]] * 2))
  token, logprob = wrap(decode_step.sample)(
    logits, jnp.array([5, 5]), jnp.array([0, 0]), jnp.array([2.0, 0.0])
  )
  share = np.array([1, 2, 4])[int(token[0])] / 7
  assert int(token[1]) == 2
  np.testing.assert_allclose(np.exp(logprob), [share, 16 / 21], rtol=1e-5)


def test_samples_have_the_frequencies_of_the_distribution():
  size = 4000
  expected = np.array([0.1, 0.2, 0.7])
  logits = jnp.tile(jnp.log(jnp.array(expected)), (size, 1))
  for seeds, positions in (
    (jnp.arange(size), jnp.zeros(size, jnp.int32)),
    (jnp.zeros(size, jnp.int32), jnp.arange(size)),
  ):
    token, _ = decode_step.sample(logits, seeds, positions, jnp.ones(size))
    share = np.bincount(token, minlength=3) / size
    # Four standard errors: sqrt(.7 * .3 / 4000) = 0.0072.
    np.testing.assert_allclose(share, expected, atol=0.029)


def test_noise_follows_from_seed_and_position_alone():
  logits = jnp.zeros((4, 1000))
  seeds, positions = jnp.array([3, 3, 3, 4]), jnp.array([8, 8, 9, 8])
  token, _ = decode_step.sample(logits, seeds, positions, jnp.ones(4))
  flipped, _ = decode_step.sample(
    logits, seeds[::-1], positions[::-1], jnp.ones(4)
  )
  np.testing.assert_array_equal(token, flipped[::-1])
  assert token[0] == token[1]
  # Of 1000 equal choices: another position or another seed differs.
  assert len(set(token.tolist())) == 3
