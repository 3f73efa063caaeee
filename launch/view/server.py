"""Serves the page over all runs of a directory, to this machine only.

  GET /              the page, with its modules and style
  GET /api/runs      /api/curves    /api/metrics
      /api/run       /api/index     /api/trajectory

Nothing is written, and nothing but the files of the page and the runs below the
directory can be asked for: a run is named as the list names it. Texts of a run
reach the page as JSON, and its policy allows no script but its own.
"""

import asyncio
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

from starlette import applications, requests, responses, routing, types

from launch.http import access, json_fields
from launch.report import frozen, trajectory_index
from launch.view import run_pages, runs

_POLICY = (
  "default-src 'none'; script-src 'self'; style-src 'self'; "
  "connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'"
)
_HEADERS = {
  "content-security-policy": _POLICY,
  "cross-origin-resource-policy": "same-origin",
  "cross-origin-opener-policy": "same-origin",
  "referrer-policy": "no-referrer",
  "x-content-type-options": "nosniff",
  # Asked for again each time, and answered with 304 if it is the same.
  "cache-control": "no-cache",
}
_KINDS = {
  ".html": "text/html",
  ".css": "text/css",
  ".js": "text/javascript",
}
_MAX_DIGITS = 15

Fields = Mapping[str, str]


class View:
  """The application.

  Args:
    root: of the runs.
    hosts: names that requests may be addressed to, besides those of loopback.
  """

  def __init__(self, root: pathlib.Path, hosts: Iterable[str] = ()):
    self._directory = runs.RunsDirectory(root)
    self._pages = run_pages.RunPages()
    # Both keep what they have read, so one thread asks each. A long log that is
    # read holds up the list of runs no more than one trajectory.
    self._threads = {
      name: futures.ThreadPoolExecutor(1, f"view-{name}")
      for name in ("list", "page", "line")
    }
    self._rules = access.Access(hosts=frozenset(hosts))
    self._files = {
      path.name: path
      for path in frozen.STATIC.iterdir()
      if path.suffix in _KINDS
    }
    self.app = applications.Starlette(
      routes=[
        routing.Route("/", self._file, methods=["GET"]),
        routing.Route("/{name}", self._file, methods=["GET"]),
        *(
          routing.Route(f"/api/{name}", self._route(*way), methods=["GET"])
          for name, way in self._answers().items()
        ),
      ],
      exception_handlers={json_fields.BadRequest: _refused, Exception: _failed},
    )

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    """Answers one request; called by the ASGI server."""

    async def guarded(message: types.Message) -> None:
      if message["type"] == "http.response.start":
        message["headers"] += [
          (name.encode(), value.encode()) for name, value in _HEADERS.items()
        ]
      await send(message)

    request = requests.Request(scope)
    try:
      self._rules.client(request.method, scope["path"], request.headers)
    except json_fields.BadRequest as error:
      await _reply(error)(scope, receive, guarded)
      return
    await self.app(scope, receive, guarded)

  def close(self) -> None:
    """Ends the threads that read, once they have read."""
    for thread in self._threads.values():
      thread.shutdown(cancel_futures=True)

  async def _file(self, request: requests.Request) -> responses.Response:
    name = request.path_params.get("name", "index.html")
    path = self._files.get(name)
    if path is None:
      raise json_fields.BadRequest(
        f"there is no {json_fields.cut(name, 80)} here; ask for /", status=404
      )
    text = await asyncio.to_thread(path.read_text, "utf-8")
    return _tagged(request, text, _KINDS[path.suffix])

  def _answers(self) -> dict[str, tuple[str, Callable[[Fields], Any]]]:
    """Returns thread and function of the paths of /api/, by name."""
    lists, pages = self._directory, self._pages
    return {
      "runs": ("list", lambda fields: lists.overview()),
      "curves": ("list", lambda fields: lists.curves(_of(fields, "metric"))),
      "metrics": (
        "list",
        lambda fields: lists.metrics_of(self._run(fields).name),
      ),
      "run": (
        "page",
        lambda fields: pages.data(
          self._run(fields).path, log=fields.get("log") != "later"
        ),
      ),
      "index": ("page", lambda fields: pages.index(self._run(fields).path)),
      "trajectory": ("line", self._trajectory),
    }

  def _route(self, thread: str, answer: Callable[[Fields], Any]) -> Any:
    async def reply(request: requests.Request) -> responses.Response:
      loop = asyncio.get_running_loop()
      text = await loop.run_in_executor(
        self._threads[thread],
        lambda: frozen.json_text(answer(request.query_params)),
      )
      return _tagged(request, text, "application/json")

    return reply

  def _run(self, fields: Fields) -> runs.ViewedRun:
    name = _of(fields, "run")
    run = self._directory.look().get(name)
    if run is None:
      raise json_fields.BadRequest(
        f"there is no run {json_fields.cut(name, 80)} here; the list at #runs "
        "has all",
        status=404,
      )
    return run

  def _trajectory(self, fields: Fields) -> dict[str, Any]:
    path = self._run(fields).path
    round_, offset = _count(fields, "round"), _count(fields, "offset")
    try:
      return self._pages.detail(path, round_, offset)
    except trajectory_index.NoTrajectory as error:
      raise json_fields.BadRequest(str(error), status=404) from error


def _of(fields: Fields, name: str) -> str:
  if name not in fields:
    raise json_fields.BadRequest(f"{name} is missing; add ?{name}=...")
  return fields[name]


def _count(fields: Fields, name: str) -> int:
  text = _of(fields, name)
  if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
    raise json_fields.BadRequest(
      f"{name}={json_fields.cut(text, 40)} must be a count of at most "
      f"{_MAX_DIGITS} digits"
    )
  return int(text)


def _tagged(
  request: requests.Request, text: str, kind: str
) -> responses.Response:
  """Returns a reply that a browser needs not load twice."""
  body = text.encode()
  tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
  if request.headers.get("if-none-match") == tag:
    return responses.Response(status_code=304, headers={"etag": tag})
  return responses.Response(body, headers={"etag": tag}, media_type=kind)


def _reply(error: json_fields.BadRequest) -> responses.Response:
  return responses.JSONResponse({"error": str(error)}, error.status)


async def _refused(
  request: requests.Request, error: Exception
) -> responses.Response:
  del request
  assert isinstance(error, json_fields.BadRequest)
  return _reply(error)


async def _failed(
  request: requests.Request, error: Exception
) -> responses.Response:
  del request
  text = f"the run cannot be read: {type(error).__name__}"
  return responses.JSONResponse({"error": text}, 500)
