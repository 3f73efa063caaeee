"""The program of a worker: plays the environments of one source, for a run.

  run --[index, session, what, value]--> _Sessions.answer --> an environment
   ^                                                             |
   +------[index, error, value]-------- frames of JSON ----------+

Only the source itself comes as a pickle, from the run. What goes back is plain
JSON, so that an environment can send the run nothing but text and numbers.

stdin and stdout carry the frames; to environments they are empty and stderr.
"""

import asyncio
import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import pickle
import struct
import sys
import types
from collections.abc import Awaitable, Mapping, Sequence
from typing import IO, Any

from envs import base, threads

MAX_FRAME_BYTES = 64 << 20
"""Size of one message between a run and a worker."""

# Until a call that is cancelled, and then the close, is given up.
_CANCEL_S, _CLOSE_S = 1.0, 5.0
_HEADER = struct.Struct("=I")


@dataclasses.dataclass(frozen=True)
class PickledSetting:
  """A source or a reward on its way to a worker.

  Attributes:
    files: modules that no import finds, by name: path and lines of the config
      files that define its classes.
  """

  setting: bytes
  files: Mapping[str, tuple[str, Sequence[str]]]

  @classmethod
  def of(cls, setting: Any, what: str) -> "PickledSetting":
    """Pickles a setting, which is called `what` in an error.

    Raises:
      ValueError: it cannot be pickled, or not be found again.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
      pickler.dump(setting)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
      raise ValueError(
        f"{what} cannot be sent to a worker: {error}; give it plain fields, "
        "and define its class at the top of a module"
      ) from error
    return cls(stream.getvalue(), pickler.files)

  def load(self) -> Any:
    """Returns the setting, in another process."""
    for name, (path, lines) in self.files.items():
      module = types.ModuleType(name)
      module.__file__ = path
      sys.modules[name] = module
      exec(
        compile("\n".join(lines), path, "exec", dont_inherit=True), vars(module)
      )
    return pickle.loads(self.setting)


class _Pickler(pickle.Pickler):
  """Finds the modules of all classes and functions that it pickles."""

  def __init__(self, stream: io.BytesIO):
    super().__init__(stream)
    self.files: dict[str, tuple[str, Sequence[str]]] = {}

  def reducer_override(self, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)):
      self._find(obj.__module__)
    return NotImplemented

  def _find(self, name: str) -> None:
    """Keeps the file of a module that no import finds, if it is one.

    Raises:
      PicklingError: it is a program, which a worker does not run.
    """
    module: Any = sys.modules.get(name)
    if (lines := getattr(module, "__config_lines__", None)) is not None:
      self.files[name] = (module.__file__, lines)
    elif name == "__main__":
      raise pickle.PicklingError(
        "the program that was started defines a part of it"
      )


def frame(value: Any) -> bytes:
  """Returns plain data as a frame.

  Raises:
    ValueError: it is no plain data, or too large.
  """
  try:
    body = json.dumps(value, default=_plain).encode()
  except (TypeError, RecursionError) as error:
    raise ValueError(str(error)) from error
  if len(body) > MAX_FRAME_BYTES:
    raise ValueError(
      f"{len(body)} bytes in one message are above {MAX_FRAME_BYTES}"
    )
  return framed(body)


def framed(body: bytes) -> bytes:
  """Returns bytes with their length before them."""
  return _HEADER.pack(len(body)) + body


async def receive(stream: asyncio.StreamReader) -> bytes:
  """Returns the bytes of the next frame.

  Raises:
    IncompleteReadError: the other side has ended.
    ValueError: this is no frame.
  """
  size = _HEADER.unpack(await stream.readexactly(_HEADER.size))[0]
  if size > MAX_FRAME_BYTES:
    raise ValueError(f"{size} bytes announced are above {MAX_FRAME_BYTES}")
  return await stream.readexactly(size)


def read(stream: IO[bytes]) -> bytes:
  """Returns the bytes of the next frame of a file.

  Raises:
    EOFError: the other side has ended.
  """
  size = _HEADER.unpack(_read(stream, _HEADER.size))[0]
  return _read(stream, size)


def _read(stream: IO[bytes], size: int) -> bytes:
  parts = []
  while size:
    if not (part := stream.read(size)):
      raise EOFError
    parts.append(part)
    size -= len(part)
  return b"".join(parts)


def to_message(data: Any) -> base.Message:
  """Returns a message of its plain data."""
  calls = tuple(base.ToolCall(**call) for call in data.pop("tool_calls"))
  return base.Message(**data, tool_calls=calls)


def _from_message(message: object) -> Any:
  """Returns a message as plain data.

  Raises:
    TypeError: it is none.
  """
  if not isinstance(message, base.Message):
    raise TypeError(f"{type(message).__name__} in place of a Message")
  return dataclasses.asdict(message)


def _plain(value: Any) -> Any:
  # Numbers of numpy, which in JSON are not the same as those of Python.
  if hasattr(value, "item"):
    return value.item()
  raise TypeError(f"{type(value).__name__} in place of plain data")


class _Sessions:
  """The environments in this process, one call of each at a time."""

  def __init__(self, source: base.Source):
    self._source = source
    self._environments: dict[int, Any] = {}
    self._calls: dict[int, asyncio.Task[Any]] = {}

  async def answer(self, request: Any) -> bytes:
    """Returns the frame that answers a request."""
    index, number, what, value = request
    method = {"start": self._start, "step": self._step, "close": self._close}
    work = asyncio.create_task(_outcome(method[what](number, value)))
    if what != "close":
      self._calls[number] = work
    error, result = await work
    try:
      return frame([index, error, result])
    except ValueError as nonsense:
      return frame([index, f"{what} returned {nonsense}", None])

  async def _start(self, number: int, task: Any) -> Any:
    environment = self._source(base.Task(**task))
    self._environments[number] = environment
    messages = [_from_message(m) for m in await environment.start()]
    return [messages, list(getattr(environment, "tools", ()))]

  async def _step(self, number: int, answer: Any) -> Any:
    step = await self._environments[number].step(to_message(answer))
    if not isinstance(step, base.Step):
      raise TypeError(f"step returned {type(step).__name__}, not a Step")
    messages = [_from_message(m) for m in step.messages]
    return [messages, step.reward, step.done, dict(step.metrics)]

  async def _close(self, number: int, _: Any) -> bool:
    """Closes an environment; returns whether all of its calls have ended."""
    call = self._calls.pop(number, None)
    if call is not None:
      call.cancel()
      await asyncio.wait([call], timeout=_CANCEL_S)
    closing = None
    if (environment := self._environments.pop(number, None)) is not None:
      closing = asyncio.create_task(_outcome(environment.close()))
      await asyncio.wait([closing], timeout=_CLOSE_S)
    have_ended = all(task is None or task.done() for task in (call, closing))
    return have_ended and not threads.abandoned()


async def _outcome(call: Awaitable[Any]) -> tuple[str, Any]:
  """Returns ("", value), or the text of its exception and None.

  Caught here, since asyncio ends the loop when a task raises SystemExit.
  """
  try:
    return "", await call
  except BaseException as error:
    return base.reason(error), None


async def _serve(
  source: base.Source, requests: int, replies: IO[bytes]
) -> None:
  """Answers requests until the run closes its end, or is dead."""
  stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
  await loop.connect_read_pipe(
    lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(requests, "rb", 0)
  )
  sessions, running = _Sessions(source), set()

  async def answer(request: Any) -> None:
    replies.write(await sessions.answer(request))
    replies.flush()

  with contextlib.suppress(asyncio.IncompleteReadError):
    while True:
      request = json.loads(await receive(stream))
      task = asyncio.create_task(answer(request))
      running.add(task)
      task.add_done_callback(running.discard)
  # Environments might hold an orderly end up.
  os._exit(0)


def main() -> None:
  """Serves the run at the other end of stdin and stdout."""
  requests, replies = os.dup(0), os.fdopen(os.dup(1), "wb")
  with open(os.devnull) as nothing:
    os.dup2(nothing.fileno(), 0)
  os.dup2(2, 1)  # An environment may print.
  faulthandler.enable()
  with open(requests, "rb", 0, closefd=False) as stream:
    source = pickle.loads(read(stream)).load()
  asyncio.run(_serve(source, requests, replies))
