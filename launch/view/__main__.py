"""One page over all runs of a directory, live: python -m launch.view RUNS_DIR.

RUNS_DIR holds runs, at any depth up to four, or is one. The page lists them,
draws any metric with bands over seeds, compares two, and shows one in full,
with its trajectories token by token. It needs no network, writes nothing, and
is served to this machine only. Ctrl-C or SIGTERM ends it.
"""

import asyncio
import contextlib
import pathlib
import socket
import sys
from collections.abc import Sequence

from absl import app as absl_app
from absl import flags as absl_flags

from launch.cli import flags
from launch.http import http_server
from launch.run import signals
from launch.view import server
from rl.runtime import log_line
from rl.settings import annotations

_HOST = "127.0.0.1"
_GRACE_S = 1
_PORT = absl_flags.DEFINE_integer(
  "port", 8090, "Port; 0 takes any free one.", 0, 65535
)
_ALLOW_HOST = absl_flags.DEFINE_multi_string(
  "allow_host",
  [],
  "Name under which requests reach this server, as through a proxy; may be"
  " repeated.",
)


def main(argv: Sequence[str]) -> None:
  """Checks the directory and the port; serves until a signal."""
  with flags.exit_on_setting_error():
    root = _root(argv[1:])
    port = http_server.bind_flags(_HOST, _PORT.value)
  with contextlib.closing(port):
    asyncio.run(_serve(root, port))


def _root(arguments: Sequence[str]) -> pathlib.Path:
  """Returns the directory that is named.

  Raises:
    SettingError: none is, or it is not there.
  """
  if len(arguments) != 1:
    raise annotations.SettingError("name one directory of runs, as in runs")
  root = pathlib.Path(arguments[0])
  if not root.is_dir():
    raise annotations.SettingError(
      f"{root} is not a directory; name the parent of the --workdir of runs"
    )
  return root


async def _serve(root: pathlib.Path, port: socket.socket) -> None:
  stopping = asyncio.Event()
  signals.Signals(stopping.set, log_line.tell)
  view = server.View(root, [name.lower() for name in _ALLOW_HOST.value])
  try:
    async with http_server.listening(view, port, grace_s=_GRACE_S) as address:
      log_line.tell(f"the runs of {root} are shown at {address}", sys.stdout)
      await stopping.wait()
  finally:
    view.close()


if __name__ == "__main__":
  absl_app.run(main, flags_parser=flags.parse_without_settings)
