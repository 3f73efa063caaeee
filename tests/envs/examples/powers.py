"""Questions that need a computer, and Python to answer them: complete.

python -m launch.train --config=powers.py:DIR --workdir=RUN

DIR has a Hugging Face checkpoint; without it, the tiny model shows that all
goes together.
"""

import dataclasses

from configs import tool_calculator_hf
from envs import rows
from envs.rewards import rewards
from envs.sandbox import sandbox
from envs.tools import python_tool, tool_environment
from rl import experiment


def questions():
  return [
    {
      "prompt": f"What is {n} to the power of {n}, modulo 1009?",
      "answer": str(pow(n, n, 1009)),
    }
    for n in range(2, 500)
  ]


POWERS = tool_environment.ToolEnvironment(
  toolboxes=(python_tool.Python(limits=sandbox.Sandbox(wall_s=5)),),
  rows=rows.Rows(data=questions),
  answer="answer",
  system="Compute with the tool, then say the number alone.",
  max_turns=4,
  name="powers",
)


def get_config(directory: str | None = None) -> experiment.Experiment:
  return dataclasses.replace(
    tool_calculator_hf.get_config(directory),
    environment=POWERS,
    reward=rewards.NumericMatch(),
    warm_start=None,
  )
