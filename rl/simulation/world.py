"""Environments, chat and reward of a simulated run: they only take time.

Messages are numbers: the count of their ids and, in the first, the number of
the play. The ids of that message count up from it, so that engine and reward
can identify the play from a request or a transcript, and draw with the
environment whatever the order of events.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from envs import base
from models.chat import text_decoder, tool_calls
from rl.data import trajectory
from rl.engine import contract
from rl.simulation import engine as simulated_engine
from rl.simulation import host_thread, recording, resources
from rl.simulation import hosts as hosts_lib
from rl.simulation import workload as workload_lib

_STOP_ID = 1
_NO_TEXT = tool_calls.Answer("")
_FIRST_IDS = 1 << 16
# Of an endless run only so many are known. Tasks are replayed soon or never,
# and a play that was never graded has failed, or was aborted.
_MAX_TASKS = 1 << 16
_MAX_UNGRADED = 1 << 20
_Play = tuple[int, workload_lib.GroupMember]
"""Number of the source, and the member that plays."""


@dataclasses.dataclass(eq=False)
class World:
  """The source, reward and chat of a simulated run, and lengths of answers.

  Plays of a task differ in their draws: they are numbered as they begin.

  Args:
    workloads: with different names.
    seats: at which its rewards are computed; None: each only takes its time.
    hosts: of its environments; None: there is room for all.
    thread: that starts and turns share.
    recorded: groups whose turns and ids the only workload repeats; empty: they
      are drawn.
  """

  workloads: Sequence[workload_lib.Workload]
  seed: int
  seats: resources.SeatPool | None = None
  hosts: hosts_lib.HostPool | None = None
  thread: host_thread.HostThread = dataclasses.field(
    default_factory=lambda: host_thread.HostThread(host_thread.HostWork())
  )
  recorded: Sequence[trajectory.Group] = ()
  name: str = "simulated"
  stateless: bool = True
  stop_ids: tuple[int, ...] = (_STOP_ID,)

  def __post_init__(self) -> None:
    self.sources = tuple(
      _Source(workload, number)
      for number, workload in enumerate(self.workloads)
    )
    self.weights = tuple(workload.share for workload in self.workloads)
    self._draws = [self._draws_of(workload) for workload in self.workloads]
    self._numbers = {w.name: i for i, w in enumerate(self.workloads)}
    # The plays begun of a task, of tasks in the order of their last play.
    self._built: dict[str, int] = {}
    self._plays: dict[int, _Play] = {}
    self._gradings: dict[int, int] = {}
    self._num_plays = 0
    self._rising = _rising(_FIRST_IDS)

  def _draws_of(self, workload: workload_lib.Workload) -> workload_lib.Draws:
    if self.recorded:
      return recording.RecordedDraws(workload, self.seed, self.recorded)
    return workload_lib.Draws(workload, self.seed)

  # The source.

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task of the sources in turn."""
    source = self.sources[index % len(self.sources)]
    return source.task(index // len(self.sources), split)

  def __call__(self, task: base.Task) -> base.Environment:
    """Returns a fresh environment of the task's source."""
    number = self._built.pop(task.id, 0)
    self._built[task.id] = number + 1
    if len(self._built) > _MAX_TASKS:
      del self._built[next(iter(self._built))]
    member = workload_lib.GroupMember(task.index, number)
    source, hosts = self._numbers[task.source], self.hosts
    play, self._num_plays = self._num_plays, self._num_plays + 1
    self._plays[play] = source, member
    if len(self._plays) > _MAX_UNGRADED:
      oldest = next(iter(self._plays))
      del self._plays[oldest]
      self._gradings.pop(oldest, None)
    return _Environment(
      self._draws[source],
      member,
      play,
      hosts if hosts and hosts.serves(task.source) else None,
      self.thread,
    )

  # The reward.

  async def grade(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns a reward of 1 or 0, after the seconds of a grading.

    Args:
      transcripts: of one play; a retry draws other seconds.
    """
    (transcript,) = transcripts
    _, play = _numbers(transcript.messages[0])
    source, member = self._plays[play]
    call = self._gradings.get(play, 0)
    self._gradings[play] = call + 1
    draws = self._draws[source]
    async with self.seats.seat() if self.seats else contextlib.nullcontext():
      await _wait(draws.of_turn("reward_s", member, call))
    if draws.faulty("reward", member, call):
      raise OSError("a simulated reward failed")
    # No further call begins for it; one under way may end as well.
    self._plays.pop(play, None)
    self._gradings.pop(play, None)
    return [base.Grade(float(draws.succeeds(member)), {})]

  # The engine's answers.

  def answer_tokens(self, request: contract.DecodeRequest) -> int:
    """Returns the length of an answer before it is cut."""
    source, member = self._plays[request.tokens[0]]
    return self._draws[source].count("answer_tokens", member, _turn(request))

  def ids(
    self, request: contract.DecodeRequest
  ) -> tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " T"]]:
    """Returns the context of a request as recorded, and its whole answer.

    Where nothing is recorded ids differ between plays, and answers are 0.
    """
    source, member = self._plays[request.tokens[0]]
    draws = self._draws[source]
    if isinstance(draws, recording.RecordedDraws):
      return draws.ids(member, _turn(request))
    count = self.answer_tokens(request)
    return request.tokens, simulated_engine.constant(0, count, np.int32)

  # The chat.

  @property
  def vocab_size(self) -> int:
    """Any id is one of a request."""
    return 2**31

  def open(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Int32[np.ndarray, " P"]:
    """Returns the first context: ids that count up from the play.

    Conversations share them, since copies would take most of the memory.
    """
    count, play = _numbers(messages[0])
    if play + count > len(self._rising):
      self._rising = _rising(2 * (play + count))
    return self._rising[play : play + count]

  def append(
    self, messages: Sequence[base.Message], answer_ended: bool = True
  ) -> Int32[np.ndarray, " P"]:
    """Returns as many ids as the messages say."""
    count = sum([_count(message.content) for message in messages])
    return simulated_engine.constant(0, count, np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    """Returns "": answers have no text."""
    return ""

  def decoder(self) -> text_decoder.TextDecoder:
    """Returns a decoder of answers without text."""
    return text_decoder.TextDecoder(lambda _: b"")

  def parse(
    self, ids: Int32[np.ndarray, " T"], tools: Sequence[Mapping[str, Any]] = ()
  ) -> tool_calls.Answer:
    """Returns an answer without text."""
    return _NO_TEXT

  def encode_answer(self, text: str) -> Int32[np.ndarray, " T"]:
    """Returns the end of an answer."""
    return np.array([_STOP_ID], np.int32)

  @property
  def gap(self) -> str:
    """Text between those of two ids."""
    return " "

  def token(self, index: int) -> str:
    """Returns the number of the id."""
    return str(index)


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedReward:
  """The rewards of a world."""

  world: World
  stateless: bool = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns a reward of 1 or 0, after the seconds of a grading."""
    return await self.world.grade(task, transcripts)


@dataclasses.dataclass(frozen=True)
class _Source:
  """The tasks of one workload; the world builds their environments."""

  workload: workload_lib.Workload
  number: int

  @property
  def name(self) -> str:
    return self.workload.name

  @property
  def restarts(self) -> bool:
    return self.workload.restarts

  def task(self, index: int, split: base.Split) -> base.Task:
    name = f"{self.name}/{split}/{index}"
    return base.Task(id=name, index=index, split=split, seed=self.number)

  def __call__(self, task: base.Task) -> base.Environment:
    raise TypeError(f"task {task.id}: environments come from the whole world")


class _Environment:
  """One episode, with drawn turns and seconds.

  Args:
    play: its number, the first id of the conversation.
    hosts: that it needs a slot of.
    thread: that it shares with all others.
  """

  def __init__(
    self,
    draws: workload_lib.Draws,
    member: workload_lib.GroupMember,
    play: int,
    hosts: hosts_lib.HostPool | None,
    thread: host_thread.HostThread,
  ):
    self._hosts = hosts
    self._thread = thread
    self._place: hosts_lib.Place | None = None
    self.admit = self._admit if hosts else None
    self._draws = draws
    self._member = member
    self._play = play
    self._left = draws.count("turns", member)
    self._steps = 0

  async def _admit(self) -> None:
    assert self._hosts is not None
    self._place = await self._hosts.admit()

  async def start(self) -> Sequence[base.Message]:
    await self._wait(self._draws.of_turn("start_s", self._member), starts=True)
    await self._thread.turn()
    if self._draws.faulty("start", self._member):
      raise OSError("a simulated environment did not start")
    ids = self._draws.of_task("prompt_tokens", self._member.task)
    return [base.Message("user", f"{max(1, round(ids))} {self._play}")]

  def step(self, answer: base.Message) -> Awaitable[base.Step]:
    turn, self._steps = self._steps, self._steps + 1
    seconds = self._draws.of_turn("step_s", self._member, turn)
    if self._place is not None or self._thread.is_shared:
      return self._step_there(seconds, turn)
    # A future costs less than a task that sleeps, and these are most waits.
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[base.Step] = loop.create_future()
    if seconds > 0:
      loop.call_at(loop.time() + seconds, self._give, reply, turn)
    else:
      self._give(reply, turn)
    return reply

  async def _step_there(self, seconds: float, turn: int) -> base.Step:
    await self._wait(seconds)
    await self._thread.turn()
    return self._reply(turn)

  def _give(self, reply: asyncio.Future[base.Step], turn: int) -> None:
    if reply.done():  # It was cancelled.
      return
    try:
      reply.set_result(self._reply(turn))
    except OSError as error:
      reply.set_exception(error)

  def _reply(self, turn: int) -> base.Step:
    if self._draws.faulty("step", self._member, turn):
      raise OSError("a simulated environment broke")
    if self._steps == self._left:
      return base.Step([], 0.0, True)
    ids = self._draws.count("reply_tokens", self._member, turn)
    return base.Step([_message(ids)], 0.0, False)

  async def close(self) -> None:
    if self._hosts and self._place:
      self._hosts.release(self._place)

  async def _wait(self, seconds: float, starts: bool = False) -> None:
    if self._hosts and self._place:
      await self._hosts.run(self._place, seconds, starts)
    elif seconds > 0:
      await asyncio.sleep(seconds)


async def _wait(seconds: float) -> None:
  if seconds > 0:
    await asyncio.sleep(seconds)


@functools.lru_cache(maxsize=1 << 16)
def _message(ids: int) -> base.Message:
  """Returns a reply of so many ids."""
  return base.Message("user", f"{ids}")


@functools.lru_cache(maxsize=1 << 16)
def _count(content: str) -> int:
  """Returns the count of ids of a reply."""
  return int(content)


def _turn(request: contract.DecodeRequest) -> int:
  """Returns the number of the turn that a request asks for."""
  return int(request.request_id.rpartition("/")[2])


def _numbers(message: base.Message) -> list[int]:
  """Returns the number of ids of a message and, of the first, the play."""
  return list(map(int, message.content.split()))


def _rising(count: int) -> Int32[np.ndarray, " N"]:
  """Returns 0, 1, 2 and so on, which nobody may change."""
  ids = np.arange(count, dtype=np.int32)
  ids.flags.writeable = False
  return ids
