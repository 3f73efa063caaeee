"""Questions to a shop behind an MCP server, complete.

python -m launch.train --config=shop.py:DIR --workdir=RUN

DIR has a Hugging Face checkpoint; without it, the tiny model shows that all
goes together.
"""

import dataclasses
import pathlib
import sys

from configs import tool_calculator_hf
from envs import rows
from envs.rewards import rewards
from envs.tools import mcp, tool_environment
from rl import experiment

FILE = pathlib.Path(__file__).with_name("shop_server.py")


def questions():
  return [
    {
      "prompt": f"What do {n} apples and a bread cost?",
      "answer": str(3 * n + 5),
    }
    for n in range(1, 9)
  ]


SHOP = tool_environment.ToolEnvironment(
  toolboxes=(mcp.McpServer(command=(sys.executable, str(FILE))),),
  rows=rows.Rows(data=questions),
  answer="answer",
  name="shop",
)


def get_config(directory: str | None = None) -> experiment.Experiment:
  return dataclasses.replace(
    tool_calculator_hf.get_config(directory),
    environment=SHOP,
    reward=rewards.NumericMatch(),
    warm_start=None,
  )
