"""The algorithm of a run: its parts, and the checks that they fit together."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import config as model_config
from rl.algorithms import (
  advantages,
  corrections,
  group_filters,
  losses,
  objective,
  packed_row,
  references,
  returns,
  token_advantages,
)
from rl.schedule import overlap
from rl.settings import checks, short_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(objective.Objective):
  """An objective, and the advantages that it is given.

  Attributes:
    advantage: estimates the advantage of each token.
    reference: the policy that `kl` compares with; None without a `kl`.
    dynamic_sampling: drops groups that teach nothing and plays others, or None.
    epochs: optimizer steps on the same groups. The policy that ratios are
      against stays that of `overlap.old_logprob`. For several steps on parts
      of a round see `overlap.updates_per_round`; a part has all its epochs
      before the next.
  """

  advantage: advantages.Estimator = dataclasses.field(
    default_factory=advantages.Grpo
  )
  loss: losses.Loss = dataclasses.field(default_factory=losses.ClippedSurrogate)
  reference: references.Reference | None = None
  dynamic_sampling: group_filters.DynamicSampling | None = None
  epochs: int = 1
  short_name = "free"

  def validate(self) -> None:
    """Raises ValueError on parts that do not fit their place or each other."""
    _validate_protocols(self)
    super().validate()
    checks.at_least(self, 1, "epochs", where="algorithm")
    self._validate_loss()
    self._validate_reference()
    if self.dynamic_sampling is None:
      return
    reason, name = None, short_names.of(self.advantage)
    if self.advantage.min_group_size < 2:
      reason = f"advantage={name} compares no members"
    elif self.advantage.pool == "task":
      reason = f"advantage={name} compares groups of one task with each other"
    elif self.reward_kl is not None:
      reason = "a kl in the rewards makes members differ"
    if reason is not None:
      raise ValueError(
        "algorithm.dynamic_sampling drops groups of equal rewards, but "
        f"{reason}, so they teach as others do; use "
        "algorithm.dynamic_sampling=none"
      )

  def _validate_reference(self) -> None:
    kl, reference = self.kl, self.reference
    name = "none" if reference is None else reference.short_name
    if isinstance(self.advantage, token_advantages.Distillation):
      if kl is None or (kl.where, kl.estimator) != ("reward", "k1"):
        raise ValueError(
          "algorithm.advantage=distillation learns from the penalty of each "
          "token alone; use "
          "algorithm.kl=kl_penalty(estimator=k1, weight=1.0, where=reward)"
        )
      if not isinstance(reference, references.Teacher):
        raise ValueError(
          f"algorithm.advantage=distillation with reference={name}: it needs a "
          "teacher other than the policy; use algorithm.reference=teacher("
          "model=..., directory=...), as configs/guess_number_distill.py does"
        )
    if kl is not None and reference is None:
      raise ValueError(
        "algorithm.kl without a reference to stay close to; use algorithm."
        "reference=initial, a teacher(model=..., directory=...), or kl=none"
      )
    if kl is None and reference is not None:
      raise ValueError(
        f"algorithm.reference={name} without a kl is scored for nothing; use "
        "reference=none, or kl=kl_penalty"
      )

  def _validate_loss(self) -> None:
    name = short_names.of(self.loss)
    if isinstance(self.loss, losses.NegativeLogLikelihood):
      raise ValueError(
        f"algorithm.loss={name} imitates whatever was sampled, good or bad; "
        "use reinforce, or a warm_start to imitate an oracle"
      )
    if not self.loss.has_ratio and self.epochs > 1:
      raise ValueError(
        f"algorithm.epochs={self.epochs} with loss={name}, which has no ratio: "
        "a second epoch would take the tokens of another policy for its own; "
        "use epochs=1, or loss=cispo"
      )

  def validate_schedule(self, schedule: overlap.Overlap) -> None:
    """Raises ValueError when it cannot learn on such a schedule."""
    if self.advantage.scope == "batch" and schedule.streams:
      name = short_names.of(self.advantage)
      raise ValueError(
        f"algorithm.advantage={name} compares all groups of an update, but with"
        f" overlap.groups_per_microbatch={schedule.groups_per_microbatch} "
        "gradients accumulate before the last of them is ready; use "
        f"groups_per_microbatch={schedule.groups_per_update}"
        + ("" if schedule.max_staleness else ", or wait_for_round=true")
      )
    correction, old = self.correction, schedule.old_logprob
    if correction is not None and not correction.compares_old:
      correction = None
    if correction is not None and old == "decode":
      raise ValueError(_nothing_to_compare(correction, schedule))
    if self.loss.own_weight and old != "decode":
      raise ValueError(
        f"overlap.old_logprob={old} with algorithm.loss="
        f"{short_names.of(self.loss)}, which compares with the policy that "
        "sampled: it is scored for nothing; use old_logprob=decode"
      )
    # A mask alone does not say how much likelier a token has become.
    if correction is None or not correction.weighs:
      self._validate_late(schedule)

  def _validate_late(self, schedule: overlap.Overlap) -> None:
    """Raises when nothing would tell late samples from fresh ones."""
    old, lag = schedule.old_logprob, schedule.max_staleness
    if not self.loss.has_ratio and lag:
      raise ValueError(
        f"algorithm.loss={short_names.of(self.loss)} with overlap.max_staleness"
        f"={lag}: it has no ratio, and would take the tokens of older policies "
        "for its own; use overlap.old_logprob=recompute with algorithm."
        "correction=token_truncated, or a loss with its own weights, as aipo"
      )
    use, reason = "decode", None
    if schedule.on_publish == "keep_kv":
      reason = (
        "on_publish=keep_kv: no weights give the log-probabilities of tokens "
        "sampled from mixed keys and values"
      )
    elif lag:
      reason = (
        f"max_staleness={lag}: the ratio would forget which policy sampled the "
        "tokens"
      )
    elif old == "recompute" and (parts := schedule.updates_per_round) > 1:
      use = "snapshot, or old_logprob=decode"
      reason = (
        f"updates_per_round={parts}: a group that comes late would be compared "
        "with weights that its round has already trained"
      )
    if old != "decode" and reason:
      raise ValueError(
        f"overlap.old_logprob={old} with {reason}; use old_logprob={use}, or "
        "algorithm.correction=token_truncated to weigh tokens for that"
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
        where: Any = {"where": "algorithm.reference.model"}
        out = "as in model, whose tokens it scores; use a teacher with as many"
        checks.at_least(
          teacher, model.vocab_size, "vocab_size", out=out, **where
        )
        checks.at_least(
          teacher, model.max_length, "max_length", out=out, **where
        )


def _nothing_to_compare(
  correction: corrections.Correction, schedule: overlap.Overlap
) -> str:
  """Returns the error for a correction of the recorded log-probabilities."""
  name = short_names.of(correction)
  way_out = "use old_logprob=recompute"
  if schedule.max_staleness and not correction.weighs:
    # Or else the next refusal would be of a mask that does not weigh late ones.
    way_out += (
      f" with algorithm.correction=both(first=token_truncated, second={name})"
    )
  return (
    f"algorithm.correction={name} with overlap.old_logprob=decode: it compares "
    "the old policy with the one that sampled, which then are the same, and a "
    f"ratio in the loss corrects already; {way_out}, or correction=none"
  )


def _validate_protocols(algorithm: Algorithm) -> None:
  """Raises on parts of one's own that break their protocol.

  Nothing is computed: a loss and a correction are traced, on four tokens.
  """
  dtypes = {"sampled": jnp.bool_, "segments": jnp.int32}
  row = packed_row.Row._make(
    jax.ShapeDtypeStruct((4,), dtypes.get(column, jnp.float32))
    for column in packed_row.Row._fields
  )
  protocols: Any = (
    ("loss", losses.Loss, losses.Terms),
    ("correction", corrections.Correction, corrections.Weights),
    ("advantage", advantages.Estimator, advantages.Estimate),
  )
  for name, protocol, result in protocols:
    part = getattr(algorithm, name)
    if part is None:
      continue
    setting = f"algorithm.{name}={short_names.of(part)}"
    wanted = [x for x in vars(protocol) if not x.startswith("_")]
    if missing := [x for x in wanted if not hasattr(part, x)]:
      raise ValueError(
        f"{setting} has no {', '.join(missing)}; see {protocol.__module__}."
        f"{protocol.__name__}"
      )
    if name == "advantage":
      found, each = part([_played(0.0), _played(1.0)]), "array a member"
      fits = isinstance(found, result) and (
        [len(own) for own in found.advantages] == [3, 3]
      )
    else:
      found, each = jax.eval_shape(part, row), "entry a token"
      fits = isinstance(found, result) and all(x.shape == (4,) for x in found)
    if not fits:
      raise ValueError(
        f"{setting} does not return {result.__module__}.{result.__name__}, "
        f"each with one {each}"
      )


def _played(reward: float) -> returns.EpisodeReturnInputs:
  """Returns an episode of three tokens in two turns."""
  return returns.EpisodeReturnInputs(
    reward=reward,
    turns=np.array([0, 0, 1]),
    turn_rewards=np.zeros(2, np.float32),
    observations=[b"", b""],
    histories=[b"", b""],
    penalties=np.zeros(3),
    values=np.zeros(3),
  )
