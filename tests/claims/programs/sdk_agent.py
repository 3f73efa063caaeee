"""An agent of the OpenAI Agents SDK, with a function as its tool."""

import asyncio
import json

import agents  # pyright: ignore[reportMissingImports]
import openai


@agents.function_tool
def add(a: int, b: int) -> int:
  """Adds two numbers."""
  return a + b


async def main() -> None:
  """Runs the agent once; its reward is 1 for the right answer."""
  agents.set_tracing_disabled(True)
  model = agents.OpenAIChatCompletionsModel(
    model="policy", openai_client=openai.AsyncOpenAI()
  )
  agent = agents.Agent(
    name="adder", instructions="Use the tool.", tools=[add], model=model
  )
  result = await agents.Runner.run(agent, "What is 2 + 3?")
  print(json.dumps({"reward": float(result.final_output == "5")}))


if __name__ == "__main__":
  asyncio.run(main())
