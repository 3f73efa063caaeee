"""Do engine and learner agree on the log-probability of what was sampled?"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rl import batch as batch_lib
from rl import dispatch, learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
  """|learner - engine| in nats over the tokens that could be compared."""

  max: float
  mean: float
  tokens: int


async def measure(
  programs: learner.Learner,
  thread: dispatch.MeshThread,
  weights: Mapping[int, Any],
  batch: batch_lib.Batch | None,
  rows: int,
) -> Gap:
  """Scores the first rows of a batch again, each token under its own policy.

  A token was sampled with every key and value before it from the weights of
  its version, so one forward pass a version tells the whole truth.

  Args:
    weights: version -> the learner's parameters of that version. Tokens of
      other versions are left out.
    batch: None, when a round had nothing to train, compares nothing.
    rows: how many to score; a multiple of the parts of a batch.
  """
  if batch is None:
    return Gap(max=float("nan"), mean=float("nan"), tokens=0)
  probe = jax.tree.map(lambda x: x[:rows], batch)
  gaps = [np.zeros(0, np.float32)]
  for version in np.unique(probe.versions[probe.sampled]).tolist():
    if version not in weights:
      continue
    scored = await thread.run(
      "score", _score, programs, weights[version], probe
    )
    chosen = probe.sampled & (probe.versions == version)
    gaps.append(np.abs(scored - probe.behaviour)[chosen])
  gap = np.concatenate(gaps)
  if not gap.size:
    return Gap(max=float("nan"), mean=float("nan"), tokens=0)
  return Gap(max=float(gap.max()), mean=float(gap.mean()), tokens=gap.size)


def _score(
  programs: learner.Learner, params: Any, batch: batch_lib.Batch
) -> np.ndarray:
  return jax.device_get(programs.score(params, programs.place(batch)))
