"""Stands before an application: lets requests in, or refuses them unread."""

import contextlib
import dataclasses
import time

from starlette import requests, types

from launch.gateway import error_replies, server_metrics
from launch.http import access, admission, json_fields

METRICS = "/metrics"
_ALWAYS = access.OPEN_PATHS | {METRICS}


@dataclasses.dataclass(frozen=True)
class Gate:
  """An ASGI application that passes on what is allowed.

  `request.state.client` is then the name of the client.
  """

  app: types.ASGIApp
  rules: access.Access
  admitted: admission.Admission
  metrics: server_metrics.ServerMetrics

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    """Answers one request; called by the ASGI server."""
    status, start_s = 0, time.perf_counter()

    async def noting(message: types.Message) -> None:
      nonlocal status
      status = message.get("status", status)
      await send(message)

    try:
      with contextlib.ExitStack() as held:
        request = requests.Request(scope)
        try:
          self._enter(request, held)
        except (
          json_fields.BadRequest,
          admission.Busy,
          admission.Draining,
        ) as error:
          response = await error_replies.reply(request, error)
          await response(scope, receive, noting)
          return
        await self.app(scope, receive, noting)
    finally:
      seconds = time.perf_counter() - start_s
      self.metrics.ended(scope["path"], status, seconds)

  def _enter(
    self, request: requests.Request, held: contextlib.ExitStack
  ) -> None:
    method, path = request.method, request.scope["path"]
    client = self.rules.client(method, path, request.headers)
    request.state.client = client
    if path in _ALWAYS:
      return
    # What a session has is still to be had, and to be graded.
    asks = method == "POST" and not path.endswith("/finish")
    if asks and self.admitted.draining:
      raise admission.Draining("the server ends; ask another, or later")
    held.enter_context(self.admitted.answering(client))
