"""Recorded conversations, for supervised training: rows of chats, and of pairs.

  {"messages": [{"role": "user", ..}, {"role": "assistant", ..}, ..],
   "tools": [..]}
  {"prompt": .., "completion": ..}
  {"prompt": .., "chosen": .., "rejected": ..}

Messages are as in the OpenAI API, with `tool_calls` and `reasoning_content`.
"""

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs import base
from envs import rows as rows_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recorded:
  """Rows of conversations.

  An episode asks for the last answer of a row, and the reward is 1 if it is
  the recorded one.

  Attributes:
    tools: the field with the tools of a conversation, where a row has any: JSON
      schemas as in the OpenAI API, or the JSON text of each or of all.
    system: begins a conversation that has no system message.
    name: the first part of every task id.
  """

  rows: rows_lib.Rows
  tools: str = "tools"
  system: str | None = None
  name: str = "chats"

  paired = False

  def __post_init__(self) -> None:
    base.check_name(self.name)

  def validate(self) -> None:
    """Raises ValueError on a file that cannot be read, or a row that lacks."""
    for record in self.rows.known():
      self.of_row(record)

  def examples(self, split: base.Split) -> Iterator[tuple[base.Recording, ...]]:
    """Yields the examples of every row of a split, in order."""
    for record in self.rows.records(split):
      yield from self.of_row(record)

  def of_row(
    self, record: rows_lib.Record
  ) -> Sequence[tuple[base.Recording, ...]]:
    """Returns the examples of a row.

    Raises:
      ValueError: it lacks a field, or holds no conversation.
    """
    raise NotImplementedError

  @property
  def words(self) -> Sequence[str]:
    """Every word of the conversations, for a model without a tokenizer."""
    found: dict[str, None] = {}
    for split in ("train", "eval"):
      for recording in (x for pair in self.examples(split) for x in pair):
        for message in recording.messages:
          found |= dict.fromkeys(message.content.split())
    return sorted(found)

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the number of its row."""
    return rows_lib.task(self.name, self.rows, None, index, split)

  def __call__(self, task: base.Task) -> "_LastAnswer":
    """Returns a fresh environment."""
    return _LastAnswer(self.recording(task))

  def recording(self, task: base.Task) -> base.Recording:
    """Returns the conversation of a task; the preferred one of a pair."""
    record = self.rows.record(task.seed, task.split)
    return self.of_row(record)[-1][0]

  def oracle(
    self, task: base.Task, messages: Sequence[base.Message]
  ) -> base.Message:
    """Returns the recorded answer."""
    return self.recording(task).messages[-1]

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> base.Message:
    """Returns the last answer of any row of its split."""
    index = random.Random(seed).randrange(2**31)
    return self.oracle(self.task(index, task.split), messages)

  def _tools(self, record: rows_lib.Record) -> Sequence[Mapping[str, Any]]:
    tools = _of_json(record.fields.get(self.tools)) or ()
    if not tools and record.fields.get("functions"):
      raise ValueError(
        f"{record.place}: field 'functions' is not read; use {self.tools!r}: "
        'a list of {"type": "function", "function": ..}'
      )
    if isinstance(tools, str) or not isinstance(tools, Sequence):
      tools = (None,)
    tools = [_of_json(tool) for tool in tools]
    for tool in tools:
      if not isinstance(tool, Mapping):
        raise ValueError(
          f"{record.place}: field {self.tools!r} must be a list of JSON "
          "schemas of functions, as in the OpenAI API"
        )
    return tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chats(_Recorded):
  """Conversations whose answers are trained.

  Attributes:
    messages: the field with the conversation, if `prompt` is None.
    prompt: the field with the conversation before `completion`, a text of the
      user or messages; answers in it are not trained.
    completion: then the field with the answer, a text or messages.
    each_answer: makes each answer an example of its own, after the conversation
      as the chat template shows it then. Needed where a template rewrites
      earlier turns, such as by dropping their thinking; it encodes a context
      once for each answer.
  """

  messages: str = "messages"
  prompt: str | None = None
  completion: str = "completion"
  each_answer: bool = False

  def of_row(
    self, record: rows_lib.Record
  ) -> Sequence[tuple[base.Recording, ...]]:
    """Returns one example, or one for each answer."""
    before, field, asked_by = [], self.messages, "messages"
    if self.prompt is not None:
      before = record.messages(self.prompt, "prompt")
      before = rows_lib.with_system(before, self.system)
      field, asked_by = self.completion, "completion"
    found = record.conversation(field, asked_by, before)
    found = rows_lib.with_system(found, self.system)
    tools, first = self._tools(record), len(before)
    if not self.each_answer:
      return [(base.Recording(record.place, found, tools, first),)]
    return [
      (base.Recording(record.place, found[: i + 1], tools, first=i),)
      for i, message in enumerate(found)
      if i >= first and message.role == "assistant"
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(_Recorded):
  """Pairs of answers to one prompt, of which one is preferred.

  Attributes:
    prompt: the field with the conversation before the answers: a text of the
      user, or messages. None where `chosen` and `rejected` are whole
      conversations, which begin alike.
    chosen, rejected: the fields with the answers, each a text or messages.
  """

  prompt: str | None = "prompt"
  chosen: str = "chosen"
  rejected: str = "rejected"
  name: str = "pairs"
  paired = True

  def of_row(
    self, record: rows_lib.Record
  ) -> Sequence[tuple[base.Recording, ...]]:
    """Returns the two conversations of a row, the preferred one first."""
    prompt: Sequence[base.Message] = ()
    if self.prompt is not None:
      prompt = record.messages(self.prompt, "prompt")
    pair = [
      rows_lib.with_system(
        record.conversation(field, field, prompt), self.system
      )
      for field in (self.chosen, self.rejected)
    ]
    both = enumerate(zip(*pair, strict=False))
    first = next((i for i, (a, b) in both if a != b), None)
    if not first:
      fault = "do not begin alike" if first == 0 else "do not differ"
      if first is None and len(pair[0]) != len(pair[1]):
        fault = "differ only in where they end"
      raise ValueError(
        f"{record.place}: fields {self.chosen!r} and {self.rejected!r} "
        f"{fault}; give two answers to one conversation"
      )
    tools = self._tools(record)
    return [
      tuple(base.Recording(record.place, x, tools, first=first) for x in pair)
    ]


def _of_json(value: Any) -> Any:
  """Returns the value of JSON text; anything else as it is."""
  try:
    return json.loads(value) if isinstance(value, str) else value
  except (ValueError, RecursionError):
    return value


class _LastAnswer:
  """Asks for the last answer of a conversation."""

  def __init__(self, recording: base.Recording):
    self._recording = recording
    self.tools = recording.tools

  async def start(self) -> Sequence[base.Message]:
    return self._recording.messages[:-1]

  async def step(self, answer: base.Message) -> base.Step:
    wanted = self._recording.messages[-1]
    # Thinking is no content of the answer that the chat has parsed.
    content = wanted.content.split("</think>", 1)[-1]
    is_same = answer.content.strip() == content.strip()
    calls = [
      [(call.name, call.arguments) for call in message.tool_calls]
      for message in (answer, wanted)
    ]
    return base.Step([], float(is_same and calls[0] == calls[1]), True)

  async def close(self) -> None:
    pass
