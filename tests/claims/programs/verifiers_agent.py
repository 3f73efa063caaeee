"""A ToolEnv of verifiers, evaluated on one example."""

import asyncio
import json
import os

import datasets  # pyright: ignore[reportMissingImports]
import verifiers  # pyright: ignore[reportMissingImports]
from verifiers import types  # pyright: ignore[reportMissingImports]


def add(a: int, b: int) -> int:
  """Adds two numbers.

  Args:
    a: the first.
    b: the second.
  """
  return a + b


def is_right(completion, answer) -> float:
  """Compares the last message with the answer."""
  return float(completion[-1]["content"].strip() == answer)


async def main() -> None:
  """Evaluates once; the mean of one reward is its reward."""
  data = datasets.Dataset.from_list(
    [{"question": "What is 2 + 3?", "answer": "5"}]
  )
  environment = verifiers.ToolEnv(
    dataset=data,
    eval_dataset=data,
    tools=[add],
    rubric=verifiers.Rubric(funcs=[is_right]),
    max_turns=4,
  )
  outputs = await environment.evaluate(
    client=types.ClientConfig(
      api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"]
    ),
    model="policy",
    num_examples=1,
    rollouts_per_example=1,
  )
  print(json.dumps({"reward": outputs["outputs"][0]["reward"]}))


if __name__ == "__main__":
  asyncio.run(main())
