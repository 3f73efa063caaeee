"""Qwen3-4B on eight accelerators: find the heaviest box with a pair of scales.

python -m launch.train --config=configs/qwen3_4b.py \\
    --config.initial=models/Qwen3-4B --workdir=DIR
python -m launch.train --config=configs/qwen3_4b.py:lora --explain

The agent calls tools (`pip install 'twinmesh[tools]'`). Parameters and
optimizer are split over all eight devices, and each of them decodes with an
engine of its own.

Hardware: eight devices of 80 GiB; planned, not run. Duration: not measured.
Expected: not measured.
"""

import dataclasses
import random

from configs import qwen3_0_6b
from envs.tools import tool_environment
from models import config as model_config
from models import sharding
from rl import experiment
from rl.pools import placement
from rl.schedule import overlap

LENGTH = 8192
BOXES = "ABCDEF"


class Scales:
  """An episode with six boxes; its public methods are the tools."""

  def reset(self, seed: int) -> str:
    """Begins an episode; returns the user's message."""
    weights = [*range(len(BOXES))]
    random.Random(seed).shuffle(weights)
    self._weights = dict(zip(BOXES, weights, strict=True))
    self._chosen: str | None = None
    return (
      f"Of the boxes {', '.join(BOXES)} no two weigh the same. Weigh them in "
      "pairs, then choose the heaviest. The first choice counts."
    )

  def get_reward(self) -> float:
    """Returns 1 if the heaviest was chosen."""
    return float(self._chosen == max(BOXES, key=self._weights.__getitem__))

  def weigh(self, left: str, right: str) -> str:
    """Returns the heavier of two boxes.

    Args:
      left: letter of a box
      right: letter of another box
    """
    return max(left, right, key=self._weights.__getitem__)

  def choose(self, box: str) -> str:
    """Chooses a box.

    Args:
      box: its letter
    """
    self._chosen = self._chosen or box
    return f"You chose {self._chosen}."


SCALES = tool_environment.ToolEnvironment(
  make=Scales, max_turns=8, name="scales"
)


def get_config(trained: str = "all") -> experiment.Experiment:
  """Returns the run.

  Args:
    trained: "all" parameters, or "lora".
  """
  small = qwen3_0_6b.get_config()
  return qwen3_0_6b.trains(
    trained,
    dataclasses.replace(
      small,
      environment=SCALES,
      model=model_config.qwen3(
        "4b",
        max_length=LENGTH,
      ),
      initial="models/Qwen3-4B",
      rollout=dataclasses.replace(
        small.rollout, max_turns=8, turn_tokens=2048, max_tokens=LENGTH
      ),
      overlap=overlap.in_flight(groups_per_round=64),
      batch=experiment.BatchShape(rows=16, length=LENGTH, tail_rows=8),
      placement=placement.Placement(
        learner=placement.MeshSpec(data=8),
        decode=placement.MeshSpec(rules=sharding.DECODE),
        replicas=8,
        colocated=True,
        device_gib=80.0,
      ),
    ),
  )
