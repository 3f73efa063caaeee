"""The workload of a simulated run: its sources of tasks, and their draws.

No draw comes from a shared stream. Each is a function of the seed, the quantity
and the member, so it does not depend on the order of events: two schedules
compared on one seed face the same answers, turn for turn.
"""

import dataclasses
import functools
import hashlib
import math
import statistics
import struct
import zlib
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from rl.settings import checks
from rl.simulation import distributions

MAX_SEED = 2**63 - 1
"""The largest seed: keys of draws are of 64 bits."""
MAX_DRAW = 1.0 - 1e-12
"""The largest uniform draw of a member."""

_NORMAL = statistics.NormalDist()
_WHOLE = struct.Struct("<Q")
_PACKERS = [struct.Struct(f"<{count}q") for count in range(8)]
_SIX = _PACKERS[6]
_SQRT2 = math.sqrt(2.0)
_AT_ONCE = distributions.Fixed(0.0)
_ONE = distributions.Fixed(1.0)
_SHORT = distributions.Fixed(100.0)
_LONG = distributions.LogNormal(mean=2000.0, sigma=0.9)


def uniform(*key: int) -> float:
  """Returns a number in (0, 1) derived from at most 7 whole numbers."""
  return _unit(_PACKERS[len(key)].pack(*key))


def _unit(data: bytes) -> float:
  digest = hashlib.blake2b(data, digest_size=8).digest()
  (draw,) = _WHOLE.unpack(digest)
  return ((draw >> 11) + 0.5) * 2.0**-53


def normal(*key: int) -> float:
  """Returns a standard normal draw derived from the key."""
  return _NORMAL.inv_cdf(uniform(*key))


Quantity = Literal[
  "turns",
  "prompt_tokens",
  "answer_tokens",
  "reply_tokens",
  "start_s",
  "step_s",
  "reward_s",
]
_NUMBERS: Mapping[str, int] = {
  name: number for number, name in enumerate(get_args(Quantity))
}
_COUNTS = ("turns", "prompt_tokens", "answer_tokens", "reply_tokens")
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
  """A source of simulated tasks.

  Attributes:
    name: of the source.
    share: of the groups from it, relative to the other sources' shares.
    turns: answers in an episode.
    prompt_tokens: of the first context, the same for members of a group.
    answer_tokens: sampled in one turn.
    reply_tokens: context that the environment adds after a turn.
    start_s, step_s, reward_s: seconds of a start, a step and a grading.
    correlation: 0 to 1, within a group, of each of the above.
    start_fault, step_fault, reward_fault: share of calls that raise; rewards
      are retried as the rollout says.
    restarts: a failed start is tried again, as `rollout.starting` says.
    success: share of episodes with reward 1; the others have 0.
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
  restarts: bool = False
  success: float = 0.5

  def __post_init__(self) -> None:
    if not self.name or "/" in self.name:
      raise ValueError(
        f"name={self.name!r} is empty or has a slash: it is the first part of "
        "the ids of tasks, and the slash ends it"
      )
    checks.finite_above(self, 0, "share", where=self.name)
    checks.in_unit(self, *_SHARES, where=self.name)
    for name in _COUNTS:
      if not math.isfinite(_most(getattr(self, name))):
        raise ValueError(
          f"{self.name}.{name}={getattr(self, name)} must be finite: these are "
          "counts; lower it, or set its max_value"
        )


def _most(distribution: distributions.Distribution) -> float:
  """Returns the largest draw."""
  try:
    return distribution.quantile(MAX_DRAW)
  except OverflowError:
    return math.inf


class GroupMember(NamedTuple):
  """A member of a group that plays a task, as the key of draws.

  Attributes:
    task: index in its source.
    number: of the play, counted over all attempts at the task.
  """

  task: int
  number: int


class Draws:
  """The draws of one source under one seed; equal keys draw equal values."""

  def __init__(self, workload: Workload, seed: int):
    self._workload = workload
    self._seed = seed
    rho = workload.correlation
    self._weights = math.sqrt(rho), math.sqrt(1.0 - rho)
    self._source = zlib.crc32(workload.name.encode())
    # Looked up in every turn.
    self._distributions: Mapping[str, distributions.Distribution] = {
      name: getattr(workload, name) for name in _NUMBERS
    }
    self._faults = {
      name: getattr(workload, f"{name}_fault") for name in _FAULTS
    }
    # Every member of a group asks for its factor, turn after turn.
    self._shared = functools.lru_cache(maxsize=1 << 16)(
      functools.partial(normal, seed, self._source)
    )

  def of_task(self, what: Quantity, task: int) -> float:
    """Returns the draw that all members of a group share."""
    draw = uniform(self._seed, self._source, _NUMBERS[what], task)
    return self._distributions[what].quantile(draw)

  def of_turn(
    self, what: Quantity, member: GroupMember, turn: int = 0
  ) -> float:
    """Returns the draw of one member, correlated within its group."""
    distribution = self._distributions[what]
    if isinstance(distribution, distributions.Fixed):
      return distribution.value
    return distribution.quantile(self._draw(_NUMBERS[what], member, turn))

  def count(self, what: Quantity, member: GroupMember, turn: int = 0) -> int:
    """Returns `of_turn` as a whole number, at least 1."""
    return max(1, round(self.of_turn(what, member, turn)))

  def faulty(
    self,
    call: Literal["start", "step", "reward"],
    member: GroupMember,
    turn: int = 0,
  ) -> bool:
    """True when this call raises."""
    share = self._faults[call]
    if not share:
      return False
    draw = uniform(self._seed, self._source, _FAULTS[call], *member, turn)
    return draw < share

  def succeeds(self, member: GroupMember) -> bool:
    """True when the episode's reward is 1."""
    return self._draw(_SUCCESS, member, 0) < self._workload.success

  def _draw(self, number: int, member: GroupMember, turn: int) -> float:
    """Returns a uniform draw, whose normal variable is correlated in a group.

    Each alone is uniform, so a quantile of it keeps its distribution.
    """
    together, alone = self._weights
    task, play = member
    # As `normal`, whose call this saves: most draws are here.
    data = _SIX.pack(self._seed, self._source, number, task, play, turn)
    own = _NORMAL.inv_cdf(_unit(data))
    shared = self._shared(number, task) if together else 0.0
    mixed = together * shared + alone * own
    return min(max(0.5 * math.erfc(-mixed / _SQRT2), 1e-12), MAX_DRAW)
