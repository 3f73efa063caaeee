"""The task of the migration pages: sums, with partial credit for a digit.

python -m launch.train --config=configs/migrated_sums.py --workdir=DIR

The settings are those of the scripts for TRL, Tunix and verl in
docs/migration. From random weights a run learns to begin with a digit, but not
to add. configs/migrated_sums.py:MODEL starts from the Hugging Face checkpoint
in the directory MODEL; the learning rate, 4e-3 in all four, is for random
weights, so give a published model --config.optimizer.learning_rate=1e-6.

Hardware: two CPU cores, or what MODEL needs. Duration: a minute of CPU
time, most of it for compiling. Expected: `reward_mean` rises from 0.00 to
0.20, the reward of a digit; from MODEL, not measured.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from envs import rows, single_turn
from envs.rewards import rewards
from models.hf import config as hf_config
from rl import experiment
from rl.algorithms import losses, presets
from rl.engine.builtin import settings as engine_settings
from rl.rollout import chats, group_rollout
from rl.schedule import overlap
from rl.train import optimizers


def grade(answer: str, row: Mapping[str, Any]) -> float:
  """Returns 0.2 for a digit to begin with, and 0.8 more for the sum."""
  right = answer.strip() == row["answer"]
  return 0.2 * answer[:1].isdigit() + 0.8 * right


def get_config(directory: str | None = None) -> experiment.Experiment:
  """Returns a synchronous run of GRPO.

  Args:
    directory: of a checkpoint to start from; None is the tiny model, with
      random weights.
  """
  place = directory or str(hf_config.TINY)
  return experiment.Experiment(
    environment=single_turn.SingleTurn(
      rows=rows.Rows(data=str(pathlib.Path(__file__).with_name("sums.jsonl"))),
      prompt="{question}",
      grade=grade,
    ),
    reward=rewards.Outcome(),
    model=hf_config.load(place),
    initial=directory,
    chat=chats.Hf(directory=place),
    rollout=group_rollout.Rollout(
      group_size=8, max_turns=1, turn_tokens=8, max_tokens=64
    ),
    engine=engine_settings.EngineSettings(
      slots=64, row_buckets=(64,), chunk_buckets=(32,), steps_per_dispatch=4
    ),
    overlap=overlap.sync(groups_per_round=8),
    algorithm=presets.Grpo(loss=losses.ClippedSurrogate(clip_high=0.2)),
    optimizer=optimizers.AdamW(learning_rate=4e-3),
    batch=experiment.BatchShape(rows=16, length=256),
    evaluation=experiment.Evaluation(every=0, episodes=16),
    rounds=30,
  )
