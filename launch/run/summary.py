"""Writes trace and report when a run ends, and prints the verdict."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launch.cli import workdir
from launch.report import log_check, run_files
from launch.report import page as report_page
from rl.runtime import segments, trace
from twinmesh import error_codes

Log = Callable[[str], None]


def conclude(run_dir: pathlib.Path, work: trace.TrackOverlap, log: Log) -> int:
  """Writes trace and report; returns 1 if an invariant broke, else 0.

  Args:
    run_dir: holds the event log and spans, flushed.
    work: busy times of learner and engines in the rounds of this process.
  """
  if work.first_s:  # Zero if there were no rounds.
    log(
      f"busy in this process: learner {work.first_s:.1f} s, decode "
      f"{work.second_s:.1f} s, both at once {work.both_s:.1f} s "
      f"({work.share:.0%} of the shorter)"
    )
  _log_metrics(run_dir, log)
  try:
    trace.write_chrome(
      trace.read(run_dir / "spans.jsonl"), run_dir / "trace.json"
    )
  except segments.Damaged as error:
    log(f"trace.json was not written: {error}")
  verdict = log_check.of_run(run_dir)
  log(f"report: {report_page.write(run_dir, verdict)}")
  return print_verdict(verdict, log)


def _log_metrics(run_dir: pathlib.Path, log: Log) -> None:
  """Logs the groups that taught nothing, and what rewards elsewhere cost."""
  flat = groups = 0.0
  row: Mapping[str, Any] = {}
  for row in run_files.lines(run_dir / "metrics.jsonl", [], round=int):
    flat += row.get("zero_variance_groups") or 0
    groups += row.get("groups") or 0
  if groups:
    why = "; their members did equally well, so they taught nothing"
    log(
      f"zero-variance groups: {flat:,.0f} of {groups:,.0f} "
      f"({flat / groups:.0%}){why if flat else ''}"
    )
  costs = {
    name.removeprefix("rewards/"): value
    for name, value in row.items()
    if name.startswith("rewards/")
  }
  if "offloaded_calls" in costs:
    log(
      f"rewards elsewhere: {costs['offloaded_calls']:,.0f} calls, "
      f"{costs['billed_s']:,.1f} s billed, {costs['cold_starts']:,.0f} cold "
      f"starts, {costs['hedges']:,.0f} hedges; {costs['retries']:,.0f} "
      f"retries, {costs['faults']:,.0f} faults"
    )


def print_verdict(verdict: log_check.Verdict, log: Log) -> int:
  """Logs the verdict on the event log; returns 1 if an invariant broke."""
  if verdict.ledger.sampled:
    log(verdict.summary)
  if not verdict.violations:
    return 0
  log(error_codes.text("\nerror: ".join(verdict.violations), "TM-R09"))
  return 1


@contextlib.contextmanager
def report_on_failure(
  run_dir: pathlib.Path, flush: Callable[[], None], log: Log
) -> Iterator[None]:
  """Keeps an error of the body, checks the event log and writes the report.

  Args:
    flush: writes log and spans to disk.
  """
  try:
    yield
  except Exception as error:
    try:
      flush()
      # The page says why the run ended.
      workdir.keep_failure(run_dir, error_codes.text(error))
      verdict = log_check.of_run(run_dir)
      print_verdict(verdict, log)
      log(f"report: {report_page.write(run_dir, verdict)}")
    except (OSError, log_check.UnreadableLog) as error:  # Keep the first error.
      log(f"the log was not checked: {error}")
    raise
