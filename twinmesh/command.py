"""The command `twinmesh COMMAND ...`, also as `python -m twinmesh`.

A command is a module that Python runs as `python -m` would: `twinmesh train` is
`python -m launch.train`, with the same flags.
"""

import difflib
import importlib.metadata
import os
import platform
import runpy
import signal
import sys

from twinmesh import error_codes, extras, top_packages

COMMANDS = {
  "new": ("twinmesh.new_project", "begins a project with a task of your own"),
  "try": ("launch.try_environment", "tries an environment without a model"),
  "train": ("launch.train", "trains an agent"),
  "status": ("launch.status", "tells what a run is doing"),
  "view": ("launch.view", "shows all runs of a directory, live"),
  "report": ("launch.report", "renders a run as a page, or checks its log"),
  "evaluate": ("launch.evaluate", "plays held-out tasks"),
  "sweep": ("launch.sweep", "trains every variation of a config"),
  "serve": ("launch.serve", "answers the APIs of OpenAI and Anthropic"),
  "export": ("launch.export", "writes a Hugging Face checkpoint"),
  "replay": ("launch.replay", "takes apart an update that was not finite"),
  "simulate": ("launch.simulate", "runs a schedule on a simulated cluster"),
  "plan": ("launch.plan", "searches the best use of a fleet"),
  "manifest": ("launch.manifest", "prints a Kubernetes JobSet for a run"),
  "reward-server": ("launch.reward_server", "serves the rewards of a config"),
  "worker": ("launch.worker", "adds an engine to a run"),
  "host": ("launch.host", "offers this host to runs and sweeps"),
  "explain": ("twinmesh.explain", "says what an error means, and the cure"),
}
"""Module and summary of each command, in the order of a first hour."""
_SHORT = {"eval": "evaluate"}


def main() -> None:
  """Runs the command that the first argument names."""
  name = sys.argv[1] if len(sys.argv) > 1 else "--help"
  if name in ("-h", "--help", "--helpshort", "help"):
    # A reader that has seen enough, as in `... | head`, is no error.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(_overview())
    return
  try:
    top_packages.check()
  except top_packages.Shadowed as error:
    error_codes.fail(error, status=1)
  if name == "--version":
    print(_versions())
    return
  chosen = _SHORT.get(name, name).replace("_", "-")
  if chosen not in COMMANDS:
    error_codes.fail(_unknown(chosen), "TM-C04")
  # As `python -m` has it, for tasks beside the user; last, so that no file
  # there takes the place of a package.
  sys.path.append(os.getcwd())
  del sys.argv[1]
  extras.tell_instead_of_tracebacks()
  runpy.run_module(COMMANDS[chosen][0], run_name="__main__", alter_sys=True)


def _overview() -> str:
  width = max(map(len, COMMANDS))
  lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
  return "\n".join(
    [
      "Usage: twinmesh COMMAND [FLAGS]",
      "",
      *lines,
      "",
      "twinmesh COMMAND --help lists the flags of a command, and",
      "twinmesh train --config=FILE --config.help all settings of a run.",
      "twinmesh explain CODE says more of an error that ended with a code.",
      "twinmesh --version prints the versions that are installed.",
    ]
  )


def _versions() -> str:
  names = ("twinmesh", "jax", "flax", "optax")
  found = ", ".join(f"{name} {_version(name)}" for name in names)
  return f"{found}, Python {platform.python_version()}; {top_packages.ROOT}"


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "(not installed)"


def _unknown(name: str) -> str:
  near = difflib.get_close_matches(name, [*COMMANDS, *_SHORT], 1)
  way_out = f"did you mean {near[0]}?" if near else "twinmesh --help lists all"
  return f"there is no command {name}; {way_out}"
