"""The algorithm of a run: its parts, and the checks that they fit together."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from envs import base
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
from rl.settings import annotations, checks, short_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(objective.Objective):
  """An objective, and the advantages that it is given.

  Attributes:
    advantage: estimates the advantage of each token.
    reference: the policy that `kl` compares with; None without a `kl`.
    dynamic_sampling: drops groups that teach nothing and plays others, or None.
    mask_truncated: compares members that a limit cut with the others of their
      group, but does not train their tokens, as if these were not in the
      update: episodes that end as `truncated`, and those whose last answer
      reached a limit of tokens. DAPO's overlong filtering (arXiv 2503.14476,
      section 3.4).
    epochs: optimizer steps on the same groups. The policy that ratios are
      against stays that of `overlap.old_logprob`. For several steps on parts
      of a round see `overlap.updates_per_round`; a part has all its epochs
      before the next.
  """

  advantage: advantages.Estimator = advantages.Grpo()
  loss: losses.Loss = losses.ClippedSurrogate()
  reference: references.Reference | None = None
  dynamic_sampling: group_filters.DynamicSampling | None = None
  mask_truncated: bool = False
  epochs: int = 1
  short_name = "free"

  def validate(self) -> None:
    """Raises ValueError on parts that do not fit their place or each other."""
    _validate_protocols(self)
    super().validate()
    checks.at_least(self, 1, "epochs", where="algorithm")
    refuse = functools.partial(checks.refuse, self, where="algorithm")
    if isinstance(self.loss, losses.NegativeLogLikelihood):
      out = "use reinforce, or a warm_start to imitate an oracle"
      refuse("loss", why="imitates whatever was sampled, good or bad", out=out)
    if not self.loss.has_ratio and self.epochs > 1:
      why = "without a ratio, later epochs would take old tokens for its own"
      refuse("epochs", "loss", why=why, out="use epochs=1, or loss=cispo")
    self._validate_reference(refuse)
    reason, name = None, short_names.of(self.advantage)
    if self.advantage.min_group_size < 2:
      reason = f"advantage={name} compares no members"
    elif self.advantage.pool == "task":
      reason = f"advantage={name} compares groups of one task with each other"
    elif self.reward_kl is not None:
      reason = "a kl in the rewards makes members differ"
    if self.dynamic_sampling is not None and reason is not None:
      why = f"{reason}, so groups of equal rewards teach as others do"
      refuse("dynamic_sampling", why=why, out="use dynamic_sampling=none")

  def _validate_reference(self, refuse: Callable[..., NoReturn]) -> None:
    kl, reference = self.kl, self.reference
    teacher = "reference=teacher(model=..., directory=...)"
    if isinstance(self.advantage, token_advantages.Distillation):
      if kl is None or (kl.where, kl.estimator) != ("reward", "k1"):
        why = "it learns from the penalty of each token alone"
        out = "use kl=kl_penalty(estimator=k1, weight=1.0, where=reward)"
        refuse("advantage", "kl", why=why, out=out)
      if not isinstance(reference, references.Teacher):
        why = "it needs a teacher other than the policy"
        out = f"use {teacher}, as configs/guess_number_distill.py does"
        refuse("advantage", "reference", why=why, out=out)
    if kl is not None and reference is None:
      out = f"use reference=initial, {teacher}, or kl=none"
      refuse("kl", "reference", why="it has nothing to compare with", out=out)
    if kl is None and reference is not None:
      out = "use reference=none, or kl=kl_penalty"
      refuse("reference", "kl", why="it is scored for nothing", out=out)

  def validate_schedule(self, schedule: overlap.Overlap) -> None:
    """Raises ValueError when it cannot learn on such a schedule."""
    both = types.SimpleNamespace(algorithm=self, overlap=schedule)
    refuse = functools.partial(checks.refuse, both, where="")
    if self.advantage.scope == "batch" and schedule.streams:
      why = "gradients accumulate before all groups that it compares are ready"
      out = f"use groups_per_microbatch={schedule.groups_per_update}"
      name = "overlap.groups_per_microbatch"
      if schedule.tokens_per_microbatch is not None:
        out += " and tokens_per_microbatch=none"
        name = "overlap.tokens_per_microbatch"
      elif not schedule.max_staleness:
        out += ", or wait_for_round=true"
      names = "algorithm.advantage", name
      refuse(*names, why=why, out=out)
    correction, old = self.correction, schedule.old_logprob
    if correction is not None and not correction.compares_old:
      correction = None
    if correction is not None and old == "decode":
      way = "old_logprob=recompute"
      if schedule.max_staleness and not correction.weighs:
        # A mask alone would be refused next: it does not weigh late tokens.
        name = short_names.of(correction)
        way += f" with correction=both(first=token_truncated, second={name})"
      why = "the old policy is the one that sampled, so both are the same"
      out = f"use {way}, or correction=none: a ratio in the loss corrects too"
      refuse("algorithm.correction", "overlap.old_logprob", why=why, out=out)
    if self.loss.own_weight and old != "decode":
      why = "the loss compares with the policy that sampled, and with no other"
      out = "use old_logprob=decode"
      refuse("overlap.old_logprob", "algorithm.loss", why=why, out=out)
    # A mask alone does not say how much likelier a token has become.
    weighed = correction is not None and correction.weighs
    if not weighed:
      self._validate_late(schedule, refuse)
    several = schedule.updates_per_round > 1 and not self.loss.has_ratio
    if several and not (weighed and old == "recompute"):
      why = "without a ratio later updates would take old tokens for their own"
      out = "use updates_per_round=1, or overlap.old_logprob=recompute with "
      out += "algorithm.correction=token_truncated"
      refuse("algorithm.loss", "overlap.updates_per_round", why=why, out=out)

  def _validate_late(
    self, schedule: overlap.Overlap, refuse: Callable[..., NoReturn]
  ) -> None:
    """Refuses what would not tell late samples from fresh ones."""
    weigh = "algorithm.correction=token_truncated"
    if schedule.max_staleness and not self.loss.has_ratio:
      why = "without a ratio it would take the tokens of others for its own"
      out = f"use overlap.old_logprob=recompute with {weigh}, or loss=aipo"
      refuse("algorithm.loss", "overlap.max_staleness", why=why, out=out)
    if schedule.old_logprob == "decode":
      return
    use, cause, why = "decode", "", ""
    if schedule.on_publish == "keep_kv":
      cause = "on_publish"
      why = "no weights give log-probabilities from mixed keys and values"
    elif schedule.max_staleness:
      cause = "max_staleness"
      why = "the ratio would forget which policy sampled the tokens"
    elif schedule.old_logprob == "recompute" and schedule.updates_per_round > 1:
      cause, use = "updates_per_round", "snapshot, or old_logprob=decode"
      why = "late groups would be compared with weights trained on their round"
    if cause:
      out = f"use old_logprob={use}, or {weigh} to weigh tokens for that"
      refuse("overlap.old_logprob", f"overlap.{cause}", why=why, out=out)

  def validate_model(self, model: model_config.ModelConfig) -> None:
    """Raises ValueError when such a model has no such reference."""
    refuse = functools.partial(checks.refuse, self, "reference")
    refuse = functools.partial(refuse, where="algorithm")
    match self.reference:
      case references.Base() if model.lora is None:
        why = "it is what lies below adapters, and model.lora is none"
        refuse(why=why, out="use reference=initial")
      case references.Initial() if model.lora is not None:
        why = "it would keep a copy of what model.lora never changes"
        refuse(why=why, out="use reference=base")
      case references.Teacher(model=teacher) if teacher.lora is not None:
        why = "its model.lora is set, and a checkpoint holds no adapters"
        refuse(why=why, out="use reference.model.lora=none: export merges them")
      case references.Teacher(model=teacher):
        where = "algorithm.reference.model"
        out = "as in model, whose tokens it scores; use a teacher with as many"
        for name in ("vocab_size", "max_length"):
          least = getattr(model, name)
          checks.at_least(teacher, least, name, where=where, out=out)


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
    if (part := getattr(algorithm, name)) is None:
      continue
    setting = f"algorithm.{name}={short_names.of(part)}"
    if not annotations.is_setting(type(part)):
      raise ValueError(f"{setting} must be a frozen dataclass")
    wanted = [x for x in vars(protocol) if not x.startswith("_")]
    if missing := [x for x in wanted if not hasattr(part, x)]:
      see = f"see {annotations.path(protocol)}"
      raise ValueError(f"{setting} has no {', '.join(missing)}; {see}")
    try:
      if name == "advantage":
        found, each = part([_played(0.0), _played(1.0)]), "array a member"
        shapes = isinstance(found, result) and _shapes(found.advantages)
        fits = shapes == [(3,), (3,)]
      else:
        found, each = jax.eval_shape(part, row), "entry a token"
        fits = isinstance(found, result) and set(_shapes(found)) == {(4,)}
    except Exception as error:
      raise ValueError(f"{setting} raised {base.reason(error)}") from error
    if not fits:
      what = f"{annotations.path(result)}, each with one {each}"
      raise ValueError(
        f"{setting} does not return {what}, but {_described(found)}"
      )


def _shapes(found: Any) -> list[tuple[int, ...]]:
  return [np.shape(x) for x in jax.tree.leaves(found)]


def _described(found: Any) -> str:
  """Returns "Terms of shapes (), ()"; what was traced is an array."""
  if found is None:
    return "None"
  is_traced = isinstance(found, jax.ShapeDtypeStruct)
  kind = "an array" if is_traced else type(found).__name__
  shapes = [str(shape) for shape in _shapes(found)]
  return f"{kind} of shape{'s' * (len(shapes) != 1)} {', '.join(shapes)}"


def _played(reward: float) -> returns.EpisodeReturnInputs:
  """Returns an episode of three tokens in two turns."""
  return returns.EpisodeReturnInputs(
    reward=reward,
    turns=np.array([0, 0, 1]),
    turn_rewards=np.zeros(2),
    observations=[b"", b""],
    histories=[b"", b""],
    penalties=np.zeros(3),
    values=np.zeros(3),
  )
