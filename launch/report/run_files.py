"""Reads the files of a run for a page, whatever state they are in."""

import dataclasses
import json
import math
import os
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from launch.cli import config_file, workdir
from models import untrusted_files
from rl.runtime import segments, trace

Rows = Sequence[Mapping[str, Any]]
"""Lines of a JSON lines file, in order; a number that is not finite is None."""

_MAX_SPANS_READ = 500_000
_MAX_GAPS = 8


def _number(text: str) -> int | float | None:
  """Returns a number of JSON; None if it is beyond those of a float."""
  if not math.isfinite(value := float(text)):
    return None
  return int(text) if text.lstrip("-").isdecimal() else value


decode = json.JSONDecoder(
  # A browser cannot parse the NaN that Python writes.
  parse_constant=lambda _: None,
  parse_int=_number,
  parse_float=_number,
).decode
"""Returns the value of a JSON text; see `Rows`. Raises as `json.loads` does."""


def is_run(directory: pathlib.Path) -> bool:
  """Returns whether a directory is that of a run, and may be looked into."""
  # Path.is_file() raises where it may not.
  has_config = os.path.isfile(directory / "config.json")
  return has_config and not workdir.is_exported(directory)


def lines(
  path: pathlib.Path, notes: list[str], **needed: type | types.UnionType
) -> Iterator[dict[str, Any]]:
  """Yields the JSON objects of a file, a line each, one in memory at a time.

  Args:
    notes: takes a sentence about lines that are left out.
    needed: types of fields; an object without them is left out.
  """
  try:
    if not segments.exists(path):
      notes.append(f"{path.name} is {lack(path)}.")
      return
    gone = segments.deleted(path)
  except segments.Damaged as error:
    notes.append(f"{error}.")
    return
  if gone:
    notes.append(
      f"{path.name} begins with segment {gone + 1}; older ones were deleted "
      "(retention.log_bytes)."
    )
  unreadable = 0
  try:
    for line in segments.lines(path):
      try:
        row = decode(line)
      except (ValueError, RecursionError):
        row = None
      if isinstance(row, dict) and all(
        isinstance(row.get(name), kind) for name, kind in needed.items()
      ):
        yield row
      else:
        unreadable += bool(line.strip())
  except segments.Damaged as error:
    notes.append(f"{error}.")
  if unreadable:
    notes.append(f"{path.name}: unreadable lines left out: {unreadable}.")


def numbered(
  path: pathlib.Path, notes: list[str], key: str = "round", **kinds: Any
) -> dict[int, dict[str, Any]]:
  """Returns the rows of a file by their numbers, in the order of these.

  Args:
    notes: see `lines`.
    key: field of the number.
    kinds: of other fields that every row has; see `lines`.
  """
  # A resumed run repeats the rounds after its checkpoint: the last one counts.
  # The names of a long run take more memory than its numbers, unless shared.
  rows = {
    row[key]: {sys.intern(name): value for name, value in row.items()}
    for row in lines(path, notes, **{key: int}, **kinds)
  }
  return dict(sorted(rows.items()))


def column(rows: Rows, key: str) -> list[Any]:
  """Returns the values of a field, of the rows that have one."""
  return [x for row in rows if (x := row.get(key)) is not None]


def settings(path: pathlib.Path) -> dict[str, Any]:
  """Returns the config.json of a run as plain data, none of which is run.

  Raises:
    BadFile: it has none that can be read.
  """
  file = path / "config.json"
  text = untrusted_files.read_text(file, config_file.MAX_BYTES)
  try:
    # A browser cannot parse the NaN that Python writes.
    found = json.loads(text, parse_constant=str)
  except (ValueError, RecursionError) as error:
    raise untrusted_files.BadFile(
      f"{file} is not valid JSON: {error}; copy it again"
    ) from error
  if not isinstance(found, dict):
    raise untrusted_files.BadFile(
      f"{file} is not that of a run; name the --workdir of a run"
    )
  return found


def lack(path: pathlib.Path) -> str:
  """Returns why there is no file of lines: "missing", or "no file"."""
  return "no file" if os.path.lexists(path) else "missing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpans:
  """The spans of a run.

  Attributes:
    middle: all of them, or those in the middle of a long run.
    count: of all.
    work: of learner and engines in all rounds, as a run prints at its end.
  """

  middle: Sequence[trace.Span]
  count: int
  work: trace.TrackOverlap


def spans(path: pathlib.Path, notes: list[str]) -> RunSpans:
  """Returns the spans of a run."""
  lone, count = trace.LoneEvaluations(), 0
  for span in _spans(path, notes):
    count += 1
    lone.observe(span)
  start = max(0, (count - _MAX_SPANS_READ) // 2)
  meter, middle = trace.Meter(without=lone.intervals), []
  for i, span in enumerate(_spans(path, [])):
    meter.add(span)
    if start <= i < start + _MAX_SPANS_READ:
      middle.append(span)
  if len(middle) < count:
    notes.append(
      f"{path.name}: bubbles are those of the middle {len(middle):,} of "
      f"{count:,} spans."
    )
  return RunSpans(middle=middle, count=count, work=meter.take())


def _spans(path: pathlib.Path, notes: list[str]) -> Iterator[trace.Span]:
  kinds = {"track": str, "name": str, "start": float | int, "end": float | int}
  for row in lines(path, notes, **kinds):
    yield trace.Span(**{name: row[name] for name in kinds}, args=_args(row))


def _args(row: Mapping[str, Any]) -> dict[str, trace.Arg]:
  """Returns what a span may tell of its work, without what is none."""
  args = row.get("args")
  if not isinstance(args, dict):
    return {}
  return {k: x for k, x in args.items() if isinstance(x, int | float | str)}


def sample_gaps(
  path: pathlib.Path, rounds: Set[int], notes: list[str]
) -> list[dict[str, Any]]:
  """Returns comparisons of engine and learner; see `rollout_samples.write_gap`.

  As many as fit a page: of 8 rounds, the last of them and others spread over
  the run, in its order. No note is made of a run without comparisons.

  Args:
    rounds: of the run; a resume superseded others.
  """
  if not os.path.lexists(path):
    return []
  # The last line of a repeated round counts.
  found = {row["round"]: row for row in lines(path, notes, round=int)}
  current = sorted(rounds & found.keys(), reverse=True)
  picked = [current[i] for i in spread(len(current))[:_MAX_GAPS]]
  return [found[i] for i in sorted(picked)]


def spread(count: int) -> list[int]:
  """Returns range(count), ordered so that every prefix is evenly spread."""
  steps = [1 << k for k in reversed(range(count.bit_length() + 1))]
  return list(dict.fromkeys(i for step in steps for i in range(0, count, step)))
