"""A process that works for a run in another: python -m launch.worker.

A run starts its workers itself and writes one line of JSON to their standard
input: where it listens, its token, and the name of the worker. That pipe stays
open; when it closes, the run has ended, and the worker ends too.

  python -m launch.worker --join=RUN

adds an engine to a run that has engines in processes of their own. The run is
on this host, unless it listens to others, as with --backend=addresses.
Ctrl-C or SIGTERM lets the engine go: it gets no new session, its own end or
move, and it exits with code 0. So does, at SIGTERM, an engine's process that
the run has started itself.
"""

import asyncio
import json
import os
import pathlib
import signal
import sys

from absl import app
from absl import flags as absl_flags
from websockets.asyncio import client

from launch.cli import config_file, flags, jax_setup, parent
from launch.run import status_server
from rl.remote import joining, workers
from rl.runtime import log_line
from rl.settings import overrides
from twinmesh import error_codes

_NORMAL = 1000

_JOIN = absl_flags.DEFINE_string(
  "join", "", "Directory of a run that an engine is added to."
)
_POOL = absl_flags.DEFINE_string(
  "pool", "decode", "Pool of the engine that is added."
)


async def work(socket: client.ClientConnection, data: str) -> int:
  """Becomes what it is told to be, and serves until the end.

  Returns:
    The exit code: 0 when the run has ended the connection, 1 when it was lost.
  """
  config_file.put_root_on_path()
  task = overrides.from_json(json.loads(data))
  jax_setup.prepare(task.placement)
  why = await task.build().serve(socket, "the run")
  was_lost = socket.close_code != _NORMAL
  log_line.tell(why if was_lost else "the run has let it go", sys.stdout)
  return int(was_lost)


async def _work_for_parent() -> int:
  with flags.exit_on_setting_error():
    told = _told()
  parent.watch(lambda: os._exit(0))
  try:
    socket, data = await workers.connect(**told)
  except workers.NotStarted as error:
    error_codes.fail(error, status=1)
  return await work(socket, data)


def _told() -> dict[str, str]:
  """Returns the line of the run that has started this process.

  Raises:
    SettingError: there is none, as a user has started it.
  """
  line = "" if sys.stdin.isatty() else sys.stdin.readline()
  try:
    return json.loads(line)
  except ValueError:
    raise overrides.SettingError(
      "--join is missing; name the directory of a run, as in --join=runs/first"
    ) from None


async def _join(run_dir: pathlib.Path, pool: str) -> int:
  is_alive = os.path.lexists(run_dir / status_server.FILE)
  with flags.exit_on_setting_error():
    where = joining.read(run_dir, is_alive)
    socket, name, data = await workers.join(*where, pool)
  log_line.tell(f"joins {run_dir} as {name}; Ctrl-C lets it go", sys.stdout)
  asyncio.get_running_loop().add_signal_handler(
    signal.SIGINT, signal.raise_signal, signal.SIGTERM
  )
  return await work(socket, data)


@flags.command
def main() -> None:
  """Joins a run, or works for the one that wrote to the standard input."""
  if _JOIN.value:
    sys.exit(asyncio.run(_join(pathlib.Path(_JOIN.value), _POOL.value)))
  sys.exit(asyncio.run(_work_for_parent()))


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse_without_settings)
