"""Multi-turn tool use of the Berkeley function-calling leaderboard (BFCL).

request -> calls -> results -> ... -> an answer without calls -> check of state
  ^                                                                  |
  +------------------------ the next request ------------------------+
"""

import ast
import copy
import dataclasses
import decimal
import functools
import importlib
import importlib.resources
import inspect
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from envs import base, threads

_Category = Literal["base", "miss_func", "miss_param", "long_context"]

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}

# A function that a request adds is described in it: tools cannot change once
# a conversation has begun.
_ADDED = (
  "{functions}\nI have updated some more functions you can choose from. What "
  "about now?"
)
_ERROR = "Error during execution: "

# MathAPI sets the precision of the whole process, and would write out
# 9**999999999 with the interpreter's lock held.
_math = threading.Lock()
_MAX_PRECISION = 1000
_MAX_NUMBER = 1e15


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTurn:
  """Requests of a user, one after the other, to be met by calls of tools.

  The tools are programs with state: a file system, a car, a broker and so on,
  each episode with objects of its own. An answer without calls ends a request.
  Then the package's own checker compares the state of the tools, and what they
  returned, with those of the reference solution. The reward is 1 if all
  requests were met and 0 otherwise; the first that was not ends the episode.
  Metrics: `requests_met`, `tool_calls`, `tool_errors`.

  Tasks with an even number in the package are for training, odd ones for
  evaluation, which holds across categories: they share their scenarios.

  A request takes up to `max_steps` answers and a task has up to eight requests,
  so `rollout.max_turns` should allow for 40.

  Attributes:
    category: base; miss_func, where a tool comes later than it is needed;
      miss_param, where a request lacks something; or long_context, where tools
      return thousands of words.
    max_steps: answers to one request; the package has 20.
  """

  category: _Category = "base"
  max_steps: int = 20

  def __post_init__(self) -> None:
    if self.max_steps < 2:
      raise ValueError(
        f"max_steps={self.max_steps}: give at least 2, one for the calls and "
        "one to end the request"
      )
    _package("constants.executable_backend_config")

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    return f"bfcl_{self.category}"

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is its number in the package."""
    half = len(_tasks(self.category)) // 2
    number = 2 * (index % half) + (split == "eval")
    return base.Task(f"{self.name}/{split}/{index}", index, split, number)

  def __call__(self, task: base.Task) -> "_Episode":
    """Returns a fresh episode."""
    return _Episode(self, task.seed)

  def oracle(
    self, task: base.Task, messages: Sequence[base.Message]
  ) -> base.Message:
    """Returns the calls of the reference solution, and then that it is done."""
    request = sum(m.role == "user" for m in messages) - 1
    calls = _tasks(self.category)[task.seed].solution[request]
    if messages[-1].role != "user" or not calls:
      return base.Message(
        "assistant", "Done." if calls else "I cannot do that."
      )
    return _asking(calls)

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> base.Message:
    """Returns a random call of any reference solution of the task, or none."""
    solution = _tasks(self.category)[task.seed].solution
    draw = random.Random(seed)
    calls = [call for request in solution for call in request]
    return _asking(draw.sample(calls, draw.randint(0, 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
  """A call of a reference solution."""

  name: str
  arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
  """One task of the package.

  Attributes:
    requests: the user's messages, in order.
    tools: schemas by name, those that come late included.
    added: number of a request -> names of the tools that come with it.
    solution: calls for each request.
  """

  entry: Mapping[str, Any]
  requests: Sequence[str]
  tools: Mapping[str, Mapping[str, Any]]
  added: Mapping[int, Sequence[str]]
  solution: Sequence[Sequence[_Call]]


class _Tools:
  """The objects that a task's tools are methods of, in a state of their own."""

  def __init__(self, entry: Mapping[str, Any]):
    long = "long_context" in entry["id"]
    self.objects = {}
    for name in entry["involved_classes"]:
      made = _class(name)()
      if hasattr(made, "_load_scenario"):
        config = copy.deepcopy(entry["initial_config"].get(name, {}))
        made._load_scenario(config, long_context=long)
      self.objects[name] = made

  def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the result of a call as the package writes it."""
    try:
      owner = next(o for o in self.objects.values() if hasattr(o, name))
      result = _run(getattr(owner, name), arguments)
      if isinstance(result, dict):
        try:
          return json.dumps(result)
        except (TypeError, ValueError):
          return str(result)
      return str(result)
    except Exception as error:  # The package shows these to the agent, too.
      return f"{_ERROR}{error}"


class _Episode:
  """One task with two sets of tools: the agent's, and the solution's."""

  def __init__(self, source: MultiTurn, number: int):
    self._source = source
    self._number = number
    self._request = 0
    self._num_steps = 0
    self._called = False
    self._results: list[str] = []
    self.tools: Sequence[Mapping[str, Any]] = ()

  async def start(self) -> Sequence[base.Message]:
    return await threads.call(self._start)

  async def step(self, answer: base.Message) -> base.Step:
    return await threads.call(self._step, answer)

  async def close(self) -> None:
    pass

  def _start(self) -> Sequence[base.Message]:
    self._task = _tasks(self._source.category)[self._number]
    late = {n for names in self._task.added.values() for n in names}
    self.tools = [
      self._task.tools[n] for n in self._task.tools if n not in late
    ]
    self._own = _Tools(self._task.entry)
    self._reference = _Tools(self._task.entry)
    return [base.Message("user", self._task.requests[0])]

  def _step(self, answer: base.Message) -> base.Step:
    self._num_steps += 1
    if not answer.tool_calls:
      return self._end_request()
    texts = [self._call(asked) for asked in answer.tool_calls]
    messages = [
      base.Message("tool", text, name=asked.name, tool_call_id=asked.id)
      for text, asked in zip(texts, answer.tool_calls, strict=True)
    ]
    errors = sum(text.startswith(_ERROR) for text in texts)
    metrics = {"tool_calls": float(len(texts)), "tool_errors": float(errors)}
    return base.Step(
      messages, 0.0, self._num_steps == self._source.max_steps, metrics
    )

  def _call(self, asked: base.ToolCall) -> str:
    self._called = True
    try:
      # The package too runs a tool that is called before it was announced.
      if asked.name not in self._task.tools:
        raise ValueError(f"there is no function {asked.name!r}")
      arguments = json.loads(asked.arguments)
      if not isinstance(arguments, dict):
        raise TypeError("the arguments must be a JSON object")
      text = self._own.call(asked.name, arguments)
    except (ValueError, TypeError, RecursionError) as error:
      text = f"{_ERROR}{error}"
    self._results.append(text)
    return text

  def _end_request(self) -> base.Step:
    if not self._is_met():
      return base.Step([], 0.0, True)
    self._request += 1
    self._num_steps, self._called = 0, False
    met = {"requests_met": 1.0}
    if self._request == len(self._task.requests):
      return base.Step([], 1.0, True, met)
    text = self._task.requests[self._request]
    return base.Step([base.Message("user", text)], 0.0, False, met)

  def _is_met(self) -> bool:
    """Returns whether a request was met, by the package's own checks."""
    calls = self._task.solution[self._request]
    expected = [self._reference.call(c.name, c.arguments) for c in calls]
    if not calls:
      return True  # The package accepts anything here; state is checked later.
    if not self._called:
      return False
    checker = _package("eval_checker.multi_turn_eval.multi_turn_checker")
    state = checker.state_checker(self._own.objects, self._reference.objects)
    response = checker.response_checker(self._results, expected, self._request)
    return state["valid"] and response["valid"]


def _asking(calls: Sequence[_Call]) -> base.Message:
  return base.Message(
    "assistant",
    "" if calls else "I cannot do that.",
    tuple(base.ToolCall(c.name, json.dumps(c.arguments)) for c in calls),
  )


def _run(method: Any, arguments: Mapping[str, Any]) -> Any:
  """Calls a tool; MathAPI's one at a time, with small numbers only."""
  if type(method.__self__).__name__ != "MathAPI":
    return method(**arguments)
  import mpmath

  if arguments.get("precision", 0) > _MAX_PRECISION:
    raise ValueError(f"precision must be at most {_MAX_PRECISION}")
  if method.__name__ == "power":
    if abs(arguments.get("exponent", 0)) > _MAX_PRECISION:
      raise ValueError(f"exponent must be at most {_MAX_PRECISION}")
    if abs(arguments.get("base", 0)) > _MAX_NUMBER:
      raise ValueError(f"base must be at most {_MAX_NUMBER:g}")
  with _math, mpmath.workdps(mpmath.mp.dps), decimal.localcontext():
    return method(**arguments)


@functools.cache
def _tasks(category: str) -> Sequence[_Task]:
  entries = _lines(f"BFCL_v4_multi_turn_{category}.json")
  answers = _lines(f"possible_answer/BFCL_v4_multi_turn_{category}.json")
  return [
    _task(entry, answer["ground_truth"])
    for entry, answer in zip(entries, answers, strict=True)
  ]


def _task(entry: Mapping[str, Any], solution: Sequence[Sequence[str]]) -> _Task:
  tools = {
    schema["function"]["name"]: schema
    for name in entry["involved_classes"]
    for schema in _schemas(name)
  }
  added = {
    int(request): names
    for request, names in entry.get("missed_function", {}).items()
  }
  requests = []
  for number, said in enumerate(entry["question"]):
    text = "\n".join(message["content"] for message in said)
    if number in added:
      functions = json.dumps([tools[n]["function"] for n in added[number]])
      text = _ADDED.format(functions=functions)
    requests.append(text)
  classes = [_class(name) for name in entry["involved_classes"]]
  parsed = [[_parsed(call, classes) for call in calls] for calls in solution]
  return _Task(entry, requests, tools, added, parsed)


def _parsed(text: str, classes: Sequence[type]) -> _Call:
  """Reads a call such as "cd(folder='document')", and names its arguments."""
  call: Any = ast.parse(text, mode="eval").body
  function = next(
    getattr(c, call.func.id) for c in classes if hasattr(c, call.func.id)
  )
  bound = inspect.signature(function).bind(
    None,
    *map(ast.literal_eval, call.args),
    **{k.arg: ast.literal_eval(k.value) for k in call.keywords},
  )
  named = dict(bound.arguments)
  del named["self"]
  return _Call(call.func.id, named)


@functools.cache
def _schemas(name: str) -> Sequence[Mapping[str, Any]]:
  """Returns the schemas of a class's tools."""
  config = _package("constants.executable_backend_config")
  file = config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]
  return [
    {
      "type": "function",
      "function": {
        "name": doc["name"],
        "description": doc["description"],
        "parameters": _schema(doc["parameters"]),
      },
    }
    for doc in _lines(f"multi_turn_func_doc/{file}")
  ]


def _schema(value: Any) -> Any:
  """Returns a schema with the types of JSON in place of the package's."""
  if isinstance(value, list):
    return [_schema(item) for item in value]
  if not isinstance(value, dict):
    return value
  found = {key: _schema(item) for key, item in value.items()}
  if isinstance(kind := found.get("type"), str):
    found["type"] = _TYPES.get(kind, kind)
  return found


def _lines(file: str) -> Iterator[Any]:
  _package()
  data = importlib.resources.files("bfcl_eval") / "data" / file
  yield from map(json.loads, data.read_text(encoding="utf-8").splitlines())


def _class(name: str) -> type[Any]:
  config = _package("constants.executable_backend_config")
  module = importlib.import_module(config.CLASS_FILE_PATH_MAPPING[name])
  return getattr(module, name)


def _package(module: str = "") -> Any:
  """Returns a module of the package; not at the top, as it is optional.

  Raises:
    ValueError: it is not installed.
  """
  try:
    return importlib.import_module(f"bfcl_eval.{module}".rstrip("."))
  except ModuleNotFoundError as error:
    raise ValueError(
      "this environment needs bfcl-eval, whose own dependencies are heavy and "
      "not used here: pip install --no-deps bfcl-eval, and pip install mpmath; "
      f"or `make bfcl` in a checkout ({error})"
    ) from error
