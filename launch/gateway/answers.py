"""Answers one request: ids -> engine -> text -> session record -> reply.

          +-> stream_answer -+
opening --+-> stream_answer -+-> _record -> reply(), or events() one by one
          +-> ..   n choices +
"""

import asyncio
import contextlib
import dataclasses
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from launch.gateway import (
  anthropic_messages,
  deadline,
  openai_replies,
  openai_requests,
  session_record,
)
from launch.http import disconnect, json_fields
from rl.agents import answer_stream, messages, session_tree
from rl.agents import sessions as sessions_lib
from rl.engine import contract
from rl.rollout import episode


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PendingAnswer:
  """A request that passed every check; call `reply` or `events`, once.

  Attributes:
    sessions: must still hold `session` when an answer arrives.
    requests, parsers: one of each per choice.
    deadline: of all choices together.
  """

  engine: answer_stream.ServedEngine
  sessions: sessions_lib.Sessions
  session: session_tree.Session
  opening: session_tree.Opening
  reply_format: openai_replies.ReplyFormat | anthropic_messages.MessageFormat
  requests: Sequence[contract.DecodeRequest]
  parsers: Sequence[answer_stream.AnswerParser]
  deadline: deadline.Deadline
  include_usage: bool

  async def reply(self) -> dict[str, Any]:
    """Returns the whole reply.

    Raises:
      BadRequest: the engine cannot serve the request.
      EngineClosed: the engine stopped.
      FinishedSession: the session was finished meanwhile.
      TimeoutError: the deadline passed.
    """
    answers = [
      asyncio.create_task(answer_stream.sample_answer(self.engine, *pair))
      for pair in zip(self.requests, self.parsers, strict=True)
    ]
    try:
      with self._as_api_errors():
        async with self.deadline.kept():
          completions = await asyncio.gather(*answers)
    finally:
      await disconnect.cancel(*answers)
    return self.reply_format.reply(
      [self._record(i, done) for i, done in enumerate(completions)]
    )

  async def events(self) -> AsyncGenerator[bytes]:
    """Yields the events of a stream.

    The first event is empty and comes with the first sampled token. Until then
    the errors of `reply` are raised; later ones become events.
    """
    deltas = _merged(
      [
        answer_stream.stream_answer(self.engine, *pair)
        for pair in zip(self.requests, self.parsers, strict=True)
      ],
      self.deadline,
    )
    async with contextlib.aclosing(deltas):
      with self._as_api_errors():
        first = await anext(deltas)
      yield b""
      try:
        with self._as_api_errors():
          async for event in self._chunks(first, deltas):
            yield event
      except (
        json_fields.BadRequest,
        contract.EngineClosed,
        sessions_lib.FinishedSession,
        session_record.Unrecorded,
        TimeoutError,
      ) as error:
        yield self.reply_format.error_event(str(error))
        return
    yield self.reply_format.done

  async def _chunks(
    self,
    first: tuple[int, answer_stream.AnswerDelta],
    later: AsyncGenerator[tuple[int, answer_stream.AnswerDelta]],
  ) -> AsyncGenerator[bytes]:
    completions: list[contract.Completion] = []
    if self.reply_format.chat:
      for index in range(len(self.requests)):
        yield self.reply_format.first_chunk(index)
    index, delta = first
    while True:
      yield self.reply_format.chunk(index, delta)
      if delta.completion is not None:
        # Recorded before the client sees the end: it may send the next turn.
        choice = self._record(index, delta.completion)
        completions.append(delta.completion)
        yield self.reply_format.last_chunk(index, choice)
      if len(completions) == len(self.requests):
        break
      index, delta = await anext(later)
    if self.include_usage:
      yield self.reply_format.usage_chunk(completions)

  def _record(
    self, index: int, completion: contract.Completion
  ) -> openai_replies.AnswerChoice:
    answer = self.parsers[index].answer()
    # Not of the sampling's seed, which may be the same in every turn.
    name = f"call_{self.opening.seed:x}_{index}"
    calls = tuple(
      dataclasses.replace(call, id=f"{name}_{i}")
      for i, call in enumerate(answer.tool_calls)
    )
    answer = dataclasses.replace(answer, tool_calls=calls)
    message = None
    if self.reply_format.chat:
      message = episode.as_message(answer)
    self.sessions.record(self.session, self.opening, completion, message)
    return openai_replies.AnswerChoice(
      completion=completion,
      answer=answer,
      stop_text=self.parsers[index].stop_text,
    )

  @contextlib.contextmanager
  def _as_api_errors(self) -> Iterator[None]:
    """Turns errors of the engine into those that clients are told."""
    try:
      yield
    except json_fields.BadRequest:
      raise
    except ValueError as error:
      raise json_fields.BadRequest(str(error)) from error
    except contract.EngineClosed:
      self.session.engine_closed = True
      raise


def decode_requests(
  capabilities: contract.Capabilities,
  chat_stops: tuple[int, ...],
  session: session_tree.Session,
  opening: session_tree.Opening,
  sampling: openai_requests.Sampling,
  temperature: float,
  constraint: contract.TokenMatcher | None,
  field: str,
) -> list[contract.DecodeRequest]:
  """Returns one engine request per choice.

  Args:
    field: of the conversation, in errors.

  Raises:
    BadRequest: the engine cannot do it, or the conversation is too long.
  """
  room = capabilities.max_length - len(opening.tokens)
  limit = sampling.max_tokens
  if room < (1 if limit is None else limit):
    other = "" if limit is None else f", or lower max_tokens={limit}"
    raise json_fields.BadRequest(
      f"{messages.too_long(capabilities.max_length)}, and a conversation of "
      f"{len(opening.tokens)} leaves room for {max(room, 0)}; shorten it"
      f"{other}",
      field,
      "context_length_exceeded",
    )
  if sampling.seed is not None and not capabilities.seeds:
    raise json_fields.BadRequest(
      "this engine has no seeds; leave seed out", "seed"
    )
  bias = _bias(sampling, capabilities)
  if bias is not None and constraint is not None:
    raise json_fields.BadRequest(
      "logit_bias may forbid what tools or response_format demand; leave one "
      "of them out",
      "logit_bias",
    )
  return [
    contract.DecodeRequest(
      request_id=f"{session.name}/{opening.number}/{index}",
      session=session.name,
      tokens=opening.tokens,
      max_tokens=room if limit is None else limit,
      temperature=temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      min_p=sampling.min_p,
      stop_ids=chat_stops,
      seed=_seed(sampling, opening, index) if capabilities.seeds else 0,
      bias=bias,
      constraint=constraint,
      top_logprobs=sampling.top_logprobs,
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
  seed = (seed + 2**31) % 2**32 - 2**31  # The API's have 64 bits.
  if not index:
    return seed
  return zlib.crc32(f"{seed}/{index}".encode()) & 0x7FFFFFFF


def _bias(
  sampling: openai_requests.Sampling, capabilities: contract.Capabilities
) -> Float32[np.ndarray, " V"] | None:
  if not sampling.bias:
    return None
  largest = max(sampling.bias)
  if largest >= capabilities.vocab_size:
    raise json_fields.BadRequest(
      f"logit_bias of id {largest}: must be below {capabilities.vocab_size}, "
      "the number of ids",
      "logit_bias",
    )
  bias = np.zeros(capabilities.vocab_size, np.float32)
  for index, value in sampling.bias.items():
    bias[index] = value
  return bias


async def _merged(
  streams: Sequence[AsyncGenerator[answer_stream.AnswerDelta]],
  limit: deadline.Deadline,
) -> AsyncGenerator[tuple[int, answer_stream.AnswerDelta]]:
  """Yields (index, delta) of all streams as they come.

  The queue is unbounded, so a client that reads slowly cannot hold up the
  engine.

  Raises:
    TimeoutError: they passed the deadline.
  """
  queue: asyncio.Queue[
    tuple[int, answer_stream.AnswerDelta] | asyncio.Task[None]
  ] = asyncio.Queue()

  async def pump(index: int, stream: AsyncGenerator[answer_stream.AnswerDelta]):
    async with contextlib.aclosing(stream):
      async for delta in stream:
        queue.put_nowait((index, delta))

  pumps = [
    asyncio.create_task(pump(index, stream))
    for index, stream in enumerate(streams)
  ]
  for task in pumps:
    task.add_done_callback(queue.put_nowait)
  num_running = len(pumps)
  try:
    while num_running:
      async with limit.kept():
        item = await queue.get()
      if isinstance(item, asyncio.Task):
        item.result()  # Raises the error that ended the stream, if any.
        num_running -= 1
      else:
        yield item
  finally:
    await disconnect.cancel(*pumps)
