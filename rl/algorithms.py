"""What is learned from groups of episodes: one value of a config.

  algorithm=algorithms.Dapo()         --config.algorithm=dapo
  algorithm=algorithms.Grpo(loss=losses.ClippedSurrogate(clip_high=0.3))
                                      --config.algorithm.loss.clip_high=0.3

Every preset is an `Algorithm` with the values of its paper; any of its parts
may be replaced.
"""

import dataclasses

from models import config as model_config
from rl import (
  advantages,
  aggregates,
  credit,
  filters,
  losses,
  objective,
  overlap,
  references,
)
from rl import kl as kl_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(objective.Objective):
  """From rewards to what is minimised.

  Attributes:
    advantage: what each token of an episode was worth.
    reference: whom `kl` compares with; None without a `kl`.
    sampling: drops groups that teach nothing and plays others, or None.
    epochs: optimizer steps on the same groups. The policy that ratios are
      against stays that of `overlap.old_logprob`. For several steps on parts
      of a round see `overlap.updates_per_round`.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=advantages.Grpo
  )
  loss: losses.Loss = dataclasses.field(default_factory=losses.ClippedSurrogate)
  reference: references.Reference | None = None
  sampling: filters.DynamicSampling | None = None
  epochs: int = 1
  short_name = "free"

  def validate(self) -> None:
    """Raises ValueError on parts that do not go together."""
    super().validate()
    if self.epochs < 1:
      raise ValueError(f"algorithm.epochs={self.epochs} is below 1")
    if self.kl is not None and self.reference is None:
      raise ValueError(
        "algorithm.kl without a reference to stay close to; use algorithm."
        "reference=initial, a rl.references.Teacher(model=..., directory=...), "
        "or kl=none"
      )
    if self.kl is None and self.reference is not None:
      raise ValueError(
        f"algorithm.reference={self.reference.short_name} without a kl is "
        "scored for nothing; use reference=none, or kl=rl.kl.KlPenalty()"
      )
    if isinstance(self.advantage, credit.Distillation):
      self._validate_distillation()
    self._validate_loss()
    if self.sampling is not None and self.advantage.min_group_size < 2:
      raise ValueError(
        f"sampling with advantage={type(self.advantage).__name__}: groups of "
        "equal rewards teach it as much as others; use sampling=none"
      )

  def _validate_distillation(self) -> None:
    """Raises when there is nobody to learn from, or nothing to learn."""
    kl = self.kl
    if kl is None or (kl.where, kl.estimator) != ("reward", "k1"):
      raise ValueError(
        "algorithm.advantage=Distillation learns from the penalty of each token"
        " alone; use algorithm.kl=rl.kl.KlPenalty(estimator=k1, weight=1.0, "
        "where=reward)"
      )
    if isinstance(self.reference, references.Initial):
      raise ValueError(
        "algorithm.advantage=Distillation with reference=initial: the policy "
        "would be its own teacher; use rl.references.Teacher(model=..., "
        "directory=...)"
      )

  def _validate_loss(self) -> None:
    """Raises when the loss is for another purpose."""
    name = type(self.loss).__name__
    if isinstance(self.loss, losses.NegativeLogLikelihood):
      raise ValueError(
        f"algorithm.loss={name} imitates whatever was sampled, good or bad; "
        "use losses.Reinforce(), or a warm_start to imitate an oracle"
      )
    if isinstance(self.loss, losses.Reinforce) and self.epochs > 1:
      raise ValueError(
        f"algorithm.epochs={self.epochs} with loss={name}, which has no ratio: "
        "a second epoch would take the tokens of another policy for its own; "
        "use epochs=1, or losses.Cispo()"
      )

  def validate_schedule(self, schedule: overlap.Overlap) -> None:
    """Raises ValueError when it cannot learn on such a schedule."""
    if self.advantage.scope == "batch" and schedule.streams:
      name = type(self.advantage).__name__
      raise ValueError(
        f"algorithm.advantage={name} compares all groups of an update, but with"
        f" overlap.groups_per_microbatch={schedule.groups_per_microbatch} "
        "gradients accumulate before the last of them is ready; use "
        f"groups_per_microbatch={schedule.groups_per_update}"
        + ("" if schedule.max_staleness else ", or wait_for_round=true")
      )
    correction = self.correction
    compares_old = correction is not None and correction.compares == "old"
    if compares_old and schedule.old_logprob == "decode":
      raise ValueError(
        f"algorithm.correction={type(self.correction).__name__} with overlap."
        "old_logprob=decode: it compares the old policy with the one that "
        "sampled, which then are the same, and the ratio of the loss corrects "
        "already; use old_logprob=recompute, or correction=none"
      )
    if self.loss.own_weight and schedule.old_logprob != "decode":
      raise ValueError(
        f"overlap.old_logprob={schedule.old_logprob} with algorithm.loss="
        f"{type(self.loss).__name__}, which compares with the policy that "
        "sampled: it is scored for nothing; use old_logprob=decode"
      )
    # A mask alone does not say how much likelier a token has become.
    if correction is None or not (compares_old and correction.weighs):
      self._validate_old(schedule)

  def _validate_old(self, schedule: overlap.Overlap) -> None:
    """Raises when the ratio would forget who sampled."""
    old = schedule.old_logprob
    if old == "decode":
      return
    out = (
      "use old_logprob=decode, or algorithm.correction="
      "rl.corrections.TokenTruncated() to weigh tokens for that"
    )
    if schedule.on_publish == "keep_kv":
      raise ValueError(
        f"overlap.old_logprob={old} with on_publish=keep_kv: no weights give "
        "the log-probabilities of tokens sampled from mixed keys and values; "
        + out
      )
    if schedule.max_staleness:
      raise ValueError(
        f"overlap.old_logprob={old} with max_staleness="
        f"{schedule.max_staleness}: the ratio would forget which policy "
        f"sampled the tokens; {out}"
      )
    if old == "recompute" and schedule.updates_per_round > 1:
      raise ValueError(
        "overlap.old_logprob=recompute with updates_per_round="
        f"{schedule.updates_per_round}: a group that comes late would be "
        "compared with weights that its round has already trained; use "
        f"old_logprob=snapshot, or {out.removeprefix('use ')}"
      )

  def validate_model(self, model: model_config.ModelConfig) -> None:
    """Raises ValueError when such a model has no such reference."""
    match self.reference:
      case references.Base() if model.lora is None:
        raise ValueError(
          "algorithm.reference=base is what lies below adapters, and model.lora"
          " is none; use reference=initial"
        )
      case references.Initial() if model.lora is not None:
        raise ValueError(
          "algorithm.reference=initial would keep a copy of what model.lora "
          "never changes; use reference=base"
        )
      case references.Teacher(model=teacher):
        for name in ("vocab_size", "max_length"):
          own, other = getattr(model, name), getattr(teacher, name)
          if other < own:
            raise ValueError(
              f"algorithm.reference.model.{name}={other} is below the {own} of "
              "model, whose tokens it scores; use a teacher with as many"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(Algorithm):
  """Group-relative advantages over their deviation, clipped ratios.

  The paper's KL, which needs a second copy of the weights, is left out:
  `kl=kl.KlPenalty(estimator="k3", weight=0.04)` with `reference=initial`.

  Source: arXiv 2402.03300, eq. 3.
  """

  loss: losses.Loss = dataclasses.field(
    default_factory=lambda: losses.ClippedSurrogate(
      clip_high=0.2, aggregate=aggregates.SequenceMean()
    )
  )
  short_name = "grpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpo(Algorithm):
  """GRPO without what favours long answers and extreme tasks.

  The paper's `loss.aggregate.length` is the longest answer allowed. It is 1
  here, whatever the task: the gradient of the expected return, a sum over
  tokens. Adam does not mind the scale; a clip of the gradient's norm and the
  losses of a router, which are not divided by it, do.

  Source: arXiv 2503.20783, section 3.2.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=advantages.DrGrpo
  )
  loss: losses.Loss = dataclasses.field(
    default_factory=lambda: losses.ClippedSurrogate(
      clip_high=0.2, aggregate=aggregates.Constant(length=1.0)
    )
  )
  short_name = "dr_grpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dapo(Algorithm):
  """Higher upper clip, means of tokens, groups that teach nothing replaced.

  Tokens are averaged over the update, as most implementations do, and not over
  each group first.

  Its penalty for long answers is `rollout.overlong`, which knows their limit.

  Source: arXiv 2503.14476, section 3.
  """

  loss: losses.Loss = dataclasses.field(
    default_factory=lambda: losses.ClippedSurrogate(
      clip_low=0.2, clip_high=0.28
    )
  )
  sampling: filters.DynamicSampling | None = dataclasses.field(
    default_factory=filters.DynamicSampling
  )
  short_name = "dapo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rloo(Algorithm):
  """Leave-one-out baseline and the plain policy gradient.

  Source: arXiv 2402.14740, section 3.3.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=advantages.Rloo
  )
  loss: losses.Loss = dataclasses.field(default_factory=losses.Reinforce)
  short_name = "rloo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Algorithm):
  """A KL in the reward of each token, returns whitened over the update.

  Source: arXiv 2501.03262, section 3.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=credit.ReinforcePlusPlus
  )
  loss: losses.Loss = dataclasses.field(
    default_factory=lambda: losses.ClippedSurrogate(clip_high=0.2)
  )
  kl: kl_lib.KlPenalty | None = dataclasses.field(
    default_factory=lambda: kl_lib.KlPenalty(
      estimator="k1", weight=0.01, where="reward"
    )
  )
  reference: references.Reference | None = dataclasses.field(
    default_factory=references.Initial
  )
  short_name = "reinforce_pp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(Algorithm):
  """Generalised advantages of a critic, clipped ratios and values.

  Source: arXiv 1707.06347, eq. 9 and 11.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=credit.Gae
  )
  loss: losses.Loss = dataclasses.field(
    default_factory=lambda: losses.ClippedSurrogate(clip_high=0.2)
  )
  short_name = "ppo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gspo(Algorithm):
  """GRPO with one ratio for a whole answer.

  Source: arXiv 2507.18071, eq. 5.
  """

  loss: losses.Loss = dataclasses.field(default_factory=losses.Gspo)
  short_name = "gspo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cispo(Algorithm):
  """Clipped importance weights on the plain policy gradient.

  Source: MiniMax-M1, arXiv 2506.13585, section 3.1.
  """

  loss: losses.Loss = dataclasses.field(default_factory=losses.Cispo)
  short_name = "cispo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gigpo(Algorithm):
  """Credit for turns, from members of a group that saw the same.

  Source: arXiv 2505.10978, section 3.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=credit.StepGroups
  )
  loss: losses.Loss = dataclasses.field(
    default_factory=lambda: losses.ClippedSurrogate(clip_high=0.2)
  )
  short_name = "gigpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(Algorithm):
  """On-policy distillation: a teacher grades every token that was sampled.

  `reference` is the teacher, and has to be set.

  Source: arXiv 2306.13649, section 3, with the reverse KL.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=credit.Distillation
  )
  kl: kl_lib.KlPenalty | None = dataclasses.field(
    default_factory=lambda: kl_lib.KlPenalty(
      estimator="k1", weight=1.0, where="reward"
    )
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
  | Cispo
  | Gigpo
  | Distill
  | Algorithm
)
"""All that `--config.algorithm=NAME` knows."""
