"""Grading: the reward of a trajectory when it ends, or of a group when it has.

  grade -----+
  compare ---+-> _place -> _ask: call -> check --+--> with reward
                   ^                             |
                   +------- wait, ever longer ---+    raised, late or nonsense
                                                 +--> REWARD_FAULT, `attempts`

The reward is called at least once, and a trajectory gets at most one grade: a
result after the deadline of its call is discarded.
"""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from absl import logging

from envs import base
from rl.data import trajectory
from rl.runtime import isolation
from rl.runtime import watchdog as watchdog_lib
from rl.settings import backoff, checks

_CLOSE_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retries(backoff.Backoff):
  """Retries of a failing reward.

  Attributes:
    deadline_s: of one call, without its waits for places (`envs.call_clock`).
  """

  deadline_s: float = 30.0

  def validate(self) -> None:
    """Raises ValueError on numbers that allow no call, or no wait."""
    where = "rollout.grading"
    self.validate_as(where)
    checks.finite_above(self, 0, "deadline_s", where=where)


@dataclasses.dataclass(slots=True, kw_only=True)
class Stats:
  """Counters of graders since they were built, and their current load.

  Attributes:
    calls: of the reward; `retries` of them were not the first.
    faults: trajectories whose attempts were exhausted.
    in_flight, waiting: running calls, and calls that wait for a place.
    late: calls left behind that have not ended.
    busy_s, queue_s: sums over all calls that ended, and all that got a place.
  """

  calls: int = 0
  retries: int = 0
  faults: int = 0
  in_flight: int = 0
  waiting: int = 0
  late: int = 0
  busy_s: float = 0.0
  queue_s: float = 0.0


class RewardUnreachable(Exception):
  """The place where a reward is computed cannot be used."""


def refuse_stateful(reward: object) -> None:
  """Raises ValueError on a reward that needs more than text."""
  name = type(reward).__name__
  stateless = getattr(reward, "stateless", None)
  if stateless is None:
    raise ValueError(
      f"reward {name} does not say whether it is stateless; give it the "
      "attribute stateless=True if it may be called anywhere, and again after "
      "a failure"
    )
  if not stateless:
    raise ValueError(
      f"reward {name} has stateless={stateless!r}: it needs the environment, "
      "which is closed before anything is graded; let the environment give it "
      "as the reward of a step (base.Step.reward) and use rewards.Outcome()"
    )


class Graders:
  """Grades trajectories side by side; called from one event loop.

  A reward runs on that loop: computing for milliseconds would block everything
  else. Such work belongs in `envs.threads.call`, whose deadline leaves the
  thread behind.

  Args:
    reward: stateless.
    max_concurrent: calls at once; others wait, first come, first served.
    watchdog: lists the wait of each trajectory.

  Raises:
    ValueError: the reward is not stateless, or a setting allows no call.
  """

  def __init__(
    self,
    reward: base.Reward,
    retries: Retries | None = None,
    max_concurrent: int = 256,
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
  ):
    refuse_stateful(reward)
    self._alone = base.alone(reward)
    both = (*base.parts(reward), *base.parts(self._alone))
    self._offloaded: list[base.Offloaded] = []
    for one in both:
      # Equal settings share their connections and processes.
      if isinstance(one, base.Offloaded) and one not in self._offloaded:
        self._offloaded.append(one)
    if max_concurrent < 1:
      raise ValueError(f"max_concurrent={max_concurrent} must be at least 1")
    self._reward = reward
    self._retries = retries or Retries()
    self._retries.validate()
    self._watchdog = watchdog
    self._places = asyncio.Semaphore(max_concurrent)
    self._late: set[asyncio.Task[Any]] = set()
    self._stats = Stats()

  async def open(self) -> None:
    """Checks the places where rewards are computed, before a run.

    Raises:
      RewardUnreachable: one of them cannot be used.
    """
    try:
      for one in self._offloaded:
        await one.open()
    except (OSError, ValueError) as error:
      raise RewardUnreachable(f"reward: {error}") from error

  async def close(self) -> None:
    """Ends connections and processes of rewards; safe when there are none.

    One that does not end them is left behind with a warning.
    """
    for one in self._offloaded:
      try:
        await isolation.guarded(one.close, _CLOSE_S, "close")
      except isolation.Fault as fault:
        logging.warning("reward %s: %s", type(one).__name__, fault)

  def costs(self) -> dict[str, float]:
    """Returns the costs of rewards computed elsewhere, by name, summed up."""
    costs: collections.Counter[str] = collections.Counter()
    for one in self._offloaded:
      costs.update(one.counts())
    return dict(costs)

  @property
  def compares(self) -> bool:
    """True if the members of a group are graded together, by `compare`."""
    return base.compares(self._reward)

  def stats(self) -> Stats:
    """Returns the counters."""
    return dataclasses.replace(self._stats, late=len(self._late))

  async def grade(
    self,
    ungraded: trajectory.Trajectory,
    transcript: base.Transcript,
    task: base.Task,
    called: Callable[[], None] = lambda: None,
    name: str = "",
  ) -> trajectory.Trajectory:
    """Returns the trajectory with its reward, or with REWARD_FAULT and none.

    An untrainable one is returned unchanged. A reward that compares grades by
    its `alone`. Cancelling leaves the call behind and frees its place.

    Args:
      called: called when the reward is called for the first time.
      name: of the episode, for the watchdog.
    """
    if not ungraded.status.trainable:
      return ungraded
    owner = f"episode {name or ungraded.task_id}"
    (graded,) = await self._grade(
      self._alone, [ungraded], [transcript], task, called, owner
    )
    return graded

  async def compare(
    self,
    ungraded: Sequence[trajectory.Trajectory],
    transcripts: Sequence[base.Transcript],
    task: base.Task,
    called: Callable[[], None] = lambda: None,
    name: str = "",
  ) -> list[trajectory.Trajectory]:
    """Returns the members of a group, graded together; see `grade`.

    A member that is left alone has nothing to be compared with, so it gets
    REWARD_FAULT.

    Args:
      ungraded: trainable ones.
    """
    if len(ungraded) < 2:
      text = "no other member of the group ended, to be compared with"
      return [self._faulty(one, text) for one in ungraded]
    return await self._grade(
      self._reward, ungraded, transcripts, task, called, f"group {name}"
    )

  async def _grade(
    self,
    reward: base.Reward,
    ungraded: Sequence[trajectory.Trajectory],
    transcripts: Sequence[base.Transcript],
    task: base.Task,
    called: Callable[[], None],
    owner: str,
  ) -> list[trajectory.Trajectory]:
    """Calls a reward until it answers, or `attempts` are exhausted."""
    attempts, fault_text = self._retries.attempts, ""
    for attempt in range(attempts):
      if attempt:
        await asyncio.sleep(self._retries.wait_s(attempt))
      async with self._place(owner):
        self._count(calls=1, retries=int(attempt > 0))
        if not attempt:
          called()
        try:
          grades = await self._ask(reward, transcripts, task, owner)
        except isolation.Fault as fault:
          fault_text = str(fault)
        else:
          return [
            dataclasses.replace(one, reward=value, parts=parts)
            for one, (value, parts) in zip(ungraded, grades, strict=True)
          ]
    if attempts > 1:
      fault_text += f", after {attempts} attempts"
    return [self._faulty(one, fault_text) for one in ungraded]

  def _faulty(
    self, ungraded: trajectory.Trajectory, text: str
  ) -> trajectory.Trajectory:
    self._count(faults=1)
    status = trajectory.Status.REWARD_FAULT
    return dataclasses.replace(ungraded, status=status, fault=text)

  async def _ask(
    self,
    reward: base.Reward,
    transcripts: Sequence[base.Transcript],
    task: base.Task,
    owner: str,
  ) -> list[tuple[float, dict[str, float]]]:
    """Calls once; returns values and their parts, or raises Fault."""
    return await isolation.guarded(
      lambda: reward(task, transcripts),
      self._retries.deadline_s,
      "reward",
      self._watchdog,
      owner,
      late=self._late,
      check=lambda grades: isolation.checked_grades(grades, len(transcripts)),
    )

  @contextlib.asynccontextmanager
  async def _place(self, owner: str) -> AsyncGenerator[None]:
    """Waits for one of the places and holds it in the body of a `with`."""
    time = asyncio.get_running_loop().time
    start = time()
    self._count(waiting=1)
    try:
      with self._watchdog.track(
        owner=owner,
        what="a place to be graded",
        # A call that holds a place ends within this time, unless it queues.
        deadline_s=self._retries.deadline_s,
      ):
        await self._places.acquire()
    finally:
      self._count(waiting=-1)
    begun = time()
    self._count(in_flight=1, queue_s=begun - start)
    try:
      yield
    finally:
      self._count(in_flight=-1, busy_s=time() - begun)
      self._places.release()

  def _count(self, **counts: int | float) -> None:
    for name, count in counts.items():
      setattr(self._stats, name, getattr(self._stats, name) + count)
