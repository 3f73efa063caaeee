"""The recorded trajectories of a run: a row of numbers each, and one in full.

  trajectories/round_NNNNNN.jsonl -> rows, which a page filters
                                 +-> one line, once somebody opens it

A row is small, so that a page holds those of a whole run, and knows where the
line of its trajectory begins. Files may come from anybody: what is no
trajectory is counted and left out, and texts are cut.
"""

import collections
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.report import run_files
from models import untrusted_files

COLUMNS = (
  "round",
  "group",
  "index",
  "task",
  "source",
  "status",
  "reward",
  "advantage",
  "lag",
  "tokens",
  "ids",
  "turns",
  "trained",
  "offset",
)
"""Fields of a row, in their order.

`lag` is in rounds, from the first token to training; `tokens` were sampled,
`ids` are all; `trained` is None where the log does not tell; `offset` is that
of the line in its file, in bytes.
"""

MAX_ROWS = 100_000
"""Rows of one index: the newest rounds."""

Row = list[Any]
_MAX_ROUNDS = 40
_MAX_SAMPLED = 400
_MAX_SAMPLE_BYTES = 1_500_000
_MAX_LINE_BYTES = 64 << 20
_MAX_NAME = 200
_MAX_TEXT = 10_000
_PIECE = re.compile(r"\S\s|\s\S")
_SOURCE = re.compile(r"(.+?)/(?:train|eval)/")


_WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class NoTrajectory(Exception):
  """A line that cannot be shown; the message says why."""


def files(run_dir: pathlib.Path) -> dict[int, pathlib.Path]:
  """Returns the files of a run by their rounds, in order."""
  found = {}
  for path in sorted((run_dir / "trajectories").glob("round_*.jsonl")):
    number = path.stem.removeprefix("round_")
    if re.fullmatch("[0-9]{1,12}", number) and os.path.isfile(path):
      found[int(number)] = path
  return found


def rows(
  path: pathlib.Path, round_: int, used: Mapping[int, Sequence[int]]
) -> tuple[list[Row], int]:
  """Returns the rows of a file, and the number of lines left out.

  Args:
    used: the trained members of groups; those of others are not known.
  """
  found, odd = [], 0
  for offset, line in _lines(path):
    try:
      found.append(row(parse(line), round_, used, offset))
    except NoTrajectory:
      odd += bool(line.strip())
  return found, odd


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
  offset = 0
  with path.open("rb") as file:
    while line := file.readline(_MAX_LINE_BYTES):
      yield offset, line
      offset += len(line)


def parse(line: bytes) -> dict[str, Any]:
  """Returns the object of a line.

  Raises:
    NoTrajectory: it has none with the fields of a trajectory.
  """
  try:
    data = json.loads(line, parse_constant=lambda _: None)
  except (ValueError, RecursionError) as error:
    raise NoTrajectory("the line is not JSON") from error
  if not isinstance(data, dict) or not isinstance(data.get("turns"), list):
    raise NoTrajectory("the line is no trajectory")
  return data


def row(
  data: Mapping[str, Any],
  round_: int,
  used: Mapping[int, Sequence[int]],
  offset: int = 0,
) -> Row:
  """Returns the row of a trajectory; see `COLUMNS`.

  Raises:
    NoTrajectory: a field is missing, or of another type.
  """
  try:
    turns = data["turns"]
    group, index = int(data["group_id"]), int(data["index"])
    firsts = [turn["versions"][0] for turn in turns if turn["versions"]]
    tokens = sum(len(turn["tokens"]) for turn in turns)
    context = sum(len(turn["context"]) for turn in turns)
    task = str(data["task_id"])[:_MAX_NAME]
    source = _SOURCE.match(task)
    members = used.get(group)
    return [
      round_,
      group,
      index,
      task,
      source[1] if source else task.partition("/")[0],
      str(data.get("status"))[:_MAX_NAME],
      number(data.get("reward")),
      number(data.get("advantage")),
      round_ - 1 - int(min(firsts)) if firsts else None,
      tokens,
      tokens + context,
      len(turns),
      None if members is None else index in members,
      offset,
    ]
  except _WRONG as error:
    raise NoTrajectory(
      f"a field of the trajectory is wrong: {error}"
    ) from error


def number(value: Any) -> float | None:
  """Returns a finite number with six digits; None for anything else."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    return float(f"{value:.6g}") if math.isfinite(value) else None
  except OverflowError:  # JSON has integers of any size.
    return None


def sample(
  run_dir: pathlib.Path,
  notes: list[str],
  used: Mapping[int, Sequence[int]],
) -> list[tuple[Row, dict[str, Any]]]:
  """Returns rows of whole groups, spread over the rounds, with all of each.

  As many as fit a page: of 40 rounds, 400 trajectories, 1.5 MB.

  Args:
    notes: takes sentences about what is missing or left out.
    used: see `rows`.
  """
  paths = [*reversed(files(run_dir).items())]
  if not paths:
    notes.append("trajectories/ is missing or empty.")
  picked = [paths[i] for i in run_files.spread(len(paths))[:_MAX_ROUNDS]]
  rounds = [_groups(path, number, notes, used) for number, path in picked]
  chosen: list[tuple[Row, dict[str, Any]]] = []
  size = 0
  # One group of every round, then a second one, so that they spread evenly.
  for group in itertools.chain(*itertools.zip_longest(*rounds, fillvalue=[])):
    cost = sum(len(json.dumps(one)) for _, one in group)
    fits = size + cost <= _MAX_SAMPLE_BYTES
    if fits and len(chosen) + len(group) <= _MAX_SAMPLED:
      chosen += group
      size += cost
  return sorted(chosen, key=lambda one: one[0][:3])


def _groups(
  path: pathlib.Path,
  round_: int,
  notes: list[str],
  used: Mapping[int, Sequence[int]],
) -> list[list[tuple[Row, dict[str, Any]]]]:
  """Returns the groups of one round."""
  groups = collections.defaultdict(list)
  unreadable = odd = 0
  try:
    for offset, line in _lines(path):
      try:
        data = parse(line)
      except NoTrajectory:
        unreadable += bool(line.strip())
        continue
      try:
        one = row(data, round_, used, offset), shown(data, round_)
        groups[one[0][1]].append(one)
      except NoTrajectory:
        odd += 1
  except OSError as error:  # The run keeps the newest, and has deleted it.
    notes.append(f"{path.name} cannot be read: {error.strerror}.")
  if unreadable:
    notes.append(f"{path.name}: unreadable lines left out: {unreadable}.")
  if odd:
    notes.append(f"{path.name}: lines without a trajectory left out: {odd}.")
  return [*groups.values()]


def detail(path: pathlib.Path, round_: int, offset: int = 0) -> dict[str, Any]:
  """Returns the trajectory whose line begins at an offset; see `shown`.

  Raises:
    NoTrajectory: there is none.
  """
  try:
    size = path.stat().st_size
    if not 0 <= offset < size:
      raise NoTrajectory("the file has changed; load the list again")
    data = untrusted_files.read_bytes(
      path, _MAX_LINE_BYTES, min(_MAX_LINE_BYTES, size - offset), offset
    )
  except (OSError, untrusted_files.BadFile) as error:
    raise NoTrajectory(str(error)) from error
  return shown(parse(data.partition(b"\n")[0]), round_)


def shown(data: Mapping[str, Any], round_: int) -> dict[str, Any]:
  """Returns all of a trajectory that a page shows; not the chosen experts.

  Raises:
    NoTrajectory: a field is missing, or of another type.
  """
  try:
    turns = [_turn(turn) for turn in data["turns"]]
    return {
      "round": round_,
      "group": int(data["group_id"]),
      "index": int(data["index"]),
      "task": str(data["task_id"])[:_MAX_NAME],
      "status": str(data.get("status"))[:_MAX_NAME],
      "reward": number(data.get("reward")),
      "graded_reward": number(data.get("graded_reward")),
      "advantage": number(data.get("advantage")),
      "parts": _numbers(data.get("parts")),
      "metrics": _numbers(data.get("metrics")),
      "fault": str(data.get("fault") or "")[:_MAX_TEXT],
      "unanswered": _ids(data.get("unanswered") or []),
      "gap": gap if (gap := data.get("gap")) in ("", " ") else _gap(turns),
      "turns": turns,
    }
  except _WRONG as error:
    raise NoTrajectory(
      f"a field of the trajectory is wrong: {error}"
    ) from error


def _gap(turns: Sequence[Mapping[str, Any]]) -> str:
  """Returns the text between words of an older file, which does not tell it.

  Words of a list need spaces between them, pieces of text bring their own.
  """
  words = (w for turn in turns for w in (*turn["context"], *turn["words"]))
  return "" if any(_PIECE.search(word) for word in words) else " "


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
  context, tokens = _ids(turn["context"]), _ids(turn["tokens"])
  found = {
    "context": _words(turn.get("context_words"), context),
    "context_ids": context,
    "words": _words(turn.get("words"), tokens),
    "ids": tokens,
    "stop": str(turn.get("stop"))[:_MAX_NAME],
    "opens": turn.get("opens") is True,
    "decode_s": number(turn.get("decode_s")),
    "env_s": number(turn.get("env_s")),
    "reward": number(turn.get("reward")),
    "versions": _ids(turn["versions"]),
  }
  if len(found["versions"]) != len(tokens):
    raise ValueError(f"{len(found['versions'])} versions of {len(tokens)} ids")
  for name in _OF_TOKENS:
    values = turn.get(name)
    if values is None and name != "logprobs":
      continue
    if not isinstance(values, list) or len(values) != len(tokens):
      raise ValueError(f"{name} are not those of {len(tokens)} ids")
    found[name] = [_rounded(x) for x in values]
  return found


_OF_TOKENS = ("logprobs", "advantages", "old_logprobs")


def _rounded(value: Any) -> float | None:
  value = number(value)
  return None if value is None else round(value, 4)


def _ids(values: Any) -> list[int]:
  if not isinstance(values, list):
    raise TypeError("ids are not a list")
  return [int(x) for x in values]


def _words(values: Any, ids: Sequence[int]) -> list[str]:
  """Returns a text for each id: an older file has none."""
  if values is None:
    return [str(x) for x in ids]
  if not isinstance(values, list) or len(values) != len(ids):
    raise ValueError(f"texts are not those of {len(ids)} ids")
  return [str(x) for x in values]


def _numbers(values: Any) -> dict[str, float | None]:
  if not isinstance(values, dict):
    return {}
  return {str(k)[:_MAX_NAME]: number(x) for k, x in values.items()}
