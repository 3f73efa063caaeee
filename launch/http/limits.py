"""Bounds of the work that one request may cause, checked before it is done."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from envs import base
from launch.http import json_fields
from rl.agents import messages as messages_lib
from rl.rollout import episode as episode_lib

MAX_DEPTH = 64
_MAX_BODY = 16 << 20
# A token is seldom over 16 bytes of JSON; tools and thinking come on top.
_FREE_BYTES, _BYTES_A_TOKEN = 128 << 10, 64
_FREE_VALUES = 20_000
# It always matches: without an end, each quote would be tried as a beginning.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
  """Bounds of one request; see `of_chat`.

  Attributes:
    body_bytes: of the body, before it is parsed.
    values: of its JSON, containers included.
    characters: of the texts that are encoded.
    length: ids of a conversation, which follow from the others.
  """

  body_bytes: int
  values: int
  characters: int
  length: int

  def loads(self, body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
      BadRequest: it is none, or has too many values, or nests too deeply.
    """
    self._check_values(body)
    return json_fields.loads(body)

  def check_messages(self, messages: Sequence[base.Message]) -> None:
    """Raises BadRequest on messages that a conversation cannot hold."""
    if len(messages) > self.length:
      raise json_fields.BadRequest(
        f"{messages_lib.too_long(self.length)}, which {len(messages)} messages "
        "cannot fit; send fewer",
        "messages",
        "context_length_exceeded",
      )
    # Templates may leave out earlier thinking, which does not count.
    calls = [call for message in messages for call in message.tool_calls]
    count = sum(len(message.content) for message in messages)
    count += sum(len(call.arguments) for call in calls)
    self.check_characters(count, "messages")

  def check_characters(self, count: int, field: str) -> None:
    """Raises BadRequest on more text than a conversation can hold."""
    if count > self.characters:
      raise json_fields.BadRequest(
        f"{messages_lib.too_long(self.length)}, which have {self.characters} "
        f"characters at most, and {field} {count}; shorten {field}",
        field,
        "context_length_exceeded",
      )

  def _check_values(self, body: bytes) -> None:
    # The first bound is crude, and so cheap that any body may be tried. A
    # string begins with a quote that follows no backslash.
    strings = body.count(b'"') - body.count(b'\\"')
    bare = b"" if strings > 2 * self.values else _STRING.sub(b"", body)
    count = sum(bare.count(mark) for mark in (b",", b"[", b"{"))
    if strings > 2 * self.values or count > self.values:
      raise json_fields.BadRequest(
        f"the body has over {self.values} values; send fewer"
      )
    depth = deepest = 0
    for mark in bare.translate(None, _NOT_BRACKETS):
      depth += 1 if mark in b"[{" else -1
      deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
      raise json_fields.BadRequest(
        f"the body is nested {deepest} deep; {MAX_DEPTH} is the most"
      )


def of_chat(
  chat: episode_lib.Chat, max_length: int, max_body: int = _MAX_BODY
) -> RequestLimits:
  """Returns the bounds for conversations of up to `max_length` ids.

  Reads the text of every id, which takes a while with many.
  """
  # Words are parted by a space, which is no token of its own.
  longest = max(len(chat.token(i)) for i in range(chat.vocab_size)) + 1
  return RequestLimits(
    body_bytes=min(max_body, _FREE_BYTES + _BYTES_A_TOKEN * max_length),
    values=_FREE_VALUES + max_length,
    characters=longest * max_length,
    length=max_length,
  )
