"""A plain class as a source: `reset` opens an episode, its methods are tools.

Tools may also come from toolboxes, such as a Python interpreter or an MCP
server, beside the class or without one. The contract of the class is that of
TRL's `environment_factory`:

  reset(**row) -> str | None   begins an episode; returns the user's message
  get_reward() -> float        scores it once it is over; may be left out
  close()                      releases what it holds; may be left out
  every other public method    is a tool, with a docstring and typed parameters

and, of ours, for a warm start, which may be left out together:

  oracle() -> str | Message    returns a good next answer
  explore(seed) -> ..          returns a random one; a seed gives the same again
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs import base, threads
from envs import rows as rows_lib
from envs.tools import tools

_PLAYS = ("oracle", "explore")
_RESERVED = frozenset({"reset", "get_reward", "close", *_PLAYS})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolEnvironment:
  """Episodes of a class: the agent calls its methods until it needs no more.

  Calls of one answer run in order, in a thread; each result is a message of
  the role `tool`, as it is if it is a string and else as JSON. A wrong call,
  or a method that raises, gives the agent an error text, and the episode goes
  on; `tool_calls` and `tool_errors` count them. An answer without calls ends
  the episode, and `get_reward` is its reward. Without that method it is 0, for
  a reward of the run that reads the text.

  `reset` gets the fields of a row, and `seed`, as far as it names them, or all
  of them as **kwargs. The members of a group have the same: everything random
  must follow from it. If the row has a field `prompt`, its messages come first,
  and the text of `reset` is added to the last.

  Without a class a row's field `prompt` is the conversation, and the reward is
  that of the run. A toolbox that fails ends the episode with ENV_FAULT.

  For a demonstration another object of the class is brought to the same point:
  `reset`, then the calls so far. Then its `oracle` or `explore` answers.

  Attributes:
    make: the class; each episode has an object of its own.
    toolboxes: more tools; all names must differ.
    rows: None: `reset` gets `seed` alone.
    answer: the field with the final answer, for rewards that compare.
    system: begins a conversation that has no system message.
    max_turns: answers; the last one ends the episode after its calls. Not
      above `rollout.max_turns`, which would end it without a reward.
    name: the first part of every task id; that of the class by default, or
      "tools".
  """

  make: type[Any] | None = None
  toolboxes: tuple[tools.Toolbox, ...] = ()
  rows: rows_lib.Rows | None = None
  answer: str | None = None
  system: str | None = None
  max_turns: int = 8
  name: str = ""

  def __post_init__(self) -> None:
    if self.make is None and not (self.toolboxes and self.rows is not None):
      raise ValueError(
        "make=none needs toolboxes with the tools, and rows with a field prompt"
      )
    if self.make is not None and not isinstance(self.make, type):
      raise ValueError(f"make={self.make!r} must be a class")
    if self.max_turns < 1:
      raise ValueError(f"max_turns={self.max_turns} must be at least 1")
    if not self.name:
      own = self.make.__name__ if self.make is not None else "tools"
      words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", own)
      object.__setattr__(self, "name", words.lower())
    base.check_name(self.name)
    if self.make is not None:
      if why := base.misfit(self.make):
        raise ValueError(
          f"{self.make.__qualname__} is made without arguments, which are for "
          f"reset: {why}"
        )
      for method in _RESERVED:
        self._check_reserved(self.make, method)
    self.tools  # noqa: B018
    if self.rows is None:
      self.arguments(0, {}, "without rows")
      if self.answer is not None:
        raise ValueError(
          f"answer={self.answer!r} is a field of rows, and there are none; "
          "give rows, or let get_reward compare"
        )

  def _check_reserved(self, make: type[Any], method: str) -> None:
    where = f"{make.__qualname__}.{method}"
    function = getattr(make, method, None)
    if function is None and method == "reset":
      raise ValueError(f"{make.__qualname__} has no reset, to begin an episode")
    if function is None:
      return
    if not inspect.isfunction(function):
      raise ValueError(f"{where} must be a method")
    if inspect.iscoroutinefunction(function):
      raise ValueError(f"{where} is a coroutine; write it with def")
    if method == "reset":
      return
    if base.misfit(function, None, *[0] * (method == "explore")):
      given = "with a seed" if method == "explore" else "without arguments"
      raise ValueError(
        f"{where} is called {given}, and is no tool; give a tool another name"
      )

  @property
  def tools(self) -> Mapping[str, tools.Tool]:
    """The tools of the class by name."""
    return {} if self.make is None else tools.of(self.make, _RESERVED)

  def validate(self) -> None:
    """Raises ValueError on a toolbox, or a row, that cannot work."""
    for toolbox in self.toolboxes:
      if (check := getattr(toolbox, "validate", None)) is not None:
        check()
    for record in self.rows.known() if self.rows is not None else ():
      self.arguments(0, record.fields, record.place)
      record.answer(self.answer)
      if self.make is None or record.fields.get("prompt") is not None:
        record.messages("prompt", "ToolEnvironment")

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the number of its row, if there are rows."""
    return rows_lib.task(self.name, self.rows, self.answer, index, split)

  def __call__(self, task: base.Task) -> "_Episode":
    """Returns a fresh environment; the class is called in its `start`."""
    return _Episode(self, task)

  def check_demonstrations(self) -> None:
    """Raises ValueError unless the class has `oracle` and `explore`."""
    for method in _PLAYS:
      if self.make is None or not hasattr(self.make, method):
        raise ValueError(
          f"{getattr(self.make, '__qualname__', self.name)} has no "
          f"demonstrations, for want of a method {method}; use "
          "warm_start=none, or add it"
        )

  def oracle(
    self, task: base.Task, messages: Sequence[base.Message]
  ) -> str | base.Message:
    """Returns the answer that the class's `oracle` gives at this point."""
    return self._play(task, messages, lambda played: played.oracle())

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str | base.Message:
    """Returns the answer that the class's `explore` gives at this point."""
    return self._play(task, messages, lambda played: played.explore(seed))

  def _play(
    self,
    task: base.Task,
    messages: Sequence[base.Message],
    answer: Callable[[Any], str | base.Message],
  ) -> str | base.Message:
    self.check_demonstrations()
    assert self.make is not None
    played = self.make()
    try:
      record = self.record(task)
      played.reset(**self.arguments(task.seed, record.fields, record.place))
      for asked in (call for said in messages for call in said.tool_calls):
        tools.call(self.tools, played, asked)
      return answer(played)
    finally:
      if hasattr(played, "close"):
        played.close()

  def record(self, task: base.Task) -> rows_lib.Record:
    """Returns the row of a task; without rows an empty one."""
    if self.rows is None:
      return rows_lib.Record(task.id, {})
    return self.rows.record(task.seed, task.split)

  def arguments(
    self, seed: int, fields: Mapping[str, Any], where: str
  ) -> Mapping[str, Any]:
    """Returns the arguments of `reset`.

    Raises:
      ValueError: it asks for one that is not there.
    """
    given = {"seed": seed, **fields}
    if self.make is None:
      return {}
    own = _parameters(self.make.reset)
    for p in own:
      if p.default is p.empty and p.kind not in _MANY and p.name not in given:
        raise ValueError(
          f"{where}: no field {p.name!r}, which {self.make.__qualname__}.reset "
          f"asks for; it gets {', '.join(given)}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in own):
      return given
    return {p.name: given[p.name] for p in own if p.name in given}


class _Episode:
  """One object of the class, its toolboxes, and the conversation with them."""

  def __init__(self, source: ToolEnvironment, task: base.Task):
    self._source = source
    self._task = task
    self._num_answers = 0
    self._object: Any = None
    self._owners: dict[str, tools.OpenToolbox] = {}
    self._closing = contextlib.AsyncExitStack()
    self.tools = [tool.schema for tool in source.tools.values()]

  async def start(self) -> Sequence[base.Message]:
    said = await threads.call(self._start)
    for toolbox in self._source.toolboxes:
      opened = await toolbox.open()
      self._closing.push_async_callback(opened.close)
      for schema in opened.schemas:
        name = schema["function"]["name"]
        if name in self._owners or name in self._source.tools:
          raise ValueError(f"two tools have the name {name}; leave one out")
        self._owners[name] = opened
        self.tools.append(schema)
    return said

  async def step(self, answer: base.Message) -> base.Step:
    self._num_answers += 1
    messages, num_errors = [], 0
    for asked in answer.tool_calls:
      text, is_error = await self._call(asked)
      num_errors += is_error
      messages.append(
        base.Message("tool", text, name=asked.name, tool_call_id=asked.id)
      )
    done = not messages or self._num_answers == self._source.max_turns
    reward = 0.0
    if done and hasattr(self._object, "get_reward"):
      reward = await threads.call(self._object.get_reward)
    return base.Step(
      messages,
      reward,
      done,
      {"tool_calls": len(messages), "tool_errors": num_errors},
    )

  async def close(self) -> None:
    async with self._closing:
      if hasattr(self._object, "close"):
        await threads.call(self._object.close)
      self._object = None

  def _start(self) -> Sequence[base.Message]:
    source, task, said, text = self._source, self._task, [], None
    record = source.record(task)
    if record.fields.get("prompt") is not None:
      said = record.messages("prompt", "ToolEnvironment")
    if source.make is not None:
      self._object = source.make()
      text = self._object.reset(
        **source.arguments(task.seed, record.fields, record.place)
      )
    if text is not None and not isinstance(text, str):
      raise TypeError(f"reset returned {type(text).__name__}, not a text")
    if text is None and not said:
      raise ValueError("reset returned None, and no row has a field prompt")
    last = said.pop() if said else base.Message("user", "")
    said.append(dataclasses.replace(last, content=last.content + (text or "")))
    return rows_lib.with_system(said, source.system)

  async def _call(self, asked: base.ToolCall) -> tuple[str, bool]:
    if (owner := self._owners.get(asked.name)) is not None:
      return await owner.call(asked)
    return await threads.call(
      tools.call, self._source.tools, self._object, asked, [*self._owners]
    )


_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Any) -> list[inspect.Parameter]:
  """Returns the parameters of a method after self."""
  return list(inspect.signature(function).parameters.values())[1:]
