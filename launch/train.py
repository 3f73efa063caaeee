"""Trains an agent: python -m launch.train --config=FILE --workdir=DIR.

--explain instead of --workdir prints the placement and memory of the run.
"""

import dataclasses
import os
import signal
import sys

import jax
from absl import app
from absl import flags as absl_flags

import launch
from launch import explain
from launch.cli import flags, jax_setup, known_programs, parent, workdir
from launch.run import local
from rl import assemble
from rl import experiment as experiment_lib
from rl.runtime import mesh_thread
from rl.settings import checks, overrides

_WORKDIR = absl_flags.DEFINE_string(
  "workdir",
  "",
  "Directory of the run. The same command continues the run in it.",
)
_EXPLAIN = absl_flags.DEFINE_bool(
  "explain",
  False,
  "Prints every parameter with its place on both meshes and the memory that"
  " the run needs on each device; starts nothing and needs no device.",
)
_QUIET = absl_flags.DEFINE_bool(
  "quiet", False, "Shows warnings and the result, but no progress."
)
_BACKEND = absl_flags.DEFINE_string(
  "backend",
  None,
  "Starts the processes of engines and learner: local, addresses, slurm, ray"
  " or xm, with fields as in 'ray(cpus=4)'. The same as"
  " --config.placement.backend.",
)
_END_WITH_STDIN = absl_flags.DEFINE_bool(
  "end_with_stdin",
  False,
  "Stops at the next safe point once the standard input closes, as Ctrl-C does:"
  " for programs that start runs.",
)
# Shows --config in --help.
absl_flags.adopt_module_key_flags(flags)
absl_flags.adopt_module_key_flags(known_programs)


@flags.command
def main() -> None:
  """Loads and checks settings and devices, claims the directory, runs."""
  if _END_WITH_STDIN.value:
    parent.watch(lambda: os.kill(os.getpid(), signal.SIGINT))
  with flags.exit_on_setting_error():
    if _BACKEND.value is not None:
      flags.override("placement.backend", _BACKEND.value, "backend")
    experiment = flags.load_from_command_line(experiment_lib.check_experiment)
    lock = None
    if not (_EXPLAIN.value and explain.is_absent(experiment.initial)):
      workdir.check_initial(_WORKDIR.value, experiment)
      experiment.validate_teacher()
    if not _EXPLAIN.value:
      experiment = _prepared(experiment)
      # Last: it writes, and clears a run without checkpoints.
      lock = workdir.claim(_WORKDIR.value, experiment)
  if lock is None:
    # Tracing shapes may create a constant, and that needs some device.
    jax.config.update("jax_platforms", "cpu")
    explain.show(experiment, sys.stdout)
    return
  with lock:
    code = local.train(experiment, _WORKDIR.value, launch.BEGAN_S, _QUIET.value)
  if mesh_thread.is_one_left_behind():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


def _prepared(
  experiment: experiment_lib.Experiment,
) -> experiment_lib.Experiment:
  """Returns the settings for the devices here, which can run them."""
  if not _WORKDIR.value:
    raise overrides.SettingError(
      "--workdir is missing; name a directory, as in --workdir=runs/mine, or "
      "ask for --explain"
    )
  experiment.validate_installed()
  experiment.validate_tasks()
  checks.validate_installed(experiment.tracker)
  jax_setup.prepare(experiment.placement)
  fitted = assemble.fit(experiment)
  # The engine is fitted again at each start, but a dtype is that of the run.
  return dataclasses.replace(fitted, engine=experiment.engine)


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
