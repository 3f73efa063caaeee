"""Several decode pools as one sampler: the shell around `routes`.

                              +-> engine 0, open, 3 sessions
  session --> Router.begin ---+-> engine 1, lost
                 |            +-> engine 2, draining, 1 session
                 +-- waits while no engine may take it

  WeightPublisher --> Door i: drain (sessions end) -> new weights -> open

A session that begins has one engine until it ends. What an engine that stops
has not answered is sent to another.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, NamedTuple

from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.pools import (
  aborts,
  affinity,
  placement,
  pool_stats,
  routing_table,
  wakeup,
)

_ALIKE = affinity.Routing()


class Member(NamedTuple):
  """An engine and the pool that it belongs to; see `placement.DecodePool`."""

  engine: contract.DecodeEngine
  pool: str = "decode"
  kind: placement.Kind = "any"
  cost: float = 1.0


class Router:
  """The part of `contract.DecodeEngine` that those who sample need.

  Whoever plays a conversation calls `begin` and `end` around it. A session
  that never began gets an engine at its first request, and keeps it, but is
  not waited for when weights arrive.

  Args:
    members: engines of the same model, each with its own cache. Nobody else
      need send requests to them; what others send is not counted as load.
    log: told of engines that are lost and come back, and of fallbacks.
    max_sessions: see `routing_table.Routes`.

  Attributes:
    doors: one for each engine, through which it gets its weights.
  """

  def __init__(
    self,
    members: Sequence[Member],
    routing: affinity.Routing = _ALIKE,
    log: event_log.EventLog | None = None,
    max_sessions: int = 65_536,
  ):
    self._engines = [one.engine for one in members]
    pool_stats.capabilities(
      self._engines
    )  # Raises if they are not of one model.
    self.doors = tuple(Door(self, i) for i in range(len(members)))
    seats = [affinity.Seat(*one[1:]) for one in members]
    self._routes = routing_table.Routes(seats, routing, max_sessions)
    self._log = log
    self._reason = ""
    self._version = trajectory.PolicyVersion(0)  # The newest to be served.
    self._aborts = aborts.Aborts()
    self._opened, self._ended = wakeup.Signal(), wakeup.Signal()

  @property
  def engines(self) -> tuple[contract.DecodeEngine, ...]:
    """All of them, lost ones included."""
    return tuple(self._engines)

  @property
  def counts(self) -> routing_table.Counts:
    """What has been decided so far."""
    return self._routes.counts

  @property
  def capabilities(self) -> contract.Capabilities:
    """What every engine can do."""
    return pool_stats.capabilities(self._engines)

  async def begin(self, session: str, domain: str) -> int:
    """Returns the number of a session's engine, once one may take it.

    Cancel it, and the session has not begun.

    Args:
      domain: the name of its task's source.

    Raises:
      EngineClosed: every engine has stopped.
      ValueError: the session has begun and not ended.
    """
    while (choice := self._routes.assign(session, domain)) is None:
      if not self._routes.serving:
        raise contract.EngineClosed(self._reason)
      await self._opened.wait()
    self._tell(session, choice)
    return choice.engine

  def serves(self, number: int) -> int:
    """Returns the version that an engine serves."""
    return int(self._engines[number].stats().version)

  def end(self, session: str) -> None:
    """The conversation is over; one that is already is no matter."""
    self._routes.end(session)
    self._ended.fire()

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine`.

    A request is whole in itself, so another engine begins it anew when its
    own stops.

    Raises:
      EngineClosed: every engine has stopped.
      ValueError: no engine has the weights that its conversation keeps to.
    """
    asked = asyncio.get_running_loop().time()
    with self._aborts.asking(request.request_id):
      while await self._placed(request):
        try:
          with self._sent(request) as number:
            answer = await self._engines[number].generate(request)
            self._measure(request, number, answer)
            return answer
        except contract.EngineClosed:
          if not self._routes.serving:
            raise
    return aborts.unsent(asked)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine`.

    Raises:
      EngineClosed: every engine has stopped, or this one after its first
        delta: another one's tokens need not follow those.
      ValueError: as `generate`.
    """
    begun, asked = False, asyncio.get_running_loop().time()
    with self._aborts.asking(request.request_id):
      while await self._placed(request):
        try:
          with self._sent(request) as number:
            deltas: Any = self._engines[number].stream(request)
            async with contextlib.aclosing(deltas):
              async for delta in deltas:
                begun = True
                if delta.completion is not None:
                  self._measure(request, number, delta.completion)
                yield delta
            return
        except contract.EngineClosed:
          if begun or not self._routes.serving:
            raise
    yield aborts.last(aborts.unsent(asked))

  def _measure(
    self,
    request: contract.DecodeRequest,
    number: int,
    answer: contract.Completion,
  ) -> None:
    took = affinity.sample(request, answer)
    last = max(answer.versions.tolist(), default=-1)
    self._routes.measure(request.session, number, took, last)

  async def _placed(self, request: contract.DecodeRequest) -> bool:
    """Returns when a session has an engine; False: there is nothing to send."""
    while not self._aborts.aborted(request.request_id):
      if not self._routes.homeless(request.session):
        return True
      versions = [one.stats().version for one in self._engines]
      choice = self._routes.move(request.session, versions)
      if choice is not None:
        self._tell(request.session, choice)
      elif not self._routes.serving:
        raise contract.EngineClosed(self._reason)
      else:  # New weights are on their way, here or there.
        await self._opened.wait()
    return False

  @contextlib.contextmanager
  def _sent(self, request: contract.DecodeRequest) -> Generator[int]:
    """Yields the engine to ask, and keeps the books while it answers."""
    choice = self._routes.send(request.request_id, request.session)
    if choice is None:
      raise contract.EngineClosed(self._reason)
    self._tell(request.session, choice)
    try:
      with self._watched(choice.engine):
        yield choice.engine
    finally:
      self._routes.answered(request.request_id)

  @contextlib.contextmanager
  def _watched(self, number: int, quiet: bool = False) -> Generator[None]:
    """Loses the engine when it turns out to have stopped; may say nothing."""
    asked = self._engines[number]
    try:
      yield
    except contract.EngineClosed as error:
      if asked is self._engines[number]:  # Not one that took its place.
        self._lose(number, str(error))
      if not quiet:
        raise

  def _lose(self, number: int, reason: str) -> None:
    if number not in self._routes.serving:
      return
    self._routes.lose(number, self._engines[number].stats().version)
    self._reason = (
      f"all {len(self._engines)} engines have stopped, the last one because "
      f"{reason}"
    )
    self._emit("engine_lost", engine=number, reason=reason)
    self._opened.fire()
    self._ended.fire()

  def recover(self, number: int, engine: contract.DecodeEngine) -> None:
    """Takes an engine into use in the place of one that was lost.

    Args:
      engine: started, with the newest weights that any engine was sent: older
        ones would break the bound on staleness, and no other engine could take
        over from newer ones.

    Raises:
      ValueError: none was lost there, or this one cannot take its place.
    """
    pool_stats.check_newest(engine, number, self._engines, self._version)
    after = [engine if i == number else x for i, x in enumerate(self._engines)]
    pool_stats.capabilities(after)
    self._routes.recover(number)
    self._engines = after
    self._emit("engine_back", engine=number)
    self._opened.fire()

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; None ends all of them.

    Raises:
      ValueError: no such request is in flight.
    """
    self._aborts.abort(request_id)
    self._opened.fire()
    if request_id is None:
      for number in self._routes.serving:
        self._engines[number].abort(None)
      return
    # It may just have ended there, or be on its way to another engine.
    with contextlib.suppress(ValueError):
      self._engines[self._routes.asked(request_id)].abort(request_id)

  def begun(self, request_id: str) -> trajectory.PolicyVersion | None:
    """Returns the version of a request's first token; None: none is sampled.

    Raises:
      ValueError: no such request is in flight.
    """
    return self._engines[self._routes.asked(request_id)].begun(request_id)

  async def flush_cache(self) -> None:
    """Forgets every prefix that no running request uses, on every engine.

    Raises:
      EngineClosed: every engine has stopped.
    """

    async def flush(number: int) -> None:
      # One that has stopped has forgotten everything.
      with self._watched(number, quiet=True):
        await self._engines[number].flush_cache()

    await asyncio.gather(*map(flush, self._routes.serving))
    if not self._routes.serving:
      raise contract.EngineClosed(self._reason)

  def stats(self) -> contract.EngineStats:
    """Returns the counters of all engines; see `pool_stats.stats`."""
    return pool_stats.stats(self._engines, self._routes.serving)

  def describe(self) -> dict[str, float]:
    """Returns metrics; see `routing_table.Routes.describe`."""
    return self._routes.describe()

  async def close(self) -> None:
    """Stops every engine, as `pool_stats.close`; requests raise "
    "EngineClosed."""
    self._log = None  # That they are closed is no loss.
    for number in self._routes.serving:  # So that nothing moves to the next.
      self._lose(number, "the pool was closed")
    await pool_stats.close(self._engines)

  def _tell(self, session: str, choice: affinity.Choice) -> None:
    if choice.wanted:
      self._emit(
        "fallback", session=session, wanted=choice.wanted, engine=choice.engine
      )

  def _emit(self, kind: str, **fields: Any) -> None:
    if self._log is not None:
      self._log.emit(kind, **fields)


class Door:
  """The way of the weights to one engine of a router, version by version."""

  def __init__(self, router: Router, number: int):
    self._router = router
    self._number = number

  @property
  def _engine(self) -> contract.DecodeEngine:
    return self._router.engines[self._number]

  @property
  def lost(self) -> bool:
    """Whether the engine has stopped."""
    return self._number not in self._router._routes.serving

  def stats(self) -> contract.EngineStats:
    """Returns the counters of the engine."""
    return self._engine.stats()

  async def checksum(self) -> tuple[trajectory.PolicyVersion, int]:
    """Returns what the engine serves; see `contract.DecodeEngine`.

    Raises:
      EngineClosed: it has stopped.
    """
    with self._router._watched(self._number):
      return await self._engine.checksum()

  async def update_weights(
    self,
    version: trajectory.PolicyVersion,
    params: Any,
    in_flight: contract.InFlight = "recompute",
  ) -> None:
    """Gives the engine its weights, one version after another.

    With "drain" the sessions that have begun on it end first, and meanwhile
    no other begins there: a conversation has one version. What fails or is
    cancelled opens the engine again, under the version before. An engine that
    is lost, now or meanwhile, takes none; see `Router.recover`.

    Raises:
      EngineClosed: every engine has stopped.
      ValueError: see `contract.DecodeEngine`, or it drains already.
    """
    router, asked = self._router, self._engine
    router._version = max(router._version, version)
    router._routes.one_version = in_flight == "drain"
    async with contextlib.AsyncExitStack() as stack:
      stack.callback(router._opened.fire)
      if in_flight == "drain" and not self.lost:
        await stack.enter_async_context(self._drained(asked))
      if self._serves(asked):
        with router._watched(self._number, quiet=True):
          await asked.update_weights(version, params, in_flight)
    if not router._routes.serving:
      raise contract.EngineClosed(router._reason)

  @contextlib.asynccontextmanager
  async def _drained(
    self, asked: contract.DecodeEngine
  ) -> AsyncGenerator[None]:
    """Holds new sessions off the engine, from when it has none."""
    router, number = self._router, self._number
    router._routes.drain(number)
    try:
      while self._serves(asked) and not router._routes.drained(number):
        await router._ended.wait()
      if self._serves(asked):
        router._routes.update(number)
      yield
    finally:
      router._routes.reopen(number)

  def _serves(self, asked: contract.DecodeEngine) -> bool:
    # What took its place came with the weights that were on their way.
    return asked is self._engine and not self.lost
