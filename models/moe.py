"""Mixture of experts: dropless top-k routing as one grouped matmul.

  x[T] -> router -> k experts each: T*k assignments
       -> slots: assignments side by side by expert, every expert's part
          rounded up to whole blocks
       -> SwiGLU of blocks[N, block] with the weights of each block's expert
       -> every token takes its k results and sums them by gate

The number of blocks is the worst case, so shapes are static and no token is
ever dropped. Letters: T tokens, k experts of a token, E experts, D width,
F hidden width, N blocks.

Source: Qwen3, arXiv 2505.09388, section 2; blocks: MegaBlocks, 2211.15841.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models import config as config_lib

AXES = {
  "router": ("embed", "router"),
  "gate": ("experts", "embed", "mlp"),
  "up": ("experts", "embed", "mlp"),
  "down": ("experts", "mlp", "embed"),
}
"""Logical axes of the parameters."""


class Aux(NamedTuple):
  """How the router did, on average over tokens that are not padding.

  Attributes:
    load_balance: E * sum_e f_e P_e, for the share f_e of the assignments and
      the mean probability P_e of expert e: 1 when perfectly balanced, E / k
      when k experts get all. Source: Switch, arXiv 2101.03961, eq. 4.
    router_entropy: of the probabilities over all experts, in nats.
  """

  load_balance: Float[Array, ""]
  router_entropy: Float[Array, ""]


def apply(
  params: Mapping[str, Array],
  config: config_lib.ModelConfig,
  x: Float[Array, "T D"],
  valid: Bool[Array, " T"],
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, "T D"], Aux]:
  """Returns what the experts add to each token, and how the router did.

  On CPU the bits of a token do not depend on the others or on its place when
  T and `moe_block` are multiples of 16, so that XLA's loops have no tails.

  Args:
    valid: False for padding, which no expert sees and which gets zeros.
    mesh: splits tokens over "data" and experts over "expert"; see
      `sharding.validate`.
  """
  gates, experts, aux = _route(params["router"], config, x, valid)
  weights = {name: params[name] for name in ("gate", "up", "down")}
  if mesh is None or mesh.size == 1:
    return _mix(weights, config.moe_block, x, gates, experts), aux

  def local(weights, x, gates, experts):
    first = jax.lax.axis_index("expert") * weights["gate"].shape[0]
    mixed = _mix(weights, config.moe_block, x, gates, experts - first)
    return jax.lax.psum(mixed, "expert")

  data, expert = jax.P("data"), jax.P("expert")
  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=(expert, data, data, data), out_specs=data
  )
  return mapped(weights, x, gates, experts), aux


def _route(
  router: Float[Array, "D E"],
  config: config_lib.ModelConfig,
  x: Float[Array, "T D"],
  valid: Bool[Array, " T"],
) -> tuple[Float[Array, "T k"], Int32[Array, "T k"], Aux]:
  """Returns gates that sum to 1, their experts (-1 for padding), and Aux."""
  num_experts, k = config.num_experts, config.experts_per_token
  logprobs = jax.nn.log_softmax((x @ router).astype(jnp.float32))
  probs = jnp.exp(logprobs)
  _, experts = jax.lax.top_k(jax.lax.stop_gradient(probs), k)
  chosen = jax.nn.one_hot(experts, num_experts)
  gates = jnp.sum(chosen * probs[:, None], -1)
  gates = gates / jnp.sum(gates, -1, keepdims=True)

  def mean(values):
    total = jnp.sum(jnp.where(valid[:, None], values, 0), 0)
    return total / jnp.maximum(jnp.sum(valid), 1)

  share = mean(jnp.sum(chosen, 1)) / k
  aux = Aux(
    load_balance=num_experts * jnp.sum(share * mean(probs)),
    router_entropy=-jnp.sum(mean(probs * logprobs)),
  )
  return gates, jnp.where(valid[:, None], experts, -1), aux


def _mix(
  weights: Mapping[str, Float[Array, "..."]],
  block: int,
  x: Float[Array, "T D"],
  gates: Float[Array, "T k"],
  experts: Int32[Array, "T k"],
) -> Float[Array, "T D"]:
  """Returns sum_k gate * expert(x); experts outside of [0, E) add nothing."""
  num_experts = weights["gate"].shape[0]
  # Every block copies its expert's weights, so the more tokens, the larger the
  # blocks, as long as filling up the last of each expert costs below 1/8.
  block *= max(1, experts.size // (8 * num_experts * block))
  slots, owner = _place(experts, num_experts, block)
  rows = jnp.zeros((len(owner) * block, x.shape[1]), x.dtype)
  # No two assignments share a slot. An addition, because the derivative of
  # an assignment by index looks for collisions first.
  rows = rows.at[slots].add(x[:, None], mode="drop")
  blocks = rows.reshape(len(owner), block, -1)
  gate = jnp.einsum("nbd,ndf->nbf", blocks, weights["gate"][owner])
  up = jnp.einsum("nbd,ndf->nbf", blocks, weights["up"][owner])
  hidden = jax.nn.silu(gate) * up
  blocks = jnp.einsum("nbf,nfd->nbd", hidden, weights["down"][owner])
  results = blocks.reshape(rows.shape).at[slots].get(mode="fill", fill_value=0)
  return jnp.sum(gates[..., None] * results, 1)


def _place(
  experts: Int32[Array, "T k"], num_experts: int, block: int
) -> tuple[Int32[Array, "T k"], Int32[Array, " N"]]:
  """Sorts assignments by expert into blocks, by counting.

  Returns:
    The slot of each assignment, past the end for those that no expert here
    takes, and the expert of each block.
  """
  flat = experts.reshape(-1)
  chosen = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
  seen = jnp.cumsum(chosen, 0)
  # The k experts of a token differ: none gets more than T assignments.
  num_blocks = min(
    (flat.size + num_experts * (block - 1)) // block,
    num_experts * -(-experts.shape[0] // block),
    flat.size,
  )
  ends = jnp.cumsum(-(-seen[-1] // block))
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
  slots = jnp.sum(chosen * (starts * block + seen - 1), 1)
  here = jnp.any(chosen, 1)
  slots = jnp.where(here, slots, num_blocks * block).reshape(experts.shape)
  owner = jnp.searchsorted(ends, jnp.arange(num_blocks), side="right")
  return slots, jnp.minimum(owner, num_experts - 1)
