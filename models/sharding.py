"""The map from logical axes to axes of the mesh: sharding as data.

A mesh has the axes ("data", "expert", "context", "tensor"). Rows of a batch are
split over the first two and the tokens of a row over "context"; parameters over
all but "context", as the rules say. Splitting "embed" over "data" is what is
called fully sharded data parallelism (FSDP).
"""

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

MESH_AXES = ("data", "expert", "context", "tensor")
TOKEN_AXES = MESH_AXES[:3]
"""Those over which tokens are split."""

_AUTO = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)

# In the order in which an override is read: "none" means no axis.
MeshAxes = None | tuple[str, ...] | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Logical axis -> axis or axes of the mesh; None is on every device.

  Attributes:
    batch: rows of tokens, and of caches.
    length: tokens of a row, in training only.
    embed: the model's width, in parameters only; activations keep theirs whole.
    norm: of a scale, as long as what it scales.
    router: experts as outputs of the router.
    rank: inner width of an adapter.
  """

  batch: MeshAxes = ("data", "expert")
  length: MeshAxes = "context"
  vocab: MeshAxes = "tensor"
  embed: MeshAxes = "data"
  heads: MeshAxes = "tensor"
  kv_heads: MeshAxes = "tensor"
  head_dim: MeshAxes = None
  mlp: MeshAxes = "tensor"
  experts: MeshAxes = "expert"
  router: MeshAxes = None
  norm: MeshAxes = None
  rank: MeshAxes = None

  @property
  def tokens(self) -> tuple[str, ...]:
    """Axes over which the tokens of all rows are split; see `by_device`."""
    return *self.of("batch"), *self.of("length")

  def of(self, axis: str | None) -> tuple[str, ...]:
    """Returns the axes of the mesh that a logical axis is split over."""
    return _names(axis and getattr(self, axis))

  def check(self, where: str) -> None:
    """Raises ValueError for a rule that no mesh can follow."""
    for problem in self._problems():
      raise ValueError(f"{where}.{problem}")

  def _problems(self) -> Iterator[str]:
    for field in dataclasses.fields(self):
      names, setting = self.of(field.name), field.name
      for name in names:
        if name not in MESH_AXES:
          near = difflib.get_close_matches(name, MESH_AXES, 1, 0)[0]
          axes = f"a mesh has the axes {', '.join(MESH_AXES)}"
          yield f"{setting}={name}: {axes}; did you mean {near}?"
      if len(set(names)) < len(names):
        out = f"use {','.join(dict.fromkeys(names))}"
        yield f"{setting}={','.join(names)} names an axis twice; {out}"
    rows, length = self.of("batch"), self.of("length")
    for field in ("vocab", "heads", "kv_heads"):
      if shared := sorted(set(self.of(field)) & set(rows)):
        yield (
          f"{field}={','.join(self.of(field))}: rows are split over "
          f"{' and '.join(shared)}, and so are activations that have both; use "
          "tensor or none"
        )
    # Experts exchange tokens over "expert" and add up over "tensor".
    if rows != (only := MESH_AXES[:2]):
      why = f"rows are split over {' and '.join(only)}; use {','.join(only)}"
      yield f"batch={','.join(rows) or 'none'}: {why}"
    if length != ("context",):
      why = "tokens of a row are split over context; use context"
      yield f"length={','.join(length) or 'none'}: {why}"


TRAIN = Rules()
"""Parameters, gradients and optimizer state are split over every axis."""

DECODE = Rules(embed=None)
"""Every row of devices holds whole parameters: no gathering at each token."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh, and what lies where on it. Hashable: a static argument of jit.

  With an AbstractMesh it describes devices that need not exist.
  """

  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
  rules: Rules = TRAIN

  @property
  def devices(self) -> list[Any]:
    """Its devices, which must exist, along "tensor" first."""
    assert isinstance(self.mesh, jax.sharding.Mesh)
    return list(self.mesh.devices.flat)

  @property
  def platform(self) -> str:
    """Kind of its devices: "cpu", "gpu" or "tpu"."""
    return self.devices[0].platform

  def spec(self, *axes: str | None) -> jax.sharding.PartitionSpec:
    """Returns the spec of an array with these logical axes."""
    return jax.P(*(axis and getattr(self.rules, axis) for axis in axes))

  def sharding(self, *axes: str | None) -> jax.sharding.NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    return jax.sharding.NamedSharding(self.mesh, self.spec(*axes))

  def whole(self, *axes: str | None) -> jax.sharding.NamedSharding:
    """Returns that of a parameter in use: not split over the axes of tokens.

    Experts stay where they are: tokens come to them.
    """

    def kept(axis):
      names = self.rules.of(axis)
      here = names if axis == "experts" else set(names) - set(TOKEN_AXES)
      return tuple(name for name in names if name in here) or None

    return jax.sharding.NamedSharding(self.mesh, jax.P(*map(kept, axes)))

  def is_whole(self, shape: tuple[int, ...], *axes: str | None) -> bool:
    """Returns whether a parameter lies as in use anyway."""
    used, kept = self.whole(*axes), self.sharding(*axes)
    return used.shard_shape(shape) == kept.shard_shape(shape)

  def tree(self, axes: Any) -> Any:
    """Returns a tree of axis names with a sharding as each leaf."""
    return jax.tree.map(
      lambda leaf: self.sharding(*leaf), axes, is_leaf=is_axes
    )

  @property
  def num_batch(self) -> int:
    """Number of parts that rows are split into."""
    return self.size("batch")

  def size(self, axis: str) -> int:
    """Returns the number of parts that a logical axis is split into."""
    return math.prod(self.mesh.shape[name] for name in self.rules.of(axis))


def make_mesh(
  data: int = 1,
  expert: int = 1,
  tensor: int = 1,
  context: int = 1,
  *,
  devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
  """Returns a mesh of devices; of the first ones of jax by default."""
  sizes = (data, expert, context, tensor)
  if devices is None:
    devices = jax.devices()[: math.prod(sizes)]
  grid = np.array(devices).reshape(sizes)
  return jax.sharding.Mesh(grid, MESH_AXES, axis_types=_AUTO)


def plan_mesh(
  data: int = 1, expert: int = 1, tensor: int = 1, context: int = 1
) -> jax.sharding.AbstractMesh:
  """Returns a mesh of devices that need not exist."""
  sizes = (data, expert, context, tensor)
  return jax.sharding.AbstractMesh(sizes, MESH_AXES, axis_types=_AUTO)


def platform(layout: Layout | None) -> str:
  """Returns the kind of devices of a layout; of none, that of jax's own."""
  return jax.default_backend() if layout is None else layout.platform


def nvidia_version(device: Any) -> tuple[int, int]:
  """Returns the compute capability of a GPU of NVIDIA, (0, 0) of all else."""
  # Other makers have names there.
  named = str(getattr(device, "compute_capability", ""))
  found = re.fullmatch(r"(\d+)\.(\d+)", named)
  return (int(found[1]), int(found[2])) if found else (0, 0)


def constrain(layout: Layout | None, x: Array, *axes: str | None) -> Array:
  """Returns `x`, laid out so inside of a jit; without a layout as it is."""
  if layout is None or layout.mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, layout.sharding(*axes))


def by_device(
  layout: Layout | None, x: Shaped[Array, "B L *any"]
) -> Shaped[Array, "P T *any"]:
  """Returns tokens in one row for each part that they are split into.

  No token moves to another device. `by_row` is the way back.
  """
  rows = len(x)
  num_rows = layout.size("batch") if layout else 1
  num_parts = layout.size("length") if layout else 1
  rest = x.shape[2:]
  if num_parts > 1:
    x = x.reshape(num_rows, rows // num_rows, num_parts, -1, *rest)
    x = jnp.swapaxes(x, 1, 2)
  x = x.reshape(num_rows * num_parts, -1, *rest)
  return constrain(layout, x, "tokens")


def by_row(
  layout: Layout | None,
  x: Shaped[Array, "P T *any"],
  shape: tuple[int, ...],
) -> Shaped[Array, "B L *any"]:
  """Returns the tokens of `by_device` in B rows of L again.

  Args:
    shape: (B, L).
  """
  num_rows = layout.size("batch") if layout else 1
  num_parts = layout.size("length") if layout else 1
  rows, rest = shape[0], x.shape[2:]
  if num_parts > 1:
    x = x.reshape(num_rows, num_parts, rows // num_rows, -1, *rest)
    x = jnp.swapaxes(x, 1, 2)
  return constrain(layout, x.reshape(*shape, *rest), "batch", "length")


def parameter(value: Array, axes: tuple[str | None, ...]) -> nnx.Param:
  """Returns a parameter of a module, with its logical axes."""
  # Arrays are placed by whoever compiles the program that makes them.
  return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def axes_of(node: Any) -> Any:
  """Returns the logical axes of a parameter, or a module's tree of them.

  A parameter that was declared without lies whole on every device.
  """
  if isinstance(node, nnx.Variable):
    axes = node.get_metadata("out_sharding", None)
    return (None,) * len(node.get_value().shape) if axes is None else axes
  state = nnx.state(node)
  return nnx.to_pure_dict(state, extract_fn=axes_of)


def gathered(layout: Layout | None, params: Any, axes: Any) -> Any:
  """Returns parameters that are whole along the axes over which rows are split.

  Rows and parameters may be split over the same axis of the mesh. Left alone,
  XLA may then move the rows instead, or replicate them. Call it where the
  parameters are used, inside of what is rematerialised: the copies then live
  for one layer. Gradients are summed over the rows and lie as the parameters
  do. Experts, which `models.moe.layer` gathers itself, are passed on as they
  are.

  Args:
    axes: tree of logical axes, of the structure of `params`.
  """
  if layout is None or layout.mesh.size == 1:
    return params

  def gather(names, leaf):
    if "experts" in names or layout.is_whole(leaf.shape, *names):
      return leaf
    return _gather(layout.sharding(*names), layout.whole(*names), leaf)

  return jax.tree.map(gather, follow(axes, params), params, is_leaf=is_axes)


def follow(axes: Any, params: Any) -> Any:
  """Returns a tree of axis names with one leaf for each array of `params`.

  Where one is quantised, its values and its scale have the names that it has,
  and None for an axis of length 1, which cannot be split.

  Args:
    axes: of the structure of parameters that are not quantised.
  """

  def leaf(names, node):
    if not isinstance(node, tuple):
      return names
    return jax.tree.map(
      lambda part: tuple(
        name if size > 1 else None
        for name, size in zip(names, part.shape, strict=True)
      ),
      node,
    )

  return jax.tree.map(leaf, axes, params, is_leaf=is_axes)


def is_axes(node: Any) -> bool:
  """Returns whether a node of a tree of axis names is a leaf: a tuple."""
  return (
    isinstance(node, tuple)
    and bool(node)
    and all(name is None or isinstance(name, str) for name in node)
  )


def validate(
  config: Any,
  axes: Any,
  layout: Layout,
  *,
  rows: Mapping[str, int] | None = None,
  where: str = "mesh",
) -> None:
  """Raises ValueError for a layout that does not fit the model or its rows.

  Args:
    config: `models.config.ModelConfig`.
    axes: of the parameters, as in `definition.Definition`.
    layout: of existing devices or of an AbstractMesh.
    rows: setting -> number of rows that are split over the mesh.
    where: setting that holds the mesh's sizes, and `rules`.
  """
  mesh = layout.mesh
  if mesh.axis_names != MESH_AXES:
    raise ValueError(f"the mesh has axes {mesh.axis_names}; use {MESH_AXES}")
  # XLA places what lies between the annotated arrays.
  if set(mesh.axis_types) != {jax.sharding.AxisType.Auto}:
    use = "use jax.sharding.AxisType.Auto for all"
    raise ValueError(f"the mesh has axis types {mesh.axis_types}; {use}")
  layout.rules.check(f"{where}.rules")
  for leaf in jax.tree.leaves(axes, is_leaf=is_axes):
    _validate_once(leaf, layout.rules, where)
  splits = list(_splits(config, layout.rules))
  for axis, setting, size, names in splits:
    parts = math.prod(mesh.shape[name] for name in names)
    if size % parts:
      out = _ways_out(axis, names, splits, mesh.shape, where)
      if axis == "vocab":
        out += f" or model.{setting}={-(-size // parts) * parts}"
      over = _product(where, names, parts)
      raise ValueError(
        f"model.{setting}={size} does not divide over {over}; use {out}"
      )
  parts, names = layout.num_batch, layout.rules.of("batch")
  for setting, number in (rows or {}).items():
    if number % parts:
      over, out = _product(where, names, parts), -(-number // parts) * parts
      raise ValueError(
        f"{setting}={number} does not divide over {over}; use {setting}={out}"
      )


def _validate_once(
  leaf: tuple[str | None, ...], rules: Rules, where: str
) -> None:
  """Raises ValueError when two axes of a parameter are split over the same."""
  users: dict[str, str | None] = {}
  for axis in leaf:
    for name in rules.of(axis):
      if name in users:
        both = f"{where}.rules.{users[name]} and {where}.rules.{axis}"
        raise ValueError(
          f"{both} are both {name}, but there are parameters of axes "
          f"({', '.join(map(str, leaf))}); set one of the two to none"
        )
      users[name] = axis


def _splits(
  config: Any, rules: Rules
) -> Iterator[tuple[str | None, str, int, tuple[str, ...]]]:
  """Yields (logical axis, setting, its value, axes of the mesh it meets).

  The logical axis is None where no rule decides.
  """
  sizes = {
    "vocab": ["vocab_size"],
    "embed": ["d_model"],
    "heads": ["num_heads"],
    "kv_heads": ["num_kv_heads"],
    "head_dim": ["head_dim"],
    "norm": ["d_model", "head_dim"],
    "mlp": [],
  }
  if config.num_sparse < config.num_layers:
    sizes["mlp"].append("d_ff")
  if config.num_sparse:
    sizes["mlp"].append("d_expert")
    sizes |= {"experts": ["num_experts"], "router": ["num_experts"]}
    # The exchange of tokens is written for these two axes.
    yield None, "num_experts", config.num_experts, ("expert",)
    yield None, "d_expert", config.d_expert, ("tensor",)
  for axis, settings in sizes.items():
    for setting in settings:
      yield axis, setting, getattr(config, setting), rules.of(axis)
  if config.lora is not None:
    yield "rank", "lora.rank", config.lora.rank, rules.of("rank")


def _ways_out(
  axis: str | None,
  names: tuple[str, ...],
  splits: list[tuple[str | None, str, int, tuple[str, ...]]],
  shape: Mapping[str, int],
  where: str,
) -> str:
  """Returns the largest size of the mesh's axis that works, and the rule."""
  ways = []
  if len(names) == 1:
    (name,) = names

    def works(size):
      return not any(
        number % math.prod(({**shape, name: size})[other] for other in meets)
        for _, _, number, meets in splits
        if name in meets
      )

    largest = next(n for n in range(shape[name], 0, -1) if works(n) or n == 1)
    ways.append(f"{where}.{name}={largest}")
  if axis is not None:
    ways.append(f"{where}.rules.{axis}=none")
  return " or ".join(ways)


def _product(where: str, names: tuple[str, ...], parts: int) -> str:
  equals = "=" if len(names) == 1 else " = "
  return f"{where}.{' * '.join(names)}{equals}{parts}"


def _names(axes: MeshAxes) -> tuple[str, ...]:
  return (axes,) if isinstance(axes, str) else axes or ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(
  split: jax.sharding.NamedSharding,
  whole: jax.sharding.NamedSharding,
  leaf: Array,
) -> Array:
  del split
  return jax.lax.with_sharding_constraint(leaf, whole)


def _gather_fwd(split, whole, leaf):
  return _gather(split, whole, leaf), None


def _gather_bwd(split, whole, _, gradient):
  # First whole: the split would spread to what the gradient is a product of.
  gradient = jax.lax.with_sharding_constraint(gradient, whole)
  return (jax.lax.with_sharding_constraint(gradient, split),)


_gather.defvjp(_gather_fwd, _gather_bwd)
