"""The form that an answer must have, as a mask over the ids of a tokenizer.

  AnswerGrammar --lark--> llguidance --compiled--> matcher: bytes -> mask of ids

A grammar holds for the text after any thinking. Calls are written in the form
of the chat template, one of `models.chat.call_formats`. Text that the grammar
leaves no choice about has the tokenizer's own ids.
"""

import dataclasses
import functools
import json
import re
from typing import Any, Literal, Protocol, runtime_checkable

from models.chat import call_formats

MAX_SCHEMAS = 120_000
"""Characters of all schemas of a grammar."""

Thinking = Literal["none", "possible", "opened"]
"""Whether an answer may begin with its thinking, or does, opened by the prompt.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
  """A JSON schema.

  Attributes:
    text: its JSON.
    name: of the schema in errors.
  """

  text: str
  name: str

  @property
  def value(self) -> Any:
    """The schema."""
    return json.loads(self.text)

  @property
  def lark(self) -> str:
    """The JSON that satisfies it, in a grammar."""
    return call_formats.json_rule(self.value, call_formats.SOME_SPACE)


ANY_OBJECT = Schema(text='{"type": "object"}', name="any object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerGrammar:
  """The form of an answer.

  Attributes:
    content: of an answer that is no call; None is any text.
    functions: (name, schema of the arguments) of those that may be called.
    call: an answer must consist of calls.
    one_call: of several calls there is only the first.
  """

  content: Schema | None = None
  functions: tuple[tuple[str, Schema], ...] = ()
  call: bool = False
  one_call: bool = False

  def lark(self, thinking: Thinking, form: call_formats.CallFormat) -> str:
    """Returns the grammar in llguidance's variant of Lark.

    Args:
      form: of calls.

    Raises:
      ValueError: the form cannot follow a schema.

    Source: docs/syntax.md of llguidance.
    """
    first = {"none": "", "possible": "thought?", "opened": "thinking"}
    lines = [f"start: {first[thinking]} body"]
    lines += ["thinking: thoughts gap?", r"gap: /\n{1,4}/"]
    lines += [r"thoughts[lazy]: /(?s:.*)<\/think>/"]
    lines += ['thought: "<think>" thinking']
    opens = form.first + form.begin
    gap = _literal(form.gap + form.begin)
    more = "function" if self.one_call else f"function ({gap} function)*"
    last = f" {_literal(form.last)}" if form.last else ""
    if self.call:
      lines += ["body: calls"]
    elif self.content is not None:
      lines += ["body: calls | content" if self.functions else "body: content"]
      lines += [f"content: {self.content.lark}"]
    else:
      repeated = "?" if self.one_call else "*"
      begin = re.escape(opens).replace("\\\n", r"\n")
      # Without a mark behind all calls, `before` takes what is between them.
      called = f"{more}{last}" if last else "function"
      lines += [f"body: (before {called}){repeated} text"]
      lines += [rf"before[lazy]: /(?s:.*){begin}/", "text: TEXT"]
      lines += [f"TEXT: /(?s:.*)/ & ~/(?s:.*){form.reserved}(?s:.*)/"]
    if self.functions:
      names = [f"function_{i}" for i in range(len(self.functions))]
      lines += [f"calls: {_literal(opens)} {more}{last}"]
      lines += [f"function: {' | '.join(names)}", *form.rules]
    for i, (name, arguments) in enumerate(self.functions):
      try:
        lines += [f"function_{i}: {form.rule(name, arguments.value)}"]
      except ValueError as error:
        raise ValueError(f"{arguments.name}: {error}") from error
    return "\n".join(lines)

  @property
  def schemas(self) -> tuple[Schema, ...]:
    """All of its schemas."""
    content = () if self.content is None else (self.content,)
    return (*content, *(arguments for _, arguments in self.functions))


@runtime_checkable
class Vocabulary(Protocol):
  """A chat whose ids have bytes; hashable. `models.chat.hf_chat.HfChat`."""

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    ...

  @property
  def thinking(self) -> Thinking:
    """The thinking before an answer."""
    ...

  @property
  def call_format(self) -> call_formats.CallFormat:
    """The form of calls."""
    ...

  def text_ids(self, text: str) -> list[int]:
    """Returns the ids of text without special tokens."""
    ...

  def pieces(self) -> list[bytes]:
    """Returns the bytes of each id in text; b"" for ids that are no text."""
    ...


@functools.lru_cache(maxsize=64)
def compiled(
  vocabulary: Vocabulary, grammar: AnswerGrammar, vocab_size: int
) -> Any:
  """Returns a matcher at the beginning of a grammar: copy it for each answer.

  It may take a second for a large schema, without the lock of the interpreter.

  Args:
    vocab_size: of the model, which may have more ids than the tokenizer.

  Raises:
    ValueError: a schema cannot be followed, or llguidance is not installed.
  """
  try:
    import llguidance
  except ImportError as error:
    raise ValueError(
      "constrained answers need llguidance: pip install 'twinmesh[constrained]'"
    ) from error
  length = sum(len(schema.text) for schema in grammar.schemas)
  if length > MAX_SCHEMAS:
    raise ValueError(
      f"schemas of {length} characters; at most {MAX_SCHEMAS} can be followed"
    )
  tokens = _tokens(vocabulary, vocab_size)

  def begun(lark: str) -> tuple[Any, str]:
    matcher = llguidance.LLMatcher(tokens, lark, log_level=0)
    # A copy looks for a first id: some schemas compile that nothing satisfies.
    first = matcher.deep_copy()
    first.compute_bitmask()
    return matcher, first.get_error()

  matcher, error = begun(
    grammar.lark(vocabulary.thinking, vocabulary.call_format)
  )
  if error:
    for schema in grammar.schemas:
      _, reason = begun(f"start: {schema.lark}")
      if reason:
        raise ValueError(f"{schema.name}: {_reason(reason)}")
    raise ValueError(f"the answer's grammar: {_reason(error)}")
  return matcher


@functools.lru_cache(maxsize=4)
def _tokens(vocabulary: Vocabulary, vocab_size: int) -> Any:
  import llguidance

  return llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(_Pieces(vocabulary, vocab_size)),
    eos_token=list(vocabulary.stop_ids),
  )


class _Pieces:
  """A tokenizer as llguidance wants to see it."""

  bos_token_id = None

  def __init__(self, vocabulary: Vocabulary, vocab_size: int):
    self._text_ids = vocabulary.text_ids
    self.eos_token_id = vocabulary.stop_ids[0]
    pieces = vocabulary.pieces()
    pieces += [b""] * (vocab_size - len(pieces))
    self.special_token_ids = [i for i, text in enumerate(pieces) if not text]
    # Special ids need names; no text has them.
    self.tokens = [text or b"<|%d|>" % i for i, text in enumerate(pieces)]

  def __call__(self, text: str) -> list[int]:
    ids, wanted = self._text_ids(text), text.encode()
    if self._text(ids) == wanted:
      return ids
    # Some tokenizers put a space before text; behind a mark it has none.
    ids = self._text_ids(f"\x02{text}")
    for rest in (ids[1:], ids[2:]):
      if self._text(rest) == wanted:
        return rest
    # Others change letters, as Qwen's composes them; bytes stay.
    return [self.tokens.index(bytes([byte])) for byte in wanted]

  def _text(self, ids: list[int]) -> bytes:
    return b"".join(self.tokens[i] for i in ids)


def _literal(text: str) -> str:
  return json.dumps(text, ensure_ascii=False)


def _reason(error: str) -> str:
  """Returns the reason in an error of llguidance, without the grammar."""
  if error.startswith("NoExtension"):
    return "nothing satisfies it"
  text = error.split("failed to compile JSON schema: ")[-1]
  text = text.split("\n   1 |")[0].strip()
  # The option that it advises is not for clients.
  return re.sub(r"\. Enable 'coerce_one_of'.*", "; use anyOf", text)
