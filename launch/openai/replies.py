"""Answers in the form of the OpenAI API, with what training needs besides.

Beside OpenAI's fields stand `session`, `temperature` and `prompt_token_ids` of
a reply, and `token_ids`, `token_logprobs` and `versions` of every choice: the
ids as they were sampled, stop id included. A stream has them in the last chunk
of each choice.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from models.chat import tool_calls
from rl.agents import answer_stream
from rl.engine import contract
from rl.rollout import episode as episode_lib

DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
  """One answer: what was sampled, and what its text says."""

  completion: contract.Completion
  answer: tool_calls.Answer

  @property
  def finish_reason(self) -> str:
    """Returns "stop", "length", "tool_calls" or, no word of theirs, "abort"."""
    calls = self.answer.tool_calls and self.completion.stop == "stop"
    return "tool_calls" if calls else self.completion.stop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
  """What the replies to one request share.

  Attributes:
    name: of the reply, unique.
    chat: in the form of chat completions, not of completions.
    codec: turns ids into text.
    logprobs: whether they are sent in OpenAI's form too.
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

  def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns a reply that is not streamed."""
    return {
      **self._head(stream=False),
      "choices": [self._choice(i, c) for i, c in enumerate(choices)],
      "usage": self.usage([choice.completion for choice in choices]),
      **self._more(),
    }

  def begin(self, index: int) -> bytes:
    """Returns the event with which a choice of a chat begins."""
    return self._chunk(index, {"role": "assistant", "content": ""})

  def piece(self, index: int, piece: answer_stream.Piece) -> bytes:
    """Returns the event of a piece; nothing when there is nothing to say."""
    logprobs = self._logprobs(piece.tokens, piece.logprobs)
    text = piece.content or piece.reasoning
    if not text and not (logprobs and len(piece.tokens)):
      return b""
    delta = {"content": piece.content} if piece.content else {}
    if piece.reasoning:
      delta["reasoning_content"] = piece.reasoning
    return self._chunk(index, delta, logprobs)

  def end(self, index: int, choice: Choice) -> bytes:
    """Returns the event with which a choice ends."""
    calls = _calls(choice.answer)
    calls = [{"index": i, **call} for i, call in enumerate(calls)]
    delta = {"tool_calls": calls} if calls else {}
    finish = choice.finish_reason
    more = {**_sampled(choice.completion), "finish_reason": finish}
    return self._chunk(index, delta, None, more, self._more())

  def counts(self, completions: Sequence[contract.Completion]) -> bytes:
    """Returns the event that a stream with include_usage has last."""
    head = self._head(stream=True)
    return _event({**head, "choices": [], "usage": self.usage(completions)})

  def usage(self, completions: Sequence[contract.Completion]) -> dict[str, Any]:
    """Returns the numbers of tokens; those of the prompt count once."""
    sampled = sum(len(completion.tokens) for completion in completions)
    cached = completions[0].cached_tokens if completions else 0
    return {
      "prompt_tokens": len(self.prompt),
      "completion_tokens": sampled,
      "total_tokens": len(self.prompt) + sampled,
      "prompt_tokens_details": {"cached_tokens": cached},
    }

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

  def _more(self) -> dict[str, Any]:
    return {
      "session": self.session,
      "temperature": self.temperature,
      "prompt_token_ids": self.prompt.tolist(),
    }

  def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
    completion, answer = choice.completion, choice.answer
    said: dict[str, Any] = {"text": answer.content}
    if self.chat:
      said = {"message": _message(answer)}
    return {
      "index": index,
      **said,
      "logprobs": self._logprobs(completion.tokens, completion.logprobs),
      "finish_reason": choice.finish_reason,
      **_sampled(completion),
    }

  def _chunk(
    self,
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    choice: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
  ) -> bytes:
    said: dict[str, Any] = {"delta": delta}
    if not self.chat:
      said = {"text": delta.get("content", "")}
    filled = {
      "index": index,
      **said,
      "logprobs": logprobs,
      "finish_reason": None,
      **(choice or {}),
    }
    head = self._head(stream=True)
    return _event({**head, "choices": [filled], **(more or {})})

  def _logprobs(
    self,
    tokens: Int32[np.ndarray, " t"],
    logprobs: Float32[np.ndarray, " t"],
  ) -> dict[str, Any] | None:
    if not self.logprobs:
      return None
    texts = [self.codec.token(token) for token in tokens.tolist()]
    if not self.chat:
      return {"tokens": texts, "token_logprobs": logprobs.tolist()}
    # Half a character is a token too: bytes are null, as the API allows.
    content = [
      {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
      for text, value in zip(texts, logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}


def error(
  message: str,
  kind: str = "invalid_request_error",
  param: str | None = None,
  code: str | None = None,
) -> dict[str, Any]:
  """Returns the body of an error."""
  fields = {"message": message, "type": kind, "param": param, "code": code}
  return {"error": fields}


def error_event(message: str) -> bytes:
  """Returns the event of an error in the midst of a stream."""
  return _event(error(message, "server_error"))


def _event(data: dict[str, Any]) -> bytes:
  text = json.dumps(data, ensure_ascii=False, allow_nan=False)
  return f"data: {text}\n\n".encode()


def _sampled(completion: contract.Completion) -> dict[str, Any]:
  return {
    "token_ids": completion.tokens.tolist(),
    "token_logprobs": completion.logprobs.tolist(),
    "versions": completion.versions.tolist(),
  }


def _message(answer: tool_calls.Answer) -> dict[str, Any]:
  calls = _calls(answer)
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


def _calls(answer: tool_calls.Answer) -> list[dict[str, Any]]:
  return [
    {
      "id": call.id,
      "type": "function",
      "function": {"name": call.name, "arguments": call.arguments},
    }
    for call in answer.tool_calls
  ]
