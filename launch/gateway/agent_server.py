"""The server that the agents of a run ask for their answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rl.agents import answer_stream, sessions

_GRACE_S = 1
_UNREAD_S = 3600.0
_ANSWER_S = 86_400.0  # The run decides how long it waits for an answer.


@contextlib.asynccontextmanager
async def listen(
  engine: answer_stream.ServedEngine,
  opened: sessions.Sessions,
  max_length: int,
) -> AsyncIterator[str]:
  """Serves an engine on a free port of loopback, and yields the address.

  Args:
    max_length: ids of a conversation that a request may send.
  """
  # Here, not on top: a run without agents needs no HTTP.
  from launch.gateway import app
  from launch.http import access, connections, http_server

  # The name of a session is a secret of its agent, which no page can send, so
  # bodies need not be declared as JSON.
  rules = access.Access(json_only=False)
  serving = app.Serving(
    answer_s=_ANSWER_S, max_length=max_length, opens_sessions=False
  )
  # In a thread: the text of every id is read.
  served = await asyncio.to_thread(app.app, engine, opened, serving, rules)
  # An agent may do other things before it reads.
  patience = connections.Patience(unread_s=_UNREAD_S)
  async with http_server.listening(
    served, http_server.bind(), grace_s=_GRACE_S, patience=patience
  ) as address:
    yield address
