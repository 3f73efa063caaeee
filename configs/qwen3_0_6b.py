"""Qwen3-0.6B on one accelerator: reach a number with the numbers given.

python -m launch.train --config=configs/qwen3_0_6b.py \\
    --config.initial=models/Qwen3-0.6B --workdir=DIR
python -m launch.train --config=configs/qwen3_0_6b.py:lora --explain

`initial` is a directory with the published checkpoint. `:lora` trains only
adapters. Training and decoding share the device; the engine gets the memory
that training leaves.

Hardware: one device of 80 GiB, such as an H100; planned, not run.
Duration: not measured. Expected: not measured.
"""

import ast
import dataclasses
import fractions
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs import rows, single_turn
from envs.rewards import rewards
from models import config as model_config
from models import lora
from rl import experiment
from rl.algorithms import presets
from rl.pools import placement
from rl.rollout import chats, group_rollout
from rl.schedule import overlap
from rl.train import optimizers

LENGTH = 4096
_SIGNS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
_LONGEST = 100


def problems() -> Sequence[Mapping[str, Any]]:
  """Returns rows: four numbers, and a target that they reach."""
  return [_problem(random.Random(number)) for number in range(20_000)]


def _problem(draw: random.Random) -> Mapping[str, Any]:
  numbers = [draw.randrange(1, 50) for _ in range(4)]
  target, *others = numbers
  for number in others:
    target = draw.choice((operator.add, operator.sub))(target, number)
  draw.shuffle(numbers)
  return {"numbers": numbers, "target": target}


def grade(answer: str, row: Mapping[str, Any]) -> float:
  """Returns 1 if the last line makes the target of the numbers."""
  last = (answer.strip().splitlines() or [""])[-1].strip().strip("$`.")
  if len(last) > _LONGEST:
    return 0.0
  try:
    tree = ast.parse(last, mode="eval")
    used: list[int] = []
    value = _value(tree.body, used)
  except (SyntaxError, ValueError, ZeroDivisionError):
    return 0.0
  return float(
    value == row["target"] and sorted(used) == sorted(row["numbers"])
  )


def _value(node: ast.expr, used: list[int]) -> fractions.Fraction:
  """Returns the exact value of a formula, and adds its numbers to `used`."""
  if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
    left, right = _value(node.left, used), _value(node.right, used)
    return _SIGNS[type(node.op)](left, right)
  if isinstance(node, ast.Constant) and type(node.value) is int:
    used.append(node.value)
    return fractions.Fraction(node.value)
  raise ValueError(f"{ast.unparse(node)} is neither a number nor + - * /")


COUNTDOWN = single_turn.SingleTurn(
  rows=rows.Rows(data=problems, split_by="numbers"),
  prompt="Use each of the numbers {numbers} exactly once, with + - * / and"
  " parentheses, to make {target}. End with a line that is the formula alone.",
  grade=grade,
  name="countdown",
)


def get_config(trained: str = "all") -> experiment.Experiment:
  """Returns the run.

  Args:
    trained: "all" parameters, or "lora".
  """
  return trains(
    trained,
    experiment.Experiment(
      environment=COUNTDOWN,
      reward=rewards.Outcome(),
      model=model_config.qwen3(
        "0.6b",
        max_length=LENGTH,
      ),
      initial="models/Qwen3-0.6B",
      chat=chats.Hf(),
      rollout=group_rollout.Rollout(
        group_size=8, max_turns=1, turn_tokens=3584, max_tokens=LENGTH
      ),
      overlap=overlap.in_flight(groups_per_round=32),
      algorithm=presets.Grpo(),
      optimizer=optimizers.AdamW(learning_rate=1e-6),
      batch=experiment.BatchShape(rows=8, length=LENGTH, tail_rows=2),
      placement=placement.Placement(colocated=True, device_gib=80.0),
      evaluation=experiment.Evaluation(every=20, episodes=200),
      rounds=200,
      # A round of long answers takes minutes, and so do first programs.
      progress_timeout_s=3600.0,
    ),
  )


def trains(trained: str, run: experiment.Experiment) -> experiment.Experiment:
  """Returns a run that trains all parameters, or adapters of rank 32.

  Raises:
    ValueError: `trained` is neither "all" nor "lora".
  """
  if trained == "all":
    return run
  if trained != "lora":
    raise ValueError(f"{trained!r} is neither all nor lora")
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, lora=lora.Lora(rank=32, alpha=64.0)),
    # Adapters take about ten times the rate of whole matrices.
    optimizer=optimizers.AdamW(learning_rate=1e-5),
  )
