"""Serves the OpenAI API: python -m launch.serve --run=DIR | --model=DIR.

A client of the `openai` package talks to it as it is; its base_url is the
address that is printed, or ADDRESS/sessions/NAME/v1 for requests of one
session. --record=FILE gets every session as trajectories, one JSON a line.
There is no key: whoever reaches the port may ask.

Ctrl-C or SIGTERM ends it, with what is under way: sessions that nobody
finished are recorded as truncated.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from absl import app
from absl import flags as absl_flags

from launch.cli import flags
from launch.openai import app as openai_app
from launch.openai import http_server, served_model
from models.chat import hf_chat
from rl.agents import sessions
from rl.data import trajectory
from rl.settings import overrides

_RUN = absl_flags.DEFINE_string(
  "run", None, "Directory of a run, whose newest checkpoint is served."
)
_MODEL = absl_flags.DEFINE_string(
  "model", None, "Directory of a Hugging Face checkpoint, which is served."
)
_HOST = absl_flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = absl_flags.DEFINE_integer(
  "port", 8000, "Port; 0 takes one that is free.", 0, 65535
)
_RECORD = absl_flags.DEFINE_string(
  "record", None, "File to which trajectories are appended, as JSON lines."
)
_TEMPERATURE = absl_flags.DEFINE_float(
  "temperature",
  None,
  "Of requests that name none. Default: the run's, or 1.",
)
_ONE_TEMPERATURE = absl_flags.DEFINE_bool(
  "one_temperature",
  False,
  "Samples all requests at that temperature, whatever they name.",
)
_MAX_SESSIONS = absl_flags.DEFINE_integer(
  "max_sessions", 4096, "Sessions that are open at a time.", 1
)
_ANSWER_S = absl_flags.DEFINE_float(
  "answer_s", 600.0, "Seconds that the answers to a request may take.", 0.001
)


def main(argv: list[str]) -> None:
  """Checks flags, settings, port and file, and serves until a signal."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  with contextlib.ExitStack() as closing:
    with flags.exit_on_setting_error():
      how = openai_app.Serving(
        temperature=1.0 if _TEMPERATURE.value is None else _TEMPERATURE.value,
        one_temperature=_ONE_TEMPERATURE.value,
        answer_s=_ANSWER_S.value,
      )
      port = closing.enter_context(_bind())
      record = closing.enter_context(_open_record(_RECORD.value))
      served = _served()
    sys.exit(asyncio.run(_Server(how, port, record).serve(served)))


def _served() -> contextlib.AbstractAsyncContextManager[
  served_model.ServedModel
]:
  """Returns what is to be served, checked and not loaded."""
  if absl_flags.FLAGS["config"].present:
    raise overrides.SettingError(
      "--config: name a run with --run=DIR, which has its settings; "
      "--config.engine.slots=8 and the like change them"
    )
  run, model, changes = _RUN.value, _MODEL.value, flags.overrides()
  if run is not None and model is None:
    experiment = served_model.read_run(run, changes)
    return served_model.of_run(experiment, pathlib.Path(run), _progress)
  if model is not None and run is None:
    hosting = served_model.read_directory(model, changes)
    chat = hf_chat.HfChat.load(model)
    directory = pathlib.Path(model)
    return served_model.of_directory(hosting, directory, chat, _progress)
  raise overrides.SettingError("name one of --run=DIR and --model=DIR")


def _bind() -> socket.socket:
  try:
    return http_server.bind(_HOST.value, _PORT.value)
  except OSError as error:
    raise overrides.SettingError(
      f"--host={_HOST.value} --port={_PORT.value} is not to be had: "
      f"{error.strerror}; use --port=0 for one that is free"
    ) from error


def _open_record(path: str | None) -> TextIO:
  try:
    return pathlib.Path(path or os.devnull).open("a", encoding="utf-8")
  except OSError as error:
    raise overrides.SettingError(
      f"--record={path} cannot be written: {error.strerror}"
    ) from error


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


class _Server:
  """Serves on a bound port; `serve` is called once."""

  def __init__(
    self, how: openai_app.Serving, port: socket.socket, record: TextIO
  ):
    self._how = how
    self._port = port
    self._record = record
    self._ready = False
    self._signal = 0
    self._stop = asyncio.Event()

  async def serve(
    self,
    loading: contextlib.AbstractAsyncContextManager[served_model.ServedModel],
  ) -> int:
    """Returns 0 when a signal ended it; 128 + its number before it served."""
    loop, current = asyncio.get_running_loop(), asyncio.current_task()
    assert current is not None
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.add_signal_handler(number, self._on_signal, number, current)
    try:
      async with loading as served:
        await self._serve(served)
    except asyncio.CancelledError:
      if not self._signal:
        raise
      return 128 + self._signal
    return 0

  def _on_signal(self, number: int, current: asyncio.Task[Any]) -> None:
    if self._signal:  # The user insists.
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
    self._signal = number
    if self._ready:
      self._stop.set()
    else:
      current.cancel()

  async def _serve(self, served: served_model.ServedModel) -> None:
    how = dataclasses.replace(self._how, model=served.name)
    if _TEMPERATURE.value is None:
      how = dataclasses.replace(how, temperature=served.temperature)
    opened = sessions.Sessions(
      served.chat, max_sessions=_MAX_SESSIONS.value, keep=self._keep
    )
    application = openai_app.app(served.engine, opened, how)
    try:
      async with http_server.listening(application, self._port) as address:
        version = served.engine.stats().version
        self._ready = True
        print(
          f"{served.name}, version {version}, is served at {address}/v1",
          flush=True,
        )
        await self._stop.wait()
        _progress("stopping; again to end at once")
        # What is under way ends with what it has, and is recorded.
        served.engine.abort(None)
    finally:
      if count := opened.close():
        _progress(f"{count} sessions were not finished")

  def _keep(self, left: Sequence[trajectory.Trajectory]) -> None:
    lines = [json.dumps(trajectory.trajectory_to_json(t)) for t in left]
    self._record.write("".join(f"{line}\n" for line in lines))
    self._record.flush()


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
