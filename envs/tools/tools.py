"""Methods of a class as tools: JSON schemas, and calls that never raise.

  class Counter:
    def add(self, step: int = 1) -> int:   name and parameters
      '''Adds to the counter.              the tool's description

      Args:
        step: how much to add.             a parameter's description
      '''

pydantic makes the schemas from the annotations and checks arguments against
them, without conversions: "3" is no int.
"""

import dataclasses
import functools
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from envs import base, extras

_SECTION = re.compile(
  r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):[ \t]*$", re.M
)
_ARGUMENT = re.compile(r"^(\w+)[ \t]*(?:\([^)]*\))?:", re.M)
_MAX_SHOWN = 3  # Wrong arguments that an error text lists.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tool:
  """One method as a tool.

  Attributes:
    schema: in the form of the OpenAI API.
    check: returns the arguments of a call, from JSON text, or raises.
  """

  schema: Mapping[str, Any]
  check: Callable[[str], dict[str, Any]]


class OpenToolbox(Protocol):
  """Tools of one episode; `close` is called once, on every path."""

  @property
  def schemas(self) -> Sequence[Mapping[str, Any]]:
    """The tools in the form of the OpenAI API; their names differ."""
    ...

  async def call(self, asked: base.ToolCall) -> tuple[str, bool]:
    """Returns (result as text, whether it is an error) of one call.

    Raises:
      Exception: the tool is at fault, and not the caller: that ends the
        episode.
    """
    ...

  async def close(self) -> None:
    """Releases the resources of the episode."""
    ...


@runtime_checkable
class Toolbox(Protocol):
  """Tools that are no methods of a class. Frozen: a setting of the run."""

  async def open(self) -> OpenToolbox:
    """Returns the tools for one episode."""
    ...


@functools.lru_cache(maxsize=64)
def of(cls: type, reserved: frozenset[str]) -> Mapping[str, Tool]:
  """Returns the public methods of a class by name, but for the reserved ones.

  Raises:
    ValueError: a method lacks its docstring or an annotation, or a type has no
      JSON form; names class, method, parameter and type.
  """
  names = [
    name
    for name, _ in inspect.getmembers(cls, inspect.isroutine)
    if not name.startswith("_") and name not in reserved
  ]
  if not names:
    raise ValueError(
      f"{cls.__qualname__} has no public method beside "
      f"{', '.join(sorted(reserved))}, so there is no tool"
    )
  return {name: _tool(cls, name) for name in names}


def call(
  tools: Mapping[str, Tool],
  instance: object,
  asked: base.ToolCall,
  others: Collection[str] = (),
) -> tuple[str, bool]:
  """Returns (result as text, whether it is an error) of one call.

  A wrong call, or a method that raises, gives a text that says so.

  Args:
    others: names of tools that are called elsewhere.
  """
  try:
    if asked.name not in tools:
      names = ", ".join([*tools, *others])
      raise _WrongCall(f"no such tool; there are {names}")
    arguments = tools[asked.name].check(asked.arguments)
    result = getattr(instance, asked.name)(**arguments)
    if isinstance(result, str):
      return result, False
    return json.dumps(result, ensure_ascii=False, default=str), False
  except _WrongCall as error:
    return f"error: {asked.name}: {error}", True
  # The method is foreign code; it may also try to end the process.
  except (Exception, SystemExit) as error:
    return f"error: {asked.name}: {type(error).__name__}: {error}", True


class _WrongCall(Exception):
  """A call that no tool takes; the text is for the agent."""


def _tool(cls: type, name: str) -> Tool:
  where = f"{cls.__qualname__}.{name}"
  function = getattr(cls, name)
  if inspect.iscoroutinefunction(function):
    raise ValueError(
      f"{where} is a coroutine; write it with def, or write an async class "
      "with start, step and close"
    )
  documentation = inspect.getdoc(function)
  if not documentation:
    raise ValueError(f"{where} has no docstring to tell the agent of it")
  description, arguments = _documented(documentation)
  own = _parameters(cls, name, where)
  check, schema = _arguments(where, own)
  for key, text in arguments.items():
    if key in own:
      schema["properties"][key]["description"] = text
  return Tool(
    {
      "type": "function",
      "function": {
        "name": name,
        "description": description,
        "parameters": schema,
      },
    },
    check,
  )


def _documented(text: str) -> tuple[str, dict[str, str]]:
  """Returns the text before all sections, and those of its arguments."""
  description, *sections = _SECTION.split(text)
  found = dict(zip(sections[::2], sections[1::2], strict=True))
  body = found.get("Args") or found.get("Arguments") or ""
  _, *pieces = _ARGUMENT.split(textwrap.dedent(body.strip("\n")))
  texts = (" ".join(piece.split()) for piece in pieces[1::2])
  return description.strip(), dict(zip(pieces[::2], texts, strict=True))


def _parameters(
  cls: type, name: str, where: str
) -> dict[str, inspect.Parameter]:
  """Returns the parameters of a method, with their types as annotations."""
  function = getattr(cls, name)
  found = list(inspect.signature(function).parameters.values())
  is_static = isinstance(inspect.getattr_static(cls, name), staticmethod)
  if inspect.isfunction(function) and not is_static:
    found = found[1:]  # self
  try:
    hints = typing.get_type_hints(function, include_extras=True)
  except NameError as error:
    raise ValueError(f"{where}: an annotation is unknown: {error}") from error
  for parameter in found:
    if parameter.kind not in (
      parameter.POSITIONAL_OR_KEYWORD,
      parameter.KEYWORD_ONLY,
    ):
      raise ValueError(
        f"{where}: parameter {parameter} has no name in a call; give each "
        "parameter a name of its own"
      )
    if parameter.name not in hints:
      raise ValueError(
        f"{where}: parameter {parameter.name} has no type; write "
        f"{parameter.name}: int, or what it is"
      )
  return {p.name: p.replace(annotation=hints[p.name]) for p in found}


def _arguments(
  where: str, parameters: Mapping[str, inspect.Parameter]
) -> tuple[Callable[[str], dict[str, Any]], dict[str, Any]]:
  """Returns a check of JSON text, and its JSON schema."""
  extras.require("pydantic", "tools", f"the tool {where}")
  import pydantic
  import typing_extensions
  from pydantic import json_schema

  class Plain(json_schema.GenerateJsonSchema):
    """Schemas without a title for each field, which only repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
      return False

  defaults = {}
  for name, parameter in parameters.items():
    try:
      one = pydantic.TypeAdapter(parameter.annotation)
      one.json_schema()
      if parameter.default is not parameter.empty:
        defaults[name] = one.dump_python(
          parameter.default, mode="json", warnings=False
        )
    except pydantic.PydanticUserError as error:
      shown = inspect.formatannotation(parameter.annotation)
      raise ValueError(
        f"{where}: parameter {name} has the type {shown}, which has no JSON "
        "form; use int, float, bool, str, Literal, list, dict, or one of these "
        "or None"
      ) from error
  # A TypedDict, not a model: its fields may have any name, and are a dict.
  fields = {
    name: typing_extensions.NotRequired[p.annotation]
    if name in defaults
    else p.annotation
    for name, p in parameters.items()
  }
  exact = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
  typed_dict: Any = typing_extensions.TypedDict
  form = pydantic.with_config(exact)(typed_dict(where, fields))
  adapter: Any = pydantic.TypeAdapter(form)
  schema = adapter.json_schema(schema_generator=Plain)
  schema.pop("title", None)
  for name, default in defaults.items():
    schema["properties"][name]["default"] = default

  def check(text: str) -> dict[str, Any]:
    try:
      return adapter.validate_json(text)
    except pydantic.ValidationError as error:
      found = error.errors(include_url=False, include_input=False)
      wrong = [
        ": ".join(filter(None, [".".join(map(str, e["loc"])), e["msg"]]))
        for e in found[:_MAX_SHOWN]
      ]
      raise _WrongCall("; ".join(wrong)) from error

  return check, schema
