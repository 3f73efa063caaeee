"""Prompts that one engine encodes for another, which then decodes.

  HandOvers.encode --> source.export_prefix: pages of keys and values
        |                  |
        |                  +--> target.import_prefix: into its prefix cache
        +<-- "", or why the target has to encode the prompt itself

No failure here fails a request: the target finds in its prefix cache what has
arrived, and encodes the rest.
"""

import asyncio
import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from rl.engine import contract

_LIMIT_S = 120.0
"""Time after which the target encodes a prompt itself."""


class Missed(NamedTuple):
  """The failure of a hand-over.

  Attributes:
    reason: a word to count it by: "lost" (the source stopped), "late",
      "failed", "evicted" (the source has none of the pages any more), or that
      of `contract.PrefixEngine.import_prefix`.
    text: more about it.
  """

  reason: str
  text: str = ""


@dataclasses.dataclass(eq=False)
class _Underway:
  """A hand-over, and a future of each request that waits for it."""

  work: asyncio.Task[Missed | None]
  waiting: dict[str, asyncio.Future[None]] = dataclasses.field(
    default_factory=dict
  )


class HandOvers:
  """The hand-overs under way; the router asks for them.

  Requests for the same prompt on the same engines, as of a group, share one. It
  is cancelled when none of them waits any more.

  Attributes:
    nbytes: of the keys and values that have arrived.
    seconds: of all that have ended, waits included.
  """

  def __init__(self):
    self._underway: dict[tuple, _Underway] = {}
    self.nbytes = 0
    self.seconds = 0.0

  async def encode(
    self,
    request: contract.DecodeRequest,
    source: contract.PrefixEngine,
    target: contract.PrefixEngine,
    known: int = 0,
  ) -> Missed | None:
    """Returns when the target has the prompt, or none of it will come.

    Args:
      known: ids that the target has seen; of the last it may have no keys and
        values.

    Returns:
      Why it has to encode the prompt; None if it need not, or if the request
      was aborted.
    """
    key = id(source), id(target), request.tokens.tobytes()
    if (shared := self._underway.get(key)) is None:
      hand = self._hand(
        request.tokens, max(known - 1, 0), request.priority, source, target
      )
      shared = _Underway(asyncio.create_task(hand, name="hand over"))
      self._underway[key] = shared
      shared.work.add_done_callback(lambda _: self._forget(key, shared))
    left = asyncio.get_running_loop().create_future()
    shared.waiting[request.request_id] = left
    try:
      await asyncio.wait(
        {shared.work, left}, return_when=asyncio.FIRST_COMPLETED
      )
    finally:
      del shared.waiting[request.request_id]
      if not shared.waiting:
        shared.work.cancel()
        self._forget(key, shared)  # Nobody is to share its end.
    return None if left.done() else shared.work.result()

  def _forget(self, key: tuple, shared: _Underway) -> None:
    if self._underway.get(key) is shared:
      del self._underway[key]

  def abort(self, request_id: str | None) -> None:
    """Ends the wait of a request, if it waits; None ends all."""
    for shared in self._underway.values():
      for name, left in shared.waiting.items():
        if request_id in (None, name) and not left.done():
          left.set_result(None)

  async def _hand(
    self,
    ids: Int32[np.ndarray, " N"],
    start: int,
    priority: tuple[int, ...],
    source: contract.PrefixEngine,
    target: contract.PrefixEngine,
  ) -> Missed | None:
    begun_s = asyncio.get_running_loop().time()
    try:
      async with (
        asyncio.timeout(_LIMIT_S),
        source.export_prefix(ids, start, priority) as prefix,
      ):
        if not prefix.nbytes:
          return Missed("evicted")
        try:
          refusal = await target.import_prefix(prefix)
        except contract.EngineClosed as error:
          # Its own request finds that out.
          return Missed("failed", str(error))
        if refusal:
          return Missed(refusal)
        self.nbytes += prefix.nbytes
        return None
    except contract.EngineClosed as error:
      return Missed("lost", str(error))
    except TimeoutError:
      return Missed("late", f"it took over {_LIMIT_S:g} s")
    except ValueError as error:
      return Missed("failed", str(error))
    finally:
      self.seconds += asyncio.get_running_loop().time() - begun_s

  def describe(self) -> dict[str, float]:
    """Returns metrics."""
    return {
      "hand_over_bytes": float(self.nbytes),
      "hand_over_s": self.seconds,
    }
