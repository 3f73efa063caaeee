"""One episode: environment x engine -> Trajectory, token for token.

start -> [ context -> generate -> text -> step ]* -> close
"""

import asyncio
import contextlib
import dataclasses
import math
import numbers
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int32

from envs import base
from rl import engine as engine_lib
from rl import trajectory

_T = TypeVar("_T")


@runtime_checkable
class Chat(Protocol):
  """Messages <-> ids, append-only; `models.chat` has one."""

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    ...

  def open(self, messages: Sequence[base.Message]) -> Int32[np.ndarray, " P"]:
    """Returns the ids of the first context."""
    ...

  def append(self, messages: Sequence[base.Message]) -> Int32[np.ndarray, " P"]:
    """Returns the ids that follow an answer."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Returns an answer as text."""
    ...

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids with which a policy would say `text`."""
    ...

  def token(self, index: int) -> str:
    """Returns one id as printable text."""
    ...


@runtime_checkable
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
class Limits:
  """How one episode is played.

  Attributes:
    max_turns: answers in an episode.
    turn_tokens: sampled in one answer at most.
    max_tokens: of a whole episode, context included.
    temperature: of sampling; 0 takes the most probable token.
    step_s: deadline of one start, step or close of an environment. The first
      start of a process may import the environment's package.
  """

  max_turns: int = 16
  turn_tokens: int = 2
  max_tokens: int = 64
  temperature: float = 1.0
  step_s: float = 60.0


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
class Record:
  """What has happened in one episode so far; `play` fills it."""

  episode: Episode
  turns: list[trajectory.Turn] = dataclasses.field(default_factory=list)
  messages: list[base.Message] = dataclasses.field(default_factory=list)
  rewards: list[float] = dataclasses.field(default_factory=list)

  def end(
    self, status: trajectory.Status, fault: str = ""
  ) -> tuple[trajectory.Trajectory, base.Transcript]:
    """Returns the trajectory without its reward, and its text."""
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
  limits: Limits,
  record: Record,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  """Plays one environment to its end, keeping ids exactly as sampled.

  Args:
    environment: fresh; closed here on every path.
    record: fresh; whoever cancels this finds there what was sampled.

  Returns:
    The trajectory without its reward, and its text. An environment that
    raises, overruns `step_s` or returns nonsense ends it with ENV_FAULT: a
    fault is data, and the batch masks it.

  Raises:
    EngineClosed: the engine stopped; the task may be replayed elsewhere.
  """
  try:
    return await _turns(record, environment, engine, chat, limits)
  except Fault as fault:
    return record.end(trajectory.Status.ENV_FAULT, str(fault))
  finally:
    engine.release(record.episode.name)
    # The episode is over; what it was worth is already known.
    with contextlib.suppress(Fault):
      await guarded(environment.close(), limits.step_s, "close")


async def _turns(
  record: Record,
  environment: base.Environment,
  engine: Sampler,
  chat: Chat,
  limits: Limits,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  observation = await guarded(environment.start(), limits.step_s, "start")
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
    if completion.stop == "abort":
      return record.end(trajectory.Status.ENGINE_FAULT, "aborted")
    ids = np.concatenate([ids, completion.tokens])
    answer = base.Message("assistant", chat.decode(completion.tokens.tolist()))
    record.messages.append(answer)
    started = time.monotonic()
    step = await guarded(environment.step(answer), limits.step_s, "step")
    env_s = time.monotonic() - started
    record.turns[-1] = dataclasses.replace(turn, env_s=env_s)
    record.rewards.append(checked_reward(step.reward))
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
  limits: Limits,
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
  encode: Callable[[Sequence[base.Message]], Int32[np.ndarray, " P"]],
  messages: Sequence[base.Message],
) -> Int32[np.ndarray, " P"]:
  try:
    return np.asarray(encode(messages), np.int32)
  except Exception as error:  # What the environment said has no encoding.
    raise Fault(f"its message cannot be read: {error}") from error


async def guarded(work: Awaitable[_T], deadline_s: float, what: str) -> _T:
  """Returns what foreign code returns in time, and raises Fault else."""
  deadline = asyncio.timeout(deadline_s)
  try:
    async with deadline:
      return await work
  except Exception as error:
    if isinstance(error, TimeoutError) and deadline.expired():
      message = f"{what} took over {deadline_s:g} s"
      raise Fault(message) from None
    raise Fault(f"{what} raised {type(error).__name__}: {error}") from error


def checked_reward(reward: object) -> float:
  """Returns a reward that is a finite number, and raises Fault else."""
  # numpy's numbers are Real too; bool is an int, but no reward.
  if isinstance(reward, numbers.Real) and not isinstance(reward, bool):
    value = float(reward)
    if math.isfinite(value):
      return value
  raise Fault(f"reward {reward!r} is not a finite number")
