"""A model for the tests of files: every kind of parameter, few of each."""

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


def hidden(params, config, *args, **kwargs):
  """`Transformer.hidden` of these parameters, as one function for jit."""
  return policy_lib.of(config).bind(params).hidden(*args, **kwargs)


def feed(
  params, config, cache, tables, tokens, positions, chunks, *, layout=None
):
  """`Transformer.feed` of these parameters, as one function for jit."""
  model = policy_lib.of(config).bind(params)
  return model.feed(cache, tables, tokens, positions, chunks, layout=layout)


def moe(config):
  """The experts of one layer, as a module of their own."""
  return definition.define(
    lambda key: moe_layer.Moe(initializers.Initializer(config, key, True))
  )
