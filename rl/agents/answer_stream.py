"""The text of one answer while it is sampled: what to show, where to stop.

  ids -> decoder -> text -> [ up to a stop text ] -> thinking | content | calls

Text is shown once it can no longer turn out to be something else: the rest of
a character, the beginning of a stop text, a tag of thinking or of a call.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from models.chat import tool_calls
from rl.agents import messages
from rl.engine import contract
from rl.rollout import episode as episode_lib

_THINK, _THOUGHT, _CALL = "<think>", "</think>", "<tool_call>"
_CALLED = "</tool_call>"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Piece:
  """What came since the piece before.

  Attributes:
    content, reasoning: text to show.
    completion: of the last piece: the whole answer, up to where it stopped.
  """

  content: str
  reasoning: str
  tokens: Int32[np.ndarray, " t"]
  logprobs: Float32[np.ndarray, " t"]
  completion: contract.Completion | None = None


@runtime_checkable
class Streamer(Protocol):
  """The part of a decode engine, or of a pool of them, that serving needs."""

  @property
  def capabilities(self) -> contract.Capabilities:
    """What it can do."""
    ...

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine`."""
    ...

  def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncIterator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine`."""
    ...

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has."""
    ...

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    ...


class Reader:
  """Reads one answer; `feed` as ids come, then `end`, then `answer`."""

  def __init__(
    self,
    chat: episode_lib.Chat,
    *,
    stops: Sequence[str] = (),
    raw: bool = False,
    calls: bool = False,
    one_call: bool = False,
  ):
    """Starts with no text.

    Args:
      stops: the text ends before the first of them, and sampling behind it.
      raw: all text is content, thinking included.
      calls: take calls of tools out of the text.
      one_call: sampling ends behind the first call.
    """
    if isinstance(chat, messages.ToolChat):
      self._decoder, self._tags = chat.decoder(), not raw
    else:
      self._decoder, self._tags = _Decoder(chat), False
    self._thinks = self._tags and getattr(chat, "thinks", False)
    self._calls = self._tags and calls
    self._one_call = one_call
    self._stops = tuple(stops)
    self._text = self._content = self._reasoning = ""
    self.stopped = False
    self.num_tokens = 0

  @property
  def may_stop(self) -> bool:
    """Whether text can end the answer before the engine does."""
    return bool(self._stops) or (self._calls and self._one_call)

  def feed(self, tokens: Int32[np.ndarray, " t"]) -> tuple[str, str]:
    """Returns the (content, reasoning) that is certain now.

    Ids behind the one that ends the answer are not read; `stopped` then says
    so, and `num_tokens` how many were.
    """
    for token in tokens.tolist():
      if self.stopped:
        break
      self._read(self._decoder.feed([token]))
      self.num_tokens += 1
    return self._news(self._certain())

  def end(self) -> tuple[str, str]:
    """Returns the (content, reasoning) that was held back."""
    if not self.stopped:
      self._read(self._decoder.end())
    return self._news(self.answer())

  def answer(self) -> tool_calls.Answer:
    """Returns all that was read, taken apart."""
    if not self._tags:
      return tool_calls.Answer(self._text)
    whole = tool_calls.parse(self._text, thinking=self._thinks)
    if self._calls or not whole.tool_calls:
      return whole
    _, content = self._split()
    return tool_calls.Answer(content, (), whole.reasoning)

  def _read(self, text: str) -> None:
    if not text:
      return
    known, self._text = len(self._text), self._text + text
    longest = max(map(len, self._stops), default=0)
    start = max(known - longest + 1, 0)
    found = [self._text.find(stop, start) for stop in self._stops]
    if places := [place for place in found if place >= 0]:
      self._text, self.stopped = self._text[: min(places)], True
    elif self._calls and self._one_call and ">" in text:
      called = _CALLED in self._text
      self.stopped = called and bool(self.answer().tool_calls)

  def _split(self) -> tuple[str | None, str]:
    """Returns thinking, None while it may go on, and what follows it."""
    text, opened = self._text, self._text.lstrip()
    if not (self._thinks or opened.startswith(_THINK)):
      return "", text
    thought, tag, content = text.partition(_THOUGHT)
    return (thought if tag else None), content.lstrip("\n")

  def _certain(self) -> tool_calls.Answer:
    if self.stopped:
      return self.answer()
    held = self._stops
    text, thought = self._text, ""
    if self._tags:
      thought, text = self._split()
      if thought is None:
        return tool_calls.Answer("")
      opened = self._text.lstrip()
      if not thought and not self._thinks and _THINK.startswith(opened):
        return tool_calls.Answer("")
    if self._calls:
      text = text.partition(_CALL)[0]
      held = (*held, _CALL)
    text = text[: len(text) - max([_overlap(text, x) for x in held], default=0)]
    reasoning = self._reasoning
    if thought and not reasoning:
      reasoning = tool_calls.parse(self._text, thinking=self._thinks).reasoning
    return tool_calls.Answer(text, (), reasoning)

  def _news(self, now: tool_calls.Answer) -> tuple[str, str]:
    """Returns the content and reasoning that were not shown before."""
    content = _after(self._content, now.content)
    reasoning = _after(self._reasoning, now.reasoning)
    self._content += content
    self._reasoning += reasoning
    return content, reasoning


def _after(shown: str, now: str) -> str:
  # Calls take the white space around the content away, shown or not.
  for known in (shown, shown.lstrip()):
    if now.startswith(known):
      return now[len(known) :]
  return ""


def _overlap(text: str, mark: str) -> int:
  """Returns how many characters at the end may be the beginning of a mark."""
  longest = min(len(mark) - 1, len(text))
  ends = (n for n in range(longest, 0, -1) if text.endswith(mark[:n]))
  return next(ends, 0)


def cut(
  completion: contract.Completion, num_tokens: int
) -> contract.Completion:
  """Returns a completion whose text ended it behind some of its tokens."""
  experts, beyond = completion.experts, len(completion.tokens) - num_tokens
  if experts is not None:
    experts = experts[: len(experts) - beyond]
  return dataclasses.replace(
    completion,
    tokens=completion.tokens[:num_tokens],
    logprobs=completion.logprobs[:num_tokens],
    versions=completion.versions[:num_tokens],
    stop="stop",
    experts=experts,
  )


async def sample(
  engine: Streamer,
  request: contract.DecodeRequest,
  reader: Reader,
) -> AsyncGenerator[Piece]:
  """Yields an answer as it is sampled, up to where its text ends it.

  Close it early, and the request is aborted. Ids that the engine sampled
  behind the end are dropped.

  Raises:
    ValueError, EngineClosed: as `DecodeEngine.stream`.
  """
  # The protocol says that it can be closed; its type says less.
  deltas = cast(AsyncGenerator[contract.Delta], engine.stream(request))
  async with contextlib.aclosing(deltas):
    async for delta in deltas:
      before, over = reader.num_tokens, reader.stopped
      shown = reader.feed(delta.tokens)
      done = delta.completion
      if done is not None:
        rest = reader.end()
        shown = (shown[0] + rest[0], shown[1] + rest[1])
        if reader.stopped:
          done = cut(done, reader.num_tokens)
      elif over:
        continue
      elif reader.stopped:
        # Gone already, when its last token was sampled meanwhile.
        with contextlib.suppress(ValueError):
          engine.abort(request.request_id)
      count = reader.num_tokens - before
      yield Piece(
        *shown, delta.tokens[:count], delta.logprobs[:count], completion=done
      )


async def sample_whole(
  engine: Streamer,
  request: contract.DecodeRequest,
  reader: Reader,
) -> contract.Completion:
  """Returns an answer up to where its text ends it; `reader` has the text.

  Raises:
    ValueError, EngineClosed: as `DecodeEngine.generate`.
  """
  if not reader.may_stop:
    completion = await engine.generate(request)
    reader.feed(completion.tokens)
    reader.end()
    return completion
  completion = None
  async for piece in sample(engine, request, reader):
    completion = piece.completion
  assert completion is not None
  return completion


class _Decoder:
  """Decodes with a chat that has no decoder of its own: short answers only."""

  def __init__(self, chat: episode_lib.Chat):
    self._chat = chat
    self._ids: list[int] = []
    self._length = 0

  def feed(self, ids: Sequence[int]) -> str:
    self._ids += ids
    text = self._chat.decode(self._ids)
    start, self._length = self._length, len(text)
    return text[start:]

  def end(self) -> str:
    return ""
