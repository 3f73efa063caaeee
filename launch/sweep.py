"""Runs every variation of a config: python -m launch.sweep --config=FILE.

The file's sweep() lists the overrides of each run. Every run is a process,
`launch.train` with its own directory and log, so a failed run does not end the
others. The same command continues a stopped sweep.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping

from absl import app
from absl import flags as absl_flags

from launch.cli import flags, workdir
from rl import experiment
from rl.settings import overrides as overrides_lib

_WORKDIR = absl_flags.DEFINE_string(
  "workdir", None, "Parent directory of all runs.", required=True
)
_PARALLEL = absl_flags.DEFINE_integer(
  "parallel", 1, "Runs at the same time.", lower_bound=1
)
# Shows --config in --help.
absl_flags.adopt_module_key_flags(flags)


@flags.command
def main() -> None:
  """Checks every run, then starts them; exits with 1 if one failed."""
  path = absl_flags.FLAGS.config
  with flags.exit_on_setting_error():
    given = flags.overrides()
    flags.load_from_command_line(experiment.check_experiment)
    swept = flags.sweep(path)
    for overrides in swept:
      _check_disjoint(given, overrides)
    runs = [{**given, **overrides} for overrides in swept]
    if not runs:
      raise overrides_lib.SettingError(
        f"{path} has no sweep() that lists runs; add one, or use launch.train"
      )
    root = pathlib.Path(_WORKDIR.value)
    directories = [root / f"run_{i:03d}" for i in range(len(runs))]
    for directory, overrides in zip(directories, runs, strict=True):
      workdir.check_initial(directory, flags.load(path, overrides))
  with concurrent.futures.ThreadPoolExecutor(_PARALLEL.value) as pool:
    codes = list(pool.map(_run, [path] * len(runs), runs, directories))
  for directory, overrides, code in zip(directories, runs, codes, strict=True):
    print(f"{directory}  {_outcome(directory, code)}  {_text(overrides)}")
  sys.exit(1 if any(codes) else 0)


def _check_disjoint(
  given: Mapping[str, str | None], overrides: Mapping[str, str | None]
) -> None:
  """Raises SettingError if a run would override the command line."""
  for key in given.keys() & overrides.keys():
    raise overrides_lib.SettingError(
      f"{overrides_lib.argument(key, given[key])} is given, but sweep() sets "
      f"{key} too; leave it out of one of them"
    )


def _run(
  path: str, overrides: Mapping[str, str | None], directory: pathlib.Path
) -> int:
  directory.mkdir(parents=True, exist_ok=True)
  command = [sys.executable, "-m", "launch.train", f"--config={path}"]
  command += [*flags.arguments(overrides), f"--workdir={directory}"]
  print(f"{directory}: {_text(overrides)}", flush=True)
  with (directory / "log.txt").open("a") as log:
    return subprocess.run(
      command,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      check=False,
    ).returncode


def _outcome(directory: pathlib.Path, code: int) -> str:
  if code:
    return f"failed with {code}, see log.txt"
  evaluations = directory / "evaluations.jsonl"
  lines = evaluations.read_text().splitlines() if evaluations.exists() else []
  if not lines:
    return "done"
  last = json.loads(lines[-1])
  if last["success"] is None:
    return f"no episode was graded: {last['fault']}"
  return f"success {last['success']:.1%}"


def _text(overrides: Mapping[str, str | None]) -> str:
  return " ".join(f"{key}={value}" for key, value in overrides.items())


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
