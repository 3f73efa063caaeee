"""Messages of tests and of the golden conversations."""

import dataclasses
import json
import pathlib
from typing import Any

from models.chat import hf_chat
from models.chat.tool_calls import Call
from models.hf import config

GOLDEN = config.TINY
_ROOT = pathlib.Path(__file__).parents[1] / "models/golden/chat"
EXPECTED = json.loads((_ROOT / "expected.json").read_text("utf-8"))
CASES: dict[str, dict[str, Any]] = EXPECTED["conversations"]
FORMS: dict[str, dict[str, dict[str, Any]]] = EXPECTED["forms"]
"""Conversations whose template, `FORM.jinja`, writes calls otherwise."""
GEMMA = _ROOT / "gemma"
GEMMA_CASES: dict[str, dict[str, Any]] = EXPECTED["gemma"]
"""Conversations of the tokenizer in `GEMMA`."""


@dataclasses.dataclass(frozen=True)
class GoldenMessage:
  """A message with every optional field."""

  role: str
  content: str | None
  tool_calls: tuple[Call, ...] = ()
  reasoning: str | None = None


def chat_of_form(name: str) -> hf_chat.HfChat:
  """Returns the chat of GOLDEN with one of the templates of `FORMS`."""
  chat = hf_chat.HfChat.load(GOLDEN)
  source = (_ROOT / f"{name}.jinja").read_text("utf-8")
  template = dataclasses.replace(chat.template, source=source)
  return dataclasses.replace(chat, template=template)


def messages_of(case: dict[str, Any]) -> list[GoldenMessage]:
  """Returns the messages that transformers encoded."""
  return [
    GoldenMessage(
      data["role"],
      data["content"],
      tuple(
        Call(
          call["function"]["name"],
          # Other white space: templates serialise the value anew.
          json.dumps(call["function"]["arguments"], separators=(",", ":")),
        )
        for call in data.get("tool_calls", ())
      ),
      data.get("reasoning_content"),
    )
    for data in case["messages"]
  ]
