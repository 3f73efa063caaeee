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
  return contract.Capabilities(
    in_flight=frozenset.intersection(*(one.in_flight for one in able)),
    max_length=min(one.max_length for one in able),
    vocab_size=able[0].vocab_size,
    max_stop_ids=min(one.max_stop_ids for one in able),
    seeds=all(one.seeds for one in able),
    bias=all(one.bias for one in able),
    constraints=all(one.constraints for one in able),
    experts=all(one.experts for one in able),
    top_logprobs=min(one.top_logprobs for one in able),
    prefixes=all(one.prefixes for one in able),
  )


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
