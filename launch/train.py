"""Trains an agent: python -m launch.train --config=FILE --workdir=DIR."""

import sys

from absl import app
from absl import flags as absl_flags

from launch import devices, flags, local, workdir

_WORKDIR = absl_flags.DEFINE_string(
  "workdir",
  None,
  "Directory of the run. The same command goes on where a run in it ended.",
  required=True,
)


def main(argv: list[str]) -> None:
  """Loads and checks settings and devices, claims the directory, runs."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  with flags.exit_on_setting_error():
    experiment = flags.load_from_command_line()
    devices.prepare(experiment.placement)
    experiment.placement.meshes()
    # Last: it writes, and clears what a run left that saved nothing.
    lock = workdir.claim(_WORKDIR.value, experiment)
  with lock:
    sys.exit(local.train(experiment, _WORKDIR.value))


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
