"""The tokenizer and chat template of a Hugging Face directory, append-only.

  <|im_start|>user ... assistant | sampled ids <|im_end|> | <|im_start|>user ...
  '------ open(messages) -------' '---- the engine's ----' '-- append(...) ----

Ids that were sampled are never encoded again. To render the whole conversation
anew would give other ids: text has more than one encoding, and Qwen3's template
drops the thinking of turns before the last question. Here they stay as they
were sampled: what a policy sees of its past is what it said. `append` renders
the new messages behind a stand-in for the answer, and takes what follows it;
that this depends on nothing else is checked when a directory is loaded.

Text of messages holds no control tokens, whatever it spells: `chat_template`
tells the template's from others, which are encoded as the text they are. Added
tokens that are not special, such as <think> or <tool_call>, are text to all.
"""

import codecs
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders

from models.chat import template as template_lib
from models.chat import tool_calls
from models.chat.template import Message

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True)
class HfChat:
  """Messages <-> ids of a model with a byte-level tokenizer; `load` makes it.

  Attributes:
    tokenizer: tokenizer.json, as text.
    template: knows every special token of the tokenizer.
    stop_ids: end an answer; the first is how the template ends it.
  """

  tokenizer: str = dataclasses.field(repr=False)
  template: template_lib.ChatTemplate
  stop_ids: tuple[int, ...]

  @classmethod
  def load(
    cls,
    directory: str | os.PathLike[str],
    variables: Mapping[str, Any] | None = None,
  ) -> "HfChat":
    """Reads a directory and checks that its template only ever appends.

    Args:
      variables: more that the template may read, as enable_thinking=False.

    Raises:
      ValueError: files are missing or broken, the tokenizer is not byte-level,
        or the template rewrites what came before.
    """
    root = pathlib.Path(directory)
    try:
      return cls._load(root, dict(variables or {}))
    except ValueError as error:
      raise ValueError(f"{root}: {error}") from error

  @classmethod
  def _load(cls, root: pathlib.Path, variables: dict[str, Any]) -> "HfChat":
    path = root / "tokenizer.json"
    if not path.is_file():
      raise ValueError(
        "no tokenizer.json; AutoTokenizer.save_pretrained writes one"
      )
    source = path.read_text("utf-8")
    settings = _json(root / "tokenizer_config.json")
    control = _control(_tokenizer(source))
    template = template_lib.ChatTemplate(
      _template(root, settings),
      tuple(control),
      tuple((_special_names(settings) | variables).items()),
    )
    unread = [name for name in variables if not template.knows(name)]
    if unread:
      raise ValueError(f"its chat template does not read {', '.join(unread)}")
    end = control[template.end_of_turn()]
    others = _eos_ids(root, settings, control)
    return cls(source, template, tuple(dict.fromkeys((end, *others))))

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id; a model may have more."""
    return max(_tokenizer(self.tokenizer).get_vocab().values()) + 1

  @functools.cached_property
  def thinks(self) -> bool:
    """Whether the prompt opens the thinking, so that an answer closes it."""
    return self.template.prompt().rstrip().endswith("<think>")

  def open(
    self,
    messages: Iterable[Message],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of a conversation, up to where the next answer begins.

    Args:
      tools: JSON schemas of functions, as those of the OpenAI API.

    Raises:
      ValueError: a message has no encoding, or the template refuses it.
    """
    return self._encode(self.template.render(messages, tools, prompt=True))

  def append(
    self, messages: Iterable[Message], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids that follow sampled ones, up to the next answer.

    Args:
      answer_ended: whether the sampled ids end with a stop id. If not, the
        answer was cut off, and the ids begin with what ends its turn.

    Raises:
      ValueError: as `open`.
    """
    rest = self.template.after_answer(messages, prompt=True)
    end = self._controls[self.stop_ids[0]]
    return self._encode(rest.removeprefix(end) if answer_ended else rest)

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids with which a policy would say `text`, and end."""
    return np.asarray([*self._text_ids(text), self.stop_ids[0]], np.int32)

  def decode(self, ids: Sequence[int] | Int32[np.ndarray, " L"]) -> str:
    """Returns the text without special tokens.

    Bytes that are no UTF-8 become U+FFFD, and an id that no token has, say 42,
    "<id 42>": a model may have more ids than its tokenizer.
    """
    return b"".join(self._said(int(i)) for i in ids).decode("utf-8", "replace")

  def parse(
    self, ids: Sequence[int] | Int32[np.ndarray, " L"]
  ) -> tool_calls.Answer:
    """Returns what an answer says, thinks and calls; see `tool_calls.parse`."""
    return tool_calls.parse(self.decode(ids), thinking=self.thinks)

  def decoder(self) -> "TextDecoder":
    """Returns what decodes one answer while it is sampled."""
    return TextDecoder(self)

  def token(self, index: int) -> str:
    """Returns one id as text, special or not; bytes that are none as \\xNN."""
    return self._bytes(index).decode("utf-8", "backslashreplace")

  def _said(self, index: int) -> bytes:
    return b"" if index in self._controls else self._bytes(index)

  def _bytes(self, index: int) -> bytes:
    if index < 0:
      raise ValueError(f"id {index} is below 0")
    if index in self._added:
      return self._added[index].encode()
    token = _tokenizer(self.tokenizer).id_to_token(index)
    if token is None:
      return f"<id {index}>".encode()
    return bytes(_BYTES[character] for character in token)

  def _encode(self, text: str) -> Int32[np.ndarray, " P"]:
    control = _control(_tokenizer(self.tokenizer))
    ids = []
    for place, piece in enumerate(self.template.split(text)):
      ids += [control[piece]] if place % 2 else self._text_ids(piece)
    return np.asarray(ids, np.int32)

  def _text_ids(self, text: str) -> list[int]:
    try:
      encode = _tokenizer(self.tokenizer).encode
      return encode(text, add_special_tokens=False).ids
    except TypeError as error:  # Half a surrogate pair, which is no text.
      raise ValueError(f"{text[:40]!r} has no encoding: {error}") from error

  @functools.cached_property
  def _added(self) -> dict[int, str]:
    added = _tokenizer(self.tokenizer).get_added_tokens_decoder()
    return {i: token.content for i, token in added.items()}

  @functools.cached_property
  def _controls(self) -> dict[int, str]:
    return {
      i: token for token, i in _control(_tokenizer(self.tokenizer)).items()
    }


class TextDecoder:
  """The text of one answer, piece by piece, never half a character.

  decoder = chat.decoder()
  text = decoder.feed([5]) + decoder.feed([8, 13]) + decoder.end()
  assert text == chat.decode([5, 8, 13])
  """

  def __init__(self, chat: HfChat):
    self._chat = chat
    self._text = codecs.getincrementaldecoder("utf-8")("replace")

  def feed(self, ids: Iterable[int] | Int32[np.ndarray, " t"]) -> str:
    """Returns the text that is certain now and was not before."""
    said = b"".join(self._chat._said(int(i)) for i in ids)
    return self._text.decode(said)

  def end(self) -> str:
    """Returns U+FFFD for a character that did not come whole, if any."""
    return self._text.decode(b"", final=True)


def _byte_table() -> dict[str, int]:
  """Returns the byte of each character that a byte-level token is written in.

  Printable bytes of Latin-1 stand for themselves, others count up from 256.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (byte for byte in range(256) if byte not in printable)
  return {chr(byte): byte for byte in printable} | {
    chr(256 + place): byte for place, byte in enumerate(others)
  }


_BYTES = _byte_table()


@functools.lru_cache(maxsize=4)
def _tokenizer(source: str) -> tokenizers.Tokenizer:
  """Returns a tokenizer that takes no text for a special token."""
  try:
    tokenizer = tokenizers.Tokenizer.from_str(source)
  except Exception as error:  # It raises nothing more special.
    raise ValueError(f"tokenizer.json is no tokenizer: {error}") from error
  if not isinstance(tokenizer.decoder, decoders.ByteLevel):
    raise ValueError(
      f"its tokenizer decodes with {tokenizer.decoder}; only a byte-level one "
      "tells the bytes of every id. What a run exported with its words is "
      "served with --run"
    )
  missing = [c for c in _BYTES if tokenizer.token_to_id(c) is None]
  if missing:
    raise ValueError(
      f"its tokenizer has no token for {len(missing)} of 256 bytes, which "
      f"would vanish from messages; the first is {_BYTES[missing[0]]:#x}"
    )
  tokenizer.no_truncation()
  tokenizer.no_padding()
  tokenizer.encode_special_tokens = True
  return tokenizer


def _control(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
  """Returns the ids of the special tokens."""
  found = {}
  for index, token in tokenizer.get_added_tokens_decoder().items():
    if not token.special:
      continue
    if token.lstrip or token.rstrip or token.single_word:
      raise ValueError(
        f"special token {token.content!r} looks at the text around it; set "
        "its lstrip, rstrip and single_word in tokenizer.json to false"
      )
    found[token.content] = index
  if not found:
    raise ValueError("its tokenizer has no special tokens: nothing ends a turn")
  return found


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Returns what a file says; nothing where there is none."""
  if not path.is_file():
    return {}
  try:
    data = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise ValueError(f"{path.name} is no JSON: {error}") from error
  if not isinstance(data, dict):
    raise ValueError(f"{path.name} holds no object")
  return data


def _template(root: pathlib.Path, settings: dict[str, Any]) -> str:
  path = root / "chat_template.jinja"
  if path.is_file():
    return path.read_text("utf-8")
  found = settings.get("chat_template")
  if isinstance(found, list):
    named = {entry.get("name"): entry.get("template") for entry in found}
    found = named.get("default")
  if not isinstance(found, str):
    raise ValueError(
      "no chat template: neither chat_template.jinja nor chat_template in "
      "tokenizer_config.json; a base model has none, so copy one"
    )
  return found


def _special_names(settings: dict[str, Any]) -> dict[str, Any]:
  """Returns the special tokens that templates call by name."""
  found = {}
  for name in _NAMES:
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
      found[name] = text
  return found


def _eos_ids(
  root: pathlib.Path, settings: dict[str, Any], control: dict[str, int]
) -> list[int]:
  """Returns the ids that end a text, from the file that is asked first."""
  for name in ("generation_config.json", "config.json"):
    found = _json(root / name).get("eos_token_id")
    if found is None:
      continue
    ids = found if isinstance(found, list) else [found]
    strange = [i for i in ids if i not in control.values()]
    if strange:
      raise ValueError(
        f"{name} has eos_token_id={found}, but {strange[0]} is none of the "
        f"tokenizer's special tokens {sorted(control.values())}"
      )
    return ids
  token = _special_names(settings).get("eos_token")
  return [control[token]] if token in control else []
