"""The one policy of trying again what has failed: rewards, starts, engines."""

import dataclasses

from rl.settings import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backoff:
  """Calls of something that may fail, with ever longer waits between them.

  Attributes:
    attempts: maximum of calls, the first included.
    first_wait_s: between the first failure and the second call.
    factor: ratio of each wait to the one before.
    max_wait_s: of one wait.
  """

  attempts: int = 3
  first_wait_s: float = 0.5
  factor: float = 2.0
  max_wait_s: float = 10.0

  def validate_as(self, where: str) -> None:
    """Raises ValueError on numbers that allow no call, or no wait.

    Args:
      where: the setting that it is, as "rollout.grading".
    """
    checks.at_least(self, 1, "attempts", where=where, out="use 1 to call once")
    checks.at_least(self, 1, "factor", where=where, out="1 is equal waits")
    checks.finite_at_least(self, 0, "first_wait_s", where=where)
    out = "it must be first_wait_s or longer"
    least = self.first_wait_s
    checks.finite_at_least(self, least, "max_wait_s", where=where, out=out)

  def wait_s(self, failures: int) -> float:
    """Returns the seconds to wait after so many failures, 1 or more."""
    wait_s = self.first_wait_s
    for _ in range(failures - 1):  # A power of it might overflow.
      wait_s = min(wait_s * self.factor, self.max_wait_s)
    return wait_s

  def longest_s(self, call_s: float) -> float:
    """Returns the maximal seconds of all calls and the waits between them.

    Args:
      call_s: deadline of one call.
    """
    waits_s, wait_s, left = 0.0, self.first_wait_s, self.attempts - 1
    grows = self.factor > 1 and wait_s > 0
    while grows and left and wait_s < self.max_wait_s:
      waits_s += wait_s
      wait_s = min(wait_s * self.factor, self.max_wait_s)
      left -= 1
    return self.attempts * call_s + waits_s + left * wait_s
