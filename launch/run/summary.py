"""What is said, and left behind, when a run ends: verdict, trace, report."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from launch.report import log_check
from launch.report import page as report_page
from rl.runtime import trace

Log = Callable[[str], None]


def conclude(run_dir: pathlib.Path, work: trace.TrackOverlap, log: Log) -> int:
  """Leaves trace and report; returns 1 when an invariant broke.

  Args:
    run_dir: its log and spans are on disk.
    work: of learner and engines over the whole run.
  """
  if work.first_s:  # Of rounds, and there may have been none.
    log(
      f"learner busy {work.first_s:.1f} s, decode busy {work.second_s:.1f} s,"
      f" both at once {work.both_s:.1f} s ({work.share:.0%} of the shorter)"
    )
  trace.write_chrome(
    trace.File(run_dir / "spans.jsonl"), run_dir / "trace.json"
  )
  verdict = log_check.of_run(run_dir)
  log(f"report: {report_page.write(run_dir, verdict)}")
  return print_verdict(verdict, log)


def print_verdict(verdict: log_check.Verdict, log: Log) -> int:
  """Says what the log shows; returns 1 when an invariant broke."""
  log(verdict.summary)
  for line in verdict.violations:
    log(f"error: {line}")
  return 1 if verdict.violations else 0


@contextlib.contextmanager
def report_on_failure(
  run_dir: pathlib.Path, flush: Callable[[], None], log: Log
) -> Iterator[None]:
  """Says what the log shows before an exception of the body goes on.

  There is a report of such a run, too.

  Args:
    flush: brings log and spans to disk.
  """
  try:
    yield
  except Exception:
    try:
      flush()
      verdict = log_check.of_run(run_dir)
      print_verdict(verdict, log)
      log(f"report: {report_page.write(run_dir, verdict)}")
    except (
      OSError,
      log_check.UnreadableLog,
    ) as error:  # Not what ended the run.
      log(f"the log was not checked: {error}")
    raise
