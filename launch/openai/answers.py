"""One request that is being answered: ids -> engine -> text -> record -> reply.

         +-> sample -> read -+
opening -+-> sample -> read -+-> record -> reply, whole or event by event
         +-> ..    n choices +
"""

import asyncio
import contextlib
import dataclasses
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from launch.openai import json_fields
from launch.openai import replies as openai_replies
from launch.openai import requests as openai_requests
from rl.agents import answer_stream, session_tree
from rl.agents import messages as messages_lib
from rl.agents import sessions as sessions_lib
from rl.engine import contract


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
  """What a request asked for, ready to be answered once.

  Attributes:
    sessions: the one that `session` must still be in when the answer comes.
    requests, readers: one of each for every choice.
    answer_s: deadline of all of them.
  """

  engine: answer_stream.Streamer
  sessions: sessions_lib.Sessions
  session: session_tree.Session
  opening: session_tree.Opening
  form: openai_replies.Form
  requests: Sequence[contract.DecodeRequest]
  readers: Sequence[answer_stream.Reader]
  answer_s: float
  include_usage: bool

  async def whole(self) -> dict[str, Any]:
    """Returns the reply.

    Raises:
      Refused: the engine cannot serve it.
      EngineClosed: it stopped.
      FinishedSession: the session was finished meanwhile.
      TimeoutError: the deadline passed.
    """
    answers = [
      asyncio.create_task(answer_stream.sample_whole(self.engine, *each))
      for each in zip(self.requests, self.readers, strict=True)
    ]
    try:
      with self._blamed():
        async with asyncio.timeout(self.answer_s):
          completions = await asyncio.gather(*answers)
    finally:
      await _cancel(answers)
    choices = [self._record(i, done) for i, done in enumerate(completions)]
    return self.form.whole(choices)

  async def events(self) -> AsyncGenerator[bytes]:
    """Yields the events of a stream.

    The first, which is empty, comes as soon as something was sampled: until
    then this raises what `whole` does. Later errors are events.
    """
    until = asyncio.get_running_loop().time() + self.answer_s
    sampled = _merged(
      [
        answer_stream.sample(self.engine, *each)
        for each in zip(self.requests, self.readers, strict=True)
      ],
      until,
    )
    async with contextlib.aclosing(sampled):
      with self._blamed():
        first = await anext(sampled)
      yield b""
      try:
        with self._blamed():
          async for event in self._said(first, sampled):
            yield event
      except (
        json_fields.Refused,
        contract.EngineClosed,
        sessions_lib.FinishedSession,
        TimeoutError,
      ) as error:
        yield openai_replies.error_event(str(error))
        return
    yield openai_replies.DONE

  async def _said(
    self,
    first: tuple[int, answer_stream.Piece],
    rest: AsyncGenerator[tuple[int, answer_stream.Piece]],
  ) -> AsyncGenerator[bytes]:
    done: list[contract.Completion] = []
    if self.form.chat:
      for index in range(len(self.requests)):
        yield self.form.begin(index)
    index, piece = first
    while True:
      yield self.form.piece(index, piece)
      if piece.completion is not None:
        # On record before the client knows: its next request may follow.
        choice = self._record(index, piece.completion)
        done.append(piece.completion)
        yield self.form.end(index, choice)
      if len(done) == len(self.requests):
        break
      index, piece = await anext(rest)
    if self.include_usage:
      yield self.form.counts(done)

  def _record(
    self, index: int, completion: contract.Completion
  ) -> openai_replies.Choice:
    if not self.sessions.holds(self.session):
      raise sessions_lib.FinishedSession(
        f"session {self.session.name} was finished before its answer came"
      )
    answer = self.readers[index].answer()
    named = [
      dataclasses.replace(call, id=f"call_{self.requests[index].seed:x}_{i}")
      for i, call in enumerate(answer.tool_calls)
    ]
    answer = dataclasses.replace(answer, tool_calls=tuple(named))
    said = None
    if self.form.chat:
      said = messages_lib.Message(
        "assistant", answer.content, answer.tool_calls
      )
    self.session.record(self.opening, completion, said)
    return openai_replies.Choice(completion=completion, answer=answer)

  @contextlib.contextmanager
  def _blamed(self):
    try:
      yield
    except json_fields.Refused:
      raise
    except ValueError as error:
      raise json_fields.Refused(str(error)) from error
    except TimeoutError:
      raise TimeoutError(f"the answer took over {self.answer_s:g} s") from None
    except contract.EngineClosed:
      self.session.engine_closed = True
      raise


def requests(
  engine: answer_stream.Streamer,
  chat_stops: tuple[int, ...],
  session: session_tree.Session,
  opening: session_tree.Opening,
  sampling: openai_requests.Sampling,
  temperature: float,
  experts: bool,
) -> list[contract.DecodeRequest]:
  """Returns what to ask the engine for, one request for each choice.

  Raises:
    Refused: the engine cannot do it, or the conversation is too long.
  """
  able = engine.capabilities
  room = able.max_length - len(opening.tokens)
  wanted = sampling.max_tokens
  if room < (1 if wanted is None else wanted):
    raise json_fields.Refused(
      f"a conversation of {len(opening.tokens)} tokens leaves room for "
      f"{max(room, 0)} in {able.max_length}, and max_tokens={wanted}",
      "messages",
      "context_length_exceeded",
    )
  if sampling.seed is not None and not able.seeds:
    raise json_fields.Refused(
      "this engine knows no seeds; leave seed out", "seed"
    )
  if not -(2**31) <= (sampling.seed or 0) < 2**31:
    raise json_fields.Refused(f"seed={sampling.seed} is not of 32 bits", "seed")
  bias = _bias(sampling, able)
  return [
    contract.DecodeRequest(
      request_id=f"{session.name}/{session.number}/{index}",
      session=session.name,
      tokens=opening.tokens,
      max_tokens=room if wanted is None else wanted,
      temperature=temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      min_p=sampling.min_p,
      stop_ids=chat_stops,
      seed=_seed(sampling, opening, index) if able.seeds else 0,
      bias=bias,
      experts=experts,
      priority=session.priority,
    )
    for index in range(sampling.choices)
  ]


def _seed(
  sampling: openai_requests.Sampling,
  opening: session_tree.Opening,
  index: int,
) -> int:
  """Returns 32 bits that differ between the choices."""
  seed = opening.seed if sampling.seed is None else sampling.seed
  if not index:
    return seed
  return zlib.crc32(f"{seed}/{index}".encode()) & 0x7FFFFFFF


def _bias(
  sampling: openai_requests.Sampling, able: contract.Capabilities
) -> Float32[np.ndarray, " V"] | None:
  if not sampling.bias:
    return None
  largest = max(sampling.bias)
  if largest >= able.vocab_size:
    raise json_fields.Refused(
      f"logit_bias of id {largest}: there are {able.vocab_size} ids",
      "logit_bias",
    )
  bias = np.zeros(able.vocab_size, np.float32)
  for index, value in sampling.bias.items():
    bias[index] = value
  return bias


async def _merged(
  streams: Sequence[AsyncGenerator[answer_stream.Piece]], until: float
) -> AsyncGenerator[tuple[int, answer_stream.Piece]]:
  """Yields (index, piece) of all streams as they come.

  A client that reads slowly does not hold up the engine.

  Args:
    until: when TimeoutError is raised, on the clock of the loop.
  """
  queue: asyncio.Queue[tuple[int, answer_stream.Piece] | asyncio.Task[None]] = (
    asyncio.Queue()
  )

  async def pump(index: int, stream: AsyncGenerator[answer_stream.Piece]):
    async with contextlib.aclosing(stream):
      async for piece in stream:
        queue.put_nowait((index, piece))

  pumps = [
    asyncio.create_task(pump(index, stream))
    for index, stream in enumerate(streams)
  ]
  for task in pumps:
    task.add_done_callback(queue.put_nowait)
  left = len(pumps)
  try:
    while left:
      async with asyncio.timeout_at(until):
        item = await queue.get()
      if isinstance(item, asyncio.Task):
        item.result()  # Raises what ended it.
        left -= 1
      else:
        yield item
  finally:
    await _cancel(pumps)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
