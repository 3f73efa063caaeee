"""A decoder that is not ours is trained and sampled from.

It knows the seam alone: `models.policy` and what its methods take and give.
"""

import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from launch import explain
from models import config as config_lib
from models import kv_cache, logprobs, sharding
from models.moe import layer as moe_layer
from rl import assemble
from rl.pools import weight_transfer
from tests.helpers import counting_runs

pytestmark = pytest.mark.compiled


class Recall(nnx.Module):
  """Each id looks up what earlier ids have stored: attention of one head."""

  def __init__(self, config, key):
    def parameter(name, shape, axes):
      own = jax.random.fold_in(key, name)
      return sharding.parameter(0.3 * jax.random.normal(own, shape), axes)

    width, head = config.d_model, config.head_dim
    self.config = config
    self.words = parameter(0, (config.vocab_size, width), ("vocab", "embed"))
    self.ask = parameter(1, (width, head), ("embed", "head_dim"))
    self.store = parameter(2, (width, 2 * head), ("embed", None))
    self.answer = parameter(3, (head, width), ("head_dim", "embed"))

  def hidden(
    self,
    tokens,
    positions,
    segments,
    *,
    parents=None,
    copies=None,
    experts=None,
    layout=None,
  ):
    x = self.words[...][tokens]
    k, v = jnp.split(x @ self.store[...], 2, -1)
    seen = segments[:, :, None] == segments[:, None, :]
    if parents is not None:
      seen |= parents[:, :, None] == segments[:, None, :]
    seen &= jnp.tri(tokens.shape[1], dtype=bool)
    zero = jnp.zeros(())
    aux = moe_layer.Aux(zero, zero, zero, jnp.zeros(0), zero, zero, zero)
    return self._recall(x, k, v, seen), aux

  def feed(self, cache, tables, tokens, positions, chunks, *, layout=None):
    (num, size), row = chunks, jnp.arange(len(tables))
    owners = jnp.concatenate([jnp.repeat(row[:num], size), row[num:]])
    x = self.words[...][tokens]
    new_k, new_v = jnp.split(x @ self.store[...], 2, -1)
    at = kv_cache.addresses(cache, tables, owners, positions)
    cache = kv_cache.write(cache, 0, at, new_k[:, None], new_v[:, None])
    # One head and one layer; all positions of each row in one piece.
    k, v = (
      x[0, 0, tables[owners]].reshape(len(owners), -1, x.shape[-1])
      for x in cache
    )
    # Padding, at position EMPTY, sees everything; what it says is unused.
    seen = jnp.arange(k.shape[1]) <= positions[:, None]
    out = self._recall(x[:, None], k, v, seen[:, None])
    return out[:, 0], cache, None

  def terms(self, hidden, *, layout=None):
    return (logprobs.Term(hidden, self.words[...]),)

  def init_cache(self, pages, page_size):
    return kv_cache.init_cache(self.config, pages, page_size)

  def _recall(self, x, k, v, seen):
    scores = jnp.einsum("bld,bsd->bls", x @ self.ask[...], k)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    return x + jnp.einsum("bls,bsd->bld", weights, v) @ self.answer[...]


@dataclasses.dataclass(frozen=True)
class Recalling:
  """The setting that names it."""

  def __call__(self, config, key):
    return Recall(config, key)


MODEL = config_lib.tiny(
  vocab_size=8,
  num_layers=1,
  d_model=16,
  num_kv_heads=1,
  head_dim=8,
  max_length=16,
  policy=Recalling(),
)


SETTINGS = counting_runs.experiment(
  MODEL,
  slots=16,
  publishing=weight_transfer.Publishing(verify=True),
  rounds=2,
)


async def test_a_round_of_a_decoder_that_is_not_ours_decodes_and_trains():
  watching = counting_runs.Watching()
  async with counting_runs.built(SETTINGS) as parts:
    start = await counting_runs.begun(parts)
    last = (await assemble.coordinate(parts, watching).run(start)).params
  first = start.state.params
  assert first.keys() == {"words", "ask", "store", "answer"}
  changed = [np.abs(last[name] - first[name]).max() for name in first]
  assert min(changed) > 1e-4
  # The engine and the learner agree on what was sampled, up to rounding.
  assert all(x["logprob_gap_max"] < 1e-5 for x in watching.rounds)
  assert all(x["grad_norm"] > 0 for x in watching.rounds)


def test_its_parameters_are_counted_and_explained():
  # 8 ids x 16, 16 x 8, 16 x 16 and 8 x 16; a token uses all of them.
  text = io.StringIO()
  explain.show(SETTINGS, text)
  start = "640 parameters, of which a token uses 640 and all train\n"
  assert text.getvalue().startswith(start)
  assert re.search(r"store +16x16 +embed:data - +f32", text.getvalue())
