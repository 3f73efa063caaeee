"""What a simulated run has to do: its sources of tasks, and their draws.

Nothing draws from a shared stream. A draw is a function of the seed, of what
is drawn and for whom, so it does not depend on the order of events: two
schedules compared on one seed face the same answers, turn for turn.
"""

import dataclasses
import functools
import hashlib
import math
import statistics
import struct
import zlib
from collections.abc import Mapping
from typing import Literal, get_args

from rl.simulation import distributions

_NORMAL = statistics.NormalDist()
_PACKERS = [struct.Struct(f"<{count}q") for count in range(8)]
_SQRT2 = math.sqrt(2.0)
_AT_ONCE = distributions.Fixed(0.0)
_ONE = distributions.Fixed(1.0)
_SHORT = distributions.Fixed(100.0)
_LONG = distributions.LogNormal(mean=2000.0, sigma=0.9)


def uniform(*key: int) -> float:
  """Returns a number in (0, 1) that follows from at most 7 whole numbers."""
  data = _PACKERS[len(key)].pack(*key)
  digest = hashlib.blake2b(data, digest_size=8).digest()
  return ((int.from_bytes(digest, "little") >> 11) + 0.5) * 2.0**-53


def normal(*key: int) -> float:
  """Returns a standard normal draw that follows from the key."""
  return _NORMAL.inv_cdf(uniform(*key))


def correlated(rho: float, shared: float, own: float) -> float:
  """Returns a uniform draw from two normal ones.

  Draws with the same `shared` have correlation `rho` as normal variables; each
  alone is uniform, so a quantile of it keeps its distribution.
  """
  mixed = math.sqrt(rho) * shared + math.sqrt(1.0 - rho) * own
  return min(max(0.5 * math.erfc(-mixed / _SQRT2), 1e-12), 1.0 - 1e-12)


What = Literal[
  "turns",
  "prompt_tokens",
  "answer_tokens",
  "reply_tokens",
  "start_s",
  "step_s",
  "reward_s",
]
_NUMBERS: Mapping[str, int] = {
  name: number for number, name in enumerate(get_args(What))
}
_FAULTS = {"start": 16, "step": 17, "reward": 18}
_SUCCESS = 19
_SHARES = (
  "correlation",
  "start_fault",
  "step_fault",
  "reward_fault",
  "success",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """One source of tasks, as the simulation knows it.

  Attributes:
    name: of the source.
    share: of the groups that are from it, against the other sources' shares.
    turns: answers in an episode.
    prompt_tokens: of the first context; members of a group have the same.
    answer_tokens: sampled in one turn.
    reply_tokens: context that the environment adds after a turn.
    start_s, step_s, reward_s: seconds of a start, a step and a grading.
    correlation: 0 to 1, of members of a group, in each of the above.
    start_fault, step_fault, reward_fault: share of calls that raise; a reward
      is called again, as often as the rollout says.
    success: share of episodes whose reward is 1; the others' is 0.
  """

  name: str = "math"
  share: float = 1.0
  turns: distributions.Distribution = _ONE
  prompt_tokens: distributions.Distribution = _SHORT
  answer_tokens: distributions.Distribution = _LONG
  reply_tokens: distributions.Distribution = _SHORT
  start_s: distributions.Distribution = _AT_ONCE
  step_s: distributions.Distribution = _AT_ONCE
  reward_s: distributions.Distribution = _AT_ONCE
  correlation: float = 0.5
  start_fault: float = 0.0
  step_fault: float = 0.0
  reward_fault: float = 0.0
  success: float = 0.5

  def __post_init__(self) -> None:
    if not self.name or "/" in self.name:
      raise ValueError(
        f"name={self.name!r} is empty or has a slash: it is the first part of "
        "the ids of tasks, and the slash ends it"
      )
    if not 0 < self.share < math.inf:
      raise ValueError(
        f"{self.name}: share={self.share} is not above 0 and finite"
      )
    for name in _SHARES:
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(
          f"{self.name}: {name}={getattr(self, name)} is not in [0, 1]"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class GroupMember:
  """Who draws: a member of a group that plays a task.

  Attributes:
    task: index in its source.
    number: of the task's plays, in all attempts at its group.
  """

  task: int
  number: int


class Draws:
  """The draws of one source under one seed; the same key draws the same."""

  def __init__(self, workload: Workload, seed: int):
    self._workload = workload
    self._seed = seed
    self._source = zlib.crc32(workload.name.encode())
    # A group's factor is asked for by each of its members, turn after turn.
    self._shared = functools.lru_cache(maxsize=1 << 16)(self._shared_normal)

  def of_task(self, what: What, task: int) -> float:
    """Returns what all members of a group have alike."""
    draw = uniform(self._seed, self._source, _NUMBERS[what], task)
    return self._distribution(what).quantile(draw)

  def of_turn(self, what: What, member: GroupMember, turn: int = 0) -> float:
    """Returns a draw of one member, correlated with those of its group."""
    distribution = self._distribution(what)
    if isinstance(distribution, distributions.Fixed):
      return distribution.value
    number, rho = _NUMBERS[what], self._workload.correlation
    own = normal(self._seed, self._source, number, *self._own(member, turn))
    shared = self._shared(number, member.task) if rho else 0.0
    return distribution.quantile(correlated(rho, shared, own))

  def count(self, what: What, member: GroupMember, turn: int = 0) -> int:
    """Returns `of_turn` as a whole number, 1 at the least."""
    return max(1, round(self.of_turn(what, member, turn)))

  def faulty(
    self,
    call: Literal["start", "step", "reward"],
    member: GroupMember,
    turn: int = 0,
  ) -> bool:
    """Whether this call raises."""
    share = getattr(self._workload, f"{call}_fault")
    if not share:
      return False
    key = (self._seed, self._source, _FAULTS[call], *self._own(member, turn))
    return uniform(*key) < share

  def succeeds(self, member: GroupMember) -> bool:
    """Whether the episode's reward is 1."""
    own = normal(self._seed, self._source, _SUCCESS, *self._own(member, 0))
    shared = self._shared(_SUCCESS, member.task)
    draw = correlated(self._workload.correlation, shared, own)
    return draw < self._workload.success

  def _distribution(self, what: What) -> distributions.Distribution:
    return getattr(self._workload, what)

  def _own(self, member: GroupMember, turn: int) -> tuple[int, int, int]:
    return member.task, member.number, turn

  def _shared_normal(self, number: int, task: int) -> float:
    return normal(self._seed, self._source, number, task)
