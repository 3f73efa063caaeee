"""vLLM's /tokenize and /detokenize, by the chat of the served model."""

from collections.abc import Mapping
from typing import Any

from launch.gateway import openai_requests
from launch.http import json_fields, limits
from rl.agents import messages
from rl.rollout import episode as episode_lib

_FIELDS = {"model", "prompt", "messages", "tools", "add_generation_prompt"}


def tokens(
  body: Mapping[str, Any],
  chat: episode_lib.Chat,
  bounds: limits.RequestLimits,
) -> list[int]:
  """Returns the ids of a text, or of a conversation as an answer's prompt.

  Raises:
    BadRequest: a field is wrong or unknown.
    ValueError: the chat cannot encode it.
  """
  openai_requests.refuse_others(body, _FIELDS)
  if body.get("messages") is None:
    prompt = json_fields.get(body, "prompt", str)
    bounds.check_characters(len(prompt), "prompt")
    return messages.text_ids(chat, prompt)
  asked = {name: body[name] for name in body if name in _FIELDS}
  prompts = json_fields.get(asked, "add_generation_prompt", bool, True)
  asked.pop("add_generation_prompt", None)
  query = openai_requests.chat_query(asked)
  bounds.check_messages(query.messages)
  if prompts:
    ids = messages.encode(chat, query.messages, query.tools)
  elif isinstance(chat, messages.ToolChat):
    ids = chat.open(query.messages, query.tools, prompt=False)
  else:
    raise json_fields.BadRequest(
      "add_generation_prompt=false needs the chat template of a model",
      "add_generation_prompt",
    )
  return ids.tolist()


def text(
  body: Mapping[str, Any], chat: episode_lib.Chat, vocab_size: int
) -> str:
  """Returns the text of ids; with the chat of a model special ones have theirs.

  Raises:
    BadRequest: a field is wrong or unknown.
  """
  openai_requests.refuse_others(body, {"model", "tokens"})
  ids = json_fields.get(body, "tokens", list)
  if not all(json_fields.fits(x, int) and 0 <= x < vocab_size for x in ids):
    raise json_fields.BadRequest(
      f"tokens holds what is no id in [0, {vocab_size})", "tokens"
    )
  spell = chat.spell if isinstance(chat, messages.ToolChat) else chat.decode
  return spell(ids)
