"""Parses the text of an answer into reasoning, content and tool calls.

  <think> reasoning </think> content <tool_call> {"name": ...} </tool_call>

This is the format of Hermes; `call_formats` has others. Text that does not
match the model's is content: sampled text never raises an error.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat import call_formats

_THINK, _THINK_END = "<think>", "</think>"


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


def parse(
  text: str,
  *,
  thinking: bool = False,
  call_format: call_formats.CallFormat = call_formats.HERMES,
  tools: Sequence[Mapping[str, Any]] = (),
) -> Answer:
  """Parses an answer; accepts any text.

  A block that is not closed, or not a call with name and arguments, stays in
  the content, tags included. Thinking that is not closed was cut off: the
  rest is reasoning without calls.

  Args:
    thinking: the prompt has opened the thinking already.
    tools: functions that the prompt shows, as in the OpenAI API.
  """
  reasoning, text = _split_thinking(text, thinking)
  calls, pieces, start = [], [], 0
  for opening in call_format.opening.finditer(text):
    if opening.start() < start:  # Inside the call before.
      continue
    found = call_format.read(text, opening.start(), tools)
    read = [_checked(*call) for call in found.calls] if found else []
    if not (found and read and all(read)):
      continue
    pieces.append(text[start : opening.start()])
    calls += read
    start = found.end
  pieces.append(text[start:])
  content = "".join(pieces)
  return Answer(content.strip() if calls else content, tuple(calls), reasoning)


def as_openai(call: Call) -> dict[str, Any]:
  """Returns a call as a message of OpenAI's API has it."""
  function = {"name": call.name, "arguments": call.arguments}
  return {"id": call.id, "type": "function", "function": function}


def write(
  answer: Answer, call_format: call_formats.CallFormat = call_formats.HERMES
) -> str:
  """Returns the text of an answer: the inverse of `parse`.

  Raises:
    ValueError: the arguments of a call are not the JSON text of an object.
  """
  thought = f"<think>\n{answer.reasoning}\n</think>\n\n"
  pieces = [thought if answer.reasoning else "", answer.content]
  gap = ("\n" if answer.content else "") + call_format.first
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
    pieces += [gap, call_format.write(call.name, arguments)]
    gap = call_format.gap
  return "".join([*pieces, call_format.last if answer.tool_calls else ""])


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


def _checked(name: Any, arguments: Any) -> Call | None:
  """Returns a call, if it has a name and an object that JSON can express."""
  if not (name and isinstance(name, str) and isinstance(arguments, dict)):
    return None
  try:
    # Python parses NaN and 1e999, which JSON does not have.
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # JSON can escape half a surrogate pair, which UTF-8 cannot encode.
    (name + encoded).encode()
  except (ValueError, RecursionError):
    return None
  return Call(name, encoded)
