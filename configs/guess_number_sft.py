"""Guess a number by supervised learning from an oracle, without reward.

python -m launch.train --config=configs/guess_number_sft.py --workdir=DIR
python -m launch.export --run=DIR --directory=DIR-hf

The oracle of the environment plays binary search; the policy imitates its
moves, in the learner and with the batches of every other run. The result is
a checkpoint like any other: a run with `--config.initial=DIR-hf` continues from
it by reinforcement learning. So does this run with a larger `--config.rounds`.

DIR/warm_start.jsonl has the loss and gradient norm of each step. The same
command resumes a run that was stopped or killed.

Hardware: two CPU cores. Duration: about a minute. Expected: success of 97 % or
more on held-out seeds.
"""

import dataclasses

from configs import guess_number_moe
from rl import experiment
from rl.loop import warm_start
from rl.train import optimizers


def get_config() -> experiment.Experiment:
  """Returns a run that ends with its warm start."""
  return dataclasses.replace(
    guess_number_moe.get_config(),
    warm_start=warm_start.WarmStart(
      steps=250,
      episodes=64,
      exploration=0.0,
      optimizer=optimizers.AdamW(
        learning_rate=1e-3,
        schedule=optimizers.CosineRate(
          warmup_updates=10, decay_updates=240, end=0.1
        ),
      ),
    ),
    rounds=0,
  )
