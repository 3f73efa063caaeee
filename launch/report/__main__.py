"""Renders a run directory as one page, or checks its event log.

python -m launch.report --run=runs/first
python -m launch.report --run=runs/first --run=runs/second
python -m launch.report --check=runs/first      only checks the event log
python -m launch.report --tamper=runs/first     tests the checks themselves
"""

import pathlib
import sys

from absl import app, flags

from launch.report import comparison, log_check, page

_RUN = flags.DEFINE_multi_string(
  "run", None, "Directory of a run; several are compared by success, too."
)
_CHECK = flags.DEFINE_string(
  "check", None, "Directory of a run whose event log is only checked."
)
_TAMPER = flags.DEFINE_string(
  "tamper",
  None,
  "Directory of a run; prints which changes of its event log would be noticed.",
)
_METRIC = "success"


def main(argv: list[str]) -> None:
  """Writes the page and prints where it is, or checks."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  if _CHECK.value is not None:
    sys.exit(page.check_run(pathlib.Path(_CHECK.value)))
  if _TAMPER.value is not None:
    try:
      print(log_check.tampered(pathlib.Path(_TAMPER.value)))
    except log_check.UnreadableLog as error:
      sys.exit(f"error: {error}")
    return
  try:
    runs = [pathlib.Path(run) for run in _RUN.value or ()]
    for run in runs:
      print(page.write(run))
    if len(runs) > 1:
      compared = comparison.read(runs, _METRIC)
      print(comparison.text(compared, _METRIC, less=False))
  except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  flags.mark_flags_as_mutual_exclusive(
    ["run", "check", "tamper"], required=True
  )
  app.run(main)
