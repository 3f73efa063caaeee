"""A tokenizer and append-only chat template over a fixed list of words.

  <words of the environment> <agent> <sampled words> <end> <words ...> <agent>
  '------ open(messages) ---------' '--- sampled ------' '-- append(...) --'

Emitted ids are never encoded again: the ids are the conversation, and its text
is only a view of them.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from models.chat import message as message_lib
from models.chat import tool_calls

PAD, END, AGENT = 0, 1, 2
_SPECIAL = ("<pad>", "<end>", "<agent>")
_MAX_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class WordChat:
  """Tokenizer and chat template over a fixed list of words.

  Roles are not encoded: all ids that are not sampled come from the environment.

  Attributes:
    words: unique; the first has id 3. Messages are words of this list,
      separated by white space.
  """

  words: tuple[str, ...]

  def __post_init__(self):
    seen: set[str] = set(_SPECIAL)
    for word in self.words:
      if word in seen:
        raise ValueError(f"word {word!r} already has an id; remove it")
      if word.split() != [word]:
        raise ValueError(f"word {word!r} is not one word; split it")
      seen.add(word)

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return len(_SPECIAL) + len(self.words)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    return (END,)

  def open(
    self,
    messages: Iterable[message_lib.ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of the first context, up to the agent's answer.

    Raises:
      ValueError: a word is not in the list, or there are tools.
    """
    if tools:
      raise ValueError(
        f"{len(tools)} tools cannot be shown in a list of words; use the chat "
        "of a model, as chat=hf"
      )
    ids = [i for one in messages for i in self._encode(one.content or "")]
    return np.asarray([*ids, AGENT], np.int32)

  def append(
    self, messages: Iterable[message_lib.ChatMessage], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids after an answer, up to the next answer.

    Args:
      answer_ended: ignored: an answer that was cut before <end> stays cut.
    """
    del answer_ended
    return self.open(messages)

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids with which a policy would answer `text`."""
    return np.asarray([*self._encode(text), END], np.int32)

  def decode(self, ids: Sequence[int] | Int32[np.ndarray, " L"]) -> str:
    """Returns the words, joined by one space, without special tokens."""
    return self.decoder().feed(ids)

  def decoder(self) -> "WordDecoder":
    """Returns a decoder of one answer while it is sampled."""
    return WordDecoder(self)

  def parse(
    self,
    ids: Sequence[int] | Int32[np.ndarray, " L"],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> tool_calls.Answer:
    """Returns the words as content; there are no tool calls."""
    return tool_calls.Answer(self.decode(ids))

  @property
  def gap(self) -> str:
    """Text between those of two ids."""
    return " "

  def token(self, index: int) -> str:
    """Returns the text of an id, special or not.

    An id beyond the words, which a model may have, is "<id 42>"; no word can
    collide with it, because it holds a space.
    """
    if index < 0:
      raise ValueError(f"id {index} is below 0")
    if index >= self.vocab_size:
      return f"<id {index}>"
    return (_SPECIAL + self.words)[index]

  def _encode(self, text: str) -> list[int]:
    unknown = next((w for w in text.split() if w not in self._ids), None)
    if unknown is not None:
      unknown = unknown[:_MAX_SHOWN]
      near = difflib.get_close_matches(unknown, self.words, 1)
      nearest = f"the nearest is {near[0]!r}; " if near else ""
      raise ValueError(
        f"word {unknown!r} is not among the {len(self.words)} known ones; "
        f"{nearest}words are separated by spaces"
      )
    return [self._ids[word] for word in text.split()]

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    return {word: i for i, word in enumerate(self.words, len(_SPECIAL))}


class WordDecoder:
  """Decodes one answer piece by piece; the sum is the text of all ids."""

  def __init__(self, chat: WordChat):
    self._chat = chat
    self._begun = False

  def feed(self, ids: Sequence[int] | Int32[np.ndarray, " t"]) -> str:
    """Returns the words, after a space if others came before."""
    known = (i for i in np.asarray(ids).tolist() if i >= len(_SPECIAL))
    text = " ".join(map(self._chat.token, known))
    space = " " if text and self._begun else ""
    self._begun = self._begun or bool(text)
    return space + text

  def end(self) -> str:
    """Returns "": words are never held back."""
    return ""
