"""A served model as the player of an environment, over the OpenAI API."""

from collections.abc import Mapping, Sequence
from typing import Any

from envs import base, extras
from models.chat import tool_calls
from rl.rollout import environment_trial


def player(
  base_url: str, model: str, api_key: str, max_tokens: int
) -> environment_trial.Respond:
  """Asks a server for each answer, with the environment's tools.

  Args:
    model: "" takes the first that the server lists.
    max_tokens: of one answer.

  Raises:
    ValueError: the package openai is not installed.
  """
  extras.require("openai", "openai", "a served policy")
  # Not at the top: it is optional, and other policies do without.
  import openai

  async def respond(question: environment_trial.Question) -> base.Message:
    # A client of its own: it belongs to the event loop that plays.
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
      name = model or (await client.models.list()).data[0].id
      request: dict[str, Any] = {"tools": question.tools}
      reply = await client.chat.completions.create(
        model=name,
        messages=conversation(question.messages),  # pyright: ignore
        max_tokens=max_tokens,
        seed=question.seed,
        **(request if question.tools else {}),
      )
    said = reply.choices[0].message
    calls = [
      base.ToolCall(call.function.name, call.function.arguments)
      for call in said.tool_calls or ()
      if call.type == "function"
    ]
    reasoning = getattr(said, "reasoning_content", None)
    return base.Message(
      "assistant", said.content or "", tuple(calls), reasoning
    )

  return respond


def conversation(messages: Sequence[base.Message]) -> list[Mapping[str, Any]]:
  """Returns messages as the OpenAI API takes them.

  Calls that have no id get one; a result without an id answers the first call
  that has no result yet.
  """
  shown, waiting = [], []
  for place, message in enumerate(messages):
    one: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
      one["tool_calls"] = [
        tool_calls.as_openai(
          tool_calls.Call(
            call.name, call.arguments, call.id or f"call_{place}_{i}"
          )
        )
        for i, call in enumerate(message.tool_calls)
      ]
      waiting = [call["id"] for call in one["tool_calls"]]
    if message.role == "tool":
      first = waiting.pop(0) if waiting else ""
      one["tool_call_id"] = message.tool_call_id or first
    shown.append(one)
  return shown
