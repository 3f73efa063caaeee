"""Which requests of a router are to end, wherever they are just now.

A request is between two engines when its own has stopped. Nobody there hears
of an abort, so it is remembered until the request has its answer.
"""

import asyncio
import contextlib
from collections.abc import Generator

import numpy as np

from rl.engine import contract


class Aborts:
  """Remembers what was aborted; `Router` asks before it sends a request on."""

  def __init__(self):
    self._aborted: dict[str, bool] = {}

  @contextlib.contextmanager
  def asking(self, request_id: str) -> Generator[None]:
    """Knows a request in the body of a `with`.

    Raises:
      ValueError: a request of this name is in flight.
    """
    if request_id in self._aborted:
      raise ValueError(f"request {request_id} is already in flight")
    self._aborted[request_id] = False
    try:
      yield
    finally:
      del self._aborted[request_id]

  def abort(self, request_id: str | None) -> None:
    """Notes that a request is to end; None: all that are known.

    Raises:
      ValueError: no such request is in flight.
    """
    if request_id is not None and request_id not in self._aborted:
      raise ValueError(f"request {request_id} is not in flight")
    names = list(self._aborted) if request_id is None else [request_id]
    self._aborted.update(dict.fromkeys(names, True))

  def aborted(self, request_id: str) -> bool:
    """Whether a request that is known is to end."""
    return self._aborted[request_id]


def unsent(since_s: float) -> contract.Completion:
  """Returns the answer to a request that was aborted before it was sent.

  Args:
    since_s: when it was asked, on the clock of the loop.
  """
  return contract.Completion(
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    stop="abort",
    cached_tokens=0,
    decode_s=asyncio.get_running_loop().time() - since_s,
  )


def last(answer: contract.Completion) -> contract.Delta:
  """Returns the delta of an answer that has come whole."""
  return contract.Delta(
    tokens=answer.tokens,
    logprobs=answer.logprobs,
    versions=answer.versions,
    completion=answer,
  )
