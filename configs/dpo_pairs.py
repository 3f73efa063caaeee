"""Trains a model by DPO on pairs of answers, one of which is preferred.

python -m launch.train --config=configs/dpo_pairs.py --workdir=DIR
python -m launch.train --config=configs/dpo_pairs.py:MODEL \\
    --config.data=FILE.jsonl --workdir=DIR
python -m launch.export --run=DIR --directory=DIR-hf

The first command trains a tiny model from scratch on pairs that this file makes
up: the preferred answer to a letter is the next one, the rejected answer the
one before. The second trains adapters on top of MODEL, a Hugging Face directory
that is also the reference. Each line of FILE.jsonl is an object with "prompt",
"chosen" and "rejected", each a text or a list of messages as in the OpenAI API.
If "chosen" and "rejected" are whole conversations, add
--config.environment.prompt=none.

DIR/warm_start.jsonl has a line per step with loss, accuracy and margin, and
those of held-out pairs.

Hardware: two CPU cores, or what MODEL needs. Duration: the first half a minute.
Expected: in 98 % of held-out pairs or more the policy favours the preferred
answer by more than the reference does. The loss begins at ln 2.
"""

import dataclasses

from configs import sft_chats
from envs import recordings, rows
from rl import experiment
from rl.algorithms import preference_loss
from rl.loop import fine_tuning
from rl.train import optimizers


def pairs() -> list[dict[str, str]]:
  """Returns a pair for each two letters; the second is the one that counts."""
  letters = sft_chats.LETTERS
  return [
    {
      "prompt": f"{first} {letters[place]}",
      "chosen": letters[place + 1],
      "rejected": letters[place - 1],
    }
    for first in letters
    for place in range(1, len(letters) - 1)
  ]


def get_config(model: str | None = None) -> experiment.Experiment:
  """Returns the run of sft_chats on pairs.

  Args:
    model: a directory of Hugging Face; None trains a tiny model from scratch.
  """
  base = sft_chats.get_config(model)
  rate = 1e-3 if model is None else 5e-6
  return dataclasses.replace(
    base,
    environment=recordings.Pairs(rows=rows.Rows(data=pairs)),
    warm_start=fine_tuning.FineTuning(
      loss=preference_loss.Dpo(),
      epochs=2,
      optimizer=optimizers.AdamW(learning_rate=rate),
      eval_every=10,
    ),
  )
