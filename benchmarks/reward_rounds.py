"""A slow reward in real runs: the seconds that it adds to a round.

  python -m benchmarks.reward_rounds [--rounds=10] [--repeats=3]

Guess-a-number in flight, with environment steps of a log-normal time, sigma
0.5, and a dense model of 4 million parameters, which gives the learner seconds
of work. Rewards take 0 s or 1 s; all else is equal, the weights at the
beginning included. A repeat takes all runs in turn, every other one backwards.
A row shows medians over the rounds of all repeats, without those at either end
that the bound lets run ahead, and the share of these rounds in which the
learner is busy.

Writes benchmarks/results/reward_rounds.json.
"""

import asyncio
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import machine, one_engine
from envs import base, delayed
from envs.rewards import rewards
from launch.cli import flags, jax_setup
from rl import assemble
from rl import experiment as experiment_lib
from rl.audit import event_log
from rl.runtime import trace
from rl.schedule import overlap

_ROUNDS = absl_flags.DEFINE_integer("rounds", 10, "Rounds of each run.")
_REPEATS = absl_flags.DEFINE_integer("repeats", 3, "Runs of each setting.")
_SLOW_S = 1.0
_GROUPS = 32
_MODEL = {"num_layers": 4, "d_model": 256, "d_ff": 1024, "num_experts": 0}
CASES = ((0.1, 1), (0.5, 1), (0.5, 2))
"""The median of a step in seconds, and the bound on staleness."""


@dataclasses.dataclass(frozen=True)
class Waits:
  """The reward of the steps, after a wait."""

  seconds: float
  stateless = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns the grades."""
    await asyncio.sleep(self.seconds)
    return await rewards.Outcome()(task, transcripts)


@dataclasses.dataclass(frozen=True)
class Measured:
  """A run: the seconds of each round that counts, and of its training."""

  rounds_s: Sequence[float]
  learner_s: Sequence[float]


def measure(run: one_engine.Run) -> Measured:
  """Returns the rounds of a run that count; each ends with its training."""
  eta = run.experiment.overlap.max_staleness
  updates = event_log.of_kind(run.events, "update")
  ends = [e["end"] for e in updates][eta : _ROUNDS.value - eta]
  busy = trace.busy(run.spans, "learner")
  windows = list(itertools.pairwise(ends))
  return Measured(
    [end - start for start, end in windows],
    [
      sum(max(0.0, min(b, end) - max(a, start)) for a, b in busy)
      for start, end in windows
    ],
  )


def settings(
  base_run: experiment_lib.Experiment, step_s: float, eta: int, reward_s: float
) -> experiment_lib.Experiment:
  """Returns the run of a case."""
  slow = delayed.Delayed(
    source=base_run.environment, median_s=step_s, sigma=0.5
  )
  return dataclasses.replace(
    base_run,
    environment=slow,
    reward=Waits(reward_s),
    overlap=overlap.in_flight(_GROUPS, max_staleness=eta),
  )


_Key = tuple[float, int, float]


async def run_all(
  base_run: experiment_lib.Experiment,
) -> dict[_Key, list[Measured]]:
  """Returns the runs of each case and reward, one for each repeat."""
  found: dict[_Key, list[Measured]] = {
    (*case, reward_s): [] for case in CASES for reward_s in (0.0, _SLOW_S)
  }
  parts = assemble.build(base_run)
  bench = one_engine.Bench(parts)
  try:
    await bench.start()
    for number in range(_REPEATS.value):
      for key in list(found)[:: -1 if number % 2 else 1]:
        run = await bench.play(settings(base_run, *key))
        found[key].append(measure(run))
        print(key, found[key][-1], flush=True)
  finally:
    await parts.close()
  return found


def compared(found: dict[_Key, list[Measured]]) -> Iterator[dict[str, Any]]:
  """Yields a row for each case."""
  for step_s, eta in CASES:
    fast, late = (found[step_s, eta, s] for s in (0.0, _SLOW_S))
    fast_s, late_s = (
      statistics.median(s for run in runs for s in run.rounds_s)
      for runs in (fast, late)
    )
    yield {
      "step_s": step_s,
      "eta": eta,
      "fast_s": fast_s,
      "late_s": late_s,
      "added": late_s / fast_s - 1.0,
      "learner_busy": sum(sum(run.learner_s) for run in fast)
      / sum(sum(run.rounds_s) for run in fast),
    }


def main(_: list[str]) -> None:
  """Measures, prints and keeps."""
  changes = {f"model.{name}": str(value) for name, value in _MODEL.items()}
  changes |= {"rounds": str(_ROUNDS.value)}
  base_run = flags.load("configs/guess_number_moe.py", changes)
  jax_setup.prepare(base_run.placement)
  rows = list(compared(asyncio.run(run_all(base_run))))
  machine.show("rounds", rows)
  machine.keep(
    "reward_rounds",
    rounds=_ROUNDS.value,
    repeats=_REPEATS.value,
    slow_s=_SLOW_S,
    rows=rows,
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
