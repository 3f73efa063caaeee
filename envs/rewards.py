"""Rewards: grades of finished episodes, based on their text alone."""

import dataclasses
from collections.abc import Sequence

from envs import base


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The sum of the environment's step rewards."""

  stateless = True

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    sums = [float(sum(t.step_rewards)) for t in transcripts]
    return [base.Grade(value, {"outcome": value}) for value in sums]
