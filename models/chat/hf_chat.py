"""The tokenizer and chat template of a Hugging Face directory, append-only.

  <|im_start|>user ... assistant | sampled ids <|im_end|> | <|im_start|>user ...
  '------ open(messages) -------' '---- the engine's ----' '-- append(...) ----

Sampled ids are never encoded again: the policy sees its past answers exactly as
sampled. Rendering the whole conversation anew would give other ids, because
text has more than one encoding and Qwen3's template drops earlier thinking.
`append` renders the new messages after a stand-in for the answer and takes the
text that follows it; `load` checks that this text depends on nothing else.

Messages cannot spell control tokens: `models.chat.template` marks those in
messages, which are encoded as plain text. Added tokens that are not special,
such as <think> or <tool_call>, are text for all.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from models import untrusted_files
from models.chat import (
  answer_grammar,
  call_formats,
  text_decoder,
  tool_calls,
  trial,
)
from models.chat import message as message_lib
from models.chat import template as template_lib

_OURS = pathlib.Path(__file__).parents[1] / "hf" / "tiny"
_CALL = tool_calls.Call("f", '{"a": 1}')
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip")
_MOST_STEPS = 8
_MOST_PROBES = 200
_MOST_IDS = 100
_PROBE_LENGTH = 1000


@dataclasses.dataclass(frozen=True)
class HfChat:
  """The chat of a model whose tokenizer knows the bytes of ids; see `load`.

  That is a byte-level one, as of Qwen and Llama 3, or one that falls back on
  tokens of single bytes, as of Gemma.

  Attributes:
    tokenizer: text of tokenizer.json.
    template: its control tokens are the special tokens of the tokenizer.
    stop_ids: end an answer; the first is the one that the template writes.
    unused_templates: names of others, which the directory has, too.
  """

  tokenizer: str = dataclasses.field(repr=False)
  template: template_lib.ChatTemplate
  stop_ids: tuple[int, ...]
  unused_templates: tuple[str, ...] = ()

  @classmethod
  def load(
    cls,
    directory: str | os.PathLike[str],
    variables: Mapping[str, Any] | None = None,
    *,
    tries: bool = True,
  ) -> "HfChat":
    """Reads a directory and checks that its template is append-only.

    Args:
      variables: further variables of the template, as enable_thinking=False.
      tries: first uses the files in a process of its own, once for each
        content: they may be made to hang their reader. Those of the checkout
        are not.

    Raises:
      ValueError: files are missing or broken, the tokenizer is not of these,
        or takes too long, or the template rewrites earlier messages.
    """
    root = pathlib.Path(directory)
    try:
      files = _Files.read(root)
      if tries and files != _Files.read(_OURS):
        _try(json.dumps([*files, dict(variables or {})]))
      return cls._of(files, dict(variables or {}))
    except ValueError as error:
      raise ValueError(f"{root}: {error}") from error

  @classmethod
  def _of(cls, files: "_Files", variables: dict[str, Any]) -> "HfChat":
    control = _control(_tokenizer(files.tokenizer))
    special = _special_names(files.settings)
    if "bos_token" not in files.settings:
      special["bos_token"] = template_lib.Unnamed(name="bos_token")
    named = tuple((special | variables).items())
    try:
      template = template_lib.ChatTemplate(
        files.template, tuple(control), named
      )
      end = control[template.end_of_turn()]
    except ValueError as error:
      raise ValueError(f"{files.template_name}: {error}") from error
    unread = [name for name in variables if not template.knows(name)]
    if unread:
      raise ValueError(f"its chat template does not read {', '.join(unread)}")
    others = _eos_ids(files, control)
    stop_ids = tuple(dict.fromkeys((end, *others)))
    unused = tuple(files.unused_templates)
    return cls(files.tokenizer, template, stop_ids, unused)

  @property
  def vocab_size(self) -> int:
    """The largest id plus one; a model may have more."""
    return max(_tokenizer(self.tokenizer).get_vocab().values()) + 1

  @functools.cached_property
  def thinks(self) -> bool:
    """True if the prompt opens the thinking, which the answer closes."""
    return self.template.prompt().rstrip().endswith("<think>")

  @property
  def thinking(self) -> answer_grammar.Thinking:
    """The thinking before an answer, as far as the prompt decides it."""
    if self.thinks:
      return "opened"
    closed = self.template.prompt().rstrip().endswith("</think>")
    known = _tokenizer(self.tokenizer).token_to_id("<think>") is not None
    return "possible" if known and not closed else "none"

  def pieces(self) -> list[bytes]:
    """Returns the text of every id; b"" for special tokens and for gaps."""
    known = _tokenizer(self.tokenizer).get_vocab().values()
    pieces = [b""] * self.vocab_size
    for index in known:
      pieces[index] = self._text_bytes(index)
    return pieces

  def open(
    self,
    messages: Iterable[message_lib.ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: bool = True,
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of a conversation, up to where the next answer begins.

    Args:
      tools: JSON schemas of functions, as in the OpenAI API.
      prompt: false ends them before the template opens that answer.

    Raises:
      ValueError: a message cannot be encoded, or the template rejects it; or
        there are tools, or results of some, and the template rewrites what is
        before a result, or writes calls in a way that is not read here.
    """
    messages = list(messages)
    self._check_tools(messages, tools)
    text = self.template.render(messages, tools, prompt=prompt)
    if tools:
      self._check_calls()
    return self._encode(text)

  def append(
    self, messages: Iterable[message_lib.ChatMessage], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids after an answer, up to the next answer.

    Args:
      answer_ended: the sampled ids end with a stop id. Otherwise the answer
        was cut, and the returned ids begin with the end of its turn.

    Raises:
      ValueError: as `open`.
    """
    messages = list(messages)
    self._check_tools(messages)
    rest = self.template.after_answer(messages, prompt=True)
    end = self._controls[self.stop_ids[0]]
    return self._encode(rest.removeprefix(end) if answer_ended else rest)

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids with which a policy would answer `text`."""
    return np.asarray([*self.text_ids(text), self.stop_ids[0]], np.int32)

  def answers(
    self,
    messages: Sequence[message_lib.ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
  ) -> list[tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " T"]]]:
    """Returns the ids of each answer after those of the context before it.

    They are those of `open`, an answer, `append`, an answer, and so on; and
    their text is that of the whole conversation.

    Args:
      first: answers of earlier messages are context.

    Raises:
      ValueError: as `template.ChatTemplate.answers`.
    """
    self._check_tools(messages, tools)
    ends = [self._controls[i] for i in self.stop_ids]
    texts = self.template.answers(messages, tools, ends=ends, first=first)
    return [(self._encode(asked), self._encode(said)) for asked, said in texts]

  def decode(self, ids: Sequence[int] | Int32[np.ndarray, " L"]) -> str:
    """Returns the text without special tokens.

    Invalid UTF-8 becomes U+FFFD, and an id beyond the tokenizer, which a model
    may have, "<id 42>".
    """
    text = b"".join(map(self._text_bytes, np.asarray(ids).tolist()))
    return text.decode("utf-8", "replace")

  def spell(self, ids: Sequence[int]) -> str:
    """Returns the text with that of special tokens; else as `decode`."""
    return b"".join(map(self._bytes, ids)).decode("utf-8", "replace")

  def parse(
    self,
    ids: Sequence[int] | Int32[np.ndarray, " L"],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> tool_calls.Answer:
    """Returns the parsed answer; see `tool_calls.parse`."""
    return tool_calls.parse(
      self.decode(ids),
      thinking=self.thinks,
      call_format=self.call_format,
      tools=tools,
    )

  def decoder(self) -> text_decoder.TextDecoder:
    """Returns a decoder of one answer while it is sampled."""
    return text_decoder.TextDecoder(self._text_bytes)

  @property
  def gap(self) -> str:
    """Text between those of two ids."""
    return ""

  def token(self, index: int) -> str:
    """Returns the text of an id, special or not; invalid UTF-8 as \\xNN."""
    return self._bytes(index).decode("utf-8", "backslashreplace")

  def _check_tools(
    self,
    messages: Iterable[message_lib.ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> None:
    """Raises ValueError for a template that is not made for tools."""
    if tools and not self.template.knows("tools") and self.unused_templates:
      raise ValueError(
        f"{len(tools)} tools, which the default chat template does not show; "
        f"there is one named {' and '.join(self.unused_templates)}: copy it to "
        "chat_template.jinja, or use tools=()"
      )
    if tools or any(message.role == "tool" for message in messages):
      self.template.check_results()

  def _check_calls(self) -> None:
    """Raises ValueError unless the template's calls are read here."""
    if self._own_format is None:
      forms = [
        tool_calls.write(tool_calls.Answer("", (_CALL,)), form)
        for form in call_formats.FORMATS
      ]
      raise ValueError(
        "the chat template writes a call of a tool as "
        f"{self._written_call!r:.300}, which is not read here; use tools=(), "
        f"or a model that writes it as {' or '.join(map(repr, forms))}"
      )

  @functools.cached_property
  def call_format(self) -> call_formats.CallFormat:
    """The form of calls that is read: the template's, if it has one."""
    try:
      return self._own_format or call_formats.HERMES
    except ValueError:  # It takes no tools.
      return call_formats.HERMES

  @functools.cached_property
  def _own_format(self) -> call_formats.CallFormat | None:
    """The form in which the template writes a call; None if not read here."""
    # What opens an answer, such as its role; thinking is parsed.
    opening = self._shown(self.template.prompt()).partition("<think>")[0]
    text = self._written_call.removeprefix(opening.rstrip())
    for form in call_formats.FORMATS:
      answer = tool_calls.parse(
        text, call_format=form, tools=(template_lib.TOOL,)
      )
      if answer.tool_calls == (_CALL,) and not answer.content:
        return form
    return None

  @functools.cached_property
  def _written_call(self) -> str:
    # Templates of Mistral demand an id of nine characters.
    call = dataclasses.replace(_CALL, id="call00001")
    return self._shown(self.template.calling(call))

  def _shown(self, text: str) -> str:
    """Returns text of the template without control tokens."""
    return self.decode(self._encode(text))

  def _text_bytes(self, index: int) -> bytes:
    return b"" if index in self._controls else self._bytes(index)

  def _bytes(self, index: int) -> bytes:
    if index < 0:
      raise ValueError(f"id {index} is below 0")
    tokenizer = _tokenizer(self.tokenizer)
    token = tokenizer.id_to_token(index)
    if token is None:
      return f"<id {index}>".encode()
    if self._falls_back:
      if token in _SINGLE_BYTES:
        return bytes([_SINGLE_BYTES[token]])
      return token.replace(_SPACE, " ").encode()
    if index in self._added:
      return token.encode()
    try:
      return bytes(_BYTES[character] for character in token)
    except KeyError:  # A token that stands for its text, and not for bytes.
      return token.encode()

  def _encode(self, text: str) -> Int32[np.ndarray, " P"]:
    control = _control(_tokenizer(self.tokenizer))
    ids = []
    for place, piece in enumerate(self.template.split(text)):
      ids += [control[piece]] if place % 2 else self.text_ids(piece)
    return np.asarray(ids, np.int32)

  def text_ids(self, text: str) -> list[int]:
    """Returns the ids of text that spells no control token."""
    try:
      # In a batch, without which other threads would have to wait.
      encode = _tokenizer(self.tokenizer).encode_batch_fast
      return encode([text], add_special_tokens=False)[0].ids
    except TypeError as error:  # Half a surrogate pair.
      raise ValueError(f"{text[:40]!r} has no encoding: {error}") from error

  @functools.cached_property
  def _falls_back(self) -> bool:
    return _falls_back(_tokenizer(self.tokenizer))

  @functools.cached_property
  def _added(self) -> dict[int, str]:
    added = _tokenizer(self.tokenizer).get_added_tokens_decoder()
    return {i: token.content for i, token in added.items()}

  @functools.cached_property
  def _controls(self) -> dict[int, str]:
    return {
      i: token for token, i in _control(_tokenizer(self.tokenizer)).items()
    }


def _byte_table() -> dict[str, int]:
  """Returns the byte of each character of byte-level tokens.

  Printable bytes of Latin-1 stand for themselves, others count up from 256.

  Source: bytes_to_unicode of GPT-2.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (byte for byte in range(256) if byte not in printable)
  return {chr(byte): byte for byte in printable} | {
    chr(256 + place): byte for place, byte in enumerate(others)
  }


_BYTES = _byte_table()
_SPACE = "\u2581"
"""Stands for a space in tokens of SentencePiece."""
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_SINGLE_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
_FALLBACK = {
  "type": "Sequence",
  "decoders": [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
  ],
}
"""The decoder of Gemma. Those of Llama 2 and Mistral 7B strip a space as well,
which their encoders put before every text: texts cannot be joined."""


class _Files(NamedTuple):
  """The content of a directory that a chat needs.

  Attributes:
    settings: tokenizer_config.json, above special_tokens_map.json.
    template_name: its file.
    unused_templates: names of other templates.
    ends: the name of each file with an eos_token_id, and its value.
  """

  tokenizer: str
  settings: dict[str, Any]
  template: str
  template_name: str
  unused_templates: Sequence[str]
  ends: Sequence[Sequence[Any]]

  @classmethod
  def read(cls, root: pathlib.Path) -> "_Files":
    path = root / "tokenizer.json"
    if not path.exists():
      raise ValueError(
        "no tokenizer.json; AutoTokenizer.save_pretrained writes one"
      )
    text = untrusted_files.read_text(path, untrusted_files.MAX_TOKENIZER_BYTES)
    untrusted_files.parse_json(text, path.name)
    settings = {
      **_json(root / "special_tokens_map.json"),
      **_json(root / "tokenizer_config.json"),
    }
    names = ("generation_config.json", "config.json")
    ends = [[name, _json(root / name).get("eos_token_id")] for name in names]
    template = _template(root, settings)
    return cls(text, settings, *template, _unused(root, settings), ends)


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object of a JSON file; {} if the file does not exist."""
  return untrusted_files.read_object(path) if path.exists() else {}


def _template(root: pathlib.Path, settings: dict[str, Any]) -> tuple[str, str]:
  """Returns the chat template, and the name of its file."""
  path = root / "chat_template.jinja"
  if path.exists():
    return untrusted_files.read_text(path), path.name
  found = settings.get("chat_template")
  if isinstance(found, list):
    found = _named(settings).get("default")
  if not isinstance(found, str):
    raise ValueError(
      "no chat template: neither chat_template.jinja nor chat_template in "
      "tokenizer_config.json; a base model has none, so copy one"
    )
  return found, "tokenizer_config.json"


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the chat templates of a list by their names."""
  found = settings.get("chat_template")
  entries = found if isinstance(found, list) else []
  return {
    entry["name"]: entry.get("template")
    for entry in entries
    if isinstance(entry, dict) and isinstance(entry.get("name"), str)
  }


def _unused(root: pathlib.Path, settings: Mapping[str, Any]) -> list[str]:
  """Returns the names of the chat templates besides the default one."""
  files = (root / "additional_chat_templates").glob("*.jinja")
  names = {*_named(settings), *(file.stem for file in files)}
  return sorted(names - {"default"})


@functools.lru_cache(maxsize=4)
def _tokenizer(source: str) -> Any:
  """Returns a tokenizer that encodes special tokens in text as plain text.

  Raises:
    ValueError: it cannot be used, or tokenizers is not installed.
  """
  # Not at the top: a run on a list of words does without.
  try:
    import tokenizers
    from tokenizers import decoders
  except ImportError as error:
    raise ValueError(
      "its tokenizer needs the package tokenizers: pip install 'twinmesh[hf]'"
    ) from error
  # Batches are of one text: threads for them would do nothing.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  try:
    tokenizer = tokenizers.Tokenizer.from_str(source)
  except Exception as error:  # The package raises plain Exceptions.
    raise ValueError(f"tokenizer.json cannot be read: {error}") from error
  falls_back = _falls_back(tokenizer)
  if not isinstance(tokenizer.decoder, decoders.ByteLevel) and not falls_back:
    raise ValueError(
      f"its tokenizer decodes with {tokenizer.decoder}; it must be byte-level, "
      "or fall back on bytes as Gemma's, to know the bytes of every id. Serve "
      "a run on a list of words with --run, not its export"
    )
  named = _SINGLE_BYTES if falls_back else _BYTES
  missing = [c for c in named if tokenizer.token_to_id(c) is None]
  if missing:
    raise ValueError(
      f"its tokenizer has no token for {len(missing)} of 256 bytes, which "
      f"messages would lose; the first is {named[missing[0]]:#x}"
    )
  tokenizer.no_truncation()
  tokenizer.no_padding()
  tokenizer.encode_special_tokens = True
  return tokenizer


def _falls_back(tokenizer: Any) -> bool:
  """Returns whether tokens are texts, or single bytes where there is none."""
  decoder = tokenizer.decoder
  return decoder is not None and json.loads(decoder.__getstate__()) == _FALLBACK


def _control(tokenizer: Any) -> dict[str, int]:
  """Returns the ids of the special tokens."""
  found = {}
  for index, token in tokenizer.get_added_tokens_decoder().items():
    if not token.special:
      continue
    if token.lstrip or token.rstrip or token.single_word:
      raise ValueError(
        f"special token {token.content!r} depends on the text around it; set "
        "its lstrip, rstrip and single_word in tokenizer.json to false"
      )
    found[token.content] = index
  if not found:
    raise ValueError("its tokenizer has no special tokens: nothing ends a turn")
  return found


def _special_names(settings: dict[str, Any]) -> dict[str, Any]:
  """Returns the named special tokens: bos_token, eos_token .."""
  found = {}
  for name in _NAMES:
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
      found[name] = text
  return found


def _eos_ids(files: _Files, control: dict[str, int]) -> list[int]:
  """Returns the ids that end a text, from the first file that has them."""
  for name, found in files.ends:
    if found is None:
      continue
    ids = found if isinstance(found, list) else [found]
    known = set(control.values())
    unknown = [i for i in ids if type(i) is not int or i not in known]
    if unknown:
      raise ValueError(
        f"{name} has eos_token_id={found}; {unknown[0]} must be one of the "
        f"tokenizer's special tokens {sorted(control.values())}"
      )
    return ids
  token = _special_names(files.settings).get("eos_token")
  return [control[token]] if token in control else []


@functools.lru_cache(maxsize=8)
def _try(files: str) -> None:
  """Uses files in a process of its own.

  Raises:
    ValueError: they are broken, or take too long.
  """
  trial.run(__name__, first_use.__name__, json.loads(files))


def first_use(argument: list[Any]) -> None:
  """Makes a chat of `_Files` and variables, and encodes what may be slow.

  Raises:
    ValueError: as `HfChat.load`.
  """
  *fields, variables = argument
  chat = HfChat._of(_Files(*fields), variables)
  data = untrusted_files.parse_json(chat.tokenizer, "tokenizer.json")
  steps = [data.get("normalizer"), data.get("pre_tokenizer")]
  _check_normalizer(steps[0])
  # An expression is slow on repetitions of what it names.
  texts = {leaf for leaf in _leaves(steps) if isinstance(leaf, str)}
  letters = sorted({letter for text in texts for letter in text} | {*"a 1.\n"})
  for text in [*letters[:_MOST_PROBES], *sorted(texts)[:_MOST_PROBES]]:
    repeated = text * (_PROBE_LENGTH // max(1, len(text)) + 1) + "\0"
    if len(chat.text_ids(repeated)) > _MOST_IDS * len(repeated):
      raise ValueError(
        f"its tokenizer makes more than {_MOST_IDS} ids of a character; use "
        "another"
      )


def _check_normalizer(found: Any) -> None:
  """Raises ValueError for a normalizer that may make a text much longer."""
  parts = [found] if found else []
  if parts and found["type"] == "Sequence":
    parts = found["normalizers"]
  kinds = [part["type"] for part in parts if part != _SPACES]
  other = [kind for kind in kinds if kind not in _NORMALIZERS]
  if other or len(parts) > _MOST_STEPS:
    raise ValueError(
      f"its tokenizer has the normalizers {', '.join(map(str, kinds[:10]))}; "
      f"up to {_MOST_STEPS} of {', '.join(_NORMALIZERS)} are supported, which "
      "do not make a text much longer"
    )


def _leaves(value: Any) -> Iterator[Any]:
  if isinstance(value, dict | list):
    for item in value.values() if isinstance(value, dict) else value:
      yield from _leaves(item)
  else:
    yield value
