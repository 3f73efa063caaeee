"""Which pool suits which domain: declared, or learned from what it takes.

domain --prefer--> a pool by name or kind --+
       --learn---> price of each engine ----+--> the engine to take
       --neither-> fewest sessions ---------+
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, get_args

from rl.engine import contract
from rl.pools import placement
from rl.settings import checks

_MEMORY = 32
"""Sessions after which what one has told counts for 1 / e."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """Where sessions go. With pools of one kind only names of pools matter.

  Attributes:
    prefer: a pool, or the kind of one, for each domain that should have it,
      such as {"math": "bandwidth", "frozen_lake": "compute"}. "any" is no
      preference. A domain is the name of its tasks' source.
    default: the same for all domains that `prefer` does not name; None lets
      them go wherever the fewest sessions are.
    learn: domains that `prefer` does not name go where a session of theirs
      takes least: seconds as measured, times the sessions that share the
      engine. What engines cost is paid whether they are used or not.
    explore_every: while learning, each so-many-th session of a domain goes to
      the pool that the domain has not used for longest; 0 never tries again.
    overload: a session leaves its preferred pool when that, with it, would
      have more than so many times the sessions that another pool would, both
      counted at their emptiest engine; None: never. While a pool only takes
      new weights, its sessions wait.

  Source: declared affinity, RollArt, arXiv 2512.22560, 5.2; to learn it is
  future work there (9).
  """

  prefer: Mapping[str, str] = dataclasses.field(default_factory=dict)
  default: str | None = None
  learn: bool = False
  explore_every: int = 16
  overload: float | None = None

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    if self.explore_every < 0:
      raise ValueError(
        f"routing.explore_every={self.explore_every} is below 0; 0 is never"
      )
    if self.overload is not None and not self.overload >= 1:
      raise ValueError(
        f"routing.overload={self.overload} is below 1: no session would go "
        "where it should; use 1 or more, or none"
      )
    if self.learn and self.default is not None:
      raise ValueError(
        f"routing.default={self.default} leaves nothing to routing.learn=true;"
        " use one of them"
      )

  def validate_domains(self, names: Collection[str]) -> None:
    """Raises ValueError on a preference of a domain that does not exist.

    Args:
      names: of all sources of tasks.
    """
    for name in self.prefer:
      if name in names:
        continue
      raise ValueError(
        f"routing.prefer.{name}: no task is of that source; there are "
        f"{', '.join(sorted(names))}{checks.nearest(name, names)}"
      )

  def of(self, names: Collection[str]) -> "Routing":
    """Returns the same without preferences of other sources than these."""
    prefer = {name: self.prefer[name] for name in self.prefer if name in names}
    return dataclasses.replace(self, prefer=prefer)

  def validate_pools(self, kinds: Mapping[str, placement.Kind]) -> None:
    """Raises ValueError on a preference for a pool that does not exist.

    Args:
      kinds: the kind of every pool, by its name.
    """
    wanted = {f"prefer.{name}": pool for name, pool in self.prefer.items()}
    if self.default is not None:
      wanted["default"] = self.default
    pools = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    for key, name in wanted.items():
      alike = len(set(kinds.values())) == 1 and name in get_args(placement.Kind)
      if name in (*kinds, *kinds.values(), "any") or alike:
        continue
      hint = checks.nearest(name, (*kinds, *kinds.values()))
      raise ValueError(
        f"routing.{key}={name} is no pool and no kind of one; there are "
        f"{pools}{hint}"
      )


class Seat(NamedTuple):
  """What is known of an engine before it has served anything.

  Attributes:
    cost: of a second, for who plans; who routes has paid already.
  """

  pool: str
  kind: placement.Kind = "any"
  cost: float = 1.0


class Sample(NamedTuple):
  """What requests took.

  Attributes:
    prefill_s, encoded: seconds until the first id, and ids of context that
      were encoded.
    decode_s, sampled: seconds behind that, and ids that were sampled.
  """

  prefill_s: float = 0.0
  encoded: float = 0.0
  decode_s: float = 0.0
  sampled: float = 0.0

  def plus(self, other: "Sample", keep: float = 1.0) -> "Sample":
    """Returns the sum, in which what was before counts less."""
    return Sample(
      keep * self.prefill_s + other.prefill_s,
      keep * self.encoded + other.encoded,
      keep * self.decode_s + other.decode_s,
      keep * self.sampled + other.sampled,
    )


def sample(
  request: contract.DecodeRequest, answer: contract.Completion
) -> Sample:
  """Returns what one request took."""
  if not len(answer.tokens):
    return Sample()
  return Sample(
    prefill_s=answer.first_token_s,
    encoded=float(len(request.tokens) - answer.cached_tokens),
    decode_s=max(0.0, answer.decode_s - answer.first_token_s),
    sampled=float(len(answer.tokens)),
  )


@dataclasses.dataclass(eq=False)
class _Domain:
  """What is known of one domain; sums forget."""

  begun: int = 0
  used: dict[str, int] = dataclasses.field(default_factory=dict)
  pools: dict[str, Sample] = dataclasses.field(default_factory=dict)
  lengths: Sample = dataclasses.field(default_factory=Sample)
  sessions: float = 0.0


class Estimates:
  """Seconds of a session of each domain on each pool, as measured.

  The ids of a session are the domain's, wherever it was played; how long one
  takes to be encoded or sampled is the pool's for this domain. So a long
  session does not speak against the pool that happened to have it.
  """

  def __init__(self):
    self._domains: dict[str, _Domain] = collections.defaultdict(_Domain)

  @property
  def seconds(self) -> Mapping[tuple[str, str], float]:
    """Every estimate, by domain and pool."""
    known = {
      (domain, pool): self.of(domain, pool)
      for domain, seen in self._domains.items()
      for pool in seen.pools
    }
    return {key: value for key, value in known.items() if value is not None}

  def of(self, domain: str, pool: str) -> float | None:
    """Returns seconds of a session; None when none has ended there."""
    seen = self._domains[domain]
    there = seen.pools.get(pool)
    if there is None:
      return None
    encoding = there.prefill_s / max(there.encoded, 1.0)
    sampling = there.decode_s / max(there.sampled, 1.0)
    mean = seen.lengths
    total = mean.encoded * encoding + mean.sampled * sampling
    return total / seen.sessions

  def due(self, domain: str, pools: Sequence[str], every: int) -> str | None:
    """Returns the pool that must be tried next, if any is to be.

    That is one that was never used by this domain and, each `every`-th time,
    the one not used for longest.
    """
    seen = self._domains[domain]
    oldest = min(pools, key=lambda pool: seen.used.get(pool, -1))
    periodic = every and seen.begun % every == every - 1
    return oldest if oldest not in seen.used or periodic else None

  def begin(self, domain: str, pool: str) -> None:
    """Notes that a session began."""
    seen = self._domains[domain]
    seen.used[pool] = seen.begun
    seen.begun += 1

  def end(self, domain: str, pool: str, sample: Sample) -> None:
    """Learns from a session that ended."""
    if not sample.sampled:
      return
    seen, keep = self._domains[domain], math.exp(-1 / _MEMORY)
    before = seen.pools.get(pool, Sample())
    seen.pools[pool] = before.plus(sample, keep)
    seen.lengths = seen.lengths.plus(sample, keep)
    seen.sessions = keep * seen.sessions + 1


class Choice(NamedTuple):
  """The engine of a session.

  Attributes:
    wanted: what its domain prefers and it did not get; "" when it did, or has
      no preference, or had its engine before.
  """

  engine: int
  wanted: str = ""


class Affinity:
  """Chooses among engines that could be had; knows nothing of sessions.

  Args:
    seats: one for each engine.

  Raises:
    ValueError: settings that cannot work.
  """

  def __init__(self, seats: Sequence[Seat], routing: Routing):
    routing.validate()
    routing.validate_pools({seat.pool: seat.kind for seat in seats})
    self.estimates = Estimates()
    self._seats = tuple(seats)
    self._routing = routing
    self._mixed = len({seat.kind for seat in seats}) > 1
    named: dict[str, set[int]] = collections.defaultdict(set)
    for i, seat in enumerate(seats):
      named[seat.pool].add(i)
      if self._mixed and seat.kind != "any":
        named[seat.kind].add(i)
    self._named = {name: frozenset(some) for name, some in named.items()}

  def _wanted(self, domain: str) -> str | None:
    return self._routing.prefer.get(domain, self._routing.default)

  def preferred(self, domain: str) -> frozenset[int] | None:
    """Returns the engines that a domain should have; None: all are alike."""
    name = self._wanted(domain)
    return None if name is None else self._named.get(name)

  def choose(
    self, domain: str, engines: Sequence[int], load: Sequence[int]
  ) -> Choice:
    """Returns the best of one or more engines, the first of equals.

    Args:
      domain: "" is that of sessions of which nothing is known.
      load: sessions of every engine.
    """
    preferred = self.preferred(domain)
    if preferred is None:
      among = self._learned(domain, engines, load)
      return Choice(min(among, key=lambda i: (among[i], load[i])))
    mine = [i for i in engines if i in preferred]
    rest = [i for i in engines if i not in preferred]
    if mine and not (rest and self._overloaded(mine, rest, load)):
      return Choice(min(mine, key=load.__getitem__))
    wanted = self._wanted(domain) or ""
    return Choice(min(rest, key=load.__getitem__), wanted)

  def _overloaded(
    self, mine: Sequence[int], rest: Sequence[int], load: Sequence[int]
  ) -> bool:
    if (most := self._routing.overload) is None:
      return False
    here, there = (min(load[i] for i in some) + 1 for some in (mine, rest))
    return here > most * there

  def _learned(
    self, domain: str, engines: Sequence[int], load: Sequence[int]
  ) -> Mapping[int, float]:
    """Returns engines that may be chosen, each with its price."""
    alike = dict.fromkeys(engines, 0.0)
    if not (self._routing.learn and self._mixed and domain):
      return alike
    pools = list(dict.fromkeys(self._seats[i].pool for i in engines))
    every = self._routing.explore_every
    if due := self.estimates.due(domain, pools, every):
      return {i: 0.0 for i in engines if self._seats[i].pool == due}
    seconds = {pool: self.estimates.of(domain, pool) for pool in pools}
    prices = {}
    for i in engines:
      if (each := seconds[self._seats[i].pool]) is None:
        return alike  # It has been tried, and the answer is not there yet.
      prices[i] = each * (load[i] + 1)
    return prices
