"""Parses the text of an answer into reasoning, content and tool calls.

  <think> reasoning </think> content <tool_call> {"name": ...} </tool_call>

This is the format of Hermes, on which Qwen3 was trained. Text that does not
match it is content: sampled text never raises an error.
"""

import dataclasses
import json
import re
from typing import Any

_THINK, _THINK_END = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>\s*")
_DECODER = json.JSONDecoder()
_CALL_END = re.compile(r"\s*</tool_call>")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
  """One call of a tool.

  Attributes:
    arguments: JSON text of an object, without NaN or infinity.
    id: unique within a conversation; None in sampled text.
  """

  name: str
  arguments: str
  id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
  """A parsed answer.

  Attributes:
    content: the text apart from reasoning and calls; byte for byte the whole
      text if it has neither.
    reasoning: the text between the thinking tags.
  """

  content: str
  tool_calls: tuple[Call, ...] = ()
  reasoning: str = ""


def parse(text: str, *, thinking: bool = False) -> Answer:
  """Parses an answer; accepts any text.

  A block that is not closed, or not an object with name and arguments, stays
  in the content, tags included. Thinking that is not closed was cut off: the
  rest is reasoning without calls.

  Args:
    thinking: the prompt has opened the thinking already.
  """
  reasoning, text = _split_thinking(text, thinking)
  calls, pieces, start = [], [], 0
  # A tag inside a string of a call cannot open one: its quotes are escaped.
  for tag in _CALL.finditer(text):
    found = _call_at(text, tag.end())
    if found is None:
      continue
    pieces.append(text[start : tag.start()])
    calls.append(found[0])
    start = found[1]
  pieces.append(text[start:])
  content = "".join(pieces)
  return Answer(content.strip() if calls else content, tuple(calls), reasoning)


def as_openai(call: Call) -> dict[str, Any]:
  """Returns a call as a message of OpenAI's API has it."""
  function = {"name": call.name, "arguments": call.arguments}
  return {"id": call.id, "type": "function", "function": function}


def write(answer: Answer) -> str:
  """Returns the text of an answer: the inverse of `parse`.

  Raises:
    ValueError: the arguments of a call are not the JSON text of an object.
  """
  thought = f"<think>\n{answer.reasoning}\n</think>\n\n"
  pieces = [thought] if answer.reasoning else []
  pieces += [answer.content] if answer.content else []
  for call in answer.tool_calls:
    try:
      arguments = json.loads(call.arguments)
    except ValueError:
      arguments = None
    if not isinstance(arguments, dict):
      raise ValueError(
        f"arguments of {call.name} must be the JSON text of an object, and not "
        f"{call.arguments!r}"
      )
    data = json.dumps(
      {"name": call.name, "arguments": arguments}, ensure_ascii=False
    )
    gap = "\n" if pieces and pieces[-1] != thought else ""
    pieces.append(f"{gap}<tool_call>\n{data}\n</tool_call>")
  return "".join(pieces)


def after_prompt(text: str, *, thinking: bool) -> str:
  """Returns a written answer as it follows a prompt.

  Args:
    thinking: the prompt has opened the thinking, which the answer closes, also
      where it has none.
  """
  if not thinking:
    return text
  reasoning, rest = _split_thinking(text, False)
  return f"{reasoning}\n{_THINK_END}\n\n{rest}"


def _split_thinking(text: str, thinking: bool) -> tuple[str, str]:
  """Returns (reasoning, the text after it)."""
  opened = text.lstrip()
  if opened.startswith(_THINK):
    text, thinking = opened[len(_THINK) :], True
  if not thinking:
    return "", text
  reasoning, _, rest = text.partition(_THINK_END)
  return reasoning.strip("\n"), rest.lstrip("\n")


def _call_at(text: str, start: int) -> tuple[Call, int] | None:
  """Returns the call whose JSON starts at `start`, and the end of its block."""
  try:
    data, end = _DECODER.raw_decode(text, start)
    closed = _CALL_END.match(text, end)
    if closed is None or not isinstance(data, dict):
      return None
    name, arguments = data["name"], data["arguments"]
    if not (name and isinstance(name, str) and isinstance(arguments, dict)):
      return None
    # Python parses NaN and 1e999, which JSON does not have.
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # JSON can escape half a surrogate pair, which UTF-8 cannot encode.
    (name + encoded).encode()
  except (ValueError, KeyError, RecursionError):
    return None
  return Call(name, encoded), closed.end()
