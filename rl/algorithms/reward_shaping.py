"""Penalties on the reward of an episode: length and repetition."""

import dataclasses
from typing import ClassVar

import numpy as np

from rl.data import trajectory as trajectory_lib
from rl.settings import checks


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
  part: ClassVar[str] = "overlong"

  def validate(self) -> None:
    """Raises ValueError on a buffer or a penalty that cannot work."""
    out = "it is the last of max_tokens"
    checks.within(self, 1, self.max_tokens, "buffer", out=out)
    out = "for none set overlong to none"
    checks.finite_above(self, 0, "penalty", out=out)

  def __call__(self, trajectory: trajectory_lib.Trajectory) -> float:
    """Returns what to add to the reward: from -penalty to 0."""
    over = trajectory.num_sampled - (self.max_tokens - self.buffer)
    share = min(max(over / self.buffer, 0.0), 1.0)
    return -self.penalty * share if share else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
  """A penalty for answers that repeat themselves.

  `penalty` times the share of n-grams that occurred before in the same answer.
  Acting alike in two turns does not count as repetition.

  Attributes:
    size: n, in tokens.

  Source: arXiv 2502.03373, appendix C, as TRL's reward of n-grams has it.
  """

  size: int = 2
  penalty: float = 1.0
  part: ClassVar[str] = "repetition"

  def validate(self) -> None:
    """Raises ValueError on a size or a penalty that cannot work."""
    checks.at_least(self, 1, "size")
    out = "for none set repetition to none"
    checks.finite_above(self, 0, "penalty", out=out)

  def __call__(self, trajectory: trajectory_lib.Trajectory) -> float:
    """Returns what to add to the reward: from -penalty to 0."""
    share = repeated_share(trajectory, self.size)
    return -self.penalty * share if share else 0.0


def repeated_share(
  trajectory: trajectory_lib.Trajectory, size: int
) -> float | None:
  """Returns the share of n-grams that occurred before in the same answer.

  None where no answer has as many tokens as an n-gram.
  """
  total = distinct = 0
  for turn in trajectory.turns:
    if len(turn.tokens) >= size:
      grams = np.lib.stride_tricks.sliding_window_view(turn.tokens, size)
      total += len(grams)
      distinct += len(np.unique(grams, axis=0))
  return 1 - distinct / total if total else None


def apply(
  trajectory: trajectory_lib.Trajectory, *shapings: Overlong | Repetition | None
) -> trajectory_lib.Trajectory:
  """Returns the trajectory with each penalty in its reward and as a part.

  A trajectory without a reward, or without a shaping, is returned as it is.
  Shaping again replaces the penalties.
  """
  graded = trajectory.graded_reward
  penalties = {s.part: s(trajectory) for s in shapings if s is not None}
  if graded is None or not penalties:
    return trajectory
  reward = graded + sum(penalties.values())
  parts = {**trajectory.parts, **penalties}
  return dataclasses.replace(trajectory, reward=reward, parts=parts)
