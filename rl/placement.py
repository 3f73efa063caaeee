"""Which devices train and which decode."""

import dataclasses
import difflib
import itertools

import jax
import numpy as np

from models import sharding

_PLATFORMS = ("cpu", "gpu", "tpu")
# jax's own names of what runs on a GPU.
_GPUS = ("cuda", "rocm")
_MAX_DEVICES = 2**20
_AXIS_TYPES = (jax.sharding.AxisType.Auto,) * len(sharding.MESH_AXES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
  """A mesh of `data * expert * tensor` devices.

  Attributes:
    data: rows of a batch, or of the cache, are split over this axis, and with
      `sharding.TRAIN` every matrix of parameters.
    expert: experts are split over this axis, and rows as well.
    tensor: heads, MLPs and the vocabulary are split over this axis.
    rules: which logical axis lies on which of these, such as
      `--config.placement.learner.rules.embed=none`.
    first_device: index of its first device; None takes the next free ones.
  """

  data: int = 1
  expert: int = 1
  tensor: int = 1
  rules: sharding.Rules = sharding.TRAIN
  first_device: int | None = None

  @property
  def size(self) -> int:
    """Number of devices."""
    return self.data * self.expert * self.tensor

  @property
  def plan(self) -> sharding.Layout:
    """What lies where on such a mesh, of devices that need not exist."""
    sizes = (self.data, self.expert, self.tensor)
    return sharding.Layout(
      jax.sharding.AbstractMesh(
        sizes, sharding.MESH_AXES, axis_types=_AXIS_TYPES
      ),
      self.rules,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """The learner's mesh and the decode pool's.

  Attributes:
    decode: the mesh of one replica; `decode.first_device` is the first of all.
    replicas: engines of the decode pool, each with weights and a cache of its
      own, on `decode.size` devices behind those of the one before.
    platform: "cpu", "gpu" or "tpu"; None takes what jax finds. On "cpu" the
      launcher makes as many virtual devices as the meshes need.
    colocated: the meshes may share devices.
  """

  learner: MeshSpec = dataclasses.field(default_factory=MeshSpec)
  decode: MeshSpec = dataclasses.field(
    default_factory=lambda: MeshSpec(rules=sharding.DECODE)
  )
  replicas: int = 1
  platform: str | None = None
  colocated: bool = False

  @property
  def ranges(self) -> tuple[range, ...]:
    """Device indices of the learner, and then of every replica."""
    start = self.learner.first_device or 0
    learner = range(start, start + self.learner.size)
    default = 0 if self.colocated else learner.stop
    start = self.decode.first_device
    start = default if start is None else start
    size = self.decode.size
    starts = [start + i * size for i in range(self.replicas)]
    return learner, *(range(start, start + size) for start in starts)

  @property
  def num_devices(self) -> int:
    """Devices that must exist."""
    learner = (self.learner.first_device or 0) + self.learner.size
    first = self.decode.first_device
    if first is None:
      first = 0 if self.colocated else learner
    return max(learner, first + self.decode.size * self.replicas)

  def validate(self) -> None:
    """Raises ValueError on an unknown platform, or meshes that cannot be.

    Those are empty, or overlap undeclared.
    """
    self._validate_platform()
    if self.replicas < 1:
      raise ValueError(
        f"placement.replicas={self.replicas} is below 1: nothing would decode"
      )
    for name in ("learner", "decode"):
      spec = getattr(self, name)
      for axis in sharding.MESH_AXES:
        if getattr(spec, axis) < 1:
          raise ValueError(
            f"placement.{name}.{axis}={getattr(spec, axis)} is below 1"
          )
      if spec.first_device is not None and spec.first_device < 0:
        raise ValueError(
          f"placement.{name}.first_device={spec.first_device} is below 0"
        )
      spec.rules.validate(f"placement.{name}.rules")
    if self.num_devices > _MAX_DEVICES:
      raise ValueError(
        f"placement needs {self.num_devices} devices, {_MAX_DEVICES} at most; "
        "lower placement.replicas or the sizes of its meshes"
      )
    learner, *replicas = self.ranges
    decode = itertools.chain(*replicas)
    shared = sorted(set(learner).intersection(decode))
    if shared and not self.colocated:
      times = f" x {self.replicas} replicas" if self.replicas > 1 else ""
      raise ValueError(
        f"placement.learner and placement.decode{times} share devices "
        f"{shared}; move placement.decode.first_device or set "
        "placement.colocated=true"
      )

  def _validate_platform(self) -> None:
    if self.platform is None or self.platform in _PLATFORMS:
      return
    name = self.platform.lower()
    near = difflib.get_close_matches(name, _PLATFORMS, 1)
    near = ["gpu"] if name in _GPUS else near
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
      f"placement.platform={self.platform} is unknown; use "
      f"{', '.join(_PLATFORMS)} or none{hint}"
    )

  def layouts(self) -> tuple[sharding.Layout, ...]:
    """Returns where things lie at the learner, and then at every replica.

    `learner, *replicas = place.layouts()`.

    Raises:
      ValueError: there are fewer devices than the placement needs, or none
        of its platform.
    """
    try:
      devices = np.array(jax.devices(self.platform))
    except RuntimeError as error:
      raise ValueError(
        f"placement.platform={str(self.platform).lower()} is not to be had: "
        f"{error}; use --config.placement.platform=cpu, or none for what jax "
        "finds"
      ) from error
    if len(devices) < self.num_devices:
      fewer = (
        f" or placement.replicas={self.replicas}" if self.replicas > 1 else ""
      )
      raise ValueError(
        f"placement needs {self.num_devices} devices and jax sees "
        f"{len(devices)}; lower placement.*.data{fewer}, share them with "
        "placement.colocated=true, or use placement.platform=cpu"
      )
    specs = [self.learner, *[self.decode] * self.replicas]
    return tuple(
      _layout(spec, devices[list(where)])
      for spec, where in zip(specs, self.ranges, strict=True)
    )


def _layout(spec: MeshSpec, devices: np.ndarray) -> sharding.Layout:
  grid = devices.reshape(spec.data, spec.expert, spec.tensor)
  mesh = jax.sharding.Mesh(grid, sharding.MESH_AXES, axis_types=_AXIS_TYPES)
  return sharding.Layout(mesh, spec.rules)
