"""Constraints over 24 ids, each a character of JSON; id 0 ends an answer."""

import json
from typing import Any

from models.chat import answer_grammar, call_formats

LETTERS = '{}":,[]0123-.etrufalsnx'
SCHEMAS = (
  {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
  {"enum": ["alx", "tar", None]},
  {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 33}},
    "required": ["a"],
    "additionalProperties": False,
  },
)


class Letters:
  """The vocabulary; see `answer_grammar.Vocabulary`."""

  stop_ids = (0,)
  thinking: answer_grammar.Thinking = "none"
  call_format: call_formats.CallFormat = call_formats.HERMES

  def text_ids(self, text: str) -> list[int]:
    return [1 + LETTERS.index(letter) for letter in text]

  def pieces(self) -> list[bytes]:
    return [b"", *(letter.encode() for letter in LETTERS)]


_LETTERS = Letters()


def constraint(schema: Any) -> Any:
  """Returns a matcher of the JSON that satisfies a schema."""
  content = answer_grammar.Schema(text=json.dumps(schema), name="the schema")
  grammar = answer_grammar.AnswerGrammar(content=content)
  return answer_grammar.compiled(_LETTERS, grammar, 24)


def value(tokens: Any) -> Any:
  """Returns the JSON value of an answer that came to its end."""
  *letters, end = map(int, tokens)
  assert end == 0
  return json.loads("".join(LETTERS[i - 1] for i in letters))
