"""One episode: environment x engine -> trajectory, token for token.

play: _open -> _turns -> close
_open: source(task) -> admit -> start; again after a failure, see `starting`
_turns: [ context -> generate -> decode -> step ]*
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32

from envs import base
from models.chat import call_formats, tool_calls
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import starting
from rl.runtime import isolation, logical_clock
from rl.runtime import watchdog as watchdog_lib

_T = TypeVar("_T")
_NOTHING = np.zeros(0, np.int32)
_Request = Callable[..., contract.DecodeRequest]
"""Builds a request from the fields that differ from turn to turn."""

Generate = Callable[[contract.DecodeRequest], Awaitable[contract.Completion]]
"""Samples one answer, as `contract.DecodeEngine.generate`."""


RunAgent = Callable[[base.Endpoint], Awaitable[base.AgentResult]]
"""Runs the agent of an episode; whatever goes wrong with it is a Fault."""


class AnswerDecoder(Protocol):
  """Decodes one answer piece by piece; all together are the text of its ids."""

  def feed(self, ids: Sequence[int]) -> str:
    """Returns the text that became final."""
    ...

  def end(self) -> str:
    """Returns what was held back."""
    ...


@runtime_checkable
class Chat(Protocol):
  """Messages <-> ids, append-only, such as `models.chat.word_chat.WordChat`."""

  @property
  def vocab_size(self) -> int:
    """One more than the largest id."""
    ...

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""
    ...

  def open(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids of the first context.

    Args:
      tools: JSON schemas of functions, as in the OpenAI API.

    Raises:
      ValueError: it cannot be encoded.
    """
    ...

  def append(
    self, messages: Sequence[base.Message], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns the ids that follow an answer.

    Args:
      answer_ended: with a stop id, rather than cut off.
    """
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Returns an answer as text."""
    ...

  def decoder(self) -> AnswerDecoder:
    """Returns a decoder of one answer while it is sampled."""
    ...

  def parse(
    self,
    ids: Int32[np.ndarray, " T"],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> tool_calls.Answer:
    """Returns an answer as content, reasoning and tool calls; never raises.

    Args:
      tools: those that `open` was given.
    """
    ...

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the ids of `text` as an answer of the policy."""
    ...

  def token(self, index: int) -> str:
    """Returns one id as printable text."""
    ...

  @property
  def gap(self) -> str:
    """Text between those of two ids: a space where ids are words, else ""."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Limits of one episode, and its sampling.

  Attributes:
    max_turns: most answers in an episode.
    turn_tokens: most tokens of one answer.
    max_tokens: most tokens of a whole episode, context included.
    temperature: of sampling; 0 takes the most probable token.
    step_s: deadline of one start, step or close of an environment. The first
      start of a process may import the environment's package.
    record_experts: records the experts that the engine chose for every id, for
      the learner to use the same (router replay).
  """

  max_turns: int = 16
  turn_tokens: int = 2
  max_tokens: int = 64
  temperature: float = 1.0
  step_s: float = 60.0
  record_experts: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
  """The identity of an episode: member `index` of an attempt at a group."""

  task: base.Task
  group_id: int
  index: int
  seed: int
  attempt: int = 0

  @property
  def name(self) -> str:
    """Unique within a run: the engine's session."""
    return f"{self.group}/{self.index}"

  @property
  def group(self) -> str:
    """The name of its group: all of them have one prompt."""
    return f"{self.task.split}/{self.group_id}/{self.attempt}"

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
    late: gets the task that closes it, when that overruns its deadline.
    calls: left behind and still running.
  """

  environment: Any  # The source may have built nonsense.
  step_s: float
  watchdog: watchdog_lib.Watchdog
  owner: str
  late: set[asyncio.Task[None]]
  calls: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)

  async def admit(self) -> None:
    """Waits until its source, which may limit their number, has room for it."""
    admit = isolation.contained(
      lambda: getattr(self.environment, "admit", None), "reading its admit"
    )
    if admit is not None:
      if isinstance(asyncio.get_running_loop(), logical_clock.LogicalEventLoop):
        raise isolation.Fault(
          "a repeatable run cannot be saved while an environment waits for "
          "others in admit; use repeatable=false"
        )
      await self._ask(admit, "admit", _ignored, math.inf)

  def start(self) -> Awaitable[list[base.Message]]:
    return self._ask(
      lambda: self.environment.start(),
      "start",
      lambda messages: isolation.checked_messages(messages, "start"),
    )

  def tools(self) -> Sequence[Mapping[str, Any]]:
    """Returns the schemas of its tools, if it has any."""
    return isolation.contained(
      lambda: isolation.checked_tools(getattr(self.environment, "tools", ())),
      "reading its tools",
    )

  def step(self, answer: base.Message) -> Awaitable[base.Step]:
    return self._ask(
      lambda: self.environment.step(answer), "step", isolation.checked_step
    )

  def run(self, endpoint: base.Endpoint) -> Awaitable[base.AgentResult]:
    """Runs an agent; the caller has its deadline."""
    return self._ask(
      lambda: self.environment.run(endpoint),
      "run",
      isolation.checked_result,
      deadline_s=math.inf,
    )

  async def close(self) -> None:
    """Closes it, and waits at most `step_s` for that."""
    ending = asyncio.create_task(self._end())
    try:
      await asyncio.wait([ending], timeout=self.step_s)
    finally:
      if not ending.done():
        self.late.add(ending)
        ending.add_done_callback(self.late.discard)

  async def _end(self) -> None:
    """Closes it after its last call: its contract is one call at a time."""
    if self.calls:
      await asyncio.wait(self.calls)
    # The episode is over, and its reward is known: a fault changes nothing.
    with contextlib.suppress(isolation.Fault):
      await self._ask(lambda: self.environment.close(), "close", _ignored)
    if self.calls:
      await asyncio.wait(self.calls)

  # Not a coroutine around another: each is one more frame in every turn.
  def _ask(
    self,
    call: Callable[[], Awaitable[Any]],
    what: str,
    check: Callable[[Any], _T],
    deadline_s: float | None = None,
  ) -> Awaitable[_T]:
    return isolation.guarded(
      call,
      self.step_s if deadline_s is None else deadline_s,
      what,
      self.watchdog,
      self.owner,
      " of the environment",
      late=self.calls,
      check=check,
    )


def as_message(answer: tool_calls.Answer) -> base.Message:
  """Returns a parsed answer as a message of the agent."""
  calls: tuple[base.ToolCall, ...] = ()
  if answer.tool_calls:
    calls = tuple(
      [base.ToolCall(c.name, c.arguments, c.id) for c in answer.tool_calls]
    )
  reasoning = answer.reasoning or None
  return base.Message("assistant", answer.content, calls, reasoning)


def checked_answer(
  answer: str | base.Message, given_by: str
) -> str | base.Message:
  """Returns what a method of an environment gave as an answer.

  Raises:
    Fault: it is none; names the method.
  """
  if not isinstance(answer, str | base.Message):
    kind = type(answer).__name__
    raise isolation.Fault(
      f"{given_by} returned {kind}, not a text or a Message"
    )
  return answer


def as_text(
  answer: str | base.Message,
  call_format: call_formats.CallFormat = call_formats.HERMES,
) -> str:
  """Returns an answer as a model writes it, with the thinking that it opens."""
  if isinstance(answer, str):
    return answer
  calls = [tool_calls.Call(c.name, c.arguments) for c in answer.tool_calls]
  return tool_calls.write(
    tool_calls.Answer(answer.content, tuple(calls), answer.reasoning or ""),
    call_format,
  )


def given_answer(
  chat: Chat, answer: str | base.Message, max_tokens: int | None = None
) -> contract.Completion:
  """Returns an answer that no model sampled: its log-probabilities are 0.

  The chat parses it as `answer` again, also where its prompt opens the
  thinking.

  Args:
    max_tokens: cuts it where an engine would; None leaves it whole.
  """
  form = call_formats.of(chat)
  thinks = getattr(chat, "thinks", False)
  text = tool_calls.after_prompt(as_text(answer, form), thinking=thinks)
  ids = np.asarray(chat.encode_answer(text), np.int32)
  tokens = ids[:max_tokens]
  return contract.Completion(
    tokens=tokens,
    logprobs=np.zeros(len(tokens), np.float32),
    versions=np.zeros(len(tokens), np.int32),
    stop="stop" if len(tokens) == len(ids) else "length",
    cached_tokens=0,
    decode_s=0.0,
  )


def _ignored(value: object) -> None:
  """Accepts any result."""


@dataclasses.dataclass(slots=True)
class PartialTrajectory:
  """The trajectory of an episode in progress; `play` fills it.

  Attributes:
    on_turn: called with every turn before it is added.
    over: True when only the close of the environment is left.
  """

  episode: Episode
  on_turn: Callable[[trajectory.Turn], None] = lambda turn: None
  over: bool = False
  turns: list[trajectory.Turn] = dataclasses.field(default_factory=list)
  messages: list[base.Message] = dataclasses.field(default_factory=list)
  rewards: list[float] = dataclasses.field(default_factory=list)
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def add(
    self,
    context: Int32[np.ndarray, " P"],
    completion: contract.Completion,
    env_s: float,
    reward: float,
    opens: bool = False,
  ) -> None:
    """Appends a turn.

    The last id of a turn is fed with the context of the next: only then are
    its experts known.

    Args:
      context: ids since the answer before.
      opens: it begins another conversation, so `context` is all before it.
    """
    experts = completion.experts
    if experts is not None:
      # They cover the whole conversation, and end with the ids of this turn.
      first = len(experts) - len(context) - len(completion.tokens)
      if self.turns and not opens:
        self.turns[-1] = _fed(self.turns[-1], experts[first - 1])
      experts = experts[first:].copy()
    turn = trajectory.Turn(
      context=context,
      tokens=completion.tokens,
      logprobs=completion.logprobs,
      versions=completion.versions,
      stop=completion.stop,
      decode_s=completion.decode_s,
      queue_s=completion.queue_s,
      env_s=env_s,
      reward=reward,
      experts=experts,
      opens=opens,
    )
    self.on_turn(turn)
    self.turns.append(turn)

  def end(
    self,
    status: trajectory.Status,
    fault: str = "",
    unanswered: Int32[np.ndarray, " P"] = _NOTHING,
  ) -> tuple[trajectory.Trajectory, base.Transcript]:
    """Returns the trajectory without its reward, and its text."""
    self.over = True
    partial = trajectory.Trajectory(
      task_id=self.episode.task.id,
      group_id=self.episode.group_id,
      index=self.episode.index,
      turns=self.turns,
      status=status,
      fault=fault,
      metrics=self.metrics,
      unanswered=unanswered,
    )
    return partial, base.Transcript(self.messages, self.rewards)


PlayAgent = Callable[
  [RunAgent, PartialTrajectory],
  Awaitable[tuple[trajectory.Trajectory, base.Transcript]],
]
"""Plays an agent; after an exception the trajectory holds all sampled turns."""


async def play(
  source: base.Source,
  generate: Generate,
  chat: Chat,
  limits: Limits,
  partial: PartialTrajectory,
  watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
  priority: tuple[int, ...] = (),
  closing: set[asyncio.Task[None]] | None = None,
  late: set[asyncio.Task[None]] | None = None,
  starts: starting.Starts | None = None,
  play_agent: PlayAgent | None = None,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  """Plays one environment to its end, keeping ids exactly as sampled.

  Args:
    source: builds the environment, which is closed here on every path.
    partial: fresh; after an exception it holds all sampled turns.
    watchdog: lists the waits for the environment.
    priority: of its requests.
    closing: gets the task that closes the environment, until it is done: a
      slow one need not hold up the reward. None waits for it here.
    late: gets the cleanup task of an environment that overran its deadline,
      until it is done; it closes the environment after its last call.
    starts: starts the environment; None tries once.
    play_agent: plays what a source built in place of an environment; the
      engine is asked over HTTP then, and not by `generate`.

  Returns:
    The trajectory without its reward, and its text. An environment that
    raises, overruns `step_s` or returns nonsense ends it with ENV_FAULT: a
    fault is data, and the batch masks it.

  Raises:
    EngineClosed: the engine stopped; the task may be replayed elsewhere.
  """
  episode, owner = partial.episode, f"episode {partial.episode.name}"
  late = set() if late is None else late

  def build() -> _Guarded:
    built = isolation.contained(
      lambda: isolation.checked_environment(source(episode.task)), "building it"
    )
    return _Guarded(built, limits.step_s, watchdog, owner, late)

  opening = functools.partial(_open, build, closing)
  try:
    if starts is None:
      environment, observation = await opening()
    else:
      environment, observation = await starts.run(
        source, episode.task, opening, owner
      )
  except isolation.Fault as fault:
    return partial.end(trajectory.Status.ENV_FAULT, str(fault))
  try:
    if observation is None:
      if play_agent is None:
        raise isolation.Fault("it is an agent, which needs a run's server")
      return await play_agent(environment.run, partial)
    request = _request(episode, chat, limits, priority)
    return await _turns(
      partial, environment, observation, generate, chat, limits, request
    )
  except isolation.Fault as fault:
    return partial.end(trajectory.Status.ENV_FAULT, str(fault))
  finally:
    await _close(environment, closing)


async def _open(
  build: Callable[[], _Guarded], closing: set[asyncio.Task[None]] | None
) -> tuple[_Guarded, list[base.Message] | None]:
  """Returns a started environment and what it said; None of an agent."""
  environment = build()
  try:
    is_agent = isolation.contained(
      lambda: isinstance(environment.environment, base.Agent), "building it"
    )
    if is_agent:
      return environment, None
    await environment.admit()
    return environment, await environment.start()
  except BaseException:
    await _close(environment, closing)
    raise


async def _close(
  environment: _Guarded, closing: set[asyncio.Task[None]] | None
) -> None:
  if closing is None:
    await environment.close()
  else:
    task = asyncio.create_task(environment.close())
    closing.add(task)
    task.add_done_callback(closing.discard)


async def _turns(
  partial: PartialTrajectory,
  environment: _Guarded,
  observation: list[base.Message],
  generate: Generate,
  chat: Chat,
  limits: Limits,
  request: _Request,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  loop, name = asyncio.get_running_loop(), partial.episode.name
  partial.messages.extend(observation)
  tools = environment.tools()
  context = _encode(chat.open, observation, tools)
  conversation, ids = _Conversation(context), context
  for number in range(limits.max_turns):
    room = limits.max_tokens - len(ids)
    if room < 1:
      if not partial.turns:
        raise isolation.Fault(
          f"a context of {len(ids)} ids leaves no room for an answer in "
          f"rollout.max_tokens={limits.max_tokens}"
        )
      break
    try:
      completion = await generate(
        request(
          request_id=f"{name}/{number}",
          tokens=ids,
          max_tokens=min(limits.turn_tokens, room),
        )
      )
    except ValueError as error:
      return partial.end(trajectory.Status.ENGINE_FAULT, str(error))
    asked, reward = loop.time(), 0.0
    try:
      if completion.stop == "abort":
        return partial.end(trajectory.Status.ENGINE_FAULT, "aborted")
      answer = as_message(chat.parse(completion.tokens, tools))
      partial.messages.append(answer)
      step = await environment.step(answer)
      reward = float(step.reward)
    finally:
      # On every path: sampled tokens are never lost.
      partial.add(context, completion, loop.time() - asked, reward)
    partial.rewards.append(step.reward)
    for key, value in step.metrics.items():
      partial.metrics[key] = partial.metrics.get(key, 0.0) + value
    partial.messages.extend(step.messages)
    if step.done:
      return partial.end(trajectory.Status.COMPLETED)
    context = _encode(chat.append, step.messages, completion.stop == "stop")
    ids = conversation.extend(completion.tokens, context)
  room = max(limits.max_tokens - len(ids) + len(context), 0)
  return partial.end(
    trajectory.Status.TRUNCATED, unanswered=context[:room].copy()
  )


class _Conversation:
  """The ids of a conversation so far; copying all in every turn adds up.

  Args:
    context: the first; only a copy of it is ever extended.
  """

  def __init__(self, context: Int32[np.ndarray, " P"]):
    self._ids = context
    self._length = len(context)

  def extend(self, *pieces: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " N"]:
    """Appends ids; returns a view of all of them, which never changes."""
    start, self._length = self._length, self._length + sum(map(len, pieces))
    if self._length > len(self._ids):
      # A quarter of room to spare: many conversations wait for an engine.
      longer = np.empty(256 + self._length * 5 // 4, np.int32)
      longer[:start] = self._ids[:start]
      self._ids = longer
    for piece in pieces:
      end = start + len(piece)
      self._ids[start:end] = piece
      start = end
    return self._ids[: self._length]


def _request(
  episode: Episode, chat: Chat, limits: Limits, priority: tuple[int, ...]
) -> _Request:
  """Returns a builder of requests; the constant fields are set once."""
  # Not a nested function: its annotations would make a new type of array in
  # every episode, at 30 us, and work for the garbage collector.
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
  turn: trajectory.Turn, last: Int[np.ndarray, "S k"]
) -> trajectory.Turn:
  """Returns the turn with the experts of its last id filled in."""
  if turn.experts is None:
    return turn
  experts = turn.experts.copy()
  experts[-1] = np.where(experts[-1] < 0, last, experts[-1])
  return dataclasses.replace(turn, experts=experts)


def _encode(
  encode: Callable[..., Int32[np.ndarray, " P"]], *args: Any
) -> Int32[np.ndarray, " P"]:
  try:
    return np.asarray(encode(*args), np.int32)
  except Exception as error:  # The environment's message has no encoding.
    raise isolation.Fault(
      f"its message cannot be read: {base.reason(error)}"
    ) from error
