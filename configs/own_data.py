"""Your own questions, reward function and model, on one GPU or several.

python -m launch.train --config=configs/own_data.py:MODEL \\
    --config.data=FILE.jsonl --workdir=DIR
python -m launch.train --config=configs/own_data.py:MODEL --explain \\
    --config.placement.learner.data=8 --config.placement.replicas=8

MODEL is a Hugging Face directory, and each line of FILE.jsonl an object with
"question" and "answer". Copy this file and change the prompt and `grade`. The
first command uses one device, the second prints a plan for eight. Without
:MODEL, a tiny model with random weights shows on a CPU that everything fits
together, on the questions of sums.jsonl.

Hardware: what MODEL needs, or two CPU cores for the tiny model. Duration: not
measured. Expected: no success from the tiny model; from MODEL, not measured.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from envs import rows, single_turn
from envs.rewards import rewards
from models.hf import config as hf_config
from rl import experiment
from rl.algorithms import presets
from rl.pools import placement
from rl.rollout import chats, group_rollout
from rl.schedule import overlap
from rl.train import optimizers


def grade(answer: str, row: Mapping[str, Any]) -> float:
  """Returns 1 if the last number of the answer is the expected one."""
  numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
  return float(numbers[-1:] == [str(row["answer"])])


def get_config(model: str | None = None) -> experiment.Experiment:
  """Returns a run of GRPO with the settings that published models need.

  Args:
    model: a Hugging Face directory to start from; None is the tiny model, with
      random weights.
  """
  directory = model or str(hf_config.TINY)
  sizes = hf_config.load(directory)
  length = min(2048, sizes.max_length)
  return experiment.Experiment(
    environment=single_turn.SingleTurn(
      rows=rows.Rows(data=str(pathlib.Path(__file__).with_name("sums.jsonl"))),
      prompt="{question}\nThink step by step, and end with the number.",
      grade=grade,
    ),
    reward=rewards.Outcome(),
    model=sizes,
    initial=model,
    # Qwen3 without its long thoughts: chats.Hf(..., thinking=False).
    chat=chats.Hf(directory=directory),
    rollout=group_rollout.Rollout(
      group_size=8, max_turns=1, turn_tokens=length // 2, max_tokens=length
    ),
    overlap=overlap.in_flight(groups_per_round=32, max_staleness=1),
    algorithm=presets.Grpo(),
    # With adapters (--config.model.lora='lora(rank=32)') about 1e-5.
    optimizer=optimizers.AdamW(learning_rate=1e-6),
    batch=experiment.BatchShape(rows=8, length=length),
    placement=placement.Placement(colocated=True),
    evaluation=experiment.Evaluation(every=20, episodes=200),
    rounds=200,
    # A first round compiles, and a round of long answers takes minutes.
    progress_timeout_s=3600.0,
  )
