"""What `launch.train --explain` prints: what lies where, and its memory."""

import shutil
from collections.abc import Mapping
from typing import TextIO

import jax
import rich.console
import rich.table

from models import config as model_config
from models import explain, lora, sharding, transformer
from rl import config, learner, placement

_LEAST_WIDTH = 100
_SHORT = {"float32": "f32", "bfloat16": "bf16"}


def show(experiment: config.Experiment, stream: TextIO) -> None:
  """Prints both pools of a validated experiment.

  No device of the placement need exist: jax is only asked for shapes.
  """
  # Lines that are cut are worse than lines that a narrow terminal wraps.
  width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
  console = rich.console.Console(
    file=stream, markup=False, emoji=False, highlight=False, width=width
  )
  model = experiment.model
  total, active = model_config.num_params(model)
  trained = model_config.num_trainable(model)
  console.print(
    f"{_count(total)} parameters, of which a token uses {_count(active)} and "
    f"{'all' if trained == total else _count(trained)} train"
  )
  for name, lines in (
    ("learner", learner_bytes(experiment)),
    ("decode", decode_bytes(experiment)),
  ):
    spec = getattr(experiment.placement, name)
    console.print(f"\n{_title(name, spec)}\n")
    console.print(_parameters(model, spec.plan))
    console.print()
    console.print(_totals(lines))


def learner_bytes(experiment: config.Experiment) -> dict[str, int]:
  """Returns bytes on each device of the learner by what they are for."""
  spec, batch = experiment.placement.learner, experiment.batch
  programs = learner.build(
    experiment.model,
    spec.plan,
    experiment.objective,
    experiment.optimizer(),
    experiment.rollout.temperature,
  )
  state = programs.abstract
  sums = jax.eval_shape(programs.zero)
  trained, _ = lora.split(state.params)
  sums = explain.placed(sums.grads, jax.tree.map(lambda x: x.sharding, trained))
  kept = (state.opt_state, state.master)
  label = "optimizer state, master copy" if state.master else "optimizer state"
  activations = explain.activation_bytes(
    experiment.model,
    spec.plan,
    rows=batch.rows,
    length=batch.length,
    platform=experiment.placement.platform or "cpu",
  )
  return {
    "parameters": explain.device_bytes(state.params),
    "gradients, summed": explain.device_bytes(sums),
    label: explain.device_bytes(kept),
    f"activations, about, {batch.rows} x {batch.length} tokens": activations,
  }


def decode_bytes(experiment: config.Experiment) -> dict[str, int]:
  """Returns bytes on each device of the decode pool by what they are for."""
  model, slots = experiment.model, experiment.engine.slots
  layout = experiment.placement.decode.plan
  places = layout.tree(transformer.logical_axes(model))
  held = explain.placed(transformer.shapes(model), places)
  arriving, _ = lora.split(held)

  def cache(rows):
    return explain.cache_bytes(
      model, layout, rows=rows, length=model.max_length
    )

  lines = {
    "parameters": explain.device_bytes(held),
    "their next version, arriving": explain.device_bytes(arriving),
    f"KV cache, {slots} x {model.max_length} tokens": cache(slots),
  }
  smaller = [rows for rows in experiment.engine.rows if rows < slots]
  if smaller:
    # Fewer rows than the cache has are copied out of it for a dispatch.
    lines[f"of it, {smaller[-1]} rows in a dispatch"] = cache(smaller[-1])
  return lines


def _title(name: str, spec: placement.MeshSpec) -> str:
  sizes = " x ".join(
    f"{axis} {getattr(spec, axis)}" for axis in sharding.MESH_AXES
  )
  return f"placement.{name}: {_plural(spec.size, 'device')}, {sizes}"


def _parameters(
  model: model_config.ModelConfig, layout: sharding.Layout
) -> rich.table.Table:
  table = _table("parameter", "shape", "axes:mesh", "dtype", "per device")
  for row in explain.parameters(model, layout):
    table.add_row(
      row.name,
      "x".join(map(str, row.shape)),
      " ".join(
        ":".join([axis, ",".join(layout.rules.of(axis))]).rstrip(":")
        for axis in row.axes
      ),
      _SHORT.get(row.dtype, row.dtype),
      _bytes(row.device_bytes),
    )
  return table


def _totals(lines: Mapping[str, int]) -> rich.table.Table:
  table = _table("on each device", "")
  for label, number in lines.items():
    table.add_row(label, _bytes(number))
  table.add_row("total", _bytes(sum(lines.values())))
  return table


def _table(*names: str) -> rich.table.Table:
  """Returns a table without lines whose last column is of numbers."""
  table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
  for name in names[:-1]:
    table.add_column(name, overflow="fold")
  table.add_column(names[-1], justify="right", no_wrap=True)
  return table


def _bytes(number: int) -> str:
  """Returns three digits or so: 345 B, 1.2 KiB, 12 GiB."""
  size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
  while size >= 1000 and len(units) > 1:
    size /= 1024
    units.pop(0)
  digits = 0 if units[0] == "B" else 2 if size < 10 else 1 if size < 100 else 0
  return f"{size:.{digits}f} {units[0]}"


def _count(number: int) -> str:
  """Returns three digits or so: 12,345, 1.23 million, 235 billion."""
  for scale, unit in ((1e9, "billion"), (1e6, "million")):
    if number >= scale:
      return f"{number / scale:.3g} {unit}"
  return f"{number:,}"


def _plural(number: int, noun: str) -> str:
  return f"{number} {noun}{'s' * (number != 1)}"
