"""Rows of data as tasks: from JSONL, Parquet or a grain source.

A file is read once, when it is first asked for, and each of its rows is
checked before a run. A grain source is read row by row.
"""

import copy
import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from envs import base, extras

Data = str | Callable[[], Any]
"""A file, or a function that returns a source."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """One row, and where it stands, for errors: "data.jsonl:17"."""

  place: str
  fields: Mapping[str, Any]

  def field(self, name: str, asked_by: str) -> Any:
    """Returns the value of a field, or of one within: reward_model.style.

    Raises:
      ValueError: it is missing, or null.
    """
    value: Any = self.fields
    for key in (name,) if name in self.fields else name.split("."):
      value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
      known = ", ".join(self.fields) or "none"
      found = "null in" if name in self.fields else "no"
      raise ValueError(
        f"{self.place}: {found} field {name!r}, which {asked_by} asks for; the "
        f"row's fields are {known}"
      )
    return value

  def answer(self, name: str | None) -> str | None:
    """Returns the text of the field with the final answer, if there is one.

    Lists and objects are written as JSON.
    """
    if name is None:
      return None
    value = self.field(name, "answer")
    if isinstance(value, list | dict):
      return json.dumps(value, default=str)
    return str(value)

  def text(self, name: str, asked_by: str) -> str:
    """Returns the text of a field, which holds one, or a number.

    Raises:
      ValueError: it is missing, or holds several values.
    """
    value = self.field(name, asked_by)
    if isinstance(value, Mapping | list | tuple):
      raise ValueError(
        f"{self.place}: field {name!r} is {type(value).__name__}, and "
        f"{asked_by} must be a text or a number; give it a field of its own"
      )
    return str(value)

  def messages(self, name: str, asked_by: str) -> list[base.Message]:
    """Returns a conversation that waits for an answer.

    The field holds the text of the user, or messages as in the OpenAI API.

    Raises:
      ValueError: it is missing, or no such conversation.
    """
    return self._read(name, asked_by, "user", _check_question)

  def conversation(
    self, name: str, asked_by: str, before: Sequence[base.Message] = ()
  ) -> list[base.Message]:
    """Returns a conversation that ends with an answer.

    The field holds the text of an answer, or messages as in the OpenAI API.

    Args:
      before: messages that those of the field follow.

    Raises:
      ValueError: the field is missing, or there is no such conversation.
    """
    return self._read(name, asked_by, "assistant", _check_turns, before)

  def _read(
    self,
    name: str,
    asked_by: str,
    role: base.Role,
    check: Callable[[Sequence[base.Message]], None],
    before: Sequence[base.Message] = (),
  ) -> list[base.Message]:
    value = self.field(name, asked_by)
    if isinstance(value, str):
      value = [{"role": role, "content": value}]
    try:
      found = _messages(value)
      if before:
        _check_answers(found)
      messages = [*before, *found]
      check(messages)
      if role == "assistant":
        _check_weights(value)
    except ValueError as error:
      raise ValueError(f"{self.place}: field {name!r}: {error}") from error
    return messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """Rows of a file or of a grain source, split for training and evaluation.

  Attributes:
    data: a file whose name ends in .jsonl or .parquet; or a function without
      arguments that returns an object with `__len__` and `__getitem__`, such as
      a data source of grain.
    eval_data: rows for evaluation alone; all others are for training then. No
      row of a file may be in both; `data` itself measures what is memorised.
    eval_every: without `eval_data`, about one row in so many is for evaluation,
      by a hash of the row, or of its number in a source.
    split_by: the field that is hashed. Rows that agree in it are in one split.
  """

  data: Data
  eval_data: Data | None = None
  eval_every: int = 10
  split_by: str | None = None

  def __post_init__(self) -> None:
    if self.eval_every < 2:
      raise ValueError(f"eval_every={self.eval_every} must be at least 2")
    for data in filter(None, (self.data, self.eval_data)):
      if not callable(data) and not str(data).endswith(tuple(_READERS)):
        raise ValueError(
          f"{data!s:.60} must end in {' or '.join(_READERS)}, or be a function "
          "that returns rows"
        )

  def __getstate__(self) -> dict[str, Any]:
    # Without the data: another process reads them itself.
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  def number(self, index: int, split: base.Split) -> int:
    """Returns the row of a task; after the last the first comes again.

    Raises:
      ValueError: a file cannot be read, or a split has no rows.
    """
    numbers = self._splits[split]
    return numbers[index % len(numbers)]

  def record(self, number: int, split: base.Split) -> Record:
    """Returns a row; what becomes of its values changes no other's."""
    return copy.deepcopy(self._records[split][number])

  def known(self) -> Iterator[Record]:
    """Yields every row of files, and of a source the first of each split.

    Raises:
      ValueError: a file cannot be read, a split has no rows, or two files have
        a row in common.
    """
    self._check_apart()
    for split, numbers in self._splits.items():
      whole = isinstance(self._records[split], list)
      for number in numbers if whole else numbers[:1]:
        yield self._records[split][number]

  def records(self, split: base.Split) -> Iterator[Record]:
    """Yields every row of a split once, in order.

    Raises:
      ValueError: as `known`.
    """
    for number in self._splits[split]:
      yield self._records[split][number]

  @functools.cached_property
  def _records(self) -> dict[base.Split, "list[Record] | _Lazy"]:
    train = _read(self.data)
    return {
      "train": train,
      "eval": train if self.eval_data is None else _read(self.eval_data),
    }

  @functools.cached_property
  def _splits(self) -> dict[base.Split, list[int]]:
    """The numbers of the rows of each split."""
    records = self._records
    found: dict[base.Split, list[int]] = {"train": [], "eval": []}
    if self.eval_data is not None:
      found = {name: [*range(len(rows))] for name, rows in records.items()}
    else:
      for number in range(len(records["train"])):
        found[base.split_of(self._key(number), self.eval_every)].append(number)
    for split, numbers in found.items():
      if not numbers:
        raise ValueError(self._empty(split))
    return found

  def _empty(self, split: base.Split) -> str:
    if not self._records[split]:
      held_out = split == "eval" and self.eval_data is not None
      return f"{_named(self.eval_data if held_out else self.data)} is empty"
    return (
      f"{_named(self.data)}: none of its {len(self._records['train'])} rows is "
      f"for {split} (eval_every={self.eval_every}); add rows, or eval_data, or "
      "change eval_every"
    )

  def _check_apart(self) -> None:
    """Checks that no row is for training and for evaluation."""
    held_out = self._records["eval"]
    if self.eval_data in (None, self.data) or isinstance(held_out, _Lazy):
      return
    trained = {*map(self._key, range(len(self._records["train"])))}
    keys = [self._key(n, "eval") for n in range(len(held_out))]
    both = [
      r.place for r, key in zip(held_out, keys, strict=True) if key in trained
    ]
    if both:
      raise ValueError(
        f"{both[0]} is in {_named(self.data)} too, as are {len(both)} of the "
        f"{len(keys)} rows of eval_data; leave them out of one of the two"
      )

  def _key(self, number: int, split: base.Split = "train") -> str:
    records = self._records[split]
    if self.split_by is not None:
      value = records[number].field(self.split_by, "split_by")
    else:
      value = records[number].fields if isinstance(records, list) else number
    return json.dumps(value, sort_keys=True, default=str)


def task(
  name: str,
  rows: Rows | None,
  answer: str | None,
  index: int,
  split: base.Split,
) -> base.Task:
  """Returns a task of a source; its seed is the number of its row.

  Args:
    rows: None: the seed follows from the task's place alone.
    answer: the field with the final answer, if there is one.
  """
  seed, found = zlib.crc32(f"{split}/{index}".encode()), None
  if rows is not None:
    seed = rows.number(index, split)
    found = rows.record(seed, split).answer(answer)
  return base.Task(f"{name}/{split}/{index}", index, split, seed, found)


class _Lazy:
  """Rows of a source, read when asked for."""

  def __init__(self, make: Callable[[], Any]):
    self._name = _named(make)
    self._source = _got(make, self._name)
    for method in ("__len__", "__getitem__"):
      if not hasattr(self._source, method):
        raise ValueError(
          f"{self._name} returned {type(self._source).__name__}, which has no "
          f"{method}; return a list, or a data source of grain"
        )
    if isinstance(self._source, Mapping):
      raise ValueError(
        f"{self._name} returned {type(self._source).__name__} of "
        f"{', '.join(map(str, self._source)):.60}; return one of its values"
      )
    module = type(self._source).__module__
    self._is_arrow = module.partition(".")[0] == "datasets"

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, number: int) -> Record:
    place = f"{self._name}[{number}]"
    row = _got(lambda: self._source[number], place)
    if not isinstance(row, Mapping):
      raise ValueError(
        f"{place} is {type(row).__name__}; a row must be a mapping from names "
        "to values"
      )
    return _of_arrow(place, row) if self._is_arrow else Record(place, row)


def _got(call: Callable[[], Any], place: str) -> Any:
  """Returns the result of user code; raises ValueError if that raises."""
  try:
    return call()
  except Exception as error:
    raise ValueError(f"{place} raised {base.reason(error)}") from error


def _named(data: Data | None) -> str:
  return getattr(data, "__qualname__", str(data))


def _read(data: Data) -> list[Record] | _Lazy:
  if callable(data):
    return _Lazy(data)
  try:
    return _READERS[pathlib.PurePath(data).suffix](data)
  except OSError as error:
    raise ValueError(f"{data} cannot be read: {error.strerror}") from error


def _read_jsonl(file: str) -> list[Record]:
  records = []
  with open(file, "rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      place = f"{file}:{number}"
      try:
        row = json.loads(line.decode("utf-8-sig"))
      except UnicodeDecodeError as error:
        raise ValueError(
          f"{place} is not UTF-8: its byte {error.start} is "
          f"{line[error.start]:#04x}; save the file as UTF-8"
        ) from error
      except (ValueError, RecursionError) as error:
        raise ValueError(
          f"{place} is not JSON: {error}; each line must be an object"
        ) from error
      if not isinstance(row, dict):
        raise ValueError(
          f"{place} is {type(row).__name__}; a row must be a JSON object"
        )
      records.append(Record(place, row))
  return records


def _read_parquet(file: str) -> list[Record]:
  extras.require("pyarrow", "parquet", file)
  import pyarrow
  from pyarrow import parquet

  try:
    with open(file, "rb") as opened:
      rows = parquet.read_table(opened).to_pylist()
  except pyarrow.ArrowException as error:
    raise ValueError(f"{file} is no Parquet file: {error}") from error
  return [_of_arrow(f"{file}: row {n}", row) for n, row in enumerate(rows, 1)]


def _of_arrow(place: str, row: Mapping[str, Any]) -> Record:
  """Returns a row without the members that its structs lack.

  All structs of a column have the same members, those that a row did not name
  as nulls: of a tool, say, the arguments of all other tools.
  """
  return Record(place, {name: _given(value) for name, value in row.items()})


def _given(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _given(v) for k, v in value.items() if v is not None}
  return [*map(_given, value)] if isinstance(value, list) else value


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


_FIELDS = {
  *("role", "content", "tool_calls", "reasoning_content", "reasoning"),
  *("name", "tool_call_id", "weight", "id", "annotations"),
}
_INSTEAD = {
  "function_call": "; use tool_calls",
  "thinking": "; use reasoning_content",
}


def _messages(value: Any) -> list[base.Message]:
  if not isinstance(value, Sequence) or not value:
    raise ValueError(f"{value!r:.60} is no list of messages")
  return [_message(item) for item in value]


def _message(item: Any) -> base.Message:
  said = item if isinstance(item, Mapping) else {}
  role: Any = said.get("role")
  calls = said.get("tool_calls") or ()
  content = said.get("content", "" if calls else None)
  content = "" if content is None and calls else content
  if isinstance(content, Sequence) and not isinstance(content, str):
    content = "".join(map(_part, content))
  is_role = isinstance(role, str) and role in base.OPENAI_ROLES
  if not is_role or not isinstance(content, str):
    raise ValueError(
      f"{item!r:.60} is no message: it needs a role, one of "
      f"{', '.join(base.OPENAI_ROLES)}, and a content that is text"
    )
  _check_fields(said)
  if calls and (role != "assistant" or not isinstance(calls, Sequence)):
    raise ValueError(
      f"{item!r:.60}: tool_calls must be a list, of a message of the assistant"
    )
  return base.Message(
    base.OPENAI_ROLES[role],
    content,
    tuple(_call(call) for call in calls),
    *(
      _text(said, names)
      for names in (
        ("reasoning_content", "reasoning"),
        ("name",),
        ("tool_call_id",),
      )
    ),
  )


def _check_fields(said: Mapping[str, Any]) -> None:
  """Checks that a message has nothing that would be left out."""
  for name, value in said.items():
    if name not in _FIELDS and value not in (None, "", [], {}):
      instead = _INSTEAD.get(name, "; leave it out if it has no effect")
      raise ValueError(
        f"{name}={value!r:.60} of a message is not read here{instead}"
      )


def _check_weights(value: Sequence[Mapping[str, Any]]) -> None:
  """Checks that all answers are to be trained alike."""
  for said in value:
    weight = said.get("weight")
    if said["role"] == "assistant" and weight not in (None, 1):
      raise ValueError(
        f"weight={weight!r:.60} of an answer: all are trained alike; give rows "
        "of a prompt and a completion, whose prompt is not trained"
      )


def _part(part: Any) -> str:
  """Returns the text of a part of a content."""
  if (text := base.part_text(part)) is None:
    raise ValueError(f"{part!r:.60} is no part of text, which all must be")
  return text


def _text(said: Mapping[str, Any], names: Sequence[str]) -> str | None:
  """Returns the first of some fields that is there."""
  for name in names:
    value = said.get(name)
    if value is not None and not isinstance(value, str):
      raise ValueError(f"{name}={value!r:.60} of a message must be text")
    if value:
      return value
  return None


def _call(call: Any) -> base.ToolCall:
  """Returns a call of a tool: {"function": {"name", "arguments"}}, or that."""
  outer = call if isinstance(call, Mapping) else {}
  inner = outer.get("function", outer)
  inner = inner if isinstance(inner, Mapping) else {}
  name, arguments = inner.get("name"), inner.get("arguments", {})
  try:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
  except (ValueError, RecursionError):
    value = None
  if not (name and isinstance(name, str) and isinstance(value, Mapping)):
    raise ValueError(
      f"{call!r:.60} is no call of a tool: it needs the name of a function, "
      "and arguments that are a JSON object, or its text"
    )
  try:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"arguments of {name} cannot be written as JSON: {error}"
    ) from error
  return base.ToolCall(name, text, _text(outer, ("id",)))


def _check_question(messages: Sequence[base.Message]) -> None:
  """Checks that a conversation waits for an answer."""
  if (found := messages[-1].role) not in ("user", "tool"):
    raise ValueError(
      f"its last message is of the {found}, so there is nothing to answer; end "
      "with one of the user"
    )


def _check_answers(messages: Sequence[base.Message]) -> None:
  """Checks that messages after a prompt begin with the answer to it."""
  if (found := messages[0].role) != "assistant":
    raise ValueError(
      f"its first message is of the {found}, and not the answer to the prompt; "
      "leave out what the prompt holds, or read whole conversations with "
      "prompt=none"
    )


def _check_turns(messages: Sequence[base.Message]) -> None:
  """Checks that a conversation takes turns, and ends with an answer."""
  for number, message in enumerate(messages):
    before = messages[number - 1] if number else None
    after = before.role if before else "nothing"
    wrong = {
      "system": number > 0,
      "assistant": after not in ("user", "tool"),
      "tool": not (after == "tool" or (before and before.tool_calls)),
    }
    if wrong.get(message.role):
      raise ValueError(
        f"message {number} is of the {message.role}, after {after}; a system "
        "message comes first, an answer after the user or a tool, and a tool "
        "after the answer that calls it"
      )
  if messages[-1].role != "assistant":
    raise ValueError(
      f"its last message is of the {messages[-1].role}, so there is nothing to "
      "learn; end with an answer"
    )


def with_system(
  messages: Sequence[base.Message], system: str | None
) -> list[base.Message]:
  """Returns a conversation that begins with a system message, if it has none.

  Args:
    system: None adds none.
  """
  if system is None or (messages and messages[0].role == "system"):
    return list(messages)
  return [base.Message("system", system), *messages]
