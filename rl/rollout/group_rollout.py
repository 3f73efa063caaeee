"""Group rollouts: G episodes of one task side by side, each graded as it ends.

  GroupRollout.run
    member 0: Router.begin -> episode.play -> Router.end -> _grade --+-> Group
    member 1: Router.begin -> episode.play -> Router.end -> _grade --+
    ...  redundant members are aborted when G have ended
  a reward that compares: _compare in place of _grade, once all have ended

A member is one episode of a group; its record is a `trajectory.Trajectory`. One
that was in flight before a restart goes on from there, see `member_requests`.
"""

import asyncio
import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from envs import base
from rl.algorithms import reward_shaping
from rl.audit import event_log
from rl.data import trajectory as trajectory_lib
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.rollout import grading as grading_lib
from rl.rollout import member_requests
from rl.rollout import starting as starting_lib
from rl.runtime import cancellable
from rl.runtime import watchdog as watchdog_lib
from rl.settings import checks

_NONE: Mapping[int, Any] = types.MappingProxyType({})
_REWARD_FAULT = trajectory_lib.Status.REWARD_FAULT
_STATUS = {
  "stale": trajectory_lib.Status.STALE,
  "redundant": trajectory_lib.Status.REDUNDANT,
  "stopped": trajectory_lib.Status.ENGINE_FAULT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(episode_lib.Limits):
  """Limits of the groups: of their episodes and of their grading.

  Attributes:
    group_size: G, the episodes sampled for one task.
    grading: deadline and retries of the calls of a reward.
    starting: retries of environments' starts, if their source allows them.
    overlong, repetition: penalties for answers near the token limit, and for
      repetitive ones.
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
    requests: member_requests.MemberRequests,
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
  watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD
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
    return await _Member(self, episode, member_requests.Hold()).run()


class GroupRollout:
  """One attempt at a group: `run` once, `abort` at any time meanwhile.

  Args:
    admitted: version of the weights when it was admitted.
    hold: holds it back while the run is saved.
    past: its members before a restart, which go on from there.
    refusals: why some of them do not.

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
    hold: member_requests.Hold | None = None,
    past: Mapping[int, trajectory_lib.OpenMember] = _NONE,
    refusals: Mapping[int, str] = _NONE,
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
        hold or member_requests.Hold(),
        self._is_needed,
        player.graders.compares,
        past.get(i),
        refusals.get(i, ""),
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

  def hold(self) -> None:
    """Has its requests end with what they have, behind a closed hold."""
    for member in self._members:
      member.requests.hold()

  @property
  def is_sampling(self) -> bool:
    """True while a request is in flight that its hold may end."""
    return any(member.requests.is_sampling for member in self._members)

  @property
  def is_held(self) -> bool:
    """True if it goes on only when its hold opens."""
    still = [member.is_over or member.is_held for member in self._members]
    return all(still) and any(member.is_held for member in self._members)

  @property
  def open_group(self) -> trajectory_lib.OpenGroup:
    """Its members so far, to go on from after a restart."""
    members = {m.index: m.open_member for m in self._members}
    return trajectory_lib.OpenGroup(self._admitted, members)

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
    past: what it was before a restart.
    refusal: why it is played anew all the same.

  Attributes:
    is_over: `run` has returned.
  """

  def __init__(
    self,
    player: Player,
    episode: episode_lib.Episode,
    hold: member_requests.Hold,
    is_needed: Callable[[int], bool] = lambda index: True,
    is_compared: bool = False,
    past: trajectory_lib.OpenMember | None = None,
    refusal: str = "",
  ):
    self._player = player
    self._episode = episode
    self._hold = hold
    self._is_needed = is_needed
    self._place = {
      "group": episode.group_id,
      "attempt": episode.attempt,
      "index": episode.index,
    }
    self._work = cancellable.Cancellable()
    self._reason = ""
    self._is_compared = is_compared
    self._past = past
    self._refusal = refusal
    self._engine = past.engine if past else -1
    over = past is not None and past.is_over and not refusal
    self._result = past.trajectory if past and over else None
    self.is_over = False
    self.index = episode.index
    self.transcript = base.Transcript((), ())
    self._begin(past.trajectory.turns if past else ())

  def _begin(self, past: Sequence[trajectory_lib.Turn]) -> None:
    """Begins an episode, or goes on with one that has had these turns."""
    player = self._player
    self._partial = episode_lib.PartialTrajectory(self._episode, self._log_turn)
    self.requests = member_requests.MemberRequests(
      player.router,
      player.log,
      self._place,
      self._hold,
      turns=self._partial.turns,
      past=past,
      watchdog=player.watchdog,
      progress_timeout_s=player.progress_timeout_s,
    )

  @property
  def first_version(self) -> int | None:
    """Version of its first token; None before that is sampled."""
    return self.requests.first_version

  @property
  def is_held(self) -> bool:
    """True if it goes on only when its hold opens."""
    return self.requests.is_held

  @property
  def open_member(self) -> trajectory_lib.OpenMember:
    """The episode so far, to go on from after a restart."""
    so_far = self._result or trajectory_lib.Trajectory(
      task_id=self._episode.task.id,
      group_id=self._episode.group_id,
      index=self.index,
      turns=self.requests.turns_so_far,
      status=trajectory_lib.Status.TRUNCATED,
    )
    return trajectory_lib.OpenMember(so_far, self._engine)

  def abort(self, reason: str) -> None:
    """Ends the episode, or its grading when it has ended."""
    if self._reason:
      return
    if not self._partial.over:
      self._reason = reason
      if self.requests.abort():
        return  # The request returns the tokens it has: none is lost.
    self._work.cancel()

  async def run(self) -> trajectory_lib.Trajectory:
    """Returns the trajectory; an aborted one is not graded."""
    try:
      if self._result is None:
        self._result = await self._run()
      else:
        self._restore(self._result)
      return self._result
    finally:
      self.is_over = True
      self._hold.changed.set()

  async def _run(self) -> trajectory_lib.Trajectory:
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
      self._engine = await player.router.begin(
        episode.name, episode.task.source, self._engine, episode.group
      )
      version = player.router.serves(self._engine)
      player.log.emit(
        "admitted", **self._place, engine=self._engine, version=version
      )
      if self._refusal:
        self._begin_anew(self._refusal)
      try:
        return await self._play_episode()
      except member_requests.Diverged as error:
        self._begin_anew(str(error))
        return await self._play_episode()
    finally:
      player.router.end(episode.name)

  async def _play_episode(
    self,
  ) -> tuple[trajectory_lib.Trajectory, base.Transcript]:
    player, episode = self._player, self._episode
    result = await episode_lib.play(
      player.source,
      self.requests.generate,
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
    self.requests.check_replayed(result[0].status)
    return result

  def _begin_anew(self, reason: str) -> None:
    """Forgets what the episode was before a restart."""
    past = self.requests.turns_so_far
    tokens = sum(len(turn.tokens) for turn in past)
    self._player.log.emit(
      "begun_anew", **self._place, tokens=tokens, reason=reason
    )
    self._past = None
    self._begin(())

  async def _play_agent(
    self,
    run: episode_lib.RunAgent,
    partial: episode_lib.PartialTrajectory,
  ) -> tuple[trajectory_lib.Trajectory, base.Transcript]:
    player, episode = self._player, self._episode
    assert player.agents is not None
    if self._past is not None:
      raise member_requests.Diverged("it is an agent, which asks by itself")
    return await player.agents.play(
      run,
      partial,
      self.requests,
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
    rules = self._player.limits
    graded = reward_shaping.apply(graded, rules.overlong, rules.repetition)
    self._log_outcome(graded)
    return graded

  def _restore(self, done: trajectory_lib.Trajectory) -> None:
    """Logs an episode that was over before a restart, and counts it."""
    if done.status is trajectory_lib.Status.REDUNDANT:
      self._log_end("aborted", done, reason=done.fault)
      return
    played = done.reward is not None or done.status is _REWARD_FAULT
    status = done.status
    if status is _REWARD_FAULT:  # It ended well before.
      status = trajectory_lib.Status.COMPLETED
    self._log_end("ended", done, status=status.value)
    if played:
      self._is_needed(self.index)
      self.log_grading()
    self._log_outcome(done)

  def _log_outcome(self, graded: trajectory_lib.Trajectory) -> None:
    log = self._player.log
    if graded.fault:
      status = graded.status.value
      log.emit("fault", **self._place, status=status, what=graded.fault)
    else:
      log.emit("reward", **self._place, value=graded.reward)

  def _log_turn(self, turn: trajectory_lib.Turn) -> None:
    number = len(self._partial.turns)
    if number < self.requests.num_logged:
      return
    self._player.log.emit(
      "turn",
      **self._place,
      number=number,
      tokens=len(turn.tokens),
      decode_s=round(turn.decode_s, 6),
      queue_s=round(turn.queue_s, 6),
      env_s=round(turn.env_s, 6),
    )

  def _log_end(
    self, kind: str, trajectory: trajectory_lib.Trajectory, **fields: Any
  ) -> None:
    self.requests.log_continued(trajectory.turns)
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
