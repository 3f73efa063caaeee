"""Replies of the OpenAI API, with extra fields for training.

A reply also has `session`, `temperature` and `prompt_token_ids`, and every
choice `token_ids`, `token_logprobs` and `versions`: the ids as sampled, stop
id included. A stream carries them in the last chunk of each choice. As vLLM's,
a choice that continues a text has `prompt_token_ids` as well.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32

from models.chat import tool_calls
from rl.agents import answer_stream
from rl.engine import contract
from rl.rollout import episode as episode_lib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChoice:
  """One answer to a request, as ids and as parsed text.

  Attributes:
    stop_text: the text of the request that ended it, if one did.
  """

  completion: contract.Completion
  answer: tool_calls.Answer
  stop_text: str | None = None

  @property
  def finish_reason(self) -> str:
    """Returns "stop", "length", "tool_calls" or, not in OpenAI's, "abort"."""
    calls = self.answer.tool_calls and self.completion.stop == "stop"
    return "tool_calls" if calls else self.completion.stop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
  """Builds the reply to one request, whole or as server-sent events.

  Attributes:
    name: unique id of the reply.
    chat: for /chat/completions; False for /completions.
    codec: turns ids into text.
    logprobs: adds OpenAI's `logprobs` field.
  """

  name: str
  chat: bool
  model: str
  session: str
  prompt: Int32[np.ndarray, " N"]
  temperature: float
  logprobs: bool
  codec: episode_lib.Chat
  created: int = dataclasses.field(default_factory=lambda: int(time.time()))
  done: ClassVar[bytes] = b"data: [DONE]\n\n"

  def reply(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Returns a reply that is not streamed."""
    return {
      **self._head(stream=False),
      "choices": [self._choice(i, c) for i, c in enumerate(choices)],
      "usage": self.usage([choice.completion for choice in choices]),
      **self.training_fields(),
    }

  def first_chunk(self, index: int) -> bytes:
    """Returns the first event of a chat's choice."""
    return self._chunk(index, {"role": "assistant", "content": ""})

  def chunk(self, index: int, delta: answer_stream.AnswerDelta) -> bytes:
    """Returns the event of a delta; empty when it adds nothing."""
    logprobs = self._logprobs(delta.tokens, delta.logprobs, delta.top)
    text = delta.content or delta.reasoning
    if not text and not (logprobs and len(delta.tokens)):
      return b""
    fields = {"content": delta.content} if delta.content else {}
    if delta.reasoning:
      fields["reasoning_content"] = delta.reasoning
    return self._chunk(index, fields, logprobs)

  def last_chunk(self, index: int, choice: AnswerChoice) -> bytes:
    """Returns the last event of a choice."""
    calls = [*map(tool_calls.as_openai, choice.answer.tool_calls)]
    calls = [{"index": i, **call} for i, call in enumerate(calls)]
    delta = {"tool_calls": calls} if calls else {}
    finish = choice.finish_reason
    fields = {**sampled(choice.completion), "finish_reason": finish}
    return self._chunk(index, delta, None, fields, self.training_fields())

  def usage_chunk(self, completions: Sequence[contract.Completion]) -> bytes:
    """Returns the last event of a stream with include_usage."""
    head = self._head(stream=True)
    return _event({**head, "choices": [], "usage": self.usage(completions)})

  def usage(self, completions: Sequence[contract.Completion]) -> dict[str, Any]:
    """Returns token counts; the prompt counts once for all choices."""
    count = sum(len(completion.tokens) for completion in completions)
    cached = completions[0].cached_tokens if completions else 0
    return {
      "prompt_tokens": len(self.prompt),
      "completion_tokens": count,
      "total_tokens": len(self.prompt) + count,
      "prompt_tokens_details": {"cached_tokens": cached},
    }

  def error_event(self, message: str) -> bytes:
    """Returns the event of an error after a stream has begun."""
    return _event(error(message, "server_error"))

  def _head(self, stream: bool) -> dict[str, Any]:
    kind = "text_completion"
    if self.chat:
      kind = "chat.completion.chunk" if stream else "chat.completion"
    return {
      "id": self.name,
      "object": kind,
      "created": self.created,
      "model": self.model,
    }

  def training_fields(self) -> dict[str, Any]:
    """Returns the fields that no API has; see above."""
    return {
      "session": self.session,
      "temperature": self.temperature,
      "prompt_token_ids": self.prompt.tolist(),
    }

  def _choice(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
    completion, answer = choice.completion, choice.answer
    text: dict[str, Any] = {
      "text": answer.content,
      "prompt_token_ids": self.prompt.tolist(),
    }
    if self.chat:
      text = {"message": _message(answer)}
    return {
      "index": index,
      **text,
      "logprobs": self._logprobs(
        completion.tokens, completion.logprobs, completion.top
      ),
      "finish_reason": choice.finish_reason,
      **sampled(completion),
    }

  def _chunk(
    self,
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    choice_fields: dict[str, Any] | None = None,
    reply_fields: dict[str, Any] | None = None,
  ) -> bytes:
    text: dict[str, Any] = {"delta": delta}
    if not self.chat:
      text = {"text": delta.get("content", "")}
    choice = {
      "index": index,
      **text,
      "logprobs": logprobs,
      "finish_reason": None,
      **(choice_fields or {}),
    }
    head = self._head(stream=True)
    return _event({**head, "choices": [choice], **(reply_fields or {})})

  def _logprobs(
    self,
    tokens: Int32[np.ndarray, " t"],
    logprobs: Float32[np.ndarray, " t"],
    top: contract.TopLogprobs | None,
  ) -> dict[str, Any] | None:
    if not self.logprobs:
      return None
    sampled = self._scored(tokens, logprobs)
    best = [[] for _ in sampled]
    if top is not None:
      rows = zip(top.ids, top.logprobs, strict=True)
      # JSON has no infinity, the log-probability of what is impossible.
      finite = [(ids, row, np.isfinite(row)) for ids, row in rows]
      best = [self._scored(ids[is_], row[is_]) for ids, row, is_ in finite]
    if self.chat:
      content = [
        {**_entry(*one), "top_logprobs": [_entry(*other) for other in others]}
        for one, others in zip(sampled, best, strict=True)
      ]
      return {"content": content, "refusal": None}
    listed = {
      "tokens": [text for text, _ in sampled],
      "token_logprobs": [value for _, value in sampled],
    }
    if top is None:
      return listed
    maps = [
      _by_text((*others, one))
      for one, others in zip(sampled, best, strict=True)
    ]
    return {**listed, "top_logprobs": maps}

  def _scored(
    self, ids: Int32[np.ndarray, " t"], logprobs: Float32[np.ndarray, " t"]
  ) -> list[tuple[str, float]]:
    texts = [self.codec.token(index) for index in ids.tolist()]
    return list(zip(texts, logprobs.tolist(), strict=True))


def _entry(text: str, logprob: float) -> dict[str, Any]:
  # A token may be half a character: bytes are null, as the API allows.
  return {"token": text, "logprob": logprob, "bytes": None}


def _by_text(scored: Iterable[tuple[str, float]]) -> dict[str, float]:
  """Returns log-probabilities; of tokens with the same text the first one's."""
  found = {}
  for text, value in scored:
    found.setdefault(text, value)
  return found


def error(
  message: str,
  kind: str = "invalid_request_error",
  param: str | None = None,
  code: str | None = None,
) -> dict[str, Any]:
  """Returns the body of an error reply."""
  fields = {"message": message, "type": kind, "param": param, "code": code}
  return {"error": fields}


def _event(data: dict[str, Any]) -> bytes:
  text = json.dumps(data, ensure_ascii=False, allow_nan=False)
  return f"data: {text}\n\n".encode()


def sampled(completion: contract.Completion) -> dict[str, Any]:
  """Returns the ids of an answer, with their log-probabilities and versions."""
  return {
    "token_ids": completion.tokens.tolist(),
    "token_logprobs": completion.logprobs.tolist(),
    "versions": completion.versions.tolist(),
  }


def _message(answer: tool_calls.Answer) -> dict[str, Any]:
  calls = [*map(tool_calls.as_openai, answer.tool_calls)]
  message: dict[str, Any] = {
    "role": "assistant",
    "content": answer.content or (None if calls else ""),
    "refusal": None,
  }
  if calls:
    message["tool_calls"] = calls
  if answer.reasoning:
    message["reasoning_content"] = answer.reasoning
  return message
