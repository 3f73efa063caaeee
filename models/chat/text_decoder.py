"""Decodes one answer while it is sampled, never half a character."""

import codecs
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int32


class TextDecoder:
  """Decodes one answer piece by piece.

  decoder = chat.decoder()
  text = decoder.feed([5]) + decoder.feed([8, 13]) + decoder.end()
  assert text == chat.decode([5, 8, 13])

  Args:
    bytes_of: the bytes of an id, of which several may be one character.
  """

  def __init__(self, bytes_of: Callable[[int], bytes]):
    self._bytes_of = bytes_of
    self._text = codecs.getincrementaldecoder("utf-8")("replace")

  def feed(self, ids: Iterable[int] | Int32[np.ndarray, " t"]) -> str:
    """Returns the text that became complete."""
    return self._text.decode(b"".join(self._bytes_of(int(i)) for i in ids))

  def end(self) -> str:
    """Returns U+FFFD for an incomplete last character, or ""."""
    return self._text.decode(b"", final=True)
