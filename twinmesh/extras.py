"""Extras of Twinmesh by the packages that they bring.

A command that lacks one ends with a line that names the extra, and without a
traceback.
"""

import sys
import types

from twinmesh import error_codes, top_packages

EXTRAS = {
  "anthropic": "test",
  "gymnasium": "envs",
  "httpx2": "rewards",
  "jsonschema": "rewards",
  "llguidance": "constrained",
  "math_verify": "rewards",
  "mcp": "mcp",
  "minigrid": "minigrid",
  "mlflow": "mlflow",
  "msgpack": "processes",
  "openai": "openai",
  "pyarrow": "parquet",
  "pydantic": "tools",
  "pytest": "pytest",
  "ray": "ray",
  "reasoning_gym": "reasoning",
  "starlette": "serve",
  "textarena": "envs",
  "tokenizers": "hf",
  "uvicorn": "serve",
  "wandb": "wandb",
  "websockets": "processes",
}
"""The smallest extra that brings a package, by the name of its import."""
_MISSING = "TM-X01"


def way_out(error: BaseException | None) -> str:
  """Returns a sentence on an import that failed; "" if no extra brings it."""
  if not isinstance(error, ModuleNotFoundError):
    return ""
  package = (error.name or "").partition(".")[0]
  if package not in EXTRAS:
    return ""
  extra = EXTRAS[package]
  return f"this needs the package {package}: pip install 'twinmesh[{extra}]'"


def tell_instead_of_tracebacks() -> None:
  """Has this process, which is a command, end with the sentence alone.

  A package of others in the place of ours is told in the same way, and any
  other error has its code below the traceback.
  """
  before = sys.excepthook

  def tell(
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
  ) -> None:
    if sentence := way_out(error):
      print(error_codes.text(sentence, _MISSING), file=sys.stderr)
    elif isinstance(error, top_packages.Shadowed):
      print(error_codes.text(error), file=sys.stderr)
    else:
      before(kind, error, trace)
      if isinstance(error, Exception):
        print(error_codes.more(error_codes.code_of(error)), file=sys.stderr)

  sys.excepthook = tell
