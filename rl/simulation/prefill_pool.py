"""Prefill on engines of its own, which hand keys and values over a link.

  Processor --ids--> PrefillQueue.submit: the engine that is free first
       ^                   |
       +-- decodes from <--+ its link, one hand-over after another

Real engines of `role=prefill` do so by `rl/pools/hand_over.py`.
"""

import dataclasses

from rl.settings import checks
from rl.simulation import resources


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPool:
  """Equal engines that encode contexts for those of one decode pool.

  Ids that a decode engine has cached are neither encoded nor sent again, as if
  both sides kept them. Weights change here in no time.

  Attributes:
    engines: count.
    ids_per_s: encoded by each.
    kv_bytes: keys and values of an id.
    link: out of each engine.
    accelerators: of each engine.
    cost: of an hour of one engine, in the unit of `EnginePool.cost`.
  """

  link: resources.Link
  engines: int = 1
  ids_per_s: float = 20_000.0
  kv_bytes: float = 1e5
  accelerators: int = 1
  cost: float = 1.0

  def validate(self, where: str) -> None:
    """Raises ValueError on a pool that cannot encode."""
    checks.at_least(self, 1, "engines", "accelerators", where=where)
    checks.finite_above(self, 0, "ids_per_s", "cost", where=where)
    checks.finite_at_least(self, 0, "kv_bytes", where=where)

  @property
  def id_s(self) -> float:
    """Seconds that an id takes at least, from encoding to decoding."""
    travel_s = self.link.seconds(self.kv_bytes) - self.link.latency_s
    return 1.0 / self.ids_per_s + travel_s


class PrefillQueue:
  """The work of a pool so far; all its decode engines `submit` here.

  Attributes:
    busy_s: of all engines, with what was submitted.
  """

  def __init__(self, pool: PrefillPool):
    self._pool = pool
    self._encoded_s = [0.0] * pool.engines
    self._sent_s = [0.0] * pool.engines
    self.busy_s = 0.0

  def submit(self, now_s: float, ids: int) -> float:
    """Returns the time at which the keys and values of ids have arrived."""
    pool = self._pool
    engine = min(range(pool.engines), key=lambda one: self._encoded_s[one])
    took_s = ids / pool.ids_per_s
    self.busy_s += took_s
    encoded_s = max(now_s, self._encoded_s[engine]) + took_s
    begun_s = max(encoded_s, self._sent_s[engine])
    arrived_s = begun_s + pool.link.seconds(ids * pool.kv_bytes)
    self._encoded_s[engine] = encoded_s
    self._sent_s[engine] = arrived_s
    return arrived_s
