"""Fine-tunes a model on your own chats, or a tiny one to try.

python -m launch.train --config=configs/sft_chats.py --workdir=DIR
python -m launch.train --config=configs/sft_chats.py:MODEL \\
    --config.data=FILE.jsonl --workdir=DIR
python -m launch.export --run=DIR --directory=DIR-hf

The first command trains a tiny model, from scratch and in whole words, on chats
that this file makes up: the user names two letters, and the agent says what
comes after each. The second trains adapters on top of MODEL, a Hugging Face
directory, with its tokenizer and chat template. Each line of FILE.jsonl is an
object with "messages" as in the OpenAI API and optionally "tools". Only the
answers are trained.

DIR/warm_start.jsonl has the loss and gradient norm of each step, and the loss
on held-out rows. The same command resumes a run that was stopped or killed.

Hardware: two CPU cores, or what MODEL needs. Duration: the first half a minute.
Expected: a loss on held-out chats below 0.01 nats a token, from 3.4 at first.
"""

import dataclasses
import itertools

from envs import recordings, rows
from envs.rewards import rewards
from models import config as model_config
from models import lora
from models.hf import config as hf_config
from rl import experiment
from rl.loop import fine_tuning
from rl.pools import placement
from rl.rollout import group_rollout
from rl.train import optimizers

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def chats() -> list[dict[str, list[dict[str, str]]]]:
  """Returns a chat of two questions for each pair of letters."""

  def turn(place: int) -> list[dict[str, str]]:
    return [
      {"role": "user", "content": LETTERS[place]},
      {"role": "assistant", "content": LETTERS[place + 1]},
    ]

  pairs = itertools.product(range(len(LETTERS) - 1), repeat=2)
  return [{"messages": turn(first) + turn(second)} for first, second in pairs]


def get_config(model: str | None = None) -> experiment.Experiment:
  """Returns a run that ends with its warm start.

  Args:
    model: a directory of Hugging Face; None trains a tiny model from scratch.
  """
  tiny = experiment.Experiment(
    environment=recordings.Chats(rows=rows.Rows(data=chats)),
    reward=rewards.Outcome(),
    model=model_config.tiny(vocab_size=29, num_layers=2, d_model=64),
    rollout=group_rollout.Rollout(group_size=8, max_tokens=64),
    batch=experiment.BatchShape(rows=8, length=64),
    warm_start=fine_tuning.FineTuning(
      epochs=8,
      optimizer=optimizers.AdamW(learning_rate=3e-3),
    ),
    evaluation=experiment.Evaluation(episodes=0),
    # The engine of rounds that may follow can have the same device.
    placement=placement.Placement(colocated=True),
    rounds=0,
  )
  if model is None:
    return tiny
  sizes = hf_config.load(model)
  length = min(2048, sizes.max_length)
  return dataclasses.replace(
    tiny,
    initial=model,
    model=dataclasses.replace(sizes, lora=lora.Lora(rank=16)),
    rollout=group_rollout.Rollout(max_tokens=length, turn_tokens=length // 4),
    batch=experiment.BatchShape(rows=8, length=length),
    warm_start=fine_tuning.FineTuning(
      epochs=2,
      optimizer=optimizers.AdamW(learning_rate=2e-4),
    ),
  )
