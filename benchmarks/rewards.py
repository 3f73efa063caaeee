"""Rewards: a call in each place, and what a slow one adds to a round.

  python -m benchmarks.rewards [--calls=300]

Places: `NumericMatch` on a conversation of 20 messages of 200 characters. The
first call, with what it starts; the median of calls one after another; calls a
second with 64 at a time. The HTTP function is a process of this machine, so
there is no network in it; Ray is measured where it is installed.

Rounds: the real coordinator over simulated engines and a simulated learner, in
virtual time, with rewards that take none and with rewards of 1 s, from the same
draws. An episode decodes for about 5 s and a round trains for 6 s.

Writes benchmarks/results/rewards.json.
"""

import asyncio
import contextlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from absl import app
from absl import flags as absl_flags

from benchmarks import machine
from envs import base
from envs.offload import http, process_pool
from envs.rewards import rewards
from launch.cli import flags
from rl.schedule import overlap
from rl.simulation import distributions, result, simulate, workload

_CALLS = absl_flags.DEFINE_integer("calls", 300, "Calls in each place.")
_AT_ONCE = 64
_ROUNDS = 24
_SLOW_S = 1.0
_GROUPS = 16
_REWARD = rewards.NumericMatch()
_TASK = base.Task("sum/train/0", 0, "train", 0, answer="4")
_SAID = base.Transcript(
  [base.Message(role, "2 + 2 = 4 " * 20) for role in ("user", "assistant")]
  * 10,
  [0.0] * 10,
)


@contextlib.contextmanager
def _server(num_processes: int) -> Iterator[str]:
  """Yields the address of a reward server in a process of its own."""
  command = [sys.executable, "-m", "launch.reward_server", "--port=0"]
  command += ["--reward=numeric_match", f"--processes={num_processes}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    assert server.stdout
    try:
      yield server.stdout.readline().split()[-1]
    finally:
      server.terminate()


@contextlib.asynccontextmanager
async def _places() -> AsyncIterator[dict[str, base.Reward]]:
  with _server(0) as plain, _server(2) as pooled:
    places: dict[str, base.Reward] = {
      "event loop": _REWARD,
      "2 processes": process_pool.ProcessPool(reward=_REWARD),
      "HTTP": http.Http(url=plain, reward=_REWARD),
      "HTTP, 2 processes": http.Http(url=pooled, reward=_REWARD),
    }
    if importlib.util.find_spec("ray") is not None:
      from envs.offload import ray_tasks

      places["Ray, 2 tasks"] = ray_tasks.RayTasks(reward=_REWARD, max_tasks=2)
    try:
      yield places
    finally:
      for place in places.values():
        if isinstance(place, base.Offloaded):
          await place.close()


async def measure(place: base.Reward, calls: int) -> dict[str, float]:
  """Returns the times of calls in one place."""
  first, *alone = [await _call_s(place) for _ in range(calls + 1)]
  await asyncio.gather(*(_call_s(place) for _ in range(_AT_ONCE)))
  began = time.perf_counter()
  for _ in range(0, calls, _AT_ONCE):
    await asyncio.gather(*(_call_s(place) for _ in range(_AT_ONCE)))
  together_s = time.perf_counter() - began
  return {
    "first_ms": 1e3 * first,
    "call_ms": 1e3 * statistics.median(alone),
    "calls_per_s": -(-calls // _AT_ONCE) * _AT_ONCE / together_s,
  }


async def _call_s(place: base.Reward) -> float:
  began = time.perf_counter()
  await place(_TASK, [_SAID])
  return time.perf_counter() - began


async def _all_places(calls: int) -> list[dict[str, Any]]:
  async with _places() as places:
    return [
      {"place": name, **await measure(place, calls)}
      for name, place in places.items()
    ]


def settings(schedule: overlap.Overlap, reward_s: float) -> simulate.Simulation:
  """Returns a small run whose rewards take so long."""
  return simulate.Simulation(
    cluster=simulate.Cluster(transfer_s=0.1),
    workloads=(
      workload.Workload(
        answer_tokens=distributions.LogNormal(mean=300.0, sigma=0.3),
        prompt_tokens=distributions.Fixed(90.0),
        reward_s=distributions.Fixed(reward_s),
      ),
    ),
    overlap=schedule,
    rounds=_ROUNDS,
  )


def rounds() -> list[dict[str, Any]]:
  """Returns what a slow reward adds to a round of each schedule."""
  rows = []
  for name, schedule in {
    "sync": overlap.sync(_GROUPS),
    "one_step_off": overlap.one_step_off(_GROUPS),
    **{
      f"in_flight, eta={eta}": overlap.in_flight(_GROUPS, max_staleness=eta)
      for eta in (1, 2, 3)
    },
  }.items():
    fast_s, late_s = (
      result.measure(simulate.simulate(settings(schedule, seconds))).step_s
      for seconds in (0.0, _SLOW_S)
    )
    rows.append(
      {
        "schedule": name,
        "fast_s": fast_s,
        "late_s": late_s,
        "added": late_s / fast_s - 1.0,
      }
    )
  return rows


def main(_: list[str]) -> None:
  """Measures, prints and keeps."""
  places = asyncio.run(_all_places(_CALLS.value))
  machine.show("places", places)
  rows = rounds()
  machine.show("rounds", rows)
  machine.keep(
    "rewards",
    calls=_CALLS.value,
    at_once=_AT_ONCE,
    slow_s=_SLOW_S,
    places=places,
    rows=rows,
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
