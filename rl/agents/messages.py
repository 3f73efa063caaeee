"""Turns the messages of external agents into ids and compares them.

A chat whose template knows tools encodes a whole history at once. Any other
chat is called message by message: open, encode_answer, append, encode_answer ..
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from envs import base
from rl.rollout import episode as episode_lib

# Parsing longer JSON would hold up the process.
_MAX_PARSED = 1 << 20


@runtime_checkable
class ToolChat(episode_lib.Chat, Protocol):
  """A chat whose template shows tools, as `models.chat.hf_chat.HfChat`."""

  def open(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: bool = True,
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of a conversation.

    Args:
      prompt: end them where the next answer begins.
    """
    ...

  def spell(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, that of special tokens included."""
    ...

  @property
  def thinks(self) -> bool:
    """True if the prompt opens the thinking, which the answer closes."""
    ...


def key(message: base.Message) -> tuple[Any, ...]:
  """Returns a key that equal messages share.

  It ignores the reasoning, since agents leave that out or change it.
  """
  if message.role != "assistant":
    return (message.role, message.content, message.tool_call_id, message.name)
  calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
  return (message.role, message.content.strip(), *calls)


def _value(arguments: str) -> str:
  """Returns JSON text in one form, since clients serialise it anew."""
  if len(arguments) > _MAX_PARSED:
    return arguments
  try:
    return json.dumps(json.loads(arguments), sort_keys=True)
  except (ValueError, RecursionError):
    return arguments


def text_ids(chat: episode_lib.Chat, text: str) -> list[int]:
  """Returns the ids of text outside of a conversation.

  Raises:
    ValueError: the chat cannot encode it.
  """
  ids = chat.encode_answer(text).tolist()
  while ids and ids[-1] in chat.stop_ids:
    ids.pop()
  return ids


def too_long(length: int) -> str:
  """Returns how the refusal of a conversation over `length` ids begins.

  By these words of OpenAI's and vLLM's servers clients such as litellm and
  verifiers know it, and end or shorten the conversation.
  """
  return f"this model's maximum context length is {length} tokens"


@contextlib.contextmanager
def encoding() -> Iterator[None]:
  """Turns every error into a ValueError: templates raise all kinds."""
  try:
    yield
  except ValueError:
    raise
  except Exception as error:
    raise ValueError(
      f"the messages cannot be encoded: {base.reason(error)}"
    ) from error


def encode(
  chat: episode_lib.Chat,
  messages: Sequence[base.Message],
  tools: Sequence[Mapping[str, Any]] = (),
  sampled: Int32[np.ndarray, " T"] | None = None,
) -> Int32[np.ndarray, " P"]:
  """Returns the ids of a conversation, or of messages after an answer.

  Answers in a conversation are encoded from their text.

  Args:
    sampled: the answer's ids, after which no message may be an answer; None:
      the messages are the conversation.

  Raises:
    ValueError: the chat cannot encode them.
  """
  if isinstance(chat, ToolChat):
    if sampled is None:
      return chat.open(messages, tools)
    ended = len(sampled) > 0 and int(sampled[-1]) in chat.stop_ids
    return chat.append(messages, ended)
  if sampled is not None:
    return chat.append(messages)
  if tools or any(message.tool_calls for message in messages):
    raise ValueError(
      "the chat template of this model has no tools; leave tools out"
    )
  pieces, unencoded, add = [], [], chat.open
  for message in messages:
    if message.role != "assistant":
      unencoded.append(message)
      continue
    pieces += [add(unencoded), chat.encode_answer(message.content)]
    unencoded, add = [], chat.append
  return np.concatenate([*pieces, add(unencoded)])
