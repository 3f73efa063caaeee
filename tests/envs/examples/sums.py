"""A task of your own from data, complete: rows, a prompt and a grader.

python -m launch.train --config=sums.py --config.initial=DIR --workdir=RUN
"""

import dataclasses
import pathlib

from configs import guess_number_moe
from envs import rows, single_turn
from rl import experiment


def grade(answer: str, row) -> float:
  return answer.split()[-1:] == [row["answer"]]


SUMS = single_turn.SingleTurn(
  rows=rows.Rows(data=str(pathlib.Path(__file__).with_name("sums.jsonl"))),
  prompt="{question} End with the number alone.",
  grade=grade,
)


def get_config() -> experiment.Experiment:
  return dataclasses.replace(
    guess_number_moe.get_config(), environment=SUMS, warm_start=None
  )
