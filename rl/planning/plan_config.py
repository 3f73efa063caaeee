"""A planned choice as the settings of a run, and as a config file."""

import dataclasses
from typing import Any

from rl import experiment
from rl.planning import problem as problem_lib
from rl.pools import affinity, placement

_FIELDS = tuple(
  field.name
  for field in dataclasses.fields(problem_lib.overlap_lib.Overlap)
  if field.name not in ("old_logprob", "too_slow_after", "redundancy")
)


def overlap_fields(choice: problem_lib.FleetChoice) -> dict[str, Any]:
  """Returns the schedule fields that a choice sets; others keep the base's."""
  return {name: getattr(choice.overlap, name) for name in _FIELDS}


def meshes(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  base: placement.Placement,
) -> dict[str, tuple[int, int]]:
  """Returns (data axis, first device) of the learner and of each pool.

  Devices of a kind stand side by side, its learner before its engines. The
  other axes of the base's meshes stay, so only `data` grows.

  Raises:
    ValueError: the other axes do not divide the devices.
  """
  kinds = problem.fleet.by_name
  meshes_by_name = {
    "learner": (
      _over(choice.devices, base.learner, "placement.learner"),
      problem.fleet.first_device(choice.learner),
    )
  }
  for name, _ in choice.engines:
    taken = choice.devices if name == choice.learner else 0
    meshes_by_name[name] = (
      _over(kinds[name].engine_devices, base.decode, "placement.decode"),
      problem.fleet.first_device(name) + taken,
    )
  return meshes_by_name


def _over(devices: int, mesh: placement.MeshSpec, where: str) -> int:
  others = mesh.size // mesh.data
  if devices % others:
    raise ValueError(
      f"{devices} devices are not divided by {where}.expert * context * tensor="
      f"{others} of the base"
    )
  return devices // others


def apply(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  base: experiment.Experiment,
) -> experiment.Experiment:
  """Returns the base with the schedule, placement and routing of a choice.

  Raises:
    ValueError: its meshes cannot be split so, or some of its engines only
      encode; nothing else is checked.
  """
  if choice.prefill:
    raise ValueError(
      "no config is written for engines that only encode: declare them in "
      "placement.more with role=prefill, or plan with space.prefill_points=0"
    )
  where, place = meshes(problem, choice, base.placement), base.placement
  kinds, (first, *others) = problem.fleet.by_name, choice.engines
  pools = [
    placement.DecodePool(
      name=name,
      mesh=dataclasses.replace(
        place.decode, data=where[name][0], first_device=where[name][1]
      ),
      replicas=count,
      kind=kinds[name].kind,
      cost=_cost(problem, name),
    )
    for name, count in (first, *others)
  ]
  data, device = where["learner"]
  publishing = base.publishing
  if choice.bucket_bytes is not None:
    size = int(choice.bucket_bytes)
    publishing = dataclasses.replace(publishing, bucket_bytes=size)
  return dataclasses.replace(
    base,
    publishing=publishing,
    overlap=dataclasses.replace(
      base.overlap,
      **overlap_fields(choice),
      redundancy=choice.overlap.redundancy,
    ),
    placement=dataclasses.replace(
      place,
      learner=dataclasses.replace(
        place.learner, data=data, first_device=device
      ),
      decode=pools[0].mesh,
      replicas=pools[0].replicas,
      decode_kind=pools[0].kind,
      decode_cost=pools[0].cost,
      more=tuple(pools[1:]),
      colocated=False,
    ),
    routing=routing(problem, base),
  )


def routing(
  problem: problem_lib.Planning, base: experiment.Experiment
) -> affinity.Routing:
  """Returns the planned routing for the tasks that the base has."""
  return problem.routing.of([source.name for source in base.sources])


def misfit(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  base: experiment.Experiment,
) -> str | None:
  """Returns the reason why the base cannot run a choice, or None."""
  try:
    apply(problem, choice, base).validate()
  except ValueError as error:
    return str(error)
  return None


def check_base(
  problem: problem_lib.Planning, base: experiment.Experiment
) -> None:
  """Raises ValueError when the problem plans other episodes than the base's."""
  ours, theirs = vars(problem.rollout), vars(base.rollout)
  names = ("group_size", "max_turns", "turn_tokens", "max_tokens")
  wrong = [name for name in names if ours[name] != theirs[name]]
  if wrong:
    found = ", ".join(f"rollout.{name}={ours[name]}" for name in wrong)
    way = " ".join(f"--config.rollout.{name}={theirs[name]}" for name in wrong)
    raise ValueError(f"{found}: the base has others; plan with {way}")


def _cost(problem: problem_lib.Planning, name: str) -> float:
  kind = problem.fleet.by_name[name]
  return kind.cost * kind.engine_devices


_FILE = '''"""{title}

python -m launch.train --config={name} --workdir=DIR

{summary}
"""

import dataclasses
import pathlib

from launch.cli import flags
from rl import experiment
from rl.pools import affinity, placement
from rl.schedule import overlap

_BASE = pathlib.Path(__file__).resolve().parent / {base!r}


def get_config() -> experiment.Experiment:
  """Returns the base with the schedule and placement of the plan."""
  base = flags.load(str(_BASE))
  place = base.placement
  decode = place.decode
  return dataclasses.replace(
    base,
    overlap=dataclasses.replace(
      base.overlap,
{overlap}
      redundancy=overlap.{redundancy},
    ),
    placement=dataclasses.replace(
      place,
      learner=dataclasses.replace(
        place.learner, data={data}, first_device={device}
      ),
      decode={first_mesh},
      replicas={replicas},
      decode_kind={kind!r},
      decode_cost={cost!r},
      more={more},
      colocated=False,
    ),
    routing={routing},
    publishing={publishing},
  )
'''


def source(
  problem: problem_lib.Planning,
  choice: problem_lib.FleetChoice,
  base: experiment.Experiment,
  *,
  name: str,
  base_path: str,
  summary: str,
) -> str:
  """Returns a Python file whose get_config() is `apply` of this choice.

  Args:
    name: of the file, for its first lines.
    base_path: of the base, relative to the file.
    summary: the expected result.
  """
  where = meshes(problem, choice, base.placement)
  (first, replicas), *others = choice.engines
  data, device = where["learner"]
  fields = overlap_fields(choice)
  return _FILE.format(
    title=f"A plan: {choice.schedule}, {choice.split}.",
    name=name,
    summary=summary,
    base=base_path,
    overlap="\n".join(f"      {k}={v!r}," for k, v in fields.items()),
    redundancy=repr(choice.overlap.redundancy),
    data=data,
    device=device,
    first_mesh=_mesh(where[first]),
    replicas=replicas,
    kind=problem.fleet.by_name[first].kind,
    cost=_cost(problem, first),
    more=_pools(problem, others, where),
    routing=f"affinity.{routing(problem, base)!r}",
    publishing="base.publishing"
    if choice.bucket_bytes is None
    else "dataclasses.replace(\n      base.publishing, bucket_bytes="
    f"{int(choice.bucket_bytes)}\n    )",
  )


def _mesh(where: tuple[int, int]) -> str:
  data, device = where
  return f"dataclasses.replace(decode, data={data}, first_device={device})"


def _pools(
  problem: problem_lib.Planning,
  engines: list[tuple[str, int]],
  where: dict[str, tuple[int, int]],
) -> str:
  pools = [
    f"""
        placement.DecodePool(
          name={name!r},
          mesh={_mesh(where[name])},
          replicas={count},
          kind={problem.fleet.by_name[name].kind!r},
          cost={_cost(problem, name)!r},
        ),"""
    for name, count in engines
  ]
  return f"({''.join(pools)}\n      )" if pools else "()"
