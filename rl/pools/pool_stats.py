"""Capabilities and counters of several engines as one."""

import asyncio
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from rl.engine import contract


def capabilities(
  engines: Sequence[contract.DecodeEngine],
) -> contract.Capabilities:
  """Returns the abilities that all engines share.

  Raises:
    ValueError: there is none, or they serve different models.
  """
  if not engines:
    raise ValueError("a pool of 0 engines serves nothing; use one or more")
  able = [one.capabilities for one in engines]
  vocabularies = {one.vocab_size for one in able}
  if len(vocabularies) > 1:
    raise ValueError(
      f"engines of vocabularies {sorted(vocabularies)} in one pool; all must "
      "serve one model"
    )
  # The least of booleans is whether all of them are true.
  least: dict[str, Any] = {
    field.name: min(getattr(one, field.name) for one in able)
    for field in dataclasses.fields(contract.Capabilities)
    if field.name != "in_flight"
  }
  in_flight = frozenset.intersection(*(one.in_flight for one in able))
  return contract.Capabilities(in_flight=in_flight, **least)


def stats(
  engines: Sequence[contract.DecodeEngine], serving: Collection[int]
) -> contract.EngineStats:
  """Returns sums of the counters of all engines.

  `version` is the lowest of the serving engines, and `paused_s` the longest.

  Args:
    serving: numbers of the engines that are not lost; if all are, all count.
  """
  each = [one.stats() for one in engines]
  names = [field.name for field in dataclasses.fields(contract.EngineStats)]
  sums: dict[str, Any] = {
    name: sum(getattr(one, name) for one in each) for name in names
  }
  sums["version"] = min(
    one.version for i, one in enumerate(each) if i in serving or not serving
  )
  sums["paused_s"] = max(one.paused_s for one in each)
  return contract.EngineStats(**sums)


async def close(engines: Sequence[contract.DecodeEngine]) -> None:
  """Stops every engine.

  Raises the first exception only when all others have closed.
  """
  ends = [one.close() for one in engines]
  for end in await asyncio.gather(*ends, return_exceptions=True):
    if isinstance(end, BaseException):
      raise end
