"""The state of a reader of a log as JSON data, from which another one goes on.

  reader --of--> data --restore--> a reader that was just made

Only numbers, texts, containers of these and dataclasses that the reader names
pass, so data of others can name no code.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {
  kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque)
}
_MAPPINGS: Mapping[str, Callable[[Any], Any]] = {
  kind.__name__: kind for kind in (dict, collections.Counter)
}


def of(reader: object, without: Collection[str] = ()) -> dict[str, Any]:
  """Returns the attributes of a reader as JSON data.

  Args:
    without: attributes that its constructor is given.
  """
  return {
    name: _encoded(value)
    for name, value in vars(reader).items()
    if name not in without
  }


def restore(
  reader: object,
  data: Mapping[str, Any],
  *records: type,
  without: Collection[str] = (),
) -> None:
  """Sets the attributes of a reader to those that `of` returned.

  Args:
    records: dataclasses in its containers.
    without: as for `of`.

  Raises:
    LookupError: an attribute or a class is missing.
    TypeError, ValueError, AttributeError: the data are others.
  """
  known = {record.__name__: record for record in records}
  for name, current in list(vars(reader).items()):
    if name in without:
      continue
    value = _decoded(data[name], current, known)
    if isinstance(current, dict):  # One with a default keeps it.
      current.clear()
      current.update(value)
    elif isinstance(current, collections.deque):  # It keeps its bound.
      current.clear()
      current.extend(value)
    else:
      setattr(reader, name, value)


def _encoded(value: Any) -> Any:
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, list):
    return [_encoded(item) for item in value]
  if isinstance(value, dict):
    name = type(value).__name__
    pairs = [[_encoded(k), _encoded(v)] for k, v in value.items()]
    return {name if name in _MAPPINGS else "dict": pairs}
  if (name := type(value).__name__) in _SEQUENCES:
    return {name: [_encoded(item) for item in value]}
  if dataclasses.is_dataclass(value):
    fields = [f.name for f in dataclasses.fields(value)]
    return {name: {f: _encoded(getattr(value, f)) for f in fields}}
  return {"attributes": of(value)}


def _decoded(data: Any, current: Any, records: Mapping[str, type]) -> Any:
  """Returns a value, or the one that is there with its state restored."""
  if isinstance(data, list):
    return [_decoded(item, None, records) for item in data]
  if not isinstance(data, dict):
    return data
  ((name, content),) = data.items()
  if name == "attributes":
    restore(current, content, *records.values())
    return current
  if name in _MAPPINGS:
    return _MAPPINGS[name](
      {
        _decoded(k, None, records): _decoded(v, None, records)
        for k, v in content
      }
    )
  if name in _SEQUENCES:
    return _SEQUENCES[name]([_decoded(item, None, records) for item in content])
  fields = {f: _decoded(v, None, records) for f, v in content.items()}
  return records[name](**fields)
