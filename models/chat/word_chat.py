"""Words <-> ids, and the template of a conversation, which only ever grows.

  <words of the environment> <agent> <sampled words> <end> <words ...> <agent>
  '------ open(messages) ---------' '--- sampled ------' '-- append(...) --'

Ids that were emitted are never encoded again: the conversation is the ids, and
its text is only a view of them.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

PAD, END, AGENT = 0, 1, 2
_SPECIAL = ("<pad>", "<end>", "<agent>")


@runtime_checkable
class Message(Protocol):
  """One message of a conversation."""

  @property
  def role(self) -> str:
    """Who speaks."""
    ...

  @property
  def content(self) -> str:
    """What is said: words of the list, separated by white space."""
    ...


@dataclasses.dataclass(frozen=True)
class WordChat:
  """Tokenizer and chat template over a fixed list of words.

  Roles leave no trace: whatever is not sampled was said by the other side.

  Attributes:
    words: unique; the first one has id 3.
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

  def open(self, messages: Iterable[Message]) -> Int32[np.ndarray, " P"]:
    """Returns the first context, up to where the agent speaks."""
    said = [i for message in messages for i in self._encode(message.content)]
    return np.asarray([*said, AGENT], np.int32)

  def append(
    self, messages: Iterable[Message], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns what follows the sampled ids, up to the next answer.

    Args:
      answer_ended: changes nothing: an answer that was cut off before <end>
        stays so.
    """
    del answer_ended
    return self.open(messages)

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids that a policy would sample to say `text`."""
    return np.asarray([*self._encode(text), END], np.int32)

  def decode(self, ids: Sequence[int] | Int32[np.ndarray, " L"]) -> str:
    """Returns the words, joined by one space, without special tokens."""
    return " ".join(self.token(int(i)) for i in ids if i >= len(_SPECIAL))

  def token(self, index: int) -> str:
    """Returns one id as text, special or not.

    A model may have more ids than there are words: id 42 is then "<id 42>",
    which is never a word, for it holds a space.
    """
    if index < 0:
      raise ValueError(f"id {index} is below 0")
    if index >= self.vocab_size:
      return f"<id {index}>"
    return (_SPECIAL + self.words)[index]

  def _encode(self, text: str) -> list[int]:
    unknown = next((w for w in text.split() if w not in self._ids), None)
    if unknown is not None:
      near = difflib.get_close_matches(unknown, self.words, 1, 0.0)
      raise ValueError(
        f"word {unknown!r} is not among the {len(self.words)} known ones; "
        f"the nearest is {near[0] if near else None!r}"
      )
    return [self._ids[word] for word in text.split()]

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    return {word: i for i, word in enumerate(self.words, len(_SPECIAL))}
