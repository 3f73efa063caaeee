"""Parses the text of one answer while it is sampled.

  ids -> decoder -> text -> [ up to a stop text ] -> thinking | content | calls

Text is shown once it is final: no longer possibly half a character, or the
beginning of a stop text, of a thinking tag or of a call.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int32

from models.chat import call_formats, tool_calls
from rl.agents import messages
from rl.engine import contract
from rl.rollout import episode as episode_lib

_THINK, _THINK_END = "<think>", "</think>"


class ServedEngine(Protocol):
  """The part of an engine, or of a router of several, that answers need."""

  @property
  def capabilities(self) -> contract.Capabilities:
    """See `contract.DecodeEngine`, as for the others."""
    ...

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer."""
    ...

  def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled."""
    ...

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; None ends all of them."""
    ...

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AnswerDelta:
  """The part of an answer since the last delta.

  Attributes:
    content, reasoning: new text to show.
    completion: the whole answer up to its end; set in the last delta only.
  """

  content: str
  reasoning: str
  tokens: Int32[np.ndarray, " t"]
  logprobs: Float32[np.ndarray, " t"]
  top: contract.TopLogprobs | None = None
  completion: contract.Completion | None = None


class AnswerParser:
  """Parses one answer: `feed` ids as they come, then `end`, then `answer`.

  Args:
    stops: the text ends before the first of them, and sampling after it.
    raw: treat all text as content, thinking included.
    calls: parse tool calls out of the text.
    tools: those that the prompt shows.
    one_call: sampling ends after the first call.

  Attributes:
    stopped: the text has ended.
    stop_text: the one of `stops` that ended it.
  """

  def __init__(
    self,
    chat: episode_lib.Chat,
    *,
    stops: Sequence[str] = (),
    raw: bool = False,
    calls: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    one_call: bool = False,
  ):
    self._decoder = chat.decoder()
    self._tags = isinstance(chat, messages.ToolChat) and not raw
    self._thinks = self._tags and getattr(chat, "thinks", False)
    self._calls, self._tools = self._tags and calls, tools
    self._form = call_formats.of(chat)
    self._one_call = one_call
    self._stops = tuple(stops)
    self._text = self._content = self._reasoning = ""
    self.stopped = False
    self.stop_text: str | None = None
    self.num_tokens = 0

  @property
  def may_stop(self) -> bool:
    """Returns whether a stop text can end the answer before the engine does."""
    return bool(self._stops) or (self._calls and self._one_call)

  def feed(self, tokens: Int32[np.ndarray, " t"]) -> tuple[str, str]:
    """Returns the (content, reasoning) that became final.

    Ids after the end of the answer are not read: `stopped` is then true, and
    `num_tokens` counts those read.
    """
    for token in tokens.tolist():
      if self.stopped:
        break
      self._append(self._decoder.feed([token]))
      self.num_tokens += 1
    return self._unshown(self._final())

  def end(self) -> tuple[str, str]:
    """Returns the (content, reasoning) that was held back."""
    if not self.stopped:
      self._append(self._decoder.end())
    return self._unshown(self.answer())

  def answer(self) -> tool_calls.Answer:
    """Returns the parsed answer."""
    if not self._tags:
      return tool_calls.Answer(self._text)
    answer = tool_calls.parse(
      self._text,
      thinking=self._thinks,
      call_format=self._form,
      tools=self._tools,
    )
    if self._calls or not answer.tool_calls:
      # Some forms close all calls at once.
      most = 1 if self._one_call else None
      return dataclasses.replace(answer, tool_calls=answer.tool_calls[:most])
    _, content = self._split()
    return tool_calls.Answer(content, (), answer.reasoning)

  def _append(self, text: str) -> None:
    if not text:
      return
    old_length, self._text = len(self._text), self._text + text
    longest = max(map(len, self._stops), default=0)
    start = max(old_length - longest + 1, 0)
    found = [(self._text.find(stop, start), stop) for stop in self._stops]
    if places := [place for place in found if place[0] >= 0]:
      end, self.stop_text = min(places)
      self._text, self.stopped = self._text[:end], True
    elif self._calls and self._one_call and self._form.closing[-1] in text:
      closes = self._form.closing in self._text
      self.stopped = closes and bool(self.answer().tool_calls)

  def _split(self) -> tuple[str | None, str]:
    """Returns (thinking, or None while it may go on, the text after it)."""
    text, opened = self._text, self._text.lstrip()
    if not (self._thinks or opened.startswith(_THINK)):
      return "", text
    thought, tag, content = text.partition(_THINK_END)
    return (thought if tag else None), content.lstrip("\n")

  def _final(self) -> tool_calls.Answer:
    """Returns the answer up to text that may still turn out different."""
    if self.stopped:
      return self.answer()
    text, thought = self._text, ""
    if self._tags:
      thought, text = self._split()
      if thought is None:
        return tool_calls.Answer("")
      opened = self._text.lstrip()
      if not thought and not self._thinks and _THINK.startswith(opened):
        return tool_calls.Answer("")
    if self._calls and (opening := self._form.opening.search(text)):
      text = text[: opening.start()]
    held = max([_overlap(text, mark) for mark in self._stops], default=0)
    text = text[: len(text) - held]
    reasoning = self._reasoning
    if thought and not reasoning:
      reasoning = tool_calls.parse(self._text, thinking=self._thinks).reasoning
    return tool_calls.Answer(text, (), reasoning)

  def _unshown(self, answer: tool_calls.Answer) -> tuple[str, str]:
    """Returns the content and reasoning that were not shown before."""
    content = _after(self._content, answer.content)
    reasoning = _after(self._reasoning, answer.reasoning)
    self._content += content
    self._reasoning += reasoning
    return content, reasoning


def _after(shown: str, text: str) -> str:
  # A call strips the white space around the content, already shown or not.
  for prefix in (shown, shown.lstrip()):
    if text.startswith(prefix):
      return text[len(prefix) :]
  return ""


def _overlap(text: str, mark: str) -> int:
  """Returns the length of the longest suffix of `text` that begins `mark`."""
  longest = min(len(mark) - 1, len(text))
  ends = (n for n in range(longest, 0, -1) if text.endswith(mark[:n]))
  return next(ends, 0)


def truncated(
  completion: contract.Completion, num_tokens: int
) -> contract.Completion:
  """Returns the completion cut to `num_tokens` tokens, where its text ended."""
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
    top=completion.top and completion.top.span(0, num_tokens),
  )


async def stream_answer(
  engine: ServedEngine,
  request: contract.DecodeRequest,
  parser: AnswerParser,
) -> AsyncGenerator[AnswerDelta]:
  """Yields an answer as it is sampled, up to the end of its text.

  Closing the generator early aborts the request. Ids that the engine sampled
  after the end are dropped.

  Raises:
    ValueError, EngineClosed: as `DecodeEngine.stream`.
  """
  deltas = engine.stream(request)
  async with contextlib.aclosing(deltas):
    async for delta in deltas:
      before, was_stopped = parser.num_tokens, parser.stopped
      shown = parser.feed(delta.tokens)
      done = delta.completion
      if done is not None:
        held = parser.end()
        shown = (shown[0] + held[0], shown[1] + held[1])
        if parser.stopped:
          done = truncated(done, parser.num_tokens)
      elif was_stopped:
        continue
      elif parser.stopped:
        # ValueError: the request has ended meanwhile.
        with contextlib.suppress(ValueError):
          engine.abort(request.request_id)
      count = parser.num_tokens - before
      yield AnswerDelta(
        *shown,
        delta.tokens[:count],
        delta.logprobs[:count],
        delta.top and delta.top.span(0, count),
        completion=done,
      )


async def sample_answer(
  engine: ServedEngine,
  request: contract.DecodeRequest,
  parser: AnswerParser,
) -> contract.Completion:
  """Returns an answer up to the end of its text; `parser` holds the text.

  Raises:
    ValueError, EngineClosed: as `DecodeEngine.generate`.
  """
  if not parser.may_stop:
    completion = await engine.generate(request)
    parser.feed(completion.tokens)
    parser.end()
    return completion
  completion = None
  async for delta in stream_answer(engine, request, parser):
    completion = delta.completion
  assert completion is not None
  return completion
