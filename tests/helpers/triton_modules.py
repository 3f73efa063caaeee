"""The kernels of a lowered program in Triton, checked without a GPU."""

from typing import Any

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect


def check(lowered: Any) -> int:
  """Returns how many kernels a lowered program has, each of them valid."""
  return len(texts(lowered))


def texts(lowered: Any) -> list[str]:
  """Returns the kernels of a lowered program.

  Raises:
    MLIRError: Triton would refuse one of them.
  """
  found = []

  def visit(operation):
    attributes = operation.attributes
    if "mhlo.backend_config" in attributes:
      config = attributes["mhlo.backend_config"]
      if isinstance(config, ir.DictAttr) and "ir" in config:
        found.append(_read(ir.StringAttr(config["ir"]).value_bytes))
    return ir.WalkResult.ADVANCE

  lowered.compiler_ir().operation.walk(visit)
  return found


def _read(module: bytes) -> str:
  """Returns a module as text; to read it is to verify its operations."""
  context = mlir.make_ir_context()
  dialect.register_dialect(context)
  with context:
    return str(ir.Module.parse(module))
