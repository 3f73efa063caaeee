"""Settings that are programs, and those that may run without asking.

A config.json may keep a Python file, or name a command that is started: whoever
wrote it decides what runs here. Known are the config files of this checkout,
and all that a run of this user was started with; others need --trust_config.
"""

import hashlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags as absl_flags

from rl.settings import overrides

TRUST = absl_flags.DEFINE_bool(
  "trust_config",
  False,
  "Executes the code and the commands in a run's config.json even if they are"
  " of no run of yours: read them first.",
)

KEPT = "config_files"
_COMMANDS = ("command", "python", "decode_python")
_CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


def check(data: Mapping[str, Any]) -> None:
  """Checks that the programs of a config.json are known, or trusted.

  Raises:
    SettingError: names what would run.
  """
  if absl_flags.FLAGS["trust_config"].value:
    return
  found = dict(_programs(data))
  unknown = found.keys() - _remembered() if found else set()
  if unknown:
    unknown -= {_digest(_lines(path)) for path in _CONFIGS.rglob("*.py")}
  if unknown:
    names = ", ".join(sorted(found[digest] for digest in unknown))
    raise overrides.SettingError(
      f"it would run {names}, which neither this checkout nor a run of yours "
      "had; read it in that file, and add --trust_config to run it"
    )


def remember(data: Mapping[str, Any]) -> None:
  """Keeps what a run of this user starts with, so that `check` knows it."""
  new = dict(_programs(data)).keys() - _remembered()
  if not new:
    return
  file = _state_file()
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
      out.write("".join(f"{digest}\n" for digest in sorted(new)))
  except OSError:
    # Then the user is asked for --trust_config, which says all.
    return


def _programs(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the digest of all that would run, and its description."""
  kept = data.get(KEPT)
  for entry in kept.values() if isinstance(kept, dict) else ():
    if isinstance(entry, dict) and isinstance(entry.get("lines"), list):
      lines = [str(line) for line in entry["lines"]]
      yield _digest(lines), f"the code of {entry.get('path')}"
  for name, command in _commands(data):
    yield _digest([name, json.dumps(command)]), f"{name}={command!r:.200}"


def _commands(node: Any) -> Iterator[tuple[str, Any]]:
  if isinstance(node, list):
    for item in node:
      yield from _commands(item)
  elif isinstance(node, dict):
    for name, value in node.items():
      if name in _COMMANDS and value:
        yield name, value
      elif name != KEPT:
        yield from _commands(value)


def _digest(lines: list[str]) -> str:
  return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _lines(file: pathlib.Path) -> list[str]:
  return importlib.util.decode_source(file.read_bytes()).splitlines()


def _state_file() -> pathlib.Path:
  state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
  return pathlib.Path(state, "twinmesh", "known_programs").expanduser()


def _remembered() -> set[str]:
  try:
    return set(_state_file().read_text().splitlines())
  except (OSError, UnicodeDecodeError):
    return set()
