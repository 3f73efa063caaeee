"""Renders a run directory as one page, or checks its event log.

python -m launch.report --run=runs/first
python -m launch.report --run=runs/first --run=runs/second
python -m launch.report --check=runs/first      only checks the event log
python -m launch.report --tamper=runs/first     tests the checks themselves
"""

import pathlib
import sys

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, steps, workdir
from launch.report import comparison, log_check, page
from rl.runtime import disk
from rl.settings import annotations
from twinmesh import error_codes

_RUN = absl_flags.DEFINE_multi_string(
  "run", None, "Directory of a run; several are compared, too."
)
_CHECK = absl_flags.DEFINE_string(
  "check", None, "Directory of a run whose event log is only checked."
)
_TAMPER = absl_flags.DEFINE_string(
  "tamper",
  None,
  "Directory of a run; prints which changes of its event log would be noticed.",
)


@flags.command
def main() -> None:
  """Writes the page and prints where it is, or checks."""
  with flags.exit_on_setting_error():
    given = (_RUN.value, _CHECK.value, _TAMPER.value)
    if given.count(None) != len(given) - 1:
      raise annotations.SettingError(
        "name one of --run=DIR, --check=DIR and --tamper=DIR"
      )
    runs = [pathlib.Path(run) for run in _RUN.value or ()]
    for run in runs:
      workdir.check_exists(run)
  with steps.Steps(sys.stderr) as shown:
    if _CHECK.value is not None:
      shown.phase("checking the log")
      sys.exit(page.check_run(pathlib.Path(_CHECK.value)))
    if _TAMPER.value is not None:
      shown.phase("changing the log, event by event")
      try:
        print(log_check.tampered(pathlib.Path(_TAMPER.value)))
      except log_check.UnreadableLog as error:
        error_codes.fail(error, status=1)
      return
    try:
      for number, run in enumerate(runs, 1):
        shown.phase(f"checking the log and writing report {number}/{len(runs)}")
        print(page.write(run))
      if len(runs) > 1:
        is_tuning = comparison.are_tuning(runs)
        metric, less = comparison.metric_of(None, is_tuning)
        compared = comparison.read(runs, metric)
        print(comparison.text(compared, metric, less))
    except OSError as error:
      error_codes.fail(disk.failure(error, runs[0]), "TM-D09", status=1)
    except ValueError as error:
      error_codes.fail(error, status=1)


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse_without_settings)
