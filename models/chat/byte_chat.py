"""A chat of any text: one id for each byte, and a few control tokens.

<user> bytes <end> <assistant> | sampled bytes <end> | <user> bytes <end> ..
'------ open(messages) ------' '--- the agent's ---' '-- append(...) -----'
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from models.chat import message as message_lib
from models.chat import text_decoder, tool_calls

_CONTROL = ("<end>", "<system>", "<user>", "<assistant>", "<tool>")
_END = 256


@dataclasses.dataclass(frozen=True)
class ByteChat:
  """Tokenizer and chat template of any text, for want of those of a model."""

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return _END + len(_CONTROL)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    return (_END,)

  def open(
    self,
    messages: Iterable[message_lib.ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of the first context, up to the agent's answer.

    Raises:
      ValueError: half a surrogate pair, or an unknown role.
    """
    shown = self._message("system", json.dumps(tools)) if tools else []
    for one in messages:
      shown += self._message(one.role, one.content or "")
    return np.asarray([*shown, self._control("assistant")], np.int32)

  def append(
    self, messages: Iterable[message_lib.ChatMessage], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids after an answer, up to the next answer.

    Args:
      answer_ended: if false, the ids begin with the end of the answer.
    """
    rest = self.open(messages)
    return rest if answer_ended else np.insert(rest, 0, _END)

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids with which a policy would answer `text`."""
    return np.asarray([*text.encode(), _END], np.int32)

  def decode(self, ids: Sequence[int] | Int32[np.ndarray, " L"]) -> str:
    """Returns the text without control tokens; invalid UTF-8 as U+FFFD."""
    known = bytes(index for index in np.asarray(ids).tolist() if index < _END)
    return known.decode("utf-8", "replace")

  def decoder(self) -> text_decoder.TextDecoder:
    """Returns a decoder of one answer while it is sampled."""
    return text_decoder.TextDecoder(_text_bytes)

  def parse(
    self,
    ids: Sequence[int] | Int32[np.ndarray, " L"],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> tool_calls.Answer:
    """Returns the parsed answer; see `tool_calls.parse`."""
    return tool_calls.parse(self.decode(ids))

  @property
  def gap(self) -> str:
    """Text between those of two ids."""
    return ""

  def token(self, index: int) -> str:
    """Returns the text of an id; a byte that is not ASCII as \\xNN."""
    if index >= self.vocab_size:
      return f"<id {index}>"
    if index >= _END:
      return _CONTROL[index - _END]
    return bytes([index]).decode("ascii", "backslashreplace")

  def _message(self, role: str, content: str) -> list[int]:
    return [self._control(role), *content.encode(), _END]

  def _control(self, role: str) -> int:
    return _END + _CONTROL.index(f"<{role}>")


def _text_bytes(index: int) -> bytes:
  return bytes([index]) if index < _END else b""
