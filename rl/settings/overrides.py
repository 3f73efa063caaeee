"""Settings of a run: overrides by dotted path, JSON, and their errors.

The settings are a tree of frozen dataclasses. A polymorphic part is the
object itself; the command line names its class by a short name, JSON by its
path:

  --config.rollout.group_size=8
  --config.algorithm.loss=gspo
  --config.algorithm.loss='gspo(clip_high=4e-4)'
  --config.model='tiny_moe(d_model=64)'      a function that returns one
  {"class": "rl.algorithms.losses.Gspo", "clip_low": 3e-4, "clip_high": 4e-4}
"""

import dataclasses
import difflib
import enum
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from rl.settings import annotations, parsing, suggestions

_Tree = TypeVar("_Tree")
SettingError = annotations.SettingError
is_setting = annotations.is_setting


def apply(tree: _Tree, changes: Mapping[str, str | None]) -> _Tree:
  """Returns the tree with several settings replaced, as `override` does.

  Parts come before what lies in them: {"loss.scale": "2", "loss": "CLASS()"}
  is a CLASS of scale 2, in whatever order they are given. The settings of one
  part change together, because the part may compare them.
  """

  def depth_and_part(path: str) -> tuple[int, str]:
    return path.count("."), path.rpartition(".")[0]

  paths = sorted(changes, key=depth_and_part)
  for _, of_part in itertools.groupby(paths, depth_and_part):
    tree = _override(tree, {path: changes[path] for path in of_part})
  return tree


def override(tree: _Tree, path: str, text: str | None) -> _Tree:
  """Returns the tree with one setting replaced.

  Args:
    tree: a frozen dataclass; it is not changed.
    path: dotted; items of a tuple of dataclasses are numbered from 0.
    text: as typed on the command line: `8`, `none`, `2,4`, `{"data": 2}`. A
      part that is an object is replaced by `name(field=1)`, the short name or
      path of a class or of a function that returns one; the arguments are read
      like overrides, nothing is evaluated. None turns the setting off: false,
      or none.

  Raises:
    SettingError: names the key, what was expected, and the nearest key.
  """
  return _override(tree, {path: text})


def _override(tree: _Tree, changes: Mapping[str, str | None]) -> _Tree:
  """Returns the tree with settings of one part replaced."""
  values, names, nodes = {}, [], []
  for path, text in changes.items():
    *names, name = path.split(".")
    nodes, hint, value = _find(tree, path)
    values[name] = _read(hint, text, path, old=value)
  told = " ".join(argument(*change) for change in changes.items())
  for node, name in zip(reversed(nodes), ["", *names][::-1], strict=True):
    values = {name: _replace(node, values, told)}
  return values[""]


def _find(tree: Any, path: str) -> tuple[list[Any], Any, Any]:
  """Returns the parts above a setting, its annotation and its value."""
  nodes, hint, node = [], type(tree), tree
  names = path.split(".")
  for depth, name in enumerate(names):
    nodes.append(node)
    children = _children(node, hint)
    if name not in children:
      above = ".".join(names[:depth])
      raise SettingError(_no_such(tree, path, above, hint, node))
    hint, node = children[name]
  return nodes, hint, node


def argument(path: str, text: str | None) -> str:
  """Returns an override as it is typed; None turns the setting off."""
  return f"--noconfig.{path}" if text is None else f"--config.{path}={text}"


def _read(hint: Any, text: str | None, path: str, old: Any) -> Any:
  if text is None:
    return parsing.turned_off(hint, argument(path, None))
  parts = {name: part for name, (part, _) in _children(old, hint).items()}
  return parsing.read_field(hint, parsing.Text(text), f"--config.{path}", parts)


class Difference(NamedTuple):
  """A setting with another value; as text `rollout.group_size: 8 -> 16`."""

  path: str
  before: Any
  after: Any

  def __str__(self) -> str:
    return f"{self.path}: {self.before!r} -> {self.after!r}"


def difference(before: Any, after: Any, path: str = "") -> list[Difference]:
  """Returns each unequal setting."""
  old, new = _children(before, Any), _children(after, Any)
  if type(before) is type(after) and old and old.keys() == new.keys():
    start = path and f"{path}."
    pairs = [(start + name, old[name][1], new[name][1]) for name in old]
    return [one for key, a, b in pairs for one in difference(a, b, key)]
  return [Difference(path or "config", before, after)] * (before != after)


def to_json(tree: Any) -> dict[str, Any]:
  """Returns plain JSON data, the inverse of `from_json`.

  Raises:
    SettingError: a value that cannot be a setting, such as a lambda.
  """
  return _plain(tree, "config")


def from_json(data: Any) -> Any:
  """Inverse of `to_json`; fields that are missing take their defaults.

  Raises:
    SettingError: names the path, what was expected, and the nearest field.
  """
  return parsing.read_field(object, data, "config")


def flat(tree: Any, path: str = "") -> dict[str, str]:
  """Returns the leaves of a tree of settings as text, by dotted name.

  Args:
    path: of the tree itself.
  """
  if isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
    tree = dict(enumerate(tree))
  if isinstance(tree, dict):
    found: dict[str, str] = {}
    for name, part in tree.items():
      if name != "class":
        found |= flat(part, f"{path}.{name}" if path else name)
      elif path:  # Told by its last word, as on the command line.
        found[path] = str(part).rpartition(".")[2]
    return found
  if isinstance(tree, list):
    return {path: ",".join(_leaf(part) for part in tree)}
  return {path: _leaf(tree)}


def _leaf(value: Any) -> str:
  return json.dumps(value) if isinstance(value, list) else str(value)


def _children(node: Any, hint: Any) -> dict[str, tuple[Any, Any]]:
  """Returns (annotation, value) of each child, by name; none of a leaf."""
  if is_setting(type(node)):
    hints = annotations.hints(type(node))
    return {name: (hints[name], getattr(node, name)) for name in hints}
  if isinstance(node, tuple) and any(is_setting(type(x)) for x in node):
    hints = annotations.item_hints(hint, len(node)) or [Any] * len(node)
    return {str(i): (hints[i], item) for i, item in enumerate(node)}
  return {}


def _walk(node: Any, hint: Any, path: str = "") -> Iterator[tuple]:
  """Yields (path, annotation, value) of everything below a node."""
  for name, (child_hint, child) in _children(node, hint).items():
    yield path + name, child_hint, child
    yield from _walk(child, child_hint, f"{path}{name}.")


def _replace(node: Any, values: Mapping[str, Any], told: str) -> Any:
  if isinstance(node, tuple):
    return tuple(values.get(str(i), item) for i, item in enumerate(node))
  try:
    return dataclasses.replace(node, **values)
  except ValueError as error:
    raise SettingError(f"{told}: {error}") from error


def _no_such(tree: Any, path: str, above: str, hint: Any, node: Any) -> str:
  """Returns the reason why `path` ends at `above`, the part that exists."""
  start = f"--config.{path}: "
  if node is None:
    form, *_ = [*suggestions.forms(hint), "CLASS(...)"]
    return start + (
      f"--config.{above} is none, so nothing below it can be set; make it"
      f" an object in the file or with --config.{above}={form}"
    )
  if not (children := _children(node, hint)):
    return (
      start + f"--config.{above} is one value ({annotations.describe(hint)})"
    )

  def likeness(other: str) -> float:
    # A right name in a wrong place counts as much as the reverse.
    pairs = [(path, other), (path.split(".")[-1], other.split(".")[-1])]
    return sum(difflib.SequenceMatcher(None, *p).ratio() for p in pairs)

  known = {p: annotations.describe(h) for p, h, _ in _walk(tree, type(tree))}
  best = max(known, key=likeness)
  if likeness(best) < 1.2:
    return f"{start}no such setting; there are {', '.join(children)}"
  near = f"--config.{best} ({known[best]})"
  return f"{start}no such setting; did you mean {near}?"


def _plain(value: Any, where: str) -> Any:
  if value is None or type(value) in (bool, int, float, str):
    return value
  if isinstance(value, enum.Enum):
    return value.name
  try:
    if (name := annotations.name(value)) is not None:
      return name
  except SettingError as error:
    raise SettingError(f"{where}: {error}") from error
  if is_setting(cls := type(value)):
    fields = {
      name: _plain(child, f"{where}.{name}")
      for name, (_, child) in _children(value, cls).items()
    }
    return {"class": annotations.path(cls)} | fields
  if isinstance(value, tuple | list):
    return [_plain(item, f"{where}.{i}") for i, item in enumerate(value)]
  if isinstance(value, Mapping):
    return {
      str(_plain(key, where)): _plain(item, f"{where}.{key}")
      for key, item in value.items()
    }
  raise SettingError(
    f"{where}: {value!r} must be a number, a string, an enum, a tuple, a "
    "mapping, a function, a class or a frozen dataclass"
  )
