"""Episodes of an environment played without a model, to see what it does.

answers' text -> chat -> episode.play -> reward = PlayedEpisode
                            |
                            +-- _Watched environment: seconds, tools, close
"""

import asyncio
import dataclasses
import functools
import random
import time
import traceback
import zlib
from collections.abc import (
  Awaitable,
  Callable,
  Generator,
  Mapping,
  Sequence,
)
from typing import Any

from envs import base
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode, grading, prompts, recordings
from rl.runtime import isolation

Pace = Callable[[], Awaitable[None]]
"""Waits before an answer."""

_RANDOM_IDS = 16
_ANSWER_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
  """A conversation that waits for an answer; `seed` differs from turn to turn.

  Attributes:
    tools: their JSON schemas.
    turn: answers so far; the messages may hold more, which were given.
  """

  task: base.Task
  messages: Sequence[base.Message]
  tools: Sequence[Mapping[str, Any]] = ()
  seed: int = 0
  turn: int = 0


class PlaysItself(ValueError):
  """The source builds agents, which only a run can play."""


Respond = Callable[[Question], Awaitable[str | base.Message]]
"""Returns an answer; of one with calls the chat decides the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """An environment as a run would play it.

  Attributes:
    chat: of the run.
    respond: gives the answers.
    plays_well: its answers should reach the end within the limits.
    reward_s: deadline of the reward.
    recorded: loads as many of the conversations of the source that are trained
      as they are; None if it only plays.
  """

  source: base.Source
  reward: base.Reward
  limits: episode.Limits
  chat: episode.Chat
  respond: Respond
  plays_well: bool = False
  reward_s: float = 30.0
  seed: int = 0
  recorded: Callable[[int], recordings.Examples] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlayedEpisode:
  """One episode and its times.

  Attributes:
    answers: as they were given, before limits cut any.
    tools: schemas of the environment's tools; none after a fault.
    seconds: of each call, by method.
    blocked: of them, the longest in a row in which nothing else could run.
    closing: what went wrong in `close`, or "".
    traceback: of the first exception of the environment, or "".
  """

  task: base.Task
  trajectory: trajectory.Trajectory
  transcript: base.Transcript
  answers: Sequence[str | base.Message]
  tools: Sequence[Mapping[str, Any]]
  seconds: Mapping[str, Sequence[float]]
  blocked: Mapping[str, Sequence[float]]
  closing: str
  traceback: str

  @property
  def outcome(self) -> dict[str, Any]:
    """All that the same answers must bring about again, but for the grade."""
    return {
      "status": self.trajectory.status.value,
      "messages": list(self.transcript.messages),
      "rewards of its steps": list(self.transcript.step_rewards),
      "metrics": dict(self.trajectory.metrics),
    }


def demonstrates(source: base.Source) -> bool:
  """Returns whether a source, and all that it mixes or wraps, has an oracle."""
  try:
    prompts.demonstrator(source)
  except ValueError:
    return False
  return True


def demonstration(source: base.Source) -> Respond:
  """Returns the source's oracle as a source of answers.

  Raises:
    ValueError: it has none.
  """
  oracle = prompts.demonstrator(source).oracle

  async def respond(question: Question) -> str | base.Message:
    said = oracle(question.task, question.messages)
    return episode.checked_answer(said, "oracle")

  return respond


def exploration(source: base.Source, chat: episode.Chat) -> Respond:
  """Returns the source's random answers, or ones of random ids."""
  if demonstrates(source):
    explore = prompts.demonstrator(source).explore

    async def respond(question: Question) -> str | base.Message:
      one = question
      said = explore(one.task, one.messages, one.seed)
      return episode.checked_answer(said, "explore")

    return respond

  async def random_ids(question: Question) -> str:
    draw = random.Random(question.seed)
    count = draw.randint(1, _RANDOM_IDS)
    ids = [draw.randrange(chat.vocab_size) for _ in range(count)]
    return chat.decode(ids)

  return random_ids


def script(answers: Sequence[str | base.Message]) -> Respond:
  """Gives these answers, one a turn, and repeats the last one."""

  async def scripted(question: Question) -> str | base.Message:
    return answers[min(question.turn, len(answers) - 1)]

  return scripted


async def at_once() -> None:
  """Paces a session that is played alone."""


async def play(
  trial: Trial, task: base.Task, pace: Pace = at_once
) -> PlayedEpisode:
  """Plays a task to its end and grades it; faults are data.

  Raises:
    PlaysItself: there are no answers to give.
  """
  watched = _WatchedSource(trial.source)
  partial = episode.PartialTrajectory(
    episode.Episode(task, task.index, 0, trial.seed)
  )
  answers: list[str | base.Message] = []

  async def answer(request: contract.DecodeRequest) -> contract.Completion:
    await pace()
    seed = zlib.crc32(request.tokens.tobytes(), request.seed) & 0x7FFFFFFF
    tools = watched.environment.tools_shown if watched.environment else ()
    messages = list(partial.messages)
    question = Question(task, messages, tools, seed, turn=len(answers))
    said = await isolation.guarded(
      lambda: trial.respond(question), _ANSWER_S, "giving an answer"
    )
    answers.append(said)
    return episode.given_answer(trial.chat, said, request.max_tokens)

  late: set[asyncio.Task[None]] = set()
  ungraded, transcript = await episode.play(
    watched, answer, trial.chat, trial.limits, partial, late=late
  )
  if watched.refusal is not None:
    raise watched.refusal
  graded = await grade(trial, ungraded, transcript, task)
  seen = watched.environment
  return PlayedEpisode(
    task=task,
    trajectory=graded,
    transcript=transcript,
    answers=answers,
    tools=list(seen.tools_shown) if seen and graded.status.trainable else [],
    seconds=seen.seconds if seen else {},
    blocked=seen.blocked if seen else {},
    closing=seen.closing if seen else "",
    traceback=seen.traceback if seen else "",
  )


async def grade(
  trial: Trial,
  ungraded: trajectory.Trajectory,
  transcript: base.Transcript,
  task: base.Task,
) -> trajectory.Trajectory:
  """Calls the reward once; see `grading.Graders.grade`."""
  once = grading.Retries(attempts=1, deadline_s=trial.reward_s)
  graders = grading.Graders(trial.reward, once)
  return await graders.grade(ungraded, transcript, task)


class Lockstep:
  """Paces sessions so that each answers when all that still play have asked.

  Args:
    sessions: how many begin; each calls `leave` at its end.
  """

  def __init__(self, sessions: int):
    self._playing, self._asked = sessions, 0
    self._turn = asyncio.Event()

  async def ask(self) -> None:
    """Waits for the others."""
    turn = self._turn
    self._asked += 1
    self._advance()
    await turn.wait()

  def leave(self) -> None:
    """Ends a session."""
    self._playing -= 1
    self._advance()

  def _advance(self) -> None:
    if self._asked == self._playing:
      self._turn.set()
      self._turn, self._asked = asyncio.Event(), 0


async def play_together(
  trials: Sequence[tuple[Trial, base.Task]],
) -> list[PlayedEpisode]:
  """Plays all tasks at the same time, their steps in lockstep."""
  lockstep = Lockstep(len(trials))

  async def one(trial: Trial, task: base.Task) -> PlayedEpisode:
    try:
      return await play(trial, task, lockstep.ask)
    finally:
      lockstep.leave()

  return await asyncio.gather(*(one(*pair) for pair in trials))


@dataclasses.dataclass(eq=False)
class _WatchedSource:
  """A source that keeps the one environment that it builds.

  Attributes:
    refusal: why what it builds cannot be tried.
  """

  source: base.Source
  environment: "_Watched | None" = None
  refusal: PlaysItself | None = None

  @property
  def name(self) -> str:
    return self.source.name

  def task(self, index: int, split: base.Split) -> base.Task:
    return self.source.task(index, split)

  def __call__(self, task: base.Task) -> "_Watched":
    built = isolation.checked_environment(self.source(task))
    if isinstance(built, base.Agent):
      # An episode would make a fault of it, so `play` raises it again.
      self.refusal = PlaysItself(
        f"environment {self.name} is a program that asks for its answers "
        "itself, so only a run can play it; to try it, serve a model with "
        "launch.serve and start the program against that"
      )
      raise self.refusal
    self.environment = _Watched(built)
    return self.environment


@dataclasses.dataclass(eq=False)
class _Watched:
  """An environment whose calls are timed.

  Attributes:
    closing, traceback: see `PlayedEpisode`.
  """

  environment: base.Environment
  seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  blocked: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  tools_shown: Sequence[Mapping[str, Any]] = ()
  closing: str = "close was not called"
  traceback: str = ""

  def __getattr__(self, name: str) -> Any:
    """Returns the environment's own attributes, its tools among them."""
    value = getattr(self.environment, name)
    if name == "tools":
      self.tools_shown = value
    return value

  async def start(self) -> Sequence[base.Message]:
    return await self._timed("start", lambda: self.environment.start())

  async def step(self, answer: base.Message) -> base.Step:
    return await self._timed("step", lambda: self.environment.step(answer))

  async def close(self) -> None:
    self.closing = "close has not returned"
    try:
      await self._timed("close", lambda: self.environment.close())
    except asyncio.CancelledError:
      raise
    except BaseException as error:
      self.closing = isolation.raised("close", error)
      raise
    self.closing = ""

  async def _timed(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
    begun, stretches = time.perf_counter(), _Stretches(call)
    try:
      return await stretches
    except isolation.NotAwaitable:
      raise  # No line of the environment's led there.
    except Exception:
      self.traceback = self.traceback or traceback.format_exc()
      raise
    finally:
      taken = time.perf_counter() - begun
      self.seconds.setdefault(what, []).append(taken)
      self.blocked.setdefault(what, []).append(stretches.longest_s)


class _Stretches:
  """A call that can be awaited once; times how long it keeps the event loop.

  Attributes:
    longest_s: between two moments at which others could run.
  """

  def __init__(self, call: Callable[[], Awaitable[Any]]):
    self._call = call
    self.longest_s = 0.0

  async def _awaited(self) -> Any:
    return await isolation.awaitable(self._call())

  def __await__(self) -> Generator[Any, Any, Any]:
    steps = self._awaited().__await__()
    go_on = functools.partial(steps.send, None)
    while True:
      begun = time.perf_counter()
      try:
        waits_for = go_on()
      except StopIteration as end:
        return end.value
      finally:
        self.longest_s = max(self.longest_s, time.perf_counter() - begun)
      try:
        go_on = functools.partial(steps.send, (yield waits_for))
      except BaseException as error:
        go_on = functools.partial(steps.throw, error)
