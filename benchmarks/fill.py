"""How much of the packed rows is tokens, on lengths that a real run had.

  python -m benchmarks.fill [--run=DIR]

Packs every 20th update of the README's run (guess_number_moe, seed 0, 1,000
rounds: 16 groups of 8 an update, which reach the learner as 8 and 8) and counts
fill = tokens / places of all batches, and batches an update. Twice: all groups,
and only those whose rewards differ, which is what teaches a group-relative
advantage; of these there are fewer and fewer. What is packed together:

  apart   each half on its own
  carry   the full batches of the first half; the rest of it with the second
  whole   both halves

`tail` is the rows of the last, smaller batches, a second program; a quarter of
those of the others is the default (`experiment.BatchShape.tail_rows`).
`--run` reads the lengths anew from the events of a run. They are kept in
benchmarks/results/lengths_guess_number_moe.json, the result in fill.json.
"""

import collections
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence

from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from rl.audit import event_log
from rl.data import packing

_RUN = absl_flags.DEFINE_string("run", "", "Directory of a run to read.")

_LENGTHS = "lengths_guess_number_moe"
_EVERY = 20
_POLICIES = ("apart", "carry", "whole")
_SHAPES = (
  # Rows, length, tail.
  (32, 64, 32),
  (32, 64, 8),
  (22, 60, 22),
  (22, 60, 6),
  (2, 96, 2),
  (35, 60, 3),
  (12, 60, 2),
  (10, 72, 3),
  (10, 72, 2),
  (19, 96, 2),
)

Halves = Sequence[Sequence[int]]
"""Lengths of the trajectories that reach the learner together, an update's."""


def _read(run: pathlib.Path) -> Iterator[dict[str, list[str]]]:
  """Yields histograms, `length x count`, of each half of every 20th update."""
  lengths: dict[tuple[int, ...], int] = {}
  rewards: dict[tuple[int, ...], float] = {}
  groups: dict[int, list[list[tuple[int, ...]]]] = collections.defaultdict(list)
  for event in event_log.LogFile(run / "events.jsonl"):
    at = tuple(int(event.get(x, -1)) for x in ("group", "attempt", "index"))
    match event["kind"]:
      case "ended":
        lengths[at] = event["length"]
      case "reward":
        rewards[at] = event["value"]
      case "trained":
        members = [(*at[:2], i) for i in event["used"]]
        groups[event["version"]].append(members)
  for version in sorted(groups)[::_EVERY]:
    known = groups[version]
    halves = known[: len(known) // 2], known[len(known) // 2 :]
    yield {
      name: [
        _histogram(
          [
            lengths[member]
            for members in half
            if not differ or len({rewards[m] for m in members}) > 1
            for member in members
          ]
        )
        for half in halves
      ]
      for name, differ in (("all", False), ("rewards differ", True))
    }


def _histogram(lengths: Sequence[int]) -> str:
  counts = sorted(collections.Counter(lengths).items())
  return " ".join(f"{length}x{count}" for length, count in counts)


def _lengths(histogram: str) -> list[int]:
  pairs = [map(int, part.split("x")) for part in histogram.split()]
  return [length for length, count in pairs for _ in range(count)]


def _heights(
  halves: Halves, policy: str, rows: int, length: int, tail: int
) -> list[int]:
  """Returns the rows of each batch of an update."""
  plan = functools.partial(packing.plan, rows=rows, length=length)
  first, second = halves
  match policy:
    case "apart":
      plans = [plan(half, tail_rows=tail) for half in halves]
    case "carry":
      full = plan(first, only_full=True)
      packed = {
        i for batch in full for row in batch for part in row
        for i in part.members
      }  # fmt: skip
      rest = [n for i, n in enumerate(first) if i not in packed]
      plans = [full, plan([*rest, *second], tail_rows=tail)]
    case _:
      plans = [plan([*first, *second], tail_rows=tail)]
  return [len(batch) for batches in plans for batch in batches]


def measure(
  updates: Sequence[Halves], policy: str, rows: int, length: int, tail: int
) -> dict[str, str | float]:
  """Returns the fill over all updates and the batches of one."""
  packed = [_heights(halves, policy, rows, length, tail) for halves in updates]
  tokens = sum(sum(map(sum, halves)) for halves in updates)
  return {
    "rows": rows,
    "length": length,
    "tail": tail,
    "packed": policy,
    "fill": tokens / (length * sum(map(sum, packed))),
    "batches": sum(map(len, packed)) / len(packed),
  }


def main(_: list[str]) -> None:
  """Measures every shape and policy, prints the table and keeps it."""
  if _RUN.value:
    machine.keep(_LENGTHS, updates=list(_read(pathlib.Path(_RUN.value))))
  results = pathlib.Path(__file__).parent / "results"
  kept = json.loads((results / f"{_LENGTHS}.json").read_text())["updates"]
  rows = []
  for groups in ("all", "rewards differ"):
    updates = [[_lengths(half) for half in update[groups]] for update in kept]
    for shape in _SHAPES:
      for policy in _POLICIES:
        row = {"groups": groups, **measure(updates, policy, *shape)}
        rows.append(row)
  machine.show("fill by shape and policy", rows)
  machine.keep("fill", rows=rows)


if __name__ == "__main__":
  app.run(main)
