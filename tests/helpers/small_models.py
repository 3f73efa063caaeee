"""A model for the tests of files: every kind of parameter, few of each."""

from models import config as config_lib
from models.chat import word_chat

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
