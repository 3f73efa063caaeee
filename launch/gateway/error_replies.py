"""Replies to requests that fail, in the form of their API."""

from starlette import exceptions, requests, responses

from launch.gateway import openai_replies, session_record
from launch.http import admission, disconnect, json_fields
from rl.agents import sessions as sessions_lib
from rl.engine import contract

_STATUS: dict[type[Exception], tuple[int, str]] = {
  contract.EngineClosed: (503, "engine_closed"),
  TimeoutError: (504, "timeout"),
  sessions_lib.UnknownSession: (404, "unknown_session"),
  sessions_lib.FinishedSession: (410, "finished_session"),
  sessions_lib.FullSession: (413, "full_session"),
  admission.Busy: (429, "too_many_requests"),
  admission.Draining: (503, "draining"),
  sessions_lib.TooManySessions: (429, "too_many_sessions"),
  session_record.Unrecorded: (507, "unrecorded"),
}
_REFUSED = "bad_request"
_RETRY_S = 2
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}

HANDLED = (
  *_STATUS,
  json_fields.BadRequest,
  exceptions.HTTPException,
  disconnect.ClientGone,
  Exception,
)
"""Errors that `reply` turns into replies."""


async def reply(
  request: requests.Request, error: Exception
) -> responses.Response:
  """Returns the reply to a request that has failed."""
  if isinstance(error, disconnect.ClientGone):
    return responses.Response(status_code=499)  # The client cannot read it.
  path = request.scope["path"]
  api = {"type": "error"} if path.endswith("/v1/messages") else {}
  if isinstance(error, json_fields.BadRequest):
    kind = _KINDS.get(error.status, "invalid_request_error")
    code = error.code or _REFUSED
    body = openai_replies.error(str(error), kind, error.param, code)
    asks = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return responses.JSONResponse(api | body, error.status, asks)
  if isinstance(error, exceptions.HTTPException):
    text = f"{request.method} {path}: {error.detail}"
    body = openai_replies.error(text, code=_REFUSED)
    return responses.JSONResponse(api | body, error.status_code, error.headers)
  status, code = _STATUS.get(type(error), (500, "internal_error"))
  kind = "invalid_request_error" if status < 500 else "server_error"
  text = "the server failed" if status == 500 else str(error)
  body = openai_replies.error(text, _KINDS.get(status, kind), code=code)
  # Clients retry every 5xx by themselves, which only helps a busy server.
  retry = {"x-should-retry": "false"}
  if status == 429 or code == "draining":
    retry = {"retry-after": str(_RETRY_S)}
  return responses.JSONResponse(api | body, status, retry)
