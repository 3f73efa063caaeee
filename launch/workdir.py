"""The directory of a run: claimed by one process, for one config."""

import fcntl
import json
import os
import pathlib
import shlex
import shutil
import sys
from typing import Any, TextIO

from rl import config, settings

_RECORDS = (
  "events.jsonl",
  "spans.jsonl",
  "metrics.jsonl",
  "evaluations.jsonl",
)
_MAY_CHANGE = ("rounds", "stall_s", "evaluation.", "keeping.")


def claim(path: str | os.PathLike, experiment: config.Experiment) -> TextIO:
  """Writes config.json and returns a lock that is held while it is open.

  What a run left that never saved a checkpoint is removed: it starts over.

  Raises:
    SettingError: the directory cannot be written, another process uses it, or
      it holds a run with other settings. Settings that change nothing in what
      was learned (rounds, evaluation, keeping, stall_s) may differ.
  """
  directory = pathlib.Path(path)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / ".lock").open("a")
  except OSError as error:
    raise settings.SettingError(
      f"--workdir={directory} cannot be written: {error.strerror}"
    ) from error
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    lock.close()
    raise settings.SettingError(
      f"--workdir={directory} is in use by another process; wait for it or "
      "choose another directory"
    ) from None
  if _has_checkpoint(directory):
    _check_same(directory, experiment)
  else:
    _clear(directory)
  text = json.dumps(settings.to_json(experiment), indent=2) + "\n"
  partial = directory / "config.json.partial"
  partial.write_text(text)
  partial.replace(directory / "config.json")
  return lock


def read(path: str | os.PathLike) -> config.Experiment:
  """Returns the settings of a run directory.

  Raises:
    SettingError: there is no run, or its config cannot be read.
  """
  file = pathlib.Path(path) / "config.json"
  try:
    data: Any = json.loads(file.read_text())
  except OSError as error:
    raise settings.SettingError(
      f"{file.parent} holds no run: {file.name}: {error.strerror}"
    ) from error
  except ValueError as error:
    raise settings.SettingError(f"{file} is no JSON: {error}") from error
  return settings.from_json(data)


def _has_checkpoint(directory: pathlib.Path) -> bool:
  steps = directory.glob("checkpoints/*")
  return any(path.name.split(".")[0].isdecimal() for path in steps)


def _clear(directory: pathlib.Path) -> None:
  for name in _RECORDS:
    (directory / name).unlink(missing_ok=True)
  shutil.rmtree(directory / "trajectories", ignore_errors=True)
  shutil.rmtree(directory / "tensorboard", ignore_errors=True)


def _check_same(directory: pathlib.Path, experiment: config.Experiment) -> None:
  changes = settings.difference(read(directory), experiment)
  changes = [line for line in changes if not line.startswith(_MAY_CHANGE)]
  if changes:
    listing = "\n  ".join(changes)
    raise settings.SettingError(
      f"--workdir={directory} holds a run with other settings:\n  {listing}\n"
      f"go on with --config={directory}/config.json, or choose another "
      "directory"
    )


def command() -> str:
  """Returns the command line of this process, as a user would repeat it."""
  module = getattr(sys.modules["__main__"], "__spec__", None)
  start = f"python -m {module.name}" if module else f"python {sys.argv[0]}"
  return shlex.join([*start.split(), *sys.argv[1:]])
