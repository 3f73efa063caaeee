"""What do the simulated recipes come to, for several seeds?

  python -m benchmarks.seeds_simulated [--seeds=0,1,2]

Simulates configs/simulated_3000.py, and plans with configs/fleet_small.py, in
which the seed decides the lengths of answers and the delays of environments.
Prints the time of a step, and minutes of the processor. Writes
benchmarks/results/seeds_simulated_3000.json and seeds_fleet_small.json.
"""

import dataclasses
import resource
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from benchmarks import machine
from configs import fleet_small, simulated_3000
from rl.planning import search
from rl.simulation import result as simulation_result
from rl.simulation import simulate

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "One run each.")


def main(_: list[str]) -> None:
  """Runs both for all seeds, and keeps their figures."""
  for name, run in (("simulated_3000", _simulated), ("fleet_small", _planned)):
    rows = []
    for seed in _SEEDS.value:
      rows.append({"seed": seed, **_timed(run, int(seed))})
      print(name, rows[-1], flush=True)
      machine.keep(f"seeds_{name}", metric="step_s", rows=rows)


def _timed(run: Callable[[int], dict[str, Any]], seed: int) -> dict[str, Any]:
  start, busy = time.monotonic(), time.process_time()
  after = run(seed)
  return {
    "after": after,
    "minutes": (time.monotonic() - start) / 60,
    "cpu_minutes": (time.process_time() - busy) / 60,
    # Of all so far: what comes first is the largest.
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
  }


def _simulated(seed: int) -> dict[str, Any]:
  settings = dataclasses.replace(simulated_3000.get_config(), seed=seed)
  record = simulate.simulate(settings, keep_turns=False)
  result = simulation_result.measure(record)
  assert not result.violations
  return {
    "step_s": result.step_s,
    "virtual_s": result.virtual_s,
    "tokens": result.ledger.sampled,
    "decode_use": result.decode_use,
  }


def _planned(seed: int) -> dict[str, Any]:
  question = dataclasses.replace(fleet_small.get_config(), seed=seed)
  plan = search.best_of(question, *search.candidates(question))
  return {
    "step_s": plan.best.result.step_s,
    "bound_s": plan.best.bound.step_s,
    "split": plan.best.choice.split,
    "schedule": plan.best.choice.schedule,
    "choices": plan.choices,
    "simulated": len(plan.estimates),
  }


if __name__ == "__main__":
  app.run(main)
