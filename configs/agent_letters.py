"""Trains the model behind a program that uses the `openai` package.

python -m launch.train --config=configs/agent_letters.py --workdir=DIR

Every episode starts `configs/programs/next_letter.py` as a process, which asks
the run for its answer. The task is small, because most of the time goes into a
thousand starts of Python.

Hardware: two CPU cores. Duration: about ten minutes. Expected: success on
held-out tasks from about 0.1 to 0.9 or more.
"""

import dataclasses
import pathlib
import sys

from configs import guess_number_moe
from envs import agents
from models import config as model_config
from rl import experiment
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.train import optimizers

_PROGRAM = pathlib.Path(__file__).parent / "programs" / "next_letter.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Letters(agents.OpenAI):
  """The program, with the words of a model that has no tokenizer."""

  command: tuple[str, ...] = (sys.executable, str(_PROGRAM))
  name: str = "letters"
  words = tuple("abcd")


def get_config() -> experiment.Experiment:
  """Returns the run of guess_number_moe on this task, without a warm start."""
  return dataclasses.replace(
    guess_number_moe.get_config(),
    environment=Letters(),
    model=model_config.tiny_moe(vocab_size=7, max_length=32),
    rollout=group_rollout.Rollout(
      group_size=8, max_turns=1, turn_tokens=1, max_tokens=32
    ),
    overlap=overlap.in_flight(groups_per_round=4, max_staleness=1),
    optimizer=optimizers.AdamW(learning_rate=2e-3),
    warm_start=None,
    evaluation=experiment.Evaluation(every=0, episodes=32),
    rounds=30,
  )
