"""The record of a rollout: Turn, Trajectory, Group. Host data, numpy.

A version counts the rounds of training behind the weights: the only clock of
the system. A round ends with a publish. It is one optimizer step unless the
schedule has several updates in a round.
"""

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from envs import base

Stop = Literal["stop", "length", "abort"]


class Status(enum.Enum):
  """The end of a trajectory; a fault is data, never a reward of 0."""

  COMPLETED = "completed"
  TRUNCATED = "truncated"
  ENV_FAULT = "env_fault"
  REWARD_FAULT = "reward_fault"
  ENGINE_FAULT = "engine_fault"
  STALE = "stale"
  REDUNDANT = "redundant"

  @property
  def trainable(self) -> bool:
    """True if the reward can be trusted, so that the tokens may be trained."""
    return self in (Status.COMPLETED, Status.TRUNCATED)

  @property
  def is_fault(self) -> bool:
    """True if something broke; else it ended, or was cut off on purpose."""
    return self in (
      Status.ENV_FAULT,
      Status.REWARD_FAULT,
      Status.ENGINE_FAULT,
    )


# Nobody changes a turn. But it is not frozen: see `contract.DecodeRequest`.
@dataclasses.dataclass(slots=True, eq=False)
class Turn:
  """One answer of the agent and the context that came before it.

  Attributes:
    context: ids appended since the last turn: P of them.
    tokens: ids exactly as sampled, stop token included: T of them.
    logprobs: of the sampler, in nats, at its temperature.
    versions: policy that sampled each token; never decreases.
    stop: why sampling ended.
    decode_s, env_s: seconds spent on the answer and on the reply to it.
    queue_s: those of `decode_s` in which it waited for a slot of the engine.
    reward: the environment's for this answer; 0 when it did not get so far. A
      trajectory has its own `reward`, as graded.
    experts: k experts that each of S sparse layers chose for every id, context
      first, because replaying a token needs the routes of all before it. -1
      where the engine kept none, as for an id that it never ran.
    opens: the context is a whole conversation, and does not continue the turn
      before. A trajectory's first turn opens one whether it says so or not.

  Raises:
    ValueError: `experts` has another length than the ids, or chooses for a
      token in part.
  """

  context: Int32[np.ndarray, " P"]
  tokens: Int32[np.ndarray, " T"]
  logprobs: Float32[np.ndarray, " T"]
  versions: Int32[np.ndarray, " T"]
  stop: Stop
  decode_s: float = 0.0
  env_s: float = 0.0
  reward: float = 0.0
  experts: Int[np.ndarray, "ids S k"] | None = None
  opens: bool = False
  queue_s: float = 0.0

  def __post_init__(self):
    if self.experts is None:
      return
    count = self.num_ids
    if self.experts.ndim != 3 or len(self.experts) != count:
      raise ValueError(
        f"experts of shape {self.experts.shape} for {len(self.context)} ids of "
        f"context and {len(self.tokens)} sampled ones; use ({count}, layers "
        "with experts, experts of a token), -1 where unknown"
      )
    known = self.experts >= 0
    if (known.any(-1) != known.all(-1)).any():
      raise ValueError(
        "experts of a token are known in part; use -1 for all of a layer"
      )

  @property
  def num_ids(self) -> int:
    """Number of ids, context included."""
    return len(self.context) + len(self.tokens)


def run_lengths(versions: Int32[np.ndarray, " T"]) -> list[tuple[int, int]]:
  """Returns (version, tokens) of each run of equal versions."""
  if not len(versions):
    return []
  first, last = int(versions[0]), int(versions[-1])
  if first == last:  # As they never decrease.
    return [(first, len(versions))]
  starts = np.concatenate([[0], np.flatnonzero(np.diff(versions)) + 1])
  counts = np.diff([*starts, len(versions)])
  return list(zip(versions[starts].tolist(), counts.tolist(), strict=True))


def version_runs(turns: Sequence[Turn]) -> list[tuple[int, int]]:
  """Returns `Trajectory.versions` of some turns."""
  runs: list[tuple[int, int]] = []
  if any(turn.opens for turn in turns[1:]):
    counts = collections.Counter[int]()
    for turn in turns:
      counts.update(turn.versions.tolist())
    return sorted(counts.items())
  for turn in turns:
    for version, count in run_lengths(turn.versions):
      if runs and runs[-1][0] == version:
        count += runs.pop()[1]
      runs.append((version, count))
  return runs


def first_version(turns: Sequence[Turn]) -> int | None:
  """Returns `Trajectory.first_version` of some turns."""
  firsts = [int(turn.versions[0]) for turn in turns if len(turn.versions)]
  return min(firsts, default=None)


# No slots: sums over turns, for which many ask, are kept once they were asked
# for, which is after the last turn.
@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
  """One episode, token for token.

  Most are one conversation. An agent that edits its history, or leads several
  conversations, leaves more: `conversations` are then the samples to train.

  Attributes:
    group_id, index: its group and its place among the members.
    turns: may be empty when the environment failed to start.
    reward: None unless `status.trainable`.
    graded_reward: the reward before shaping; set to `reward` if left out.
      Success, pass rates and the variance of a group are of this one: a success
      stays one however long it is, and a group of nothing but successes has
      nothing to teach but brevity.
    parts: named parts of the reward.
    fault: what went wrong, in words; empty when nothing did.
    metrics: the environment's own numbers, summed over its steps.
    unanswered: ids that followed the last answer of a TRUNCATED episode, as
      far as the limit of its tokens went: the state that the limit cut it in.
  """

  task_id: str
  group_id: int
  index: int
  turns: Sequence[Turn]
  status: Status
  reward: float | None = None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  fault: str = ""
  graded_reward: float | None = None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  unanswered: Int32[np.ndarray, " P"] = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )

  def __post_init__(self):
    """Fills in the graded reward."""
    graded = self.reward if self.graded_reward is None else self.graded_reward
    if self.reward is None:
      graded = None
    object.__setattr__(self, "graded_reward", graded)

  @property
  def was_cut(self) -> bool:
    """True if a limit ended the episode or its last answer."""
    stops = [turn.stop for turn in self.turns[-1:]]
    return self.status is Status.TRUNCATED or stops == ["length"]

  @property
  def conversations(self) -> list["Trajectory"]:
    """Its conversations, each as a trajectory with the reward of all."""
    firsts = [i for i, turn in enumerate(self.turns) if i and turn.opens]
    if not firsts:
      return [self]
    cuts = itertools.pairwise([0, *firsts, len(self.turns)])
    nothing = self.unanswered[:0]
    *earlier, last = (
      dataclasses.replace(self, turns=self.turns[start:end])
      for start, end in cuts
    )
    return [
      *(dataclasses.replace(one, unanswered=nothing) for one in earlier),
      last,
    ]

  @property
  def ids(self) -> Int32[np.ndarray, " L"]:
    """Every id in order: context and sampled of each turn."""
    pieces = [x for turn in self.turns for x in (turn.context, turn.tokens)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

  @property
  def sampled(self) -> Bool[np.ndarray, " L"]:
    """True where the policy sampled the id."""
    lengths = [len(x) for t in self.turns for x in (t.context, t.tokens)]
    own = np.array([False, True] * len(self.turns), bool)
    return np.repeat(own, lengths)

  @property
  def experts(self) -> Int[np.ndarray, "L S k"] | None:
    """The experts of every id, -1 where unknown; None if no turn has any.

    Raises:
      ValueError: turns differ in layers or in experts of a token.
    """
    known = [turn.experts for turn in self.turns if turn.experts is not None]
    if not known:
      return None
    shapes = {x.shape[1:] for x in known}
    if len(shapes) > 1:
      raise ValueError(
        f"turns of one trajectory have experts of shapes {sorted(shapes)} a "
        "token; all must come from one model"
      )
    (shape,) = shapes
    pieces = []
    for turn in self.turns:
      unknown = np.full((turn.num_ids, *shape), -1, known[0].dtype)
      pieces.append(unknown if turn.experts is None else turn.experts)
    return np.concatenate(pieces)

  @functools.cached_property
  def num_sampled(self) -> int:
    """Number of tokens that the policy sampled."""
    return sum([len(turn.tokens) for turn in self.turns])

  @functools.cached_property
  def num_ids(self) -> int:
    """Number of all ids, context included."""
    return sum([len(turn.context) + len(turn.tokens) for turn in self.turns])

  @functools.cached_property
  def versions(self) -> list[tuple[int, int]]:
    """Run lengths of its policy versions: (version, tokens).

    Those of several conversations, which were led side by side, are sorted.
    """
    return version_runs(self.turns)

  @functools.cached_property
  def first_version(self) -> int | None:
    """Policy of the first sampled token: the F in the bound T - F <= eta."""
    return first_version(self.turns)


NO_TASK = base.Task(id="", index=0, split="train", seed=0)
"""The task of a group that was not played."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
  """G trajectories of one task: whole or not at all.

  Attributes:
    group_id: its place in the order of submission.
    task: the same for all of them.
    admitted: newest published policy when its first member began.
    attempt: how many groups were played in this place before and dropped.
    refills: how many of these were not worth training.
    redundant_tokens: sampled by members beyond the G.
  """

  group_id: int
  trajectories: Sequence[Trajectory]
  admitted: int
  task: base.Task = NO_TASK
  attempt: int = 0
  refills: int = 0
  redundant_tokens: int = 0

  @property
  def num_sampled(self) -> int:
    """Number of sampled tokens of all members, redundant ones included."""
    return self.redundant_tokens + sum(t.num_sampled for t in self.trajectories)

  @property
  def num_trainable_ids(self) -> int:
    """Number of ids of the members that may be trained, context included."""
    return sum(t.num_ids for t in self.trajectories if t.status.trainable)

  @property
  def first_version(self) -> int:
    """Oldest first token of its members; `admitted` when none has any."""
    firsts = [t.first_version for t in self.trajectories]
    return min([v for v in firsts if v is not None], default=self.admitted)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpenMember:
  """A member of a group in flight, as a checkpoint has it.

  Attributes:
    trajectory: unless `is_over`, its turns so far. The last may be an answer
      that has no reply yet, or is not whole: its `stop` is then "abort".
    engine: number of its engine; -1 before it has one.
  """

  trajectory: Trajectory
  engine: int = -1

  @property
  def is_over(self) -> bool:
    """True if it is graded, or will not be."""
    status = self.trajectory.status
    over = status.is_fault or status is Status.REDUNDANT
    return over or self.trajectory.reward is not None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpenGroup:
  """A group in flight, as a checkpoint has it.

  Attributes:
    admitted: as of a `Group`.
    members: by index.
  """

  admitted: int
  members: Mapping[int, OpenMember]


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
  """Returns plain JSON data; float32 values survive the round trip exactly."""
  turns = [
    {
      "context": turn.context.tolist(),
      "tokens": turn.tokens.tolist(),
      "logprobs": turn.logprobs.tolist(),
      "versions": turn.versions.tolist(),
      "stop": turn.stop,
      "decode_s": turn.decode_s,
      "queue_s": turn.queue_s,
      "env_s": turn.env_s,
      "reward": turn.reward,
      "experts": None if turn.experts is None else turn.experts.tolist(),
      "expert_dtype": None if turn.experts is None else turn.experts.dtype.name,
      "opens": turn.opens,
    }
    for turn in trajectory.turns
  ]
  return {
    "task_id": trajectory.task_id,
    "group_id": trajectory.group_id,
    "index": trajectory.index,
    "turns": turns,
    "status": trajectory.status.value,
    "reward": trajectory.reward,
    "graded_reward": trajectory.graded_reward,
    "parts": dict(trajectory.parts),
    "fault": trajectory.fault,
    "metrics": dict(trajectory.metrics),
    "unanswered": trajectory.unanswered.tolist(),
  }


def trajectory_from_json(data: Mapping[str, Any]) -> Trajectory:
  """Inverse of `trajectory_to_json`."""
  turns = [
    Turn(
      context=np.asarray(turn["context"], np.int32),
      tokens=np.asarray(turn["tokens"], np.int32),
      logprobs=np.asarray(turn["logprobs"], np.float32),
      versions=np.asarray(turn["versions"], np.int32),
      stop=turn["stop"],
      decode_s=turn["decode_s"],
      queue_s=turn.get("queue_s", 0.0),
      env_s=turn["env_s"],
      reward=turn.get("reward", 0.0),
      experts=_experts_from_json(turn),
      opens=turn.get("opens", False),
    )
    for turn in data["turns"]
  ]
  return Trajectory(
    task_id=data["task_id"],
    group_id=data["group_id"],
    index=data["index"],
    turns=turns,
    status=Status(data["status"]),
    reward=data["reward"],
    graded_reward=data["graded_reward"],
    parts=data["parts"],
    fault=data["fault"],
    metrics=data.get("metrics", {}),
    unanswered=np.asarray(data.get("unanswered", []), np.int32),
  )


def _experts_from_json(
  turn: Mapping[str, Any],
) -> Int[np.ndarray, "L S k"] | None:
  # Files without a dtype are older, and of int32.
  dtype = np.dtype(turn.get("expert_dtype") or np.int32)
  # Lists of nothing have lost their shape.
  experts = np.asarray(turn.get("experts") or [], dtype)
  return experts if experts.ndim == 3 else None


def group_to_json(group: Group) -> dict[str, Any]:
  """Returns plain JSON data of a group and its members."""
  return {
    "group_id": group.group_id,
    "admitted": int(group.admitted),
    "task": dataclasses.asdict(group.task),
    "attempt": group.attempt,
    "refills": group.refills,
    "redundant_tokens": group.redundant_tokens,
    "trajectories": [trajectory_to_json(t) for t in group.trajectories],
  }


def group_from_json(data: Mapping[str, Any]) -> Group:
  """Inverse of `group_to_json`."""
  return Group(
    group_id=data["group_id"],
    trajectories=[trajectory_from_json(t) for t in data["trajectories"]],
    admitted=data["admitted"],
    task=base.Task(**data["task"]),
    attempt=data["attempt"],
    refills=data["refills"],
    redundant_tokens=data["redundant_tokens"],
  )


def open_group_to_json(group: OpenGroup) -> dict[str, Any]:
  """Returns plain JSON data of a group in flight."""
  return {
    "admitted": int(group.admitted),
    "members": [
      {
        "engine": member.engine,
        "trajectory": trajectory_to_json(member.trajectory),
      }
      for member in group.members.values()
    ],
  }


def open_group_from_json(data: Mapping[str, Any]) -> OpenGroup:
  """Inverse of `open_group_to_json`."""
  members = [
    OpenMember(trajectory_from_json(one["trajectory"]), one["engine"])
    for one in data["members"]
  ]
  return OpenGroup(
    admitted=data["admitted"],
    members={one.trajectory.index: one for one in members},
  )
