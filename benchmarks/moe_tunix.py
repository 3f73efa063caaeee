"""The other side of benchmarks/moe.py: google-tunix's Qwen3-MoE train step.

  <python with google-tunix 0.1.7> benchmarks/moe_tunix.py EXPERTS

Compiles the step, says "ready", and then does one for every line that it reads,
answering with [wall s, CPU s, loss]. Imports nothing of this project, so that
it runs in an environment of its own.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx  # pyright: ignore[reportMissingImports]
from tunix.models.qwen3 import model  # pyright: ignore[reportMissingImports]


def _model(num_experts: int) -> nnx.Module:
  config = model.ModelConfig(
    num_layers=4,
    vocab_size=512,
    embed_dim=128,
    hidden_dim=256,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
    num_experts=num_experts,
    num_experts_per_tok=2,
  )
  return model.Qwen3(config, rngs=nnx.Rngs(0))


def main() -> None:
  """Steps whenever asked."""
  policy = _model(int(sys.argv[1]))
  optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
  random = np.random.default_rng(0)
  tokens = jnp.asarray(random.integers(0, 512, (64, 96)), jnp.int32)
  advantages = jnp.asarray(random.normal(size=(64, 1)), jnp.float32)
  positions = jnp.broadcast_to(jnp.arange(96), (64, 96))
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((96, 96), bool)), (64, 96, 96))

  @nnx.jit(donate_argnums=(0, 1))
  def step(policy, optimizer):
    def loss(policy):
      logits, _ = policy(tokens, positions, None, mask)
      logprobs = jax.nn.log_softmax(logits[:, :-1])
      scored = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
      return -jnp.mean(advantages * scored)

    value, grads = nnx.value_and_grad(loss)(policy)
    optimizer.update(policy, grads)
    return value

  jax.block_until_ready(step(policy, optimizer))
  print("ready", flush=True)
  for _ in sys.stdin:
    wall, cpu = time.monotonic(), time.process_time()
    value = float(jax.block_until_ready(step(policy, optimizer)))
    took = time.monotonic() - wall, time.process_time() - cpu, value
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
  main()
