"""Stands before an application: lets requests in, or refuses them unread."""

from starlette import requests, types

from launch.gateway import access, error_replies, json_fields


class Gate:
  """An ASGI application that passes on what is allowed.

  `request.state.client` is then the name of the client.
  """

  def __init__(self, app: types.ASGIApp, rules: access.Access):
    self._app = app
    self._rules = rules

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    """Answers one request; called by the ASGI server."""
    request = requests.Request(scope)
    try:
      request.state.client = self._rules.client(
        scope["method"], scope["path"], request.headers
      )
    except json_fields.BadRequest as error:
      response = await error_replies.reply(request, error)
      await response(scope, receive, send)
      return
    await self._app(scope, receive, send)
