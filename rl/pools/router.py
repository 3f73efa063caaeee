"""Several decode pools as one sampler: the shell around `routing_table`.

                              +-> engine 0, open, 3 sessions
  session --> Router.begin ---+-> engine 1, lost
                 |            +-> engine 2, draining, 1 session
                 +-- waits for `_opened`

  WeightPublisher --> Router.update_weights(i)
    -> _drained: waits for `_ended` until sessions end -> new weights -> reopen

A session keeps its engine until it ends. Requests that an engine left
unanswered when it stopped go to another, or wait for one that will come back:

  _lose -> on_lost: awaited --recover--> open
                       +-----give_up--> lost for good
  expect -> joining --recover--> open -> leave: until nothing is asked of it
                 +-remove-> gone                  -> remove -> gone
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rl.audit import event_log
from rl.engine import contract
from rl.pools import affinity, placement, pool_stats, routing_table

_ALIKE = affinity.Routing()
# A lost engine is not an error where nothing is asked of it.
_UNLESS_LOST = contextlib.suppress(contract.EngineClosed)


class Router:
  """Engines of one model behind one `contract.SessionRouter`.

  Bracket a session with `begin` and `end`. A session that never began
  gets an engine at its first request and keeps it, but no update waits for it.

  Args:
    engines: each with its own cache. Requests that reach them some other way
      are not counted as load.
    infos: pool and kind of each engine; None: they are all alike.
    log: gets preferences and fallbacks, engines lost and recovered.

  Attributes:
    on_lost: given the number of an engine that was lost, and why; it calls
      `recover` or `give_up` then or later. None gives every one up.
    on_serving: given the number of an engine that came back or joined.
  """

  def __init__(
    self,
    engines: Sequence[contract.DecodeEngine],
    *,
    infos: Sequence[placement.EngineInfo] | None = None,
    routing: affinity.Routing = _ALIKE,
    log: event_log.EventLog | None = None,
  ):
    # Raises if they are not of one model.
    pool_stats.capabilities(engines)
    if infos is None:
      infos = [placement.EngineInfo()] * len(engines)
    self._engines = list(engines)
    self._table = routing_table.RoutingTable(infos, routing)
    self._log = log
    self._reason = ""
    self.on_lost: Callable[[int, str], None] | None = None
    self.on_serving: Callable[[int], None] = lambda number: None
    self._awaited: set[int] = set()  # Lost engines that may come back.
    self._version = 0  # The newest to be served.
    # Requests in flight, and whether they were aborted: one that moves between
    # two engines is known to neither of them.
    self._aborted: dict[str, bool] = {}
    self._opened, self._ended = Signal(), Signal()
    self._wanted = dict(routing.prefer)
    if routing.default is not None:
      self._wanted[""] = routing.default
    self._hand_overs = None
    if self._table.splits_phases:
      # Not on top: most runs have no use for it.
      from rl.pools import hand_over

      self._hand_overs = hand_over.HandOvers()
    self._log_preferences()

  @property
  def engines(self) -> tuple[contract.DecodeEngine, ...]:
    """All engines, those that are lost or have left included."""
    return tuple(self._engines)

  @property
  def serving(self) -> Sequence[int]:
    """Numbers of the engines that are not lost."""
    return self._table.serving

  def roll(self) -> list[str]:
    """Returns a line for each engine that has not left."""
    lines = []
    for number, line in self._table.roll().items():
      version = self._engines[number].stats().version
      # An engine counts from -1, before its first weights.
      lines.append(f"{line}, version {version if version >= 0 else 'none'}")
    return lines

  def check_open(self) -> None:
    """Raises EngineClosed if all engines have stopped, and stay so."""
    if self._table.all_lost and not any(
      self._table.infos[i].role == "decode" for i in self._awaited
    ):
      raise contract.EngineClosed(self._reason)

  async def _changed(self) -> None:
    """Waits until an engine may take sessions, if any ever will."""
    self.check_open()
    await self._opened.wait()

  @property
  def counts(self) -> routing_table.Counts:
    """Counts of the decisions so far."""
    return self._table.counts

  @property
  def capabilities(self) -> contract.Capabilities:
    """Abilities that all engines share."""
    return pool_stats.capabilities(self._engines)

  # Sessions.

  async def begin(
    self, session: str, domain: str, engine: int = -1, group: str = ""
  ) -> int:
    """Returns the number of a session's engine; see `contract.SessionRouter`.

    If this is cancelled, the session has not begun.
    """
    assign = functools.partial(
      self._table.assign, session, domain, engine, group
    )
    while (assignment := assign()) is None:
      await self._changed()
    self._log_fallback(session, assignment)
    return assignment.engine

  def serves(self, number: int) -> int:
    """Returns the version that an engine serves."""
    return int(self._engines[number].stats().version)

  def end(self, session: str) -> None:
    """Ends a session, also one that has ended."""
    self._table.end(session)
    self._ended.fire()

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.DecodeEngine`.

    A request is self-contained: when its engine stops, another starts it again.

    Raises:
      EngineClosed: every engine has stopped, and none will come back.
      ValueError: no engine has the weights of its session.
    """
    asked_s = asyncio.get_running_loop().time()
    with self._asking(request.request_id):
      while await self._placed(request):
        try:
          async with self._sent(request) as number:
            if self._aborted[request.request_id]:
              break
            answer = await self._engines[number].generate(request)
            self._measure(request, number, answer)
            return answer
        except contract.EngineClosed:
          self.check_open()
    return unsent(asked_s)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.DecodeEngine`.

    Raises:
      EngineClosed: every engine has stopped for good, or this one after its
        first delta: the tokens of another need not continue those.
      ValueError: as `generate`.
    """
    begun, asked_s = False, asyncio.get_running_loop().time()
    with self._asking(request.request_id):
      while await self._placed(request):
        try:
          async with self._sent(request) as number:
            if self._aborted[request.request_id]:
              break
            deltas = self._engines[number].stream(request)
            async with contextlib.aclosing(deltas):
              async for delta in deltas:
                begun = True
                if delta.completion is not None:
                  self._measure(request, number, delta.completion)
                yield delta
            return
        except contract.EngineClosed:
          if begun:
            raise
          self.check_open()
    yield contract.whole_delta(unsent(asked_s))

  @contextlib.contextmanager
  def _asking(self, name: str) -> Iterator[None]:
    """Knows a request as in flight in the body of a `with`."""
    if name in self._aborted:
      raise ValueError(f"request {name} is already in flight")
    self._aborted[name] = False
    try:
      yield
    finally:
      del self._aborted[name]

  def _answered(self, request: contract.DecodeRequest) -> None:
    self._table.answered(request.request_id)
    if self._table.any_leaving:
      self._ended.fire()

  def _measure(
    self,
    request: contract.DecodeRequest,
    number: int,
    answer: contract.Completion,
  ) -> None:
    sample = affinity.sample(request, answer)
    # Versions never decrease.
    version = int(answer.versions[-1]) if len(answer.versions) else -1
    known = len(request.tokens) + len(answer.tokens)
    self._table.measure(request.session, number, sample, version, known)

  async def _placed(self, request: contract.DecodeRequest) -> bool:
    """Waits until a session has an engine; False: the request was aborted."""
    while not self._aborted[request.request_id]:
      if self._table.all_lost:
        await self._changed()
        continue
      if not self._table.must_move(request.session):
        return True
      versions = [engine.stats().version for engine in self._engines]
      assignment = self._table.move(request.session, versions)
      if assignment is not None:
        self._log_fallback(request.session, assignment)
        self._emit("moved", session=request.session, engine=assignment.engine)
      else:  # New weights are on their way, here or there.
        await self._opened.wait()
    return False

  @contextlib.asynccontextmanager
  async def _sent(self, request: contract.DecodeRequest) -> AsyncGenerator[int]:
    """Yields the engine to ask; meanwhile the request counts as its load.

    If another engine is to encode the request, that has been tried by then.
    """
    versions = ()
    if self._table.splits_phases:
      versions = [engine.stats().version for engine in self._engines]
    name, session = request.request_id, request.session
    count = len(request.tokens)
    sent = self._table.send(name, session, count, versions)
    if sent is None:
      raise contract.EngineClosed(self._reason)
    try:
      self._log_fallback(session, sent)
      if sent.prefill >= 0:
        await self._encode(request, sent)
      with self._watched(sent.engine):
        yield sent.engine
    finally:
      self._answered(request)

  async def _encode(
    self, request: contract.DecodeRequest, sent: routing_table.Sent
  ) -> None:
    """Has a request encoded by another engine, for the one that decodes it."""
    name, number = request.request_id, sent.prefill
    source, target = self._engines[number], self._engines[sent.engine]
    assert self._hand_overs is not None
    assert isinstance(source, contract.PrefixEngine)
    assert isinstance(target, contract.PrefixEngine)
    missed = await self._hand_overs.encode(request, source, target, sent.known)
    self._table.encoded(name, missed.reason if missed else "")
    if self._table.any_leaving:
      self._ended.fire()
    if missed is not None:
      if missed.reason == "lost":
        self._lose(number, source, missed.text)
      self._emit(
        "prefill_missed",
        session=request.session,
        engine=number,
        reason=f"{missed.reason}: {missed.text}".removesuffix(": "),
      )
    if not self._is_still(sent.engine, target):  # Its session is to move.
      raise contract.EngineClosed(f"engine {sent.engine} was lost meanwhile")

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; None ends all of them.

    Raises:
      ValueError: no such request is in flight.
    """
    if request_id is None:
      self._aborted = dict.fromkeys(self._aborted, True)
      for number in self._table.serving:
        self._engines[number].abort(None)
    else:
      contract.find(self._aborted, request_id)
      self._aborted[request_id] = True
      # It may just have ended there, or be on its way to another engine.
      with contextlib.suppress(ValueError):
        self._engines[self._table.engine_of(request_id)].abort(request_id)
    if self._hand_overs is not None:
      self._hand_overs.abort(request_id)
    self._opened.fire()

  def begun(self, request_id: str) -> int | None:
    """Returns the version of a request's first token, if it has one.

    Raises:
      ValueError: no such request is in flight.
    """
    engine = self._engines[self._table.engine_of(request_id)]
    if self._table.is_encoding(request_id):
      return None
    return engine.begun(request_id)

  # Weights.

  async def update_weights(
    self,
    number: int,
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Gives one engine its weights, one version after another.

    With "drain" its sessions end first, and no other begins there meanwhile: a
    session has one version. A failure or a cancellation reopens the
    engine, still at the version before. A lost engine, lost now or meanwhile,
    takes none; see `recover`.

    Raises:
      EngineClosed: every engine has stopped, and none will come back.
      ValueError: see `contract.DecodeEngine`, or it drains already.
    """
    self._version = max(self._version, version)
    self._table.one_version = in_flight == "drain"
    engine = self._engines[number]

    def told(step: contract.SwitchStep) -> None:
      if self._is_still(number, engine):
        on_step(step)

    async with contextlib.AsyncExitStack() as stack:
      stack.callback(self._opened.fire)
      if in_flight == "drain" and not self.lost(number):
        await stack.enter_async_context(self._drained(number))
      if self._is_still(number, engine):
        with _UNLESS_LOST, self._watched(number):
          await engine.update_weights(version, params, in_flight, told)
    self.check_open()

  async def stage(self, number: int, params: Any) -> None:
    """Brings weights to an engine, before `update_weights` is given the same.

    In an engine of this process they are there already; a lost one takes none.
    """
    engine = self._engines[number]
    if isinstance(engine, contract.StagingEngine) and not self.lost(number):
      with _UNLESS_LOST, self._watched(number):
        await engine.stage(params)

  @contextlib.asynccontextmanager
  async def _drained(self, number: int) -> AsyncGenerator[None]:
    """Keeps new sessions off an engine; the body runs once it has none."""
    engine, table = self._engines[number], self._table
    table.drain(number)
    try:
      while self._is_still(number, engine) and not table.drained(number):
        await self._ended.wait()
      if self._is_still(number, engine):
        table.update(number)
      yield
    finally:
      table.reopen(number)

  def _is_still(self, number: int, engine: contract.DecodeEngine) -> bool:
    # A replacement came with the weights that were on their way.
    return engine is self._engines[number] and not self.lost(number)

  async def checksum(self, number: int) -> tuple[int, int]:
    """Returns what one engine serves; see `contract.DecodeEngine`.

    Raises:
      EngineClosed: it has stopped.
    """
    with self._watched(number):
      return await self._engines[number].checksum()

  async def flush_cache(self) -> None:
    """Forgets every prefix that no running request uses, on every engine.

    Raises:
      EngineClosed: every engine has stopped, and none will come back.
    """

    async def flush(number: int) -> None:
      # A stopped engine has forgotten everything.
      with _UNLESS_LOST, self._watched(number):
        await self._engines[number].flush_cache()

    await asyncio.gather(*map(flush, self._table.serving))
    self.check_open()

  # Engines that stop and come back.

  @contextlib.contextmanager
  def _watched(self, number: int) -> Iterator[None]:
    """Marks the engine lost if the body of a `with` finds it stopped."""
    engine = self._engines[number]
    try:
      yield
    except contract.EngineClosed as error:
      self._lose(number, engine, str(error))
      raise

  def _lose(
    self, number: int, engine: contract.DecodeEngine, reason: str
  ) -> None:
    if not self._is_still(number, engine):
      return
    self._table.lose(number, engine.stats().version)
    self._emit("engine_lost", engine=number, reason=reason)
    self._awaited.add(number)
    if self.on_lost is None:
      self.give_up(number, reason)
    else:
      self.on_lost(number, reason)
    self._opened.fire()
    self._ended.fire()

  def lost(self, number: int) -> bool:
    """Returns True if an engine is known to have stopped."""
    return number not in self._table.serving

  def expect(
    self,
    build: Callable[[int], contract.StartableEngine],
    info: placement.EngineInfo,
  ) -> int:
    """Makes a place for one more engine, which `recover` then puts there.

    Args:
      build: makes it, not started, by its number, which is returned.

    Raises:
      ValueError: it serves another model.
    """
    engine = build(len(self._engines))
    pool_stats.capabilities([*self._engines, engine])
    self._engines.append(engine)
    return self._table.expect(info)

  def recover(self, number: int, engine: contract.DecodeEngine) -> None:
    """Puts an engine into the place of a lost one, or of one that joins.

    Args:
      engine: started, with the newest weights that any engine was sent: older
        ones would break the bound on staleness, and no other engine could take
        over from newer ones.

    Raises:
      ValueError: none is missing there, or this one cannot take its place.
    """
    versions = [one.stats().version for one in self._engines]
    newest = max(self._version, *versions)
    if (version := engine.stats().version) < newest:
      raise ValueError(
        f"engine {number} would begin with version {version}, but version "
        f"{newest} is the newest; give it those weights first"
      )
    after = [engine if i == number else x for i, x in enumerate(self._engines)]
    pool_stats.capabilities(after)
    joins = self._table.recover(number)
    self._engines, self._version = after, version
    self._awaited.discard(number)
    kind = "engine_joined" if joins else "engine_back"
    self._emit(kind, engine=number, version=version)
    if joins:
      self._log_pool(number)
    self._opened.fire()
    self._ended.fire()
    self.on_serving(number)

  def give_up(self, number: int, reason: str) -> None:
    """Leaves a lost engine lost; requests fail if nothing else will serve."""
    self._awaited.discard(number)
    self._reason = (
      f"all {len(self._engines)} engines have stopped, engine {number} because "
      f"{reason}"
    )
    self._opened.fire()

  async def leave(self, number: int) -> bool:
    """Takes an engine out of use, once nothing is asked of it any more.

    It gets no new session, and its own end, or move between two requests where
    engines do not drain. While no other engine serves, it stays in use.

    Returns:
      False if it was lost meanwhile.
    """
    engine = self._engines[number]
    if self.lost(number):
      return False
    self._table.leave(number)
    self._emit("engine_leaving", engine=number)
    while self._is_still(number, engine):
      if self._table.may_remove(number):
        self.remove(number)
        return True
      await self._ended.wait()
    return False

  def remove(self, number: int) -> None:
    """Forgets an engine that will not serve any more; the caller closes it."""
    was_there = not self._table.is_joining(number)
    self._table.remove(number, self._engines[number].stats().version)
    self._awaited.discard(number)
    if was_there:
      self._emit("engine_left", engine=number)
    self._opened.fire()
    self._ended.fire()

  async def close(self) -> None:
    """Stops every engine, as `pool_stats.close`; requests fail."""
    self._log = None  # Closed engines are not lost ones.
    self.on_lost = None
    for number in self._table.serving:  # So that nothing moves to the next.
      self._lose(number, self._engines[number], "the pool was closed")
    for number in tuple(self._awaited):
      self.give_up(number, "the pool was closed")
    await pool_stats.close(self._engines)

  # Counters.

  def stats(self) -> contract.EngineStats:
    """Returns the counters of all engines; see `pool_stats.stats`."""
    return pool_stats.stats(self._engines, self._table.serving)

  def describe(self) -> dict[str, float]:
    """Returns metrics; see `routing_table.RoutingTable.describe`."""
    if self._hand_overs is None:
      return self._table.describe()
    return self._table.describe() | self._hand_overs.describe()

  def _log_fallback(
    self, session: str, assignment: affinity.Assignment | routing_table.Sent
  ) -> None:
    if assignment.missed:
      self._emit(
        "fallback",
        session=session,
        wanted=assignment.missed,
        engine=assignment.engine,
      )

  def _log_preferences(self) -> None:
    """Logs what a reader needs to tell a fallback from a choice."""
    for number in range(len(self._engines)):
      self._log_pool(number)
    for source, name in self._wanted.items():
      self._emit("preference", source=source, wanted=name)

  def _log_pool(self, number: int) -> None:
    if self._wanted:
      info = self._table.infos[number]
      names = {"pool": info.pool, "hardware": info.kind}
      self._emit("engine_pool", engine=number, **names)

  def _emit(self, kind: str, **fields: Any) -> None:
    if self._log is not None:
      self._log.emit(kind, **fields)


class Signal(asyncio.Event):
  """Wakes all current waiters; each then checks its own condition."""

  def fire(self) -> None:
    """Wakes those who wait now, and none who come later."""
    self.set()
    self.clear()


def unsent(asked_s: float) -> contract.Completion:
  """Returns the answer to a request that was aborted before it was sent.

  Args:
    asked_s: when it was asked, on the clock of the loop.
  """
  return contract.Completion(
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    stop="abort",
    cached_tokens=0,
    decode_s=asyncio.get_running_loop().time() - asked_s,
  )
