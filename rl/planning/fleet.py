"""The devices that a plan may use, by kind, with their speed and cost.

Some devices of one kind make the learner's mesh; others, of any kinds, make
engines of a fixed size.
"""

import dataclasses
import math
from collections.abc import Mapping

from rl.pools import placement
from rl.settings import checks
from rl.simulation import hosts as hosts_lib
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import resources


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
  """A number of equal devices.

  Attributes:
    count: of the devices.
    cost: of one device for a second, in any unit that all kinds share.
    kind: their strength, for routing.
    engine_devices: of one engine.
    speed: of one engine.
    learner_devices: sizes that a learner's mesh may have here; empty if these
      devices only decode.
    token_s: seconds for an id that one device trains, context included.
    scaling: share of its speed that a device keeps when the mesh doubles.
    update_s: seconds of an optimizer step, on a mesh of any size.
    describe_s: seconds of the comparison of log-probabilities after each
      publish, on a mesh of any size.
  """

  name: str
  count: int
  cost: float = 1.0
  kind: placement.Kind = "any"
  engine_devices: int = 1
  speed: simulated_processor.Speed = simulated_processor.Speed()
  learner_devices: tuple[int, ...] = ()
  token_s: float = 1e-4
  scaling: float = 1.0
  update_s: float = 0.0
  describe_s: float = 0.0

  def learner(self, devices: int) -> simulated_learner.LearnerSpeed:
    """Returns the speed of a learner on a number of devices."""
    faster = devices * self.scaling ** math.log2(devices)
    return simulated_learner.LearnerSpeed(
      token_s=self.token_s / faster,
      update_s=self.update_s,
      describe_s=self.describe_s,
      accelerators=devices,
    )

  def engines(self, taken: int = 0) -> int:
    """Returns the number of engines that fit beside `taken` devices."""
    return (self.count - taken) // self.engine_devices

  def validate(self, where: str) -> None:
    """Raises ValueError on impossible counts, costs and speeds."""
    checks.at_least(self, 1, "count", "engine_devices", where=where)
    checks.finite_above(self, 0, "cost", "token_s", where=where)
    checks.finite_at_least(self, 0, "update_s", "describe_s", where=where)
    out = "below it more devices would be slower"
    checks.within(self, 0.5, 1, "scaling", where=where, out=out)
    sizes = self.learner_devices
    if sizes and not 1 <= min(sizes) <= max(sizes) <= self.count:
      text = f"must be 1 to count={self.count} each"
      raise ValueError(f"{where}.learner_devices={sizes} {text}")
    self.speed.validate(f"{where}.speed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
  """All devices, in the order in which jax numbers them, and what is beside.

  Attributes:
    transfer_s: seconds in which new weights travel while decoding goes on.
    weights: their way, in the place of `transfer_s`; None: they take so long.
    rewards: seats at which they are computed; None: each only takes its time.
    hosts: of environments; None: there is room for all. Costs of seats and
      hosts are of a second here, in the unit of `DeviceKind.cost`.
    handover: link out of an engine that only encodes; None: there are none.
    kv_bytes: keys and values of an id, for that link.
  """

  kinds: tuple[DeviceKind, ...]
  transfer_s: float = 1.0
  weights: resources.WeightPath | None = None
  rewards: resources.Seats | None = None
  hosts: hosts_lib.Hosts | None = None
  handover: resources.Link | None = None
  kv_bytes: float = 1e5

  @property
  def by_name(self) -> Mapping[str, DeviceKind]:
    """The kinds by their names."""
    return {kind.name: kind for kind in self.kinds}

  def first_device(self, name: str) -> int:
    """Returns the index of the first device of a kind."""
    names = [kind.name for kind in self.kinds]
    return sum(kind.count for kind in self.kinds[: names.index(name)])

  def validate(self) -> None:
    """Raises ValueError on a fleet that cannot both train and decode."""
    checks.unique("fleet.kinds", [kind.name for kind in self.kinds])
    for number, kind in enumerate(self.kinds):
      kind.validate(f"fleet.kinds.{number}")
    checks.finite_at_least(self, 0, "transfer_s", "kv_bytes", where="fleet")
    sizes = [(k, n) for k in self.kinds for n in k.learner_devices]
    if not sizes:
      raise ValueError(
        "fleet.kinds: none has learner_devices, so nothing trains; give the "
        "sizes that a learner's mesh may have, such as learner_devices=(1,)"
      )
    if not any(self._engines(kind, size) for kind, size in sizes):
      kind, size = min(sizes, key=lambda pair: pair[1])
      raise ValueError(
        f"fleet.kinds: {size} devices of {kind.name} train, and what is left "
        f"has no engine of engine_devices={kind.engine_devices}: nothing "
        "decodes; raise count, or lower learner_devices or engine_devices"
      )

  def _engines(self, learner: DeviceKind, size: int) -> int:
    """Returns the number of engines that fit beside a learner."""
    taken = {learner.name: size}
    return sum(kind.engines(taken.get(kind.name, 0)) for kind in self.kinds)
