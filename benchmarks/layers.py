"""Deep models: layers that are scanned against layers that are unrolled.

  python -m benchmarks.layers [--depths=4,16,48] [--repeats=5]

The models of benchmarks/train_step.py, narrower and of as many layers as are
named, on one device. Two programs of each: the gradient of a micro-batch, and a
decode step of 8 rows. CPU seconds of the first call, in which it is traced and
compiled without a cache of programs, and milliseconds of the calls after, the
forms in turn. Writes benchmarks/results/layers.json.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags

from benchmarks import machine, small_parts
from models import config as model_config
from models import sharding
from rl.data import batch
from rl.engine.builtin import dispatch_shapes, model_runner

_DEPTHS = flags.DEFINE_list("depths", ["4", "16", "48"], "Numbers of layers.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each form.")
_FORMS = ("unroll", "scan")
_SIZES: dict[str, Any] = {
  "d_model": 64, "head_dim": 16, "d_ff": 128, "d_expert": 64, "max_length": 128,
}  # fmt: skip
_MODELS = {"dense": model_config.tiny, "4 experts": model_config.tiny_moe}


def _programs(
  config: model_config.ModelConfig,
) -> dict[str, Callable[[], object]]:
  """Returns calls of programs by name."""
  layout = sharding.Layout(sharding.make_mesh())
  params = small_parts.weights(config)
  programs = small_parts.programs(config, layout)
  packed = batch.empty(8, 64)
  shapes = dispatch_shapes.DispatchShapes(
    slots=8, row_buckets=(8,), chunk_buckets=(4,), steps_per_dispatch=2
  )
  runner = model_runner.ModelRunner(config, shapes, layout, bias_slots=0)
  runner.allocate()
  (shape, *_) = runner.shapes

  return {
    "gradient": lambda: programs.accumulate(params, None, packed),
    "decode": lambda: runner.warm_up(params, shape),
  }


def _row(model: str, depth: int) -> list[dict[str, Any]]:
  """Returns what each program of a model costs in each form."""
  calls, first_s = {}, {}
  for form in _FORMS:
    config = dataclasses.replace(
      _MODELS[model](num_layers=depth, **_SIZES),
      compute=model_config.Compute(layers=form),
    )
    for name, call in _programs(config).items():
      calls[form, name] = call
      _, first_s[form, name] = machine.timed(call)
  took_s = {key: [] for key in calls}
  for _ in range(_REPEATS.value):
    for key, call in calls.items():
      _, cpu_s = machine.timed(call)
      took_s[key].append(cpu_s)
  return [
    {
      "model": model,
      "layers": depth,
      "program": name,
      **{f"{form}, first s": first_s[form, name] for form in _FORMS},
      **{
        f"{form}, ms": 1e3 * statistics.median(took_s[form, name])
        for form in _FORMS
      },
    }
    for name in ("gradient", "decode")
  ]


def main(_: list[str]) -> None:
  """Measures every depth and prints a row for each program."""
  jax.config.update("jax_enable_compilation_cache", False)
  _row("dense", 1)  # What only the first program of a process pays.
  rows = []
  for model in _MODELS:
    for depth in map(int, _DEPTHS.value):
      for row in _row(model, depth):
        print(row, flush=True)
        rows.append(row)
  machine.keep("layers", rows=rows)


if __name__ == "__main__":
  app.run(main)
