"""The gap between log-probabilities of engine and learner."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int32

from rl.data import batch as batch_lib
from rl.runtime import mesh_thread
from rl.train import learner


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gap:
  """Sampled tokens scored twice; log-probabilities in nats.

  Attributes:
    engine: as recorded when the token was sampled.
    learner: under the same weights.
    lags: versions between these weights and the trained ones.
  """

  engine: Float32[np.ndarray, " N"]
  learner: Float32[np.ndarray, " N"]
  lags: Int32[np.ndarray, " N"]

  @property
  def tokens(self) -> int:
    """Number of tokens compared."""
    return len(self.engine)

  @property
  def sizes(self) -> Float32[np.ndarray, " N"]:
    """Returns |learner - engine| of each."""
    return np.abs(self.learner - self.engine)

  @property
  def max(self) -> float:
    """Returns the largest; nan when nothing was compared."""
    return float(self.sizes.max()) if self.tokens else float("nan")

  @property
  def mean(self) -> float:
    """Returns the mean; nan when nothing was compared."""
    return float(self.sizes.mean()) if self.tokens else float("nan")

  def sample(self, most: int) -> "Gap":
    """Returns at most so many tokens, evenly spread.

    The largest gap, or a nan, is always among them.
    """
    if self.tokens <= most:
      return self
    spread = np.linspace(0, self.tokens - 1, most).astype(int)
    worst = int(np.argmax(self.sizes))  # Of nan, too, argmax takes the first.
    spread[np.argmin(np.abs(spread - worst))] = worst
    return Gap(
      engine=self.engine[spread],
      learner=self.learner[spread],
      lags=self.lags[spread],
    )


async def measure(
  programs: learner.Learner,
  thread: mesh_thread.MeshThread,
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
    rows: how many to score; a multiple of the parts of a batch. A batch of
      fewer is scored with rows twice, by the same program.
  """
  if batch is None:
    return _gap([])
  probe = jax.tree.map(lambda x: x[:rows], batch)
  count = len(probe.tokens)
  padded = probe
  if count < rows:
    padded = jax.tree.map(lambda x: np.resize(x, (rows, *x.shape[1:])), probe)
  compared = []
  for version in np.unique(probe.versions[probe.sampled]).tolist():
    if version not in weights:
      continue
    scored = await thread.run(
      "score", _score, programs, weights[version], padded
    )
    chosen = probe.sampled & (probe.versions == version)
    columns = (probe.behaviour, scored[:count], probe.lags)
    compared.append([column[chosen] for column in columns])
  return _gap(compared)


def metrics(gap: Gap) -> dict[str, float]:
  """Returns how far engine and learner disagree, in nats."""
  return {
    "logprob_gap_max": gap.max,
    "logprob_gap_mean": gap.mean,
    "logprob_gap_tokens": float(gap.tokens),
  }


def _gap(parts: Sequence[Sequence[np.ndarray]]) -> Gap:
  """Joins (engine, learner, lags) of several versions."""
  nothing = [np.zeros(0, np.float32)] * 2 + [np.zeros(0, np.int32)]
  engine, learner, lags = map(np.concatenate, zip(nothing, *parts, strict=True))
  return Gap(engine=engine, learner=learner, lags=lags)


def _score(
  programs: learner.Learner, params: Any, batch: batch_lib.Batch
) -> np.ndarray:
  return jax.device_get(programs.score(params, batch))
