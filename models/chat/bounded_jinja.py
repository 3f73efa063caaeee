"""Jinja for templates of others: bounded time and memory, whatever they do.

  source -> syntax tree --_Bounded--> the same with filters -> Python code
            for x in y                for x in y | bounded_steps
            a ~ b, [a, b], a[1:]      [a, b] | bounded_text, ..

One budget of a rendering pays for each step of a loop, each call, and each
text and list, before it is made where its parts say how large it will be.
A list is paid for with all that it holds, so none holds more than the budget,
however often one and the same other list is in it. The processor's
time is bounded as well: a comparison of two long texts costs nothing else.
"""

import contextlib
import contextvars
import functools
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import exceptions, filters, nodes, runtime, sandbox, utils, visitor

MAX_SOURCE = 256 * 1024
"""Characters of a template. Published ones have less than 30,000."""
MAX_WORK = 1 << 27
"""Characters of all texts that a rendering makes, and some for each step."""
MAX_CPU_S = 10.0
_STEP = 64  # A step keeps about so many bytes, where it keeps anything.
_SLOT = 8
_FIELD = 512  # A number may be so long.
_MAX_BITS = 4096
_MAX_NUMBER = 10_000
_TIMED_EVERY = 32
_FILTERS = (
  *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e"),
  *("escape", "first", "float", "groupby", "int", "items", "last", "length"),
  *("list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse"),
  *("safe", "select", "selectattr", "sort", "title", "trim", "unique"),
  "upper",
)
_PADS = ("center", "ljust", "rjust", "zfill")
_SPLITS = ("split", "rsplit", "splitlines")
_TEXT_METHODS = {
  *("capitalize", "casefold", "count", "endswith", "find", "format", "index"),
  *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier"),
  *("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
  *("join", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
  *("replace", "rfind", "rindex", "rpartition", "rstrip", "startswith"),
  *("strip", "swapcase", "title", "upper", *_PADS, *_SPLITS),
}
_METHODS = {"get", "items", "keys", "values", "count", "index"}


class TooMuch(jinja2.TemplateRuntimeError):
  """A template does more than a rendering may."""


class _Budget:
  def __init__(self):
    self._left = MAX_WORK
    self._payments = 0
    self._until_s = time.thread_time() + MAX_CPU_S

  def pay(self, amount: int) -> None:
    self._left -= amount
    if self._left < 0:
      raise TooMuch(
        f"it makes more than {MAX_WORK:,} characters, counting {_STEP} for "
        "each step of a loop; shorten the conversation, or use another template"
      )
    self._payments += 1
    if (
      self._payments % _TIMED_EVERY == 0 and time.thread_time() > self._until_s
    ):
      raise TooMuch(
        f"it takes more than {MAX_CPU_S:g} s; shorten the conversation, or use "
        "another template"
      )


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")


@contextlib.contextmanager
def budget() -> Iterator[None]:
  """Gives a budget to the compilation or rendering of one template."""
  token = _budget.set(_Budget())
  try:
    yield
  finally:
    _budget.reset(token)


class BoundedSandbox(sandbox.ImmutableSandboxedEnvironment):
  """The sandbox of Jinja; it works inside of `budget()` only.

  It lacks what can be bounded only with effort, and what no template of a
  model needs: some filters and methods, and attributes in formats.
  """

  intercepted_binops = frozenset(["+", "*", "**", "%"])

  def __init__(self, **options: Any):
    """Takes the options of Jinja's environment, but for `finalize`."""
    super().__init__(**options, optimized=False, finalize=_finalize)
    self.globals.pop("lipsum")
    self.globals["namespace"] = _Namespace
    kept = {name: paying(self.filters[name]) for name in _FILTERS}
    self.filters = kept | {
      "bounded_steps": _steps,
      "bounded_text": _join_texts,
      "bounded_value": _paid_value,
      "bounded_slice": _slice,
      "center": paying(_center),
      "format": paying(_format),
      "indent": paying(_indent),
      "join": paying(_join),
      "replace": paying(_replace),
      "round": paying(_round),
      "string": _text,
      "truncate": paying(filters.FILTERS["truncate"]),
    }

  @staticmethod
  def concat(pieces: Iterable[str]) -> str:
    """Joins the output of a template, a macro or a block."""
    found = []
    for piece in pieces:
      _pay(len(piece) + 1)
      found.append(piece)
    return "".join(found)

  def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
    return super()._generate(_Bounded().visit(source), *args, **kwargs)

  def call_binop(
    self, context: runtime.Context, operator: str, left: Any, right: Any
  ) -> Any:
    """Computes +, *, ** and %, as far as the result is paid for."""
    if operator == "%" and isinstance(left, str):
      _pay_format(left, "%", (right,))
    elif operator == "+":
      _pay(_width(left) + _width(right))
    elif operator == "*":
      if isinstance(left, int):
        left, right = right, left
      if isinstance(right, int):
        _pay(_width(left) * max(0, right))
        _check_bits(_bits(left) + _bits(right))
    elif operator == "**" and isinstance(right, int):
      _check_bits(_bits(left) * max(0, right))
    value = super().call_binop(context, operator, left, right)
    return value if isinstance(value, str) else _paid_value(value)

  def call(  # pyright: ignore[reportIncompatibleMethodOverride]
    __self,
    __context: runtime.Context,
    __obj: Any,
    *args: Any,
    **kwargs: Any,
  ) -> Any:
    """Calls a function, a macro, a loop or a method that is known to end."""
    _pay(_STEP)
    owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
    if isinstance(owner, str):
      args = _prepared(owner, __obj.__name__, args, kwargs)
      # The texts of a list are new as well.
      return _paid_value(super().call(__context, __obj, *args, **kwargs))
    if isinstance(__obj, runtime.LoopContext):
      args = tuple(_steps(argument) for argument in args)
    elif isinstance(__obj, types.BuiltinMethodType):
      if __obj.__name__ not in _METHODS:
        raise exceptions.SecurityError(f"{__obj.__name__} is not allowed")
    elif not isinstance(__obj, runtime.Macro) or (
      __obj.catch_varargs or __obj.catch_kwargs
    ):
      # It may keep them in a list.
      measure(args)
      measure([kwargs[name] for name in kwargs if name[0] != "_"])
    return _paid(super().call(__context, __obj, *args, **kwargs))


class _Namespace(utils.Namespace):
  """A namespace whose text is short, whatever it holds."""

  def __repr__(self) -> str:
    return "<namespace>"


class _Bounded(visitor.NodeTransformer):
  """Puts filters around all that makes values without a call."""

  def visit_For(self, node: nodes.For) -> nodes.Node:
    self.generic_visit(node)
    node.iter = _filtered(node.iter, "bounded_steps")
    return node

  def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
    self.generic_visit(node)
    return _filtered(_like(node, nodes.List, node.nodes), "bounded_text")

  def visit_List(self, node: nodes.List) -> nodes.Node:
    return _filtered(self.generic_visit(node), "bounded_value")

  def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
    return _filtered(self.generic_visit(node), "bounded_value")

  def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
    self.generic_visit(node)
    is_target = node.ctx != "load"
    return node if is_target else _filtered(node, "bounded_value")

  def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
    self.generic_visit(node)
    if not isinstance(node.arg, nodes.Slice):
      return node
    parts = (node.arg.start, node.arg.stop, node.arg.step)
    none = _like(node, nodes.Const, None)
    return _filtered(
      node.node, "bounded_slice", [none if x is None else x for x in parts]
    )


def _filtered(
  node: Any, name: str, args: list[nodes.Expr] | None = None
) -> nodes.Filter:
  return _like(node, nodes.Filter, node, name, args or [], [], None, None)


def _like(node: nodes.Node, kind: Callable[..., Any], *fields: Any) -> Any:
  """Returns a node in the place of another."""
  return kind(*fields, lineno=node.lineno, environment=node.environment)


def _pay(amount: int) -> None:
  _budget.get().pay(amount)


def _width(value: Any) -> int:
  """Returns about how large a text or list is, without what it holds."""
  if isinstance(value, str):
    return len(value)
  return _SLOT * len(value) if isinstance(value, list | tuple) else 0


def _bits(value: Any) -> int:
  return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
  if bits > _MAX_BITS:
    raise TooMuch(f"a number of {bits:,} bits; use {_MAX_BITS:,} or fewer")


def _check_number(value: Any) -> None:
  if isinstance(value, int) and abs(value) > _MAX_NUMBER:
    raise TooMuch(f"a width of {value:,}; use {_MAX_NUMBER:,} or less")


def measure(value: Any, indent: int | None = None) -> int:
  """Pays for all that a value holds; one thing twice is paid for twice.

  Args:
    indent: characters before an item, for each level, where it is written.

  Returns:
    What was paid: no less than the length of its text, numbers aside.
  """
  _check_number(indent)
  total, items = 0, [(value, 0)]
  while items:
    item, level = items.pop()
    parts: list[Any] = []
    if isinstance(item, Mapping):
      parts = [part for pair in item.items() for part in pair]
    elif isinstance(item, list | tuple):
      parts = list(item)
    price = _STEP + _SLOT * len(parts) + (indent or 0) * level
    price += len(item) if isinstance(item, str) else 0
    _check_bits(_bits(item))
    _pay(price)
    total += price
    items += [(part, level + 1) for part in parts]
  return total


def _paid(value: Any) -> Any:
  """Returns a value after the price of what is new in it: a text, a list."""
  _check_bits(_bits(value))
  _pay(_width(value))
  return value


def paying(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a filter whose result is paid for."""

  @functools.wraps(function)
  def paying(*args: Any, **kwargs: Any) -> Any:
    return _paid(function(*args, **kwargs))

  return paying


def _finalize(value: Any) -> Any:
  if not isinstance(value, str):
    measure(value)
  return value


def _text(value: Any) -> str:
  """Returns the text of a value, which it pays for."""
  if isinstance(value, str):
    return value
  measure(value)
  return str(value)


def _steps(values: Any) -> Iterator[Any]:
  for value in values:
    _pay(_STEP)
    yield value


def _join_texts(values: list[Any]) -> str:
  texts = [_text(value) for value in values]
  _pay(sum(map(len, texts)))
  # What is marked as safe would escape the others.
  return "".join(map(str, texts))


def _paid_value(value: Any) -> Any:
  measure(value)
  return value


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
  found = value[start:stop:step]
  # A list of messages is cut in every step: the messages are not new.
  _pay(_width(found))
  return found


def _prepared(
  text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
  """Pays for what a method of a text will make; returns its arguments."""
  if name not in _TEXT_METHODS:
    raise exceptions.SecurityError(f"the method {name} is not allowed")
  if name in _PADS and args:
    _check_number(args[0])
    _pay(_MAX_NUMBER)
  elif name in _SPLITS:
    separator = kwargs.get("sep", args[0] if args else None)
    # A piece is some 50 bytes; where anything may separate, guess the worst.
    is_text = isinstance(separator, str) and separator
    _pay(_STEP * text.count(separator) if is_text else _SLOT * len(text))
  elif name == "replace":
    _pay_replaced(text, *args)
  elif name == "join" and args:
    pieces = list(args[0])
    _pay(len(text) * len(pieces) + sum(map(_width, pieces)))
    args = (pieces, *args[1:])
  elif name == "format":
    _pay_format(text, "{", (*args, *kwargs.values()))
  return args


def _pay_replaced(
  text: str, old: str = "", new: str = "", count: int = -1
) -> None:
  found = text.count(old)
  _pay(len(text) + (found if count < 0 else min(found, count)) * len(new))


def _pay_format(text: str, mark: str, values: tuple[Any, ...]) -> None:
  """Pays for a formatted text, as if each field had all values and a width."""
  widths = [int(number[:9]) for number in re.findall(r"\d+", text)]
  for width in widths:
    _check_number(width)
  if re.search(r"%[^%a-zA-Z]*\*|:[^{}]*\{|\{[^{}:!]*[.\[]", text):
    raise TooMuch(
      "a format with a width or an attribute that is a value; write it out"
    )
  field = measure(values) + max([_FIELD, *widths])
  _pay(len(text) + text.count(mark) * field)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
  text = _text(value)
  _pay_format(text, "%", (*args, *kwargs.values()))
  return filters.do_format(text, *args, **kwargs)


def _center(value: Any, width: int = 80) -> str:
  _check_number(width)
  return filters.do_center(_text(value), width)


def _indent(
  s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
  text = _text(s)
  _check_number(width)
  size = width if isinstance(width, int) else len(width)
  _pay(len(text) + size * (len(text.splitlines()) + 1))
  return filters.do_indent(text, width, first, blank)


@utils.pass_eval_context
def _join(
  eval_ctx: nodes.EvalContext,
  value: Iterable[Any],
  d: str = "",
  attribute: str | int | None = None,
) -> str:
  if attribute is not None:
    value = map(filters.make_attrgetter(eval_ctx.environment, attribute), value)
  items = [_text(item) for item in value]
  _pay((_SLOT + len(d)) * len(items))
  return str(d).join(items)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
  text, old, new = _text(s), _text(old), _text(new)
  count = -1 if count is None else count
  _pay_replaced(text, old, new, count)
  return str(text).replace(old, new, count)


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
  _check_number(precision)
  return filters.do_round(value, precision, method)
