"""Placement: the devices that train and those that decode."""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax

from models import config as model_config
from models import sharding
from rl.backends import addresses, local, ray_cluster, slurm, xm_experiment
from rl.backends import contract as backends
from rl.settings import checks, short_names

_PLATFORMS = ("cpu", "gpu", "tpu")
# jax's own names of what runs on a GPU.
_GPUS = ("cuda", "rocm")
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
_MAX_DEVICES = 2**20
BACKENDS = (
  local.Local,
  addresses.KnownAddresses,
  slurm.Slurm,
  ray_cluster.Ray,
  xm_experiment.Xm,
)
"""Backends that a setting can name."""
_WIRE = ("websockets", "msgpack")

Kind = Literal["compute", "bandwidth", "any"]
"""The strength of a pool's devices.

compute: arithmetic, so long prompts and many short turns.
bandwidth: memory, so long answers.
any: neither stands out, or all pools are alike.
"""

Role = Literal["decode", "prefill"]
"""The phases of a request that a pool serves.

decode: all of them, but for prompts that a pool of the other role encodes.
prefill: it encodes prompts for the engines of all others, and nothing else.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
  """A mesh of `data * expert * context * tensor` devices.

  Attributes:
    data: rows of a batch, or of the cache, are split over this axis, and with
      `sharding.TRAIN` every matrix of parameters.
    expert: experts are split over this axis, and rows as well. On virtual
      devices of a CPU, XLA may rarely wait for one of them in vain, and abort
      after 40 s; the same command goes on.
    context: the tokens of a row are split over this axis, for long ones. Each
      device computes what its own tokens attend to, from the keys of the whole
      row. Of the learner only.
    tensor: heads, MLPs and the vocabulary are split over this axis.
    rules: which logical axis lies on which of these, such as
      `--config.placement.learner.rules.embed=none`.
    first_device: index of its first device; None takes the next free ones.
  """

  data: int = 1
  expert: int = 1
  context: int = 1
  tensor: int = 1
  rules: sharding.Rules = sharding.TRAIN
  first_device: int | None = None

  @property
  def size(self) -> int:
    """Number of devices."""
    return self.data * self.expert * self.context * self.tensor

  @property
  def plan(self) -> sharding.Layout:
    """Layout on such a mesh, of devices that need not exist."""
    return sharding.Layout(sharding.plan_mesh(**self._sizes), self.rules)

  @property
  def _sizes(self) -> dict[str, int]:
    return {axis: getattr(self, axis) for axis in sharding.MESH_AXES}

  def layout(self, devices: Sequence[Any]) -> sharding.Layout:
    """Returns the layout on `size` devices."""
    mesh = sharding.make_mesh(**self._sizes, devices=devices)
    return sharding.Layout(mesh, self.rules)


class Memory(NamedTuple):
  """Bytes of each device that a run may use; or of all of them together."""

  usable: int
  is_shared: bool = False


class EngineInfo(NamedTuple):
  """The pool of an engine, the kind of its devices, and its role."""

  pool: str = "decode"
  kind: Kind = "any"
  role: Role = "decode"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePool:
  """Identical engines, on devices of one kind.

  Attributes:
    name: used by `routing` and the metrics.
    mesh: of one engine; `mesh.first_device` is the first of the pool.
    replicas: engines, each with weights and a cache of its own, on `mesh.size`
      devices after those of the one before.
    kind: strength of its devices.
    role: `decode`, or `prefill` to encode the prompts of all other pools; see
      `routing.min_prefill_ids`.
    cost: of one engine for a second, in any unit that all pools share.
    processes: of each engine; 0 is this one, 1 a process of its own.
    python: the program that runs such a process, such as that of an environment
      with another jax; None is the one that runs this.
  """

  name: str
  mesh: MeshSpec = MeshSpec(rules=sharding.DECODE)
  replicas: int = 1
  kind: Kind = "any"
  role: Role = "decode"
  cost: float = 1.0
  processes: int = 0
  python: str | None = None

  @property
  def info(self) -> EngineInfo:
    """Pool, kind and role of each of its engines."""
    return EngineInfo(self.name, self.kind, self.role)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """The learner's mesh and those of the decode pools.

  Attributes:
    decode: the mesh of one engine of the first decode pool, which is named
      "decode".
    replicas, decode_kind, decode_cost, decode_processes, decode_python: of that
      pool; see `DecodePool`.
    learner_processes: processes that share the learner's devices; 1 is this
      process, more are processes of their own.
    backend: starts the processes of learner and engines: `local` or `xm` on
      this host, and `addresses`, `slurm` or `ray` on others.
    more: further pools. Each follows on the devices of those before it, unless
      its `mesh.first_device` says otherwise.
    platform: "cpu", "gpu" or "tpu"; None takes the one that jax finds. On
      "cpu" the launcher makes as many virtual devices as the meshes need. Where
      all meshes are on other hosts, it is theirs, and this process is on a CPU.
    colocated: the meshes may share devices.
    device_gib: memory of a device, to plan for devices that are not there.
  """

  learner: MeshSpec = MeshSpec()
  decode: MeshSpec = MeshSpec(rules=sharding.DECODE)
  replicas: int = 1
  decode_kind: Kind = "any"
  decode_cost: float = 1.0
  decode_processes: int = 0
  decode_python: str | None = None
  learner_processes: int = 1
  backend: backends.Backend = local.Local()
  more: tuple[DecodePool, ...] = ()
  platform: str | None = None
  colocated: bool = False
  device_gib: float | None = None

  @property
  def pools(self) -> tuple[DecodePool, ...]:
    """All decode pools, the first one included."""
    first = DecodePool(
      name="decode",
      mesh=self.decode,
      replicas=self.replicas,
      kind=self.decode_kind,
      cost=self.decode_cost,
      processes=self.decode_processes,
      python=self.decode_python,
    )
    return first, *self.more

  @property
  def _pool_of_each_engine(self) -> list[DecodePool]:
    return [pool for pool in self.pools for _ in range(pool.replicas)]

  @property
  def engine_infos(self) -> tuple[EngineInfo, ...]:
    """Pool, kind and role of every engine, in the order of `layouts`."""
    return tuple(pool.info for pool in self._pool_of_each_engine)

  @property
  def remote(self) -> tuple[int, ...]:
    """Numbers of the engines that have a process of their own."""
    pools = enumerate(self._pool_of_each_engine)
    return tuple(number for number, pool in pools if pool.processes)

  @property
  def is_elsewhere(self) -> bool:
    """True if all meshes are in processes of other hosts."""
    return (
      self.learner_processes > 1
      and all(pool.processes for pool in self.pools)
      and not self.backend.shares_memory
    )

  @property
  def own_platform(self) -> str | None:
    """The platform of this process; None takes the one that jax finds."""
    return "cpu" if self.is_elsewhere else self.platform

  @property
  def meshes(self) -> Mapping[str, MeshSpec]:
    """Every mesh by its setting: "learner", "more.0.mesh"."""
    more = {f"more.{i}.mesh": pool.mesh for i, pool in enumerate(self.more)}
    return {"learner": self.learner, "decode": self.decode, **more}

  @property
  def ranges(self) -> tuple[range, ...]:
    """Device indices of the learner, and then of every engine."""
    learner, *pools = self._spans()
    sizes = [pool.mesh.size for pool in self.pools]
    return learner, *(
      range(start, start + size)
      for span, size in zip(pools, sizes, strict=True)
      for start in range(span.start, span.stop, size)
    )

  @property
  def num_devices(self) -> int:
    """Devices that must exist in this process."""
    learner, *engines = self.ranges
    if self.learner_processes > 1:
      learner = learner[:1]  # For states on their way.
    local = [x for i, x in enumerate(engines) if i not in self.remote]
    return max(span.stop for span in (learner, *local))

  def _spans(self) -> list[range]:
    """Returns device indices of the learner, and then of every pool."""
    start = self.learner.first_device or 0
    spans = [range(start, start + self.learner.size)]
    free = 0 if self.colocated else spans[0].stop
    for pool in self.pools:
      start = pool.mesh.first_device
      start = free if start is None else start
      spans.append(range(start, start + pool.mesh.size * pool.replicas))
      free = max(free, spans[-1].stop)
    return spans

  def validate(self) -> None:
    """Raises ValueError on an unknown platform or an impossible mesh.

    A mesh is impossible if it is empty or shares devices undeclared.
    """
    if self.platform not in (None, *_PLATFORMS):
      name = self.platform.lower()
      near = checks.nearest("gpu" if name in _GPUS else name, _PLATFORMS)
      use = f"use {', '.join(_PLATFORMS)} or none{near}"
      raise ValueError(f"placement.platform={self.platform} is unknown; {use}")
    self._validate_pools()
    checks.finite_above(self, 0, "device_gib")
    if self.is_elsewhere and self.platform in _EXTRAS and not self.device_gib:
      raise ValueError(
        "placement.device_gib is missing: all meshes are on other hosts, so it "
        "must say how much memory a device there has, as in 80"
      )
    for name, spec in self.meshes.items():
      where = f"placement.{name}"
      checks.at_least(spec, 1, *sharding.MESH_AXES, where=where)
      checks.at_least(spec, 0, "first_device", where=where)
      spec.rules.check(f"{where}.rules")
      if name != "learner" and spec.context > 1:
        raise ValueError(
          f"{where}.context={spec.context}: only the learner splits rows; use "
          f"1, or {where}.tensor or replicas for more devices"
        )
    if (needed := max(span.stop for span in self._spans())) > _MAX_DEVICES:
      raise ValueError(
        f"placement needs {needed} devices, {_MAX_DEVICES} at most; "
        f"lower {' or '.join(self._counts)} or the sizes of its meshes"
      )
    if not self.colocated:
      self._validate_disjoint()

  @property
  def _counts(self) -> Mapping[str, int]:
    """Number of engines of each pool, by its setting."""
    more = {f"more.{i}.replicas": x.replicas for i, x in enumerate(self.more)}
    counts = {"replicas": self.replicas, **more}
    return {f"placement.{name}": count for name, count in counts.items()}

  def _validate_pools(self) -> None:
    checks.at_least(self, 1, "replicas")
    checks.finite_above(self, 0, "decode_cost")
    first = self.pools[0]
    platform = self.own_platform
    _check_processes("decode_processes", "decode_python", first, platform)
    self._validate_learner_processes()
    self._validate_backend()
    for number, pool in enumerate(self.more):
      where = f"placement.more.{number}"
      checks.at_least(pool, 1, "replicas", where=where)
      checks.finite_above(pool, 0, "cost", where=where)
      checks.one_of(pool, Kind, "kind", where=where)
      checks.one_of(pool, Role, "role", where=where)
      names = f"more.{number}.processes", f"more.{number}.python"
      _check_processes(*names, pool, platform)
    taken = {*get_args(Kind), "learner", ""}
    for i, pool in enumerate(self.pools):
      if pool.name in taken:
        name = f"more.{i - 1}.name" if i else "decode_name"
        why = "is taken, by another part or by a kind; choose another name"
        raise ValueError(f"placement.{name}={pool.name!r} {why}")
      taken.add(pool.name)
    self._validate_prefill()

  def _validate_prefill(self) -> None:
    """Raises ValueError where pages have no way from one engine to another."""
    prefill = [pool.name for pool in self.pools if pool.role == "prefill"]
    here = [pool.name for pool in self.pools if not pool.processes]
    if prefill and here:
      raise ValueError(
        f"pool {prefill[0]} has role=prefill, but the engines of {here[0]} are "
        "in this process, where keys and values have no way between engines; "
        "use placement.decode_processes=1, and processes=1 of every other pool"
      )

  def _validate_backend(self) -> None:
    has_others = any(pool.processes for pool in self.pools)
    if not isinstance(self.backend, local.Local) and not (
      has_others or self.learner_processes > 1
    ):
      raise ValueError(
        f"placement.backend={short_names.of(self.backend)} starts processes of "
        "learner and engines, and these have none; use "
        "placement.decode_processes=1, or placement.backend=local"
      )

  def _validate_learner_processes(self) -> None:
    count, size = self.learner_processes, self.learner.size
    checks.at_least(self, 1, "learner_processes")
    if size % count:
      # No process has less than a device, and a typo may have many zeros.
      most = min(count - 1, _MAX_DEVICES)
      fit = max(n for n in range(1, most + 1) if not size % n)
      raise ValueError(
        f"placement.learner_processes={count} does not divide the {size} "
        f"devices of placement.learner; use {fit}, or a mesh with a multiple "
        f"of {count}, such as placement.learner.data={count}"
      )
    if count > 1:
      name = f"placement.learner_processes={count}"
      _check_can_be_remote(
        name, "a learner of several processes runs", self.own_platform, 1
      )

  def _validate_disjoint(self) -> None:
    named = [("placement.learner", "placement.learner.first_device")]
    for name, pool in zip(list(self.meshes)[1:], self.pools, strict=True):
      times = f" x {pool.replicas} replicas" if pool.replicas > 1 else ""
      named.append((f"placement.{name}{times}", f"placement.{name}"))
    pairs = itertools.combinations(zip(named, self._spans(), strict=True), 2)
    for ((one, _), a), ((other, out), b) in pairs:
      shared = range(max(a.start, b.start), min(a.stop, b.stop))
      if shared:
        raise ValueError(
          f"{one} and {other} share devices {list(shared)}; move "
          f"{out}.first_device or set placement.colocated=true"
        )

  def validate_installed(self) -> None:
    """Raises ValueError when the backend, or a pool's Python, lacks packages.

    A Python is looked for on this host, so only where this host runs it.
    """
    self.backend.validate_installed()
    for pool in self.pools:
      if pool.python is not None and self.backend.shares_memory:
        what = f"the Python of pool {pool.name}"
        checks.installed(what, "processes", "jax", *_WIRE, python=pool.python)

  def memory(self, devices: Sequence[Any] = ()) -> Memory | None:
    """Returns the memory of its devices, less a tenth that is kept free.

    Args:
      devices: that are there; without any, or if all meshes are elsewhere, it
        is planned for `device_gib`, or for the processor of this host.

    Returns:
      None if nothing is known of it.
    """
    if self.is_elsewhere:
      devices = ()
    if devices:
      if devices[0].platform == "cpu":
        return _host_memory()
      stats = [device.memory_stats() for device in devices]
      if all(stats):
        return Memory(min(x["bytes_limit"] for x in stats) * 19 // 20)
    if self.device_gib is not None:
      return Memory(round(self.device_gib * 2**30) * 9 // 10)
    if devices or self.planned_platform in _EXTRAS:
      return None
    return _host_memory()

  def dtype(self, devices: Sequence[Any] = ()) -> model_config.Dtype:
    """Returns the dtype that its devices are made for.

    Args:
      devices: that are there; without any, or if all meshes are elsewhere,
        those that the settings plan for, or that jax would find.
    """
    if self.is_elsewhere:
      devices = ()
    platform = devices[0].platform if devices else self.planned_platform
    if platform not in _EXTRAS:
      return "float32"
    if platform == "gpu" and devices:
      # Kernels for bfloat16 begin with 8.0, Ampere; other makers lack some.
      version = sharding.nvidia_version(devices[0])
      return "bfloat16" if version >= (8, 0) else "float32"
    return "bfloat16"

  @property
  def planned_platform(self) -> str:
    """The platform to plan for, without a look at devices.

    Where none is named, it is the accelerator that jax would find, a GPU of
    `device_gib`, or the processor of this host.
    """
    if self.platform is not None:
      return self.platform
    found = [] if self.is_elsewhere else [*filter(has_plugin, _EXTRAS)]
    return next(iter(found), "cpu" if self.device_gib is None else "gpu")

  def layouts(self) -> tuple[sharding.Layout, ...]:
    """Returns the layout of the learner, and then of every engine.

    `learner, *engines = place.layouts()`. An engine in another process has a
    plan, without devices. A learner of several processes has one device of
    this one, through which its states pass.

    Raises:
      ValueError: there are fewer devices than the placement needs, or none
        of its platform.
    """
    try:
      devices = jax.devices(self.own_platform)
    except RuntimeError as error:
      wanted, out = self.own_platform, ""
      if wanted is not None and not has_plugin(wanted):
        out = f"pip install 'twinmesh[{_EXTRAS[wanted]}]', or "
      raise ValueError(
        f"placement.platform={str(wanted).lower()} is not available: {error}; "
        f"{out}use --config.placement.platform=cpu, or none for the one that "
        "jax finds"
      ) from error
    if len(devices) < self.num_devices:
      fewer = "".join(
        f" or {name}={count}"
        for name, count in self._counts.items()
        if count > 1
      )
      raise ValueError(
        f"placement needs {self.num_devices} devices and jax sees "
        f"{len(devices)}; lower placement.*.data{fewer}, share them with "
        "placement.colocated=true, or use placement.platform=cpu"
      )
    if self.remote:
      _check_engines_can_be_remote(
        "placement.decode_processes=1", devices[0].platform
      )
    learner, *engines = self.ranges
    spec = self.learner
    if self.learner_processes > 1:
      dataclasses.replace(self, platform=devices[0].platform).validate()
      spec, learner = MeshSpec(rules=spec.rules), learner[:1]
    layouts = [spec.layout([devices[i] for i in learner])]
    for pool, where in zip(self._pool_of_each_engine, engines, strict=True):
      if pool.processes:
        layouts.append(pool.mesh.plan)
      else:
        layouts.append(pool.mesh.layout([devices[i] for i in where]))
    return tuple(layouts)


def _check_processes(
  name: str, python: str, pool: DecodePool, platform: str | None
) -> None:
  """Raises ValueError on processes that the engines of a pool cannot have.

  Args:
    name, python: settings of its processes, and of the program that runs them.
    platform: of this process.
  """
  setting = f"placement.{name}={pool.processes}"
  if pool.processes not in (0, 1):
    raise ValueError(f"{setting} must be 0 or 1: an engine has one at most")
  if pool.processes:
    _check_engines_can_be_remote(setting, platform)
  elif pool.python is not None:
    raise ValueError(
      f"placement.{python}={pool.python} with {setting}: the engines are in "
      f"this process, which its own Python runs; use placement.{name}=1"
    )


def _check_engines_can_be_remote(setting: str, platform: str | None) -> None:
  what = "engines in processes of their own run"
  _check_can_be_remote(setting, what, platform, 0)


def _check_can_be_remote(
  setting: str, what: str, platform: str | None, out: int
) -> None:
  """Raises ValueError where a part of the run cannot have other processes."""
  if platform in _EXTRAS:
    raise ValueError(
      f"{setting}: {what} on CPUs so far, not on a {platform.upper()}; use "
      f"{out}, or have all meshes on other hosts, by "
      "placement.learner_processes, placement.decode_processes and a backend"
    )
  checks.installed(setting, "processes", *_WIRE)


def _host_memory() -> Memory:
  size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return Memory(size * 9 // 10, is_shared=True)


def has_plugin(platform: str) -> bool:
  """Returns whether jax has its plugin for a platform."""
  if platform == "tpu":
    return importlib.util.find_spec("libtpu") is not None
  found = importlib.metadata.entry_points(group="jax_plugins")
  return platform == "cpu" or any(
    name in plugin.name for plugin in found for name in _GPUS
  )
