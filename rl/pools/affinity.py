"""Affinity of domains to pools: declared, or learned from measured seconds.

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
"""Sessions after which a measurement counts for 1 / e."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """The routing of sessions to pools.

  With pools of one kind only the names of pools matter.

  Attributes:
    prefer: name or kind of a pool by domain, such as {"math": "bandwidth",
      "frozen_lake": "compute"}; "any" states no preference. A domain is the
      name of a source of tasks.
    default: preference of the domains that `prefer` does not name; None sends
      them to the engine with the fewest sessions.
    learn: send domains that `prefer` does not name where a session of theirs
      is shortest: measured seconds times the sessions that share the engine.
      The cost of engines does not count: idle ones are paid as well.
    explore_every: while learning, every so-many-th session of a domain goes to
      the pool that the domain has not used for longest; 0 never explores.
    overload: a session leaves its preferred pool if that pool, with it, would
      have more than `overload` times the sessions of another pool, both
      counted at their emptiest engine; None: never. Sessions wait for a pool
      that only takes new weights.
    share_prompts: members of a group go to one engine of their pool, which
      encodes their prompt once; by `overload` a member leaves that engine as a
      session leaves a pool.
    min_prefill_ids: with pools of `role=prefill`, a request with at least so
      many ids that its engine has not seen is encoded there. An engine encodes
      fewer ids itself, and those that it cannot be given.

  Source: declared affinity, RollArt, arXiv 2512.22560, 5.2; learning it is
  future work there (9).
  """

  prefer: Mapping[str, str] = dataclasses.field(default_factory=dict)
  default: str | None = None
  learn: bool = False
  explore_every: int = 16
  overload: float | None = None
  share_prompts: bool = True
  min_prefill_ids: int = 256

  def validate(self) -> None:
    """Raises ValueError on a setting that cannot work."""
    out = "use 0 to never explore"
    checks.at_least(self, 0, "explore_every", where="routing", out=out)
    checks.at_least(self, 1, "min_prefill_ids", where="routing")
    out = "below it no pool is ever preferred; use none for no limit"
    checks.at_least(self, 1, "overload", where="routing", out=out)
    if self.learn and self.default is not None:
      why = "nothing is left to learn"
      checks.refuse(self, "default", "learn", why=why, out="use one of them")

  def validate_domains(self, names: Collection[str]) -> None:
    """Raises ValueError on a preference of an unknown domain.

    Args:
      names: of all sources of tasks.
    """
    for name in self.prefer:
      checks.known_name("routing.prefer", name, sorted(names))

  def of(self, names: Collection[str]) -> "Routing":
    """Returns the same with the preferences of these sources only."""
    prefer = {name: self.prefer[name] for name in self.prefer if name in names}
    return dataclasses.replace(self, prefer=prefer)

  def validate_pools(self, kinds: Mapping[str, placement.Kind]) -> None:
    """Raises ValueError on a preference for an unknown pool.

    Args:
      kinds: the kind of every pool that has sessions, by its name.
    """
    settings = {f"prefer.{name}": pool for name, pool in self.prefer.items()}
    if self.default is not None:
      settings["default"] = self.default
    pools = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    for key, name in settings.items():
      alike = len(set(kinds.values())) == 1 and name in get_args(placement.Kind)
      if name not in (*kinds, *kinds.values(), "any") and not alike:
        hint = checks.nearest(name, (*kinds, *kinds.values()))
        why = f"names neither a pool nor a kind; there are {pools}{hint}"
        raise ValueError(f"routing.{key}={name} {why}")


class Sample(NamedTuple):
  """Measured seconds and ids of one or more requests.

  Attributes:
    prefill_s, encoded: seconds from the slot to the first id, and ids of
      context encoded.
    decode_s, sampled: seconds after the first id, and ids sampled.
  """

  prefill_s: float = 0.0
  encoded: float = 0.0
  decode_s: float = 0.0
  sampled: float = 0.0

  def plus(self, other: "Sample", keep: float = 1.0) -> "Sample":
    """Returns the sum, with this one weighted by `keep`."""
    pairs = zip(self, other, strict=True)
    return Sample(*(keep * mine + theirs for mine, theirs in pairs))


def sample(
  request: contract.DecodeRequest, answer: contract.Completion
) -> Sample:
  """Returns the sample of one request."""
  sampled = len(answer.tokens)
  if not sampled:
    return Sample()
  first_s = answer.first_token_s
  # The wait for a slot is the load of the engine, and not its speed.
  prefill_s = max(0.0, first_s - answer.queue_s)
  encoded = float(len(request.tokens) - answer.cached_tokens)
  decode_s = max(0.0, answer.decode_s - first_s)
  return Sample(prefill_s, encoded, decode_s, float(sampled))


@dataclasses.dataclass(eq=False)
class _Domain:
  """Measurements of one domain; older ones count less in the sums."""

  begun: int = 0
  used: dict[str, int] = dataclasses.field(default_factory=dict)
  pools: dict[str, Sample] = dataclasses.field(default_factory=dict)
  lengths: Sample = Sample()
  sessions: float = 0.0


class Estimates:
  """Seconds of a session of each domain on each pool, as measured.

  The ids of a session belong to the domain, wherever it was played; the
  seconds of an id belong to the pool. So a long session does not count against
  the pool that happened to have it.
  """

  def __init__(self):
    self._domains: dict[str, _Domain] = collections.defaultdict(_Domain)

  @property
  def seconds(self) -> Mapping[tuple[str, str], float]:
    """Every estimate, by domain and pool."""
    estimates = {
      (name, pool): self.of(name, pool)
      for name, domain in self._domains.items()
      for pool in domain.pools
    }
    return {key: s for key, s in estimates.items() if s is not None}

  def of(self, domain: str, pool: str) -> float | None:
    """Returns seconds of a session; None when none has ended there."""
    seen = self._domains[domain]
    sample = seen.pools.get(pool)
    if sample is None:
      return None
    encode_s = sample.prefill_s / max(sample.encoded, 1.0)
    decode_s = sample.decode_s / max(sample.sampled, 1.0)
    lengths = seen.lengths
    total_s = lengths.encoded * encode_s + lengths.sampled * decode_s
    return total_s / seen.sessions

  def due(self, domain: str, pools: Sequence[str], every: int) -> str | None:
    """Returns the pool to explore now, if any.

    That is one that this domain has never used and, every `every`-th time, the
    one not used for longest.
    """
    seen = self._domains[domain]
    oldest = min(pools, key=lambda pool: seen.used.get(pool, -1))
    periodic = every and seen.begun % every == every - 1
    return oldest if oldest not in seen.used or periodic else None

  def begin(self, domain: str, pool: str) -> None:
    """Counts a session that began."""
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


class Assignment(NamedTuple):
  """The engine of a session.

  Attributes:
    missed: the preferred pool that it did not get; "" if it got it, has no
      preference, or had its engine before.
  """

  engine: int
  missed: str = ""


class Affinity:
  """Chooses among the available engines; knows nothing of sessions.

  Args:
    infos: one for each engine.

  Raises:
    ValueError: settings that cannot work.
  """

  def __init__(self, infos: Sequence[placement.EngineInfo], routing: Routing):
    routing.validate()
    routing.validate_pools(
      {info.pool: info.kind for info in infos if info.role == "decode"}
    )
    self.estimates = Estimates()
    self._routing = routing
    self.infos = tuple(infos)

  @property
  def infos(self) -> tuple[placement.EngineInfo, ...]:
    """Pool and kind of each engine; the one set may have more."""
    return self._infos

  @infos.setter
  def infos(self, infos: tuple[placement.EngineInfo, ...]) -> None:
    self._infos = infos
    having = {i: x for i, x in enumerate(infos) if x.role == "decode"}
    self._mixed = len({info.kind for info in having.values()}) > 1
    named: dict[str, set[int]] = collections.defaultdict(set)
    for i, info in having.items():
      named[info.pool].add(i)
      if self._mixed and info.kind != "any":
        named[info.kind].add(i)
    self._named = {name: frozenset(group) for name, group in named.items()}

  def _preference(self, domain: str) -> str | None:
    return self._routing.prefer.get(domain, self._routing.default)

  def preferred(self, domain: str) -> frozenset[int] | None:
    """Returns the engines that a domain prefers; None: all are alike."""
    name = self._preference(domain)
    return None if name is None else self._named.get(name)

  def choose(
    self, domain: str, engines: Sequence[int], load: Sequence[int]
  ) -> Assignment:
    """Returns the best of one or more engines, the first of equals.

    Args:
      domain: "" for an unbound session.
      load: sessions of every engine.
    """
    preferred = self.preferred(domain)
    if preferred is None:
      prices = self._prices(domain, engines, load)
      return Assignment(min(prices, key=lambda i: (prices[i], load[i])))
    inside = [i for i in engines if i in preferred]
    outside = [i for i in engines if i not in preferred]
    if inside and not (outside and self._overloaded(inside, outside, load)):
      return Assignment(min(inside, key=load.__getitem__))
    missed = self._preference(domain) or ""
    return Assignment(min(outside, key=load.__getitem__), missed)

  def beside(
    self, having: Sequence[int], engine: int, load: Sequence[int]
  ) -> int:
    """Returns the engine for a member of a group.

    Args:
      having: engines of its pool that have the group's prompt.
      engine: that it gets otherwise.
      load: sessions of every engine.
    """
    if not (having and self._routing.share_prompts):
      return engine
    if self._overloaded(having, [engine], load):
      return engine
    return min(having, key=load.__getitem__)

  def _overloaded(
    self, inside: Sequence[int], outside: Sequence[int], load: Sequence[int]
  ) -> bool:
    if (max_ratio := self._routing.overload) is None:
      return False
    here, there = (min(load[i] for i in g) + 1 for g in (inside, outside))
    return here > max_ratio * there

  def _prices(
    self, domain: str, engines: Sequence[int], load: Sequence[int]
  ) -> Mapping[int, float]:
    """Returns the engines to choose from, each with its learned price."""
    alike = dict.fromkeys(engines, 0.0)
    if not (self._routing.learn and self._mixed and domain):
      return alike
    pools = list(dict.fromkeys(self._infos[i].pool for i in engines))
    every = self._routing.explore_every
    if due := self.estimates.due(domain, pools, every):
      return {i: 0.0 for i in engines if self._infos[i].pool == due}
    seconds = {pool: self.estimates.of(domain, pool) for pool in pools}
    prices = {}
    for i in engines:
      if (each := seconds[self._infos[i].pool]) is None:
        return alike  # It has been tried, and the answer is not there yet.
      prices[i] = each * (load[i] + 1)
    return prices
