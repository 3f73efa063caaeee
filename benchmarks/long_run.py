"""Long runs: memory, files, threads, tasks and the disk, round by round.

  python -m benchmarks.long_run [--simulated_rounds=100000] [--minutes=20]
      [--folder=FOLDER]

A simulated run of the real coordinator, producer, gate, buffer, router and
event log: 2 groups of 2 members a round, a staleness of 1, and environments
that are slow or fail now and then. Its log is on disk, in segments, of which
the oldest are deleted on the way, and is checked at the end. Then a real run of
as many minutes, of the small model of the tests, in slices: in turn it is
stopped and killed, and the same command is given again. Its process is watched
from outside, and in the end its log is checked over all slices.

With a folder the real run is kept there, and a later call goes on with it until
it has trained for as many minutes in all: hours may take several sittings.

--simulated_rounds=0 or --minutes=0 leaves one of them out, and keeps its last
result. Writes benchmarks/results/long_run.json, drawn by `scripts.make_docs`.
"""

import asyncio
import collections
import contextlib
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from launch.report import log_check, run_files
from launch.run import log_retention, status_server
from rl.loop import progress as progress_lib
from rl.rollout import group_rollout
from rl.runtime import segments
from rl.schedule import overlap
from rl.settings import overrides
from rl.simulation import distributions, simulate, workload

_ROUNDS = absl_flags.DEFINE_integer(
  "simulated_rounds", 100_000, "Rounds to simulate."
)
_MINUTES = absl_flags.DEFINE_float("minutes", 20.0, "Of the real run.")
_FOLDER = absl_flags.DEFINE_string(
  "folder", None, "Keeps the real run, or goes on with it; else a new one."
)
_SLICE = absl_flags.DEFINE_float("slice", 5.0, "Minutes to a stop or a kill.")

_SAMPLES = 200
_GROUPS, _MEMBERS = 2, 2
_MIB = 2**20
_END_S = 300.0
# Small, so that the minutes of a real run fill several, and some are deleted.
_SEGMENT_BYTES = 4 * _MIB
_LOG_BYTES = 8 * _MIB
_SMALL = {
  "rounds": 1_000_000,
  "model.num_layers": 2,
  "model.d_model": 32,
  "model.d_expert": 32,
  "model.num_heads": 2,
  "model.head_dim": 16,
  "rollout.group_size": 4,
  "engine.slots": 32,
  "engine.row_buckets": "32,",
  "engine.chunk_buckets": "8,",
  "overlap.groups_per_round": 4,
  "overlap.groups_per_microbatch": 2,
  "batch.rows": 8,
  "warm_start": "none",
  "evaluation.episodes": 16,
  "evaluation.every": 100,
  "retention.segment_bytes": _SEGMENT_BYTES,
  "retention.log_bytes": _LOG_BYTES,
}
_ROOT = pathlib.Path(__file__).parents[1]

Sample = dict[str, float]


def _of_process(pid: int) -> Sample:
  """Returns memory, descriptors and threads of a process."""
  proc = pathlib.Path(f"/proc/{pid}")
  pages = int((proc / "statm").read_text().split()[1])
  return {
    "resident_mib": pages * resource.getpagesize() / _MIB,
    "descriptors": len(os.listdir(proc / "fd")),
    "threads": len(os.listdir(proc / "task")),
  }


def _logs_mib(run_dir: pathlib.Path) -> float:
  names = ("events.jsonl", "spans.jsonl")
  return sum(segments.num_bytes(run_dir / name) for name in names) / _MIB


class _Watcher(progress_lib.RunObserver):
  """Samples the process now and then, between rounds, and trims its logs."""

  def __init__(self, run_dir: pathlib.Path, rounds: int):
    self._dir, self._every = run_dir, max(1, rounds // _SAMPLES)
    self._start_s = time.perf_counter()
    self._retention = log_retention.LogRetention(run_dir, _LOG_BYTES)
    self.samples: list[Sample] = []

  async def on_boundary(self, progress: progress_lib.Progress) -> None:
    if progress.trained % self._every:
      return
    # There is no restart, so as if each round were saved.
    self._retention.trim(progress.trained)
    self.samples.append(
      {
        "round": progress.trained,
        "seconds": time.perf_counter() - self._start_s,
        **_of_process(os.getpid()),
        "tasks": len(asyncio.all_tasks()),
        # The arrays of a state have one size; this is all the rest.
        "checkpoint_kib": len(json.dumps(progress.to_host())) / 1024,
        "logs_mib": _logs_mib(self._dir),
      }
    )


def settings(rounds: int) -> simulate.Simulation:
  """Returns the simulated run."""
  return simulate.Simulation(
    workloads=(
      workload.Workload(
        turns=distributions.LogNormal(mean=2.0, sigma=0.5, max_value=6.0),
        prompt_tokens=distributions.Fixed(20.0),
        answer_tokens=distributions.LogNormal(
          mean=20.0, sigma=0.8, max_value=200.0
        ),
        step_s=distributions.LogNormal(mean=0.5, sigma=1.0),
        step_fault=0.005,
        reward_fault=0.005,
      ),
    ),
    overlap=overlap.in_flight(_GROUPS, 1),
    rollout=group_rollout.Rollout(
      group_size=_MEMBERS,
      max_turns=8,
      turn_tokens=1000,
      max_tokens=10_000,
      step_s=600.0,
    ),
    rounds=rounds,
  )


def simulated(rounds: int, run_dir: pathlib.Path) -> dict[str, Any]:
  """Returns the samples of a simulated run, and the verdict on its log."""
  chosen = settings(rounds)
  config = {
    "overlap": overrides.to_json(chosen.overlap),
    "rollout": {"group_size": _MEMBERS},
  }
  (run_dir / "config.json").write_text(json.dumps(config))
  watcher = _Watcher(run_dir, rounds)
  record = simulate.simulate(chosen, run_dir=run_dir, observer=watcher)
  start_s = time.perf_counter()
  verdict = log_check.of_run(run_dir)
  return {
    "rounds": rounds,
    "episodes": rounds * _GROUPS * _MEMBERS,
    "events": record.num_events,
    "events_disk_mib": segments.num_bytes(run_dir / "events.jsonl") / _MIB,
    "segments": len(segments.closed(run_dir / "events.jsonl")),
    "segments_deleted": segments.deleted(run_dir / "events.jsonl"),
    "whole_from": verdict.whole_from,
    "trained_groups": verdict.lags.total(),
    "violations": [*record.violations, *verdict.violations],
    "ledger_error": verdict.ledger.error,
    "real_s": record.real_s,
    "check_s": time.perf_counter() - start_s,
    "virtual_days": record.virtual_s / 86_400,
    "samples": watcher.samples,
    "growth": growth(watcher.samples),
  }


def growth(samples: Sequence[Sample]) -> dict[str, float]:
  """Returns the growth of each number from the second to the last quarter.

  Relative, of medians: 0.01 is 1% more.
  """
  quarter = len(samples) // 4
  if not quarter:
    return {}
  early, late = samples[quarter : 2 * quarter], samples[-quarter:]
  grown = {}
  for name in samples[0].keys() - {"round", "seconds", "slice"}:
    before = statistics.median(sample[name] for sample in early)
    after = statistics.median(sample[name] for sample in late)
    grown[name] = after / before - 1 if before else 0.0
  return dict(sorted(grown.items()))


def real(minutes: float, slice_minutes: float, folder: str) -> dict[str, Any]:
  """Returns the samples of a real run in slices, and the verdict on its log.

  What the folder holds of the run counts: it goes on from there.
  """
  run_dir = pathlib.Path(folder) / "run"
  kept = pathlib.Path(folder) / "slices.json"
  slices = json.loads(kept.read_text()) if kept.exists() else []
  while (left_s := 60 * minutes - sum(x["seconds"] for x in slices)) > 0:
    slice_s = min(left_s, 60 * slice_minutes)
    # The last one is asked to end, so that the log is whole.
    is_killed = len(slices) % 2 == 1 and slice_s < left_s
    slices.append(_slice(run_dir, slice_s, is_killed, len(slices)))
    kept.write_text(json.dumps(slices))
  samples = _one_after_the_other(slices)
  return {
    "minutes": minutes,
    "slices": len(slices),
    **_verdict(run_dir),
    "samples": _thinned(samples),
    # Of one slice: each is a process of its own.
    "growth": growth(_longest(samples)),
  }


def _verdict(run_dir: pathlib.Path) -> dict[str, Any]:
  """Returns what the run's own files say of all slices."""
  verdict = log_check.of_run(run_dir)
  rounds = [x["round"] for x in run_files.lines(run_dir / "metrics.jsonl", [])]
  return {
    "rounds": len(rounds),
    "rounds_once": rounds == list(range(1, len(rounds) + 1)),
    "events_disk_mib": segments.num_bytes(run_dir / "events.jsonl") / _MIB,
    "segments": len(segments.closed(run_dir / "events.jsonl")),
    "segments_deleted": segments.deleted(run_dir / "events.jsonl"),
    "segment_mib": _SEGMENT_BYTES / _MIB,
    "violations": verdict.violations,
    "ledger_error": verdict.ledger.error,
  }


def _slice(
  run_dir: pathlib.Path, seconds: float, is_killed: bool, number: int
) -> dict[str, Any]:
  """Lets the run go on for a while; returns how long, and its samples."""
  start_s = time.monotonic()
  samples: list[Sample] = []
  with _begun(run_dir) as process:
    for sample in _watched(process, run_dir, start_s + seconds):
      samples.append({"seconds": time.monotonic() - start_s, **sample})
    process.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
    code = process.wait(_END_S)
  if code != (-signal.SIGKILL if is_killed else 128 + signal.SIGTERM):
    log = (run_dir.parent / "output").read_text()[-2000:]
    raise RuntimeError(f"slice {number} ended with {code}: {log}")
  return {"seconds": seconds, "samples": samples}


def _one_after_the_other(slices: Sequence[Mapping[str, Any]]) -> list[Sample]:
  """Returns the samples of all slices, with the seconds of the whole run."""
  samples, before_s = [], 0.0
  for number, part in enumerate(slices):
    for sample in part["samples"]:
      seconds = before_s + sample["seconds"]
      samples.append({**sample, "seconds": seconds, "slice": number})
    before_s += part["seconds"]
  return samples


@contextlib.contextmanager
def _begun(run_dir: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
  """Starts the run, or lets it go on; it is not left behind."""
  arguments = [f"--config.{name}={value}" for name, value in _SMALL.items()]
  run_dir.parent.mkdir(parents=True, exist_ok=True)
  with (
    (run_dir.parent / "output").open("ab") as output,
    subprocess.Popen(
      [
        *(sys.executable, "-m", "launch.train"),
        "--config=configs/guess_number_moe.py",
        f"--workdir={run_dir}",
        *arguments,
      ],
      cwd=_ROOT,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
    ) as process,
  ):
    try:
      yield process
    finally:
      process.kill()


def _watched(
  process: subprocess.Popen[bytes], run_dir: pathlib.Path, until_s: float
) -> Iterator[Sample]:
  """Yields samples of a run until a time, once it trains."""
  before = None
  while time.monotonic() < until_s and process.poll() is None:
    # A process that begins, or is too busy to answer, is asked again.
    with contextlib.suppress(OSError):
      state = status_server.ask(run_dir)
      rounds = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
      before = rounds if before is None else before
      if rounds > before:
        yield {
          "round": rounds,
          **_of_process(process.pid),
          "waits": len(state["waits"]),
          "checkpoint_kib": _tree_bytes(run_dir / "checkpoints") / 1024,
          "logs_mib": _logs_mib(run_dir),
        }
    time.sleep(5.0)


def _tree_bytes(folder: pathlib.Path) -> int:
  """Returns the bytes of all files below a folder, which may change."""
  found = 0
  for file in folder.rglob("*"):
    with contextlib.suppress(OSError):
      found += file.stat().st_size if file.is_file() else 0
  return found


def _longest(samples: Sequence[Sample]) -> list[Sample]:
  """Returns the samples of the slice that has most."""
  counts = collections.Counter(sample["slice"] for sample in samples)
  ((longest, _),) = counts.most_common(1) or [(0, 0)]
  return [sample for sample in samples if sample["slice"] == longest]


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
  stride = -(-len(samples) // _SAMPLES) or 1
  return list(samples[::stride])


def _kept() -> Mapping[str, Any]:
  file = _ROOT / "benchmarks" / "results" / "long_run.json"
  return json.loads(file.read_text()) if file.exists() else {}


def main(_: list[str]) -> None:
  """Runs both, prints how they grew, and keeps them."""
  print(machine.describe())
  results = {name: _kept().get(name) for name in ("simulated", "real")}
  if _ROUNDS.value:
    with tempfile.TemporaryDirectory() as folder:
      results["simulated"] = simulated(_ROUNDS.value, pathlib.Path(folder))
    _tell("simulated", results["simulated"])
    machine.keep("long_run", **results)
  if _MINUTES.value:
    with tempfile.TemporaryDirectory() as new:
      folder = _FOLDER.value or new
      results["real"] = real(_MINUTES.value, _SLICE.value, folder)
    _tell("real", results["real"])
    machine.keep("long_run", **results)


def _tell(name: str, result: Mapping[str, Any]) -> None:
  print(f"{name}:")
  for key, value in result.items():
    if key != "samples":
      print(f"  {key:20}{value}", flush=True)


if __name__ == "__main__":
  app.run(main)
