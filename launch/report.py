"""Renders a run directory as one static page and one picture for a README.

  python -m launch.report --run=runs/first

The page is one file that needs no network. It also renders a run that is still
going on or that crashed: what is missing is named on top of the page.
"""

import collections
import dataclasses
import html
import itertools
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from launch import learning_curve
from rl import events, trace

_HERE = pathlib.Path(__file__).parent
_KEPT = ("index", "status", "reward", "parts", "fault", "advantage")
_MAX_SPANS = 50_000
_MAX_ROUNDS = 40
_MAX_TRAJECTORIES = 400
_MAX_TRAJECTORY_BYTES = 1_500_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a run directory holds; what is missing is empty.

  Attributes:
    metrics: one row a round, in order; a repeated round counts once. What
      was not finite is None, here and elsewhere.
    evaluations: one row each, in order, of those that graded an episode.
    events: those that no resume superseded, see `events.surviving`.
    trajectories: a sample, see `sample_trajectories`.
    notes: sentences about what is missing or unreadable.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  metrics: Sequence[Mapping[str, Any]]
  evaluations: Sequence[Mapping[str, Any]]
  spans: Sequence[trace.Span]
  events: Sequence[events.Event]
  trajectories: Sequence[Mapping[str, Any]]
  notes: Sequence[str]


def read(path: pathlib.Path) -> Run:
  """Reads a run directory, whatever state it is in."""
  notes: list[str] = []

  def rows(name: str) -> list[dict[str, Any]]:
    return _read_lines(path / name, notes)

  try:
    text = (path / "config.json").read_text("utf-8")
    config = json.loads(text, parse_constant=str)
  except (OSError, json.JSONDecodeError):
    config = {}
    notes.append("config.json is missing or unreadable.")
  # A resumed run repeats the rounds behind its checkpoint: the last one counts.
  rounds = {row["round"]: row for row in rows("metrics.jsonl")}
  evaluations = {
    row["round"]: row
    for row in rows("evaluations.jsonl")
    if row["success"] is not None
  }
  return Run(
    path=path,
    config=config,
    metrics=[rounds[i] for i in sorted(rounds)],
    evaluations=[evaluations[i] for i in sorted(evaluations)],
    spans=[trace.Span(**row) for row in rows("spans.jsonl")],
    events=events.surviving(rows("events.jsonl")),
    trajectories=sample_trajectories(path / "trajectories", notes),
    notes=notes,
  )


def _read_lines(path: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
  """Returns the JSON lines of a file; adds to `notes` what it could not."""
  if not path.exists():
    notes.append(f"{path.name} is missing.")
    return []
  rows, unreadable = [], 0
  for line in path.read_text("utf-8", "replace").split("\n"):
    try:
      if line:
        # A browser cannot parse the NaN that Python writes.
        rows.append(json.loads(line, parse_constant=lambda _: None))
    except json.JSONDecodeError:
      unreadable += 1
  if unreadable:
    notes.append(f"{path.name}: unreadable lines left out: {unreadable}.")
  return rows


def tiles(run: Run) -> list[tuple[str, str, str]]:
  """Returns (label, value, note) of the outcomes on top of the page."""

  def column(key: str) -> list[float]:
    return [x for row in run.metrics if (x := row.get(key)) is not None]

  def median(key: str) -> str:
    values = column(key)
    return f"{statistics.median(values):,.0f}" if values else "–"

  success, interval = "–", "no evaluation"
  if run.evaluations:
    first, last = run.evaluations[0], run.evaluations[-1]
    success = f"{first['success']:.0%} → {last['success']:.0%}"
    interval = f"held out; last {last['low']:.0%} to {last['high']:.0%}"
  wall, gaps = column("time_s"), column("logprob_gap_max")
  lags, bound = events.staleness(run.events), _max_staleness(run)
  both = trace.overlap(run.spans)
  busy = f"learner {both.first_s:,.0f} s, decode {both.second_s:,.0f} s busy"
  faults = collections.Counter(
    event["status"] for event in events.of_kind(run.events, "fault")
  )
  kinds = ", ".join(f"{kind} {count}" for kind, count in faults.items())
  return [
    ("Success", success, interval),
    ("Rounds", f"{len(run.metrics):,}", f"{len(lags):,} groups trained"),
    ("Wall time", _duration(max(wall)) if wall else "–", "to the last round"),
    ("Overlap", f"{both.share:.0%}" if run.spans else "–", busy),
    (
      "Largest lag",
      str(max(lags)) if lags else "–",
      "rounds" if bound is None else f"rounds; the bound is {bound}",
    ),
    ("Decode", median("decode_tokens_per_s"), "tokens/s, median"),
    ("Learner", median("learner_tokens_per_s"), "tokens/s, median"),
    (
      "Log-prob gap",
      f"{max(gaps):.2g}" if gaps else "–",
      "nats, largest, engine to learner",
    ),
    ("Faults", f"{faults.total():,}" if run.events else "–", kinds),
  ]


def _max_staleness(run: Run) -> int | None:
  return run.config.get("overlap", {}).get("max_staleness")


def _duration(seconds: float) -> str:
  """Returns "2 h 5 min", "3 min 20 s" or "12 s"."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours} h {minutes} min"
  return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Returns every numeric key of the rows, success first, six digits each."""
  keys = dict.fromkeys(["round", "success"])
  for row in rows:
    keys |= {key: None for key, x in row.items() if isinstance(x, int | float)}
  found = {key: [row.get(key) for row in rows] for key in keys}
  return {
    key: [x if x is None else float(f"{x:.6g}") for x in column]
    for key, column in found.items()
  }


def _timeline(run: Run) -> dict[str, Any]:
  """Returns the spans as rows of numbers; of a long run, the middle."""
  spans = sorted(run.spans, key=lambda span: span.start)
  start = max(0, (len(spans) - _MAX_SPANS) // 2)
  shown = spans[start : start + _MAX_SPANS]
  tracks = dict.fromkeys(["learner", "decode", "host"])
  tracks = list(tracks | dict.fromkeys(span.track for span in shown))
  names = list(dict.fromkeys(span.name for span in shown))
  rows = [
    [
      tracks.index(span.track),
      lane,
      round(span.start, 4),
      round(span.end, 4),
      names.index(span.name),
      *([span.args] if span.args else []),
    ]
    for span, lane in zip(shown, trace.lanes(shown), strict=True)
  ]
  return {
    "tracks": tracks,
    "names": names,
    "rows": rows,
    "total": len(spans),
    "window": learning_curve.window(spans),
  }


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
  # One group of every round, then a second one: what fits is spread evenly.
  for group in itertools.chain(*itertools.zip_longest(*rounds, fillvalue=[])):
    cost = len(json.dumps(group))
    fits = size + cost <= _MAX_TRAJECTORY_BYTES
    if fits and len(chosen) + len(group) <= _MAX_TRAJECTORIES:
      chosen += group
      size += cost
  return sorted(chosen, key=lambda t: (t["round"], t["group"], t["index"]))


def _spread(count: int) -> list[int]:
  """Returns range(count) so ordered that every prefix is evenly spread."""
  steps = [1 << k for k in reversed(range(count.bit_length() + 1))]
  return list(dict.fromkeys(i for step in steps for i in range(0, count, step)))


def _groups(path: pathlib.Path, notes: list[str]) -> list[list[dict[str, Any]]]:
  """Returns the groups of one round, with what the page shows of them."""
  groups: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
  for row in _read_lines(path, notes):
    groups[row["group_id"]].append(
      {
        "round": int(path.stem.removeprefix("round_")),
        "group": row["group_id"],
        "task": row["task_id"],
        "turns": [_turn(turn) for turn in row["turns"]],
      }
      | {key: row.get(key) for key in _KEPT}
    )
  return list(groups.values())


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


def page(run: Run) -> str:
  """Returns the report as one HTML page that refers to nothing else."""
  lags = collections.Counter(events.staleness(run.events))
  data = {
    "notes": run.notes,
    "tiles": tiles(run),
    "config": run.config,
    "metrics": _columns(run.metrics),
    "evaluations": run.evaluations,
    "timeline": _timeline(run),
    "lags": {"counts": sorted(lags.items()), "bound": _max_staleness(run)},
    "trajectories": run.trajectories,
  }
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))
  parts = {
    "title": html.escape(run.path.resolve().name),
    # JSON may hold "</script>" only inside strings, where "<" can be escaped.
    "data": text.replace("<", "\\u003c"),
  } | {path.name: path.read_text("utf-8") for path in _HERE.glob("*.js")}
  template = (_HERE / "report.html").read_text("utf-8")
  # One pass: text of the run that looks like a field is left alone.
  return re.sub(r"{{([\w.]+)}}", lambda field: parts[field[1]], template)


def write(run_dir: pathlib.Path) -> pathlib.Path:
  """Writes report.html and learning_curve.svg; returns the page's path.

  Raises:
    FileNotFoundError: there is no such directory.
  """
  if not run_dir.is_dir():
    raise FileNotFoundError(f"{run_dir} is no directory of a run")
  run = read(run_dir)
  picture = learning_curve.draw(run.metrics, run.evaluations, run.spans)
  (run_dir / "learning_curve.svg").write_text(picture, "utf-8")
  target = run_dir / "report.html"
  target.write_text(page(run), "utf-8")
  return target


if __name__ == "__main__":
  # Not at import: training writes the report too and has flags of its own.
  _RUN = flags.DEFINE_string(
    "run", None, "Directory of the run.", required=True
  )

  def main(argv: list[str]) -> None:
    """Writes the page and prints where it is."""
    del argv
    try:
      print(write(pathlib.Path(_RUN.value)))
    except OSError as error:
      sys.exit(f"error: {error}")

  app.run(main)
