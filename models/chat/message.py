"""The protocol of messages that chats encode."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ChatMessage(Protocol):
  """One message of a conversation.

  A template also reads these attributes where they exist: `name`,
  `tool_call_id`, `reasoning` (text or None) and `tool_calls`, each with `name`,
  `arguments` (JSON text) and maybe `id`.
  """

  @property
  def role(self) -> str:
    """Author: "system", "user", "assistant" or "tool"."""
    ...

  @property
  def content(self) -> str | None:
    """Text; None is the empty text."""
    ...
