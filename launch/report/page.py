"""A run directory as data of its page, as one static page, and as a picture.

  read -> RunRecords -> data -> JSON, for the page that `launch.view` serves
                          +-> frozen.page: the same page as one file

A run that still goes on or has crashed has a page too, which names the missing
parts on top.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch.cli import run_repair, workdir
from launch.report import (
  bubbles,
  frozen,
  learning_curve,
  learning_section,
  log_check,
  metric_docs,
  run_files,
  thinning,
  trajectory_index,
  warm_start_section,
)
from models import untrusted_files
from rl.runtime import segments, trace
from twinmesh import error_codes

_MAX_SPANS = 50_000
_MAX_BUBBLES = 20_000
_MAX_POINTS = 2000
_MAX_EVALUATIONS = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecords:
  """The contents of a run directory; missing parts are empty.

  Attributes:
    metrics: one row a round, in order; a repeated round counts once.
    evaluations: one row each, in order, of those that graded an episode.
    spans: with those of a long run left out but for the middle.
    verdict: on the event log; None without one.
    gaps: a sample of comparisons, see `run_files.sample_gaps`.
    warm_start: one row a step, in order.
    notes: sentences about missing or unreadable parts, and failures.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  metrics: Sequence[Mapping[str, Any]]
  evaluations: Sequence[Mapping[str, Any]]
  spans: run_files.RunSpans
  verdict: log_check.Verdict | None
  gaps: Sequence[Mapping[str, Any]]
  warm_start: run_files.Rows
  notes: Sequence[str]


def read(
  path: pathlib.Path,
  verdict: log_check.Verdict | None = None,
  *,
  log: bool = True,
) -> RunRecords:
  """Reads a run directory, whatever state it is in.

  Args:
    verdict: on its event log; None: the log is read.
    log: False leaves the log out, which takes longest; see `with_log`.
  """
  run = _without_log(path)
  return with_log(run, verdict) if log or verdict else run


def with_log(
  run: RunRecords, verdict: log_check.Verdict | None = None
) -> RunRecords:
  """Returns a run that was read without its log, and the verdict on that.

  Args:
    verdict: None: the log is read.
  """
  notes = [*run.notes]
  if verdict is None:
    verdict = _verdict(run.path, run.config, notes)
  if verdict and verdict.deleted:
    notes.append(f"{verdict.deleted}.")
  if verdict and verdict.num_cut:
    notes.append(f"events.jsonl: unreadable lines left out: {verdict.num_cut}.")
  return dataclasses.replace(run, verdict=verdict, notes=notes)


def _without_log(path: pathlib.Path) -> RunRecords:
  notes: list[str] = []
  try:
    config = run_files.settings(path)
  except untrusted_files.BadFile:
    config = {}
    notes.append("config.json is missing or unreadable.")
  if error := workdir.failure_line(path):
    notes.append(f"The run failed: {error.removeprefix(error_codes.ERROR)}")
  # A run of no rounds has none of these to miss.
  told = [] if config.get("rounds") == 0 else notes
  rounds = run_files.numbered(path / "metrics.jsonl", told)
  evaluations = run_files.numbered(path / "evaluations.jsonl", told)
  notes += [
    f"The evaluation of version {number} graded no episode: "
    f"{row.get('fault') or 'all ended in faults'}."
    for number, row in evaluations.items()
    if row.get("success") is None
  ]
  spans = run_files.spans(path / "spans.jsonl", notes)
  metrics = [*map(_numbers, rounds.values())]
  notes += learning_section.crossings(metrics, config)
  notes += learning_section.complaints(metrics, path)
  return RunRecords(
    path=path,
    config=config,
    metrics=metrics,
    evaluations=[
      row
      for row in map(_numbers, evaluations.values())
      if None not in map(row.get, ("success", "low", "high"))
    ],
    spans=spans,
    verdict=None,
    gaps=run_files.sample_gaps(
      path / "logprob_gap.jsonl", rounds.keys(), notes
    ),
    warm_start=warm_start_section.read(path, notes),
    notes=notes,
  )


def _numbers(row: Mapping[str, Any]) -> dict[str, float | None]:
  """Returns a row with None for what is no number, as a text or a list."""
  return {
    name: value if isinstance(value, int | float) else None
    for name, value in row.items()
  }


def _verdict(
  path: pathlib.Path, config: Mapping[str, Any], notes: list[str]
) -> log_check.Verdict | None:
  """Returns the verdict on the event log, and notes missing parts."""
  log = path / "events.jsonl"
  try:
    is_there = segments.exists(log)
  except segments.Damaged as error:
    notes.append(f"{error}.")
    return None
  if not is_there:
    notes.append(f"{log.name} is {run_files.lack(log)}.")
    return None
  schedule, group_size = None, 0
  try:
    schedule, group_size = log_check.schedule_of(config)
  except (LookupError, ValueError, TypeError, AttributeError):
    notes.append("config.json has no schedule to check the events against.")
  try:
    return log_check.read_whole(path, schedule, group_size)
  except log_check.UnreadableLog as error:
    notes.append(f"{error}.")
    return None


def tiles(run: RunRecords) -> list[tuple[str, str, str]]:
  """Returns (label, value, note) of the outcomes on top of the page."""
  started = warm_start_section.tiles(run.warm_start)
  if run.config.get("rounds") == 0 and not run.metrics:
    return started

  column = functools.partial(run_files.column, run.metrics)

  def median(key: str) -> str:
    values = column(key)
    return f"{statistics.median(values):,.0f}" if values else "–"

  success, interval = "–", "no evaluation"
  if run.evaluations:
    first, last = run.evaluations[0], run.evaluations[-1]
    success = f"{last['success']:.0%}"
    if first is not last:
      success = f"{first['success']:.0%} → {success}"
    interval = f"held out; last {last['low']:.0%} to {last['high']:.0%}"
  wall, gaps = column("time_s"), column("logprob_gap_max")
  both = run.spans.work
  busy = (
    f"busy in the rounds: learner {both.first_s:,.0f} s, "
    f"decode {both.second_s:,.0f} s"
  )
  return [
    ("Success", success, interval),
    *started,
    *learning_section.tiles(run.metrics),
    ("Rounds", f"{len(run.metrics):,}", f"{_trained(run):,} groups trained"),
    ("Wall time", _duration(max(wall)) if wall else "–", "to the last round"),
    ("Overlap", f"{both.share:.0%}" if run.spans.count else "–", busy),
    ("Decode", median("decode_tokens_per_s"), "tokens/s, median"),
    ("Learner", median("learner_tokens_per_s"), "tokens/s, median"),
    (
      "Log-prob gap",
      f"{max(gaps):.2g}" if gaps else "–",
      "nats, largest, engine to learner",
    ),
    *(_verdict_tiles(run.verdict) if run.verdict else _NO_VERDICT),
  ]


_NO_VERDICT = [
  (name, "–", "no event log")
  for name in ("Largest lag", "Faults", "Useful tokens", "Invariants")
]


def _verdict_tiles(verdict: log_check.Verdict) -> list[tuple[str, str, str]]:
  """Returns the outcomes in the event log."""
  ledger, bound, broken = verdict.ledger, verdict.bound, verdict.violations
  kinds = ", ".join(f"{kind} {n}" for kind, n in verdict.faults.items())
  useful = f"{ledger.trained / ledger.sampled:.0%}" if ledger.sampled else "–"
  masked, dropped = (
    ", ".join(f"{why} {n:,}" for why, n in parts.items() if n)
    for parts in (ledger.causes, ledger.dropped)
  )
  held = f"{len(verdict.checks)} checked" if verdict.checks else "not checked"
  return [
    (
      "Largest lag",
      str(max(verdict.lags)) if verdict.lags else "–",
      "rounds" if bound is None else f"rounds; the bound is {bound}",
    ),
    ("Faults", f"{verdict.faults.total():,}", kinds),
    (
      "Useful tokens",
      useful,
      f"of {ledger.sampled:,}; masked: {masked or 'none'}; "
      f"dropped: {dropped or 'none'}",
    ),
    ("Invariants", f"{len(broken)} broken" if broken else "hold", held),
  ]


def _trained(run: RunRecords) -> int:
  return run.verdict.lags.total() if run.verdict else 0


def _duration(seconds: float) -> str:
  """Returns "2 h 5 min", "3 min 20 s" or "12 s"."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours} h {minutes} min"
  return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _curves(rows: run_files.Rows) -> dict[str, Any]:
  """Returns the metrics of a page, and the rounds that a point stands for.

  Every numeric key of the rows is a column, success first; `tokens` are those
  sampled until then.
  """
  keys = dict.fromkeys(["round", "success"])
  for row in rows:
    keys |= {key: None for key, x in row.items() if isinstance(x, int | float)}
  sampled = [x or 0.0 for x in _column(rows, "sampled_tokens")]
  tokens = list(itertools.accumulate(sampled)) if any(sampled) else []
  return {
    "metrics": {
      key: thinning.values(key, _column(rows, key), _MAX_POINTS) for key in keys
    },
    "tokens": thinning.places(tokens, _MAX_POINTS),
    "every": thinning.every(len(rows), _MAX_POINTS),
  }


def _column(rows: run_files.Rows, key: str) -> list[float | None]:
  values = (row.get(key) for row in rows)
  return [x if isinstance(x, int | float) else None for x in values]


def timeline(spans: Sequence[trace.Span], total: int) -> dict[str, Any]:
  """Returns spans as rows of numbers, for timeline.js; of many, the middle.

  Args:
    total: number of spans of the whole run.
  """
  spans = sorted(spans, key=lambda span: span.start)
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
    "total": total,
    "window": learning_curve.window(spans),
  }


def _bubbles(run: RunRecords) -> dict[str, Any]:
  """Returns the idle time of both meshes, and bubbles beside the timeline."""
  is_tuning = run.config.get("rounds") == 0  # No gate, no engine to wait for.
  if not run.spans.count or not run.verdict or is_tuning:
    return {}
  found, causes = {}, list(bubbles.CAUSES)
  spans, phases = run.spans.middle, run.verdict.phases
  for mesh, time in bubbles.find(spans, phases).items():
    # In a picture only the long ones can be seen.
    longest = sorted(time.bubbles, key=lambda b: b[0] - b[1])[:_MAX_BUBBLES]
    found[mesh] = {
      "seconds": round(time.seconds, 3),
      "busy_s": round(time.busy_s, 3),
      "causes": {name: round(s, 3) for name, s in time.causes.items()},
      "rows": [
        [round(start, 4), round(end, 4), causes.index(cause)]
        for start, end, cause in sorted(longest)
      ],
    }
  return {"causes": bubbles.CAUSES, "meshes": found}


def _ledger(verdict: log_check.Verdict | None) -> dict[str, Any] | None:
  """Returns the fate of all sampled tokens; None without a log."""
  if verdict is None or not verdict.ledger.sampled:
    return None
  ledger = verdict.ledger
  return {
    "sampled": ledger.sampled,
    "trained": ledger.trained,
    "masked": {why: n for why, n in ledger.causes.items() if n},
    "dropped": {why: n for why, n in ledger.dropped.items() if n},
    "in_flight": ledger.in_flight,
  }


def data(run: RunRecords) -> dict[str, Any]:
  """Returns the data of the page of a run, but for its trajectories."""
  verdict, curves = run.verdict, _curves(run.metrics)
  return {
    "title": run.path.resolve().name,
    "notes": run.notes,
    "tiles": tiles(run),
    "config": run.config,
    **curves,
    "meanings": metric_docs.explain(list(curves["metrics"])),
    "evaluations": thinning.places(run.evaluations, _MAX_EVALUATIONS),
    "every_evaluation": thinning.every(len(run.evaluations), _MAX_EVALUATIONS),
    "warm_start": warm_start_section.section(run.warm_start),
    "timeline": timeline(run.spans.middle, run.spans.count),
    "bubbles": _bubbles(run),
    "lags": {
      "counts": sorted(verdict.lags.items()) if verdict else [],
      "bound": verdict.bound if verdict else None,
    },
    "lengths": verdict.census.lengths() if verdict else [],
    "ledger": _ledger(verdict),
    "faults": verdict.census.faults if verdict else [],
    "groups": verdict.groups if verdict else [],
    "violations": verdict.violations if verdict else [],
    "gaps": run.gaps,
  }


def page(run: RunRecords) -> str:
  """Returns the report as one self-contained HTML page."""
  notes, used = [*run.notes], run.verdict.census.used if run.verdict else {}
  # A run of no rounds has no trajectories to miss.
  told = [] if run.config.get("rounds") == 0 else notes
  sample = trajectory_index.sample(run.path, told, used)
  run = dataclasses.replace(run, notes=notes)
  return frozen.page(
    run.path.resolve().name,
    {
      "run": data(run),
      "index": {
        "columns": trajectory_index.COLUMNS,
        "rows": [row for row, _ in sample],
        "is_sample": True,
      },
      "details": [detail for _, detail in sample],
    },
  )


def write(
  run_dir: pathlib.Path, verdict: log_check.Verdict | None = None
) -> pathlib.Path:
  """Writes report.html and learning_curve.svg; returns the page's path.

  Args:
    verdict: on its event log; None: the log is read.

  Raises:
    OSError: they cannot be written.
  """
  run = read(run_dir, verdict)
  picture = learning_curve.draw(run.metrics, run.evaluations, run.spans)
  run_repair.write(run_dir / "learning_curve.svg", picture)
  target = run_dir / "report.html"
  run_repair.write(target, page(run))
  return target


def check_run(run_dir: pathlib.Path) -> int:
  """Prints the ledger, the checks and all violations; returns the exit code.

  0: no violations; 1: violations; 2: the run cannot be checked.
  """
  try:
    verdict = log_check.of_run(run_dir)
  except log_check.UnreadableLog as error:
    print(error_codes.text(error), file=sys.stderr)
    return 2
  print(verdict.text)
  return 1 if verdict.violations else 0
