"""Every preset: by name, its values and a real run.

What does not go together is in `test_algorithms_refused`.
"""

import dataclasses
import json
import math
import typing

import jax
import numpy as np
import pytest

from envs.rewards import rewards
from models import config as model_config
from models import policy as policy_lib
from models.hf import export
from rl import assemble
from rl import experiment as experiment_lib
from rl.algorithms import (
  advantages,
  corrections,
  group_filters,
  kl,
  loss_aggregation,
  losses,
  presets,
  references,
  token_advantages,
  token_selection,
  value_loss,
)
from rl.audit import checker, event_log, token_ledger
from rl.engine.builtin import settings as engine_settings
from rl.loop import progress
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.settings import overrides
from rl.testing import fakes
from rl.train import optimizers
from tests.helpers import counting_runs

PRESETS = {kind.short_name: kind for kind in typing.get_args(presets.Named)}
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
TEACHER = dataclasses.replace(MODEL, num_layers=2, d_model=32, d_ff=32)
R, GROUP = 4, 4


def experiment(**changes) -> experiment_lib.Experiment:
  base = experiment_lib.Experiment(
    environment=fakes.Counting(
      turns=2, delay_s=lambda index, step: 0.002 * (index % 5)
    ),
    reward=rewards.Outcome(),
    model=MODEL,
    optimizer=optimizers.AdamW(learning_rate=0.02),
    rollout=group_rollout.Rollout(group_size=GROUP, max_tokens=16),
    engine=engine_settings.EngineSettings(
      slots=32,
      row_buckets=(32,),
      chunk_buckets=(4,),
      steps_per_dispatch=1,
    ),
    overlap=overlap.sync(R),
    batch=experiment_lib.BatchShape(rows=8, length=16, tail_rows=None),
    rounds=2,
    seed=3,
  )
  return dataclasses.replace(base, **changes)


def named(name: str, teacher: str = "", **changes) -> experiment_lib.Experiment:
  """The experiment with a preset, as the command line would have it.

  Args:
    teacher: directory of one, for the preset that has none of its own.
  """
  tree = overrides.override(experiment(**changes), "algorithm", name)
  if PRESETS[name] is presets.Distill:
    reference = references.Teacher(model=TEACHER, directory=teacher)
    algorithm = dataclasses.replace(tree.algorithm, reference=reference)
    tree = dataclasses.replace(tree, algorithm=algorithm)
  return tree


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
  """A larger model with a strong opinion on every token."""
  directory = tmp_path_factory.mktemp("teacher") / "hf"
  params = policy_lib.of(TEACHER).init(jax.random.key(5))
  params["embed"] = 20 * params["embed"]
  export.export(directory, params, TEACHER)
  return str(directory)


# By name.


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_name_is_valid_and_can_be_written(name):
  tree = named(name)
  assert type(tree.algorithm) is PRESETS[name]
  tree.validate()
  text = json.dumps(overrides.to_json(tree.algorithm))
  assert overrides.from_json(json.loads(text)) == tree.algorithm


def test_a_preset_that_is_misspelt_is_told_its_likes():
  with pytest.raises(overrides.SettingError) as error:
    overrides.override(experiment(), "algorithm", "grpoo")
  for name in PRESETS:
    assert name in str(error.value)


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("algorithm.loss.clip_high", "0.4", 0.4),
    (
      "algorithm.correction",
      "ice_pop",
      corrections.IcePop(),
    ),
    (
      "algorithm.kl",
      "kl_penalty(weight=0.5)",
      kl.KlPenalty(weight=0.5),
    ),
    ("algorithm.reference", "initial", references.Initial()),
    ("algorithm.loss", "gspo", losses.Gspo()),
  ],
)
def test_any_part_of_a_preset_can_be_replaced(path, text, value):
  tree: typing.Any = overrides.override(named("dapo"), path, text)
  for name in path.split("."):
    tree = getattr(tree, name)
  assert tree == value


# Its values.


def parts(loss, advantage, **others):
  """All fields of a preset, of which most are as plain as can be."""
  return {
    "loss": loss,
    "advantage": advantage,
    "correction": None,
    "kl": None,
    "reference": None,
    "dynamic_sampling": None,
    "epochs": 1,
    "mask_truncated": False,
    "top_entropy_share": 1.0,
    "covariance": None,
    "value": value_loss.ValueLoss(weight=0.5, clip=0.2, through_body=True),
    "entropy_bonus": 0.0,
    "entropy_on_zero_variance": False,
    "balance_weight": 0.01,
    "z_weight": 0.0,
    **others,
  }


def surrogate(clip_high, aggregate, clip_low=0.2):
  return losses.ClippedSurrogate(
    clip_low=clip_low, clip_high=clip_high, dual_clip=None, aggregate=aggregate
  )


def reward_kl(weight):
  return kl.KlPenalty(estimator="k1", weight=weight, where="reward")


TOKENS, SEQUENCES = (
  loss_aggregation.TokenMean(),
  loss_aggregation.SequenceMean(),
)
SUM = loss_aggregation.Constant(length=1.0)
GRPO = advantages.Grpo(ddof=1, eps=1e-6)
REPLACED = group_filters.DynamicSampling(max_refills=4, min_spread=0.0)
VALUES = {
  "free": parts(surrogate(0.28, TOKENS), GRPO),
  "grpo": parts(surrogate(0.2, SEQUENCES), GRPO),
  "dr_grpo": parts(surrogate(0.2, SUM), advantages.DrGrpo()),
  "dapo": parts(surrogate(0.28, TOKENS), GRPO, dynamic_sampling=REPLACED),
  "rloo": parts(
    losses.Reinforce(aggregate=SUM), advantages.Rloo(others="group")
  ),
  "reinforce_pp": parts(
    surrogate(0.2, TOKENS),
    token_advantages.ReinforcePlusPlus(
      baseline="none", discount=1.0, over="tokens", eps=1e-8
    ),
    kl=reward_kl(0.01),
    reference=references.Initial(memory="device"),
  ),
  "ppo": parts(
    surrogate(0.2, TOKENS),
    token_advantages.Gae(discount=1.0, lambda_=0.95, whitened=False, eps=1e-8),
  ),
  "gspo": parts(
    losses.Gspo(clip_low=3e-4, clip_high=4e-4, aggregate=SEQUENCES), GRPO
  ),
  "gmpo": parts(
    losses.Gmpo(clip_low=0.4, clip_high=0.4, aggregate=SEQUENCES), GRPO
  ),
  "clip_cov": parts(
    surrogate(1.0, TOKENS, clip_low=1.0),
    GRPO,
    covariance=token_selection.ClipCov(share=2e-4, low=1.0, high=5.0),
    dynamic_sampling=REPLACED,
  ),
  "kl_cov": parts(
    surrogate(math.inf, TOKENS, clip_low=1.0),
    GRPO,
    covariance=token_selection.KlCov(share=2e-4, weight=1.0),
    dynamic_sampling=REPLACED,
  ),
  "cispo": parts(
    losses.Cispo(clip_low=None, clip_high=4.0, aggregate=TOKENS), GRPO
  ),
  "vespo": parts(
    losses.Vespo(
      k_positive=2.0,
      k_negative=3.0,
      lambda_positive=3.0,
      lambda_negative=2.0,
      aggregate=TOKENS,
    ),
    GRPO,
  ),
  "gigpo": parts(
    surrogate(0.2, TOKENS),
    token_advantages.StepGroups(
      alike="observation",
      weight=1.0,
      discount=0.95,
      normalise="std",
      eps=1e-6,
    ),
  ),
  "distill": parts(
    surrogate(0.28, TOKENS), token_advantages.Distillation(), kl=reward_kl(1.0)
  ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_values_of_its_paper(name):
  preset = PRESETS[name]()
  assert vars(preset) == VALUES[name]


# In a run.

# The presets, and with them every kind of part, that `make test` runs.
QUICK = {"grpo", "gspo", "gigpo", "distill"}


@dataclasses.dataclass(eq=False)
class Ran(progress.RunObserver):
  """A run that has ended; what it told an observer."""

  rounds: list[dict[str, float]] = dataclasses.field(default_factory=list)
  log: list[event_log.Event] = dataclasses.field(default_factory=list)
  moved: float = 0.0

  async def on_round(self, trained):
    self.rounds.append(dict(trained.metrics))


async def run(tree: experiment_lib.Experiment) -> Ran:
  ran = Ran()
  async with counting_runs.built(tree) as parts:
    start = await counting_runs.begun(parts)
    before = jax.device_get(start.state.params)
    last = await assemble.coordinate(parts, ran).run(start)
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


SYNC = overlap.sync(R)
IN_FLIGHT = overlap.in_flight(R, max_staleness=1, groups_per_microbatch=R)


@pytest.mark.compiled
@pytest.mark.parametrize(
  ("name", "schedule"),
  [
    *(
      pytest.param(
        name,
        IN_FLIGHT,
        id=f"{name}-in_flight",
        marks=[] if name in QUICK else [pytest.mark.slow],
      )
      for name in PRESETS
    ),
    # Whose own loss is for fresh tokens, and the two that score them again.
    *(
      pytest.param(
        name,
        SYNC,
        id=f"{name}-sync",
        marks=[] if name == "ppo" else [pytest.mark.slow],
      )
      for name in ("rloo", "reinforce_pp", "ppo")
    ),
  ],
)
async def test_every_preset_trains_a_real_policy_and_loses_no_token(
  name, schedule, teacher
):
  tree = named(name, teacher, overlap=schedule)
  if schedule.max_staleness and not tree.algorithm.loss.has_ratio:
    # What is late needs one.
    tree = overrides.override(tree, "algorithm.loss", "aipo")
  ran = await run(tree)
  assert len(ran.rounds) == 2
  for metrics in ran.rounds:
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])
    assert metrics["skipped_updates"] == 0
    assert metrics["trained_tokens"] > 0
  # Adam's first step is its rate for whatever has a gradient.
  assert ran.moved > 0.01
  assert checker.violations(ran.log, schedule, GROUP) == []
  ledger = token_ledger.of(ran.log)
  assert ledger.error == 0
  assert ledger.trained > 0


@pytest.mark.compiled
async def test_the_reward_goes_up():
  """From one word of eight to half of the answers right."""
  larger = group_rollout.Rollout(group_size=8, max_tokens=16)
  ran = await run(named("rloo", rounds=15, rollout=larger))
  earned = [metrics["reward_mean"] for metrics in ran.rounds]
  assert np.mean(earned[:3]) < 0.2
  assert np.mean(earned[-3:]) > 0.4
