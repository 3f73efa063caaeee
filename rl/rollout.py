"""Groups: G episodes of one task side by side, each graded as it ends."""

import asyncio
import dataclasses
import math

from envs import base
from rl import engine as engine_lib
from rl import episode as episode_lib
from rl import events, foreign, trajectory, watchdog


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
  """A sampler whose waits the watchdog can name.

  The learner's wait for the group has the deadline; this says what held it up.
  """

  engine: episode_lib.Sampler
  dog: watchdog.Watchdog
  stall_s: float

  async def generate(
    self, request: engine_lib.DecodeRequest
  ) -> engine_lib.Completion:
    """Samples one answer."""
    with self.dog.noted(
      owner=f"episode {request.session}",
      what="an answer of the engine",
      deadline_s=self.stall_s,
    ):
      return await self.engine.generate(request)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(episode_lib.Limits):
  """How groups are played: the limits of an episode, and two more.

  Attributes:
    group_size: G episodes of one task.
    reward_s: deadline of one grading.
  """

  group_size: int = 8
  reward_s: float = 30.0

  def validate(self) -> None:
    """Raises ValueError on a limit that allows no episode."""
    for name in ("group_size", "max_turns", "turn_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"rollout.{name}={getattr(self, name)} is below 1")
    if self.max_tokens <= self.turn_tokens:
      raise ValueError(
        f"rollout.max_tokens={self.max_tokens} leaves no room for context "
        f"beside rollout.turn_tokens={self.turn_tokens}"
      )
    if not 0 < self.temperature < math.inf:
      raise ValueError(
        f"rollout.temperature={self.temperature} is not above 0: a greedy "
        "group has no variance"
      )
    for name in ("step_s", "reward_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"rollout.{name}={getattr(self, name)} is not above 0")


async def grade(
  record: trajectory.Trajectory,
  transcript: base.Transcript,
  task: base.Task,
  reward: base.Reward,
  deadline_s: float,
  dog: watchdog.Watchdog | None = None,
) -> trajectory.Trajectory:
  """Returns the trajectory with its reward, or with REWARD_FAULT."""
  if not record.status.trainable:
    return record
  owner = f"episode {task.split}/{record.group_id}/{record.index}"
  try:
    grades = await foreign.guarded(
      lambda: reward(task, [transcript]), deadline_s, "reward", dog, owner
    )
    value, parts = foreign.checked_grade(grades)
  except Exception as fault:
    status = trajectory.Status.REWARD_FAULT
    return dataclasses.replace(record, status=status, fault=str(fault))
  return dataclasses.replace(record, reward=value, parts=parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Player:
  """All that playing needs; the same for training and evaluation.

  Attributes:
    dog: its table names what each episode waits for.
  """

  source: base.Source
  engine: episode_lib.Sampler
  chat: episode_lib.Chat
  reward: base.Reward
  limits: Rollout
  log: events.EventLog
  dog: watchdog.Watchdog | None = None

  async def member(self, episode: episode_lib.Episode) -> trajectory.Trajectory:
    """Plays and grades one episode; grading starts the moment it ends."""
    where = {"group": episode.group_id, "index": episode.index}
    record = episode_lib.Record(episode)
    try:
      played, transcript = await episode_lib.play(
        self.source, self.engine, self.chat, self.limits, record, self.dog
      )
    except BaseException:
      # Cancelled, or the engine closed: the ledger still owns these tokens.
      lost, _ = record.end(trajectory.Status.ENGINE_FAULT)
      tokens, versions = lost.num_sampled, lost.versions
      self.log.emit("cancelled", **where, tokens=tokens, versions=versions)
      raise
    self.log.emit(
      "ended",
      **where,
      status=played.status.value,
      turns=len(played.turns),
      tokens=played.num_sampled,
      versions=played.versions,
    )
    graded = await grade(
      played,
      transcript,
      episode.task,
      self.reward,
      self.limits.reward_s,
      self.dog,
    )
    if graded.fault:
      status = graded.status.value
      self.log.emit("fault", **where, status=status, what=graded.fault)
    else:
      self.log.emit("reward", **where, value=graded.reward)
    return graded

  async def group(
    self,
    task: base.Task,
    group_id: int,
    seed: int,
    admitted: trajectory.PolicyVersion,
  ) -> trajectory.Group:
    """Plays the G members of one task side by side."""
    async with asyncio.TaskGroup() as members:
      plays = [
        members.create_task(
          self.member(episode_lib.Episode(task, group_id, i, seed))
        )
        for i in range(self.limits.group_size)
      ]
    return trajectory.Group(
      group_id=group_id,
      trajectories=[play.result() for play in plays],
      admitted=admitted,
    )
