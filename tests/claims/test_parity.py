"""Agreement with Hugging Face transformers, by golden files.

scripts/make_golden.py makes them, and says what is in them.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from models import kv_cache
from models import logprobs as logprobs_lib
from models import policy as policy_lib
from models.hf import config as hf_config
from models.hf import load
from tests.helpers import numpy_decoder, small_models

pytestmark = pytest.mark.compiled

GOLDEN = pathlib.Path(__file__).parents[1] / "models" / "golden"
MODELS = (
  *("qwen2", "qwen3", "qwen3_tied_yarn", "qwen3_moe", "qwen3_moe_unnormed"),
  *("llama3", "llama3_tied", "mistral", "gemma3", "olmo2", "olmo3", "olmoe"),
)
# Also eagerly: these have every part. That weights of experts which do not sum
# to 1, and other rotations, are the same eagerly is for tests of these parts.
EAGER = ("qwen3_moe", "llama3_tied", "gemma3", "olmo3")
LOGITS = 2e-5  # Absolute; the largest logit is 5.
GRADIENT = 5e-5  # Of the largest entry of a parameter's gradient.
# Which of the sequences of 9, 1, 14, 5 and 7 tokens share a row.
ALONE = ((0,), (1,), (2,), (3,), (4,))
PACKED = ((0, 1, 2), (3, 4))

HIDDEN = jax.jit(small_models.hidden, static_argnames="config")
FEED = jax.jit(small_models.feed, static_argnames=("config", "chunks"))


@pytest.fixture(params=MODELS)
def name(request):
  return request.param


def cases(argument, jitted, eager):
  """Parametrizes with every model under jit, and with two of them eagerly."""
  return pytest.mark.parametrize(
    ("name", argument),
    [pytest.param(name, jitted, id=f"{name}-jit") for name in MODELS]
    + [pytest.param(name, eager, id=f"{name}-eager") for name in EAGER],
  )


@functools.cache
def golden(name):
  """Returns config, parameters, and what transformers says about them."""
  directory = GOLDEN / name
  config = hf_config.load(directory)
  expected = dict(np.load(directory / "expected.npz"))
  return config, load.load(directory, config), expected


@functools.cache
def stored(name):
  """Returns tensors and config.json as they are."""
  tensors = safetensors.load_file(GOLDEN / name / "model.safetensors")
  return tensors, json.loads((GOLDEN / name / "config.json").read_text())


def sequences(expected, key):
  return np.split(expected[key], np.cumsum(expected["lengths"])[:-1])


def lay_out(expected, rows):
  """Returns tokens, positions, segments and targets, and (who, where) of each.

  Rows are padded by 2, and padding has a token and a position like any other.
  """
  lengths = expected["lengths"]
  width = 2 + max(sum(int(lengths[i]) for i in row) for row in rows)
  tokens = np.full((len(rows), width), 3, np.int32)
  positions, segments = np.ones_like(tokens), np.zeros_like(tokens)
  targets = np.full_like(tokens, -1)
  places = []
  for r, row in enumerate(rows):
    start = 0
    for number, i in enumerate(row, 1):
      at = (r, slice(start, start + int(lengths[i])))
      start += int(lengths[i])
      tokens[at] = sequences(expected, "tokens")[i]
      targets[at] = sequences(expected, "targets")[i]
      positions[at] = np.arange(lengths[i])
      segments[at] = number
      places.append((i, at))
  return tokens, positions, segments, targets, places


def check_logits(name, states, places):
  config, params, expected = golden(name)
  model = policy_lib.of(config).bind(params)
  logits = np.asarray(logprobs_lib.logits(model.terms(states)))
  wanted = sequences(expected, "logits")
  for i, at in places:
    np.testing.assert_allclose(logits[at], wanted[i], 0, LOGITS)


@cases("hidden", HIDDEN, small_models.hidden)
def test_rows_have_the_logits_of_transformers(name, hidden):
  config, params, expected = golden(name)
  *arrays, _, places = lay_out(expected, ALONE + PACKED)
  states, _ = hidden(params, config, *map(jnp.asarray, arrays))
  check_logits(name, states, places)


@cases(
  "feed_and_sizes",
  (FEED, ((5, 5, 1, 1, 1, 1), (1,) * 14)),
  (small_models.feed, ((7, 7),)),
)
def test_cached_decoding_has_the_logits_of_transformers(name, feed_and_sizes):
  # So many ids of every row at a time, in pages of 3, in any order, that held
  # something else.
  feed, ways = feed_and_sizes
  config, params, expected = golden(name)
  tokens, _, segments, _, places = lay_out(expected, ALONE)
  count = len(ALONE)
  order = np.random.default_rng(0).permutation(40)
  tables = jnp.asarray(order[: 6 * count].reshape(count, 6), jnp.int32)
  positions = np.arange(tokens.shape[1], dtype=np.int32)
  positions = np.where(segments > 0, positions, kv_cache.EMPTY)
  for sizes in ways:
    store = kv_cache.init_cache(config, 40, 3)
    states = small_models.fed(
      feed, params, config, store, tables, tokens, positions, sizes
    )
    check_logits(name, jnp.asarray(states), places)


def loss(params, config, tokens, positions, segments, targets):
  model = policy_lib.of(config).bind(params)
  states, _ = model.hidden(tokens, positions, segments)
  logprobs = jax.nn.log_softmax(logprobs_lib.logits(model.terms(states)))
  picked = jnp.take_along_axis(
    logprobs, jnp.maximum(targets, 0)[..., None], -1
  )[..., 0]
  counted = targets >= 0
  return -jnp.sum(jnp.where(counted, picked, 0)) / jnp.sum(counted)


@cases("wrap", functools.partial(jax.jit, static_argnums=1), lambda f: f)
def test_gradients_are_those_of_transformers(name, wrap):
  # Each sequence counts twice, alone and in company, so the mean is the same.
  config, params, expected = golden(name)
  *arrays, _ = lay_out(expected, ALONE + PACKED)
  found = numpy_decoder.checkpoint(
    wrap(jax.grad(loss))(params, config, *map(jnp.asarray, arrays))
  )
  wanted = {k: v for k, v in expected.items() if k.startswith("gradient/")}
  assert {f"gradient/{key}" for key in found} == wanted.keys()
  for key, gradient in found.items():
    exact = wanted[f"gradient/{key}"]
    largest = np.abs(exact).max()
    assert largest > 0
    np.testing.assert_allclose(
      gradient, exact, 0, GRADIENT * largest, err_msg=key
    )


def test_parameters_are_the_tensors_of_the_checkpoint(name):
  _, params, _ = golden(name)
  tensors, _ = stored(name)
  named = numpy_decoder.checkpoint(params)
  assert named.keys() == tensors.keys()
  for key, tensor in tensors.items():
    np.testing.assert_array_equal(named[key], tensor)


def test_the_golden_logits_are_those_of_the_papers_formulas(name):
  tensors, config = stored(name)
  _, _, expected = golden(name)
  for tokens, wanted in zip(
    sequences(expected, "tokens"), sequences(expected, "logits"), strict=True
  ):
    logits = numpy_decoder.forward(tensors, config, tokens)
    np.testing.assert_allclose(wanted, logits, 0, LOGITS)


def test_the_golden_gradients_are_the_slope_of_the_papers_formulas(name):
  # A step along d, the gradients scaled to at most 1 each, so that all count
  # alike, raises the loss by the step times sum(gradient * d). A central
  # difference errs by about step^2 = 1e-10.
  tensors, config = stored(name)
  _, _, expected = golden(name)
  gradients = {k: np.float64(expected[f"gradient/{k}"]) for k in tensors}
  along = {k: g / np.abs(g).max() for k, g in gradients.items()}

  def value(step):
    moved = {k: tensors[k] + step * along[k] for k in tensors}
    total, count = 0.0, 0
    for tokens, targets in zip(
      sequences(expected, "tokens"), sequences(expected, "targets"), strict=True
    ):
      logits = numpy_decoder.forward(moved, config, tokens)
      for row, target in zip(logits, targets, strict=True):
        if target >= 0:
          total -= np.log(numpy_decoder.softmax(row)[target])
          count += 1
    return total / count

  slope = (value(1e-5) - value(-1e-5)) / 2e-5
  wanted = sum((gradients[k] * along[k]).sum() for k in tensors)
  assert slope == pytest.approx(wanted, rel=1e-5)
