"""Random runs in virtual time, by the hundred: what did any of them break?

`python -m tests.helpers.schedule_load SEED TRAJECTORIES` plays runs of all
modes
until so many trajectories have been played, and prints JSON: how many of each
mode, and what was broken. It runs apart from pytest, whose checks of every
annotation would cost more than the runs.
"""

import asyncio
import collections
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envs import base, mixture
from rl.algorithms import group_filters
from rl.audit import checker as checker_lib
from rl.audit import event_log, token_ledger
from rl.rollout import grading
from rl.schedule import overlap
from rl.simulation import learner as simulated_learner
from rl.testing import fakes
from tests.helpers import virtual_run

_FAULTS = (
  "",
  "start",
  "step",
  "close",
  "hang_start",
  "hang",
  "hang_close",
  "nan",
  "text",
  "word",
)
_STEP_S = 30.0
_MOST = 20


def _sync(draw: random.Random) -> overlap.Overlap:
  updates, per_update = draw.randint(1, 3), draw.randint(1, 3)
  return overlap.sync(updates * per_update, updates)


def _strict(draw: random.Random) -> overlap.Overlap:
  per_batch, batches = draw.randint(1, 3), draw.randint(1, 3)
  return overlap.strict_pipeline(per_batch * batches, per_batch)


def _pipe(draw: random.Random) -> overlap.Overlap:
  updates, per_update = draw.randint(1, 3), draw.randint(1, 3)
  return overlap.rollout_pipe(updates * per_update, updates, 1)


def _hard(draw: random.Random) -> overlap.Overlap:
  groups = draw.randint(2, 6)
  return overlap.rollout_pipe(groups, 1, 1, draw.randint(1, groups), hard=True)


def _ready(draw: random.Random) -> overlap.Overlap:
  return dataclasses.replace(
    _strict(draw),
    consume="ready",
    wait_for_round=draw.random() < 0.3,
    redundancy=_redundancy(draw, draw.randint(0, 3)),
  )


def _one_step_off(draw: random.Random) -> overlap.Overlap:
  return overlap.one_step_off(draw.randint(1, 6), 1)


def _bounded(draw: random.Random) -> overlap.Overlap:
  return overlap.bounded(draw.randint(1, 6), draw.randint(1, 4), 1)


def _in_flight(draw: random.Random) -> overlap.Overlap:
  groups, eta = draw.randint(1, 6), draw.randint(1, 4)
  if draw.random() < 0.5:
    return overlap.in_flight(groups, eta, 1)
  return overlap.in_flight(groups, eta, 1, on_publish="keep_kv")


def _checked(draw: random.Random, consume: overlap.Consume) -> overlap.Overlap:
  base = draw.choice([_bounded, _in_flight])(draw)
  return dataclasses.replace(
    base,
    consume=consume,
    redundancy=_redundancy(draw, draw.randint(0, 2)),
    too_slow_after=draw.randint(1, 4),
  )


def _redundancy(draw: random.Random, groups: int) -> overlap.Redundancy:
  return overlap.Redundancy(
    extra_groups=groups, extra_members=draw.randint(0, 2)
  )


MODES: dict[str, Callable[[random.Random], overlap.Overlap]] = {
  "sync": _sync,
  "strict pipeline": _strict,
  "rollout pipe": _pipe,
  "hard frontier": _hard,
  "as completed": _ready,
  "one step off": _one_step_off,
  "bounded": _bounded,
  "in flight": _in_flight,
  "drop": lambda draw: _checked(draw, "drop"),
  "recycle": lambda draw: _checked(draw, "recycle"),
}


def schedule(mode: str, draw: random.Random) -> overlap.Overlap:
  """Returns a random schedule of a mode."""
  drawn = dataclasses.replace(
    MODES[mode](draw),
    admission="hard_frontier"
    if mode == "hard frontier"
    else draw.choice(["fifo", "frontier"]),
  )
  if not drawn.wait_for_round and draw.random() < 0.3:
    drawn = dataclasses.replace(
      drawn,
      groups_per_microbatch=None,
      tokens_per_microbatch=draw.choice([1, 40, 100, 10_000]),
    )
  drawn.validate()
  return drawn


def run(mode: str, draw: random.Random, rounds: int = 12) -> virtual_run.Run:
  """Returns a random run of a mode, not yet started."""
  source: Any = _source(draw, "one")
  if draw.random() < 0.3:
    weight = draw.choice([1.0, 3.0])
    other = mixture.Part(_source(draw, "two"), weight)
    source = mixture.Mixture((mixture.Part(source), other))
  slow = draw.choice([0.0, 0.1, 3.0, 30.0])
  refills = group_filters.DynamicSampling(max_refills=draw.randint(1, 4))
  return virtual_run.Run(
    schedule(mode, draw),
    rounds=rounds,
    source=source,
    reward=Dice(draw),
    retries=grading.Retries(attempts=2, first_wait_s=0.1),
    dynamic_sampling=refills if draw.random() < 0.3 else None,
    delay_s=lambda priority: _tail(draw, 1.0),
    learner=simulated_learner.LearnerSpeed(token_s=0.01, update_s=slow),
    transfer_s=draw.choice([0.0, 1.0, 20.0]),
    update_s=draw.choice([0.0, 0.5, 5.0]),
    num_engines=draw.randint(1, 3),
    group_size=draw.randint(2, 6),
    step_s=_STEP_S,
    disturb=_aborts(draw) if draw.random() < 0.3 else None,
  )


@dataclasses.dataclass(frozen=True)
class Dice:
  """A reward of 0 or 1, after a while; one call in twenty fails."""

  draw: random.Random
  stateless: bool = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    await asyncio.sleep(self.draw.random() * 2)
    if self.draw.random() < 0.05:
      raise ConnectionError(f"nobody graded {task.id}")
    return [base.Grade(float(self.draw.randrange(2)), {}) for _ in transcripts]


def _tail(draw: random.Random, scale: float) -> float:
  """Returns seconds with a heavy tail, at most a hundred times the least."""
  return scale * min(draw.paretovariate(1.1), 100.0)


def _source(draw: random.Random, name: str) -> fakes.Counting:
  fault = draw.choice(_FAULTS)
  late = draw.choice([0.0, 0.1, 2.0])
  return fakes.Counting(
    name=name,
    turns=draw.choice([1, 1, 1, 1, 1, 3]),
    lag_s=lambda index, member: _tail(draw, late) if late else 0.0,
    fault=fault,
    faulty=lambda index: index % 5 == 0,
    member=lambda member: member % 3 == 0,
  )


def _aborts(draw: random.Random) -> Callable[[virtual_run.Run], Any]:
  """Returns what now and then ends all requests of an engine."""

  async def disturb(run: virtual_run.Run) -> None:
    while True:
      await asyncio.sleep(_tail(draw, 20.0))
      draw.choice(run.engines).abort(None)

  return disturb


def broken(run: virtual_run.Run) -> Iterator[str]:
  """Starts a run and yields what it broke."""
  checker = checker_lib.Checker(run.schedule, run.group_size)
  builder = token_ledger.LedgerBuilder()
  run.listeners = (checker.observe, builder.observe)
  try:
    run.start()
  except Exception as error:
    yield f"it ended with {type(error).__name__}: {error}"
    return
  yield from checker.finish()
  ledger = builder.ledger()
  if ledger.error:
    yield f"the ledger does not add up: {ledger}"
  if ledger.sampled != run.sampled_by_engines:
    yield (
      f"engines sampled {run.sampled_by_engines} tokens, the log has "
      f"{ledger.sampled}"
    )
  trained = collections.Counter(e["group"] for e in run.of("trained"))
  wanted = run.rounds * run.schedule.groups_per_round
  if len(trained) != wanted or set(trained.values()) != {1}:
    yield f"{len(trained)} groups were trained, not {wanted} of them once"


def load(seed: int, trajectories: int) -> dict[str, Any]:
  """Returns how many were played, by mode, and what was broken.

  Every mode gets its turn until there are enough.
  """
  played: collections.Counter[str] = collections.Counter()
  found: list[str] = []
  number = 0
  while played.total() < trajectories:
    for mode in MODES:
      number += 1
      one = run(mode, random.Random(f"{seed}/{number}"))
      found += [f"{seed}/{number} {mode}: {what}" for what in broken(one)]
      played[mode] += sum(map(_ends, one.log.events))
  return {"played": played, "runs": number, "broken": found[:_MOST]}


def _ends(event: event_log.Event) -> bool:
  return event["kind"] in ("ended", "aborted")


if __name__ == "__main__":
  print(json.dumps(load(*map(int, sys.argv[1:]))))
