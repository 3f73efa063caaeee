"""Weight synchronisation: learner's mesh -> every engine, version by version.

  publish: Transfer.stage: a copy beside what each engine serves
             (training and decoding go on)
           _switch: Router.update_weights, all engines side by side
             (decoding stands still, between two device steps)
           _check: compare checksums

The log tells each step: publish_start, then of each engine staged,
decode_suspended, switched and decode_resumed, then published. Requests in
flight are the engine's business; the caller releases the gate once `publish`
has returned.

A lost engine takes no part. One that comes back has the newest weights: those
of the version before until all copies are staged, and then takes part in the
switch; those of the new version from then on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rl.audit import event_log
from rl.engine import contract
from rl.pools import router as router_lib
from rl.pools import weight_transfer
from rl.runtime import trace


class Transfer(Protocol):
  """A way from the learner to the engines: `weight_transfer.MeshTransfer`."""

  async def stage(
    self, params: Any, engines: Sequence[int]
  ) -> Sequence[weight_transfer.StagedCopy]:
    """Returns a copy of `params` for each of these engines."""
    ...

  def checksum(self, params: Any) -> int | None:
    """Returns the checksum of `params` as staged; None: nobody compares it."""
    ...


class WeightPublisher:
  """Ships parameters to every engine, and has them switch.

  `assemble.Parts.start` calls `begin` once and `place_newest` for each engine,
  the coordinator `publish`, one version after another, and `recovery.Restarts`
  `place_newest` for an engine that was lost.

  Attributes:
    version: of the newest weights.
  """

  def __init__(
    self,
    router: router_lib.Router,
    transfer: Transfer,
    log: event_log.EventLog,
    spans: trace.Trace,
  ):
    self._router = router
    self._transfer = transfer
    self._log = log
    self._spans = spans
    # One after another: of each leaf the last checksum is kept.
    self._staging = asyncio.Lock()
    self.version = -1
    self._params: Any = None

  def begin(self, version: int, params: Any) -> None:
    """Names the newest weights, with which engines start."""
    self.version, self._params = version, params

  async def place(self, params: Any, number: int = 0) -> tuple[Any, int]:
    """Returns a copy of `params` for an engine, and the bytes moved."""
    (staged,) = await self._transfer.stage(params, [number])
    return staged.params, staged.moved_bytes

  async def place_newest(self, number: int) -> tuple[int, Any]:
    """Returns the newest version, and a copy of its weights for an engine."""
    async with self._staging:
      version = self.version
      return version, (await self.place(self._params, number))[0]

  async def publish(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight,
  ) -> float:
    """Returns the seconds of stall, once every engine serves `version`.

    That is the longest time for which decoding stood still in any engine. If a
    copy fails, every engine stays at the version before, and one may publish
    again. If an engine fails to take its copy, its exception propagates, with
    a note of the engines that serve the new version: a run never goes on with
    two versions.

    Raises:
      EngineClosed: every engine has stopped, and none will come back.
      RuntimeError: with `Publishing.verify`, an engine serves other weights.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    self._log.emit("publish_start", version=version)
    async with self._staging:
      staged = await self._stage(version, params)
      total = self._transfer.checksum(params) if staged else None
      # From here on no engine comes back with the version before.
      self.begin(version, params)
    before_s = [(x, x.stats().paused_s) for x in self._router.engines]
    copies = {number: copy.params for number, copy in staged.items()}
    await self._switch(version, copies, in_flight)
    self._router.check_open()
    if total is not None:
      await self._check(version, total)
    self._log.emit("published", version=version)
    moved = sum(copy.moved_bytes for copy in staged.values())
    args = {"version": version, "moved_bytes": moved}
    self._spans.add("host", "publish", start, loop.time(), **args)
    return max(engine.stats().paused_s - s for engine, s in before_s)

  async def _stage(
    self, version: int, params: Any
  ) -> dict[int, weight_transfer.StagedCopy]:
    """Returns a copy for every engine that is not lost, by its number."""
    staged: dict[int, weight_transfer.StagedCopy] = {}
    # Some may come back meanwhile, with the version before.
    while numbers := [i for i in self._router.serving if i not in staged]:
      copies = await self._transfer.stage(params, numbers)
      for number, copy in zip(numbers, copies, strict=True):
        await self._router.stage(number, copy.params)
        if self._router.lost(number):
          continue
        staged[number] = copy
        self._log.emit(
          "staged",
          version=version,
          engine=number,
          moved_bytes=copy.moved_bytes,
          buckets=copy.buckets,
        )
    return staged

  async def _switch(
    self,
    version: int,
    copies: Mapping[int, Any],
    in_flight: contract.InFlight,
  ) -> None:
    """Switches all engines at once; the first fault cancels the rest."""
    updated: list[int] = []
    fault = None

    async def update(number: int) -> None:
      def on_step(step: contract.SwitchStep) -> None:
        self._log.emit(step, version=version, engine=number)

      copy = copies[number]
      await self._router.update_weights(
        number, version, copy, in_flight, on_step
      )
      updated.append(number)

    try:
      async with asyncio.TaskGroup() as tasks:
        for number in copies:
          tasks.create_task(update(number))
    except ExceptionGroup as group:
      fault, *also = group.exceptions
      others = sorted(copies.keys() - set(updated))
      fault.add_note(
        f"publishing version {version}: engines {sorted(updated)} serve it, "
        f"{others} do not" + "".join(f"; also {other!r}" for other in also)
      )
    if fault is not None:
      raise fault

  async def _check(self, version: int, total: int) -> None:
    """Raises RuntimeError unless every engine has the right checksum."""
    sent, serving = (version, total), self._router.serving
    answers = await asyncio.gather(
      *map(self._router.checksum, serving), return_exceptions=True
    )
    for number, answer in zip(serving, answers, strict=True):
      if isinstance(answer, contract.EngineClosed):
        continue  # A stopped engine serves nothing.
      if isinstance(answer, BaseException):
        raise answer
      serves, found = answer
      if (int(serves), found) != sent:
        raise RuntimeError(
          f"engine {number} serves version {int(serves)} with the checksum "
          f"{found:016x} of its weights; version {version} was sent with "
          f"{total:016x}: start it again"
        )
