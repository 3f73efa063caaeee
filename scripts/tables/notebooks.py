"""How long notebooks take."""

from collections.abc import Mapping
from typing import Any

from scripts.tables import cells


def notebooks(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the seconds of each notebook."""
  yield "notebook", "CPU time", "wall time"
  for name, row in result["rows"].items():
    yield f"`{name}`", f"{row['cpu_s']:.0f} s", f"{row['wall_s']:.0f} s"
