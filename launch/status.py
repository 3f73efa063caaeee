"""Tells who waits for what in a run: python -m launch.status RUN.

The process of the run answers, on the same host, also while its event loop is
blocked; then the place that blocks it is printed. Waits that differ only in
numbers share a line, with the longest of them. The exit code is 1 if no
process works on the run.
"""

import collections
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import app

from launch.cli import flags, workdir
from launch.report import run_files
from launch.run import status_server
from models import untrusted_files
from rl.runtime import watchdog
from rl.settings import overrides

_MAX_LINES = 40


@flags.exit_on_interrupt()
def main(argv: Sequence[str]) -> None:
  """Asks the process of the run, and prints its answer."""
  with flags.exit_on_setting_error():
    if len(argv) != 2:
      raise overrides.SettingError("name the directory of one run")
    run_dir = pathlib.Path(argv[1])
    rounds = _rounds(run_dir)
  try:
    state, why = status_server.ask(run_dir), ""
  except FileNotFoundError:
    state, why = None, ""
  except ConnectionRefusedError:
    state, why = None, "its process is gone; the same command goes on"
  except OSError as error:
    state, why = None, f"no process answers ({error.strerror or error})"
  lines = list(told(run_dir, rounds, state, why, time.time()))
  print("\n".join(lines))
  sys.exit(state is None)


def _rounds(run_dir: pathlib.Path) -> int:
  """Returns the rounds of a run by its settings, which are not run.

  Raises:
    SettingError: no run is there, or its settings cannot be read.
  """
  workdir.check_exists(run_dir)
  try:
    rounds = run_files.settings(run_dir).get("rounds")
  except untrusted_files.BadFile as error:
    raise overrides.SettingError(str(error)) from error
  if type(rounds) is not int:
    raise overrides.SettingError(
      f"{run_dir}/config.json has no rounds; put that of the run back"
    )
  return rounds


def told(
  run_dir: pathlib.Path,
  rounds: int,
  state: Mapping[str, Any] | None,
  why: str,
  now_s: float,
) -> Iterator[str]:
  """Yields the lines of the answer.

  Args:
    rounds: that the run is to have; of one without any, steps are told.
    state: see `status_server.ask`; None if nothing answers.
    why: nothing does; "" if no process has said where it listens.
    now_s: seconds since the epoch.
  """
  word, name, of = "round", "metrics.jsonl", f" of {rounds}"
  if not rounds:
    word, name, of = "step", workdir.WARM_START_LINES, ""
  file = run_dir / name
  last, saved = _last(file, word), workdir.saved_rounds(run_dir)
  steps = workdir.saved_rounds(run_dir, workdir.WARM_START)
  if state is not None:
    yield f"{run_dir}: {state['doing']}, process {state['pid']}"
  elif failure := workdir.failure(run_dir):
    yield f"{run_dir}: the run has failed; the same command goes on"
    yield from failure.splitlines()
  elif why:
    yield f"{run_dir}: {why}"
  elif last >= rounds if rounds else saved:
    yield f"{run_dir}: the run has ended, {last}{of} {word}s"
  else:
    yield f"{run_dir}: no process answers; the same command goes on"
  if last:
    ago_s = now_s - file.stat().st_mtime
    yield f"{word} {last}{of} ended {ago_s:.0f} s ago"
  else:
    yield f"no {word}{of} has ended"
  newest = [f"step {step} of the warm start" for step in steps[-1:]]
  newest += [f"round {round_}" for round_ in saved[-1:]]
  yield f"newest checkpoint: {newest[-1] if newest else 'none'}"
  if state is not None:
    yield from state["engines"]
    yield ""
    yield watchdog.table(grouped(state["waits"]), 0.0)
    if state["stack"]:
      yield f"\nthe event loop is blocked in:\n{state['stack'].rstrip()}"


def _last(file: pathlib.Path, key: str) -> int:
  rows = collections.deque(run_files.lines(file, [], **{key: int}), maxlen=1)
  return int(rows[0][key]) if rows else 0


def grouped(waits: Iterable[Sequence[Any]]) -> list[watchdog.Wait]:
  """Returns the longest wait of each kind, with the number of the others.

  Args:
    waits: (owner, what, seconds waited, deadline in seconds).
  """
  kinds: dict[tuple[str, ...], list[Sequence[Any]]] = {}
  for wait in sorted(waits, key=lambda wait: -wait[2]):
    kind = tuple(re.sub(r"\d+", "0", text) for text in wait[:2])
    kinds.setdefault(kind, []).append(wait)
  longest = []
  for (owner, what, waited_s, deadline_s), *others in kinds.values():
    more = f" and {len(others):,} more" if others else ""
    longest.append(
      watchdog.Wait(
        owner=owner + more,
        what=what,
        since_s=-waited_s,
        deadline_s=deadline_s,
      )
    )
  return longest[:_MAX_LINES]


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse_without_settings)
