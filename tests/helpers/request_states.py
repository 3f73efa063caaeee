"""Requests that run in the built-in engine, without an engine."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from rl.engine import contract
from rl.engine.builtin import block_manager
from rl.engine.builtin import request as request_lib

PAGE_SIZE = 4


def maker(
  loop: asyncio.AbstractEventLoop,
) -> Callable[..., request_lib.RequestState]:
  """Returns (ids given, cached, tokens sampled of at most) -> a request.

  Ids are their own positions; the i-th request has slot i and pages from 10 i.
  """
  arrivals = itertools.count()

  def make(
    given: int, cached: int, sampled: int = 0, most: int = 50, **fields: Any
  ) -> request_lib.RequestState:
    at = next(arrivals)
    request = contract.DecodeRequest(
      request_id=str(at),
      session=str(at),
      tokens=np.arange(given, dtype=np.int32),
      max_tokens=most,
      **fields,
    )
    state = request_lib.RequestState(
      request,
      loop.create_future(),
      ((), at),
      np.arange(given + most, dtype=np.int32),
      given + sampled,
    )
    pages = [10 * at + i for i in range(-(-(given + most) // PAGE_SIZE))]
    state.slot = at
    state.page_table = block_manager.PageTable(pages, cached, 0)
    state.versions = [0] * sampled
    state.logprobs = [-1.0] * sampled
    state.sync_counters()
    return state

  return make
