"""Your own task with tools, complete: a class whose methods are called.

python -m launch.train --config=configs/counter.py --workdir=DIR

The tiny model only shows that everything fits together: it starts from random
weights and calls no tool. configs/counter.py:MODEL starts from the Hugging Face
checkpoint in the directory MODEL, with the settings of own_data.py.

Hardware: two CPU cores, or what MODEL needs. Duration: six minutes of CPU
time. Expected: no success from the tiny model; from MODEL, not measured.
"""

import dataclasses

from configs import tool_calculator_hf
from envs.rewards import rewards
from envs.tools import tool_environment
from rl import experiment


class Counter:
  """Counts, and should be brought to a target."""

  def reset(self, seed: int) -> str:
    """Begins an episode; returns the user's message."""
    self.value, self.target = 0, seed % 6 + 1
    return f"Bring the counter to {self.target}."

  def get_reward(self) -> float:
    """Returns the reward of the episode."""
    return float(self.value == self.target)

  def add(self, step: int) -> int:
    """Adds to the counter, and returns its value.

    Args:
      step: how much to add.
    """
    self.value += step
    return self.value


def get_config(directory: str | None = None) -> experiment.Experiment:
  """Returns the run of tool_calculator_hf with this class."""
  return dataclasses.replace(
    tool_calculator_hf.get_config(directory),
    environment=tool_environment.ToolEnvironment(make=Counter, max_turns=4),
    reward=rewards.Outcome(),
    warm_start=None,
  )
