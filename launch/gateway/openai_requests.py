"""Requests of the OpenAI API: JSON -> dataclasses.

Every field is read, known to change nothing, or refused by name: no option is
dropped in silence.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from envs import base
from launch.http import json_fields
from models.chat import answer_grammar
from rl.agents import session_tree
from rl.data import trajectory
from rl.settings import checks

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_BIASES = 4096
MAX_NAME = 256
"""Characters of a name or an id."""
_MAX_MISSPELT = 64

# Unsupported options, with the values at which they change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "response_format": ({"type": "text"},),
  # Of vLLM.
  "add_special_tokens": (False,),
  "continue_final_message": (False,),
  "return_token_strs": (False,),
  "repetition_penalty": (1,),
  "min_tokens": (0,),
  "ignore_eos": (False,),
  "skip_special_tokens": (True,),
  "spaces_between_special_tokens": (True, False),
  "include_stop_str_in_output": (False,),
  # Replies always have them.
  "return_token_ids": (True, False),
  "service_tier": ("auto", "default"),
  "modalities": (["text"],),
  "store": (False,),
  "best_of": (1,),
  "echo": (False,),
  "suffix": ("",),
}
# They identify the caller or the request, and do not change the answer.
_IDENTITIES = ("user", "safety_identifier", "prompt_cache_key", "metadata")
_SAMPLING = (
  *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "n"),
  *("stop", "logit_bias", "logprobs", "stream", "stream_options", "model"),
)
_CHAT = (
  *("messages", "tools", "tool_choice", "parallel_tool_calls"),
  *("max_completion_tokens", "top_logprobs", "response_format"),
)
# A function without parameters takes none.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_INDEX = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
  """Sampling and reply options; None leaves the choice to the server.

  Attributes:
    stop: the text ends before the first of these.
    choices: number of answers to the prompt.
    bias: added to the logit of an id.
    logprobs: adds OpenAI's `logprobs` field to the reply.
    top_logprobs: most probable tokens to list there beside each sampled one.
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
  top_logprobs: int
  stream: bool
  include_usage: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuery:
  """A request for the next message of a conversation.

  Attributes:
    tools: functions that the prompt shows.
    calls: parse tool calls out of the answer's text.
    one_call: an answer ends after its first call.
    grammar: the form that an answer must have.
  """

  messages: tuple[base.Message, ...]
  tools: tuple[Mapping[str, Any], ...]
  calls: bool
  one_call: bool
  grammar: answer_grammar.AnswerGrammar | None
  sampling: Sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextQuery:
  """A request to continue a text, or ids."""

  prompt: str | tuple[int, ...]
  sampling: Sampling


def chat_query(body: Mapping[str, Any]) -> ChatQuery:
  """Reads the body of /chat/completions.

  Raises:
    BadRequest: a field is wrong, unknown, or asks for an unsupported feature.
  """
  refuse_others(body, {*_SAMPLING, *_CHAT})
  listed = json_fields.get(body, "messages", list)
  if not listed:
    raise json_fields.wrong("messages", " is empty; send one at least")
  _check_number(listed, MAX_MESSAGES, "messages")
  messages = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(listed))
  listed = json_fields.get(body, "tools", list, [])
  _check_number(listed, MAX_TOOLS, "tools")
  tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed))
  choice = _tool_choice(body.get("tool_choice"), tools)
  parallel = json_fields.get(body, "parallel_tool_calls", bool, True)
  logprobs = json_fields.get(body, "logprobs", bool, False)
  top_logprobs = _num_top(body, "top_logprobs") or 0
  if top_logprobs and not logprobs:
    why = f"={top_logprobs} needs logprobs=true"
    raise json_fields.wrong("top_logprobs", why)
  limits = [
    json_fields.get(body, name, int, None)
    for name in ("max_completion_tokens", "max_tokens")
  ]
  given = [limit for limit in limits if limit is not None]
  return ChatQuery(
    messages=messages,
    tools=tools,
    calls=bool(choice.places),
    one_call=not parallel,
    grammar=_grammar(body, tools, choice, not parallel),
    sampling=_sampling(
      body, min(given) if given else None, logprobs, top_logprobs
    ),
  )


def text_query(body: Mapping[str, Any]) -> TextQuery:
  """Reads the body of /completions.

  Raises:
    BadRequest: as `chat_query`.
  """
  refuse_others(body, {*_SAMPLING, "prompt"})
  top_logprobs = _num_top(body, "logprobs")
  limit = json_fields.get(body, "max_tokens", int, None)
  return TextQuery(
    prompt=_prompt(body.get("prompt")),
    sampling=_sampling(
      body, limit, top_logprobs is not None, top_logprobs or 0
    ),
  )


def ending(body: Mapping[str, Any]) -> session_tree.Ending:
  """Reads the body of /sessions/ID/finish.

  Raises:
    BadRequest: a field is wrong or unknown.
  """
  known = [field.name for field in dataclasses.fields(session_tree.Ending)]
  for name in body:
    if name not in known:
      raise _unknown(name, known)
  parts = json_fields.get(body, "parts", dict, {})
  status = json_fields.get(body, "status", str, "completed")
  statuses = [status.value for status in trajectory.Status]
  if status not in statuses:
    why = f"={json_fields.shown(status)}: use {', '.join(statuses)}"
    raise json_fields.wrong("status", why)
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
    raise json_fields.BadRequest(str(error)) from error


def _num_top(body: Mapping[str, Any], name: str) -> int | None:
  """Returns the number of tokens to list at each place; None if not given."""
  number = json_fields.get(body, name, int, None)
  if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
    raise json_fields.wrong(
      name, f"={number} must be in [0, {MAX_TOP_LOGPROBS}]"
    )
  return number


def _prompt(prompt: Any) -> str | tuple[int, ...]:
  if isinstance(prompt, list) and len(prompt) == 1:
    # [prompt] is prompt, but [3] is the single id 3.
    prompt = prompt if json_fields.fits(prompt[0], int) else prompt[0]
  if isinstance(prompt, str):
    return prompt
  is_list = isinstance(prompt, list) and len(prompt) > 0
  if is_list and all(json_fields.fits(x, int) for x in prompt):
    if not all(0 <= x < 2**31 for x in prompt):
      raise json_fields.wrong("prompt", " holds an id outside [0, 2**31)")
    return tuple(prompt)
  why = f"={json_fields.shown(prompt)}: send one text, or its ids"
  raise json_fields.wrong("prompt", why)


def _sampling(
  body: Mapping[str, Any],
  max_tokens: int | None,
  logprobs: bool,
  top_logprobs: int,
) -> Sampling:
  # Whatever it is, the one model that is served answers.
  _name(body, "model", "", None)
  stops = json_fields.get(body, "stop", (str, list), [])
  stops = [stops] if isinstance(stops, str) else stops
  texts = all(
    isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops
  )
  if not texts or len(stops) > MAX_STOPS:
    raise json_fields.wrong(
      "stop",
      f"={json_fields.shown(stops)}: send up to {MAX_STOPS} texts of up "
      f"to {MAX_STOP_LENGTH} characters, none of them empty",
    )
  choices = json_fields.get(body, "n", int, 1)
  if not 1 <= choices <= MAX_CHOICES:
    raise json_fields.wrong("n", f"={choices} must be in [1, {MAX_CHOICES}]")
  top_k = json_fields.get(body, "top_k", int, 0)
  stream = json_fields.get(body, "stream", bool, False)
  options = json_fields.get(body, "stream_options", dict, {})
  if options and not stream:
    raise json_fields.wrong("stream_options", " needs stream=true")
  for name, value in options.items():
    if name != "include_usage" and value:
      raise _unsupported(f"stream_options.{name}", value)
  return Sampling(
    temperature=json_fields.get(body, "temperature", float, None),
    top_p=json_fields.get(body, "top_p", float, 1.0),
    top_k=0 if top_k == -1 else top_k,  # Both are all, as for vLLM.
    min_p=json_fields.get(body, "min_p", float, 0.0),
    max_tokens=max_tokens,
    stop=tuple(stops),
    seed=json_fields.get(body, "seed", int, None),
    choices=choices,
    bias=_bias(body),
    logprobs=logprobs,
    top_logprobs=top_logprobs,
    stream=stream,
    include_usage=json_fields.get(
      options, "include_usage", bool, False, "stream_options."
    ),
  )


def _bias(body: Mapping[str, Any]) -> dict[int, float]:
  bias = {}
  given = json_fields.get(body, "logit_bias", dict, {})
  _check_number(given, MAX_BIASES, "logit_bias")
  for key, value in given.items():
    index = int(key) if _INDEX.fullmatch(key) else -1
    if (
      index < 0
      or not json_fields.fits(value, float)
      or not -100 <= value <= 100
    ):
      entry = f"{{{key!r}: {json_fields.shown(value)}}}"
      why = f"={entry}: map ids to numbers in [-100, 100]"
      raise json_fields.wrong("logit_bias", why)
    bias[index] = float(value)
  return bias


def _message(data: Any, where: str) -> base.Message:
  data = json_fields.as_object(data, where)
  role = data.get("role")
  if not isinstance(role, str) or role not in base.OPENAI_ROLES:
    roles = ", ".join(base.OPENAI_ROLES)
    why = f"={json_fields.shown(role)}: use {roles}"
    raise json_fields.wrong(f"{where}.role", why)
  known = {"role", "content", "name", "tool_calls", "tool_call_id"}
  if role == "assistant":
    # The second is vLLM's name of it. In the third, litellm keeps notes of the
    # reply, and sends them with the next request.
    known |= {"reasoning_content", "reasoning", "provider_specific_fields"}
  for name, value in data.items():
    if name not in known and value not in (None, []):
      why = "cannot be shown to the model"
      raise _unsupported(f"{where}.{name}", value, why)
  calls = json_fields.get(data, "tool_calls", list, [], f"{where}.")
  if calls and role != "assistant":
    raise json_fields.BadRequest(
      f"{where}.tool_calls in a message of {role}; only assistants call", where
    )
  empty = "" if role == "assistant" else None
  text = json_fields.get(data, "content", (str, list), empty, f"{where}.")
  if text is None:
    raise json_fields.wrong(f"{where}.content", " is missing")
  if isinstance(text, list):
    text = "".join(_part(part, f"{where}.content") for part in text)
  thought, other = (
    json_fields.get(data, field, str, None, f"{where}.")
    for field in ("reasoning_content", "reasoning")
  )
  return base.Message(
    role=base.OPENAI_ROLES[role],
    content=text,
    tool_calls=tuple(_call(call, f"{where}.tool_calls") for call in calls),
    tool_call_id=_name(data, "tool_call_id", f"{where}.", None),
    name=_name(data, "name", f"{where}.", None),
    reasoning=thought or other,
  )


def _part(part: Any, where: str) -> str:
  if (text := base.part_text(part)) is not None:
    return text
  kind = part.get("type") if isinstance(part, dict) else part
  why = f" holds {json_fields.shown(kind)}: only text parts are supported"
  raise json_fields.wrong(where, why)


def _call(data: Any, where: str) -> base.ToolCall:
  function = _function(data, where, "function calls")
  return base.ToolCall(
    name=_name(function, "name", f"{where}.function."),
    arguments=json_fields.get(
      function, "arguments", str, where=f"{where}.function."
    ),
    id=_name(data, "id", f"{where}.", None),
  )


def _tool(data: Any, where: str) -> Mapping[str, Any]:
  function, where = _function(data, where, "functions"), f"{where}.function."
  _name(function, "name", where)
  parameters = json_fields.get(function, "parameters", dict, _NOTHING, where)
  strict = json_fields.get(function, "strict", bool, False, where)
  if strict and parameters.get("type") != "object":
    kind = json_fields.shown(parameters.get("type"))
    why = f'.type={kind}: arguments are an object; use "object", or leave '
    raise json_fields.wrong(f"{where}parameters", why + "strict out")
  return data


class _ToolChoice(NamedTuple):
  """The functions that an answer may call, by their places among the tools.

  Attributes:
    forced: the answer must consist of calls.
    one: it is one call.
  """

  places: Sequence[int]
  forced: bool = False
  one: bool = False


def _tool_choice(
  choice: Any, tools: Sequence[Mapping[str, Any]]
) -> _ToolChoice:
  every = range(len(tools))
  if choice in (None, "auto"):
    return _ToolChoice(every)
  if choice == "none":
    return _ToolChoice(())
  if choice == "required" and tools:
    return _ToolChoice(every, forced=True)
  if isinstance(choice, dict):
    if choice.get("type") == "function":
      place = _place(choice, "tool_choice", tools)
      return _ToolChoice([place], forced=True, one=True)
    if choice.get("type") == "allowed_tools":
      return _allowed_tools(choice, tools)
  words = "'auto', 'none', 'required', allowed_tools or one function"
  why = "needs tools" if choice == "required" else f"is unknown; use {words}"
  why = f"={json_fields.shown(choice)} {why}"
  raise json_fields.wrong("tool_choice", why, "unsupported_value")


def _allowed_tools(
  choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> _ToolChoice:
  where = "tool_choice.allowed_tools"
  allowed = json_fields.get(choice, "allowed_tools", dict, where="tool_choice.")
  mode = json_fields.get(allowed, "mode", str, where=f"{where}.")
  if mode not in ("auto", "required"):
    why = f"={json_fields.shown(mode)}: use auto or required"
    raise json_fields.wrong(f"{where}.mode", why)
  listed = json_fields.get(allowed, "tools", list, where=f"{where}.")
  if not listed:
    why = " is empty; name one or more, or use tool_choice='none'"
    raise json_fields.wrong(f"{where}.tools", why)
  places = {_place(tool, f"{where}.tools", tools) for tool in listed}
  return _ToolChoice(sorted(places), forced=mode == "required")


def _place(choice: Any, where: str, tools: Sequence[Mapping[str, Any]]) -> int:
  """Returns the place of a chosen function among the tools."""
  names = [tool["function"]["name"] for tool in tools]
  name = _function(choice, where, "functions").get("name")
  if name not in names:
    raise json_fields.BadRequest(
      f"{where}: {json_fields.shown(name)} is none of the tools"
      f"{_nearest(str(name), names)}",
      "tool_choice",
      "unsupported_value",
    )
  return names.index(name)


def _grammar(
  body: Mapping[str, Any],
  tools: Sequence[Mapping[str, Any]],
  choice: _ToolChoice,
  one_call: bool,
) -> answer_grammar.AnswerGrammar | None:
  """Returns the form that an answer must have; None if it is free."""
  content = _content_schema(
    json_fields.get(body, "response_format", dict, {"type": "text"})
  )
  functions = tuple(
    _function_schema(tool["function"], f"tools[{i}].function.parameters")
    for i, tool in enumerate(tools)
  )
  places = choice.places
  any_strict = any(tools[i]["function"].get("strict") for i in places)
  some_only = 0 < len(places) < len(tools)
  if not (choice.forced or any_strict or some_only or content):
    return None
  return answer_grammar.AnswerGrammar(
    content=content,
    functions=tuple(functions[i] for i in places),
    call=choice.forced,
    one_call=one_call or choice.one,
  )


def _function_schema(
  function: Mapping[str, Any], where: str
) -> tuple[str, answer_grammar.Schema]:
  if not function.get("strict"):
    return function["name"], answer_grammar.ANY_OBJECT
  parameters = function.get("parameters") or _NOTHING
  schema = answer_grammar.Schema(text=json.dumps(parameters), name=where)
  return function["name"], schema


def _content_schema(
  response_format: Mapping[str, Any],
) -> answer_grammar.Schema | None:
  kind, where = response_format.get("type"), "response_format"
  if kind == "text":
    return None
  if kind == "json_object":
    return answer_grammar.ANY_OBJECT
  if kind != "json_schema":
    why = f"={json_fields.shown(kind)}: use text, json_object or json_schema"
    raise json_fields.wrong(f"{where}.type", why, "unsupported_value")
  inner = json_fields.get(response_format, kind, dict, where=f"{where}.")
  where = f"{where}.{kind}."
  json_fields.get(inner, "strict", bool, False, where)
  schema = json_fields.get(inner, "schema", dict, where=where)
  return answer_grammar.Schema(text=json.dumps(schema), name=f"{where}schema")


def _name(
  data: Mapping[str, Any], name: str, where: str, *default: None
) -> Any:
  """Returns a name or an id, which is short; see `json_fields.get`."""
  found = json_fields.get(data, name, str, *default, where=where)
  if found is not None and len(found) > MAX_NAME:
    why = f" has {len(found)} characters; use {MAX_NAME} or fewer"
    raise json_fields.wrong(f"{where}{name}", why)
  return found


def _check_number(given: Sized, most: int, name: str) -> None:
  if len(given) > most:
    why = f" has {len(given)} entries; send {most} or fewer"
    raise json_fields.wrong(name, why)


def _nearest(name: str, known: Sequence[str]) -> str:
  # Looking for what is like a long name takes long.
  return checks.nearest(name, known) if len(name) <= _MAX_MISSPELT else ""


def _function(data: Any, where: str, supported: str) -> Mapping[str, Any]:
  """Returns the function of a call, or of a tool."""
  function = data.get("function") if isinstance(data, dict) else None
  if not isinstance(function, dict) or data.get("type") != "function":
    raise json_fields.wrong(where, f": only {supported} are supported")
  return function


def refuse_others(body: Mapping[str, Any], known: set[str]) -> None:
  """Raises BadRequest on a field that is neither known nor harmless."""
  for name, value in body.items():
    if name in known or name in _IDENTITIES or value is None:
      continue
    if name in _HARMLESS:
      # 0 == False in Python, but not in JSON.
      is_bool = isinstance(value, bool)
      if any(
        value == harmless
        for harmless in _HARMLESS[name]
        if is_bool is isinstance(harmless, bool)
      ):
        continue
      raise _unsupported(name, value)
    raise _unknown(name, known)


def _unsupported(
  name: str, value: Any, why: str = "is not supported"
) -> json_fields.BadRequest:
  why = f"={json_fields.shown(value)} {why}; leave it out"
  return json_fields.wrong(name, why, "unsupported_parameter")


def _unknown(name: str, known: Iterable[str]) -> json_fields.BadRequest:
  name = json_fields.cut(name, MAX_NAME)
  hint = _nearest(name, list(known))
  why = f" is unknown to this server{hint}"
  return json_fields.wrong(name, why, "unknown_parameter")
