"""Mixture of experts: dropless top-k routing around one grouped matmul.

  x[T] -> router -> k experts each: T * k assignments
       -> on a mesh: tokens travel to the devices of their experts
       -> slots: assignments side by side by expert, in whole blocks
       -> SwiGLU of blocks with the weights of each block's expert, by gate
       -> every token sums its k results

No token is ever dropped. Letters: T tokens, k experts of a token, E experts, D
width, F hidden width.

Source: Qwen3, arXiv 2505.09388, section 2; blocks: MegaBlocks, 2211.15841.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int, Int32

from models import config as config_lib
from models import initializers, lora, quantize, sharding
from models.moe import (
  expert_parallel,
  grouped_matmul,
  grouped_matmul_loop,
  router,
)

SAVED = ("expert_gate", "expert_up")
"""Names of what the backward pass of the experts needs."""


class Aux(NamedTuple):
  """Statistics of the router: means over tokens that are not padding.

  Attributes:
    load_balance: E * sum_e f_e P_e, for the share f_e of the assignments and
      the mean probability P_e of expert e: 1 when perfectly balanced, E / k
      when k experts get all. Source: Switch, arXiv 2101.03961, eq. 4.
    z_loss: mean squared logarithm of the sum of exp(logits). Source: ST-MoE,
      arXiv 2202.08906, eq. 5.
    router_entropy: of the probabilities over all experts, in nats.
    load: f_e, each expert's share of the assignments.
    max_load: that of the busiest expert over an even share, the worst of all
      layers: between 1 and E / k.
    unused_experts: share of the experts that no token took; 0 without tokens.
    dropped: assignments for which no expert computed anything, counted from
      the slots, over all layers. Always 0.
  """

  load_balance: Float32[Array, ""]
  z_loss: Float32[Array, ""]
  router_entropy: Float32[Array, ""]
  load: Float32[Array, " E"]
  max_load: Float32[Array, ""]
  unused_experts: Float32[Array, ""]
  dropped: Float32[Array, ""]


class Moe(lora.Adapted):
  """A router and its experts."""

  def __init__(self, initializer: initializers.Initializer):
    """Draws the parameters."""
    self.config = initializer.config
    matrix = initializer.matrix
    self.router = router.TopKRouter(initializer)
    self.gate = matrix("gate", "experts", "embed", "mlp")
    self.up = matrix("up", "experts", "embed", "mlp")
    self.down = matrix("down", "experts", "mlp", "embed", is_residual=True)
    initializer.adapt(self)

  def __call__(
    self,
    x: Float[Array, "T D"],
    copies: Int32[Array, " T"],
    layout: sharding.Layout | None = None,
    chosen: Int[Array, "T k"] | None = None,
    first: Int32[Array, ""] | None = None,
  ) -> tuple[Float[Array, "T D"], Aux, Int32[Array, "T k"]]:
    """Returns what the experts add to each token, how the router did, and
    which it took: -1 for padding.

    On one CPU device the bits of a token do not depend on the others or on its
    place when T and `moe_block` are multiples of 16, so that XLA's loops have
    no tails.

    Args:
      copies: how many tokens each stands for in Aux: 1, more for those of a
        shared prompt, 0 for padding, which no expert sees and which gets zeros.
      layout: where tokens and experts lie; None is one device.
      chosen: experts that each token must take, -1 for the router's own choice.
      first: on one device, where this layer's experts begin if the weights are
        those of many layers; see `layer_stack.ExpertsInPlace`.
    """
    config = self.config
    if layout is None or layout.mesh.size == 1:
      params = self.values()
      gates, experts, sums = self.router(x, copies, chosen)
      form = grouped_matmul.choose(
        config.compute.experts, sharding.platform(layout)
      )
      y, placed = mix(
        params,
        x,
        gates,
        experts,
        form=form,
        least=config.compute.moe_block,
        within=None if first is None else (first, config.num_experts),
      )
    else:
      y, sums, placed, experts = _on_mesh(self, x, copies, chosen, layout)
    return y, _aux(sums, placed, config), experts


def average(stacked: Aux | None, num_experts: int = 0) -> Aux:
  """Returns the mean over layers with experts, or zeros.

  Args:
    stacked: layers along the first axis of each leaf; None without any.
  """
  if stacked is None:
    zero = jnp.zeros(())
    return Aux(zero, zero, zero, jnp.zeros(num_experts), zero, zero, zero)
  mean = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), stacked)
  return mean._replace(
    max_load=jnp.max(stacked.max_load), dropped=jnp.sum(stacked.dropped)
  )


def mix(
  params: Mapping[str, Any],
  x: Float[Array, "T D"],
  gates: Float[Array, "T k"],
  experts: Int32[Array, "T k"],
  most: int | None = None,
  *,
  form: grouped_matmul.Form,
  least: int,
  within: tuple[Int32[Array, ""], int] | None = None,
) -> tuple[Float[Array, "T D"], Int32[Array, ""]]:
  """Returns sum_k gate * expert(x), and how many assignments had a slot.

  For the backward pass the kernels keep what leaves the first two matmuls, and
  compute rows and hidden values again; the loop over blocks keeps nothing.

  Args:
    experts: k different ones; those outside of `params` add nothing.
    most: bound on the number of assignments; see `grouped_matmul.plan`.
    form: of the grouped matmul.
    least: fewest rows of a block.
    within: the first of `params` that is meant, and how many; None for all.
  """
  weights = _experts(params)
  first, num_experts = within or (0, weights["gate"].shape[0])
  most = experts.size if most is None else most
  block = grouped_matmul.block_rows(form, most, num_experts, least)
  plan = grouped_matmul.plan(experts, num_experts, block, most)
  plan = plan._replace(owner=plan.owner + first)
  if form.kernel == "blocks":
    y = grouped_matmul_loop.over_blocks(
      _swiglu_of_blocks, weights, x, gates, plan
    )
  else:
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    kernels = functools.partial(_swiglu_by_kernels, form)
    y = jax.checkpoint(kernels, policy=policy)(weights, x, gates, plan)
  return y, grouped_matmul.num_placed(plan.places)


def _experts(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the weights of experts, and their adapters."""
  names = ("gate", "up", "down")
  adapters = params.get("lora", {})
  return {name: params[name] for name in names} | {
    "lora": {name: adapters[name] for name in names if name in adapters}
  }


def _swiglu(
  matmul: Callable[[str, Array], Array],
  rows: Float[Array, "*any D"],
  scale: Float[Array, "*any"],
) -> Float[Array, "*any D"]:
  """Returns the hidden values times `scale`, projected back.

  Scaled before the last product and not after it, whose results then need not
  be kept for the gradient of the gates.
  """
  gate = checkpoint_name(matmul("gate", rows), SAVED[0])
  up = checkpoint_name(matmul("up", rows), SAVED[1])
  return matmul("down", jax.nn.silu(gate) * up * scale[..., None])


def _adapted(
  product: Callable[[Array, Any], Array],
  weights: Mapping[str, Any],
  name: str,
  rows: Array,
) -> Array:
  """Returns rows times weights, and what their adapters add."""
  y = product(rows, weights[name])
  adapter = weights["lora"].get(name)
  if adapter is None:
    return y
  return y + product(product(rows, adapter["a"]), adapter["b"])


def _swiglu_of_blocks(
  weights: Mapping[str, Any],
  rows: Float[Array, "c b D"],
  scale: Float[Array, "c b"],
) -> Float[Array, "c b D"]:
  """Returns each block times its own weights."""

  def product(rows, weights):
    return jnp.matmul(rows, quantize.dequantize(weights, rows.dtype))

  return _swiglu(functools.partial(_adapted, product, weights), rows, scale)


def _swiglu_by_kernels(
  form: grouped_matmul.Form,
  weights: Mapping[str, Any],
  x: Float[Array, "T D"],
  gates: Float[Array, "T k"],
  plan: grouped_matmul.Plan,
) -> Float[Array, "T D"]:
  def product(rows, weights):
    return grouped_matmul.matmul(rows, weights, plan, form)

  matmul = functools.partial(_adapted, product, weights)
  rows = grouped_matmul.spread(x, plan.places)
  scale = grouped_matmul.spread_values(gates.astype(x.dtype), plan.places)
  return grouped_matmul.collect(_swiglu(matmul, rows, scale), plan.places)


def _on_mesh(
  moe: Moe,
  x: Float[Array, "T D"],
  copies: Int32[Array, " T"],
  chosen: Int[Array, "T k"] | None,
  layout: sharding.Layout,
) -> tuple[
  Float[Array, "T D"], router.Sums, Int32[Array, ""], Int32[Array, "T k"]
]:
  """Returns results, sums over all tokens, assignments that had a slot, and
  the experts of each token.
  """
  config = moe.config
  form = grouped_matmul.choose(config.compute.experts, layout.platform)
  if form.interpret:
    raise ValueError(
      f"model.compute.experts={config.compute.experts} is interpreted on CPU, "
      f"for tests on one device, and the mesh has {layout.mesh.size}; use auto"
    )
  everywhere = sharding.MESH_AXES
  rows = sharding.TOKEN_AXES
  graphdef, state = nnx.split(moe.router)
  params = moe.values() | {"router": nnx.to_pure_dict(state)}
  axes = sharding.follow(sharding.axes_of(moe), params)

  def local(params, x, copies, chosen):
    params = _whole(params, axes, layout)
    own = nnx.merge(graphdef, params["router"])
    gates, taken, sums = own(x, copies, chosen)
    # What is equal on several devices varies from here on, so that gradients
    # are summed over them here and nowhere else.
    params, x, gates, experts = expert_parallel.vary(
      (params, x, gates, taken), everywhere
    )
    y, placed = expert_parallel.exchange(
      functools.partial(mix, params, form=form, least=config.compute.moe_block),
      x,
      gates,
      experts,
      config.num_experts,
      axis="expert",
      agree=everywhere,
    )
    # Along "tensor" everyone has a part of each sum, and the same places.
    y = jax.lax.psum(y, "tensor")
    placed = jax.lax.pmax(jax.lax.psum(placed, rows), "tensor")
    return y, jax.lax.psum(sums, rows), placed, taken

  tokens = len(x)
  padding = -tokens % layout.size("tokens")
  x, copies, chosen = jax.tree.map(
    lambda leaf: jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1)),
    (x, copies, chosen),
  )
  mapped = jax.shard_map(
    local,
    mesh=layout.mesh,
    in_specs=(_specs(axes, layout), *[jax.P(rows)] * 3),
    out_specs=(jax.P(rows), jax.P(), jax.P(), jax.P(rows)),
  )
  y, sums, placed, taken = mapped(params, x, copies, chosen)
  return y[:tokens], sums, placed, taken[:tokens]


def _specs(axes: Any, layout: sharding.Layout) -> Any:
  """Returns where parameters lie when the devices' programs start."""
  split: dict[str | None, Any] = {"experts": "expert", "mlp": "tensor"}
  split["embed"] = _gathered(layout)

  def spec(names):
    if "experts" not in names:
      return jax.P()
    return jax.P(*(split.get(name) for name in names))

  return jax.tree.map(spec, axes, is_leaf=sharding.is_axes)


def _whole(params: Any, axes: Any, layout: sharding.Layout) -> Any:
  """Gathers experts' widths, where their gradients are scattered."""

  names = _gathered(layout)

  def gather(spec, leaf):
    if names is None or names not in spec:
      return leaf
    return jax.lax.all_gather(leaf, names, axis=spec.index(names), tiled=True)

  return jax.tree.map(gather, _specs(axes, layout), params)


def _gathered(layout: sharding.Layout) -> tuple[str, ...] | str | None:
  """Returns the axes over which the width of experts is gathered in use."""
  names = layout.rules.of("embed")
  return jax.P(names)[0] if set(names) <= {"data", "context"} else None


def _aux(
  sums: router.Sums,
  placed: Int32[Array, ""],
  config: config_lib.ModelConfig,
) -> Aux:
  num_experts, k = config.num_experts, config.experts_per_token
  tokens = jnp.maximum(sums.tokens, 1)
  load = sums.picked / (k * tokens)
  return Aux(
    load_balance=num_experts * jnp.sum(load * sums.probs / tokens),
    z_loss=sums.square / tokens,
    router_entropy=sums.entropy / tokens,
    load=load,
    max_load=num_experts * jnp.max(load),
    unused_experts=jnp.mean((load == 0) & (sums.tokens > 0)),
    dropped=(sums.assigned - placed).astype(jnp.float32),
  )
