"""From logits to one id: temperature, filters, bias and noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.engine import sampling

pytestmark = pytest.mark.compiled

WRAPS = pytest.mark.parametrize(
  "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


def knobs(rows, **changes):
  """Rows that sample plainly; `changes` are one value, or one for each."""
  plain = {
    "temperature": (1.0, jnp.float32),
    "top_p": (1.0, jnp.float32),
    "min_p": (0.0, jnp.float32),
    "top_k": (0, jnp.int32),
    "seed": (0, jnp.int32),
    "bias": (0, jnp.int32),
  }
  return sampling.SamplingParams(
    **{
      name: jnp.broadcast_to(jnp.asarray(changes.get(name, value), dtype), rows)
      for name, (value, dtype) in plain.items()
    }
  )


def no_bias(size):
  return jnp.zeros((1, size), jnp.float32)


def shares(weights, size=4000, **changes):
  """How often each id is taken, over as many seeds."""
  logits = jnp.tile(jnp.log(jnp.asarray(weights, jnp.float32)), (size, 1))
  every = jnp.arange(size, dtype=jnp.int32)
  token, _ = jax.jit(sampling.sample)(
    logits,
    jnp.zeros(size, jnp.int32),
    knobs(size, seed=every, **changes),
    no_bias(len(weights)),
  )
  return np.bincount(token, minlength=len(weights)) / size


@WRAPS
def test_logprobs_are_at_the_temperature_and_greedy_ones_at_1(wrap):
  # Temperature 2 turns logits [0, ln 4, ln 16] into weights 1 : 2 : 4; greedy
  # takes the last and scores it at temperature 1, where it has 16 of 21.
  logits = jnp.log(jnp.array([[1.0, 4.0, 16.0]] * 2))
  token, logprob = wrap(sampling.sample)(
    logits,
    jnp.array([0, 0]),
    knobs(2, temperature=[2.0, 0.0], seed=5),
    no_bias(3),
  )
  share = np.array([1, 2, 4])[int(token[0])] / 7
  assert int(token[1]) == 2
  np.testing.assert_allclose(np.exp(logprob), [share, 16 / 21], rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({}, [0.1, 0.2, 0.7]),
    # Weights squared are 1 : 4 : 49.
    ({"temperature": 0.5}, [1 / 54, 4 / 54, 49 / 54]),
    ({"top_k": 2}, [0, 2 / 9, 7 / 9]),
    ({"top_p": 0.8}, [0, 2 / 9, 7 / 9]),
    ({"top_p": 0.69}, [0, 0, 1]),
    # At the temperature the best has 49 of 54: 4 of 49 is .08 of it.
    ({"temperature": 0.5, "min_p": 0.07}, [0, 4 / 53, 49 / 53]),
    ({"temperature": 0.5, "min_p": 0.09}, [0, 0, 1]),
  ],
)
def test_samples_have_the_frequencies_of_the_filtered_distribution(
  changes, expected
):
  # Four standard errors: sqrt(.7 * .3 / 4000) = 0.0072.
  np.testing.assert_allclose(
    shares([0.1, 0.2, 0.7], **changes), expected, atol=0.029
  )


def test_samples_at_other_positions_are_independent():
  size = 4000
  logits = jnp.tile(jnp.log(jnp.array([0.1, 0.2, 0.7])), (size, 1))
  token, _ = sampling.sample(
    logits, jnp.arange(size, dtype=jnp.int32), knobs(size), no_bias(3)
  )
  share = np.bincount(token, minlength=3) / size
  np.testing.assert_allclose(share, [0.1, 0.2, 0.7], atol=0.029)
  # Of two in a row both are the last with .7 * .7.
  last = np.asarray(token) == 2
  assert abs((last[1:] & last[:-1]).mean() - 0.49) < 0.032


def test_noise_follows_from_seed_and_position_alone():
  logits = jnp.zeros((4, 1000))
  seeds, positions = jnp.array([3, 3, 3, -4]), jnp.array([8, 8, 9, 8])
  token, _ = sampling.sample(
    logits, positions, knobs(4, seed=seeds), no_bias(1000)
  )
  flipped, _ = sampling.sample(
    logits, positions[::-1], knobs(4, seed=seeds[::-1]), no_bias(1000)
  )
  np.testing.assert_array_equal(token, flipped[::-1])
  assert token[0] == token[1]
  # Of 1000 equal choices: another position or another seed differs.
  assert len(set(token.tolist())) == 3


@WRAPS
@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({}, [1, 1, 1, 1, 1]),
    ({"top_k": 1}, [0, 0, 1, 0, 0]),
    # Of the two with .15 the lower id comes first.
    ({"top_k": 3}, [0, 1, 1, 1, 0]),
    ({"top_k": 9}, [1, 1, 1, 1, 1]),
    # The first that reaches it is the last to pass: .4, then .65.
    ({"top_p": 0.39}, [0, 0, 1, 0, 0]),
    ({"top_p": 0.64}, [0, 1, 1, 0, 0]),
    ({"top_p": 0.66}, [0, 1, 1, 1, 0]),
    ({"top_p": 1e-9}, [0, 0, 1, 0, 0]),
    # .6 of .4 is .24, .3 of it is .12.
    ({"min_p": 0.6}, [0, 1, 1, 0, 0]),
    ({"min_p": 0.3}, [0, 1, 1, 1, 1]),
    ({"min_p": 1.0}, [0, 0, 1, 0, 0]),
    # Each filter on its own; the ids that pass all of them remain.
    ({"top_k": 2, "top_p": 0.99, "min_p": 0.1}, [0, 1, 1, 0, 0]),
    ({"top_k": 4, "top_p": 0.64, "min_p": 0.1}, [0, 1, 1, 0, 0]),
    ({"top_k": 4, "top_p": 0.99, "min_p": 0.9}, [0, 0, 1, 0, 0]),
  ],
)
def test_each_filter_keeps_what_it_says(wrap, changes, expected):
  probs = jnp.array([[0.05, 0.25, 0.4, 0.15, 0.15]])
  kept = wrap(sampling.passes_filters)(jnp.log(probs), knobs(1, **changes))
  assert kept[0].astype(int).tolist() == expected


@WRAPS
def test_a_bias_moves_the_choice_and_not_its_logprob(wrap):
  # ln 1, 2, 5: of 8. Forbidding the last leaves the second, + ln 4 the first.
  logits = jnp.log(jnp.array([[1.0, 2.0, 5.0]] * 3))
  biases = jnp.array(
    [[0, 0, 0], [0, 0, -jnp.inf], [np.log(8.0), 0, 0]], jnp.float32
  )
  token, logprob = wrap(sampling.sample)(
    logits,
    jnp.zeros(3, jnp.int32),
    knobs(3, temperature=0.0, bias=[0, 1, 2]),
    biases,
  )
  assert token.tolist() == [2, 1, 0]
  np.testing.assert_allclose(np.exp(logprob), [5 / 8, 2 / 8, 1 / 8], rtol=1e-5)


def test_a_biased_distribution_is_what_is_sampled_and_filtered():
  size = 4000
  # 1, 2, 5 with ln 4 on the first and the last forbidden: 4, 2, 0 of 6.
  logits = jnp.tile(jnp.log(jnp.array([1.0, 2.0, 5.0])), (size, 1))
  biases = jnp.array([[0, 0, 0], [np.log(4.0), 0, -np.inf]], jnp.float32)
  every = jnp.arange(size, dtype=jnp.int32)
  for changes, expected in (({}, [2 / 3, 1 / 3, 0]), ({"top_k": 1}, [1, 0, 0])):
    token, _ = sampling.sample(
      logits,
      jnp.zeros(size, jnp.int32),
      knobs(size, seed=every, bias=1, **changes),
      biases,
    )
    share = np.bincount(token, minlength=3) / size
    np.testing.assert_allclose(share, expected, atol=0.03)


@WRAPS
def test_the_most_probable_ids_are_those_of_a_float64_reference(wrap):
  logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
  # Of equal ones the lower id is first; an impossible one is last.
  logits[1, [9, 4]], logits[2, :48] = 5.0, -np.inf
  temperature = np.array([1.0, 0.5, 0.0], np.float32)
  best = functools.partial(sampling.most_probable, count=3)
  ids, logprobs = wrap(best)(jnp.asarray(logits), jnp.asarray(temperature))
  exact = logits.astype(np.float64) / [[1.0], [0.5], [1.0]]
  exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
  expected = np.argsort(-exact, -1, kind="stable")[:, :3]
  np.testing.assert_array_equal(ids, expected)
  values = np.take_along_axis(exact, expected, -1)
  np.testing.assert_allclose(logprobs, values, atol=1e-5)
  assert ids[1, :2].tolist() == [4, 9]
  assert logprobs[2, 2] == -np.inf


def test_what_others_ask_for_changes_nothing():
  rng = np.random.default_rng(0)
  rows = 8
  logits = jnp.asarray(rng.normal(size=(rows, 50)), jnp.float32)
  positions = jnp.arange(rows, dtype=jnp.int32)
  asked = knobs(
    rows,
    temperature=[0, 1, 0.5, 2, 0, 1, 1, 1],
    top_p=[1, 1, 0.5, 1, 0.5, 1, 1, 1],
    min_p=[0, 0, 0, 0.1, 0, 0, 0, 0],
    top_k=[0, 0, 0, 0, 0, 5, 0, 0],
    seed=list(range(rows)),
    bias=[0, 0, 0, 0, 1, 0, 1, 0],
  )
  biases = jnp.asarray(rng.normal(size=(2, 50)), jnp.float32).at[0].set(0)
  token, logprob = jax.jit(sampling.sample)(logits, positions, asked, biases)
  for row in range(rows):
    own = (logits, positions, asked)
    one_row = jax.tree.map(
      functools.partial(jnp.take, indices=jnp.array([row]), axis=0), own
    )
    alone, score = jax.jit(sampling.sample)(*one_row, biases)
    assert int(alone[0]) == int(token[row])
    assert abs(float(score[0]) - float(logprob[row])) < 1e-6
