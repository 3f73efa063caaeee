"""Rewards that compare the members of a group with each other.

They are called once for a group, when all its members have ended.
"""

import dataclasses
from collections.abc import Sequence

from envs import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortest:
  """The rank by length among the good members: 1 for the shortest, 0 for the
  longest and for all that are not good.

  Members of equal length share the mean of their ranks; the only good one gets
  1. Length is in characters of all that the agent wrote, reasoning and
  arguments of tool calls included.

  Attributes:
    among: decides which members are good; also the reward of an episode
      without a group. Add it to the sum, or the longest good one is worth as
      little as a bad one.
    success: smallest grade by `among` of a good member.
  """

  among: base.Reward
  success: float = 1.0
  stateless = True
  compares = True

  @property
  def alone(self) -> base.Reward:
    """The reward of an episode without a group."""
    return base.alone(self.among)

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task that `among` cannot grade."""
    base.check_task(self.among, task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    grades = await self.among(task, transcripts)
    lengths = [
      _written(t) if grade.value >= self.success else None
      for t, grade in zip(transcripts, grades, strict=True)
    ]
    good = [length for length in lengths if length is not None]
    return [
      base.Grade.single("shortest", 0.0 if n is None else _rank(n, good))
      for n in lengths
    ]


def _rank(length: int, lengths: Sequence[int]) -> float:
  """Returns the share of the other lengths that are longer; equal ones half."""
  if len(lengths) == 1:
    return 1.0
  longer = sum(other > length for other in lengths)
  equal = sum(other == length for other in lengths) - 1
  return (longer + equal / 2) / (len(lengths) - 1)


def _written(transcript: base.Transcript) -> int:
  own = (m for m in transcript.messages if m.role == "assistant")
  return sum(
    len(m.content)
    + len(m.reasoning or "")
    + sum(len(call.arguments) for call in m.tool_calls)
    for m in own
  )
