"""Prints the placement and memory of a run, for `launch.train --explain`."""

import dataclasses
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import TextIO, get_args

import rich.console
import rich.table

from models import config as model_config
from models import memory_report, quantize, sharding
from models.attention import paged
from rl import assemble, memory_plan
from rl import experiment as experiment_lib
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement, weight_transfer
from rl.train import learner

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
  experiment = experiment.with_auto_dtype(experiment.placement.dtype())
  programs = assemble.learner_programs(
    experiment, experiment.placement.learner.plan
  )
  experiment, verdict = _fitted(experiment, programs)
  model = experiment.model
  count = memory_report.num_params(model)
  trained = "all" if model.lora is None else _count(count.trained)
  console.print(
    f"{_count(count.total)} parameters, of which a token uses "
    f"{_count(count.active)} and {trained} train"
  )
  pools = [None, *(experiment.placement.pools if experiment.decodes else ())]
  meshes = [*experiment.placement.meshes.items()][: len(pools)]
  for (name, spec), pool in zip(meshes, pools, strict=True):
    lines = (
      memory_plan.decode_bytes(experiment, spec)
      if pool
      else memory_plan.learner_bytes(experiment, programs)
    )
    words = _pool(pool, experiment) if pool else _learner(experiment)
    console.print(f"\n{_title(name, spec)}{words}\n")
    dtype = experiment.publishing.dtype if pool else "same"
    console.print(
      _parameters(weight_transfer.pool_model(model, dtype), spec.plan)
    )
    console.print()
    console.print(_totals(lines))
    engine = experiment.engine
    if pool and isinstance(engine, engine_settings.EngineSettings):
      platform = experiment.placement.planned_platform
      console.print(paged.describe(platform, model, engine.page_size))
  if shared := _shared(memory_plan.shares(experiment, programs)):
    console.print()
    console.print(shared)
  console.print(f"\n{verdict}")
  if is_absent(experiment.initial):
    console.print(
      f"initial={experiment.initial} has no weights yet: sizes are the config's"
    )


def is_absent(initial: str | None) -> bool:
  """Returns whether the weights of a run are missing; a plan needs none.

  A directory may have config.json alone, which is all that a plan reads.
  """
  if initial is None or os.path.isfile(initial):
    return False
  return not any(pathlib.Path(initial).glob("*.safetensors*"))


def _fitted(
  experiment: experiment_lib.Experiment, programs: learner.Learner
) -> tuple[experiment_lib.Experiment, str]:
  """Returns the experiment as it would run, and how it fits the devices."""
  memory = experiment.placement.memory()
  if memory is None:
    out = "placement.device_gib=80 plans for devices of 80 GiB"
    return experiment, f"the memory of the devices is not known here; {out}"
  size = memory_report.readable(memory.usable)
  all_of_it = "all of this host" if memory.is_shared else "each device"
  try:
    experiment = memory_plan.fit(experiment, programs, memory)
  except ValueError as error:
    return _least(experiment), f"it does not fit: {error}"
  return experiment, f"it fits the {size} that {all_of_it} can give"


def _least(experiment: experiment_lib.Experiment) -> experiment_lib.Experiment:
  """Returns the experiment with as few slots as it could do with, if unset."""
  engine, pools = experiment.engine, experiment.placement.pools
  if not isinstance(engine, engine_settings.EngineSettings) or engine.slots:
    return experiment
  slots = math.lcm(*(pool.mesh.plan.num_batch for pool in pools))
  engine = dataclasses.replace(engine, slots=slots)
  return dataclasses.replace(experiment, engine=engine)


def _shared(parts: Sequence[memory_plan.Share]) -> rich.table.Table | None:
  """Returns the sums of devices that the learner and engines share."""
  first, *engines = parts
  held = [0] * max(part.devices.stop for part in parts)
  for part in parts:
    for device in part.devices:
      held[device] += part.total
  both = {i for x in engines for i in x.devices if i in first.devices}
  if not both:
    return None
  table = _table("on a device that trains and decodes", "")
  table.add_row("total", memory_report.readable(max(held[i] for i in both)))
  return table


def _learner(experiment: experiment_lib.Experiment) -> str:
  """Returns the description of the learner, apart from its mesh."""
  count = experiment.placement.learner_processes
  if count == 1:
    return ""
  return (
    f", in {count} processes; the run's own holds a whole state while one is "
    "saved, restored or begun"
  )


def _pool(
  pool: placement.DecodePool, experiment: experiment_lib.Experiment
) -> str:
  """Returns the description of a decode pool, apart from its mesh."""
  words = "" if pool.name == "decode" else f", pool {pool.name}"
  words += "" if pool.kind == "any" else f" for {pool.kind}"
  words += f", {pool.replicas} replicas" if pool.replicas > 1 else ""
  if pool.role == "prefill":
    least = experiment.routing.min_prefill_ids
    words += f", which encodes {least} or more new ids for the other pools"
  if pool.processes:
    words += ", each in a process of its own; the memory that processes share"
    words += " holds a version of the weights, and the next while it arrives"
  dtype = experiment.publishing.dtype
  is_8_bit = dtype in get_args(quantize.Dtype)
  return words + (f", matrices in {dtype}" if is_8_bit else "")


def _title(name: str, spec: placement.MeshSpec) -> str:
  sizes = " x ".join(
    f"{axis} {getattr(spec, axis)}" for axis in sharding.MESH_AXES
  )
  devices = f"{spec.size:,} device{'s' * (spec.size != 1)}"
  return f"placement.{name}: {devices}, {sizes}"


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
      memory_report.readable(row.device_bytes),
    )
  return table


def _totals(lines: Mapping[str, int]) -> rich.table.Table:
  table = _table("on each device", "")
  for label, number in lines.items():
    table.add_row(label, memory_report.readable(number))
  table.add_row("total", memory_report.readable(sum(lines.values())))
  return table


def _table(*names: str) -> rich.table.Table:
  """Returns a table without lines; the last column is aligned right."""
  table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
  for name in names[:-1]:
    table.add_column(name, overflow="fold")
  table.add_column(names[-1], justify="right", no_wrap=True)
  return table


def _count(number: int) -> str:
  """Returns up to three digits: 12,345, 1.23 million, 235 billion."""
  for scale, unit in ((1e9, "billion"), (1e6, "million")):
    # What rounds up to one, as 999.9 million, is one.
    if round(number / scale, 3) >= 1:
      return f"{number / scale:.3g} {unit}"
  return f"{number:,}"
