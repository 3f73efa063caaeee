"""A process that works for a run in another: python -m launch.worker.

A run starts its workers itself and writes one line of JSON to their standard
input: where it listens, its token, and the name of the worker. That pipe stays
open; when it closes, the run has ended, and the worker ends too.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping

from launch.cli import config_file, jax_setup
from rl.remote import workers
from rl.settings import overrides


async def work(told: Mapping[str, str]) -> None:
  """Connects, becomes what it is told to be, and serves until the end."""
  socket, data = await workers.connect(**told)
  config_file.put_root_on_path()
  task = overrides.from_json(json.loads(data))
  jax_setup.prepare(task.placement)
  print(await task.build().serve(socket, "the run"), flush=True)


def _end_with_parent() -> None:
  sys.stdin.read()
  os._exit(0)


def main() -> None:
  """Works for the run that wrote to the standard input."""
  told = json.loads(sys.stdin.readline())
  threading.Thread(target=_end_with_parent, daemon=True).start()
  asyncio.run(work(told))


if __name__ == "__main__":
  main()
