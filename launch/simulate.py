"""Runs a schedule on a simulated cluster, in virtual time.

  python -m launch.simulate --config=configs/simulated_3000.py
  python -m launch.simulate --config=FILE --config.overlap.max_staleness=2
  python -m launch.simulate --config=FILE --timeline=DIR

FILE has a get_config() that returns a `simulate.Simulation`; see
`rl.simulation.result` for the numbers printed. Nothing touches a device.
"""

import collections
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from absl import app
from absl import flags as absl_flags

from launch import simulated_timeline
from launch.cli import flags, steps, workdir
from rl.audit import event_log
from rl.runtime import trace, watchdog
from rl.simulation import result as simulation_result
from rl.simulation import simulate
from twinmesh import error_codes

_TIMELINE = absl_flags.DEFINE_string(
  "timeline",
  None,
  "Directory for timeline.json, to be opened with ui.perfetto.dev.",
)
absl_flags.adopt_module_key_flags(flags)
_RESULT = "TM-S10"
_CAUSES = {
  "publish": "new weights arrive",
  "drain": "requests end before that",
  "environments": "all sessions wait for theirs",
  "rewards": "all sessions have ended, and some are being graded",
  "gate": "no session: the staleness bound holds the next back",
  "data": "no groups are ready",
}


@flags.command
def main() -> None:
  """Simulates, prints the result and writes the timeline."""
  with flags.exit_on_setting_error():
    chosen = flags.load_from_command_line(check)
    if _TIMELINE.value is not None:
      directory = pathlib.Path(_TIMELINE.value)
      workdir.make_writable(directory, f"--timeline={directory}")
  try:
    with steps.Steps(sys.stderr) as shown:
      pause_s = 0.1 if shown.is_live else 5.0
      told = SimulationProgress(chosen.rounds, shown.phase, pause_s)
      record = simulate.simulate(chosen, listener=told.note, keep_turns=False)
  except watchdog.Stalled as stalled:
    limit = f"progress_timeout_s={chosen.progress_timeout_s:g}"
    code = error_codes.code_of(stalled)
    error_codes.fail(f"{limit}: {stalled}", code, status=1)
  result = simulation_result.measure(record)
  show(result, sys.stdout)
  if len(chosen.counted) % (chosen.overlap.max_staleness + 1):
    print(f"note: {_uneven(chosen)}", file=sys.stderr)
  columns = shutil.get_terminal_size((100, 24)).columns
  print(f"\n{simulated_timeline.text(record, columns)}")
  if _TIMELINE.value is not None:
    write(record, pathlib.Path(_TIMELINE.value))
  if not result.ledger.trained:
    error_codes.fail(_nothing(record), _RESULT, status=1)
  if result.violations:
    broken = f"the schedule broke {len(result.violations)} promises"
    error_codes.fail(broken, _RESULT, status=1)


class SimulationProgress:
  """Tells how far a simulation is; the event log calls `note`.

  Args:
    rounds: in all.
    report: is told of the round, about every `pause_s` of real time.
  """

  def __init__(
    self, rounds: int, report: Callable[[str], None], pause_s: float
  ):
    self._rounds, self._report, self._pause_s = rounds, report, pause_s
    self._due_s = time.monotonic() + pause_s
    self._trained = self._episodes = self._tokens = 0
    self._now_s = 0.0

  def note(self, event: event_log.Event) -> None:
    """Counts an event, and tells of it if that is due."""
    kind = event["kind"]
    self._now_s = max(self._now_s, event["t"])
    if kind in ("ended", "aborted"):
      self._episodes += 1
      self._tokens += event["tokens"]
    elif kind == "published":
      self._trained = event["version"]
    if time.monotonic() < self._due_s:
      return
    self._due_s = time.monotonic() + self._pause_s
    self._report(
      f"simulating round {self._trained}/{self._rounds}: {self._now_s:,.0f} s, "
      f"{self._episodes:,} episodes, {self._tokens:,} tokens"
    )


check = flags.instance_of(simulate.Simulation, "configs/simulated_3000.py")


def show(result: simulation_result.Result, stream: TextIO) -> None:
  """Prints a result as a table of names and numbers."""
  rows = [*lines(result)]
  width = max(len(name) for name, _ in rows)
  for name, value in rows:
    print(f"{name:<{width}}  {value}" if value else name, file=stream)
  for violation in result.violations:
    print(f"violation: {violation}", file=stream)


def lines(result: simulation_result.Result) -> Iterator[tuple[str, str]]:
  """Yields (name, value) of each line; a heading has no value."""
  yield (
    f"{result.accelerators:,} accelerators, means of {result.rounds} rounds, "
    "without those at both ends",
    "",
  )
  yield "step time T", f"{result.step_s:,.1f} s"
  yield "decode work D", f"{result.decode_s:,.1f} s"
  yield "training work W", f"{result.train_s:,.1f} s"
  yield (
    "publish s",
    f"{result.publish_s:,.1f} s, decoding blocked {result.blocked_s:,.1f} s",
  )
  yield "ideal T*", f"{result.ideal_s:,.1f} s"
  yield "T* / T", f"{result.efficiency:.1%}"
  if result.on_policy_s is not None:
    yield "on-policy bound", f"{result.on_policy_s:,.1f} s"
    yield "bound / T", f"{result.on_policy_efficiency:.1%}"
  yield "tokens of trained groups", f"{result.tokens_per_s:,.0f} /s"
  yield "decode slots in use", f"{result.decode_use:.1%}"
  yield "overlap of decoding and training", f"{result.overlap:.1%}"
  yield from _idle("decode", result.decode_idle)
  yield from _idle("learner", result.learner_idle)
  yield "staleness of groups", _lags(result.group_lags)
  yield "staleness of tokens", _lags(result.token_lags)
  yield "useful tokens", f"{result.useful:.1%} of those sampled"
  for name, share in result.prefill_use.items():
    yield f"prefill for {name} in use", f"{share:.1%}"
  if (seats := result.rewards) is not None:
    yield (
      "seats of rewards in use",
      f"{seats.use:.1%}, {seats.cold_starts:,} cold starts, "
      f"waits {seats.mean_wait_s:.1f} s, at most {seats.max_wait_s:.1f} s",
    )
  if (hosts := result.hosts) is not None:
    yield (
      "slots of hosts in use",
      f"{hosts.use:.1%}, {hosts.lost:,} environments lost, "
      f"waits {hosts.mean_wait_s:.1f} s, at most {hosts.max_wait_s:.1f} s",
    )
  faults = ", ".join(f"{kind} {n:,}" for kind, n in result.faults.items())
  yield "faults", f"{faults or 'none'}, of {result.episodes:,} episodes"
  yield "ledger", str(result.ledger)
  yield (
    "simulated",
    f"{result.virtual_s:,.0f} s in {result.real_s:,.1f} s: "
    f"{result.virtual_s / result.real_s:,.0f} times as fast",
  )
  yield (
    "each second",
    f"{result.events / result.real_s:,.0f} events, "
    f"{result.turns / result.real_s:,.0f} turns, "
    f"{result.jumps / result.real_s:,.0f} jumps of the clock",
  )


def write(record: simulate.RunRecord, directory: pathlib.Path) -> None:
  """Writes timeline.json into a directory."""
  path = directory / "timeline.json"
  trace.write_chrome(simulated_timeline.spans(record), path)
  print(f"\n{path}: open it with ui.perfetto.dev")


def _nothing(record: simulate.RunRecord) -> str:
  """Returns why no token was trained."""
  faults = [e["what"] for e in event_log.of_kind(record.events, "fault")]
  if not faults:
    return "no token was trained"
  what, count = collections.Counter(faults).most_common(1)[0]
  return (
    f"no token was trained: {len(faults):,} episodes ended with a fault, "
    f"{count:,} of them with: {what}"
  )


def _uneven(settings: simulate.Simulation) -> str:
  """Returns why the mean of these rounds may not be that of a longer run."""
  eta, count = settings.overlap.max_staleness, len(settings.counted)
  return (
    f"with overlap.max_staleness={eta} up to {eta + 1} rounds take turns, and "
    f"{count} are measured; rounds={settings.even_rounds} measures whole turns"
  )


def _idle(mesh: str, shares: Mapping[str, float]) -> Iterator[tuple[str, str]]:
  yield f"{mesh} idle", f"{sum(shares.values()):.1%}"
  for cause, share in shares.items():
    yield f"  {cause}", f"{share:.1%}  {_CAUSES[cause]}"


def _lags(lags: Mapping[int, int]) -> str:
  """Returns "0: 25.0%, 1: 75.0%"."""
  total = sum(lags.values()) or 1
  return ", ".join(f"{lag}: {n / total:.1%}" for lag, n in lags.items())


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
