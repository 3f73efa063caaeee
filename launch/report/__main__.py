"""Renders a run directory as one page, or checks its event log.

python -m launch.report --run=runs/first
python -m launch.report --check=runs/first      only checks the event log
"""

import pathlib
import sys

from absl import app, flags

from launch.report import page

_RUN = flags.DEFINE_string("run", None, "Directory of the run.")
_CHECK = flags.DEFINE_string(
  "check", None, "Directory of a run whose event log is only checked."
)


def main(argv: list[str]) -> None:
  """Writes the page and prints where it is, or checks."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  if _CHECK.value is not None:
    sys.exit(page.check_run(pathlib.Path(_CHECK.value)))
  try:
    print(page.write(pathlib.Path(str(_RUN.value))))
  except OSError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  flags.mark_flags_as_mutual_exclusive(["run", "check"], required=True)
  app.run(main)
