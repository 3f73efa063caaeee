"""A launch script of XManager: every variation of a config as a work unit.

  xmanager launch launch/xm.py -- --config=FILE --workdir=DIR --parallel=2

Work units are processes of this host that run `launch.train`; they need neither
Docker nor Bazel. The file's sweep() lists them, as for `launch.sweep`, which
compares their runs, too: python -m launch.sweep --workdir=DIR --table. The same
command goes on with runs that have not come to their end.
"""

import asyncio
import importlib
import pathlib
import sys
from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

_HERE = pathlib.Path(__file__).resolve().parent
# XManager puts this directory first: there, `http` would be ours.
sys.path[:] = [str(_HERE.parent) if x == str(_HERE) else x for x in sys.path]
if "xmanager" in sys.modules:
  # It has a flag that it gives to every script, and does so without importing.
  importlib.import_module("xmanager.xm.utils")

_CONFIG = absl_flags.DEFINE_string(
  "config", None, "A Python file, or FILE.py:ARGUMENT.", required=True
)
_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Parent directory of all runs.", required=True
)
_PARALLEL = absl_flags.DEFINE_integer(
  "parallel", 1, "Runs at the same time.", lower_bound=1
)


def commands(path: str, workdir: str) -> list[list[str]]:
  """Returns the arguments of Python for every run of a config's sweep().

  Raises:
    ValueError: the file cannot be run, or lists none.
  """
  # Not on top: XManager takes the first place of the path away by now.
  sys.path.insert(0, str(_HERE.parent))
  from launch.cli import config_file
  from rl.settings import overrides

  # As in launch.cli.flags, whose --config would be a second one.
  head, separator, _ = path.partition(".py:")
  module = config_file.load(pathlib.Path(f"{head}.py" if separator else path))
  runs = list(getattr(module, "sweep", list)())
  if not runs:
    raise ValueError(f"{path} has no sweep() that lists runs; add one")
  return [
    [
      *("-m", "launch.train", f"--config={path}"),
      f"--workdir={pathlib.Path(workdir) / f'run_{number:03d}'}",
      *(overrides.argument(name, str(value)) for name, value in run.items()),
    ]
    for number, run in enumerate(runs)
  ]


def main(argv: Sequence[str]) -> None:
  """Starts all work units, some at a time, and waits for them."""
  from rl.settings import checks
  from twinmesh import error_codes

  if len(argv) > 1:
    unexpected = f"unexpected arguments: {' '.join(argv[1:])}"
    error_codes.fail(unexpected, "TM-C02")
  try:
    checks.installed("launch.xm", "xm", "xmanager")
    listed = commands(_CONFIG.value, _WORKDIR.value)
  except ValueError as error:
    error_codes.fail(error)
  from xmanager import xm  # pyright: ignore[reportMissingImports]

  try:
    xm.run_in_asyncio_loop(_play)(listed)
  except RuntimeError as error:  # Of XManager, once all others have ended.
    failed = (
      f"a run has failed, and says why above: {error}; python -m launch.sweep "
      f"--workdir={_WORKDIR.value} --table names it"
    )
    error_codes.fail(failed, "TM-X03", status=1)


async def _play(listed: Sequence[Sequence[str]]) -> None:
  """Plays all runs, some at a time."""
  from xmanager import xm, xm_local  # pyright: ignore[reportMissingImports]

  places = asyncio.Semaphore(_PARALLEL.value)
  title = pathlib.Path(_WORKDIR.value).name
  async with xm_local.create_experiment(title) as made:
    binary = xm.binary(
      executor_spec=xm_local.Local.Spec(),
      path=sys.executable,
      env_vars={"PYTHONPATH": str(_HERE.parent)},
    )
    (python,) = made.package([binary])

    async def run(arguments: Sequence[str]) -> None:
      async with places:
        job = xm.Job(python, xm_local.Local(), args=list(arguments))
        unit = await made.add(job)
        await unit.wait_until_complete()

    # The end of the experiment raises for those that fail.
    await asyncio.gather(*map(run, listed), return_exceptions=True)


if __name__ == "__main__":
  from launch.cli import command_help

  app.run(main, flags_parser=command_help.parse)
