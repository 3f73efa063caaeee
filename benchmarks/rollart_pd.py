"""RollArt's split of prefill and decoding: predicted from hardware and shapes.

  python -m benchmarks.rollart_pd [--rounds=3]

SWE, 128 episodes a step, on four nodes of 8: H800 that encode contexts and H20
that decode. RollArt (arXiv 2512.22560, 7.4, table 5) publishes the step with
and without the split on the same accelerators, for Qwen3-32B and 30B-A3B: one
node that encodes and three that decode (1P3D), two and two, and that three and
one is the worst of both models.

Without the split all engines encode and decode, and sessions go to the one
with the fewest. With it only H20 decode, and keys and values come over a link.
Nothing is fitted. Published inputs: TFLOPS, bandwidth and memory of table 2,
200 Gb/s between clusters, 30 to 50 turns, 53.8 % of a step for generation (of
an 8B model). From shapes: an id is encoded in 2 FLOP a parameter that it uses;
a token reads the weights, of experts those that the batch chooses, and 16k ids
of keys and values of each sequence. Assumed: engines of 4, half of the TFLOPS
for context and 0.7 of the bandwidth, log-normal answers of 200 tokens (sigma
0.5), replies of 400, an environment that answers at once, a cache of prefixes
on both sides, and decoding that stands still while its engine encodes
(`interference`). That and the replies are swept.

Only a simulation, in virtual time; prefill_apart.py splits real engines.
Writes benchmarks/results/rollart_pd.json.
"""

import dataclasses
import statistics
from typing import Any

from absl import app

from benchmarks import machine, simulated
from rl.schedule import overlap
from rl.simulation import (
  distributions,
  prefill_pool,
  resources,
  simulate,
)
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor

PUBLISHED_S = {
  ("32B", "1P3D"): (741.2, 722.7),
  ("32B", "2P2D"): (734.9, 701.6),
  ("30B-A3B", "1P3D"): (327.4, 294.8),
  ("30B-A3B", "2P2D"): (305.2, 251.1),
}
NODES = {"1P3D": (1, 3), "2P2D": (2, 2), "3P1D": (3, 1)}
_GENERATION = 0.538
_GROUPS = 16
_PER_ENGINE, _ENGINES_A_NODE = 4, 2
_IDS = 16_000  # Of a sequence, on average.
_USE_FLOPS, _USE_BANDWIDTH = 0.5, 0.7
_LINK = resources.Link(bytes_per_s=200e9 / 8 / _ENGINES_A_NODE)
_LEARNER = simulated_learner.LearnerSpeed(token_s=0.0, update_s=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
  """A row of table 2."""

  flops: float
  bytes_per_s: float
  memory_bytes: float


H800 = Accelerator(flops=989.5e12, bytes_per_s=3.35e12, memory_bytes=80e9)
H20 = Accelerator(flops=148e12, bytes_per_s=4e12, memory_bytes=96e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """Shapes of a model in bfloat16.

  Attributes:
    used: parameters that one id uses.
    experts: parameters of all experts, of which a token uses `share`.
    kv_bytes: of an id.
  """

  parameters: float
  used: float
  kv_bytes: float
  experts: float = 0.0
  share: float = 1.0

  def read_bytes(self, batch: int) -> float:
    """Returns the bytes that one step of a batch reads."""
    chosen = 1.0 - (1.0 - self.share) ** batch
    weights = self.parameters - self.experts * (1.0 - chosen)
    return 2 * weights + batch * _IDS * self.kv_bytes


MODELS = {
  "32B": Model(parameters=32.8e9, used=32.8e9, kv_bytes=2 * 2 * 64 * 8 * 128),
  "30B-A3B": Model(
    parameters=30.5e9,
    used=3.3e9,
    kv_bytes=2 * 2 * 48 * 4 * 128,
    experts=29.0e9,
    share=8 / 128,
  ),
}


def speed(
  model: Model, on: Accelerator, interference: float
) -> simulated_processor.Speed:
  """Returns the speed of an engine: a line through batches of 1 and 32."""
  rate = _PER_ENGINE * on.bytes_per_s * _USE_BANDWIDTH
  one, many = model.read_bytes(1) / rate, model.read_bytes(32) / rate
  slope = (many - one) / 31
  room = 0.9 * _PER_ENGINE * on.memory_bytes - 2 * model.parameters
  return simulated_processor.Speed(
    tau0_s=one - slope,
    b0=(one - slope) / slope,
    prefill_per_s=_encoded_per_s(model, on),
    slots=_GROUPS * simulated.SWE_ROLLOUT.group_size,
    kv_tokens=int(room / model.kv_bytes),
    interference=interference,
  )


def _encoded_per_s(model: Model, on: Accelerator) -> float:
  return _PER_ENGINE * on.flops * _USE_FLOPS / (2 * model.used)


def pools(
  model: Model, nodes: str, *, split: bool, interference: float
) -> tuple[simulate.EnginePool, ...]:
  """Returns the engines of so many nodes, with or without the split."""
  h800, h20 = (_ENGINES_A_NODE * number for number in NODES[nodes])
  decode = simulate.EnginePool(
    name="h20", engines=h20, speed=speed(model, H20, interference)
  )
  if split:
    prefill = prefill_pool.PrefillPool(
      engines=h800,
      ids_per_s=_encoded_per_s(model, H800),
      kv_bytes=model.kv_bytes,
      link=_LINK,
    )
    return (dataclasses.replace(decode, prefill=prefill),)
  compute = simulate.EnginePool(
    name="h800", engines=h800, speed=speed(model, H800, interference)
  )
  return compute, decode


def rollout_s(
  name: str,
  nodes: str,
  *,
  split: bool,
  rounds: int,
  interference: float = 1.0,
  reply: int = 400,
) -> tuple[float, float]:
  """Returns seconds of a rollout, mean over rounds, and the use of prefill."""
  engines = pools(MODELS[name], nodes, split=split, interference=interference)
  record = simulated.play(
    simulate.Simulation(
      cluster=simulate.Cluster(learner=_LEARNER, pools=engines, transfer_s=0.0),
      workloads=(
        dataclasses.replace(
          simulated.SWE, reply_tokens=distributions.Fixed(float(reply))
        ),
      ),
      overlap=overlap.sync(_GROUPS),
      rollout=simulated.SWE_ROLLOUT,
      rounds=rounds,
      warmup=0,
    )
  )
  seconds = statistics.mean(simulated.rounds_s(record))
  return seconds, record.prefill_use.get("h20", 0.0)


def row(name: str, nodes: str, **chosen: Any) -> dict[str, Any]:
  """Returns the gain of the split, of the rollout and of the step."""
  before_s, _ = rollout_s(name, nodes, split=False, **chosen)
  after_s, use = rollout_s(name, nodes, split=True, **chosen)
  gain = before_s / after_s
  step = 1.0 / (1.0 - _GENERATION + _GENERATION / gain)
  published = PUBLISHED_S.get((name, nodes))
  known = published[0] / published[1] if published else None
  return {
    "model": name,
    "nodes": nodes,
    "before_s": before_s,
    "after_s": after_s,
    "prefill use": use,
    "rollout gain": gain,
    "gain": step,
    "published": known,
    "error": simulated.deviation(step, known) if known else None,
  }


def sweep() -> list[dict[str, Any]]:
  """Returns rows under other assumptions, one round each."""
  return [
    {"interference": interference, "reply": reply}
    | row(*cell, rounds=1, interference=interference, reply=reply)
    for cell in PUBLISHED_S
    for interference, reply in ((0.0, 400), (1.0, 100), (1.0, 200), (0.5, 400))
  ]


def main(_: list[str]) -> None:
  """Predicts, prints and keeps."""
  rounds = simulated.ROUNDS.value
  rows = [row(name, nodes, rounds=rounds) for name in MODELS for nodes in NODES]
  machine.show("gain of the split", rows)
  others = sweep()
  machine.show("other assumptions", others)
  machine.keep("rollart_pd", rounds=rounds, rows=rows, sweep=others)


if __name__ == "__main__":
  app.run(main)
