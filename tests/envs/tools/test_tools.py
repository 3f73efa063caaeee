"""Schemas of methods, and calls that are wrong in every way."""

import enum
import json
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import pytest

from envs import base
from envs.tools import tools

NONE = frozenset[str]()


class Color(enum.Enum):
  RED = "red"


class Shop:
  """Its state is what was asked of it."""

  def __init__(self):
    self.seen = []

  def buy(
    self,
    count: int,
    price: float,
    title: str,
    gift: bool = False,
    size: Literal["s", "l"] = "s",
    tags: list[str] | None = None,
    notes: dict[str, int] | None = None,
    color: Color = Color.RED,
  ) -> dict:
    """Buys things.

    Even many.

    Args:
      count: how many,
        at least one.
      price (float): in euros: each.
      gift: wrapped.

    Returns:
      tags: this is no argument.
    """
    self.seen.append((count, price, title, gift, size, tags, notes, color))
    return {"left": 10 - count}

  def name(self) -> str:
    """Returns the name."""
    return "Ünal's"

  def fail(self, how: Literal["zero", "exit", "circle", "hash"]) -> Any:
    """Fails."""
    if how == "zero":
      return 1 // 0
    if how == "exit":
      sys.exit(3)
    circle = []
    circle.append(circle)
    return circle if how == "circle" else {("a", "b"): 1}

  @staticmethod
  def double(x: int) -> int:
    """Doubles."""
    return 2 * x

  @classmethod
  def open(cls) -> str:
    """Opens."""
    return cls.__name__

  def reset(self):
    raise AssertionError

  def _hidden(self):
    raise AssertionError


TOOLS = tools.of(Shop, frozenset({"reset"}))
BUY: Any = TOOLS["buy"].schema["function"]
GOOD = {"count": 2, "price": 1, "title": "pen"}


def call(name: str, arguments: Any = None, shop: Shop | None = None):
  text = (
    arguments if isinstance(arguments, str) else json.dumps(arguments or {})
  )
  asked = base.ToolCall(name, text)
  return tools.call(TOOLS, shop or Shop(), asked)


def test_tools_are_the_public_methods_that_are_not_reserved():
  assert sorted(TOOLS) == ["buy", "double", "fail", "name", "open"]


def test_a_schema_has_what_annotations_and_docstring_say():
  assert TOOLS["buy"].schema["type"] == "function"
  assert BUY["name"] == "buy"
  assert BUY["description"] == "Buys things.\n\nEven many."
  parameters = BUY["parameters"]
  assert parameters["required"] == ["count", "price", "title"]
  assert parameters["additionalProperties"] is False
  properties = parameters["properties"]
  assert properties["count"] == {
    "type": "integer",
    "description": "how many, at least one.",
  }
  assert properties["price"]["description"] == "in euros: each."
  assert properties["title"] == {"type": "string"}
  assert properties["gift"]["default"] is False
  assert properties["size"]["enum"] == ["s", "l"]
  nothing = {"type": "null"}
  assert properties["tags"] == {
    "anyOf": [{"type": "array", "items": {"type": "string"}}, nothing],
    "default": None,
  }
  assert properties["notes"]["anyOf"][0]["additionalProperties"] == {
    "type": "integer"
  }
  assert properties["color"]["default"] == "red"


def test_schemas_are_valid_and_take_the_calls_that_the_method_gets():
  for tool in TOOLS.values():
    schema = json.loads(json.dumps(tool.schema["function"]["parameters"]))
    jsonschema.Draft202012Validator.check_schema(schema)
  jsonschema.validate(GOOD, BUY["parameters"])
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate(GOOD | {"count": "2"}, BUY["parameters"])


def test_a_method_gets_its_arguments_and_defaults():
  shop = Shop()
  assert call("buy", GOOD, shop) == ('{"left": 8}', False)
  more = {"tags": ["a"], "notes": {"b": 1}, "size": "l", "color": "red"}
  assert call("buy", GOOD | more, shop) == ('{"left": 8}', False)
  assert shop.seen == [
    (2, 1.0, "pen", False, "s", None, None, Color.RED),
    (2, 1.0, "pen", False, "l", ["a"], {"b": 1}, Color.RED),
  ]


def test_results_are_text_as_it_is_and_else_json():
  assert call("name") == ("Ünal's", False)
  assert call("double", {"x": 4}) == ("8", False)
  assert call("open") == ("Shop", False)


@pytest.mark.parametrize(
  ("change", "told"),
  [
    ({"count": "2"}, "count: Input should be a valid integer"),
    ({"count": True}, "count: Input should be a valid integer"),
    ({"count": 2.5}, "count: Input should be a valid integer"),
    ({"price": "1"}, "price: Input should be a valid number"),
    ({"price": float("nan")}, "price: Input should be a finite number"),
    ({"title": None}, "title: Input should be a valid string"),
    ({"gift": 1}, "gift: Input should be a valid boolean"),
    ({"size": "m"}, "size: Input should be 's' or 'l'"),
    ({"tags": [1]}, "tags.0: Input should be a valid string"),
    ({"notes": {"a": "b"}}, "notes.a: Input should be a valid integer"),
    ({"colour": "red"}, "colour: Extra inputs are not permitted"),
  ],
)
def test_wrong_arguments_are_told_and_never_reach_the_method(change, told):
  shop = Shop()
  assert call("buy", GOOD | change, shop) == (f"error: buy: {told}", True)
  assert not shop.seen


@pytest.mark.parametrize(
  ("name", "arguments", "told"),
  [
    ("by", {}, "error: by: no such tool; there are buy, double, fail"),
    ("reset", {}, "error: reset: no such tool"),
    ("_hidden", {}, "error: _hidden: no such tool"),
    ("__init__", {}, "error: __init__: no such tool"),
    ("buy", {}, "count: Field required; price: Field required; title: Field"),
    ("buy", "[1]", "Input should be an object"),
    ("buy", "", "Invalid JSON"),
    ("buy", '{"count": 1', "Invalid JSON"),
    ("buy", '{"count": ' + "[" * 10_000, "recursion limit"),
    ("buy", '{"count": ' + "9" * 10_000 + "}", "number out of range"),
    ("buy", '{"title": "\ud800"}', "error: buy:"),
    ("fail", {"how": "zero"}, "fail: ZeroDivisionError: integer division"),
    ("fail", {"how": "exit"}, "fail: SystemExit: 3"),
    ("fail", {"how": "circle"}, "fail: ValueError: Circular reference"),
    ("fail", {"how": "hash"}, "fail: TypeError: keys must be str"),
  ],
)
def test_a_wrong_call_is_a_text_and_no_exception(name, arguments, told):
  text, is_error = call(name, arguments)
  assert told in text
  assert len(text) < 200
  assert is_error


def test_only_the_first_wrong_arguments_are_listed():
  text, _ = call("buy", GOOD | {"tags": list(range(1000))})
  assert text.count("valid string") == 3


class Widget:
  pass


def method(annotation: Any, doc: str | None = "Does it.") -> type:
  """Returns a class with one tool, of one parameter."""

  def do(self, x):
    raise AssertionError

  do.__annotations__ = {} if annotation is None else {"x": annotation}
  do.__doc__ = doc
  return type("Mine", (), {"do": do})


@pytest.mark.parametrize(
  ("cls", "told"),
  [
    (
      method(Widget),
      r"Mine.do: parameter x has the type .*Widget, which has no",
    ),
    (method(list[Widget]), r"x has the type list\[.*Widget\]"),
    (method(Callable[[int], int]), "has no JSON form; use int, float, bool"),
    (method(None), "Mine.do: parameter x has no type; write x: int"),
    (method("Gone"), "Mine.do: an annotation is unknown: name 'Gone'"),
    (method(int, None), "Mine.do has no docstring"),
    (Widget, "Widget has no public method beside"),
  ],
)
def test_what_cannot_be_a_tool_is_named(cls, told):
  with pytest.raises(ValueError, match=told):
    tools.of(cls, NONE)


class Many:
  def do(self, *items: int):
    """Does it."""


class Slow:
  async def do(self):
    """Does it."""


@pytest.mark.parametrize(
  ("cls", "told"),
  [
    (Many, r"Many.do: parameter \*items: int has no name in a call"),
    (Slow, "Slow.do is a coroutine"),
  ],
)
def test_methods_that_cannot_be_called_are_named(cls, told):
  with pytest.raises(ValueError, match=told):
    tools.of(cls, NONE)


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "pydantic", None)
  with pytest.raises(ValueError, match=r"twinmesh\[tools\]"):
    tools.of(method(int), NONE)


def test_annotations_of_typing_are_read():
  found = tools.of(method(typing.Optional[int]), NONE)  # noqa: UP045
  schema: Any = found["do"].schema["function"]
  assert schema["parameters"]["properties"]["x"]["anyOf"] == [
    {"type": "integer"},
    {"type": "null"},
  ]
