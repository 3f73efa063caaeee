"""Parts that a user writes: they work, or are refused before anything runs."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest

from envs.rewards import rewards
from models import config as model_config
from models import lora
from rl import experiment as experiment_lib
from rl.algorithms import (
  advantages,
  algorithm,
  corrections,
  group_filters,
  kl,
  loss_aggregation,
  losses,
  presets,
  references,
  token_advantages,
)
from rl.algorithms import algorithm as algorithm_lib
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.settings import short_names
from rl.testing import fakes
from twinmesh import error_codes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squared:
  """A loss as a user would write it."""

  aggregate: loss_aggregation.Aggregate = dataclasses.field(
    default_factory=loss_aggregation.TokenMean
  )
  own_weight = False
  has_ratio = True

  def __call__(self, row) -> Any:
    """Returns half the squared log ratio, weighed by the advantage."""
    gap = jnp.where(row.sampled, row.logprobs - row.old, 0.0)
    return losses.Terms(-gap * row.advantages, gap > 1)


class Bare(Squared):
  """Forgets that the terms have a name each."""

  def __call__(self, row) -> Any:
    """Returns an array."""
    return super().__call__(row).loss


class Summed(Squared):
  """Adds up what the aggregate is to add up."""

  def __call__(self, row) -> Any:
    """Returns scalars."""
    loss, clipped = super().__call__(row)
    return losses.Terms(loss.sum(), clipped.any())


class Empty(Squared):
  """Forgets to return anything."""

  def __call__(self, row) -> Any:
    """Returns nothing."""


class Plain:
  """A loss without the decorator, which no config.json can hold."""

  aggregate = loss_aggregation.TokenMean()
  own_weight = False
  has_ratio = True

  def __call__(self, row) -> Any:
    """Returns a loss that is right in itself."""
    return Squared()(row)


class Raising(Squared):
  """Fails when it is called."""

  def __call__(self, row) -> Any:
    """Returns nothing."""
    raise ValueError("boom in loss")


@dataclasses.dataclass(frozen=True)
class Nameless:
  """Says nothing of itself."""

  def __call__(self, row) -> Any:
    """Returns a loss that is right in itself."""
    return Squared()(row)


@dataclasses.dataclass(frozen=True)
class Unweighed:
  """A correction that returns only weights."""

  compares_old = True
  weighs = True

  def __call__(self, row) -> Any:
    """Returns an array."""
    return jnp.ones_like(row.logprobs)


@dataclasses.dataclass(frozen=True)
class Ranked(advantages.Estimator):
  """An estimator as a user would write it."""

  def __call__(self, members) -> Any:
    """Returns +1 for the best and -1 for the others."""
    best = max(member.reward for member in members)
    return advantages.Estimate(
      [
        (1.0 if member.reward == best else -1.0) + 0.0 * member.turns
        for member in members
      ]
    )


class Listed(Ranked):
  """Forgets the name of what it returns."""

  def __call__(self, members) -> Any:
    """Returns a list."""
    return super().__call__(members).advantages


class Single(Ranked):
  """Takes a number for an array."""

  def __call__(self, members) -> Any:
    """Returns a number a member."""
    return advantages.Estimate([member.reward for member in members])


class Alike(Ranked):
  """Takes a member for a token."""

  def __call__(self, members) -> Any:
    """Returns an entry a member."""
    found = super().__call__(members).advantages
    return advantages.Estimate([own[:1] for own in found])


def test_parts_of_ones_own_are_taken():
  parts = algorithm.Algorithm(loss=Squared(), advantage=Ranked())
  assert parts.validate() is None


def test_an_estimator_of_larger_groups_than_it_is_tried_with_is_taken():
  parts = algorithm.Algorithm(advantage=advantages.PassAtK(k=4))
  assert parts.validate() is None


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    (
      {"loss": Nameless()},
      "algorithm.loss=nameless has no own_weight, has_ratio, aggregate; see "
      "rl.algorithms.losses.Loss",
    ),
    (
      {"loss": Bare()},
      "algorithm.loss=bare does not return rl.algorithms.losses.Terms, each "
      "with one entry a token, but an array of shape (4,)",
    ),
    (
      {"loss": Summed()},
      "algorithm.loss=summed does not return rl.algorithms.losses.Terms, each "
      "with one entry a token, but Terms of shapes (), ()",
    ),
    (
      {"loss": Empty()},
      "algorithm.loss=empty does not return rl.algorithms.losses.Terms, each "
      "with one entry a token, but None",
    ),
    ({"loss": Plain()}, "algorithm.loss=plain must be a frozen dataclass"),
    (
      {"loss": Raising()},
      "algorithm.loss=raising raised ValueError: boom in loss "
      "(test_algorithm.py:",
    ),
    (
      {"correction": Unweighed()},
      "algorithm.correction=unweighed does not return "
      "rl.algorithms.corrections.Weights",
    ),
    (
      {"advantage": Listed()},
      "algorithm.advantage=listed does not return "
      "rl.algorithms.advantages.Estimate",
    ),
    (
      {"advantage": Alike()},
      "algorithm.advantage=alike does not return "
      "rl.algorithms.advantages.Estimate, each with one array a member, but "
      "Estimate of shapes (1,), (1,)",
    ),
    (
      {"advantage": Single()},
      "algorithm.advantage=single does not return "
      "rl.algorithms.advantages.Estimate, each with one array a member, but "
      "Estimate of shapes (), ()",
    ),
  ],
)
def test_what_is_no_part_is_refused(parts, message):
  made = algorithm.Algorithm()
  # The constructor checks types in tests, but not in a run.
  for name, part in parts.items():
    object.__setattr__(made, name, part)
  with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
    made.validate()


def test_what_a_part_raises_has_the_code_of_parts_that_do_not_fit():
  with pytest.raises(ValueError, match=r", in __call__\)$") as caught:
    algorithm.Algorithm(loss=Raising()).validate()
  assert error_codes.code_of(caught.value) == "TM-S08"


MODEL = model_config.tiny(
  vocab_size=8,
  num_layers=1,
  d_model=16,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  d_ff=16,
  max_length=16,
)
ADAPTED = dataclasses.replace(MODEL, lora=lora.Lora(rank=2))
IN_FLIGHT = overlap.in_flight(4, max_staleness=1)
CORRECTION = corrections.TokenTruncated()
PENALTY = kl.KlPenalty(estimator="k1", weight=1.0, where="reward")


def experiment(**changes) -> experiment_lib.Experiment:
  base = experiment_lib.Experiment(
    environment=fakes.Counting(turns=2),
    reward=rewards.Outcome(),
    model=MODEL,
    rollout=group_rollout.Rollout(group_size=4, max_tokens=16),
    engine=engine_settings.EngineSettings(),
    overlap=overlap.sync(4),
    batch=experiment_lib.BatchShape(rows=8, length=16),
  )
  return dataclasses.replace(base, **changes)


def free(**parts) -> algorithm_lib.Algorithm:
  return algorithm_lib.Algorithm(**parts)


def taught(**changes) -> references.Teacher:
  return references.Teacher(
    model=dataclasses.replace(MODEL, **changes), directory="nowhere"
  )


@pytest.mark.parametrize(
  ("algorithm", "what", "way_out"),
  [
    (free(epochs=0), "algorithm.epochs=0", "must be at least 1"),
    (
      free(kl=kl.KlPenalty()),
      "algorithm.kl=kl_penalty with reference=none",
      "kl=none",
    ),
    (
      presets.Distill(),
      "algorithm.advantage=distillation with reference=none",
      "use reference=teacher(model=",
    ),
    (
      free(reference=references.Initial()),
      "algorithm.reference=initial with kl=none",
      "use reference=none, or kl=kl_penalty",
    ),
    (
      presets.Ppo(dynamic_sampling=group_filters.DynamicSampling()),
      "algorithm.dynamic_sampling=.* advantage=gae compares no members",
      "use dynamic_sampling=none",
    ),
    (
      presets.Dapo(advantage=advantages.Rloo(others="task")),
      "dynamic_sampling=.* advantage=rloo compares groups of one task",
      "use dynamic_sampling=none",
    ),
    (
      presets.Dapo(kl=PENALTY, reference=references.Initial()),
      "algorithm.dynamic_sampling=.* a kl in the rewards makes members differ",
      "use dynamic_sampling=none",
    ),
    (
      free(loss=losses.Aipo(), correction=CORRECTION),
      "correction=token_truncated with loss=aipo",
      "use correction=none",
    ),
    (
      free(loss=losses.Topr(), correction=corrections.SequenceMasked()),
      "correction=sequence_masked with loss=topr",
      "use correction=none",
    ),
    (
      free(loss=losses.Reinforce(), epochs=4),
      "algorithm.epochs=4 with loss=reinforce: without a ratio",
      "use epochs=1, or loss=cispo",
    ),
    (
      free(loss=losses.NegativeLogLikelihood()),
      "algorithm.loss=negative_log_likelihood: imitates",
      "use reinforce, or a warm_start",
    ),
  ],
)
def test_parts_that_do_not_go_together_are_refused(algorithm, what, way_out):
  with pytest.raises(ValueError, match=what) as error:
    algorithm.validate()
  assert way_out in str(error.value)


def distilled(**changes) -> presets.Distill:
  return dataclasses.replace(presets.Distill(reference=taught()), **changes)


@pytest.mark.parametrize(
  "penalty",
  [
    None,
    kl.KlPenalty(estimator="k1", weight=1.0, where="loss"),
    *(
      dataclasses.replace(PENALTY, estimator=other)
      for other in ("k2", "k3", "k3_plus")
    ),
  ],
  ids=["none", "loss", "k2", "k3", "k3_plus"],
)
def test_a_student_learns_from_the_log_ratio_in_the_reward_alone(penalty):
  """Another estimate is never below 0, and so no token would be worth more."""
  reference = penalty and taught()
  with pytest.raises(ValueError, match="advantage=distillation") as error:
    distilled(kl=penalty, reference=reference).validate()
  out = "kl=kl_penalty(estimator=k1, weight=1.0, where=reward)"
  assert out in str(error.value)
  distilled(kl=PENALTY).validate()


@pytest.mark.parametrize("own", [references.Initial(), references.Base()])
def test_nobody_is_a_teacher_of_its_own(own):
  with pytest.raises(
    ValueError, match="needs a teacher other than the policy"
  ) as error:
    distilled(reference=own).validate()
  assert "use reference=teacher(" in str(error.value)


def test_a_loss_with_a_ratio_takes_several_epochs_and_one_without_takes_one():
  for loss, epochs in (
    (losses.ClippedSurrogate(), 4),
    (losses.Cispo(), 4),
    (losses.Reinforce(), 1),
  ):
    free(loss=loss, epochs=epochs).validate()


def test_a_mask_goes_with_a_loss_that_has_weights_of_its_own():
  free(loss=losses.Aipo(), correction=corrections.DppoMask()).validate()


RECOMPUTED = dataclasses.replace(
  overlap.sync(4, updates_per_round=4), old_logprob="recompute"
)
LATE = dataclasses.replace(IN_FLIGHT, old_logprob="snapshot")
MIXED = dataclasses.replace(
  IN_FLIGHT, old_logprob="recompute", on_publish="keep_kv"
)


@pytest.mark.parametrize(
  ("schedule", "what", "way_out"),
  [
    (
      RECOMPUTED,
      "overlap.old_logprob=recompute with overlap.updates_per_round=4",
      "use old_logprob=snapshot, or old_logprob=decode, or algorithm.correction"
      "=token_truncated",
    ),
    (
      LATE,
      "overlap.old_logprob=snapshot with overlap.max_staleness=1",
      "use old_logprob=decode, or algorithm.correction=",
    ),
    (
      MIXED,
      "overlap.old_logprob=recompute with overlap.on_publish=keep_kv",
      "mixed keys and values; use old_logprob=decode",
    ),
  ],
  ids=["recompute", "snapshot", "keep_kv"],
)
@pytest.mark.parametrize(
  "mask", [None, corrections.DppoMask()], ids=["bare", "mask"]
)
def test_a_ratio_that_forgets_who_sampled_needs_a_correction(
  schedule, what, way_out, mask
):
  with pytest.raises(ValueError, match=what) as error:
    free(correction=mask).validate_schedule(schedule)
  assert way_out in str(error.value)
  free(correction=CORRECTION).validate_schedule(schedule)
  free(correction=mask).validate_schedule(
    dataclasses.replace(schedule, old_logprob="decode")
  )


@pytest.mark.parametrize("old", ["decode", "snapshot", "recompute"])
def test_without_a_ratio_later_updates_of_a_round_need_weights(old):
  # Those of a snapshot are 1: it sampled all tokens of the round.
  several = dataclasses.replace(RECOMPUTED, old_logprob=old)
  reinforce = losses.Reinforce()
  for correction in {
    "decode": [None],
    "snapshot": [None, CORRECTION],
    "recompute": [corrections.Veto()],
  }[old]:
    with pytest.raises(ValueError, match="updates_per_round=4") as error:
      free(loss=reinforce, correction=correction).validate_schedule(several)
    assert "old_logprob=" in str(error.value)
  free(loss=reinforce, correction=CORRECTION).validate_schedule(RECOMPUTED)
  free(loss=reinforce).validate_schedule(overlap.sync(4))


@pytest.mark.parametrize(
  "mask",
  [corrections.Veto(), corrections.GeometricRejection()],
  ids=lambda mask: type(mask).__name__,
)
def test_masks_in_place_of_weights_do_not_make_up_for_a_lag(mask):
  late = dataclasses.replace(
    overlap.in_flight(4, max_staleness=4), old_logprob="recompute"
  )
  for correction in (
    mask,
    corrections.Both(first=mask, second=corrections.DppoMask()),
  ):
    with pytest.raises(ValueError, match="max_staleness=4") as error:
      free(correction=correction).validate_schedule(late)
    assert "use old_logprob=decode, or algorithm.correc" in str(error.value)
  both = corrections.Both(first=CORRECTION, second=mask)
  free(correction=both).validate_schedule(late)
  # Where nothing is late a mask alone may compare engine and learner.
  fresh = dataclasses.replace(overlap.sync(4), old_logprob="recompute")
  free(correction=mask).validate_schedule(fresh)


@pytest.mark.parametrize("old", ["recompute", "snapshot"])
@pytest.mark.parametrize("loss", [losses.Aipo(), losses.Topr()], ids=repr)
def test_nothing_is_scored_again_for_who_compares_with_the_engine(loss, old):
  schedule = dataclasses.replace(overlap.sync(4), old_logprob=old)
  with pytest.raises(ValueError, match=f"old_logprob={old} with") as error:
    free(loss=loss).validate_schedule(schedule)
  name = short_names.of(loss)
  assert f"algorithm.loss={name}: the loss compares" in str(error.value)
  assert "and with no other; use old_logprob=decode" in str(error.value)
  decoded = dataclasses.replace(schedule, old_logprob="decode")
  free(loss=loss).validate_schedule(decoded)


def test_a_snapshot_of_the_round_that_sampled_needs_no_correction():
  schedule = dataclasses.replace(RECOMPUTED, old_logprob="snapshot")
  free().validate_schedule(schedule)


@pytest.mark.parametrize("schedule", [overlap.sync(4), IN_FLIGHT])
def test_nothing_is_weighed_twice_where_the_engine_is_the_old_policy(schedule):
  both = corrections.Both(first=CORRECTION, second=corrections.DppoMask())
  for correction in (CORRECTION, corrections.Veto(), both):
    with pytest.raises(ValueError, match="old_logprob=decode") as error:
      free(correction=correction).validate_schedule(schedule)
    assert f"={short_names.of(correction)} " in str(error.value)
    assert "use old_logprob=recompute" in str(error.value)
    assert "or correction=none" in str(error.value)
  mask = corrections.OffPolicySequenceMask(delta=0.1)
  free(correction=mask).validate_schedule(schedule)


def test_a_mask_of_late_tokens_is_told_of_weights_to_go_with():
  veto = corrections.Veto()
  with pytest.raises(ValueError, match=r"second=veto") as error:
    free(correction=veto).validate_schedule(IN_FLIGHT)
  assert "both(first=token_truncated" in str(error.value)
  both = corrections.Both(first=corrections.TokenTruncated(), second=veto)
  recomputed = dataclasses.replace(IN_FLIGHT, old_logprob="recompute")
  free(correction=both).validate_schedule(recomputed)


@pytest.mark.parametrize("correction", [None, corrections.DppoMask()])
def test_a_loss_without_a_ratio_needs_weights_for_late_tokens(correction):
  plain = free(loss=losses.Reinforce(), correction=correction)
  with pytest.raises(ValueError, match=r"loss=reinforce .* a ratio") as error:
    plain.validate_schedule(IN_FLIGHT)
  assert "correction=token_truncated" in str(error.value)
  plain.validate_schedule(overlap.sync(4))
  free(loss=losses.Aipo()).validate_schedule(IN_FLIGHT)
  weighed = free(loss=losses.Reinforce(), correction=CORRECTION)
  weighed.validate_schedule(
    dataclasses.replace(IN_FLIGHT, old_logprob="recompute")
  )


@pytest.mark.parametrize(
  "advantage",
  [token_advantages.ReinforcePlusPlus(), token_advantages.Gae(whitened=True)],
  ids=repr,
)
def test_what_compares_all_groups_of_an_update_waits_for_them(advantage):
  schedule = overlap.in_flight(16, groups_per_microbatch=4)
  with pytest.raises(ValueError, match="groups_per_microbatch=4") as error:
    free(advantage=advantage).validate_schedule(schedule)
  assert "use groups_per_microbatch=16" in str(error.value)
  # To wait is refused on a schedule with a lag.
  assert "wait_for_round" not in str(error.value)
  pipelined = overlap.strict_pipeline(16, 4)
  with pytest.raises(ValueError, match="or wait_for_round=true"):
    free(advantage=advantage).validate_schedule(pipelined)
  waiting = dataclasses.replace(pipelined, wait_for_round=True)
  free(advantage=advantage).validate_schedule(waiting)
  whole = dataclasses.replace(schedule, groups_per_microbatch=16)
  free(advantage=advantage).validate_schedule(whole)
  free().validate_schedule(schedule)


@pytest.mark.parametrize(
  ("reference", "model", "what", "way_out"),
  [
    (references.Base(), MODEL, "model.lora is none", "use reference=initial"),
    (
      references.Initial(),
      ADAPTED,
      "reference=initial: it would keep a copy",
      "use reference=base",
    ),
    (
      taught(vocab_size=7),
      MODEL,
      "reference.model.vocab_size=7 must be at least 8",
      "use a teacher with as many",
    ),
    (
      taught(max_length=15),
      MODEL,
      "reference.model.max_length=15 must be at least 16",
      "use a teacher with as many",
    ),
    (
      taught(lora=ADAPTED.lora),
      ADAPTED,
      "a checkpoint holds no adapters",
      "use reference.model.lora=none",
    ),
  ],
)
def test_a_reference_that_the_model_does_not_have_is_refused(
  reference, model, what, way_out
):
  algorithm = free(reference=reference, kl=kl.KlPenalty())
  with pytest.raises(ValueError, match=what) as error:
    algorithm.validate_model(model)
  assert way_out in str(error.value)


def test_references_that_a_model_has_are_accepted():
  for reference, model in (
    (references.Initial(), MODEL),
    (references.Base(), ADAPTED),
    (taught(vocab_size=9), MODEL),
    (taught(), ADAPTED),
  ):
    free(reference=reference).validate_model(model)


def test_an_experiment_asks_all_of_its_algorithm():
  for changes, what in (
    ({"algorithm": free(epochs=0)}, "epochs=0"),
    ({"overlap": LATE}, "max_staleness=1"),
    (
      {"algorithm": free(reference=references.Base(), kl=kl.KlPenalty())},
      "model.lora",
    ),
  ):
    with pytest.raises(ValueError, match=what):
      experiment(**changes).validate()


def test_a_teacher_has_to_fit_the_mesh_of_its_student():
  split = placement.Placement(learner=placement.MeshSpec(tensor=2))
  apart = taught(num_heads=3, num_kv_heads=3, d_model=24)
  tree = experiment(placement=split, algorithm=distilled(reference=apart))
  with pytest.raises(ValueError, match="num_heads=3 does not divide") as error:
    tree.validate()
  for what in ("algorithm.reference", "placement.learner.tensor=2"):
    assert what in str(error.value)
  experiment(placement=split, algorithm=distilled()).validate()
  experiment(algorithm=distilled(reference=apart)).validate()


def test_groups_of_one_are_compared_where_a_task_is():
  tree = experiment(
    rollout=group_rollout.Rollout(group_size=1, max_tokens=16),
    algorithm=free(advantage=advantages.Rloo()),
  )
  with pytest.raises(ValueError, match=r"rollout\.group_size=1 is below the 2"):
    tree.validate()
  by_task = free(advantage=advantages.Rloo(others="task"))
  dataclasses.replace(tree, algorithm=by_task).validate()
