"""Prints the placement and memory of a run, for `launch.train --explain`."""

import functools
import shutil
from collections.abc import Mapping
from typing import TextIO

import jax
import rich.console
import rich.table

from models import config as model_config
from models import lora, memory_report, sharding
from models import policy as policy_lib
from rl import assemble
from rl import experiment as experiment_lib
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement, weight_publisher
from rl.train import train_state

_MIN_WIDTH = 100
_SHORT = {"float32": "f32", "bfloat16": "bf16"}


def show(experiment: experiment_lib.Experiment, stream: TextIO) -> None:
  """Prints the learner and the decode pools of a validated experiment.

  The devices of the placement need not exist: only shapes are traced.
  """
  # Better wrapped by a narrow terminal than cut.
  width = max(_MIN_WIDTH, shutil.get_terminal_size().columns)
  console = rich.console.Console(
    file=stream, markup=False, emoji=False, highlight=False, width=width
  )
  model = experiment.model
  count = memory_report.num_params(model)
  trained = "all" if model.lora is None else _count(count.trained)
  console.print(
    f"{_count(count.total)} parameters, of which a token uses "
    f"{_count(count.active)} and {trained} train"
  )
  pools = [None, *experiment.placement.pools]
  for (name, spec), pool in zip(
    experiment.placement.meshes.items(), pools, strict=True
  ):
    lines = (
      decode_bytes(experiment, spec) if pool else learner_bytes(experiment)
    )
    words = _pool(pool, experiment) if pool else ""
    console.print(f"\n{_title(name, spec)}{words}\n")
    dtype = experiment.publishing.dtype if pool else "same"
    console.print(
      _parameters(weight_publisher.pool_model(model, dtype), spec.plan)
    )
    console.print()
    console.print(_totals(lines))


def learner_bytes(experiment: experiment_lib.Experiment) -> dict[str, int]:
  """Returns bytes on each device of the learner, by purpose."""
  spec, batch = experiment.placement.learner, experiment.batch
  programs = assemble.learner_programs(experiment, spec.plan)
  state = programs.abstract
  sums = jax.eval_shape(programs.zero)
  trained, _ = train_state.split(state.params, state.critic)
  sums = memory_report.placed(
    sums.grads, jax.tree.map(lambda x: x.sharding, trained)
  )
  kept = (state.opt_state, state.master)
  label = "optimizer state, master copy" if state.master else "optimizer state"
  activations = memory_report.activation_bytes(
    experiment.model,
    spec.plan,
    rows=batch.rows,
    length=batch.length,
    platform=experiment.placement.platform or "cpu",
  )
  return {
    "parameters": memory_report.device_bytes(state.params),
    "gradients, summed": memory_report.device_bytes(sums),
    label: memory_report.device_bytes(kept),
    f"activations, about, {batch.rows} x {batch.length} tokens": activations,
  }


def decode_bytes(
  experiment: experiment_lib.Experiment, spec: placement.MeshSpec | None = None
) -> dict[str, int]:
  """Returns bytes on each device of a decode pool, by purpose.

  The cache is included for the built-in engine only: other engines decide its
  size when they start.

  Args:
    spec: mesh of the pool; of the first pool by default.
  """
  model, engine = experiment.model, experiment.engine
  layout = (spec or experiment.placement.decode).plan
  dtype = experiment.publishing.dtype
  model = weight_publisher.pool_model(model, dtype)
  shapes = jax.eval_shape(
    functools.partial(weight_publisher.cast, dtype=dtype),
    policy_lib.of(experiment.model).shapes,
  )
  places = weight_publisher.pool_shardings(experiment.model, layout, dtype)
  held = memory_report.placed(shapes, places)
  arriving, _ = lora.split(held)
  lines = {
    "parameters": memory_report.device_bytes(held),
    "their next version, arriving": memory_report.device_bytes(arriving),
  }
  if isinstance(engine, engine_settings.EngineSettings):
    lines |= _cache_lines(model, engine, layout)
  return lines


def _cache_lines(
  model: model_config.ModelConfig,
  engine: engine_settings.EngineSettings,
  layout: sharding.Layout,
) -> dict[str, int]:
  """Returns bytes of the pages, and of the largest dispatch's copy of them."""
  pages, size = engine.num_pages(model.max_length), engine.page_size
  width, rows = engine.width(model.max_length), engine.rows[-1]
  held = memory_report.cache_bytes(model, layout, pages=pages, page_size=size)
  copied = memory_report.past_bytes(
    model, layout, rows=rows, pages=width, page_size=size
  )
  return {
    f"KV cache, {pages * size:,} tokens in {_plural(pages, 'page')}": held,
    f"copied of it, {rows} rows of {width * size:,} tokens": copied,
  }


def _pool(
  pool: placement.DecodePool, experiment: experiment_lib.Experiment
) -> str:
  """Returns the description of a decode pool, apart from its mesh."""
  words = "" if pool.name == "decode" else f", pool {pool.name}"
  words += "" if pool.kind == "any" else f" for {pool.kind}"
  words += f", {pool.replicas} replicas" if pool.replicas > 1 else ""
  int8 = experiment.publishing.dtype == "int8"
  return words + (", matrices in int8" if int8 else "")


def _title(name: str, spec: placement.MeshSpec) -> str:
  sizes = " x ".join(
    f"{axis} {getattr(spec, axis)}" for axis in sharding.MESH_AXES
  )
  return f"placement.{name}: {_plural(spec.size, 'device')}, {sizes}"


def _parameters(
  model: model_config.ModelConfig, layout: sharding.Layout
) -> rich.table.Table:
  table = _table("parameter", "shape", "axes:mesh", "dtype", "per device")
  for row in memory_report.parameters(model, layout):
    table.add_row(
      row.name,
      "x".join(map(str, row.shape)),
      " ".join(
        ":".join([axis or "-", ",".join(layout.rules.of(axis))]).rstrip(":")
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
  """Returns a table without lines; the last column is aligned right."""
  table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
  for name in names[:-1]:
    table.add_column(name, overflow="fold")
  table.add_column(names[-1], justify="right", no_wrap=True)
  return table


def _bytes(number: int) -> str:
  """Returns up to three digits: 345 B, 1.2 KiB, 12 GiB."""
  size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
  while size >= 1000 and len(units) > 1:
    size /= 1024
    units.pop(0)
  digits = 0 if units[0] == "B" else 2 if size < 10 else 1 if size < 100 else 0
  return f"{size:.{digits}f} {units[0]}"


def _count(number: int) -> str:
  """Returns up to three digits: 12,345, 1.23 million, 235 billion."""
  for scale, unit in ((1e9, "billion"), (1e6, "million")):
    if number >= scale:
      return f"{number / scale:.3g} {unit}"
  return f"{number:,}"


def _plural(number: int, noun: str) -> str:
  return f"{number:,} {noun}{'s' * (number != 1)}"
