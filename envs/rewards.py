"""Rewards: grades of finished episodes, from their text alone."""

import dataclasses
from collections.abc import Sequence

from envs import base


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The sum of what the environment gave for each step."""

  stateless = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    sums = [float(sum(t.step_rewards)) for t in transcripts]
    return [base.Grade(value, {"outcome": value}) for value in sums]
