"""Several engines of one pool as one sampler.

                              +-> replica 0, open, 3 requests
  request --> Homes.begin ----+-> replica 1, closed
              (its session)   +-> replica 2, open, 1 request

A session stays where its keys and values are; a new one goes where the least
is to do. What a replica that stops has not answered is sent to another.
"""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, cast

from rl import engine as engine_lib


class Homes:
  """Which replica serves which session. Pure: no clock, no task, no engine.

  `Replicas` calls `begin` for every request, `end` once it is answered or has
  failed, and `lose` when a replica has stopped.

  Args:
    max_sessions: remembered at most; the one not seen for longest is forgotten
      first and then treated as new.
  """

  def __init__(self, num_replicas: int, max_sessions: int):
    self._load = [0] * num_replicas
    self._open = dict.fromkeys(range(num_replicas))  # A set with an order.
    self._max_sessions = max_sessions
    self._home: collections.OrderedDict[str, int] = collections.OrderedDict()

  @property
  def open(self) -> Sequence[int]:
    """Replicas that have not been lost, in order."""
    return list(self._open)

  @property
  def num_sessions(self) -> int:
    """Sessions that are remembered."""
    return len(self._home)

  def begin(self, session: str) -> int | None:
    """Returns the replica of a session, which has one request more; or None.

    None: all are lost.
    """
    home = self._home.pop(session, None)
    if home not in self._open:
      # Requests that were sent and not answered: those that run and those that
      # wait. The first of equals.
      home = min(self._open, key=self._load.__getitem__, default=None)
    if home is None:
      return None
    self._home[session] = home
    if len(self._home) > self._max_sessions:
      self._home.popitem(last=False)
    self._load[home] += 1
    return home

  def end(self, replica: int) -> None:
    """Takes one request from a replica."""
    self._load[replica] -= 1

  def lose(self, replica: int) -> None:
    """Sends nothing to a replica any more; its sessions move as they come."""
    self._open.pop(replica, None)


class Replicas:
  """The part of `engine.DecodeEngine` that those who sample need.

  Weights are not its business: the publisher updates each of `engines`.

  Args:
    engines: of the same model, each with its own cache. Nobody else need send
      requests to them; what others send is not counted as load.
    max_sessions: see `Homes`.
  """

  def __init__(
    self,
    engines: Sequence[engine_lib.DecodeEngine],
    max_sessions: int = 65_536,
  ):
    if not engines:
      raise ValueError("a pool of 0 engines serves nothing; use one or more")
    vocabularies = {one.capabilities.vocab_size for one in engines}
    if len(vocabularies) > 1:
      raise ValueError(
        f"engines of vocabularies {sorted(vocabularies)} in one pool; all must "
        "serve one model"
      )
    self.engines = tuple(engines)
    self._homes = Homes(len(engines), max_sessions)
    self._requests: dict[str, int] = {}
    self._reason = ""

  @property
  def capabilities(self) -> engine_lib.Capabilities:
    """What every engine can do."""
    able = [one.capabilities for one in self.engines]
    return engine_lib.Capabilities(
      in_flight=frozenset.intersection(*(one.in_flight for one in able)),
      max_length=min(one.max_length for one in able),
      vocab_size=able[0].vocab_size,
      max_stop_ids=min(one.max_stop_ids for one in able),
      seeds=all(one.seeds for one in able),
      bias=all(one.bias for one in able),
      experts=all(one.experts for one in able),
    )

  async def generate(
    self, request: engine_lib.DecodeRequest
  ) -> engine_lib.Completion:
    """Samples one answer; see `engine.DecodeEngine`.

    A request is whole in itself, so another replica begins it anew when its
    own stops.

    Raises:
      EngineClosed: every replica has stopped.
    """
    while True:
      try:
        with self._sent(request) as chosen:
          return await chosen.generate(request)
      except engine_lib.EngineClosed:
        if not self._homes.open:
          raise

  async def stream(
    self, request: engine_lib.DecodeRequest
  ) -> AsyncGenerator[engine_lib.Delta]:
    """Yields an answer as it is sampled; see `engine.DecodeEngine`.

    Raises:
      EngineClosed: every replica has stopped, or this one after its first
        delta: another one's tokens need not follow those.
    """
    begun = False
    while True:
      try:
        with self._sent(request) as chosen:
          deltas = cast(
            AsyncGenerator[engine_lib.Delta], chosen.stream(request)
          )
          async with contextlib.aclosing(deltas):
            async for delta in deltas:
              begun = True
              yield delta
          return
      except engine_lib.EngineClosed:
        if begun or not self._homes.open:
          raise

  @contextlib.contextmanager
  def _sent(
    self, request: engine_lib.DecodeRequest
  ) -> Generator[engine_lib.DecodeEngine]:
    """Yields the engine to ask, and keeps the books while it answers."""
    name = request.request_id
    if name in self._requests:
      raise ValueError(f"request {name} is already in flight")
    home = self._homes.begin(request.session)
    if home is None:
      raise engine_lib.EngineClosed(self._reason)
    self._requests[name] = home
    try:
      with self._watched(home):
        yield self.engines[home]
    finally:
      del self._requests[name]
      self._homes.end(home)

  @contextlib.contextmanager
  def _watched(self, replica: int) -> Generator[None]:
    """Loses the replica when it turns out to have stopped."""
    try:
      yield
    except engine_lib.EngineClosed as error:
      self._lose(replica, str(error))
      raise

  def _lose(self, replica: int, reason: str) -> None:
    if replica in self._homes.open:
      self._homes.lose(replica)
      self._reason = (
        f"all {len(self.engines)} replicas have stopped, the last one because "
        f"{reason}"
      )

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; None ends all of them.

    Raises:
      ValueError: no such request is in flight.
    """
    if request_id is None:
      for replica in self._homes.open:
        self.engines[replica].abort(None)
    elif request_id not in self._requests:
      raise ValueError(f"request {request_id} is not in flight")
    else:
      self.engines[self._requests[request_id]].abort(request_id)

  async def flush_cache(self) -> None:
    """Forgets every prefix that no running request uses, on every replica.

    Raises:
      EngineClosed: every replica has stopped.
    """

    async def flush(replica: int) -> None:
      # One that has stopped has forgotten everything.
      with (
        contextlib.suppress(engine_lib.EngineClosed),
        self._watched(replica),
      ):
        await self.engines[replica].flush_cache()

    await asyncio.gather(*map(flush, self._homes.open))
    if not self._homes.open:
      raise engine_lib.EngineClosed(self._reason)

  def stats(self) -> engine_lib.EngineStats:
    """Returns sums of the counters of all replicas.

    `version` is the lowest that an open one serves, and `paused_s` that of the
    one that stood still longest.
    """
    each = [one.stats() for one in self.engines]
    serving = [each[i].version for i in self._homes.open]

    names = [field.name for field in dataclasses.fields(engine_lib.EngineStats)]
    sums: dict[str, Any] = {
      name: sum(getattr(one, name) for one in each) for name in names
    }
    sums["version"] = min(serving or [one.version for one in each])
    sums["paused_s"] = max(one.paused_s for one in each)
    return engine_lib.EngineStats(**sums)

  async def close(self) -> None:
    """Stops every replica; requests in flight raise EngineClosed.

    Raises the first exception of those that did not close, after all others.
    """
    for replica in self._homes.open:  # So that nothing moves to the next one.
      self._lose(replica, "the pool was closed")
    ends = [one.close() for one in self.engines]
    for end in await asyncio.gather(*ends, return_exceptions=True):
      if isinstance(end, BaseException):
        raise end
