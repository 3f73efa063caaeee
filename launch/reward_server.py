"""Computes rewards over HTTP: python -m launch.reward_server --config=FILE.

  POST /  task and transcripts -> grades        GET /  the rewards it computes

It computes the reward of the config and every part of it, whichever the config
says is computed by HTTP, or one reward by itself: --reward='exact_match'. A run
reaches it with envs.offload.http.Http(url=..., reward=...). --processes=N
computes in processes, which a reward that computes for long needs: otherwise
one call at a time is served, and a late one cannot be ended.

Only this machine is served, or, with --host, whoever sends a key of
--api_key_file: a run takes it from the environment variable that `key` of its
Http names. Ctrl-C or SIGTERM lets running calls end, for 5 s.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping

from absl import app as absl_app
from absl import flags as absl_flags
from starlette import applications, requests, responses, routing

from envs import base
from envs.offload import http, process_pool, wire
from launch.cli import flags
from launch.http import access, disconnect, http_server, json_fields
from launch.run import signals
from rl.runtime import log_line
from rl.settings import annotations

_REWARD = absl_flags.DEFINE_string(
  "reward", None, "A reward by itself, in place of a --config."
)
_HOST = absl_flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = absl_flags.DEFINE_integer(
  "port", 8080, "Port; 0 takes any free one.", 0, 65535
)
_API_KEY_FILE = absl_flags.DEFINE_string(
  "api_key_file",
  None,
  "File of keys, one a line; calls need one of them. Required unless --host is"
  " of this machine only.",
)
_ALLOW_HOST = absl_flags.DEFINE_multi_string(
  "allow_host",
  [],
  "Name under which calls reach a server on loopback, as through a proxy; may"
  " be repeated.",
)
_TLS_CERTIFICATE = absl_flags.DEFINE_string(
  "tls_certificate", None, "Certificate with its chain, in PEM; serves https."
)
_TLS_KEY = absl_flags.DEFINE_string(
  "tls_key", None, "Key of the certificate, in PEM, without a password."
)
_PROCESSES = absl_flags.DEFINE_integer(
  "processes", 0, "Processes for each reward; 0 computes in the server's.", 0
)
_DEADLINE_S = absl_flags.DEFINE_float(
  "deadline_s", 60.0, "Deadline of a call, in s.", 0.001
)
# Shows --config in --help.
absl_flags.adopt_module_key_flags(flags)

_MAX_BODY = 16 << 20
_BODY_S = 30.0


class Function:
  """The application: `wire` over HTTP.

  Args:
    reward: computed, with its parts.
    num_processes: for each of them; 0: on the event loop.
    deadline_s: of one call.
    rules: by default those of a server on loopback without keys.
  """

  def __init__(
    self,
    reward: base.Reward,
    num_processes: int = 0,
    deadline_s: float = 60.0,
    rules: access.Access | None = None,
  ):
    self._rules = rules or access.Access()
    self._rewards = served(reward, num_processes)
    self._deadline_s = deadline_s
    self._is_cold = True
    self.app = applications.Starlette(
      routes=[
        routing.Route("/", self._describe, methods=["GET"]),
        routing.Route("/", self._grade, methods=["POST"]),
      ],
      exception_handlers={
        json_fields.BadRequest: _on_error,
        disconnect.ClientGone: _on_error,
        Exception: _on_error,
      },
    )

  async def close(self) -> None:
    """Ends the processes."""
    for reward in self._rewards.values():
      if isinstance(reward, base.Offloaded):
        await reward.close()

  async def _describe(self, request: requests.Request) -> responses.Response:
    self._check(request)
    return responses.JSONResponse({"rewards": list(self._rewards)})

  def _check(self, request: requests.Request) -> None:
    self._rules.client(request.method, request.url.path, request.headers)

  async def _grade(self, request: requests.Request) -> responses.Response:
    self._check(request)
    body = await http_server.body(request, _MAX_BODY, _BODY_S)
    try:
      name, task, transcripts = wire.read_request(body)
    except ValueError as error:
      raise json_fields.BadRequest(str(error)) from error
    if name not in self._rewards:
      known = ", ".join(self._rewards)
      text = f"{name} is not computed here, but {known}"
      raise json_fields.BadRequest(text, status=409)
    is_cold, self._is_cold = self._is_cold, False
    async with asyncio.timeout(self._deadline_s):
      grades = await disconnect.unless_gone(
        request.receive, _call(self._rewards[name], task, transcripts)
      )
    text = wire.write_grades(grades, len(transcripts), cold_start=is_cold)
    return responses.Response(text, media_type="application/json")


async def _call(
  reward: base.Reward, task: base.Task, transcripts: list[base.Transcript]
) -> object:
  return await reward(task, transcripts)


async def _on_error(
  request: requests.Request, error: Exception
) -> responses.Response:
  del request
  if isinstance(error, disconnect.ClientGone):
    return responses.Response(status_code=499)  # The client cannot read it.
  status = error.status if isinstance(error, json_fields.BadRequest) else 500
  text = base.reason(error) if status == 500 else str(error)
  asks = {"www-authenticate": "Bearer"} if status == 401 else None
  return responses.JSONResponse({"error": text}, status, asks)


def served(
  reward: base.Reward, num_processes: int = 0
) -> Mapping[str, base.Reward]:
  """Returns a reward and its parts, as they are to be called, by identity.

  A part that is computed by HTTP is computed here.
  """
  found = {}
  for part in base.parts(reward):
    if not isinstance(part, base.Reward) or not part.stateless:
      continue
    here = part.reward if isinstance(part, http.Http) else part
    for one in (here, base.alone(here)):
      if num_processes and not isinstance(one, process_pool.ProcessPool):
        one = process_pool.ProcessPool(reward=one, processes=num_processes)
      found.setdefault(wire.identity(one), one)
  return found


def _reward() -> base.Reward:
  """Returns the reward of the flags.

  Raises:
    ValueError: there is none.
  """
  if _REWARD.value is None:
    # Importing the class of a run would import jax, which a reward needs not.
    reward = getattr(flags.load_from_command_line(), "reward", None)
    if not isinstance(reward, base.Reward):
      raise annotations.SettingError(
        "--config must give the settings of a run, with a reward; use a file "
        "such as configs/next_letter.py"
      )
    return reward
  return flags.read_alone(base.Reward, "reward")


@flags.command
def main() -> None:
  """Checks flags, settings and port; serves until a signal."""
  with contextlib.ExitStack() as closing:
    with flags.exit_on_setting_error():
      reward = _reward()
      tls = http_server.read_tls(_TLS_CERTIFICATE.value, _TLS_KEY.value)
      port = closing.enter_context(
        http_server.bind_flags(_HOST.value, _PORT.value)
      )
      rules = access.of_flags(
        _HOST.value,
        port.getsockname()[0],
        _API_KEY_FILE.value,
        _ALLOW_HOST.value,
      )
      function = Function(reward, _PROCESSES.value, _DEADLINE_S.value, rules)
    asyncio.run(_serve(function, port, tls))


async def _serve(
  function: Function, port: socket.socket, tls: http_server.Tls | None
) -> None:
  stopping = asyncio.Event()
  signals.Signals(stopping.set, log_line.tell)
  try:
    async with http_server.listening(function.app, port, tls=tls) as address:
      log_line.tell(f"rewards are computed at {address}", sys.stdout)
      await stopping.wait()
  finally:
    await function.close()


if __name__ == "__main__":
  absl_app.run(main, flags_parser=flags.parse)
