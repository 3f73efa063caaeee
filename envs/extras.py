"""Optional packages: installed, or an error that says how to get them."""

import importlib.util


def require(package: str, extra: str, what: str) -> None:
  """Checks that a package can be imported, without importing it.

  Args:
    extra: of Twinmesh, which brings the package.
    what: needs it.

  Raises:
    ValueError: it is not installed.
  """
  if importlib.util.find_spec(package) is None:
    raise ValueError(
      f"{what} needs the package {package}: pip install 'twinmesh[{extra}]'"
    )
