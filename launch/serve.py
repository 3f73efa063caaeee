"""Serves the OpenAI API: python -m launch.serve --run=DIR | --model=DIR.

Clients of the `openai` package need no change; base_url is the address that is
printed, or ADDRESS/sessions/NAME/v1 for the requests of one session.
--record=FILE appends the trajectories of every session as JSON lines. Only this
machine is served, or, with --host, whoever sends a key of --api_key_file.

Ctrl-C or SIGTERM ends the server once running requests have their answers, for
--drain_s at most; then these end with what they have. Further ones are refused
meanwhile. Unfinished sessions are recorded as truncated.
"""

import asyncio
import contextlib
import dataclasses
import gc
import os
import pathlib
import socket
import sys
from collections.abc import Callable

from absl import app
from absl import flags as absl_flags

from launch import served_model
from launch.cli import flags, known_programs, steps
from launch.gateway import app as openai_app
from launch.gateway import session_record
from launch.http import access, admission, connections, http_server
from launch.run import signals
from rl.agents import sessions
from rl.runtime import log_line
from rl.settings import overrides

_RUN = absl_flags.DEFINE_string(
  "run", None, "Directory of a run; serves its newest checkpoint."
)
_MODEL = absl_flags.DEFINE_string(
  "model", None, "Directory of a Hugging Face checkpoint to serve."
)
# One that waits for an answer, and one between two requests.
_CONNECTIONS_AN_ANSWER = 2
_POLL_S = 0.05

_HOST = absl_flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = absl_flags.DEFINE_integer(
  "port", 8000, "Port; 0 takes any free one.", 0, 65535
)
_API_KEY_FILE = absl_flags.DEFINE_string(
  "api_key_file",
  None,
  "File of keys, one a line; requests need one of them. Required unless --host"
  " is of this machine only.",
)
_ALLOW_HOST = absl_flags.DEFINE_multi_string(
  "allow_host",
  [],
  "Name under which requests reach a server on loopback, as through a proxy;"
  " may be repeated.",
)
_TLS_CERTIFICATE = absl_flags.DEFINE_string(
  "tls_certificate", None, "Certificate with its chain, in PEM; serves https."
)
_TLS_KEY = absl_flags.DEFINE_string(
  "tls_key", None, "Key of the certificate, in PEM, without a password."
)
_RECORD = absl_flags.DEFINE_string(
  "record", None, "File that trajectories are appended to, as JSON lines."
)
_TEMPERATURE = absl_flags.DEFINE_float(
  "temperature",
  None,
  "Temperature of requests without one. Default: the run's, or 1.",
)
_ONE_TEMPERATURE = absl_flags.DEFINE_bool(
  "one_temperature",
  False,
  "Samples all requests at --temperature, whatever they ask for.",
)
_MAX_SESSIONS = absl_flags.DEFINE_integer(
  "max_sessions", 4096, "Sessions open at a time.", 1
)
_MAX_SESSION_MIB = absl_flags.DEFINE_integer(
  "max_session_mib",
  1024,
  "MiB that the answers of open sessions take; a session may take a 16th.",
  1,
)
_SESSION_IDLE_S = absl_flags.DEFINE_float(
  "session_idle_s", 14400.0, "Ends sessions without a request for so long.", 1.0
)
_MAX_ANSWERS = absl_flags.DEFINE_integer(
  "max_answers", 1024, "Answers in progress; further requests get 429.", 1
)
_MAX_CLIENT_ANSWERS = absl_flags.DEFINE_integer(
  "max_client_answers", 256, "Answers in progress for each key.", 1
)
_DRAIN_S = absl_flags.DEFINE_float(
  "drain_s", 30.0, "Time that running requests get at the end, in s.", 0.0
)
_ANSWER_S = absl_flags.DEFINE_float(
  "answer_s", 600.0, "Deadline of the answers to a request, in s.", 0.001
)
absl_flags.adopt_module_key_flags(known_programs)


@flags.command
def main() -> None:
  """Checks flags, settings, port and file; serves until a signal."""
  with contextlib.ExitStack() as closing:
    with flags.exit_on_setting_error():
      serving = openai_app.Serving(
        temperature=1.0 if _TEMPERATURE.value is None else _TEMPERATURE.value,
        one_temperature=_ONE_TEMPERATURE.value,
        answer_s=_ANSWER_S.value,
      )
      tls = http_server.read_tls(_TLS_CERTIFICATE.value, _TLS_KEY.value)
      port = closing.enter_context(
        http_server.bind_flags(_HOST.value, _PORT.value)
      )
      rules = _rules(port)
      record = closing.enter_context(
        contextlib.closing(
          session_record.SessionRecord(_RECORD.value or os.devnull)
        )
      )
      shown = steps.Steps(sys.stderr)
      loading = _loading(shown.phase)
    server = _Server(serving, rules, tls, port, record)
    closing.enter_context(shown)
    sys.exit(asyncio.run(server.serve(loading, shown.close)))


def _rules(port: socket.socket) -> access.Access:
  """Returns who may ask a server that listens on a port."""
  address, path = port.getsockname()[0], _API_KEY_FILE.value
  rules = access.of_flags(_HOST.value, address, path, _ALLOW_HOST.value)
  if rules.hosts is None and _TLS_KEY.value is None:
    log_line.tell(
      "without --tls_certificate and --tls_key anyone on the way can read keys "
      "and conversations"
    )
  return rules


def _loading(
  report: Callable[[str], None],
) -> contextlib.AbstractAsyncContextManager[served_model.ServedModel]:
  """Returns the checked model of the flags; entering it loads the weights."""
  run, model, changes = _RUN.value, _MODEL.value, flags.overrides_of_run()
  if run is not None and model is None:
    experiment = served_model.read_run(run, changes)
    return served_model.of_run(experiment, pathlib.Path(run), report)
  if model is not None and run is None:
    hosting = served_model.read_directory(model, changes)
    chat = hosting.chat.load(hosting.chat.directory or model)
    log_line.tell(served_model.memory(hosting))
    directory = pathlib.Path(model)
    return served_model.of_directory(hosting, directory, chat, report)
  raise overrides.SettingError("name one of --run=DIR and --model=DIR")


@dataclasses.dataclass(eq=False)
class _Server:
  """Serves on a bound port; `serve` is called once."""

  serving: openai_app.Serving
  rules: access.Access
  tls: http_server.Tls | None
  port: socket.socket
  record: session_record.SessionRecord
  is_lossy: bool = False

  async def serve(
    self,
    loading: contextlib.AbstractAsyncContextManager[served_model.ServedModel],
    on_loaded: Callable[[], None],
  ) -> int:
    """Returns 0 after a signal, or 128 + its number if it came too early.

    1: sessions could not be recorded.
    """
    current, stopping = asyncio.current_task(), asyncio.Event()
    assert current is not None
    handlers = signals.Signals(current.cancel, log_line.tell)
    try:
      async with loading as served:
        on_loaded()
        await self._serve(served, handlers, stopping)
    except asyncio.CancelledError:
      if not handlers.number:
        raise
      return 128 + handlers.number
    return int(self.is_lossy)

  async def _serve(
    self,
    served: served_model.ServedModel,
    handlers: signals.Signals,
    stopping: asyncio.Event,
  ) -> None:
    serving = dataclasses.replace(self.serving, model=served.name)
    if _TEMPERATURE.value is None:
      serving = dataclasses.replace(serving, temperature=served.temperature)
    opened = sessions.Sessions(
      served.chat,
      max_sessions=_MAX_SESSIONS.value,
      max_bytes=_MAX_SESSION_MIB.value << 20,
      max_idle_s=_SESSION_IDLE_S.value,
      keep=self.record.keep,
    )
    most = _MAX_ANSWERS.value
    # Without keys all are one client.
    share = _MAX_CLIENT_ANSWERS.value if self.rules.keys else most
    admitted = admission.Admission(most, share)
    patience = connections.Patience(
      max_connections=connections.within_files(_CONNECTIONS_AN_ANSWER * most),
      chunks=False,
    )
    application = openai_app.app(
      served.engine, opened, serving, self.rules, admitted
    )
    # What lives as long as the server needs no further collections, which would
    # hold up all requests for half a second.
    gc.collect()
    gc.freeze()
    try:
      async with http_server.listening(
        application, self.port, tls=self.tls, patience=patience
      ) as address:
        version = served.engine.stats().version
        with handlers.calling(stopping.set):
          log_line.tell(
            f"{served.name}, version {version}, is served at {address}/v1",
            sys.stdout,
          )
          await stopping.wait()
          await _drain(admitted)
        # Running requests end with their tokens so far, and are recorded.
        served.engine.abort(None)
    finally:
      try:
        if count := opened.close():
          were = "session was" if count == 1 else "sessions were"
          log_line.tell(f"{count} {were} not finished")
      except session_record.Unrecorded as error:
        log_line.tell(f"{len(opened)} sessions are lost: {error}")
        self.is_lossy = True


async def _drain(admitted: admission.Admission) -> None:
  """Waits until no answer is in progress, or for too long."""
  admitted.draining = True
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_DRAIN_S.value):
      while admitted.running:
        await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
