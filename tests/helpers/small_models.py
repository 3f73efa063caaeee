"""A model for the tests of files: every kind of parameter, few of each."""

import jax
import jax.numpy as jnp
import numpy as np

from models import config as config_lib
from models import definition, initializers
from models import policy as policy_lib
from models.chat import word_chat
from models.moe import layer as moe_layer

# Every axis divides over 2 x 2 x 2 devices.
CONFIG = config_lib.tiny_moe(
  vocab_size=16,
  num_layers=2,
  d_model=8,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  d_ff=6,
  d_expert=10,
  dense_layers=(0,),
  tie_embeddings=False,
)
CHAT = word_chat.WordChat(("a", "b"))


def noisy(config, of_norms=1.0, seed=0):
  """Parameters large and without structure: no part of the model is idle.

  Args:
    of_norms: mean of the scales of norms.

  Returns:
    Arrays of numpy, as slices and stacks of them are no programs.
  """
  rng = np.random.default_rng(seed)

  def noise(leaf):
    mean = of_norms * float(leaf.ndim == 1)
    return rng.normal(mean, 0.3, leaf.shape).astype(leaf.dtype)

  return jax.tree.map(noise, policy_lib.of(config).shapes)


def hidden(params, config, *args, **kwargs):
  """`Transformer.hidden` of these parameters, as one function for jit."""
  return policy_lib.of(config).bind(params).hidden(*args, **kwargs)


def feed(
  params, config, cache, tables, tokens, positions, chunks, *, layout=None
):
  """`Transformer.feed` of these parameters, as one function for jit."""
  model = policy_lib.of(config).bind(params)
  return model.feed(cache, tables, tokens, positions, chunks, layout=layout)


def fed(feed, params, config, store, tables, tokens, positions, sizes):
  """Feeds rows in chunks, so many ids of each at a time.

  Args:
    feed: `feed`, jitted or not.
    store: its pages, which are fed as if they held something else before.
    tokens, positions: [rows, length].

  Returns:
    Hidden states [rows, length, width], of numpy.
  """
  store = jax.tree.map(lambda x: x + 9, store)
  states, done, count = [], 0, len(tokens)
  for size in sizes:
    now = slice(done, done + size)
    done += size
    state, store, _ = feed(
      params,
      config,
      store,
      tables,
      jnp.asarray(tokens[:, now].reshape(-1)),
      jnp.asarray(positions[:, now].reshape(-1)),
      (count, size) if size > 1 else (0, 1),
    )
    states.append(np.asarray(state).reshape(count, size, -1))
  return np.concatenate(states, 1)


def moe(config):
  """The experts of one layer, as a module of their own."""
  return definition.define(
    lambda key: moe_layer.Moe(initializers.Initializer(config, key, True))
  )
