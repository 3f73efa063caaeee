"""What is said, and left behind, when a run ends: verdict, trace, report."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from launch.report import log_check
from launch.report import page as report_page
from rl.runtime import trace

Say = Callable[[str], None]


def leave(run_dir: pathlib.Path, work: trace.Overlap, say: Say) -> int:
  """Leaves trace and report; returns 1 when an invariant broke.

  Args:
    run_dir: its log and spans are on disk.
    work: of learner and engines over the whole run.
  """
  if work.first_s:  # Of rounds, and there may have been none.
    say(
      f"learner busy {work.first_s:.1f} s, decode busy {work.second_s:.1f} s,"
      f" both at once {work.both_s:.1f} s ({work.share:.0%} of the shorter)"
    )
  trace.write_chrome(
    trace.File(run_dir / "spans.jsonl"), run_dir / "trace.json"
  )
  verdict = log_check.of_run(run_dir)
  say(f"report: {report_page.write(run_dir, verdict)}")
  return tell(verdict, say)


def tell(verdict: log_check.Verdict, say: Say) -> int:
  """Says what the log shows; returns 1 when an invariant broke."""
  say(verdict.summary)
  for line in verdict.violations:
    say(f"error: {line}")
  return 1 if verdict.violations else 0


@contextlib.contextmanager
def told_on_failure(
  run_dir: pathlib.Path, flush: Callable[[], None], say: Say
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
      tell(verdict, say)
      say(f"report: {report_page.write(run_dir, verdict)}")
    except (OSError, log_check.Unreadable) as error:  # Not what ended the run.
      say(f"the log was not checked: {error}")
    raise
