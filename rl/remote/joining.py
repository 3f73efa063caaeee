"""The address at which a run lets engines in that others start.

  RemoteEngines.admit --write--> RUN/.join --read--> launch.worker --join=RUN

Only the user who has launched the run can read it. Where the run listens on
its own host only, engines must join from that host.
"""

import json
import os
import pathlib
import socket
from typing import Any

from rl.backends import local
from rl.remote import workers

FILE = ".join"


def write(run_dir: pathlib.Path, address: str, token: str) -> None:
  """Writes the address of a run into its directory, for its user alone."""
  where = {"host": socket.gethostname(), "address": address, "token": token}
  remove(run_dir)
  flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
  with open(os.open(run_dir / FILE, flags, 0o600), "w") as output:
    json.dump(where, output)


def remove(run_dir: pathlib.Path) -> None:
  """Removes the address of a run, if there is one."""
  (run_dir / FILE).unlink(missing_ok=True)


def _reason(run_dir: pathlib.Path, is_alive: bool) -> str:
  if not run_dir.is_dir():
    return "does not exist; name the directory of a run"
  if not (run_dir / "config.json").exists():
    return "holds no run: no config.json"
  if not is_alive:
    return (
      "takes no engines: no process works on that run, which has ended or was "
      "stopped; the same command goes on if rounds are left"
    )
  return (
    "takes no engines: all that it has are in its own process, or it has just "
    "begun; start it with --config.placement.decode_processes=1"
  )


def read(run_dir: pathlib.Path, is_alive: bool) -> tuple[str, str]:
  """Returns address and token of a run.

  Args:
    is_alive: some process works on it, by its directory.

  Raises:
    Refused: no engine of this host can join it.
  """
  try:
    where = json.loads((run_dir / FILE).read_text())
    found = [where[name] for name in ("host", "address", "token")]
    host, address, token = map(_text, found)
  except FileNotFoundError:
    raise workers.Refused(
      f"--join={run_dir} {_reason(run_dir, is_alive)}"
    ) from None
  except OSError as error:
    raise workers.Refused(f"--join={run_dir}: {error.strerror}") from error
  except (ValueError, KeyError, TypeError) as error:
    raise workers.Refused(
      f"--join={run_dir}: {FILE} is damaged: {error}; start the run again"
    ) from error
  if host != socket.gethostname() and local.LOOPBACK in address:
    raise workers.Refused(
      f"--join={run_dir}: it runs on {host} and listens there only, so engines "
      "join on that host; start it with another --backend, such as addresses"
    )
  return address, token


def _text(value: Any) -> str:
  if not isinstance(value, str):
    raise TypeError(f"{value!r} must be a string")
  return value
