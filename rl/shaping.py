"""What is added to a reward before it is compared: a penalty for length."""

import dataclasses
import math

from rl import trajectory as trajectory_lib

_PART = "overlong"
_BEFORE = "unshaped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlong:
  """A soft penalty for episodes that come close to the limit of tokens.

  0 up to `max_tokens - buffer` sampled tokens, then linear down to -penalty at
  `max_tokens`, and -penalty beyond.

  Attributes:
    max_tokens: sampled tokens of a whole episode.
    buffer: the last tokens before that.

  Source: DAPO, arXiv 2503.14476, eq. 13, where penalty is 1.
  """

  max_tokens: int
  buffer: int
  penalty: float = 1.0

  def validate(self) -> None:
    """Raises ValueError on a buffer or a penalty that cannot work."""
    if not 0 < self.buffer <= self.max_tokens:
      raise ValueError(
        f"Overlong: buffer={self.buffer} is outside [1, max_tokens="
        f"{self.max_tokens}]"
      )
    if not 0 < self.penalty < math.inf:
      raise ValueError(
        f"Overlong: penalty={self.penalty} is no number above 0; for none set "
        "the shaping to none"
      )

  def __call__(self, trajectory: trajectory_lib.Trajectory) -> float:
    """Returns what to add to the reward: from -penalty to 0."""
    over = trajectory.num_sampled - (self.max_tokens - self.buffer)
    share = min(max(over / self.buffer, 0.0), 1.0)
    return -self.penalty * share if share else 0.0


def apply(
  trajectory: trajectory_lib.Trajectory, shaping: Overlong
) -> trajectory_lib.Trajectory:
  """Returns the trajectory with the penalty in its reward and as a part.

  A faulty one, which has no reward, is returned as it is. To shape what was
  shaped before replaces the penalty and does not add a second.
  """
  before = unshaped(trajectory)
  if before is None:
    return trajectory
  penalty = shaping(trajectory)
  parts = {**trajectory.parts, _PART: penalty, _BEFORE: before}
  return dataclasses.replace(trajectory, reward=before + penalty, parts=parts)


def unshaped(trajectory: trajectory_lib.Trajectory) -> float | None:
  """Returns the reward as it was graded.

  Success, pass rates and the variance of a group are of this one: a success
  stays one however long it is, and a group of nothing but successes has
  nothing to teach but brevity.
  """
  if trajectory.reward is None:
    return None
  return trajectory.parts.get(_BEFORE, trajectory.reward)
