"""One episode: environment x engine -> Trajectory, token for token.

build -> start -> [ context -> generate -> text -> step ]* -> close
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int32

from envs import base
from rl.data import trajectory
from rl.engine import contract
from rl.runtime import isolation
from rl.runtime import watchdog as watchdog_lib

_T = TypeVar("_T")
_Request = Callable[..., contract.DecodeRequest]
"""A request of an episode without what differs from turn to turn."""


@runtime_checkable
class Chat(Protocol):
  """Messages <-> ids, append-only; `models.chat.word_chat` has one."""

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    ...

  def open(self, messages: Sequence[base.Message]) -> Int32[np.ndarray, " P"]:
    """Returns the ids of the first context."""
    ...

  def append(
    self, messages: Sequence[base.Message], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids that follow an answer.

    Args:
      answer_ended: by a stop id, and not cut off before one.
    """
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
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine`."""
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
    record_experts: keep which experts the engine chose for every id, so that
      the learner takes the same.
  """

  max_turns: int = 16
  turn_tokens: int = 2
  max_tokens: int = 64
  temperature: float = 1.0
  step_s: float = 60.0
  record_experts: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
  """Which episode this is: member `index` of an attempt at a group."""

  task: base.Task
  group_id: int
  index: int
  seed: int
  attempt: int = 0

  @property
  def name(self) -> str:
    """Unique within a run: the engine's session."""
    return f"{self.task.split}/{self.group_id}/{self.attempt}/{self.index}"

  @property
  def noise(self) -> int:
    """31 bits that differ between members and repeat in a rerun."""
    key = f"{self.seed}/{self.name}".encode()
    digest = hashlib.blake2b(key, digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Guarded:
  """An environment that keeps to its contract in time, or raises Fault.

  Attributes:
    late: gets what ends it, when that takes too long.
    calls: that were given up and have not ended.
  """

  environment: Any  # What the source built; it may be nonsense too.
  step_s: float
  watchdog: watchdog_lib.Watchdog | None
  owner: str
  late: set[asyncio.Task[None]]
  calls: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)

  async def start(self) -> list[base.Message]:
    return await self._ask(
      lambda: self.environment.start(),
      "start",
      lambda said: isolation.checked_messages(said, "start"),
    )

  async def step(self, answer: base.Message) -> base.Step:
    return await self._ask(
      lambda: self.environment.step(answer), "step", isolation.checked_step
    )

  async def close(self) -> None:
    """Closes it, and waits for that no longer than `step_s`."""
    ending = asyncio.create_task(self._end())
    try:
      await asyncio.wait([ending], timeout=self.step_s)
    finally:
      if not ending.done():
        self.late.add(ending)
        ending.add_done_callback(self.late.discard)

  async def _end(self) -> None:
    """Closes it when its last call has ended: one at a time is its contract."""
    if self.calls:
      await asyncio.wait(self.calls)
    # The episode is over; what it was worth is already known.
    with contextlib.suppress(isolation.Fault):
      await self._ask(lambda: self.environment.close(), "close", _ignored)
    if self.calls:
      await asyncio.wait(self.calls)

  async def _ask(
    self,
    call: Callable[[], Awaitable[Any]],
    what: str,
    check: Callable[[Any], _T],
  ) -> _T:
    return await isolation.guarded(
      call,
      self.step_s,
      what,
      self.watchdog,
      self.owner,
      " of the environment",
      late=self.calls,
      check=check,
    )


def _ignored(value: object) -> None:
  """Whatever a close returns."""


@dataclasses.dataclass(slots=True)
class Record:
  """What has happened in one episode so far; `play` fills it.

  Attributes:
    turned: told of every turn before it is added.
    over: nothing more will happen but the close of the environment.
  """

  episode: Episode
  turned: Callable[[trajectory.Turn], None] = lambda turn: None
  over: bool = False
  turns: list[trajectory.Turn] = dataclasses.field(default_factory=list)
  messages: list[base.Message] = dataclasses.field(default_factory=list)
  rewards: list[float] = dataclasses.field(default_factory=list)

  def add(
    self,
    context: Int32[np.ndarray, " P"],
    completion: contract.Completion,
    env_s: float,
    reward: float,
  ) -> None:
    """Appends a turn; `context` is what the turn before did not have.

    The last id of a turn is fed with the context of the next: only then are
    its experts known.
    """
    experts = completion.experts
    if experts is not None:
      # Of the whole conversation: the ids of this turn are its last.
      first = len(experts) - len(context) - len(completion.tokens)
      if self.turns:
        self.turns[-1] = _fed(self.turns[-1], experts[first - 1])
      experts = experts[first:].copy()
    turn = trajectory.Turn(
      context=context,
      tokens=completion.tokens,
      logprobs=completion.logprobs,
      versions=completion.versions,
      stop=completion.stop,
      decode_s=completion.decode_s,
      env_s=env_s,
      reward=reward,
      experts=experts,
    )
    self.turned(turn)
    self.turns.append(turn)

  def end(
    self, status: trajectory.Status, fault: str = ""
  ) -> tuple[trajectory.Trajectory, base.Transcript]:
    """Returns the trajectory without its reward, and its text."""
    self.over = True
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
  source: base.Source,
  engine: Sampler,
  chat: Chat,
  limits: Limits,
  record: Record,
  watchdog: watchdog_lib.Watchdog | None = None,
  priority: tuple[int, ...] = (),
  closing: set[asyncio.Task[None]] | None = None,
  late: set[asyncio.Task[None]] | None = None,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  """Plays one environment to its end, keeping ids exactly as sampled.

  Args:
    source: builds the environment, which is closed here on every path.
    record: fresh; after an exception it holds what was sampled.
    watchdog: its table names the environment while this waits for it.
    priority: of its requests.
    closing: gets the task that closes the environment, until it is done; None
      waits for it here. A slow one need not hold up the reward.
    late: gets what is left of an environment that did not end in time, until
      it does; it is closed as soon as its last call has ended.

  Returns:
    The trajectory without its reward, and its text. An environment that
    raises, overruns `step_s` or returns nonsense ends it with ENV_FAULT: a
    fault is data, and the batch masks it.

  Raises:
    EngineClosed: the engine stopped; the task may be replayed elsewhere.
  """
  episode, owner = record.episode, f"episode {record.episode.name}"
  try:
    built = isolation.contained(lambda: source(episode.task), "building it")
  except isolation.Fault as fault:
    return record.end(trajectory.Status.ENV_FAULT, str(fault))
  left = set() if late is None else late
  environment = _Guarded(built, limits.step_s, watchdog, owner, left)
  try:
    request = _request(episode, chat, limits, priority)
    return await _turns(record, environment, engine, chat, limits, request)
  except isolation.Fault as fault:
    return record.end(trajectory.Status.ENV_FAULT, str(fault))
  finally:
    if closing is None:
      await environment.close()
    else:
      task = asyncio.create_task(environment.close())
      closing.add(task)
      task.add_done_callback(closing.discard)


async def _turns(
  record: Record,
  environment: _Guarded,
  engine: Sampler,
  chat: Chat,
  limits: Limits,
  request: _Request,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  loop, name = asyncio.get_running_loop(), record.episode.name
  observation = await environment.start()
  record.messages.extend(observation)
  context = _encode(chat.open, observation)
  ids = context
  for number in range(limits.max_turns):
    room = limits.max_tokens - len(ids)
    if room < 1:
      if not record.turns:
        raise isolation.Fault(
          f"a context of {len(ids)} ids leaves no room for an answer in "
          f"rollout.max_tokens={limits.max_tokens}"
        )
      break
    try:
      completion = await engine.generate(
        request(
          request_id=f"{name}/{number}",
          tokens=ids,
          max_tokens=min(limits.turn_tokens, room),
        )
      )
    except ValueError as error:
      return record.end(trajectory.Status.ENGINE_FAULT, str(error))
    asked, reward = loop.time(), 0.0
    try:
      if completion.stop == "abort":
        return record.end(trajectory.Status.ENGINE_FAULT, "aborted")
      text = chat.decode(completion.tokens.tolist())
      answer = base.Message("assistant", text)
      record.messages.append(answer)
      step = await environment.step(answer)
      reward = float(step.reward)
    finally:
      # On every path: tokens that were sampled are never lost.
      record.add(context, completion, loop.time() - asked, reward)
    record.rewards.append(step.reward)
    record.messages.extend(step.messages)
    if step.done:
      return record.end(trajectory.Status.COMPLETED)
    append = functools.partial(
      chat.append, answer_ended=completion.stop == "stop"
    )
    context = _encode(append, step.messages)
    ids = np.concatenate([ids, completion.tokens, context])
  return record.end(trajectory.Status.TRUNCATED)


def _request(
  episode: Episode, chat: Chat, limits: Limits, priority: tuple[int, ...]
) -> _Request:
  """Returns what builds a request; the parts that stay are made once."""
  # No function of our own: its annotations would make a new type of array,
  # at 30 us and in need of the garbage collector, in every episode.
  return functools.partial(
    contract.DecodeRequest,
    session=episode.name,
    temperature=limits.temperature,
    stop_ids=chat.stop_ids,
    seed=episode.noise,
    experts=limits.record_experts,
    priority=priority,
  )


def _fed(
  turn: trajectory.Turn, last: Int32[np.ndarray, "S k"]
) -> trajectory.Turn:
  """Returns the turn with the experts of its last id, where it had none."""
  if turn.experts is None:
    return turn
  experts = turn.experts.copy()
  experts[-1] = np.where(experts[-1] < 0, last, experts[-1])
  return dataclasses.replace(turn, experts=experts)


def _encode(
  encode: Callable[[Sequence[base.Message]], Int32[np.ndarray, " P"]],
  messages: Sequence[base.Message],
) -> Int32[np.ndarray, " P"]:
  try:
    return np.asarray(encode(messages), np.int32)
  except Exception as error:  # What the environment said has no encoding.
    raise isolation.Fault(
      f"its message cannot be read: {isolation.reason(error)}"
    ) from error
