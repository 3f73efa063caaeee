"""Groups: G episodes of one task side by side, each graded as it ends.

Player.play -> Play.run: member 0: begin -> play -> end -> grade --+-> Group
                         member 1: begin -> play -> end -> grade --+
                         ...  redundant members are aborted when G have ended
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from envs import base
from rl.algorithms import reward_shaping
from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.rollout import grading as grading_lib
from rl.runtime import cancellable
from rl.runtime import watchdog as watchdog_lib
from rl.settings import checks

_STATUS = {
  "stale": trajectory.Status.STALE,
  "redundant": trajectory.Status.REDUNDANT,
  "stopped": trajectory.Status.ENGINE_FAULT,
}


@runtime_checkable
class Sessions(episode_lib.Sampler, Protocol):
  """What serves whole conversations; `router.Router` does."""

  async def begin(self, session: str, domain: str) -> int:
    """Returns the number of the engine, once one takes new sessions."""
    ...

  def serves(self, number: int) -> int:
    """Returns the version that an engine serves."""
    ...

  def end(self, session: str) -> None:
    """The conversation is over."""
    ...

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; see `contract.DecodeEngine`."""
    ...

  def begun(self, request_id: str) -> trajectory.PolicyVersion | None:
    """Returns the version of a request's first token, if it has one."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(episode_lib.Limits):
  """How groups are played: the limits of an episode, and what grades them.

  Attributes:
    group_size: G episodes of one task.
    grading: deadline and repetition of a reward's calls.
    overlong, repetition: penalties for answers nearly too long, or repetitive.
  """

  group_size: int = 8
  grading: grading_lib.Retries = dataclasses.field(
    default_factory=grading_lib.Retries
  )
  overlong: reward_shaping.Overlong | None = None
  repetition: reward_shaping.Repetition | None = None

  def validate(self) -> None:
    """Raises ValueError on a limit that allows no episode."""
    counts = ("group_size", "max_turns", "turn_tokens")
    checks.at_least(self, 1, *counts, where="rollout")
    if self.max_tokens <= self.turn_tokens:
      raise ValueError(
        f"rollout.max_tokens={self.max_tokens} leaves no room for context "
        f"beside rollout.turn_tokens={self.turn_tokens}"
      )
    out = "a greedy group has no variance"
    checks.finite_above(self, 0, "temperature", where="rollout", out=out)
    checks.above(self, 0, "step_s", where="rollout")


@dataclasses.dataclass(frozen=True, eq=False)
class Player:
  """All that playing needs; the same for training and evaluation.

  Attributes:
    priority: (group, index) -> that of its requests; the lowest goes first.
    extra_members: played beyond `limits.group_size`.
    closing: environments of episodes that are over.
    late: what is left of those that did not end in time.
    watchdog: its table names what each episode waits for.
    progress_timeout_s: deadline in that table; the learner's wait enforces
      it.
  """

  source: base.Source
  engine: Sessions
  chat: episode_lib.Chat
  graders: grading_lib.Graders
  limits: Rollout
  log: event_log.EventLog
  watchdog: watchdog_lib.Watchdog | None = None
  progress_timeout_s: float = math.inf
  priority: Callable[[int, int], tuple[int, ...]] = lambda group, index: (
    group,
    index,
  )
  extra_members: int = 0
  closing: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
  late: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)

  def play(
    self,
    task: base.Task,
    group_id: int,
    seed: int,
    admitted: trajectory.PolicyVersion,
    attempt: int = 0,
  ) -> "Play":
    """Returns one attempt at a group; `Play.run` plays it."""
    return Play(self, task, group_id, seed, admitted, attempt)

  async def member(self, episode: episode_lib.Episode) -> trajectory.Trajectory:
    """Plays and grades one episode on its own."""
    return await _Member(self, episode).run()


class Play:
  """One attempt at a group: `run` once, `abort` at any time meanwhile.

  Attributes:
    aborted: why, when it was.
  """

  def __init__(
    self,
    player: Player,
    task: base.Task,
    group_id: int,
    seed: int,
    admitted: trajectory.PolicyVersion,
    attempt: int,
  ):
    self._player = player
    self._admitted = admitted
    self._group_size = player.limits.group_size
    self._finished: list[int] = []
    self.task = task
    self.group_id = group_id
    self.attempt = attempt
    self.aborted = ""
    self._members = [
      _Member(
        player,
        episode_lib.Episode(task, group_id, i, seed, attempt),
        self._ended,
      )
      for i in range(self._group_size + player.extra_members)
    ]

  async def run(self) -> trajectory.Group:
    """Plays the members side by side and returns the group of G.

    Those are the first G that ended without a fault; when fewer did, members
    with faults fill it up.
    """
    try:
      async with asyncio.TaskGroup() as members:
        plays = [members.create_task(member.run()) for member in self._members]
    finally:
      self._members = []  # They know this: a circle would keep every token.
    every = [play.result() for play in plays]
    rest = [t.index for t in every if t.index not in self._finished]
    chosen = sorted([*self._finished, *rest][: self._group_size])
    return trajectory.Group(
      group_id=self.group_id,
      trajectories=[every[i] for i in chosen],
      admitted=self._admitted,
      task=self.task,
      attempt=self.attempt,
      redundant_tokens=sum(
        t.num_sampled for t in every if t.index not in chosen
      ),
    )

  def abort(self, reason: str) -> None:
    """Ends every member now: its request, its step or its grading."""
    self.aborted = self.aborted or reason
    for member in self._members:
      member.abort(reason)

  @property
  def first_version(self) -> int | None:
    """Oldest first token of its members so far; None before the first."""
    firsts = [member.first_version for member in self._members]
    return min((v for v in firsts if v is not None), default=None)

  def _ended(self, index: int) -> bool:
    """A member has ended without a fault; returns whether it is needed."""
    if len(self._finished) == self._group_size:
      return False
    self._finished.append(index)
    if len(self._finished) == self._group_size:
      for number, member in enumerate(self._members):
        if number not in self._finished:
          member.abort("redundant")
    return True


class _Member:
  """One episode, which can be aborted.

  Its way to the engine goes through here, so that what it waits for is known.
  """

  def __init__(
    self,
    player: Player,
    episode: episode_lib.Episode,
    ended: Callable[[int], bool] = lambda index: True,
  ):
    self._player = player
    self._episode = episode
    self._tell = ended
    self._where = {
      "group": episode.group_id,
      "attempt": episode.attempt,
      "index": episode.index,
    }
    self._work = cancellable.Cancellable()
    self._request = ""
    self._first: int | None = None
    self._reason = ""
    self._record = episode_lib.Record(episode, self._turned)

  @property
  def first_version(self) -> int | None:
    """Of its first token, which may have been sampled just now."""
    if self._first is None and self._request:
      with contextlib.suppress(ValueError):  # It has just ended.
        begun = self._player.engine.begun(self._request)
        return None if begun is None else int(begun)
    return self._first

  def abort(self, reason: str) -> None:
    """Ends the episode, or its grading when it has ended."""
    if self._reason:
      return
    if not self._record.over:
      self._reason = reason
    if self._request:
      # It comes back with what it has, or is on its way: no token is lost.
      with contextlib.suppress(ValueError):
        self._player.engine.abort(self._request)
    else:
      self._work.cancel()

  async def run(self) -> trajectory.Trajectory:
    """Plays and grades; what was aborted is not graded."""
    try:
      played, transcript = await self._play()
    except BaseException as error:
      # The run stops, or the engine: the ledger still owns these tokens.
      lost, _ = self._record.end(trajectory.Status.ENGINE_FAULT)
      stopped = isinstance(error, asyncio.CancelledError)
      self._log_end("aborted", lost, reason="stopped" if stopped else "error")
      raise
    if self._reason:
      played = dataclasses.replace(
        played, status=_STATUS[self._reason], fault=self._reason
      )
      self._log_end("aborted", played, reason=self._reason)
      return played
    self._log_end("ended", played, status=played.status.value)
    if played.status.trainable and not self._tell(self._episode.index):
      return played
    return await self._grade(played, transcript)

  async def _grade(
    self, played: trajectory.Trajectory, transcript: base.Transcript
  ) -> trajectory.Trajectory:
    player, log = self._player, self._player.log
    graded = played
    if played.status.trainable:
      graded = await self._work.run(
        player.graders.grade(
          played,
          transcript,
          self._episode.task,
          lambda: log.emit("grading", **self._where),
          self._episode.name,
        )
      )
    if graded is None:  # Aborted: its group is not wanted.
      return played
    rules = player.limits
    graded = reward_shaping.apply(graded, rules.overlong, rules.repetition)
    if graded.fault:
      status = graded.status.value
      log.emit("fault", **self._where, status=status, what=graded.fault)
    else:
      log.emit("reward", **self._where, value=graded.reward)
    return graded

  def _log_end(
    self, kind: str, played: trajectory.Trajectory, **fields: Any
  ) -> None:
    self._player.log.emit(
      kind,
      **self._where,
      **fields,
      turns=len(played.turns),
      tokens=played.num_sampled,
      length=sum(len(t.context) + len(t.tokens) for t in played.turns),
      versions=played.versions,
    )
    # It has ended. A circle of the two would keep its tokens until the garbage
    # is collected.
    self._record.turned = lambda turn: None

  async def _play(self) -> tuple[trajectory.Trajectory, base.Transcript]:
    """Plays to the end, or to where `abort` found it."""
    played = await self._work.run(self._session())
    if played is None:
      # Environments cannot do that, so without a reason it was an engine.
      fault = self._reason or "the engine cancelled its answer"
      return self._record.end(trajectory.Status.ENGINE_FAULT, fault)
    return played

  async def _session(self) -> tuple[trajectory.Trajectory, base.Transcript]:
    player, episode = self._player, self._episode
    try:
      number = await player.engine.begin(episode.name, episode.task.source)
      player.log.emit(
        "admitted",
        **self._where,
        engine=number,
        version=player.engine.serves(number),
      )
      return await episode_lib.play(
        player.source,
        self,
        player.chat,
        player.limits,
        self._record,
        player.watchdog,
        priority=player.priority(episode.group_id, episode.index),
        closing=player.closing,
        late=player.late,
      )
    finally:
      player.engine.end(episode.name)

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; the watchdog can name who waits for it."""
    if self._reason:  # Whatever the environment made of that.
      raise asyncio.CancelledError
    player, asked = self._player, asyncio.get_running_loop().time()
    self._request = request.request_id
    try:
      with self._tracked(request.session):
        completion = await player.engine.generate(request)
    finally:
      self._request = ""
    if self._first is None and len(completion.versions):
      self._first = int(completion.versions[0])
      self._player.log.emit(
        "first_token",
        t=player.log.since(asked + completion.first_token_s),
        **self._where,
        version=self._first,
      )
    if self._reason:  # It may have ended by itself at the same moment.
      completion = dataclasses.replace(completion, stop="abort")
    return completion

  def _tracked(self, session: str) -> contextlib.AbstractContextManager[None]:
    if self._player.watchdog is None:
      return contextlib.nullcontext()
    return self._player.watchdog.track(
      owner=f"episode {session}",
      what="an answer of the engine",
      deadline_s=self._player.progress_timeout_s,
    )

  def _turned(self, turn: trajectory.Turn) -> None:
    self._player.log.emit(
      "turn",
      **self._where,
      number=len(self._record.turns),
      tokens=len(turn.tokens),
      decode_s=round(turn.decode_s, 6),
      env_s=round(turn.env_s, 6),
    )
