"""The server that the agents of a run ask for their answers."""

import contextlib
from collections.abc import AsyncIterator

from rl.agents import answer_stream, sessions

_GRACE_S = 1


@contextlib.asynccontextmanager
async def listen(
  engine: answer_stream.ServedEngine, opened: sessions.Sessions
) -> AsyncIterator[str]:
  """Serves an engine on a free port of loopback, and yields the address."""
  # Here, not on top: a run without agents needs no HTTP.
  from launch.gateway import app, http_server

  served = app.app(engine, opened)
  async with http_server.listening(
    served, http_server.bind(), grace_s=_GRACE_S
  ) as address:
    yield address
