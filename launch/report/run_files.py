"""Reads the files of a run for a page, whatever state they are in."""

import collections
import itertools
import json
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from rl.runtime import segments, trace

Rows = Sequence[Mapping[str, Any]]
"""Lines of a JSON lines file, in order; a number that is not finite is None."""

_KEPT = ("index", "status", "reward", "parts", "fault", "advantage")
_MAX_SPANS_READ = 500_000
_MAX_ROUNDS = 40
_MAX_GAPS = 8
_MAX_TRAJECTORIES = 400
_MAX_TRAJECTORY_BYTES = 1_500_000


def lines(
  path: pathlib.Path, notes: list[str], **needed: type | types.UnionType
) -> Iterator[dict[str, Any]]:
  """Yields the JSON objects of a file, a line each, one in memory at a time.

  Args:
    notes: takes a sentence about lines that are left out.
    needed: types of fields; an object without them is left out.
  """
  if not segments.exists(path):
    is_there = path.exists()
    notes.append(f"{path.name} is {'no file' if is_there else 'missing'}.")
    return
  unreadable = 0
  try:
    for line in segments.lines(path):
      try:
        # A browser cannot parse the NaN that Python writes.
        row = json.loads(line, parse_constant=lambda _: None)
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


def spans(path: pathlib.Path, notes: list[str]) -> tuple[list[trace.Span], int]:
  """Returns the spans in the middle of a run, and the number of all."""
  fields = trace.Span.__annotations__
  kinds = {"track": str, "name": str, "start": float | int, "end": float | int}
  count = sum(1 for _ in lines(path, notes, **kinds))
  start = max(0, (count - _MAX_SPANS_READ) // 2)
  found = lines(path, [], **kinds)
  middle = itertools.islice(found, start, start + _MAX_SPANS_READ)
  spans = [
    trace.Span(**{name: row[name] for name in fields if name in row})
    for row in middle
  ]
  return spans, count


def sample_trajectories(
  directory: pathlib.Path, notes: list[str]
) -> list[dict[str, Any]]:
  """Returns whole groups, spread over the rounds, in the order of the run.

  As many as fit a page: of 40 rounds, 400 trajectories, 1.5 MB.
  """
  files = sorted(directory.glob("round_*.jsonl"), reverse=True)
  if not files:
    notes.append("trajectories/ is missing or empty.")
  picked = [files[i] for i in _spread(len(files))[:_MAX_ROUNDS]]
  rounds = [_groups(path, notes) for path in picked]
  chosen, size = [], 0
  # One group of every round, then a second one, so that they spread evenly.
  for group in itertools.chain(*itertools.zip_longest(*rounds, fillvalue=[])):
    cost = len(json.dumps(group))
    fits = size + cost <= _MAX_TRAJECTORY_BYTES
    if fits and len(chosen) + len(group) <= _MAX_TRAJECTORIES:
      chosen += group
      size += cost
  return sorted(chosen, key=lambda t: (t["round"], t["group"], t["index"]))


def sample_gaps(
  path: pathlib.Path, rounds: Set[int], notes: list[str]
) -> list[dict[str, Any]]:
  """Returns comparisons of engine and learner; see `rollout_samples.write_gap`.

  As many as fit a page: of 8 rounds, the last of them and others spread over
  the run, in its order. No note is made of a run without comparisons.

  Args:
    rounds: of the run; a resume superseded others.
  """
  if not path.exists():
    return []
  # The last line of a repeated round counts.
  found = {row["round"]: row for row in lines(path, notes, round=int)}
  current = sorted(rounds & found.keys(), reverse=True)
  picked = [current[i] for i in _spread(len(current))[:_MAX_GAPS]]
  return [found[i] for i in sorted(picked)]


def _spread(count: int) -> list[int]:
  """Returns range(count), ordered so that every prefix is evenly spread."""
  steps = [1 << k for k in reversed(range(count.bit_length() + 1))]
  return list(dict.fromkeys(i for step in steps for i in range(0, count, step)))


def _groups(path: pathlib.Path, notes: list[str]) -> list[list[dict[str, Any]]]:
  """Returns the groups of one round, with the fields that the page shows."""
  groups: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
  odd = 0
  kinds = {"group_id": int, "index": int, "turns": list}
  for row in lines(path, notes, **kinds):
    try:
      groups[row["group_id"]].append(_shown(row, path))
    except (LookupError, TypeError, ValueError, AttributeError):
      odd += 1
  if odd:
    notes.append(f"{path.name}: lines without a trajectory left out: {odd}.")
  return list(groups.values())


def _shown(row: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
  return {
    "round": int(path.stem.removeprefix("round_")),
    "group": row["group_id"],
    "task": row["task_id"],
    "turns": [_turn(turn) for turn in row["turns"]],
  } | {key: row.get(key) for key in _KEPT}


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "context": turn.get("context_words", turn["context"]),
    "words": turn.get("words", turn["tokens"]),
    "logprobs": [x and round(x, 3) for x in turn["logprobs"]],
    "versions": turn["versions"],
    "stop": turn["stop"],
    "decode_s": round(turn["decode_s"], 4),
    "env_s": round(turn["env_s"], 4),
  }
