"""What loading and exporting a Hugging Face checkpoint cost the host.

  XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
      python -m benchmarks.checkpoints

Exports a random bfloat16 mixture of experts, with its parameters split over
the devices, and loads it again. Host memory is what numpy holds at most, which
tracemalloc sees and which does not count what lies on devices; it is measured
in a run of its own, because tracing slows the host down. It is set beside the
largest leaf, a layer's stack of experts, and the whole model. Writes
benchmarks/results/checkpoints.json.
"""

import functools
import pathlib
import tempfile
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
from absl import app

from benchmarks import machine, small_parts
from models import config as config_lib
from models import sharding
from models.hf import export, load
from rl.pools import placement

CONFIG = config_lib.tiny_moe(
  vocab_size=32_768,
  num_layers=12,
  d_model=512,
  num_heads=8,
  num_kv_heads=4,
  head_dim=64,
  d_expert=256,
  num_experts=32,
  experts_per_token=4,
  compute=config_lib.Compute(dtype="bfloat16"),
)


def _host_peak(call: Callable[[], Any]) -> int:
  tracemalloc.start()
  jax.block_until_ready(call())
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  return peak


def _measure(layout: sharding.Layout, root: pathlib.Path) -> dict[str, float]:
  params = jax.block_until_ready(small_parts.weights(CONFIG, layout))
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  read = functools.partial(load.load, root / "0", CONFIG, layout)

  def write(name: str) -> None:
    export.export(root / name, params, CONFIG)

  mib = 1 / (1 << 20)
  return {
    "devices": layout.mesh.size,
    "model MiB": sum(sizes) * mib,
    "largest leaf MiB": max(sizes) * mib,
    "largest shard MiB": max(sizes) * mib / layout.mesh.size,
    "export s": machine.timed(lambda: write("0"))[0],
    "load s": machine.timed(read)[0],
    "load host peak MiB": _host_peak(read) * mib,
    "export host peak MiB": _host_peak(lambda: write("1")) * mib,
  }


def main(_: list[str]) -> None:
  """Measures and prints; all devices hold a part of every matrix."""
  devices = len(jax.devices())
  spec = placement.MeshSpec(data=devices)
  layout = placement.Placement(learner=spec, colocated=True).layouts()[0]
  with tempfile.TemporaryDirectory() as root:
    row = _measure(layout, pathlib.Path(root))
  print(machine.describe())
  machine.show("a checkpoint", [row])
  machine.keep("checkpoints", **row)


if __name__ == "__main__":
  app.run(main)
