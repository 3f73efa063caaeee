"""Starts the engine of a server, from a run or a Hugging Face directory."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping

import jax

from launch.cli import jax_setup, workdir
from launch.run import load_run
from models import config as model_config
from models import definition, memory_report, sharding
from models import policy as policy_lib
from models.hf import config as hf_config
from models.hf import load
from rl import assemble, memory_plan
from rl import experiment as experiment_lib
from rl.agents import answer_stream
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement as placement_lib
from rl.pools import router
from rl.rollout import chats
from rl.rollout import episode as episode_lib
from rl.runtime import mesh_thread, trace
from rl.settings import checks, overrides

_MAX_LENGTH = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
  """A started engine with its chat.

  Attributes:
    name: of the model.
    temperature: at which a learner would score its samples.
  """

  engine: answer_stream.ServedEngine
  chat: episode_lib.Chat
  name: str
  temperature: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosting:
  """Settings for decoding the model of a Hugging Face directory.

  Attributes:
    model: conversations have at most `max_length` ids.
    engine: sizes that are not set follow from the memory of the devices.
    placement: of the decode pool; the learner mesh is unused.
    chat: of the directory itself, unless it names another.
  """

  model: model_config.ModelConfig
  engine: contract.EngineSpec = engine_settings.EngineSettings()
  placement: placement_lib.Placement = placement_lib.Placement(colocated=True)
  chat: chats.Hf = chats.Hf()

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work; touches no device."""
    checks.validate_parts(self)
    self.engine.validate_model(self.model)
    for name, spec in self.placement.meshes.items():
      if name != "learner":
        sharding.validate(
          self.model,
          policy_lib.of(self.model).axes,
          spec.plan,
          rows=self.engine.split_rows,
          where=f"placement.{name}",
        )


def read_run(
  run_dir: str | os.PathLike[str], changes: Mapping[str, str | None]
) -> experiment_lib.Experiment:
  """Returns the checked settings of a run, with changes by dotted path.

  Raises:
    ValueError: the run does not exist, or cannot be served with these settings.
  """
  experiment = workdir.read_trained(run_dir)
  experiment = overrides.apply(experiment, changes)
  load_run.prepare(experiment, run_dir)
  # Unlike those of the run, conversations may be as long as the model's.
  return assemble.fit(experiment, experiment.model.max_length, trains=False)


def read_directory(
  directory: str, changes: Mapping[str, str | None]
) -> Hosting:
  """Returns the checked settings of a Hugging Face checkpoint.

  Conversations have up to 4096 ids, or `model.max_length` of `changes`.

  Raises:
    ValueError: the checkpoint does not exist, or cannot be served with these
      settings, or on these devices.
  """
  model = hf_config.load(directory)
  length = min(model.max_length, _MAX_LENGTH)
  hosting = Hosting(model=dataclasses.replace(model, max_length=length))
  hosting = overrides.apply(hosting, changes)
  hosting.validate()
  load.check(directory, hosting.model)
  jax_setup.prepare(hosting.placement)
  return _fitted(hosting)[0]


def memory(hosting: Hosting) -> str:
  """Returns a sentence on what the devices will hold; allocates nothing."""
  return _fitted(hosting)[1]


def _fitted(hosting: Hosting) -> tuple[Hosting, str]:
  """Returns settings that fit the devices, and what these will hold.

  Allocates nothing.
  """
  _, *layouts = hosting.placement.layouts()
  devices = {x for layout in layouts for x in layout.devices}
  dtype = hosting.placement.dtype(layouts[0].devices)
  model = hosting.model.with_auto_dtype(dtype)
  hosting = dataclasses.replace(hosting, model=model)
  memory = hosting.placement.memory(list(devices))
  engine, parts = memory_plan.fit_served(
    hosting.engine, hosting.model, hosting.placement, memory
  )
  room = "an unknown size; placement.device_gib=80 plans for 80 GiB"
  if memory is not None:
    room = memory_report.readable(memory.usable)
  where = "this host" if memory and memory.is_shared else "each device"
  plan = f"memory of {where}, of {room}: {'; '.join(map(str, parts))}"
  return dataclasses.replace(hosting, engine=engine), plan


@contextlib.asynccontextmanager
async def of_run(
  experiment: experiment_lib.Experiment,
  run_dir: pathlib.Path,
  report: Callable[[str], None],
) -> AsyncIterator[ServedModel]:
  """Serves the newest checkpoint of a run; ends the process without one."""
  report("loading the weights")
  async with load_run.restored(experiment, run_dir) as (parts, found):
    version = found.step
    await parts.start(found.state, version, report)
    yield ServedModel(
      engine=parts.router,
      chat=parts.chat,
      name=run_dir.resolve().name,
      temperature=experiment.rollout.temperature,
    )


@contextlib.asynccontextmanager
async def of_directory(
  hosting: Hosting,
  directory: pathlib.Path,
  chat: episode_lib.Chat,
  report: Callable[[str], None],
) -> AsyncIterator[ServedModel]:
  """Serves a Hugging Face checkpoint, as version 0."""
  _, *layouts = hosting.placement.layouts()
  spans = trace.Trace(None)
  threads = [mesh_thread.MeshThread("decode", spans) for _ in layouts]
  engines = assemble.engines(hosting.engine, hosting.model, layouts, threads)
  serving = router.Router(engines, infos=hosting.placement.engine_infos)
  try:
    for engine, layout, thread in zip(engines, layouts, threads, strict=True):
      params = await thread.run(
        "load", _load, directory, hosting.model, layout, report
      )
      await engine.start(params, 0, report)
    yield ServedModel(engine=serving, chat=chat, name=directory.resolve().name)
  finally:
    for engine in engines:
      await engine.close()
    for thread in threads:
      thread.close()


def _load(
  directory: pathlib.Path,
  model: model_config.ModelConfig,
  layout: sharding.Layout,
  report: Callable[[str], None],
) -> definition.Params:
  with jax.transfer_guard("allow"):
    return load.load(directory, model, layout, report)
