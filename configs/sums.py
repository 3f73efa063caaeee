"""A task from rows of data, complete: rows, a prompt and a grader.

python -m launch.train --config=configs/sums.py --workdir=DIR

A warm start on the rows' solutions teaches the tiny model what an answer looks
like and some arithmetic; rewards teach it some more. configs/sums.py:MODEL
starts from the Hugging Face checkpoint in the directory MODEL, with the
settings of own_data.py and no warm start.

Hardware: two CPU cores, or what MODEL needs. Duration: six minutes of CPU
time. Expected: the tiny model's success rises from 52 % to 67 % of 200 answers
in 140 rounds. They are to three questions, which is all that 30 rows hold out;
from MODEL, not measured.
"""

import dataclasses
import pathlib

from configs import tool_calculator_hf
from envs import rows, single_turn
from envs.rewards import rewards
from rl import experiment


def grade(answer: str, row) -> float:
  """Returns 1 if the last word is the sum."""
  return answer.split()[-1:] == [row["answer"]]


SUMS = single_turn.SingleTurn(
  rows=rows.Rows(data=str(pathlib.Path(__file__).with_name("sums.jsonl"))),
  prompt="{question} End with the number alone.",
  grade=grade,
  solution="answer",
)


def get_config(directory: str | None = None) -> experiment.Experiment:
  """Returns the run of tool_calculator_hf on these rows."""
  return dataclasses.replace(
    tool_calculator_hf.get_config(directory),
    environment=SUMS,
    reward=rewards.Outcome(),
  )
