"""Environment x engine -> Trajectory, and G of them -> Group.

  start -> [ context -> generate -> text -> step ]* -> close -> reward
                 (each episode on its own timeline; no barrier)
"""

import asyncio
import dataclasses
import math
import numbers
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from envs import base
from jaxtyping import Int32

from rl import engine as engine_lib
from rl import events, trajectory


_T = TypeVar("_T")


class Chat(Protocol):
  """Messages <-> ids, append-only; `models.chat` has one."""

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    ...

  def open(self, messages: Sequence[base.Message]) -> Sequence[int]:
    """Returns the ids of the first context."""
    ...

  def append(self, messages: Sequence[base.Message]) -> Sequence[int]:
    """Returns the ids that follow an answer."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Returns an answer as text."""
    ...

  def encode_answer(self, text: str) -> Sequence[int]:
    """Returns the ids with which a policy would say `text`."""
    ...

  def token(self, id_: int) -> str:
    """Returns one id as printable text."""
    ...


class Sampler(Protocol):
  """The part of a decode engine that playing needs."""

  async def generate(
      self, request: engine_lib.DecodeRequest
  ) -> engine_lib.Completion:
    """Samples one answer; see `engine.DecodeEngine`."""
    ...

  def release(self, session: str) -> None:
    """Frees what the engine holds for a session."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
  """How episodes are played.

  Attributes:
    group_size: G episodes of one task.
    max_turns: answers in an episode.
    turn_tokens: sampled in one answer at most.
    max_tokens: of a whole episode, context included.
    temperature: of sampling.
    step_s: deadline of one start, step or close of an environment.
    reward_s: deadline of one grading.
  """

  group_size: int = 8
  max_turns: int = 16
  turn_tokens: int = 2
  max_tokens: int = 64
  temperature: float = 1.0
  step_s: float = 30.0
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


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
  """Which episode this is: the member `index` of a group."""

  task: base.Task
  group_id: int
  index: int
  seed: int

  @property
  def name(self) -> str:
    """Unique within a run: the engine's session."""
    return f"{self.task.split}/{self.group_id}/{self.index}"

  @property
  def noise(self) -> int:
    """31 bits that differ between members and repeat in a rerun."""
    key = f"{self.seed}/{self.name}".encode()
    return zlib.crc32(key) & 0x7FFFFFFF


class Fault(Exception):
  """Foreign code raised, overran its deadline or returned nonsense."""


@dataclasses.dataclass(slots=True)
class _Play:
  """The growing record of one episode."""

  episode: Episode
  turns: list[trajectory.Turn] = dataclasses.field(default_factory=list)
  messages: list[base.Message] = dataclasses.field(default_factory=list)
  rewards: list[float] = dataclasses.field(default_factory=list)

  def end(
      self, status: trajectory.Status, fault: str = ""
  ) -> tuple[trajectory.Trajectory, base.Transcript]:
    record = trajectory.Trajectory(
        task_id=self.episode.task.id,
        group_id=self.episode.group_id,
        index=self.episode.index,
        turns=self.turns,
        status=status,
        fault=fault,
    )
    return record, base.Transcript(self.messages, self.rewards)


async def play(
    environment: base.Environment,
    engine: Sampler,
    chat: Chat,
    limits: Rollout,
    episode: Episode,
    on_turn: Callable[[int, trajectory.Turn], None] = lambda i, turn: None,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  """Plays one environment to its end, keeping ids exactly as sampled.

  Args:
    environment: fresh; closed here on every path.
    on_turn: called with the number and record of every turn that was sampled.

  Returns:
    The trajectory without its reward, and its text. An environment that
    raises, overruns `step_s` or returns nonsense ends it with ENV_FAULT: a
    fault is data, and the batch masks it.

  Raises:
    EngineClosed: the engine stopped; the task may be replayed elsewhere.
  """
  record = _Play(episode)
  try:
    return await _turns(record, environment, engine, chat, limits, on_turn)
  except Fault as fault:
    return record.end(trajectory.Status.ENV_FAULT, str(fault))
  finally:
    engine.release(episode.name)
    try:
      await _guarded(environment.close(), limits.step_s, "close")
    except Fault:
      pass  # The episode is over; what it was worth is already known.


async def _turns(
    record: _Play,
    environment: base.Environment,
    engine: Sampler,
    chat: Chat,
    limits: Rollout,
    on_turn: Callable[[int, trajectory.Turn], None],
) -> tuple[trajectory.Trajectory, base.Transcript]:
  observation = await _guarded(environment.start(), limits.step_s, "start")
  record.messages.extend(observation)
  context = _encode(chat.open, observation)
  ids = np.zeros(0, np.int32)
  for number in range(limits.max_turns):
    room = limits.max_tokens - len(ids) - len(context)
    if room < 1:
      break
    ids = np.concatenate([ids, context])
    try:
      completion = await engine.generate(
          _request(record.episode, number, ids, chat, limits, room)
      )
    except ValueError as error:
      return record.end(trajectory.Status.ENGINE_FAULT, str(error))
    turn = _turn(context, completion)
    record.turns.append(turn)
    on_turn(number, turn)
    if completion.stop == "abort":
      return record.end(trajectory.Status.ENGINE_FAULT, "aborted")
    ids = np.concatenate([ids, completion.tokens])
    answer = base.Message("assistant", chat.decode(completion.tokens.tolist()))
    record.messages.append(answer)
    started = time.monotonic()
    step = await _guarded(environment.step(answer), limits.step_s, "step")
    env_s = time.monotonic() - started
    record.turns[-1] = dataclasses.replace(turn, env_s=env_s)
    record.rewards.append(_checked_reward(step.reward))
    record.messages.extend(step.messages)
    if step.done:
      return record.end(trajectory.Status.COMPLETED)
    context = _encode(chat.append, step.messages)
  return record.end(trajectory.Status.TRUNCATED)


def _request(
    episode: Episode,
    number: int,
    ids: Int32[np.ndarray, " N"],
    chat: Chat,
    limits: Rollout,
    room: int,
) -> engine_lib.DecodeRequest:
  return engine_lib.DecodeRequest(
      request_id=f"{episode.name}/{number}",
      session=episode.name,
      tokens=ids,
      max_tokens=min(limits.turn_tokens, room),
      temperature=limits.temperature,
      stop_ids=chat.stop_ids,
      seed=episode.noise,
      priority=(episode.group_id, episode.index),
  )


def _turn(
    context: Int32[np.ndarray, " P"], completion: engine_lib.Completion
) -> trajectory.Turn:
  return trajectory.Turn(
      context=context,
      tokens=completion.tokens,
      logprobs=completion.logprobs,
      versions=completion.versions,
      stop=completion.stop,
      decode_s=completion.decode_s,
  )


def _encode(
    encode: Callable[[Sequence[base.Message]], Sequence[int]],
    messages: Sequence[base.Message],
) -> Int32[np.ndarray, " P"]:
  try:
    return np.asarray(encode(messages), np.int32)
  except Exception as error:  # What the environment said has no encoding.
    raise Fault(f"its message cannot be read: {error}") from error


async def _guarded(work: Awaitable[_T], deadline_s: float, what: str) -> _T:
  try:
    async with asyncio.timeout(deadline_s) as deadline:
      return await work
  except Exception as error:
    if isinstance(error, TimeoutError) and deadline.expired():
      message = f"{what} took over {deadline_s:g} s"
      raise Fault(message) from None
    raise Fault(
        f"{what} raised {type(error).__name__}: {error}"
    ) from error


def _checked_reward(reward: object) -> float:
  real = isinstance(reward, numbers.Real) and not isinstance(reward, bool)
  if not real or not math.isfinite(reward):
    raise Fault(f"reward {reward!r} is not a finite number")
  return float(reward)


async def grade(
    record: trajectory.Trajectory,
    transcript: base.Transcript,
    task: base.Task,
    reward: base.Reward,
    deadline_s: float,
) -> trajectory.Trajectory:
  """Returns the trajectory with its reward, or with REWARD_FAULT."""
  if not record.status.trainable:
    return record
  try:
    (value,) = await _guarded(reward(task, [transcript]), deadline_s, "reward")
    checked = _checked_reward(value.value)
  except (Fault, ValueError, TypeError) as fault:
    status = trajectory.Status.REWARD_FAULT
    return dataclasses.replace(record, status=status, fault=str(fault))
  return dataclasses.replace(record, reward=checked, parts=dict(value.parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Player:
  """All that playing needs; the same for training and evaluation."""

  source: base.Source
  engine: Sampler
  chat: Chat
  reward: base.Reward
  limits: Rollout
  log: events.EventLog

  async def member(self, episode: Episode) -> trajectory.Trajectory:
    """Plays and grades one episode; grading starts the moment it ends."""
    where = {"group": episode.group_id, "index": episode.index}

    def on_turn(number: int, turn: trajectory.Turn) -> None:
      if len(turn.versions):
        self.log.emit(
            "turn",
            **where,
            turn=number,
            tokens=len(turn.tokens),
            first_version=int(turn.versions[0]),
            last_version=int(turn.versions[-1]),
        )

    try:
      environment = self.source(episode.task)
    except Exception as error:
      record, transcript = _Play(episode).end(
          trajectory.Status.ENV_FAULT, f"building it raised {error!r}"
      )
    else:
      record, transcript = await play(
          environment, self.engine, self.chat, self.limits, episode, on_turn
      )
    self.log.emit(
        "ended", **where, status=record.status.value, tokens=record.num_sampled
    )
    record = await grade(
        record, transcript, episode.task, self.reward, self.limits.reward_s
    )
    if record.fault:
      self.log.emit(
          "fault", **where, status=record.status.value, what=record.fault
      )
    else:
      self.log.emit("reward", **where, value=record.reward)
    return record

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
          members.create_task(self.member(Episode(task, group_id, i, seed)))
          for i in range(self.limits.group_size)
      ]
    return trajectory.Group(
        group_id=group_id,
        trajectories=[play.result() for play in plays],
        admitted=admitted,
    )
