"""Run progress: the state checkpointed between rounds, and its observer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from envs import base
from rl.data import trajectory
from rl.schedule import group_buffer
from rl.train import logprob_gap, trainer


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
  """The complete state of a run between two rounds.

  Attributes:
    state: after `trained` rounds; valid until the next update.
    cursor: of the prompts.
    untrained: finished groups that no update holds.
    in_flight: groups to be continued.
    next_group: id of the next group to be admitted.
  """

  state: Any
  trained: int
  cursor: Mapping[str, Any]
  untrained: Mapping[int, trajectory.Group]
  in_flight: Mapping[int, group_buffer.Attempt]
  next_group: int

  def to_host(self) -> dict[str, Any]:
    """Returns everything but the arrays of the state, as JSON data."""
    return {
      "trained": self.trained,
      "cursor": dict(self.cursor),
      "untrained": [
        trajectory.group_to_json(group)
        for _, group in sorted(self.untrained.items())
      ],
      "in_flight": [
        _attempt_to_json(group_id, attempt)
        for group_id, attempt in sorted(self.in_flight.items())
      ],
      "next_group": self.next_group,
    }


def from_host(state: Any, host: Mapping[str, Any]) -> Progress:
  """Returns the progress that `Progress.to_host` described."""
  groups = [trajectory.group_from_json(data) for data in host["untrained"]]
  return Progress(
    state=state,
    trained=host["trained"],
    cursor=host["cursor"],
    untrained={group.group_id: group for group in groups},
    in_flight={
      entry["group_id"]: _attempt_from_json(entry)
      for entry in host["in_flight"]
    },
    next_group=host["next_group"],
  )


def _attempt_to_json(
  group_id: int, attempt: group_buffer.Attempt
) -> dict[str, Any]:
  return {
    "group_id": group_id,
    "task": dataclasses.asdict(attempt.task),
    "number": attempt.number,
    "stale": attempt.stale,
    "refills": attempt.refills,
    "past": attempt.past and trajectory.open_group_to_json(attempt.past),
  }


def _attempt_from_json(entry: Mapping[str, Any]) -> group_buffer.Attempt:
  past = entry.get("past")
  return group_buffer.Attempt(
    base.Task(**entry["task"]),
    entry["number"],
    entry["stale"],
    entry["refills"],
    past and trajectory.open_group_from_json(past),
  )


def beginning(state: Any, cursor: Mapping[str, Any]) -> Progress:
  """Returns the progress of a run that has trained nothing yet."""
  return Progress(
    state=state,
    trained=0,
    cursor=cursor,
    untrained={},
    in_flight={},
    next_group=0,
  )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedRound:
  """The result of a round.

  Attributes:
    advantages: of the members of each group.
    by_token: of the tokens of each member of each group; None for a member
      that was not trained.
    gap: log-probabilities of engine and learner, where they were compared.
  """

  metrics: Mapping[str, float]
  groups: Sequence[trajectory.Group]
  advantages: Sequence[Float32[np.ndarray, " G"]]
  by_token: Sequence[Sequence[trainer.TokenUse | None]]
  gap: logprob_gap.Gap | None = None


class RunObserver:
  """Hooks of a run, called on the event loop between rounds; override some."""

  async def on_round(self, trained: TrainedRound) -> None:
    """Called when a round was trained and its weights are published."""

  def held(self) -> str:
    """Returns why the weights of later rounds are not to be published.

    Asked after `on_round`; "" publishes, also those held back before. As soon
    as a round more would break the bound on staleness, the observer should end
    the run: nothing else can be trained.
    """
    return ""

  async def on_published(self, version: int) -> None:
    """Called when every engine serves `version`; nothing else is published."""

  async def on_boundary(self, progress: Progress) -> None:
    """Called when the run may be saved as it is now."""
