"""Chat templates of models: messages cannot forge control tokens.

  message --_guard--> template --render--> text --split--> control token, text
  <|im_start|>user ... <|im_start|>assistant ANSWER <|im_end|> ... assistant
                                                   '---- after_answer ----

Only the template may end a turn. Where a message spells a control token, say
<|im_end|>, or ends with the beginning of one, `_guard` puts a mark before it,
and `split` treats only tokens without a mark as control tokens. The mark is a
code point that messages must not contain, and it is never encoded.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser

from models.chat import bounded_jinja
from models.chat.message import ChatMessage

ROLES = ("system", "user", "assistant", "tool")
MARK = "\ufdd0"  # Unicode reserves it for use within a program.
# After an odd number of backslashes it is not an escape.
_ESCAPED_MARK = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(MARK):04x}")

_MAX_FORM = 200
_ANSWER = "\ufdd1"  # Stands for an answer in rendered text.


class Rewritten(ValueError):
  """A template writes an earlier turn otherwise once others follow."""


class Unnamed(jinja2.Undefined):
  """A variable that a template may ask for, and must not write."""

  def __str__(self) -> NoReturn:
    raise jinja2.UndefinedError(
      f"it writes {self._undefined_name}, which no file of the tokenizer "
      "names; name it in tokenizer_config.json, or null where there is none"
    )


@dataclasses.dataclass(frozen=True)
class _Sample:
  role: str
  content: str
  tool_calls: Sequence[Any] = ()


_QUESTION = _Sample("user", "1")
TOOL: Mapping[str, Any] = {
  "type": "function",
  "function": {
    "name": "f",
    "description": "",
    "parameters": {
      "type": "object",
      "properties": {"a": {"type": "integer"}},
    },
  },
}


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """A Jinja template in a sandbox, with the functions of Hugging Face.

  Attributes:
    source: of the template, untrusted.
    control: texts that only the template may write, none of them empty.
    variables: variables of the template besides the conversation.
  """

  source: str = dataclasses.field(repr=False)
  control: tuple[str, ...]
  variables: tuple[tuple[str, Any], ...] = ()

  def __post_init__(self):
    if not all(self.control) or not self.control:
      raise ValueError(
        f"control={self.control} must hold tokens, none of them empty"
      )
    if len(self.source) > bounded_jinja.MAX_SOURCE:
      raise ValueError(
        f"the chat template has {len(self.source):,} characters; use one of "
        f"{bounded_jinja.MAX_SOURCE:,} or fewer"
      )
    try:
      _compiled(self.source)
    # Python may refuse the code that Jinja has made, as nested too deeply.
    except Exception as error:
      raise ValueError(
        f"the chat template is not valid Jinja: {error}"
      ) from error

  def render(
    self,
    messages: Iterable[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: bool,
  ) -> str:
    """Returns the text of a conversation, with marks.

    Args:
      tools: JSON schemas of functions, as in the OpenAI API.
      prompt: end the text where the next answer begins.

    Raises:
      ValueError: a message cannot be encoded, or the template rejects it.
    """
    if tools and not self.knows("tools"):
      raise ValueError(
        f"{len(tools)} tools, but the chat template shows none to the model; "
        "use tools=() or another template"
      )
    try:
      conversation = self._guard([_as_dict(message) for message in messages])
      shown = self._guard(list(tools)) or None
    except RecursionError as error:
      raise ValueError("a message or tool is nested too deeply") from error
    names: dict[str, Any] = dict(self.variables)
    names |= {"messages": conversation, "tools": shown, "documents": None}
    try:
      program = _compiled(self.source)
      with bounded_jinja.budget():
        return program.render(names, add_generation_prompt=prompt)
    except Exception as error:  # The template is foreign code.
      raise ValueError(
        f"the chat template refuses the messages: {str(error)[:1000]}"
      ) from error

  def after_answer(
    self, messages: Iterable[ChatMessage], *, prompt: bool
  ) -> str:
    """Returns the text after an answer that messages follow, with marks.

    It begins with `end_of_turn()`. Raises as `render`.
    """
    return self._after([_QUESTION], messages, prompt=prompt)

  def answers(
    self,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    ends: Sequence[str],
    first: int = 0,
  ) -> list[tuple[str, str]]:
    """Returns each answer of a conversation after the text before it.

    All of these texts, one after the other, are the conversation up to its last
    answer: as it is written at once, and turn by turn.

    Args:
      ends: control tokens that end an answer; `end_of_turn()` comes first, and
        some templates write another behind calls.
      first: answers of earlier messages belong to the text before.

    Raises:
      Rewritten: names the message: an earlier answer.
      ValueError: as `render`, or the last answer is not written as it would be
        sampled.
    """
    whole = self.render(messages, tools, prompt=False)
    found: list[tuple[str, str]] = []
    start = previous = 0
    for i, message in enumerate(messages):
      if message.role != "assistant" or i < first:
        continue
      # The last answer is already as an example of its own has it.
      error, out = Rewritten, ""
      if i == len(messages) - 1:
        error, out = ValueError, "; use another template, or another answer"
      asked = self.render(messages[:i], tools, prompt=True)
      if found:
        between = self.after_answer(messages[previous + 1 : i], prompt=True)
        asked = whole[:start] + between.removeprefix(ends[0])
      if not whole.startswith(asked):
        raise error(
          f"message {i}: the chat template writes what is before this answer "
          f"otherwise when the answer is there than when it is asked for{out}"
        )
      stops = self._controls.finditer(whole, len(asked))
      stop = next((m.end() for m in stops if m[0] in ends), len(whole))
      answer = whole[len(asked) : stop]
      left_out = _left_out(message, answer)
      if left_out:  # But for what the prompt has of it, as <think>.
        left_out = _left_out(message, self.prompt() + answer)
      if left_out:
        raise error(
          f"message {i}: the chat template leaves {left_out[:40]!r} out of "
          f"this answer{out}"
        )
      found.append((asked[start:], answer))
      start, previous = stop, i
    return found

  def prompt(self) -> str:
    """Returns the text that prompts for an answer, with marks."""
    prompted = self.render([_QUESTION], prompt=True)
    return prompted.removeprefix(self.render([_QUESTION], prompt=False))

  def end_of_turn(self) -> str:
    """Returns the control token that ends an answer.

    Raises:
      ValueError: it does not exist, or the template is not append-only: the
        text after an answer depends on more than the messages after it.
    """
    answer = _Sample("assistant", _ANSWER)
    question = self.render([_QUESTION], prompt=False)
    answered = self.render([_QUESTION, answer], prompt=False)
    _check_kept(question, answered, "an answer")
    if answered.count(_ANSWER) != 1:
      raise ValueError(
        "the chat template does not only append: it writes an answer "
        f"{answered.count(_ANSWER)} times"
      )
    self._check_appends(_Sample("user", "2"))
    rest = self.after_answer([], prompt=False)
    end = self._controls.match(rest)
    if end is None:
      raise ValueError(
        f"the chat template ends an answer with {rest[:40]!r}, which must be a "
        "special token; otherwise no sampled token ends the answer"
      )
    return end[0]

  def check_results(self) -> None:
    """Checks that the template is append-only after results of tools, too.

    Raises:
      ValueError: as `end_of_turn`.
    """
    if self._results_fault:
      raise ValueError(f"after the result of a tool {self._results_fault}")

  @functools.cached_property
  def _results_fault(self) -> str:
    if "tool" not in self.source:
      return ""
    try:
      self._check_appends(_Sample("tool", "2"))
    except ValueError as error:
      return str(error)
    return ""

  def _check_appends(self, new: ChatMessage) -> None:
    """Checks that only `new` decides the text after an answer."""
    rest = self.after_answer([new], prompt=False)
    _check_kept(self.after_answer([], prompt=False), rest, "a message")
    prompted = self.after_answer([new], prompt=True)
    _check_kept(rest, prompted, "the prompt for an answer")
    if rest == prompted:
      raise ValueError("the chat template has no prompt for an answer")
    later = [new, _Sample("assistant", "3"), _QUESTION]
    _check_kept(rest, self.after_answer(later, prompt=False), "later messages")
    earlier = [_QUESTION, _Sample("assistant", "3"), _QUESTION]
    _check_kept(rest, self._after(earlier, [new]), "earlier messages")
    if self.knows("tools"):
      _check_kept(rest, self._after([_QUESTION], [new], (TOOL,)), "tools")

  def _after(
    self,
    before: Sequence[ChatMessage],
    messages: Iterable[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    prompt: bool = False,
  ) -> str:
    conversation = [*before, _Sample("assistant", _ANSWER), *messages]
    return self.render(conversation, tools, prompt=prompt).partition(_ANSWER)[2]

  def calling(self, call: Any) -> str:
    """Returns the text of an answer that calls a tool, with marks.

    Raises:
      ValueError: the template rejects it.
    """
    answer = _Sample("assistant", "", (call,))
    asked = self.render([_QUESTION], (TOOL,), prompt=False)
    whole = self.render([_QUESTION, answer], (TOOL,), prompt=False)
    return whole.removeprefix(asked)

  def split(self, text: str) -> list[str]:
    """Returns texts without marks; every second one is a control token."""
    pieces = self._controls.split(text)
    pieces[::2] = [piece.replace(MARK, "") for piece in pieces[::2]]
    return pieces

  def knows(self, variable: str) -> bool:
    """Returns whether the template reads a variable."""
    return variable in _undeclared(self.source)

  def _guard(self, value: Any) -> Any:
    """Returns a JSON value with marks in all its strings."""
    if isinstance(value, str):
      return self._guard_text(value)
    if isinstance(value, Mapping):
      return {self._guard(k): self._guard(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
      return [self._guard(item) for item in value]
    return value

  def _guard_text(self, text: str) -> str:
    if MARK in text:
      raise ValueError(
        f"a message holds U+{ord(MARK):04X} at {text.index(MARK)}, which "
        "Unicode reserves; remove it"
      )
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
        f"a message holds half a surrogate pair at {error.start}; remove it"
      ) from error
    return self._spelled.sub(rf"{MARK}\g<0>", text)

  @functools.cached_property
  def _spelled(self) -> re.Pattern[str]:
    """The first character of a control token that a text spells."""
    rests = _by_first(self.control)
    ways = [f"{re.escape(one)}(?={_rest(rests[one])})" for one in rests]
    return re.compile("|".join(ways))

  @functools.cached_property
  def _controls(self) -> re.Pattern[str]:
    longest_first = sorted(self.control, key=len, reverse=True)
    tokens = "|".join(re.escape(token) for token in longest_first)
    return re.compile(f"(?<!{MARK})({tokens})")


def _left_out(message: ChatMessage, answer: str) -> str:
  """Returns a text of a message that its written answer lacks; "" if none."""
  said = [message.content, getattr(message, "reasoning", None)]
  said += [call.name for call in getattr(message, "tool_calls", None) or ()]
  # Templates change the white space around thinking, content and calls.
  written = "".join(answer.replace(MARK, "").split())
  lacking = (x for x in filter(None, said) if "".join(x.split()) not in written)
  return next(lacking, "")


def _by_first(tokens: Iterable[str]) -> dict[str, list[str]]:
  """Returns the rests of tokens by their first character."""
  rests: dict[str, list[str]] = {}
  for token in sorted(tokens):
    rests.setdefault(token[0], []).append(token[1:])
  return rests


def _rest(rests: Sequence[str]) -> str:
  """Returns a pattern of any of the rests, and of what may become one.

  That is a beginning at the end of the text, which the template could complete.
  """
  if "" in rests:
    return ""
  ways = [
    re.escape(one) + _rest(more) for one, more in _by_first(rests).items()
  ]
  return rf"(?:{'|'.join(ways)}|\Z)"


def _as_dict(message: ChatMessage) -> dict[str, Any]:
  """Returns a message in the form that templates expect."""
  if message.role not in ROLES:
    raise ValueError(f"role {message.role!r} is not one of {', '.join(ROLES)}")
  content = "" if message.content is None else message.content
  if not isinstance(content, str):
    raise ValueError(
      f"content of type {type(content).__name__}; only text has an encoding"
    )
  data: dict[str, Any] = {"role": message.role, "content": content}
  for ours, theirs in (
    ("name", "name"),
    ("tool_call_id", "tool_call_id"),
    ("reasoning", "reasoning_content"),
  ):
    value = getattr(message, ours, None)
    if value is not None:
      data[theirs] = value
  calls = getattr(message, "tool_calls", None)
  if calls:
    data["tool_calls"] = [_call_as_dict(call) for call in calls]
  return data


def _call_as_dict(call: Any) -> dict[str, Any]:
  try:
    # Templates serialise objects; JSON text would be quoted as a string.
    arguments = json.loads(call.arguments)
  except (ValueError, TypeError, RecursionError):
    arguments = call.arguments
  function = {"name": call.name, "arguments": arguments}
  name = getattr(call, "id", None)
  named = {} if name is None else {"id": name}
  return {**named, "type": "function", "function": function}


def _check_kept(before: str, after: str, added: str) -> None:
  """Raises ValueError unless `after` starts with `before`."""
  if after.startswith(before):
    return
  pairs = enumerate(zip(before, after, strict=False))
  first = next((i for i, (a, b) in pairs if a != b), len(after))
  raise ValueError(
    f"the chat template does not only append: with {added} it writes "
    f"{after[first : first + 40]!r} instead of {before[first : first + 40]!r}; "
    "ids that were sampled cannot be rewritten, so use another template"
  )


class _Generation(ext.Extension):
  """Accepts {% generation %} blocks, which mark answers, and renders them."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: parser.Parser) -> list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
  raise jinja2.TemplateError(str(message)[:1000])


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  bounded_jinja.measure(value, indent)
  # Jinja's own filter escapes HTML.
  text = json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
  # split() does not recognise an escaped mark.
  return _ESCAPED_MARK.sub(rf"\1{MARK}", text) if ensure_ascii else text


def _strftime_now(form: str) -> str:
  if len(form) > _MAX_FORM or re.search(r"\d", form):
    raise jinja2.TemplateError(
      f"the form of a time has {len(form):,} characters, or a width; use "
      f"{_MAX_FORM} or fewer, without"
    )
  return datetime.datetime.now().strftime(form)


@functools.cache
def _environment() -> bounded_jinja.BoundedSandbox:
  environment = bounded_jinja.BoundedSandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[ext.loopcontrols, _Generation],
  )
  environment.filters["tojson"] = bounded_jinja.paying(_tojson)
  environment.globals["raise_exception"] = _refuse
  environment.globals["strftime_now"] = _strftime_now
  return environment


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
  with bounded_jinja.budget():
    return _environment().from_string(source)


@functools.lru_cache(maxsize=16)
def _undeclared(source: str) -> frozenset[str]:
  found = meta.find_undeclared_variables(_environment().parse(source))
  return frozenset(found)
