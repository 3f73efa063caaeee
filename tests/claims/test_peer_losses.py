"""TRL's, verl's and google-tunix's losses on one batch are ours.

Their numbers are those of benchmarks/results/peer_losses.json, which names the
versions; `benchmarks/peer_losses.py` has their code compute them. The pages of
docs/migration say what the settings mean.
"""

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import (
  advantages,
  corrections,
  kl,
  loss_aggregation,
  losses,
  token_selection,
)
from tests.helpers import packed_rows, played_members

_RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
_KEPT = json.loads((_RESULTS / "peer_losses.json").read_text())
_BATCH = {k: np.array(v) for k, v in _KEPT["batch"].items()}
_TOKENS = loss_aggregation.TokenMean()
_SEQUENCES = loss_aggregation.SequenceMean()
_SUMS = loss_aggregation.Constant(length=1.0)


def _clipped(
  aggregate: loss_aggregation.Aggregate = _TOKENS,
  dual_clip: float | None = None,
  clip_high: float = 0.2,
) -> losses.Loss:
  return losses.ClippedSurrogate(
    clip_high=clip_high, dual_clip=dual_clip, aggregate=aggregate
  )


def _kl(
  estimator: kl.KlEstimator, late: corrections.Correction | None = None
) -> kl.KlPenalty:
  weight = _KEPT["beta"]
  return kl.KlPenalty(estimator=estimator, weight=weight, late=late)


_LONGEST = loss_aggregation.Constant(length=float(_BATCH["longest"]))
_PADDED = loss_aggregation.Constant(length=float(_BATCH["mask"].shape[1]))
_Cov = token_selection.ClipCov | token_selection.KlCov
_Part = losses.Loss | kl.KlPenalty | corrections.Correction | _Cov
_OURS: dict[str, dict[str, tuple[_Part, ...]]] = {
  "trl": {
    "grpo": (_clipped(_SEQUENCES),),
    "bnpo": (_clipped(),),
    "dr_grpo": (_clipped(_LONGEST),),
    "dapo": (_clipped(),),
    "sapo": (losses.Sapo(),),
    "cispo": (losses.Cispo(clip_high=4.0),),
    "epsilon_high": (_clipped(clip_high=0.28),),
    "delta": (_clipped(dual_clip=3.0),),
    "beta": (
      _clipped(),
      _kl("k3_plus", corrections.TokenTruncated(cap=math.inf)),
    ),
    "not use_bias_correction_kl": (_clipped(), _kl("k3")),
    "sequence": (losses.Gspo(),),
    "vespo": (losses.Vespo(),),
    "luspo": (losses.Gspo(aggregate=_SUMS),),
    "gmpo": (losses.Gmpo(clip_low=0.4, clip_high=0.3),),
  },
  "verl": {
    "token-mean": (_clipped(dual_clip=3.0),),
    "seq-mean-token-mean": (_clipped(_SEQUENCES, 3.0),),
    "seq-mean-token-sum": (_clipped(_SUMS, 3.0),),
    "seq-mean-token-sum-norm": (_clipped(_PADDED, 3.0),),
    "clip_ratio_high": (_clipped(_TOKENS, 3.0, 0.28),),
    "low_var_kl": (_clipped(dual_clip=3.0), _kl("k3")),
    "k3+": (_clipped(dual_clip=3.0), _kl("k3_plus")),
    "rollout_is": (
      _clipped(dual_clip=3.0),
      corrections.TokenTruncated(cap=2.0),
    ),
    "gspo": (losses.Gspo(),),
    "geo_mean": (losses.Gmpo(clip_low=0.4, clip_high=0.3),),
    "gpg": (losses.Reinforce(aggregate=_TOKENS),),
    "clip_cov": (
      _clipped(),
      token_selection.ClipCov(share=1.0, low=0.3, high=1.0),
    ),
    "kl_cov": (
      losses.ClippedSurrogate(clip_low=1.0, clip_high=math.inf),
      token_selection.KlCov(share=0.25, weight=0.1),
    ),
    "cispo": (losses.Cispo(clip_low=0.2, clip_high=0.28),),
  },
  "tunix": {
    "token-mean": (_clipped(),),
    "sequence-mean-token-mean": (_clipped(_SEQUENCES),),
    "sequence-mean-token-scale": (_clipped(_PADDED),),
    "seq-mean-token-sum": (_clipped(_SUMS),),
    "sequence-mean-token-sum-norm": (_clipped(_SUMS),),
    "gspo-token": (losses.GspoToken(clip_low=0.2, clip_high=0.2),),
    "mse_kl": (_clipped(_SEQUENCES), _kl("k2")),
    "low_var_kl": (_clipped(_SEQUENCES), _kl("k3")),
  },
}
_REFUSED: dict[tuple[str, str], kl.KlEstimator] = {("tunix", "kl"): "k1"}
_ESTIMATORS: dict[str, dict[str, advantages.Estimator]] = {
  "trl": {"group": advantages.Grpo(eps=1e-4), "none": advantages.DrGrpo()},
  "verl": {
    "norm_adv_by_std_in_grpo": advantages.Grpo(),
    "not": advantages.DrGrpo(),
    "rloo": advantages.Rloo(),
  },
  "tunix": {
    "grpo": advantages.Grpo(),
    "rloo": advantages.Rloo(),
    "drgrpo": advantages.DrGrpo(),
  },
}
_SCALED = {"trl": "group", "verl": "norm_adv_by_std_in_grpo", "tunix": "grpo"}


def _loss(peer: str, parts: tuple[_Part, ...]) -> Any:
  """Returns (loss, gradient by token) of the batch, packed into one row."""
  mask = _BATCH["mask"]
  scaled = np.array(_KEPT[peer]["advantages"][_SCALED[peer]])
  # Only verl is told what an engine recorded.
  behaviour = _BATCH["behaviour" if peer == "verl" else "old"]
  row = packed_rows.make(
    _BATCH["logprobs"][mask],
    old=_BATCH["old"][mask],
    behaviour=behaviour[mask],
    advantages=np.broadcast_to(scaled[:, None], mask.shape)[mask],
    segments=np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)[mask],
  )
  reference = jnp.asarray(_BATCH["reference"][mask], jnp.float32)

  def total(logprobs):
    now = row._replace(logprobs=logprobs)
    (loss,) = (x for x in parts if isinstance(x, losses.Loss))
    terms = loss(now)
    for part in parts:
      if isinstance(part, _Cov):
        rows, terms = (jax.tree.map(lambda x: x[None], x) for x in (now, terms))
        terms, _ = part(terms, rows)
        terms = jax.tree.map(lambda x: x[0], terms)
    tokens = terms.loss
    for part in parts:
      if isinstance(part, corrections.Correction):
        tokens = tokens * part(now).weights
    for part in parts:
      if isinstance(part, kl.KlPenalty):
        tokens = tokens + part.weight * part(now, reference)
    value, count = loss.aggregate(tokens, now)
    return value / count

  return jax.jit(jax.value_and_grad(total))(row.logprobs)


def test_every_number_that_is_kept_has_ours():
  for peer, ours in _OURS.items():
    known = {*ours, *(name for other, name in _REFUSED if other == peer)}
    assert known == set(_KEPT[peer]["losses"])
    assert set(_ESTIMATORS[peer]) == set(_KEPT[peer]["advantages"])


@pytest.mark.compiled
@pytest.mark.parametrize(
  ("peer", "name"), [(p, n) for p, ours in _OURS.items() for n in ours]
)
def test_the_loss_and_its_gradient_are_theirs(peer, name):
  theirs = _KEPT[peer]["losses"][name]
  loss, gradient = _loss(peer, _OURS[peer][name])
  # Both are sums of some 30 terms of order 1 in float32.
  np.testing.assert_allclose(loss, theirs["loss"], atol=2e-6)
  expected = np.array(theirs["gradient"])
  assert not expected[~_BATCH["mask"]].any()
  np.testing.assert_allclose(gradient, expected[_BATCH["mask"]], atol=2e-6)


@pytest.mark.parametrize(
  ("peer", "name"), [(p, n) for p, ours in _ESTIMATORS.items() for n in ours]
)
def test_the_advantages_are_theirs(peer, name):
  groups = _BATCH["rewards"].reshape(-1, int(_BATCH["group"]))
  ours = [
    value
    for group in groups
    for (value,) in _ESTIMATORS[peer][name](
      [played_members.played(reward, (1,)) for reward in group]
    ).advantages
  ]
  # Theirs are float32, and the smallest deviation is 0.3.
  np.testing.assert_allclose(ours, _KEPT[peer]["advantages"][name], rtol=1e-5)


@pytest.mark.parametrize(("peer", "name"), sorted(_REFUSED))
def test_a_kl_without_a_gradient_is_refused(peer, name):
  with pytest.raises(ValueError, match="its gradient has mean 0"):
    _kl(_REFUSED[peer, name]).validate()
