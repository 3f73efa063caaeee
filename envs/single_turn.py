"""Tasks of one answer: rows of data, and a function that grades answers."""

import dataclasses
import inspect
import re
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from envs import base, threads
from envs import rows as rows_lib

Grader = Callable[[str, Mapping[str, Any]], float | Awaitable[float]]
"""Returns the reward of an answer to a row; True counts 1, and False 0.

A coroutine, which may wait for a server, is awaited on the event loop.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleTurn:
  """One question a row, and one answer, which a function grades.

  The function gets the answer without its reasoning. It may block, and runs in
  a thread; or it is `async`, and runs beside all episodes. One that raises, or
  returns no finite number, is a fault of that trajectory and no reward.

  `tasks.pool` equal to the number of training rows makes each come once before
  any comes again.

  Attributes:
    grade: None leaves it to the reward of the run, which reads `answer`.
    prompt: the user's message, with the row's fields in braces, as {question}.
      Braces of the text itself are doubled.
    messages: instead of a prompt: the field that holds the conversation, a text
      or a list of {"role", "content"}.
    system: begins a conversation that has no system message.
    answer: the field with the final answer, for rewards that compare.
    solution: the field with a good answer as a whole, for a warm start. Its
      random answers are the solutions of other rows.
    name: the first part of every task id.
  """

  rows: rows_lib.Rows
  grade: Grader | None = None
  prompt: str | None = None
  messages: str | None = None
  system: str | None = None
  answer: str | None = None
  solution: str | None = None
  name: str = "single_turn"

  def __post_init__(self) -> None:
    if (self.prompt is None) == (self.messages is None):
      raise ValueError(
        f"prompt={self.prompt!r} with messages={self.messages!r}: give one of "
        "the two"
      )
    if self.grade is None and self.answer is None:
      raise ValueError(
        "grade=none with answer=none: nothing tells a good answer; give a "
        "function (answer, row) -> float, or the field with the final answer"
      )
    if self.grade is not None and (why := base.misfit(self.grade, "", {})):
      name = getattr(self.grade, "__qualname__", self.grade)
      raise ValueError(
        f"grade={name} is called with an answer and its row, by position: {why}"
      )
    if self.prompt is not None:
      _fields(self.prompt)
    base.check_name(self.name)

  def validate(self) -> None:
    """Raises ValueError on a file that cannot be read, or a row that lacks."""
    for record in self.rows.known():
      self.opening(record)
      record.answer(self.answer)
      if self.solution is not None:
        record.text(self.solution, "solution")

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the number of its row."""
    return rows_lib.task(self.name, self.rows, self.answer, index, split)

  def __call__(self, task: base.Task) -> "_Question":
    """Returns a fresh environment."""
    return _Question(self, self.rows.record(task.seed, task.split))

  def opening(self, record: rows_lib.Record) -> Sequence[base.Message]:
    """Returns the messages that ask for an answer to a row.

    Raises:
      ValueError: the row lacks a field, or the prompt does not fit it.
    """
    if self.prompt is None:
      found = record.messages(str(self.messages), "messages")
    else:
      for name in _fields(self.prompt):
        record.field(name, "prompt")
      try:
        text = self.prompt.format_map(record.fields)
      except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
          f"{record.place}: prompt={self.prompt!r} does not fit it: {error}; a "
          "field within a field is {name[field]}"
        ) from error
      found = [base.Message("user", text)]
    return rows_lib.with_system(found, self.system)

  def check_demonstrations(self) -> None:
    """Raises ValueError without a field `solution`."""
    if self.solution is None:
      raise ValueError(
        f"environment {self.name} has no demonstrations: name the field with a "
        "good answer by solution=NAME, or use warm_start=none"
      )

  def oracle(
    self, task: base.Task, messages: Sequence[base.Message]
  ) -> str | base.Message:
    """Returns the solution in the task's row."""
    self.check_demonstrations()
    record = self.rows.record(task.seed, task.split)
    return record.text(str(self.solution), "solution")

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str | base.Message:
    """Returns the solution of a row that follows from the seed."""
    return self.oracle(self.task(seed, "train"), messages)


class _Question:
  def __init__(self, source: SingleTurn, record: rows_lib.Record):
    self._source = source
    self._record = record

  async def start(self) -> Sequence[base.Message]:
    return self._source.opening(self._record)

  async def step(self, answer: base.Message) -> base.Step:
    if self._source.grade is None:
      return base.Step([], 0.0, True)
    reward = await threads.call(
      self._source.grade, answer.content, self._record.fields
    )
    if inspect.isawaitable(reward):
      reward = await reward
    return base.Step([], reward, True)

  async def close(self) -> None:
    pass


def _fields(prompt: str) -> list[str]:
  """Returns the names of the fields in a prompt.

  Raises:
    ValueError: it has none, or is malformed.
  """
  out = "write a field of the row as {name}, and double other braces"
  try:
    parts = [part[1] for part in string.Formatter().parse(prompt)]
  except ValueError as error:
    raise ValueError(f"prompt={prompt!r}: {error}; {out}") from error
  names = [re.split(r"[.\[]", part)[0] for part in parts if part is not None]
  if not names or any(not name or name.isdigit() for name in names):
    raise ValueError(f"prompt={prompt!r} names no field, or a wrong one; {out}")
  return names
