"""The memory of a run on each device, and an engine that fits beside the rest.

Arithmetic on shapes: nothing is allocated, and devices need not exist. A device
that both trains and decodes has to hold the sum.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import config as model_config
from models import lora, memory_report, sharding
from models import policy as policy_lib
from rl import experiment as experiment_lib
from rl.algorithms import references
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.engine.builtin import sizing
from rl.loop import fine_tuning
from rl.pools import placement, weight_transfer
from rl.train import learner, train_state


class Share(NamedTuple):
  """The learner's or an engine's part of a plan.

  Attributes:
    lines: bytes on each of its devices, by purpose.
  """

  name: str
  devices: range
  lines: Mapping[str, int]

  @property
  def total(self) -> int:
    """Bytes on each of its devices."""
    return sum(self.lines.values())

  def __str__(self) -> str:
    sizes = self.lines.items()
    text = ", ".join(f"{x} {memory_report.readable(size)}" for x, size in sizes)
    return f"{self.name}: {text}"


def learner_bytes(
  experiment: experiment_lib.Experiment,
  programs: learner.Learner,
  *,
  trains: bool = True,
) -> dict[str, int]:
  """Returns bytes on each device of the learner, by purpose.

  Args:
    programs: on the learner's mesh, or on a plan of it.
    trains: False is a policy that only plays: what engines get weights from.
  """
  spec, batch = experiment.placement.learner, experiment.batch
  size = memory_report.device_bytes
  state = programs.abstract
  lines = {"parameters": size(state.params)}
  if not trains:
    return lines | _bucket(experiment)
  trained, _ = train_state.split(state.params, state.critic)
  sums = jax.tree.map(lambda x: x.update(dtype=jnp.float32), trained)
  label = "optimizer state, master copy" if state.master else "optimizer state"
  activations = f"activations, about, {batch.rows} x {batch.length} tokens"
  in_use = "parameters in use and their gradients, about"
  platform = experiment.placement.planned_platform
  kept = state.opt_state, state.master
  moved = jax.tree.map(_on_device, kept)
  # The memory of a CPU is that of its host.
  has_host = platform != "cpu"
  lines |= {
    "gradients, summed": size(sums),
    label: size(kept if has_host else moved),
    activations: (
      memory_report.activation_bytes(
        experiment.model,
        spec.plan,
        rows=batch.rows,
        length=batch.length,
        platform=platform,
      )
    ),
    in_use: memory_report.parameter_use_bytes(experiment.model, spec.plan),
  }
  # What comes from the host for a while is where these two were.
  room = lines[activations] + lines[in_use]
  if experiment.optimizer_memory == "host":
    lines["optimizer state in an update, beyond those"] = max(
      0, size(moved) - room
    )
  if experiment.decodes:
    versions = experiment.overlap.max_staleness + 1
    kept_bytes = versions * size(trained.policy)
    lines[f"versions kept of them, {versions}"] = kept_bytes
    lines |= _bucket(experiment)
  for reference in _references(experiment):
    memory = reference.memory
    model = experiment.model
    if isinstance(reference, references.Teacher):
      model = reference.model
    rows = memory_report.parameters(model, spec.plan)
    whole = sum(row.device_bytes for row in rows)
    if memory == "device" or not has_host:
      lines["reference"] = max(whole, lines.get("reference", 0))
    if memory == "host":
      lines["reference that scores, beyond those"] = max(0, whole - room)
  return lines


def _references(
  experiment: experiment_lib.Experiment,
) -> list[references.Initial | references.Teacher]:
  """Returns the references that have parameters: of rounds, of fine-tuning."""
  found, start = [experiment.algorithm.reference], experiment.warm_start
  if isinstance(start, fine_tuning.FineTuning):
    found.append(fine_tuning.reference(start, experiment.model))
  kinds = references.Initial, references.Teacher
  return [x for x in found if isinstance(x, kinds)]


def decode_bytes(
  experiment: experiment_lib.Experiment, spec: placement.MeshSpec | None = None
) -> dict[str, int]:
  """Returns bytes on each device of a decode pool, by purpose.

  The cache is included for the built-in engine only: other engines decide its
  size when they start.

  Args:
    spec: mesh of the pool; of the first pool by default.
  """
  spec, engine = spec or experiment.placement.decode, experiment.engine
  lines = _weight_bytes(experiment, spec)
  if isinstance(engine, engine_settings.EngineSettings):
    model, longest = _pool_model(experiment), experiment.rollout.max_tokens
    sizes = engine.sizes(model, [sizing.Room(spec.plan)], longest)
    lines |= sizing.lines(sizes, model, spec.plan, engine.extras)
  return lines


def shares(
  experiment: experiment_lib.Experiment,
  programs: learner.Learner,
  decoding: Callable[..., dict[str, int]] = decode_bytes,
  *,
  trains: bool = True,
) -> list[Share]:
  """Returns the shares of the learner, and then of every engine that starts.

  Args:
    decoding: (experiment, mesh) -> lines of an engine.
    trains: see `learner_bytes`; all engines start to play.
  """
  place = experiment.placement
  named = [("learner", learner_bytes(experiment, programs, trains=trains))]
  for pool in place.pools if experiment.decodes or not trains else ():
    named += [(pool.name, decoding(experiment, pool.mesh))] * pool.replicas
  ranges = place.ranges[: len(named)]
  return [
    Share(name, devices, lines)
    for (name, lines), devices in zip(named, ranges, strict=True)
  ]


def fit(
  experiment: experiment_lib.Experiment,
  programs: learner.Learner,
  memory: placement.Memory | None,
  longest: int | None = None,
  *,
  trains: bool = True,
) -> experiment_lib.Experiment:
  """Returns the experiment with an engine that fits beside all the rest.

  Sizes of the built-in engine that are not set follow from the memory that
  weights and training leave; see `EngineSettings.sizes`.

  Args:
    memory: of the devices; None is not known, and then nothing is checked.
    longest: conversation to expect; None is `rollout.max_tokens`.
    trains: see `learner_bytes`.

  Raises:
    ValueError: the run does not fit.
  """
  if memory is None:
    return experiment
  words = _RUN if trains else _SERVED
  engine = experiment.engine
  built_in = isinstance(engine, engine_settings.EngineSettings)
  if built_in and (experiment.decodes or not trains):
    parts = shares(experiment, programs, _weight_bytes, trains=trains)
    _check(parts, memory, words)
    # Estimates may be half of it, and the engine can do with less.
    lines = parts[0].lines
    margin = sum(size for name, size in lines.items() if "about" in name)
    parts[0] = parts[0]._replace(lines={**lines, "margin": margin})
    rooms = _rooms(parts, experiment.placement, memory)
    sizes = engine.sizes(
      _pool_model(experiment), rooms, longest or experiment.rollout.max_tokens
    )
    engine = dataclasses.replace(engine, **dataclasses.asdict(sizes))
    experiment = dataclasses.replace(experiment, engine=engine)
  _check(shares(experiment, programs, trains=trains), memory, words)
  return experiment


def fit_served(
  engine: contract.EngineSpec,
  model: model_config.ModelConfig,
  place: placement.Placement,
  memory: placement.Memory | None,
) -> tuple[contract.EngineSpec, list[Share]]:
  """Returns an engine that fits beside weights that are only served.

  Sizes follow as in `fit`, for conversations as long as the model's.

  Returns:
    The engine, and the share of every engine.

  Raises:
    ValueError: weights and engines do not fit.
  """

  def held(
    engine_lines: Callable[[sharding.Layout], dict[str, int]] = lambda _: {},
  ) -> list[Share]:
    named = []
    for pool in place.pools:
      plan = pool.mesh.plan
      weights = memory_report.parameters(model, plan)
      lines = {"parameters": sum(row.device_bytes for row in weights)}
      lines |= engine_lines(plan)
      named += [(pool.name, lines)] * pool.replicas
    return [
      Share(name, devices, lines)
      for (name, lines), devices in zip(named, place.ranges[1:], strict=True)
    ]

  parts = held()
  if memory is not None:
    _check(parts, memory, _SERVED)
  if isinstance(engine, engine_settings.EngineSettings):
    rooms = [sizing.Room(pool.mesh.plan) for pool in place.pools]
    if memory is not None:
      rooms = _rooms(parts, place, memory)
    sizes = engine.sizes(model, rooms)
    engine = dataclasses.replace(engine, **dataclasses.asdict(sizes))
    parts = held(
      functools.partial(sizing.lines, sizes, model, extras=engine.extras)
    )
  if memory is not None:
    _check(parts, memory, _SERVED)
  return engine, parts


def _rooms(
  parts: Sequence[Share], place: placement.Placement, memory: placement.Memory
) -> list[sizing.Room]:
  """Returns what all of these leave to the engines of each pool.

  Args:
    parts: of the learner, if there is one, and then of every engine.
  """
  first = len(parts) - sum(pool.replicas for pool in place.pools)
  left = [memory.usable] * len(parts)
  for members in _memories(parts, memory):
    # The margin of `fit` may be more than there is.
    free = max(0, memory.usable - sum(parts[i].total for i in members))
    engines = [i for i in members if i >= first]
    for i in engines:
      left[i] = min(left[i], free // len(engines))
  rooms = []
  for pool in place.pools:
    least = min(left[first : first + pool.replicas])
    rooms.append(sizing.Room(pool.mesh.plan, least))
    first += pool.replicas
  return rooms


_RUN = (
  "the run",
  "lower batch.rows, batch.length, rollout.max_tokens, overlap.max_staleness "
  "or engine.slots, train adapters (model.lora), use model.compute.dtype="
  "bfloat16, on an accelerator keep a part on its host (optimizer_memory=host, "
  "model.compute.remat=host), or split placement.learner or placement.decode "
  "over more devices",
)
_SERVED = (
  "the served model",
  "lower engine.slots or model.max_length, use model.compute.dtype=bfloat16, "
  "or split placement.decode over more devices",
)


def _check(
  parts: Sequence[Share], memory: placement.Memory, words: tuple[str, str]
) -> None:
  """Raises ValueError if a memory would have to hold more than it can.

  Args:
    words: a name for all parts together, and the way out.
  """

  def held(members):
    return sum(parts[i].total for i in members)

  fullest = max(_memories(parts, memory), key=held)
  if held(fullest) <= memory.usable:
    return
  text = memory_report.readable
  listing = "".join(f"\n  {parts[i]}" for i in dict.fromkeys(fullest))
  where = "this host" if memory.is_shared else "a device"
  whole, out = words
  raise ValueError(
    f"{whole} takes {text(held(fullest))} of {where}, where "
    f"{text(memory.usable)} can be used:{listing}\n{out}"
  )


def _memories(
  parts: Sequence[Share], memory: placement.Memory
) -> list[list[int]]:
  """Returns for each memory the numbers of the parts in it.

  A part that has several devices in a memory is in it several times.
  """
  if memory.is_shared:
    return [[i for i, part in enumerate(parts) for _ in part.devices]]
  last = max(part.devices.stop for part in parts)
  return [
    [i for i, part in enumerate(parts) if device in part.devices]
    for device in range(last)
  ]


def _on_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return leaf.update(sharding=leaf.sharding.with_memory_kind("device"))


def _pool_model(
  experiment: experiment_lib.Experiment,
) -> model_config.ModelConfig:
  dtype = experiment.publishing.dtype
  return weight_transfer.pool_model(experiment.model, dtype)


def _bucket(experiment: experiment_lib.Experiment) -> dict[str, int]:
  """Returns bytes on each learner device of the largest bucket, once cast."""
  publishing = experiment.publishing
  if publishing.dtype == "same":
    return {}  # They are copied as they are.
  model, plan = experiment.model, experiment.placement.learner.plan
  shapes = policy_lib.of(model).shapes
  cast = weight_transfer.pool_shapes(model, publishing.dtype)
  placed = memory_report.placed(
    cast, weight_transfer.pool_shardings(model, plan, publishing.dtype)
  )
  leaves, tree = jax.tree.flatten(lora.split(shapes)[0])
  arrays = tree.flatten_up_to(lora.split(placed)[0])
  runs = weight_transfer.buckets(
    [leaf.size * leaf.dtype.itemsize for leaf in leaves],
    publishing.bucket_bytes,
  )
  largest = max(
    memory_report.device_bytes([arrays[i] for i in run]) for run in runs
  )
  return {"a bucket of weights to publish, cast": largest}


def _weight_bytes(
  experiment: experiment_lib.Experiment, spec: placement.MeshSpec
) -> dict[str, int]:
  """Returns bytes of the weights on each device of a pool."""
  dtype = experiment.publishing.dtype
  shapes = weight_transfer.pool_shapes(experiment.model, dtype)
  places = weight_transfer.pool_shardings(experiment.model, spec.plan, dtype)
  held = memory_report.placed(shapes, places)
  arriving, _ = lora.split(held)
  return {
    "parameters": memory_report.device_bytes(held),
    "their next version, arriving": memory_report.device_bytes(arriving),
  }
