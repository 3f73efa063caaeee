"""A mixture of experts: time against their number, and against google-tunix.

  python -m benchmarks.moe [--repeats=5] [--tunix_python=PATH]

Qwen3-MoE of 4 layers, width 128, 512 words, 2 experts of width 256 a token; 64
rows of 96 tokens, float32, no rematerialisation.

1. Forward and backward pass with 8, 32 and 128 experts: the active size is the
   same, so the time should be too.
2. The same with 128 experts, 8 of width 128 a token, and of a dense model whose
   MLP has their 1,024: 2 layers of width 512, 16 and 64 rows of 128 tokens.
3. A train step, with Adam, of ours and of google-tunix 0.1.7's own Qwen3-MoE
   model, when PATH is a Python that has it, or this one does. It runs in a
   process of its own. The loss is the same policy gradient on all tokens.

All sides take turns, and wait after every step. Printed and kept in
benchmarks/results/moe.json: medians and (min, max) of wall and CPU seconds. CPU
seconds depend less on what else the machine does.
"""

import importlib.util
import pathlib
import statistics
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import machine, small_parts
from models import config as config_lib
from models import definition
from models import logprobs as logprobs_lib
from models import policy as policy_lib

_REPEATS = flags.DEFINE_integer("repeats", 5, "Steps of each side.")
_TUNIX = flags.DEFINE_string(
  "tunix_python", None, "Python with google-tunix 0.1.7; this one by default."
)

_ROWS, _LENGTH = 64, 96

Step = Callable[[], tuple[float, float]]
"""Does one step; returns its wall and CPU seconds."""


def _config(num_experts: int) -> config_lib.ModelConfig:
  return config_lib.ModelConfig(
    vocab_size=512,
    d_expert=256,
    num_experts=num_experts,
    max_length=_LENGTH,
    rope_theta=1e6,
  )


def _wide(num_experts: int) -> config_lib.ModelConfig:
  """Returns a model whose tokens meet hidden values of width 1,024."""
  return config_lib.ModelConfig(
    vocab_size=512,
    num_layers=2,
    d_model=512,
    num_heads=8,
    head_dim=64,
    d_ff=8 * 128,
    d_expert=128,
    num_experts=num_experts,
    experts_per_token=8,
    max_length=128,
  )


def _gradient(
  config: config_lib.ModelConfig, shape: tuple[int, int]
) -> tuple[definition.Params, Callable]:
  """Returns parameters, and the gradient of the loss of a fixed batch."""
  random = np.random.default_rng(0)
  tokens = jnp.asarray(random.integers(0, 512, shape), jnp.int32)
  advantages = jnp.asarray(random.normal(size=(shape[0], 1)), jnp.float32)
  positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
  segments = jnp.ones(shape, jnp.int32)

  def loss(params):
    model = policy_lib.of(config).bind(params)
    hidden, _ = model.hidden(tokens, positions, segments)
    logits = logprobs_lib.logits(model.terms(hidden[:, :-1]))
    logprobs = jax.nn.log_softmax(logits)
    scored = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
    return -jnp.mean(advantages * scored)

  return small_parts.weights(config), jax.grad(loss)


def _passes(config: config_lib.ModelConfig, shape: tuple[int, int]) -> Step:
  """Returns a forward and backward pass."""
  params, gradient = _gradient(config, shape)
  run = jax.jit(gradient)
  jax.block_until_ready(run(params))
  return lambda: machine.timed(lambda: run(params))


def _train(num_experts: int) -> Step:
  """Returns a step of training."""
  params, gradient = _gradient(_config(num_experts), (_ROWS, _LENGTH))
  optimizer = optax.adam(3e-3)

  def step(params, state):
    changes, state = optimizer.update(gradient(params), state, params)
    return optax.apply_updates(params, changes), state

  run = jax.jit(step, donate_argnums=(0, 1))
  carry = jax.block_until_ready(run(params, jax.jit(optimizer.init)(params)))

  def again():
    nonlocal carry
    carry = run(*carry)
    return carry

  return lambda: machine.timed(again)


def _turns(title: str, sides: dict[str, Step], repeats: int) -> dict[str, dict]:
  """Runs the sides in turn; shows and returns wall and CPU seconds of each."""
  times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for _ in range(repeats):
    for name, step in sides.items():
      times[name].append(step())
  found = {
    name: {
      clock: {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
      }
      for clock, values in zip(
        ("wall_s", "cpu_s"), zip(*taken, strict=True), strict=True
      )
    }
    for name, taken in times.items()
  }
  machine.show(
    title,
    [
      {"side": name, "clock": clock, **row[clock]}
      for name, row in found.items()
      for clock in row
    ],
  )
  return found


def _ratios(above: dict, below: dict) -> dict[str, float]:
  return {kind: above[kind]["median"] / below[kind]["median"] for kind in above}


def _growth(repeats: int) -> dict:
  """Returns the times by number of experts, and 128 of them over 8."""
  shape = (_ROWS, _LENGTH)
  sides = {str(n): _passes(_config(n), shape) for n in (8, 32, 128)}
  rows = _turns("forward and backward, by experts", sides, repeats)
  return {"experts": rows, "128 over 8": _ratios(rows["128"], rows["8"])}


def _against_dense(repeats: int) -> dict:
  """Returns the times of both models, and those of the experts over dense.

  By rows of a batch: what does not grow with them is for the experts' weights.
  """
  result = {}
  for count in (16, 64):
    sides = {
      name: _passes(_wide(num_experts), (count, 128))
      for name, num_experts in (("experts", 128), ("dense", 0))
    }
    rows = _turns(f"{count} rows", sides, repeats)
    over = _ratios(rows["experts"], rows["dense"])
    result[str(count)] = rows | {"experts over dense": over}
  return result


def _against_tunix(python: str, repeats: int) -> dict:
  """Returns the times of both sides, and tunix's over ours."""
  script = str(pathlib.Path(__file__).with_name("moe_tunix.py"))
  result = {}
  for number in (8, 32):
    ours = _train(number)
    with machine.asked([python, script, str(number)]) as ask:

      def theirs(ask=ask) -> tuple[float, float]:
        wall, cpu, _ = ask("step")
        return wall, cpu

      sides = {"ours": ours, "tunix": theirs}
      rows = _turns(f"{number} experts, train step", sides, repeats)
    rows["tunix over ours"] = _ratios(rows["tunix"], rows["ours"])
    result[str(number)] = rows
  return result


def main(_: list[str]) -> None:
  """Measures, prints and keeps all comparisons."""
  print(machine.describe())
  result = {
    "forward and backward": _growth(_REPEATS.value),
    "against dense": _against_dense(_REPEATS.value),
  }
  python = _TUNIX.value
  if python is None and importlib.util.find_spec("tunix"):
    python = sys.executable
  if python is None:
    print("google-tunix is not installed; see --tunix_python")
  else:
    result["train step"] = _against_tunix(python, _REPEATS.value)
  machine.keep("moe", **result)


if __name__ == "__main__":
  app.run(main)
