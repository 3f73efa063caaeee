"""A train step of the same model in plain jax, as short as it can be written.

No packing, no sharding, no adapters, no chunks: rows are whole conversations,
one jitted function does everything, and the experts of a sparse layer all see
every token. Parameters are those of `models.transformer`.

Letters: B rows, L row length, D width, H heads, K kv heads, d head width,
E experts, F hidden width.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from models import config as model_config
from models import definition
from rl.data import batch as batch_lib

Step = Callable[..., tuple[definition.Params, optax.OptState, jax.Array]]


def build(
  config: model_config.ModelConfig,
  optimizer: optax.GradientTransformation,
  balance_weight: float,
) -> Step:
  """Returns (params, opt_state, batch) -> (params, opt_state, loss).

  The loss is that of `losses.ClippedSurrogate()` at temperature 1, and of the
  routers' balance. Donates parameters and optimizer state.
  """

  def loss(params, batch: batch_lib.Batch):
    logits, balance = _forward(params, config, batch.tokens)
    logprobs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    scored = jnp.take_along_axis(logprobs, batch.tokens[:, 1:, None], -1)
    ratio = jnp.exp(scored[..., 0] - batch.behaviour[:, 1:])
    gain = batch.advantages[:, 1:]
    bounded = jnp.clip(ratio, 0.8, 1.28) * gain
    surrogate = -jnp.minimum(ratio * gain, bounded)
    sampled = batch.sampled[:, 1:]
    mean = jnp.where(sampled, surrogate, 0).sum() / sampled.sum()
    return mean + balance_weight * balance, mean

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch):
    grads, mean = jax.grad(loss, has_aux=True)(params, batch)
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state, mean

  return step


def _forward(params, config: model_config.ModelConfig, tokens):
  """Returns logits, and the mean load-balance loss of the routers."""
  x = params["embed"][tokens]
  balances = []
  for layer in params["layers"].values():
    normed = _norm(x, layer["attention_norm"])
    x = x + _attention(layer["attention"], config, normed)
    normed = _norm(x, layer["mlp_norm"])
    if "mlp" in layer:
      x = x + _mlp(layer["mlp"], normed)
      continue
    added, balance = _experts(layer["moe"], config, normed)
    x = x + added
    balances.append(balance)
  x = _norm(x, params["final_norm"])
  head = params["embed"].T if config.tie_embeddings else params["head"]
  return x @ head, sum(balances) / max(1, len(balances))


def _norm(x, scale):
  wide = x.astype(jnp.float32)
  mean = jnp.mean(wide * wide, -1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def _rotate(x, theta: float):
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half) / half)
  angle = jnp.arange(x.shape[1])[:, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = x[..., :half], x[..., half:]
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return turned.astype(x.dtype)


def _attention(params, config: model_config.ModelConfig, x):
  query = jnp.einsum("bld,dhk->blhk", x, params["query"])
  key = jnp.einsum("bld,dhk->blhk", x, params["key"])
  value = jnp.einsum("bld,dhk->blhk", x, params["value"])
  theta = config.rope_theta
  query = _rotate(_norm(query, params["query_norm"]), theta)
  key = _rotate(_norm(key, params["key_norm"]), theta)
  shape = (*query.shape[:2], config.num_kv_heads, -1, config.head_dim)
  query = query.reshape(shape) * config.head_dim**-0.5
  scores = jnp.einsum("blkgd,bskd->bkgls", query, key).astype(jnp.float32)
  causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
  mixed = jnp.einsum("bkgls,bskd->blkgd", weights.astype(x.dtype), value)
  mixed = mixed.reshape(*x.shape[:2], config.num_heads, config.head_dim)
  return jnp.einsum("blhk,hkd->bld", mixed, params["out"])


def _mlp(params, x):
  hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
  return hidden @ params["down"]


def _experts(params, config: model_config.ModelConfig, x):
  probs = jax.nn.softmax((x @ params["router"]["kernel"]).astype(jnp.float32))
  _, chosen = jax.lax.top_k(probs, config.experts_per_token)
  picked = jax.nn.one_hot(chosen, config.num_experts).sum(-2)
  gates = picked * probs
  gates = (gates / gates.sum(-1, keepdims=True)).astype(x.dtype)
  gate = jnp.einsum("bld,edf->blef", x, params["gate"])
  hidden = jax.nn.silu(gate) * jnp.einsum("bld,edf->blef", x, params["up"])
  added = jnp.einsum("blef,efd,ble->bld", hidden, params["down"], gates)
  share = picked.mean((0, 1)) / config.experts_per_token
  balance = config.num_experts * jnp.sum(share * probs.mean((0, 1)))
  return added, balance
