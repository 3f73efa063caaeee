"""Paths that were probably meant by one that is not there."""

import difflib
import pathlib
from collections.abc import Iterable

_MOST = 3


def advice(missing: pathlib.Path, paths: Iterable[pathlib.Path]) -> str:
  """Returns "; did you mean ..?" of paths alike in name, or "; there are ..".

  Nothing when there are no paths.
  """
  by_name = {path.name: str(path) for path in sorted(paths)}
  if near := difflib.get_close_matches(missing.name, by_name, _MOST):
    return f"; did you mean {' or '.join(by_name[name] for name in near)}?"
  if not by_name:
    return ""
  first = list(by_name.values())[:_MOST]
  more = len(by_name) - len(first)
  listed = ", ".join(first) + (f" and {more} more" if more else "")
  return f"; there {'is' if len(by_name) == 1 else 'are'} {listed}"
