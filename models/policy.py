"""The seam between a policy and what trains it, samples from it and serves it.

  of(config) -> Definition -+- init(key) -> parameters, a plain tree
                            +- bind(parameters) -> Policy, in a trace

Everything outside of models/ reaches a policy through here, so that a module
that is not ours can be one: see `ModelConfig.policy`.

Letters: B rows, L row length, R rows of a cache with tables of W pages, P of
them with chunks of C ids, N new ids in all, D width, S sparse layers, k experts
of a token.
"""

import functools
from typing import Protocol

from jaxtyping import Array, Float, Int, Int32

from models import config as config_lib
from models import definition, kv_cache, logprobs, sharding, transformer
from models.moe import layer as moe_layer


class Policy(Protocol):
  """A decoder that can be trained and sampled from: an `nnx.Module`.

  It holds `nnx.Param`s and no other state. `sharding.parameter` declares one
  with its logical axes; one without lies whole on every device.

  Attributes:
    config: sizes; the rest of the program reads those of ids, keys and
      values, hidden states and experts, and the dtype.
  """

  config: config_lib.ModelConfig

  def hidden(
    self,
    tokens: Int32[Array, "B L"],
    positions: Int32[Array, "B L"],
    segments: Int32[Array, "B L"],
    *,
    parents: Int32[Array, "B L"] | None = None,
    copies: Int32[Array, "B L"] | None = None,
    experts: Int[Array, "B L S k"] | None = None,
    layout: sharding.Layout | None = None,
  ) -> tuple[Float[Array, "B L D"], moe_layer.Aux]:
    """Returns hidden states of packed rows, and how the routers did.

    Args:
      positions: of each token within its conversation.
      segments: tokens attend within their own; 0 is padding, whose hidden
        states mean nothing.
      parents: another segment of the row, before this one, that a token attends
        to as well, or `mask.NO_PARENT`.
      copies: how many tokens each stands for in Aux; None is 1 each.
      experts: the routers must choose them, for example those chosen when the
        tokens were sampled; -1 leaves a choice to the router.
      layout: of mesh and rules; None is one device.

    Returns:
      The hidden state at index t is about the token at t + 1. Aux is averaged
      over layers with experts and over tokens that are not padding.
    """
    ...

  def feed(
    self,
    cache: kv_cache.Cache,
    tables: Int32[Array, "R W"],
    tokens: Int32[Array, " N"],
    positions: Int32[Array, " N"],
    chunks: tuple[int, int],
    *,
    layout: sharding.Layout | None = None,
  ) -> tuple[Float[Array, "N D"], kv_cache.Cache, kv_cache.Experts]:
    """Returns hidden states of new ids, and the cache with them.

    The first P rows have up to C new ids each, the others one.
    N = P * C + R - P, in the order of the rows. A step of a decoding loop has
    no chunks: (0, 1).

    Args:
      cache: keys and values of all positions before the new ones.
      tables: pages of each row; any page serves as padding.
      positions: `kv_cache.EMPTY` marks padding: nobody sees it, its output
        means nothing.
      chunks: (P, C).

    Returns:
      Hidden states; the cache, written in place where nobody else holds it; and
      the experts that the ids took.
    """
    ...

  def terms(
    self,
    hidden: Float[Array, "*any D"],
    *,
    layout: sharding.Layout | None = None,
  ) -> tuple[logprobs.Term, ...]:
    """Returns the products of which the logits of hidden states are the sum.

    Args:
      layout: gathers the tables; None leaves them split, as `logprobs.score`
        expects them.
    """
    ...

  def init_cache(self, pages: int, page_size: int) -> kv_cache.Cache:
    """Returns a cache of zeros; called without parameters."""
    ...


@functools.cache
def of(config: config_lib.ModelConfig) -> definition.Definition[Policy]:
  """Returns the policy with these sizes; the same one for equal sizes."""
  create = config.policy or transformer.Transformer
  return definition.define(functools.partial(create, config))
