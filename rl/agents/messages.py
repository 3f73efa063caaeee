"""Messages of agents that call from outside -> ids, and when two are the same.

A chat whose template knows tools takes a whole history, answers included. Any
other is led through it: open, answer, append, answer, append ..
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from envs import base
from models.chat import tool_calls as tool_calls_lib
from rl.rollout import episode as episode_lib


@dataclasses.dataclass(frozen=True, slots=True)
class Message(base.Message):
  """A message of a conversation with tools.

  Attributes:
    tool_calls: of an answer.
    tool_call_id: which call this message, of role "tool", is the result of.
    name: of the speaker or the tool.
    reasoning: of an answer; what an agent leaves out or changes in it is no
      edit of the history.
  """

  tool_calls: tuple[tool_calls_lib.ToolCall, ...] = ()
  tool_call_id: str | None = None
  name: str | None = None
  reasoning: str | None = None


@runtime_checkable
class ToolChat(episode_lib.Chat, Protocol):
  """A chat whose template shows tools and answers; `models.chat.hf_chat` has "
  "one."""

  def open(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of the first context, answers in it included."""
    ...

  def append(
    self, messages: Sequence[base.Message], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids that follow an answer, and end it where it was cut."""
    ...

  def decoder(self) -> Any:
    """Returns what decodes one answer while it is sampled: feed, end."""
    ...

  @property
  def thinks(self) -> bool:
    """Whether the prompt opens the thinking, so that an answer closes it."""
    ...


def key(message: Message) -> tuple[Any, ...]:
  """Returns what must agree for two messages to be the same."""
  if message.role != "assistant":
    said = (message.content, message.tool_call_id, message.name)
    return (message.role, *said)
  calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
  return (message.role, message.content.strip(), *calls)


def _value(arguments: str) -> str:
  """Returns JSON text in one form, for clients write it again."""
  try:
    return json.dumps(json.loads(arguments), sort_keys=True)
  except (ValueError, RecursionError):
    return arguments


def open_ids(
  chat: episode_lib.Chat,
  messages: Sequence[Message],
  tools: Sequence[Mapping[str, Any]] = (),
) -> Int32[np.ndarray, " P"]:
  """Returns the ids of a conversation, answers in it encoded from their text.

  Raises:
    ValueError: the chat has no ids for it.
  """
  if isinstance(chat, ToolChat):
    return chat.open(messages, tools)
  if tools or any(message.tool_calls for message in messages):
    raise ValueError(
      "the chat template of this model has no tools; leave tools out"
    )
  pieces, said, encode = [], [], chat.open
  for message in messages:
    if message.role != "assistant":
      said.append(message)
      continue
    pieces += [encode(said), chat.encode_answer(message.content)]
    said, encode = [], chat.append
  return np.concatenate([*pieces, encode(said)])


def append_ids(
  chat: episode_lib.Chat,
  messages: Sequence[Message],
  sampled: Int32[np.ndarray, " T"],
) -> Int32[np.ndarray, " P"]:
  """Returns the ids of messages, none of them answers, that follow `sampled`.

  Raises:
    ValueError: the chat has no ids for them.
  """
  if not isinstance(chat, ToolChat):
    return chat.append(messages)
  ended = len(sampled) > 0 and int(sampled[-1]) in chat.stop_ids
  return chat.append(messages, ended)
