"""Group rollouts: G episodes of one task side by side, each graded as it ends.

  GroupRollout.run
    member 0: Router.begin -> episode.play -> Router.end -> _grade --+-> Group
    member 1: Router.begin -> episode.play -> Router.end -> _grade --+
    ...  redundant members are aborted when G have ended
  a reward that compares: _compare in place of _grade, once all have ended

  episode.play -> MemberRequests.generate -> Router.generate
  AgentPlayer.play -> HTTP -> MemberRequests.stream -> Router.stream

A member is one episode of a group; its record is a `trajectory.Trajectory`.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Protocol

from envs import base
from rl.algorithms import reward_shaping
from rl.audit import event_log
from rl.data import trajectory as trajectory_lib
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.rollout import grading as grading_lib
from rl.rollout import starting as starting_lib
from rl.runtime import cancellable
from rl.runtime import watchdog as watchdog_lib
from rl.settings import checks

_STATUS = {
  "stale": trajectory_lib.Status.STALE,
  "redundant": trajectory_lib.Status.REDUNDANT,
  "stopped": trajectory_lib.Status.ENGINE_FAULT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(episode_lib.Limits):
  """Limits of the groups: of their episodes and of their grading.

  Attributes:
    group_size: G episodes of one task.
    grading: deadline and retries of a reward's calls.
    starting: retries of starts of environments whose source allows them.
    overlong, repetition: penalties for answers nearly too long, or repetitive.
  """

  group_size: int = 8
  grading: grading_lib.Retries = grading_lib.Retries()
  starting: starting_lib.Starting = starting_lib.Starting()
  overlong: reward_shaping.Overlong | None = None
  repetition: reward_shaping.Repetition | None = None

  def validate(self) -> None:
    """Raises ValueError on a limit that allows no episode."""
    checks.at_least(self, 1, "group_size", "max_turns", "turn_tokens")
    out = "no room for context is left beside rollout.turn_tokens; raise it"
    checks.above(self, self.turn_tokens, "max_tokens", out=out)
    out = "a greedy group has no variance"
    checks.finite_above(self, 0, "temperature", out=out)
    checks.above(self, 0, "step_s")


class PlaysAgents(Protocol):
  """Plays the agents of a run, as `agents.agent_player.AgentPlayer`."""

  async def close(self) -> None:
    """Ends it, once no agent is played."""
    ...

  async def play(
    self,
    run: episode_lib.RunAgent,
    partial: episode_lib.PartialTrajectory,
    requests: "MemberRequests",
    limits: episode_lib.Limits,
    priority: tuple[int, ...],
  ) -> tuple[trajectory_lib.Trajectory, base.Transcript]:
    """Plays one; see `episode.PlayAgent`."""
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class Player:
  """The parts that playing needs, for training and evaluation alike.

  Attributes:
    priority: (group, index) -> priority of its requests; the lowest goes first.
    extra_members: played beyond `limits.group_size`.
    agents: plays what a source builds in place of an environment.
    closing: tasks that close the environments of ended episodes.
    late: cleanup tasks of environments that overran their deadline.
    starts: starts environments.
    watchdog: lists the waits of each episode.
    progress_timeout_s: deadline in that list; the learner's wait enforces it.
  """

  source: base.Source
  router: contract.SessionRouter
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
  agents: PlaysAgents | None = None
  closing: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
  late: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
  starts: starting_lib.Starts = dataclasses.field(
    default_factory=starting_lib.Starts
  )

  async def play_alone(
    self, episode: episode_lib.Episode
  ) -> trajectory_lib.Trajectory:
    """Plays and grades one episode without a group."""
    return await _Member(self, episode).run()


class GroupRollout:
  """One attempt at a group: `run` once, `abort` at any time meanwhile.

  Args:
    admitted: version of the weights when it was admitted.

  Attributes:
    aborted: the reason of `abort`; "" before it is called.
  """

  def __init__(
    self,
    player: Player,
    task: base.Task,
    *,
    group_id: int,
    seed: int,
    admitted: int,
    attempt: int = 0,
  ):
    self._player = player
    self._admitted = admitted
    self._group_size = player.limits.group_size
    self._finished: list[int] = []
    self._comparison = cancellable.Cancellable()
    self.task = task
    self.group_id = group_id
    self.attempt = attempt
    self.aborted = ""
    self._members = [
      _Member(
        player,
        episode_lib.Episode(task, group_id, i, seed, attempt),
        self._is_needed,
        player.graders.compares,
      )
      for i in range(self._group_size + player.extra_members)
    ]

  async def run(self) -> trajectory_lib.Group:
    """Plays the members side by side and returns the group of G.

    It holds the first G members that end without a fault, filled up with
    faulty ones if there are fewer.
    """
    try:
      async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(member.run()) for member in self._members]
      trajectories = [run.result() for run in runs]
      if self._player.graders.compares:
        await self._compare(trajectories)
    finally:
      self._members = []  # A reference cycle would keep every token.
    faulty = [i for i in range(len(runs)) if i not in self._finished]
    chosen = sorted([*self._finished, *faulty][: self._group_size])
    return trajectory_lib.Group(
      group_id=self.group_id,
      trajectories=[trajectories[i] for i in chosen],
      admitted=self._admitted,
      task=self.task,
      attempt=self.attempt,
      redundant_tokens=sum(
        t.num_sampled for t in trajectories if t.index not in chosen
      ),
    )

  def abort(self, reason: str) -> None:
    """Ends every member now: its request, its step or its grading."""
    self.aborted = self.aborted or reason
    for member in self._members:
      member.abort(reason)
    self._comparison.cancel()

  @property
  def first_version(self) -> int | None:
    """Oldest first token of its members so far; None before the first."""
    firsts = [member.first_version for member in self._members]
    return min((v for v in firsts if v is not None), default=None)

  async def _compare(
    self, trajectories: list[trajectory_lib.Trajectory]
  ) -> None:
    """Grades the members that ended together, in place; unless aborted."""
    members = [self._members[i] for i in sorted(self._finished)]
    places = [member.index for member in members]

    def log_grading() -> None:
      for member in members:
        member.log_grading()

    graded = await self._comparison.run(
      self._player.graders.compare(
        [trajectories[i] for i in places],
        [member.transcript for member in members],
        self.task,
        log_grading,
        str(self.group_id),
      )
    )
    for member, one in zip(members, graded or (), strict=bool(graded)):
      trajectories[member.index] = member.conclude(one)

  def _is_needed(self, index: int) -> bool:
    """Counts a member that ended without a fault; False if G had ended."""
    if len(self._finished) == self._group_size:
      return False
    self._finished.append(index)
    if len(self._finished) == self._group_size:
      for number, member in enumerate(self._members):
        if number not in self._finished:
          member.abort("redundant")
    return True


class _Member:
  """One episode, played and graded; can be aborted.

  Args:
    is_compared: its group grades it, by `transcript`, and calls `log_grading`
      and `conclude`.
  """

  def __init__(
    self,
    player: Player,
    episode: episode_lib.Episode,
    is_needed: Callable[[int], bool] = lambda index: True,
    is_compared: bool = False,
  ):
    self._player = player
    self._episode = episode
    self._is_needed = is_needed
    self._place = {
      "group": episode.group_id,
      "attempt": episode.attempt,
      "index": episode.index,
    }
    self._work = cancellable.Cancellable()
    self._requests = MemberRequests(player, self._place)
    self._reason = ""
    self._is_compared = is_compared
    self.index = episode.index
    self.transcript = base.Transcript((), ())
    self._partial = episode_lib.PartialTrajectory(episode, self._log_turn)

  @property
  def first_version(self) -> int | None:
    """Version of its first token; None before that is sampled."""
    return self._requests.first_version

  def abort(self, reason: str) -> None:
    """Ends the episode, or its grading when it has ended."""
    if self._reason:
      return
    if not self._partial.over:
      self._reason = reason
      if self._requests.abort():
        return  # The request returns the tokens it has: none is lost.
    self._work.cancel()

  async def run(self) -> trajectory_lib.Trajectory:
    """Returns the trajectory; an aborted one is not graded."""
    try:
      trajectory, transcript = await self._play()
    except BaseException as error:
      # The run stops, or the engine: the ledger still counts these tokens.
      lost, _ = self._partial.end(trajectory_lib.Status.ENGINE_FAULT)
      stopped = isinstance(error, asyncio.CancelledError)
      self._log_end("aborted", lost, reason="stopped" if stopped else "error")
      raise
    if self._reason:
      trajectory = dataclasses.replace(
        trajectory, status=_STATUS[self._reason], fault=self._reason
      )
      self._log_end("aborted", trajectory, reason=self._reason)
      return trajectory
    self._log_end("ended", trajectory, status=trajectory.status.value)
    trainable = trajectory.status.trainable
    if trainable and not self._is_needed(self.index):
      return trajectory
    if trainable and self._is_compared:
      self.transcript = transcript
      return trajectory
    return await self._grade(trajectory, transcript)

  async def _play(
    self,
  ) -> tuple[trajectory_lib.Trajectory, base.Transcript]:
    """Plays to the end, or to where `abort` found it."""
    result = await self._work.run(self._session())
    if result is None:
      # Environments cannot cancel it, so without a reason the engine did.
      fault = self._reason or "the engine cancelled its answer"
      return self._partial.end(trajectory_lib.Status.ENGINE_FAULT, fault)
    return result

  async def _session(
    self,
  ) -> tuple[trajectory_lib.Trajectory, base.Transcript]:
    player, episode = self._player, self._episode
    try:
      number = await player.router.begin(episode.name, episode.task.source)
      player.log.emit(
        "admitted",
        **self._place,
        engine=number,
        version=player.router.serves(number),
      )
      return await episode_lib.play(
        player.source,
        self._requests.generate,
        player.chat,
        player.limits,
        self._partial,
        player.watchdog,
        priority=player.priority(episode.group_id, episode.index),
        closing=player.closing,
        late=player.late,
        starts=player.starts,
        play_agent=None if player.agents is None else self._play_agent,
      )
    finally:
      player.router.end(episode.name)

  async def _play_agent(
    self,
    run: episode_lib.RunAgent,
    partial: episode_lib.PartialTrajectory,
  ) -> tuple[trajectory_lib.Trajectory, base.Transcript]:
    player, episode = self._player, self._episode
    assert player.agents is not None
    return await player.agents.play(
      run,
      partial,
      self._requests,
      player.limits,
      player.priority(episode.group_id, episode.index),
    )

  async def _grade(
    self, trajectory: trajectory_lib.Trajectory, transcript: base.Transcript
  ) -> trajectory_lib.Trajectory:
    graded = trajectory
    if trajectory.status.trainable:
      graded = await self._work.run(
        self._player.graders.grade(
          trajectory,
          transcript,
          self._episode.task,
          self.log_grading,
          self._episode.name,
        )
      )
    if graded is None:  # Aborted: its group is not wanted.
      return trajectory
    return self.conclude(graded)

  def log_grading(self) -> None:
    """Logs that its reward is called for the first time."""
    self._player.log.emit("grading", **self._place)

  def conclude(
    self, graded: trajectory_lib.Trajectory
  ) -> trajectory_lib.Trajectory:
    """Returns the trajectory with its penalties, and logs its reward."""
    rules, log = self._player.limits, self._player.log
    graded = reward_shaping.apply(graded, rules.overlong, rules.repetition)
    if graded.fault:
      status = graded.status.value
      log.emit("fault", **self._place, status=status, what=graded.fault)
    else:
      log.emit("reward", **self._place, value=graded.reward)
    return graded

  def _log_turn(self, turn: trajectory_lib.Turn) -> None:
    self._player.log.emit(
      "turn",
      **self._place,
      number=len(self._partial.turns),
      tokens=len(turn.tokens),
      decode_s=round(turn.decode_s, 6),
      env_s=round(turn.env_s, 6),
    )

  def _log_end(
    self, kind: str, trajectory: trajectory_lib.Trajectory, **fields: Any
  ) -> None:
    self._player.log.emit(
      kind,
      **self._place,
      **fields,
      turns=len(trajectory.turns),
      tokens=trajectory.num_sampled,
      length=trajectory.num_ids,
      versions=trajectory.versions,
    )
    # A reference cycle would keep its tokens until the garbage is collected.
    self._partial.on_turn = lambda turn: None


class MemberRequests:
  """The requests of one member, between its player and the router.

  Logs the first token and lists the wait for each answer.
  """

  def __init__(self, player: Player, place: Mapping[str, int]):
    self._player = player
    self._place = place
    self._running: set[str] = set()
    self._first: int | None = None
    self._aborted = False

  @property
  def first_version(self) -> int | None:
    """Version of the first token; None before that is sampled."""
    if self._first is not None:
      return self._first
    return min(self._begun(), default=None)

  def _begun(self) -> Iterator[int]:
    for request_id in self._running:
      with contextlib.suppress(ValueError):  # It has just ended.
        begun = self._player.router.begun(request_id)
        if begun is not None:
          yield int(begun)

  def abort(self) -> bool:
    """Ends the current requests and refuses later ones; False if none runs."""
    self._aborted = True
    for request_id in self._running:
      with contextlib.suppress(ValueError):  # It has just ended.
        self._player.router.abort(request_id)
    return bool(self._running)

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.SessionRouter.generate`."""
    asked_s = asyncio.get_running_loop().time()
    with self._asking(request):
      completion = await self._player.router.generate(request)
    return self._answered(completion, asked_s)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.SessionRouter`."""
    asked_s = asyncio.get_running_loop().time()
    with self._asking(request):
      deltas = self._player.router.stream(request)
      async with contextlib.aclosing(deltas):
        async for delta in deltas:
          if delta.completion is not None:
            done = self._answered(delta.completion, asked_s)
            delta = dataclasses.replace(delta, completion=done)
          yield delta

  @contextlib.contextmanager
  def _asking(self, request: contract.DecodeRequest) -> Iterator[None]:
    if self._aborted:  # The environment caught its cancellation.
      raise asyncio.CancelledError
    player = self._player
    self._running.add(request.request_id)
    try:
      with watchdog_lib.track(
        player.watchdog,
        owner=f"episode {request.session}",
        what="an answer of the engine",
        deadline_s=player.progress_timeout_s,
      ):
        yield
    finally:
      self._running.discard(request.request_id)

  def _answered(
    self, completion: contract.Completion, asked_s: float
  ) -> contract.Completion:
    if self._first is None and len(completion.versions):
      # One that is still running may have begun under older weights.
      self._first = min([int(completion.versions[0]), *self._begun()])
      log = self._player.log
      log.emit(
        "first_token",
        t=log.since(asked_s + completion.first_token_s),
        **self._place,
        version=self._first,
      )
    if self._aborted:  # It may have ended by itself at the same moment.
      completion = dataclasses.replace(completion, stop="abort")
    return completion
