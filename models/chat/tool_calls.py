"""What an answer says, thinks and calls, read from its text.

  <think> reasoning </think> content <tool_call> {"name": ...} </tool_call>

The form is that of Hermes, which Qwen3 was trained on. What is not of this form
is content: sampled text has no errors.
"""

import dataclasses
import json
import re

_THINK, _THOUGHT = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>\s*")
_DECODER = json.JSONDecoder()
_CALLED = re.compile(r"\s*</tool_call>")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
  """One call of a tool.

  Attributes:
    arguments: JSON text of an object, without NaN or infinity.
    id: tells calls of one conversation apart; sampled text has none.
  """

  name: str
  arguments: str
  id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
  """An answer taken apart.

  Attributes:
    content: all that is neither; byte for byte the text where there is neither.
    reasoning: between the tags of thinking.
  """

  content: str
  tool_calls: tuple[ToolCall, ...] = ()
  reasoning: str = ""


def parse(text: str, *, thinking: bool = False) -> Answer:
  """Takes an answer apart; whatever the text is, this raises nothing.

  A block that is not closed, or does not hold an object of a name and
  arguments, stays in the content, tags included. Thinking that is not closed
  was cut off: all that follows is reasoning, and nothing in it is a call.

  Args:
    thinking: the prompt has opened the thinking already.
  """
  reasoning, text = _split_thinking(text, thinking)
  calls, said, start = [], [], 0
  # A tag within a string of a call opens none: quotes are escaped there.
  for opened in _CALL.finditer(text):
    found = _call_at(text, opened.end())
    if found is None:
      continue
    said.append(text[start : opened.start()])
    calls.append(found[0])
    start = found[1]
  said.append(text[start:])
  content = "".join(said)
  return Answer(content.strip() if calls else content, tuple(calls), reasoning)


def _split_thinking(text: str, thinking: bool) -> tuple[str, str]:
  """Returns what was thought, and the rest."""
  opened = text.lstrip()
  if opened.startswith(_THINK):
    text, thinking = opened[len(_THINK) :], True
  if not thinking:
    return "", text
  reasoning, _, rest = text.partition(_THOUGHT)
  return reasoning.strip("\n"), rest.lstrip("\n")


def _call_at(text: str, start: int) -> tuple[ToolCall, int] | None:
  """Returns the call whose JSON starts here, and where its block ends."""
  try:
    data, end = _DECODER.raw_decode(text, start)
    closed = _CALLED.match(text, end)
    if closed is None or not isinstance(data, dict):
      return None
    name, arguments = data["name"], data["arguments"]
    if not (name and isinstance(name, str) and isinstance(arguments, dict)):
      return None
    # Python reads NaN and 1e999, which are no JSON.
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Halves of surrogate pairs are escapes in JSON and no text at all here.
    (name + encoded).encode()
  except (ValueError, KeyError, RecursionError):
    return None
  return ToolCall(name, encoded), closed.end()
