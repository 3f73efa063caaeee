"""Published algorithms, each with the parts and numbers of its paper.

  algorithm=presets.Dapo()            --config.algorithm=dapo
  algorithm=presets.Grpo(loss=losses.ClippedSurrogate(clip_high=0.3))
                                      --config.algorithm.loss.clip_high=0.3

Every preset is an `algorithm.Algorithm`. Its docstring names where it differs
from the paper; any of its parts may be replaced.
"""

import dataclasses
import math

from rl.algorithms import (
  advantages,
  algorithm,
  group_filters,
  loss_aggregation,
  losses,
  references,
  token_advantages,
  token_selection,
)
from rl.algorithms import kl as kl_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(algorithm.Algorithm):
  """Group-relative advantages over their deviation, clipped ratios.

  The paper's KL, which needs a second copy of the weights, is left out:
  `kl=kl.KlPenalty(estimator="k3", weight=0.04, late=None)` with
  `reference=initial`.

  Source: arXiv 2402.03300, eq. 3.
  """

  loss: losses.Loss = losses.ClippedSurrogate(
    clip_high=0.2, aggregate=loss_aggregation.SequenceMean()
  )
  short_name = "grpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpo(algorithm.Algorithm):
  """GRPO without its favour for long answers and extreme tasks.

  The paper's `loss.aggregate.length` is the longest answer allowed. It is 1
  here, whatever the task: the gradient of the expected return, a sum over
  tokens. Adam does not mind the scale; a clip of the gradient's norm and the
  losses of a router, which are not divided by it, do.

  Source: arXiv 2503.20783, section 3.2.
  """

  advantage: advantages.Estimator = advantages.DrGrpo()
  loss: losses.Loss = losses.ClippedSurrogate(
    clip_high=0.2, aggregate=loss_aggregation.Constant(length=1.0)
  )
  short_name = "dr_grpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dapo(algorithm.Algorithm):
  """Higher upper clip, means of tokens, groups that teach nothing replaced.

  Tokens are averaged over the update, as most implementations do, and not over
  each group first.

  Its penalty for long answers is `rollout.overlong`, which knows their limit;
  its filter of them is `mask_truncated`.

  Source: arXiv 2503.14476, section 3.
  """

  loss: losses.Loss = losses.ClippedSurrogate(clip_low=0.2, clip_high=0.28)
  dynamic_sampling: group_filters.DynamicSampling | None = (
    group_filters.DynamicSampling()
  )
  short_name = "dapo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rloo(algorithm.Algorithm):
  """Leave-one-out baseline and the plain policy gradient.

  The paper's KL in the reward is left out, as it needs a second copy of the
  weights.

  Source: arXiv 2402.14740, section 3.3.
  """

  advantage: advantages.Estimator = advantages.Rloo()
  loss: losses.Loss = losses.Reinforce()
  short_name = "rloo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(algorithm.Algorithm):
  """A KL in the reward of each token, returns whitened over the update.

  Source: arXiv 2501.03262, section 3.
  """

  advantage: advantages.Estimator = token_advantages.ReinforcePlusPlus()
  loss: losses.Loss = losses.ClippedSurrogate(clip_high=0.2)
  kl: kl_lib.KlPenalty | None = kl_lib.KlPenalty(
    estimator="k1", weight=0.01, where="reward"
  )
  reference: references.Reference | None = references.Initial()
  short_name = "reinforce_pp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(algorithm.Algorithm):
  """Generalised advantages of a critic, clipped ratios and values.

  One epoch, where the paper takes 3 to 10; see `epochs`.

  Source: arXiv 1707.06347, eq. 9 and 11.
  """

  advantage: advantages.Estimator = token_advantages.Gae()
  loss: losses.Loss = losses.ClippedSurrogate(clip_high=0.2)
  short_name = "ppo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gspo(algorithm.Algorithm):
  """GRPO with one ratio for a whole answer.

  Source: arXiv 2507.18071, eq. 5.
  """

  loss: losses.Loss = losses.Gspo()
  short_name = "gspo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gmpo(algorithm.Algorithm):
  """GRPO with the geometric mean of an answer's ratios.

  Source: arXiv 2507.20673, eq. 4.
  """

  loss: losses.Loss = losses.Gmpo()
  short_name = "gmpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipCov(algorithm.Algorithm):
  """GRPO that leaves out a few of the tokens that cost most entropy.

  Tokens are averaged, ratios clip beyond 2 alone, and groups that teach nothing
  are replaced, as in the authors' script.

  Source: arXiv 2505.22617, section 4.
  """

  loss: losses.Loss = losses.ClippedSurrogate(clip_low=1.0, clip_high=1.0)
  covariance: token_selection.ClipCov | token_selection.KlCov | None = (
    token_selection.ClipCov()
  )
  dynamic_sampling: group_filters.DynamicSampling | None = (
    group_filters.DynamicSampling()
  )
  short_name = "clip_cov"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlCov(algorithm.Algorithm):
  """GRPO that holds the tokens that cost most entropy near the old policy.

  Tokens are averaged, nothing is clipped, and groups that teach nothing are
  replaced. The share is that of the paper's model of 32B.

  Source: arXiv 2505.22617, section 4.
  """

  loss: losses.Loss = losses.ClippedSurrogate(clip_low=1.0, clip_high=math.inf)
  covariance: token_selection.ClipCov | token_selection.KlCov | None = (
    token_selection.KlCov()
  )
  dynamic_sampling: group_filters.DynamicSampling | None = (
    group_filters.DynamicSampling()
  )
  short_name = "kl_cov"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cispo(algorithm.Algorithm):
  """Clipped importance weights on the plain policy gradient.

  Source: MiniMax-M1, arXiv 2506.13585, section 3.1.
  """

  loss: losses.Loss = losses.Cispo()
  short_name = "cispo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vespo(algorithm.Algorithm):
  """Whole answers weighed by a smooth function of their importance weight.

  Source: arXiv 2602.10693, section 3.
  """

  loss: losses.Loss = losses.Vespo()
  short_name = "vespo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gigpo(algorithm.Algorithm):
  """Credit for turns, from members of a group that saw the same.

  Source: arXiv 2505.10978, section 3.
  """

  advantage: advantages.Estimator = token_advantages.StepGroups()
  loss: losses.Loss = losses.ClippedSurrogate(clip_high=0.2)
  short_name = "gigpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(algorithm.Algorithm):
  """On-policy distillation: a teacher grades every token that was sampled.

  `reference` is the teacher, and has to be set. The bounds of the ratio are
  not from the source, which has none.

  Source: arXiv 2306.13649, section 3, with the reverse KL.
  """

  advantage: advantages.Estimator = token_advantages.Distillation()
  kl: kl_lib.KlPenalty | None = kl_lib.KlPenalty(
    estimator="k1", weight=1.0, where="reward"
  )
  short_name = "distill"


Named = (
  Grpo
  | DrGrpo
  | Dapo
  | Rloo
  | ReinforcePlusPlus
  | Ppo
  | Gspo
  | Gmpo
  | ClipCov
  | KlCov
  | Cispo
  | Vespo
  | Gigpo
  | Distill
  | algorithm.Algorithm
)
"""All that `--config.algorithm=NAME` knows."""
