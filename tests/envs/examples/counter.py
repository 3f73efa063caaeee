"""A task of your own with tools, complete: a class whose methods are called.

python -m launch.train --config=counter.py --config.initial=DIR --workdir=RUN
"""

import dataclasses

from configs import guess_number_moe
from envs.tools import tool_environment
from rl import experiment


class Counter:
  def reset(self, seed: int) -> str:
    self.value, self.target = 0, seed % 6 + 1
    return f"Bring the counter to {self.target}."

  def get_reward(self) -> float:
    return float(self.value == self.target)

  def add(self, step: int) -> int:
    """Adds to the counter, and returns its value.

    Args:
      step: how much to add.
    """
    self.value += step
    return self.value


def get_config() -> experiment.Experiment:
  return dataclasses.replace(
    guess_number_moe.get_config(),
    environment=tool_environment.ToolEnvironment(make=Counter),
    warm_start=None,
  )
