"""The forms in which models write calls of tools.

  HERMES      <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
  LLAMA       {"name": "f", "parameters": {"x": 1}}
  QWEN_CODER  <tool_call> <function=f> <parameter=x> 1 </parameter> </function>
              </tool_call>
  OLMO        <function_calls>f(x=1) g(y="a")</function_calls>

The first is that of Qwen2.5 and Qwen3, the second of Llama 3.1 to 3.3, whose
<|python_tag|> is a special token and so not in the text, the third of
Qwen3-Coder and Qwen3.5, and the last of OLMo 3, with a call a line. A chat
template that writes a call tells its form.

Source: the chat templates of these models.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_ONE_SPACE = {
  "whitespace_flexible": False,
  "item_separator": ", ",
  "key_separator": ": ",
}
# Without a bound a small model may go on with white space for ever.
SOME_SPACE = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}

_FUNCTION = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
# A value may hold the tag that ends it, but not before another tag. A search
# of its own is fast: sampled text may open calls again and again.
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>\s*</tool_call>")
_CALLED = re.compile(r"\s*([^\s(<]+)\(\s*")
_KEYWORD = re.compile(r"(?:,\s*)?([^\s=(),<]+)\s*=\s*")
_CALL_END = re.compile(r"\s*\)\s*")
_WORD = re.compile("True|False|None")
# Types of JSON schemas by the value's; text in quotes is no value of its own.
_TYPES: dict[type, set[str]] = {
  bool: {"boolean"},
  int: {"integer", "number"},
  float: {"number"},
  type(None): {"null"},
  dict: {"object"},
  list: {"array"},
  str: set(),
}
# As templates write them that do not write JSON.
_WORDS = {"True": True, "False": False, "None": None}
_NOTES = {"title", "description", "default", "examples", "$schema"}
# Their values are no schemas.
_VALUES = {"const", "enum", "default", "examples"}
_NEGATED = re.compile(r"((?<!\\)(?:\\\\)*)\[\^")
_ANY_TEXT = {"type", "anyOf", "$defs", "definitions", *_NOTES}
_ARGUMENTS = {"type", "properties", "required", "additionalProperties"}
_ARGUMENTS |= {"$defs", "definitions", *_NOTES}
# Where any of them may come first, each needs a rule for all that follow.
_MAX_OPTIONAL = 32


class FoundCalls(NamedTuple):
  """Names and arguments of calls in a text, and the place where they end."""

  calls: Sequence[tuple[Any, Any]]
  end: int


def _tag(text: str) -> re.Pattern[str]:
  """Returns a pattern of a tag, or of its beginning where the text ends."""
  cut = [rf"{text[:length]}\Z" for length in range(len(text) - 1, 0, -1)]
  return re.compile("|".join([text, *cut]))


@dataclasses.dataclass(frozen=True)
class JsonCalls:
  """Calls that are a JSON object.

  Attributes:
    opens, closes: tags around the object. An object without is a call only
      where tools are shown, and may have a semicolon behind it.
    key: of the arguments.
    opening: pattern of what may open a call, or of its beginning where the text
      ends.
    reserved: regular expression of a grammar: text without it has no call.
    gap: text between two calls.
    first, last: text around all calls that follow each other.
    rules: of a grammar, to which `rule` refers.
  """

  opens: str
  closes: str
  key: str
  opening: re.Pattern[str]
  reserved: str
  gap: str
  rules: tuple[str, ...] = ()
  first: str = ""
  last: str = ""

  @property
  def closing(self) -> str:
    """Text that a call ends with."""
    return self.closes or "}"

  @property
  def begin(self) -> str:
    """Text that a call that is written begins with, up to its name."""
    return f"{self.opens}\n" if self.opens else '{"'

  def read(
    self, text: str, start: int, tools: Sequence[Mapping[str, Any]]
  ) -> FoundCalls | None:
    """Returns the calls that are opened at `start`, unchecked, if any are.

    Args:
      tools: functions that may be called, as in the OpenAI API.
    """
    if not (self.opens or tools):
      return None
    try:
      data, end = _DECODER.raw_decode(
        text, _after_space(text, start + len(self.opens))
      )
      found = FoundCalls([(data["name"], data[self.key])], end)
    except (ValueError, KeyError, TypeError, RecursionError):
      return None
    close, last = self.closes or ";", _after_space(text, end)
    if text.startswith(close, last):
      return found._replace(end=last + len(close))
    return None if self.closes else found

  def write(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the text of a call."""
    return f"{self._start(name)}{_json(arguments)}{self._end}"

  def rule(self, name: str, schema: Any) -> str:
    """Returns what follows `begin`, in llguidance's variant of Lark.

    Args:
      schema: of the arguments.
    """
    start = _json(self._start(name).removeprefix(self.begin))
    return f"{start} {json_rule(schema, _ONE_SPACE)} {_json(self._end)}"

  def _start(self, name: str) -> str:
    opens = f"{self.opens}\n" if self.opens else ""
    return f'{opens}{{"name": {_json(name)}, "{self.key}": '

  @property
  def _end(self) -> str:
    return f"}}\n{self.closes}" if self.closes else "}"


@dataclasses.dataclass(frozen=True)
class TaggedCalls:
  """Calls with a tag for each argument; attributes as in `JsonCalls`.

  A value is text, and JSON where its schema has another type.
  """

  opening: re.Pattern[str] = _tag("<tool_call>")
  closing: str = "</tool_call>"
  gap: str = "\n"
  begin: str = "<tool_call>\n<function="
  reserved: str = "<tool_call>"
  first: str = ""
  last: str = ""
  rules: tuple[str, ...] = (
    r"value[lazy]: /(?s:.*)\n<\/parameter>\n/",
    r'parameter: "<parameter=" /[^>\n]+/ ">\n" value',
  )

  def read(
    self, text: str, start: int, tools: Sequence[Mapping[str, Any]]
  ) -> FoundCalls | None:
    """See `JsonCalls`."""
    function = _FUNCTION.match(text, start)
    if function is None:
      return None
    schemas = _properties(function[1], tools)
    arguments, end = {}, function.end()
    while (found := _PARAMETER.match(text, end)) and (
      closed := _PARAMETER_END.search(text, found.end())
    ):
      value = text[found.end() : closed.start()].removesuffix("\n")
      arguments[found[1]] = _typed(value, schemas.get(found[1]))
      end = closed.end()
    closed = _FUNCTION_END.match(text, end)
    return closed and FoundCalls([(function[1], arguments)], closed.end())

  def write(self, name: str, arguments: Mapping[str, Any]) -> str:
    """See `JsonCalls`."""
    pieces = [f"{self.begin}{name}>\n"]
    for key, value in arguments.items():
      text = value if isinstance(value, str) else _json(value)
      pieces.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return "".join([*pieces, "</function>\n</tool_call>"])

  def rule(self, name: str, schema: Any) -> str:
    """See `JsonCalls`.

    Raises:
      ValueError: it names a keyword that text with tags cannot follow.
    """
    parameters, known = ["parameter*"], _parameters(schema)
    if known is not None:
      parameters = []
      for key, one, is_required in known:
        start = _json(f"<parameter={key}>\n")
        text = f"{start} {_value_rule(one)}"
        parameters.append(text if is_required else f"({text})?")
    end = _json("</function>\n</tool_call>")
    return " ".join([_json(f"{name}>\n"), *parameters, end])


@dataclasses.dataclass(frozen=True)
class PythonCalls:
  """Calls as Python has them, with values in JSON; attributes as above."""

  first: str = "<function_calls>"
  last: str = "</function_calls>"
  opening: re.Pattern[str] = _tag("<function_calls>")
  closing: str = "</function_calls>"
  gap: str = "\n"
  begin: str = ""
  reserved: str = "<function_calls>"
  rules: tuple[str, ...] = (
    r'keyword: /[A-Za-z_][A-Za-z0-9_-]{0,63}/ "=" %json {}',
  )

  def read(
    self, text: str, start: int, tools: Sequence[Mapping[str, Any]]
  ) -> FoundCalls | None:
    """See `JsonCalls`."""
    calls, end = [], start + len(self.first)
    while called := _CALLED.match(text, end):
      arguments, end = {}, called.end()
      while keyword := _KEYWORD.match(text, end):
        try:
          arguments[keyword[1]], end = _python_value(text, keyword.end())
        except (ValueError, RecursionError):
          return None
      closed = _CALL_END.match(text, end)
      if closed is None:
        return None
      calls.append((called[1], arguments))
      end = closed.end()
    if not text.startswith(self.last, end):
      return None
    return FoundCalls(calls, end + len(self.last))

  def write(self, name: str, arguments: Mapping[str, Any]) -> str:
    """See `JsonCalls`."""
    keywords = [f"{key}={_json(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join(keywords)})"

  def rule(self, name: str, schema: Any) -> str:
    """See `TaggedCalls`."""
    keywords, known = '(keyword (", " keyword)*)?', _parameters(schema)
    if known is not None:
      keywords = _listed(
        [
          (f"{_json(f'{key}=')} {json_rule(one, _ONE_SPACE)}", is_required)
          for key, one, is_required in known
        ]
      )
    return f'{_json(f"{name}(")} {keywords} ")"'


CallFormat = JsonCalls | TaggedCalls | PythonCalls

HERMES = JsonCalls(
  opens="<tool_call>",
  closes="</tool_call>",
  key="arguments",
  opening=_tag("<tool_call>"),
  reserved="<tool_call>",
  gap="\n",
)
LLAMA = JsonCalls(
  opens="",
  closes="",
  key="parameters",
  opening=re.compile(r'\{\s*(?:"|\Z)'),
  reserved=r'\{[ \n\r\t]*"',
  gap="; ",
)
QWEN_CODER = TaggedCalls()
OLMO = PythonCalls()
FORMATS = (HERMES, LLAMA, QWEN_CODER, OLMO)


def of(chat: Any) -> CallFormat:
  """Returns the form in which a chat writes calls; HERMES if it has none."""
  return getattr(chat, "call_format", HERMES)


def json_rule(schema: Any, options: Mapping[str, Any]) -> str:
  """Returns the JSON that satisfies a schema, in llguidance's Lark."""
  if isinstance(schema, dict):
    schema = _exact_patterns(schema) | {"x-guidance": options}
  return f"%json {json.dumps(schema)}"


def _exact_patterns(schema: Any) -> Any:
  """Returns a schema whose patterns llguidance follows to the letter.

  In JSON, its class [^"] has the escapes of all control characters, and with
  them those of the quote and of the backslash. Without NUL it has not.
  """
  if isinstance(schema, list):
    return [_exact_patterns(one) for one in schema]
  if not isinstance(schema, dict):
    return schema
  exact = dict(schema)
  for key, value in schema.items():
    if key == "pattern" and isinstance(value, str):
      exact[key] = _without_nul(value)
    elif key == "patternProperties":
      named = _object(_exact_patterns(value)).items()
      exact[key] = {_without_nul(name): one for name, one in named}
    elif key not in _VALUES:
      exact[key] = _exact_patterns(value)
  return exact


def _without_nul(pattern: str) -> str:
  # As a range: a hyphen that follows is no beginning of one.
  return _NEGATED.sub(r"\1[^\\x00-\\x00", pattern)


def _parameters(schema: Any) -> list[tuple[str, Any, bool]] | None:
  """Returns (name, schema, is it required) of arguments; None if all may be.

  Raises:
    ValueError: it names a keyword that arguments one by one cannot follow.
  """
  _check_known(schema, _ARGUMENTS)
  properties = _object(schema.get("properties"))
  required = _list(schema.get("required"))
  _check_known(required, set(properties), "required")
  if not properties and schema.get("additionalProperties") is not False:
    return None
  defs = {x: schema[x] for x in ("$defs", "definitions") if x in schema}
  return [
    (key, {**_object(one), **defs}, key in required)
    for key, one in properties.items()
  ]


def _listed(items: Sequence[tuple[str, bool]]) -> str:
  """Returns a rule for items, each (rule, is it required), with commas."""

  def begun(place: int) -> str:
    more = [
      f'(", " {x}){"" if must else "?"}' for x, must in items[place + 1 :]
    ]
    return " ".join([items[place][0], *more])

  for place, (_, is_required) in enumerate(items):
    if is_required:
      before = [f'({text} ", ")?' for text, _ in items[:place]]
      return " ".join([*before, begun(place)])
  if len(items) > _MAX_OPTIONAL:
    raise ValueError(
      f"Unimplemented: over {_MAX_OPTIONAL} optional arguments, none required, "
      "in calls of this model"
    )
  return f"({' | '.join(map(begun, range(len(items))))})?" if items else ""


def _python_value(text: str, start: int) -> tuple[Any, int]:
  """Returns a value of JSON, or a word of Python, and the place of its end."""
  if word := _WORD.match(text, start):
    return _WORDS[word[0]], word.end()
  return _DECODER.raw_decode(text, start)


def _value_rule(schema: Any) -> str:
  """Returns the text of an argument up to its closing tag."""
  end, kinds = _json("\n</parameter>\n"), _kinds(schema)
  choices = _choices(schema)
  if kinds == {"string"} and choices:
    return f"({' | '.join(map(_json, choices))}) {end}"
  if kinds and "string" not in kinds:
    return f"{json_rule(schema, SOME_SPACE)} {end}"
  if kinds - {"string", "null"}:
    raise ValueError(
      f"type {' or '.join(sorted(kinds))} has no form of its own in calls of "
      "this model; use one of them"
    )
  _check_any_text(schema)
  return "value"


def _check_any_text(schema: Any) -> None:
  _check_known(schema, _ANY_TEXT)
  for part in _list(_object(schema).get("anyOf")):
    _check_any_text(part)


def _check_known(found: Any, known: set[str], what: str = "keys") -> None:
  """Raises ValueError for what calls of this form cannot be held to."""
  unknown = [x for x in _list(found) or _object(found) if x not in known]
  if unknown:
    raise ValueError(
      f"Unimplemented {what} in calls of this model: {json.dumps(unknown)}"
    )


def _properties(
  name: str, tools: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
  """Returns the schemas of a function's arguments; {} if it is not known."""
  for tool in tools:
    function = _object(tool.get("function"))
    if function.get("name") == name:
      return _object(_object(function.get("parameters")).get("properties"))
  return {}


def _typed(text: str, schema: Any) -> Any:
  """Returns the value that a text is under a schema."""
  kinds = _kinds(schema) or {"string", "object", "array"}
  word = text.strip()
  try:
    value = _WORDS[word] if word in _WORDS else json.loads(word)
  except (ValueError, RecursionError):
    return text
  fits = _TYPES[type(value)] & kinds
  return text if "string" in kinds and not fits else value


def _kinds(schema: Any) -> set[str]:
  """Returns the types that a schema names; none if it names none."""
  schema = _object(schema)
  named = _list(schema.get("type")) or [schema.get("type")]
  kinds = {kind for kind in named if isinstance(kind, str)}
  for part in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
    kinds |= _kinds(part)
  if not kinds:
    for choice in _choices(schema):
      kinds |= _TYPES[type(choice)] or {"string"}
  return kinds


def _choices(schema: Any) -> list[Any]:
  """Returns the values that a schema lists; [] if it lists none."""
  schema = _object(schema)
  return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _object(value: Any) -> Mapping[str, Any]:
  """Returns an object of JSON; {} for what is none, as in a broken schema."""
  return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
  return value if isinstance(value, list) else []


def _after_space(text: str, start: int) -> int:
  found = _SPACE.match(text, start)
  return found.end() if found else start


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)
