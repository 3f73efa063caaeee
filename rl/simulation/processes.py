"""Processes of a simulated run: the calls to them, and weights on their way.

  learner, of several --fetch--> here --store--> memory --stage--> engines, one
  after another --> each switches

Weights pass through memory that all processes map. A call goes there and comes
back, and takes half of its time on either way.
"""

import asyncio
import contextlib
import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from rl.engine import contract
from rl.settings import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessCosts:
  """Seconds that it costs to have engines, or the learner, in other processes.

  Attributes:
    call_s: of a call, there and back, beside the work that it asks for.
    copy_s: of all weights, to be written to shared memory or read from it.
  """

  call_s: float = 0.0
  copy_s: float = 0.0

  @property
  def stage_s(self) -> float:
    """Seconds in which an engine reads new weights."""
    return self.call_s + self.copy_s

  def fetch_s(self, processes: int) -> float:
    """Returns the seconds of weights from those of a learner to this one."""
    if processes == 1:
      return 0.0
    return self.call_s + self.copy_s / processes + self.copy_s

  def validate(self) -> None:
    """Raises ValueError on times that are negative or not finite."""
    names = ("call_s", "copy_s")
    checks.finite_at_least(self, 0, *names, where="cluster.processes")


class SimulatedGang:
  """The processes of a learner: they run one command after another.

  The trainer and the transfer of weights command it.
  """

  def __init__(self, costs: ProcessCosts, processes: int):
    self._costs = costs
    self._processes = processes
    self._running = asyncio.Lock()

  async def command(self, seconds: float) -> None:
    """Waits for the commands before it, for the call and for its work."""
    async with self._running:
      await asyncio.sleep(self._costs.call_s + seconds)

  async def fetch(self) -> None:
    """Brings new weights here: each process writes its part of them."""
    await self.command(self._costs.copy_s / self._processes)
    await asyncio.sleep(self._costs.copy_s)


def called(
  engine: contract.DecodeEngine, costs: ProcessCosts
) -> contract.DecodeEngine:
  """Returns a simulated engine as it is from another process."""
  return typing.cast(contract.DecodeEngine, CalledEngine(engine, costs))


class CalledEngine:
  """A simulated engine as it is from another process.

  Requests and new weights take half of a call to get there, and answers to get
  back. What else it does, and its counters, are at once.
  """

  def __init__(self, engine: contract.DecodeEngine, costs: ProcessCosts):
    self._engine = engine
    self._costs = costs
    self._way_s = costs.call_s / 2
    # As last known here, of requests that have not been answered.
    self._begun: dict[str, int | None] = {}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Returns an answer when it has come back."""
    name = request.request_id
    self._begun[name] = None
    try:
      await asyncio.sleep(self._way_s)
      answer = await self._engine.generate(request)
      if len(answer.versions):
        self._begun[name] = int(answer.versions[0])
      await asyncio.sleep(self._way_s)
      return answer
    finally:
      del self._begun[name]

  def begun(self, request_id: str) -> int | None:
    """Returns the version of the first token of a request in flight."""
    known = contract.find(self._begun, request_id)
    with contextlib.suppress(ValueError):  # It is on its way.
      return self._engine.begun(request_id)
    return known

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has when the call for that is there."""
    if request_id is not None:
      contract.find(self._begun, request_id)

    def arrive() -> None:
      with contextlib.suppress(ValueError):  # It has just ended.
        self._engine.abort(request_id)

    # Later by as much as a sleeper: behind a request of the same moment.
    loop = asyncio.get_running_loop()
    loop.call_later(self._way_s, loop.call_soon, arrive)

  async def stage(self, params: Any) -> None:
    """Waits while new weights are read, as decoding goes on."""
    del params
    await asyncio.sleep(self._costs.stage_s)

  async def update_weights(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves new weights that it has read."""
    await asyncio.sleep(self._way_s)
    await self._engine.update_weights(version, params, in_flight, on_step)
    await asyncio.sleep(self._way_s)


# A protocol does not see `__getattr__`.
typing.cast(Any, contract.StagingEngine).register(CalledEngine)
