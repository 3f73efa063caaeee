"""Reads bodies and encodes texts: the work on a request beside the engine.

  body -> JSON within limits -> query of an API
  messages, text -> ids

All of it is a function of the arguments and of settings that can be pickled, so
that it may be done in a process of its own.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from envs import base
from launch.gateway import anthropic_messages, openai_requests, tokenization
from launch.http import limits
from rl.agents import messages as messages_lib
from rl.agents import session_tree
from rl.rollout import episode as episode_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class BodyReader:
  """The reader of a server's requests.

  Attributes:
    bounds: of one request.
    vocab_size, max_length: of the engine.
  """

  chat: episode_lib.Chat
  bounds: limits.RequestLimits
  vocab_size: int
  max_length: int

  def chat_query(self, body: bytes) -> openai_requests.ChatQuery:
    """Returns a request for an answer.

    Raises:
      BadRequest: as all that read a body here.
    """
    return self._checked(self.bounds.loads(body))

  def message_query(self, body: bytes) -> openai_requests.ChatQuery:
    """Returns a request for an answer, sent as one of Anthropic's API."""
    return self._checked(anthropic_messages.chat_body(self.bounds.loads(body)))

  def text_query(self, body: bytes) -> openai_requests.TextQuery:
    """Returns a request to continue a text, or ids."""
    query = openai_requests.text_query(self.bounds.loads(body))
    if isinstance(query.prompt, str):
      self.bounds.check_characters(len(query.prompt), "prompt")
    return query

  def ending(self, body: bytes) -> session_tree.Ending:
    """Returns the end that a client gives a session."""
    return openai_requests.ending(self.bounds.loads(body))

  def tokenized(self, body: bytes) -> bytes:
    """Returns the reply with the ids of a text or of a conversation."""
    data = self.bounds.loads(body)
    with messages_lib.encoding():
      tokens = tokenization.tokens(data, self.chat, self.bounds)
    return _json(
      {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": self.max_length,
      }
    )

  def detokenized(self, body: bytes) -> bytes:
    """Returns the reply with the text of ids."""
    data = self.bounds.loads(body)
    text = tokenization.text(data, self.chat, self.vocab_size)
    return _json({"prompt": text})

  def encode(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]],
    sampled: Int32[np.ndarray, " T"] | None,
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of messages; see `messages.encode`."""
    return messages_lib.encode(self.chat, messages, tools, sampled)

  def text_ids(self, text: str) -> Int32[np.ndarray, " P"]:
    """Returns the ids of a text outside of a conversation."""
    return np.asarray(messages_lib.text_ids(self.chat, text), np.int32)

  def _checked(self, data: Mapping[str, Any]) -> openai_requests.ChatQuery:
    query = openai_requests.chat_query(data)
    self.bounds.check_messages(query.messages)
    return query


def _json(data: Any) -> bytes:
  return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
