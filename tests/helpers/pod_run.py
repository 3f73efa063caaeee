"""A run for a pod: Qwen3-235B-A22B on 64 chips, decoded on 32 more."""

import dataclasses

from configs import guess_number_moe
from models import config as model_config
from models import sharding
from rl import experiment as experiment_lib
from rl.engine.builtin import settings as engine_settings
from rl.pools import placement

LENGTH = 8192


def experiment() -> experiment_lib.Experiment:
  """Returns its settings, validated."""
  small = guess_number_moe.get_config()
  changed = dataclasses.replace(
    small,
    model=model_config.qwen3_moe("235b-a22b"),
    rollout=dataclasses.replace(small.rollout, max_tokens=LENGTH),
    engine=engine_settings.EngineSettings(),
    placement=placement.Placement(
      learner=placement.MeshSpec(data=8, expert=4, tensor=2),
      decode=placement.MeshSpec(expert=8, tensor=4, rules=sharding.DECODE),
    ),
    batch=experiment_lib.BatchShape(rows=64, length=LENGTH),
  )
  changed.validate()
  return changed
