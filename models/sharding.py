"""Which axis of the mesh each logical axis lies on.

A mesh has the axes ("data", "expert"): rows are split over the first, experts
over the second, and everything else is on every device.
"""

import jax

from models import config as config_lib
from models import transformer

MESH_AXES = ("data", "expert")

RULES: dict[str, str | None] = {
  "batch": "data",
  "experts": "expert",
  "router": None,
  "vocab": None,
  "embed": None,
  "mlp": None,
  "heads": None,
  "kv_heads": None,
  "head_dim": None,
}
"""Logical axis -> mesh axis."""


def validate(
  config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  rows: int | None = None,
) -> None:
  """Raises ValueError for a mesh that does not divide experts or `rows`."""
  if mesh.axis_names != MESH_AXES:
    raise ValueError(f"the mesh has axes {mesh.axis_names}; use {MESH_AXES}")
  # Below, XLA places what lies between the annotated arrays.
  if set(mesh.axis_types) != {jax.sharding.AxisType.Auto}:
    raise ValueError(
      f"the mesh has axis types {mesh.axis_types}; use "
      "jax.sharding.AxisType.Auto for both"
    )
  data, expert = mesh.devices.shape
  if config.num_experts % expert:
    raise ValueError(
      f"model.num_experts={config.num_experts} does not divide over "
      f"expert={expert} devices; use expert="
      f"{_divisor(config.num_experts, expert)}"
    )
  if rows is not None and rows % data:
    raise ValueError(
      f"rows={rows} do not divide over data={data} devices; use "
      f"{-(-rows // data) * data} rows or data={_divisor(rows, data)}"
    )


def param_shardings(
  config: config_lib.ModelConfig, mesh: jax.sharding.Mesh
) -> transformer.Params:
  """Returns the tree of parameters with a NamedSharding as each leaf."""
  return jax.tree.map(
    lambda axes: _sharding(mesh, *axes),
    transformer.logical_axes(config),
    is_leaf=transformer.is_axes,
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns the sharding of arrays whose first axis is rows."""
  return _sharding(mesh, "batch")


def cache_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns the sharding of every array of a Cache or a Fresh."""
  return _sharding(mesh, "batch")


def _sharding(
  mesh: jax.sharding.Mesh, *axes: str
) -> jax.sharding.NamedSharding:
  return jax.sharding.NamedSharding(mesh, jax.P(*(RULES[a] for a in axes)))


def _divisor(number: int, bound: int) -> int:
  """Returns the largest divisor of `number` that is at most `bound`."""
  return next(d for d in range(bound, 0, -1) if number % d == 0)
