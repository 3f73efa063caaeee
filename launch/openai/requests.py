"""What a request in the form of the OpenAI API asks for: JSON -> dataclasses.

Every field is read, is known to change nothing, or is refused by name: a
request is never answered as something that it is not.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from launch.openai import json_fields
from models.chat import tool_calls
from rl.agents import messages as messages_lib
from rl.agents import session_tree
from rl.data import trajectory
from rl.settings import checks

MAX_CHOICES = 128
MAX_STOPS = 16

# Values at which an option that cannot be had changes nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"),
  "modalities": (["text"],),
  "store": (False,),
  "best_of": (1,),
  "echo": (False,),
  "suffix": ("",),
}
# They say who asks, which has no bearing on the answer.
_IDENTITIES = ("user", "safety_identifier")
_SAMPLING = (
  *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "n"),
  *("stop", "logit_bias", "logprobs", "stream", "stream_options", "model"),
)
_CHAT = (
  *("messages", "tools", "tool_choice", "parallel_tool_calls"),
  *("max_completion_tokens", "top_logprobs"),
)
_INDEX = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_ROLES = {
  "system": "system",
  "developer": "system",
  "user": "user",
  "assistant": "assistant",
  "tool": "tool",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
  """How answers are sampled and sent; None is the server's choice.

  Attributes:
    stop: the text ends before the first of them.
    choices: answers to the same prompt.
    bias: added to the logit of an id.
    logprobs: whether they are sent in OpenAI's form too.
  """

  temperature: float | None
  top_p: float
  top_k: int
  min_p: float
  max_tokens: int | None
  stop: tuple[str, ...]
  seed: int | None
  choices: int
  bias: Mapping[int, float]
  logprobs: bool
  stream: bool
  include_usage: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuery:
  """A conversation to go on with.

  Attributes:
    tools: functions that the prompt shows.
    calls: whether calls are taken out of the answer's text.
    one_call: an answer ends behind its first call.
  """

  messages: tuple[messages_lib.Message, ...]
  tools: tuple[Mapping[str, Any], ...]
  calls: bool
  one_call: bool
  sampling: Sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextQuery:
  """A text, or ids, to go on with."""

  prompt: str | tuple[int, ...]
  sampling: Sampling


def chat_query(body: Mapping[str, Any]) -> ChatQuery:
  """Reads the body of /chat/completions.

  Raises:
    Refused: a field is wrong, unknown, or asks for what is not to be had.
  """
  _refuse_others(body, {*_SAMPLING, *_CHAT})
  said = json_fields.get(body, "messages", list)
  if not said:
    raise json_fields.Refused(
      "messages is empty; send one at least", "messages"
    )
  messages = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(said))
  listed = json_fields.get(body, "tools", list, [])
  tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed))
  choice = body.get("tool_choice")
  if choice not in (None, "auto", "none"):
    raise json_fields.Refused(
      f"tool_choice={json_fields.shown(choice)}: sampling cannot be forced to "
      "call "
      "a tool; use 'auto' or 'none'",
      "tool_choice",
      "unsupported_value",
    )
  parallel = json_fields.get(body, "parallel_tool_calls", bool, True)
  logprobs = json_fields.get(body, "logprobs", bool, False)
  most = json_fields.get(body, "top_logprobs", int, 0)
  if most:
    raise json_fields.Refused(
      f"top_logprobs={most}: only those of sampled tokens are known; use 0",
      "top_logprobs",
      "unsupported_value",
    )
  limits = [
    json_fields.get(body, name, int, None)
    for name in ("max_completion_tokens", "max_tokens")
  ]
  known = [limit for limit in limits if limit is not None]
  return ChatQuery(
    messages=messages,
    tools=tools,
    calls=bool(tools) and choice != "none",
    one_call=not parallel,
    sampling=_sampling(body, min(known) if known else None, logprobs),
  )


def text_query(body: Mapping[str, Any]) -> TextQuery:
  """Reads the body of /completions.

  Raises:
    Refused: as `chat_query`.
  """
  _refuse_others(body, {*_SAMPLING, "prompt"})
  most = json_fields.get(body, "logprobs", int, None)
  if most:
    raise json_fields.Refused(
      f"logprobs={most}: only those of sampled tokens are known; use 0",
      "logprobs",
      "unsupported_value",
    )
  limit = json_fields.get(body, "max_tokens", int, None)
  return TextQuery(
    prompt=_prompt(body.get("prompt")),
    sampling=_sampling(body, limit, most is not None),
  )


def ending(body: Mapping[str, Any]) -> session_tree.Ending:
  """Reads the body of /sessions/ID/finish.

  Raises:
    Refused: a field is wrong or unknown.
  """
  known = [field.name for field in dataclasses.fields(session_tree.Ending)]
  for name in body:
    if name not in known:
      raise _unknown(name, known)
  parts = json_fields.get(body, "parts", dict, {})
  status = json_fields.get(body, "status", str, "completed")
  statuses = [status.value for status in trajectory.Status]
  if status not in statuses:
    raise json_fields.Refused(
      f"status={json_fields.shown(status)}: use {', '.join(statuses)}", "status"
    )
  try:
    return session_tree.Ending(
      status=trajectory.Status(status),
      reward=json_fields.get(body, "reward", float, None),
      parts={
        name: json_fields.get(parts, name, float, where="parts.")
        for name in parts
      },
      fault=json_fields.get(body, "fault", str, ""),
      task_id=json_fields.get(body, "task_id", str, ""),
      group_id=json_fields.get(body, "group_id", int, 0),
      index=json_fields.get(body, "index", int, 0),
    )
  except ValueError as error:
    raise json_fields.Refused(str(error)) from error


def _prompt(prompt: Any) -> str | tuple[int, ...]:
  if isinstance(prompt, list) and len(prompt) == 1:
    # A list of one prompt is that prompt, unless it is one id.
    prompt = prompt if json_fields.fits(prompt[0], int) else prompt[0]
  if isinstance(prompt, str):
    return prompt
  listed = isinstance(prompt, list) and len(prompt) > 0
  if listed and all(json_fields.fits(x, int) for x in prompt):
    if not all(0 <= x < 2**31 for x in prompt):
      raise json_fields.Refused(
        "prompt holds an id outside [0, 2**31)", "prompt"
      )
    return tuple(prompt)
  raise json_fields.Refused(
    f"prompt={json_fields.shown(prompt)}: send one text, or the ids of one",
    "prompt",
  )


def _sampling(
  body: Mapping[str, Any], max_tokens: int | None, logprobs: bool
) -> Sampling:
  if not isinstance(body.get("model"), str):
    raise json_fields.Refused(
      "model is missing; send a name, any will do", "model"
    )
  stops = json_fields.get(body, "stop", (str, list), [])
  stops = [stops] if isinstance(stops, str) else stops
  texts = all(isinstance(stop, str) and stop for stop in stops)
  if not texts or len(stops) > MAX_STOPS:
    raise json_fields.Refused(
      f"stop={json_fields.shown(stops)}: send up to {MAX_STOPS} texts, none of "
      "them empty",
      "stop",
    )
  choices = json_fields.get(body, "n", int, 1)
  if not 1 <= choices <= MAX_CHOICES:
    raise json_fields.Refused(f"n={choices} is not in [1, {MAX_CHOICES}]", "n")
  stream = json_fields.get(body, "stream", bool, False)
  options = json_fields.get(body, "stream_options", dict, {})
  if options and not stream:
    raise json_fields.Refused(
      "stream_options needs stream=true", "stream_options"
    )
  for name, value in options.items():
    if name != "include_usage" and value:
      raise json_fields.Refused(
        f"stream_options.{name}={json_fields.shown(value)} is not to be had",
        f"stream_options.{name}",
        "unsupported_parameter",
      )
  return Sampling(
    temperature=json_fields.get(body, "temperature", float, None),
    top_p=json_fields.get(body, "top_p", float, 1.0),
    top_k=json_fields.get(body, "top_k", int, 0),
    min_p=json_fields.get(body, "min_p", float, 0.0),
    max_tokens=max_tokens,
    stop=tuple(stops),
    seed=json_fields.get(body, "seed", int, None),
    choices=choices,
    bias=_bias(body),
    logprobs=logprobs,
    stream=stream,
    include_usage=json_fields.get(
      options, "include_usage", bool, False, "stream_options."
    ),
  )


def _bias(body: Mapping[str, Any]) -> dict[int, float]:
  bias = {}
  for key, value in json_fields.get(body, "logit_bias", dict, {}).items():
    index = int(key) if _INDEX.fullmatch(key) else -1
    if (
      index < 0
      or not json_fields.fits(value, float)
      or not -100 <= value <= 100
    ):
      raise json_fields.Refused(
        f"logit_bias={{{key!r}: {json_fields.shown(value)}}}: map ids to "
        "numbers in "
        "[-100, 100]",
        "logit_bias",
      )
    bias[index] = float(value)
  return bias


def _message(data: Any, where: str) -> messages_lib.Message:
  if not isinstance(data, dict):
    raise json_fields.Refused(
      f"{where} is a JSON {json_fields.kind_of(data)}; send an object", where
    )
  role = data.get("role")
  if not isinstance(role, str) or role not in _ROLES:
    raise json_fields.Refused(
      f"{where}.role={json_fields.shown(role)}: use {', '.join(_ROLES)}",
      f"{where}.role",
    )
  known = {"role", "content", "name", "tool_calls", "tool_call_id"}
  if role == "assistant":
    known |= {"reasoning_content"}
  for name, value in data.items():
    if name not in known and value not in (None, []):
      raise json_fields.Refused(
        f"{where}.{name}={json_fields.shown(value)} cannot be shown to the "
        "model",
        f"{where}.{name}",
        "unsupported_parameter",
      )
  calls = json_fields.get(data, "tool_calls", list, [], f"{where}.")
  if calls and role != "assistant":
    raise json_fields.Refused(
      f"{where}.tool_calls in a message of {role}", where
    )
  empty = "" if role == "assistant" else None
  text = json_fields.get(data, "content", (str, list), empty, f"{where}.")
  if text is None:
    raise json_fields.Refused(f"{where}.content is missing", f"{where}.content")
  if isinstance(text, list):
    text = "".join(_part(part, f"{where}.content") for part in text)
  return messages_lib.Message(
    role=_ROLES[role],  # pyright: ignore[reportArgumentType]
    content=text,
    tool_calls=tuple(_call(call, f"{where}.tool_calls") for call in calls),
    tool_call_id=json_fields.get(data, "tool_call_id", str, None, f"{where}."),
    name=json_fields.get(data, "name", str, None, f"{where}."),
    reasoning=json_fields.get(
      data, "reasoning_content", str, None, f"{where}."
    ),
  )


def _part(part: Any, where: str) -> str:
  fits = isinstance(part, dict) and part.get("type") == "text"
  if fits and isinstance(part.get("text"), str):
    return part["text"]
  kind = part.get("type") if isinstance(part, dict) else part
  raise json_fields.Refused(
    f"{where} holds {json_fields.shown(kind)}: only parts of text can be read",
    where,
  )


def _call(data: Any, where: str) -> tool_calls.ToolCall:
  function = data.get("function") if isinstance(data, dict) else None
  if not isinstance(function, dict) or data.get("type") != "function":
    raise json_fields.Refused(f"{where}: send calls of functions", where)
  return tool_calls.ToolCall(
    name=json_fields.get(function, "name", str, where=f"{where}.function."),
    arguments=json_fields.get(
      function, "arguments", str, where=f"{where}.function."
    ),
    id=json_fields.get(data, "id", str, None, f"{where}."),
  )


def _tool(data: Any, where: str) -> Mapping[str, Any]:
  function = data.get("function") if isinstance(data, dict) else None
  if not isinstance(function, dict) or data.get("type") != "function":
    raise json_fields.Refused(f"{where}: only functions can be called", where)
  json_fields.get(function, "name", str, where=f"{where}.function.")
  json_fields.get(function, "parameters", dict, {}, f"{where}.function.")
  if function.get("strict"):
    raise json_fields.Refused(
      f"{where}.function.strict: sampling cannot be held to a schema; leave "
      "it out",
      f"{where}.function.strict",
      "unsupported_value",
    )
  return data


def _refuse_others(body: Mapping[str, Any], known: set[str]) -> None:
  for name, value in body.items():
    if name in known or name in _IDENTITIES or value is None:
      continue
    if name in _HARMLESS:
      flag = isinstance(value, bool)
      same = [value == x for x in _HARMLESS[name] if flag is (x is False)]
      if any(same):
        continue
      raise json_fields.Refused(
        f"{name}={json_fields.shown(value)} is not supported; leave it out",
        name,
        "unsupported_parameter",
      )
    raise _unknown(name, known)


def _unknown(name: str, known: Iterable[str]) -> json_fields.Refused:
  hint = checks.nearest(name, list(known))
  return json_fields.Refused(
    f"{name} is no option of this server{hint}", name, "unknown_parameter"
  )
