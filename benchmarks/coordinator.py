"""The cost of the coordinator on one core: turns a second, and memory.

  python -m benchmarks.coordinator [--turns=100000] [--trajectories=1000000]

The coordinator, producer, player, router, graders, prompts and event log of a
run, over an engine and environments that answer at once, so that only the work
of the event loop is left. The trainer takes no time; events and spans go to
files. Episodes have 8 turns, groups 8 members, rounds 16 groups. Cases:

  sync        one round after the other
  in flight   eta = 1
  yielding    the same, but each answer comes after a turn of the event loop
  checked     the same, while the log is checked and the tokens are counted
  packed      the same, and trained groups become packed rows

Rates are over CPU seconds of the process, which has one busy thread. They are
profiled by a sample every millisecond of CPU time, which counts for the
innermost file of ours on the stack, or else for the event loop. Then
`--trajectories` of one turn are played, and resident memory is read after every
round. Writes benchmarks/results/coordinator.json.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import os
import pathlib
import resource
import signal
import statistics
import tempfile
import time
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import at_once, machine
from envs.rewards import rewards
from rl.algorithms import advantages, group_filters, presets
from rl.audit import checker, event_log, token_ledger
from rl.engine import contract
from rl.loop import coordinator
from rl.loop import progress as progress_lib
from rl.pools import router, weight_publisher
from rl.rollout import grading, group_rollout, prompts
from rl.runtime import mesh_thread, trace
from rl.runtime import watchdog as watchdog_lib
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import fakes
from rl.train import trainer as trainer_lib

_TURNS = absl_flags.DEFINE_integer("turns", 100_000, "Played in each case.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 3, "Of each case.")
_TRAJECTORIES = absl_flags.DEFINE_integer(
  "trajectories", 1_000_000, "Played for the memory; 0 leaves it out."
)

_GROUPS, _MEMBERS, _EPISODE = 16, 8, 8
_SAMPLE_S = 0.001
_ROOT = str(pathlib.Path(__file__).parents[1]) + os.sep
_OURS = ("rl", "models", "envs", "benchmarks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """The settings of one measured run.

  Attributes:
    turns: of an episode.
    yields: answers of engine and environment come in a later turn of the loop.
    checked: the invariants and the ledger listen to the log.
    packed: groups are packed into rows, as for a learner.
  """

  schedule: overlap.Overlap
  turns: int = _EPISODE
  yields: bool = False
  checked: bool = False
  packed: bool = False


_FLYING = overlap.in_flight(_GROUPS, 1)
CASES = {
  "sync": Case(schedule=overlap.sync(_GROUPS)),
  "in flight": Case(schedule=_FLYING),
  "yielding": Case(schedule=_FLYING, yields=True),
  "checked": Case(schedule=_FLYING, yields=True, checked=True),
  "packed": Case(schedule=_FLYING, yields=True, packed=True),
}


class _Watcher(progress_lib.RunObserver):
  """An observer that keeps counts, and the memory after each round."""

  def __init__(self):
    self.turns = self.trajectories = 0
    self.memory: list[tuple[int, int]] = []

  async def on_round(self, trained: progress_lib.TrainedRound) -> None:
    members = [t for group in trained.groups for t in group.trajectories]
    self.trajectories += len(members)
    self.turns += sum(len(t.turns) for t in members)
    self.memory.append((self.trajectories, _resident()))


def _resident() -> int:
  """Returns the bytes of memory that this process holds now."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * resource.getpagesize()


class _Run:
  """The parts of a run, wired as `assemble` does."""

  def __init__(self, case: Case, rounds: int, folder: pathlib.Path):
    clock = asyncio.get_running_loop().time
    self._case, self._rounds = case, rounds
    self._spans = trace.Trace(folder / "spans.jsonl")
    self._watchdog = watchdog_lib.Watchdog()
    self._source = at_once.Games(case.turns, case.yields)
    self._tasks = prompts.Prompts(self._source, 0)
    self._thread: mesh_thread.MeshThread | None = None
    self.watcher = _Watcher()
    self.log = event_log.EventLog(folder / "events.jsonl", clock=clock)
    self.checker = checker.Checker(case.schedule, _MEMBERS)
    self.ledger = token_ledger.LedgerBuilder()
    if case.checked:
      self.log.listeners += [self.checker.observe, self.ledger.observe]
    # An engine of which nothing else is asked.
    served = typing.cast(contract.DecodeEngine, at_once.Engine(case.yields))
    self._router = router.Router([served], log=self.log)

  async def play(self) -> None:
    """Plays all rounds."""
    trainer, state = self._trainer()
    loop = coordinator.Coordinator(
      coordinator.LoopSettings(
        schedule=self._case.schedule,
        rounds=self._rounds,
        seed=0,
        progress_timeout_s=60.0,
        success=1.0,
        num_engines=len(self._router.engines),
        group_filter=group_filters.keep_all,
      ),
      trainer=trainer,
      publisher=weight_publisher.WeightPublisher(
        self._router,
        simulated_learner.SimulatedTransfer(0.0),
        self.log,
        self._spans,
      ),
      player=self._player(),
      tasks=self._tasks,
      log=self.log,
      spans=self._spans,
      watchdog=self._watchdog,
      observer=self.watcher,
    )
    try:
      await loop.run(progress_lib.beginning(state, self._tasks.cursor))
    finally:
      self.log.flush()
      if self._thread is not None:
        self._thread.close()

  def _player(self) -> group_rollout.Player:
    return group_rollout.Player(
      source=self._source,
      router=self._router,
      chat=at_once.CHAT,
      graders=grading.Graders(rewards.Outcome(), watchdog=self._watchdog),
      limits=group_rollout.Rollout(
        group_size=_MEMBERS, max_turns=self._case.turns + 1, max_tokens=256
      ),
      log=self.log,
      watchdog=self._watchdog,
      progress_timeout_s=60.0,
      priority=overlap.priority(self._case.schedule),
    )

  def _trainer(self) -> tuple[trainer_lib.Trainer, Any]:
    """Returns a trainer and the state that it begins with."""
    if not self._case.packed:
      free = simulated_learner.LearnerSpeed(token_s=0.0, update_s=0.0)
      return simulated_learner.SimulatedTrainer(free, self._spans), 0
    self._thread = mesh_thread.MeshThread("learner", self._spans)
    programs = fakes.FakeLearner()
    settings = trainer_lib.TrainerSettings(
      rows=16,
      length=256,
      share_prompts=False,
      probe_rows=0,
      max_staleness=self._case.schedule.max_staleness,
      old_logprob=self._case.schedule.old_logprob,
    )
    trainer = trainer_lib.MeshTrainer(
      settings,
      programs,
      self._thread,
      estimator=advantages.Grpo(),
      objective=presets.Grpo(),
    )
    return trainer, programs.abstract


async def _play(
  case: Case, rounds: int, samples: collections.Counter[str] | None = None
) -> tuple[_Run, float]:
  """Returns a run and its CPU seconds; where they went is added to samples."""
  with tempfile.TemporaryDirectory() as folder:
    run = _Run(case, rounds, pathlib.Path(folder))
    start = time.process_time()
    with _sampled(samples):
      await run.play()
    return run, time.process_time() - start


@contextlib.contextmanager
def _sampled(samples: collections.Counter[str] | None) -> Iterator[None]:
  """Counts the files in which the body of a `with` spends CPU time."""
  if samples is None:
    yield
    return

  def look(number: int, frame: Any) -> None:
    del number
    samples[_file(frame)] += 1

  before = signal.signal(signal.SIGPROF, look)
  signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, before)


def _file(frame: Any) -> str:
  """Returns the innermost of our files on a stack."""
  # Below that is who called asyncio.run: a file of ours too.
  while frame is not None and frame.f_code.co_name != "run_forever":
    path = frame.f_code.co_filename.removeprefix(_ROOT)
    if path.partition(os.sep)[0] in _OURS:
      return path.removesuffix(".py")
    frame = frame.f_back
  return "event loop"


def _measure(case: Case) -> dict[str, Any]:
  """Returns the rates of a case, and microseconds of a turn by file."""
  rounds = max(2, _TURNS.value // (_GROUPS * _MEMBERS * case.turns))
  asyncio.run(_play(case, 2))  # Imports what is imported late.
  seconds, run = [], None
  for _ in range(_REPEATS.value):
    gc.collect()
    run, one = asyncio.run(_play(case, rounds))
    seconds.append(one)
  assert run is not None
  if case.checked and (found := run.checker.finish()):
    raise RuntimeError(f"the run broke its promises: {found[:3]}")
  each = statistics.median(seconds) / run.watcher.turns
  samples: collections.Counter[str] = collections.Counter()
  asyncio.run(_play(case, rounds, samples))
  return {
    "turns_per_s": 1 / each,
    "trajectories_per_s": 1 / each / case.turns,
    "turns_per_s_worst": run.watcher.turns / max(seconds),
    "us_per_turn": 1e6 * each,
    "turns": run.watcher.turns,
    "us_per_turn_by_file": {
      name: 1e6 * each * count / samples.total()
      for name, count in samples.most_common()
    },
  }


def _remember(trajectories: int) -> dict[str, Any]:
  """Returns how much memory a long run holds, and how fast that grows."""
  rounds = trajectories // (_GROUPS * _MEMBERS)
  case = Case(schedule=_FLYING, turns=1, yields=True)
  asyncio.run(_play(case, 20))
  gc.collect()
  run, seconds = asyncio.run(_play(case, rounds))
  counts, held = np.array(run.watcher.memory, np.float64).T
  half = len(counts) // 2
  marks = {"1%": 0.01, "10%": 0.1, "50%": 0.5, "100%": 1.0}
  return {
    "trajectories": int(counts[-1]),
    "trajectories_per_s": float(counts[-1]) / seconds,
    "resident_mib": {
      name: float(held[round(share * (len(held) - 1))]) / 2**20
      for name, share in marks.items()
    },
    "bytes_per_trajectory": {
      "10% to 100%": _slope(counts[len(counts) // 10 :], held),
      "50% to 100%": _slope(counts[half:], held),
    },
  }


def _slope(x: np.ndarray, y: np.ndarray) -> float:
  """Returns the slope of a line through the last values of y."""
  return float(np.polyfit(x, y[-len(x) :], 1)[0])


def main(_: list[str]) -> None:
  """Measures, prints and keeps both."""
  print(machine.describe())
  # First, while the process has held nothing else.
  memory = _remember(_TRAJECTORIES.value) if _TRAJECTORIES.value else {}
  for name, value in memory.items():
    print(f"  {name:24}{value}", flush=True)
  cases = {name: _measure(case) for name, case in CASES.items()}
  print(f"  {'':24}" + "".join(f"{name:>11}" for name in cases))
  for name in ("turns_per_s", "trajectories_per_s", "us_per_turn"):
    cells = "".join(f"{row[name]:11,.1f}" for row in cases.values())
    print(f"  {name:24}{cells}")
  files = collections.Counter[str]()
  for row in cases.values():
    files.update(row["us_per_turn_by_file"])
  for name in dict(files.most_common(20)):
    each = [row["us_per_turn_by_file"].get(name, 0.0) for row in cases.values()]
    print(f"  {name:24}" + "".join(f"{value:11.2f}" for value in each))
  machine.keep(
    "coordinator",
    groups=_GROUPS,
    members=_MEMBERS,
    cases=cases,
    memory=memory,
  )


if __name__ == "__main__":
  app.run(main)
