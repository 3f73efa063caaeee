"""Every preset by name and in a real run; and what does not go together."""

import asyncio
import dataclasses
import json
import math
import typing

import jax
import numpy as np
import pytest

from envs import rewards
from models import config as model_config
from models import lora
from rl import (
  algorithms,
  assemble,
  config,
  corrections,
  credit,
  engine_settings,
  events,
  filters,
  invariants,
  kl,
  ledger,
  losses,
  optimizers,
  overlap,
  progress,
  references,
  rollout,
  settings,
  testing,
  trajectory,
)

PRESETS = {kind.short_name: kind for kind in typing.get_args(algorithms.Named)}
MODEL = model_config.tiny(
  vocab_size=8,
  num_layers=1,
  d_model=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  d_ff=16,
  max_length=16,
)
ADAPTED = dataclasses.replace(MODEL, lora=lora.Lora(rank=2))
R, GROUP = 4, 4
IN_FLIGHT = overlap.in_flight(R, max_staleness=1)
CORRECTION = corrections.TokenTruncated()
DEADLINE_S = 300.0


def experiment(**changes) -> config.Experiment:
  base = config.Experiment(
    environment=testing.Counting(
      turns=2, delay_s=lambda index, step: 0.002 * (index % 5)
    ),
    reward=rewards.Outcome(),
    model=MODEL,
    optimizer=optimizers.AdamW(learning_rate=0.02),
    rollout=rollout.Rollout(group_size=GROUP, max_tokens=16),
    engine=engine_settings.EngineSettings(
      slots=32,
      row_buckets=(32,),
      chunk_buckets=(4,),
      length_buckets=(16,),
      steps_per_dispatch=1,
    ),
    overlap=overlap.sync(R),
    batch=config.BatchShape(rows=8, length=16),
    rounds=2,
    seed=3,
  )
  return dataclasses.replace(base, **changes)


def named(name: str, **changes) -> config.Experiment:
  """The experiment with a preset, as the command line would have it."""
  tree = settings.override(experiment(**changes), "algorithm", name)
  if PRESETS[name] is algorithms.Distill:
    # It has no teacher of its own.
    tree = settings.override(tree, "algorithm.reference", "initial")
  return tree


# By name.


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_name_is_valid_and_can_be_written(name):
  tree = named(name)
  assert type(tree.algorithm) is PRESETS[name]
  tree.validate()
  text = json.dumps(settings.to_json(tree.algorithm))
  assert settings.from_json(json.loads(text)) == tree.algorithm
  assert tree.algorithm.__doc__


def test_a_preset_that_is_misspelt_is_told_its_likes():
  with pytest.raises(settings.SettingError) as error:
    settings.override(experiment(), "algorithm", "grpoo")
  for name in PRESETS:
    assert name in str(error.value)


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("algorithm.loss.clip_high", "0.4", 0.4),
    ("algorithm.correction", "rl.corrections.IcePop()", corrections.IcePop()),
    (
      "algorithm.kl",
      "rl.kl.KlPenalty(weight=0.5)",
      kl.KlPenalty(weight=0.5),
    ),
    ("algorithm.reference", "initial", references.Initial()),
    ("algorithm.loss", "rl.losses.Gspo()", losses.Gspo()),
  ],
)
def test_any_part_of_a_preset_can_be_replaced(path, text, value):
  tree: typing.Any = settings.override(named("dapo"), path, text)
  for name in path.split("."):
    tree = getattr(tree, name)
  assert tree == value


# What does not go together.


def free(**parts) -> algorithms.Algorithm:
  return algorithms.Algorithm(**parts)


@pytest.mark.parametrize(
  ("algorithm", "what", "way_out"),
  [
    (free(epochs=0), "algorithm.epochs=0", "is below 1"),
    (free(kl=kl.KlPenalty()), "algorithm.kl without a ref", "kl=none"),
    (algorithms.Distill(), "algorithm.kl without a reference", "reference="),
    (
      free(reference=references.Initial()),
      "algorithm.reference=initial without a kl",
      "use reference=none, or kl=rl.kl.KlPenalty",
    ),
    (
      algorithms.Ppo(sampling=filters.DynamicSampling()),
      "sampling with advantage=Gae",
      "use sampling=none",
    ),
    (
      free(loss=losses.Aipo(), correction=CORRECTION),
      "correction=TokenTruncated with loss=Aipo",
      "use correction=none",
    ),
    (
      free(loss=losses.Topr(), correction=corrections.SequenceMasked()),
      "correction=SequenceMasked with loss=Topr",
      "use correction=none",
    ),
  ],
)
def test_parts_that_do_not_go_together_are_refused(algorithm, what, way_out):
  with pytest.raises(ValueError, match=what) as error:
    algorithm.validate()
  assert way_out in str(error.value)


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
      "overlap.old_logprob=recompute with updates_per_round=4",
      "use old_logprob=snapshot, or old_logprob=decode, or algorithm.correction"
      "=rl.corrections.TokenTruncated()",
    ),
    (
      LATE,
      "overlap.old_logprob=snapshot with max_staleness=1",
      "use old_logprob=decode, or algorithm.correction=",
    ),
    (
      MIXED,
      "overlap.old_logprob=recompute with on_publish=keep_kv",
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


def test_a_snapshot_of_the_round_that_sampled_needs_no_correction():
  schedule = dataclasses.replace(RECOMPUTED, old_logprob="snapshot")
  free().validate_schedule(schedule)


@pytest.mark.parametrize("schedule", [overlap.sync(4), IN_FLIGHT])
def test_nothing_is_weighed_twice_where_the_engine_is_the_old_policy(schedule):
  both = corrections.Both(first=CORRECTION, second=corrections.DppoMask())
  for correction in (CORRECTION, corrections.Veto(), both):
    with pytest.raises(ValueError, match="old_logprob=decode") as error:
      free(correction=correction).validate_schedule(schedule)
    assert f"={type(correction).__name__} " in str(error.value)
    assert "use old_logprob=recompute, or correction" in str(error.value)
  mask = corrections.OffPolicySequenceMask(delta=0.1)
  free(correction=mask).validate_schedule(schedule)


@pytest.mark.parametrize(
  "advantage", [credit.ReinforcePlusPlus(), credit.Gae(whitened=True)], ids=repr
)
def test_what_compares_all_groups_of_an_update_waits_for_them(advantage):
  schedule = overlap.in_flight(16, groups_per_microbatch=4)
  with pytest.raises(ValueError, match="groups_per_microbatch=4") as error:
    free(advantage=advantage).validate_schedule(schedule)
  assert "use groups_per_microbatch=16" in str(error.value)
  whole = dataclasses.replace(schedule, groups_per_microbatch=16)
  free(advantage=advantage).validate_schedule(whole)
  free().validate_schedule(schedule)


def taught(**changes) -> references.Teacher:
  return references.Teacher(
    model=dataclasses.replace(MODEL, **changes), directory="nowhere"
  )


@pytest.mark.parametrize(
  ("reference", "model", "what", "way_out"),
  [
    (references.Base(), MODEL, "model.lora is none", "use reference=initial"),
    (
      references.Initial(),
      ADAPTED,
      "reference=initial would keep a copy",
      "use reference=base",
    ),
    (
      taught(vocab_size=7),
      MODEL,
      "reference.model.vocab_size=7 is below the 8",
      "use a teacher with as many",
    ),
    (
      taught(max_length=15),
      MODEL,
      "reference.model.max_length=15 is below the 16",
      "use a teacher with as many",
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


# In a run.


@dataclasses.dataclass(eq=False)
class Ran:
  """A run that has ended; what it told an observer."""

  rounds: list[dict[str, float]] = dataclasses.field(default_factory=list)
  log: list[events.Event] = dataclasses.field(default_factory=list)
  moved: float = 0.0

  async def on_round(self, metrics, groups, values):
    self.rounds.append(dict(metrics))

  async def on_published(self, version):
    pass

  async def on_boundary(self, progress):
    pass


def run(tree: config.Experiment) -> Ran:
  async def all_of_it():
    ran, parts = Ran(), assemble.build(tree)
    try:
      async with asyncio.timeout(DEADLINE_S):
        state = await assemble.initial_state(parts)
        before = jax.device_get(state.params)
        await parts.start(state, trajectory.PolicyVersion(0))
        start = progress.beginning(state, parts.tasks.cursor)
        last = await assemble.coordinate(parts, ran).run(start)
    finally:
      await parts.close()
    ran.log = parts.log.events
    ran.moved = max(
      float(np.abs(a - b).max())
      for a, b in zip(
        jax.tree.leaves(jax.device_get(last.params)),
        jax.tree.leaves(before),
        strict=True,
      )
    )
    return ran

  return asyncio.run(all_of_it())


@pytest.mark.parametrize(
  "schedule",
  [
    overlap.sync(R),
    overlap.in_flight(R, max_staleness=1, groups_per_microbatch=R),
  ],
  ids=["sync", "in_flight"],
)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_a_real_policy_and_loses_no_token(name, schedule):
  ran = run(named(name, overlap=schedule))
  assert len(ran.rounds) == 2
  for metrics in ran.rounds:
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])
    assert metrics["skipped_updates"] == 0
    assert metrics["trained_tokens"] > 0
  # Adam's first step is its rate for whatever has a gradient.
  assert ran.moved > 0.01
  assert invariants.violations(ran.log, schedule, GROUP) == []
  booked = ledger.of(ran.log)
  assert booked.error == 0
  assert booked.trained > 0


def test_the_reward_goes_up():
  """From one word of eight to half of the answers right."""
  larger = rollout.Rollout(group_size=8, max_tokens=16)
  ran = run(named("rloo", rounds=15, rollout=larger))
  earned = [metrics["reward_mean"] for metrics in ran.rounds]
  assert np.mean(earned[:3]) < 0.2
  assert np.mean(earned[-3:]) > 0.4
