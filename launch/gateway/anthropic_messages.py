"""The Messages API of Anthropic: its requests and replies.

  body -> chat_body -> openai_requests -> .. -> MessageFormat -> reply

A request becomes one of the OpenAI API, so that both are read by one parser. A
reply has the extra fields of `openai_replies`. Thinking is a block of its own,
whose signature is empty; a budget for it is not kept, as the chat template
decides. An answer that the client has begun is refused, not continued.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launch.gateway import openai_replies, openai_requests
from launch.http import json_fields
from models.chat import tool_calls
from rl.agents import answer_stream
from rl.engine import contract

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_OTHERS = (
  *("messages", "system", "tools", "tool_choice", "stop_sequences"),
  # They identify the caller, or change nothing here.
  *("metadata", "thinking", "service_tier"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the body of /chat/completions that asks for the same.

  Raises:
    BadRequest: a field is wrong, unknown, or asks for an unsupported feature.
  """
  openai_requests.refuse_others(body, {*_SAME, *_OTHERS})
  json_fields.get(body, "max_tokens", int)
  messages = []
  system = json_fields.get(body, "system", (str, list), "")
  if system:
    messages.append({"role": "system", "content": _texts(system, "system")})
  listed = json_fields.get(body, "messages", list)
  for i, message in enumerate(listed):
    messages += _messages(message, f"messages[{i}]")
  if messages and messages[-1]["role"] == "assistant":
    where = f"messages[{len(listed) - 1}]"
    raise json_fields.BadRequest(
      f"{where} begins an answer, and this server continues none here: end "
      "with a message of the user, or continue a text with /v1/completions",
      f"{where}.role",
      "unsupported_value",
    )
  tools = json_fields.get(body, "tools", list, [])
  asked: dict[str, Any] = {
    **{name: body[name] for name in _SAME if name in body},
    "messages": messages,
    "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
    "stop": json_fields.get(body, "stop_sequences", list, []),
  }
  choice = json_fields.get(body, "tool_choice", dict, {})
  if choice:
    asked["tool_choice"] = _tool_choice(choice)
    asked["parallel_tool_calls"] = not json_fields.get(
      choice, "disable_parallel_tool_use", bool, False, "tool_choice."
    )
  return asked


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
  """Returns a message; the results of tools in it are messages of their own."""
  message = json_fields.as_object(message, where)
  role = json_fields.get(message, "role", str, where=f"{where}.")
  if role not in ("user", "assistant"):
    why = f"={json_fields.shown(role)}: use user or assistant"
    raise json_fields.wrong(f"{where}.role", why)
  blocks = json_fields.get(message, "content", (str, list), where=f"{where}.")
  if isinstance(blocks, str):
    return [{"role": role, "content": blocks}]
  if role == "assistant":
    return [_answer(blocks, f"{where}.content")]
  said, texts = [], []
  for i, block in enumerate(blocks):
    at = f"{where}.content[{i}]"
    if _kind(block, at) == "tool_result":
      said.append(_result(block, at))
    else:
      texts.append(block)
  if texts or not said:
    text = _texts(texts, f"{where}.content")
    said.append({"role": "user", "content": text})
  return said


def _answer(blocks: Sequence[Any], where: str) -> dict[str, Any]:
  texts, calls, thought = [], [], ""
  for i, block in enumerate(blocks):
    at = f"{where}[{i}]"
    match _kind(block, at):
      case "tool_use":
        given = json_fields.get(block, "input", dict, where=f"{at}.")
        name, number = (
          json_fields.get(block, key, str, where=f"{at}.")
          for key in ("name", "id")
        )
        call = tool_calls.Call(name, json.dumps(given), number)
        calls.append(tool_calls.as_openai(call))
      case "thinking":
        thought += json_fields.get(block, "thinking", str, where=f"{at}.")
      case _:
        texts.append(block)
  message = {"role": "assistant", "content": _texts(texts, where)}
  message |= {"tool_calls": calls} if calls else {}
  return message | ({"reasoning_content": thought} if thought else {})


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
  content = json_fields.get(block, "content", (str, list), "", f"{where}.")
  return {
    "role": "tool",
    "tool_call_id": json_fields.get(
      block, "tool_use_id", str, where=f"{where}."
    ),
    "content": _texts(content, f"{where}.content"),
  }


def _texts(content: Any, where: str) -> str:
  if isinstance(content, str):
    return content
  texts = []
  for i, block in enumerate(content):
    at = f"{where}[{i}]"
    if _kind(block, at) != "text":
      kind = json_fields.shown(block["type"])
      why = f" is of type {kind}: only text is supported here"
      raise json_fields.wrong(at, why)
    texts.append(json_fields.get(block, "text", str, where=f"{at}."))
  return "".join(texts)


def _tool(tool: Any, where: str) -> dict[str, Any]:
  tool = json_fields.as_object(tool, where)
  if json_fields.get(tool, "type", str, "custom", f"{where}.") != "custom":
    why = f"={json_fields.shown(tool['type'])}: this server has no tools of "
    why += "its own; send custom ones"
    raise json_fields.wrong(f"{where}.type", why)
  function = {
    "name": json_fields.get(tool, "name", str, where=f"{where}."),
    "description": json_fields.get(tool, "description", str, "", f"{where}."),
    "parameters": json_fields.get(
      tool, "input_schema", dict, where=f"{where}."
    ),
  }
  if json_fields.get(tool, "strict", bool, False, f"{where}."):
    function["strict"] = True
  return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
  kind = json_fields.get(choice, "type", str, where="tool_choice.")
  if kind == "tool":
    name = json_fields.get(choice, "name", str, where="tool_choice.")
    return {"type": "function", "function": {"name": name}}
  if kind not in _CHOICES:
    why = f"={json_fields.shown(kind)}: use {', '.join(_CHOICES)} or tool"
    raise json_fields.wrong("tool_choice.type", why)
  return _CHOICES[kind]


def _kind(block: Any, where: str) -> str:
  return json_fields.get(
    json_fields.as_object(block, where), "type", str, where=f"{where}."
  )


class MessageFormat:
  """Builds the reply to one request, whole or as server-sent events.

  Used as `openai_replies.ReplyFormat`, for one answer.

  Args:
    reply_format: of the same request.
  """

  chat = True
  done = b""

  def __init__(self, reply_format: openai_replies.ReplyFormat):
    self._format = reply_format
    self._block = ""
    self._num_blocks = 0

  def reply(
    self, choices: Sequence[openai_replies.AnswerChoice]
  ) -> dict[str, Any]:
    """Returns a reply that is not streamed."""
    (choice,) = choices
    return {
      **self._message(choice.completion),
      "content": _blocks(choice),
      **_stop(choice),
      **openai_replies.sampled(choice.completion),
      **self._format.training_fields(),
    }

  def first_chunk(self, index: int) -> bytes:
    """Returns the first event."""
    stop = {"stop_reason": None, "stop_sequence": None}
    message = {**self._message(None), "content": [], **stop}
    return _event("message_start", message=message)

  def chunk(self, index: int, delta: answer_stream.AnswerDelta) -> bytes:
    """Returns the events of a delta; empty when it adds nothing."""
    events = b""
    if delta.reasoning:
      events += self._more("thinking", delta.reasoning)
    if delta.content:
      events += self._more("text", delta.content)
    return events

  def last_chunk(
    self, index: int, choice: openai_replies.AnswerChoice
  ) -> bytes:
    """Returns the last events: calls of tools, and the end."""
    events = self._end()
    for block in _blocks(choice):
      if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        events += self._begin({**block, "input": {}})
        events += self._delta("input_json_delta", "partial_json", text)
        events += self._end()
    events += _event(
      "message_delta",
      delta=_stop(choice),
      usage=self._usage(choice.completion),
      **openai_replies.sampled(choice.completion),
      **self._format.training_fields(),
    )
    return events + _event("message_stop")

  def usage_chunk(self, completions: Sequence[contract.Completion]) -> bytes:
    """Returns nothing: the last events have the usage."""
    return b""

  def error_event(self, message: str) -> bytes:
    """Returns the event of an error after a stream has begun."""
    return _event("error", error={"type": "api_error", "message": message})

  def _more(self, kind: str, text: str) -> bytes:
    events = b""
    if self._block != kind:
      empty = {"type": kind, kind: ""}
      signature = {"signature": ""} if kind == "thinking" else {}
      events += self._end() + self._begin({**empty, **signature})
    return events + self._delta(f"{kind}_delta", kind, text)

  def _begin(self, block: Mapping[str, Any]) -> bytes:
    self._block = block["type"]
    return _event(
      "content_block_start", index=self._num_blocks, content_block=block
    )

  def _delta(self, kind: str, field: str, text: str) -> bytes:
    delta = {"type": kind, field: text}
    return _event("content_block_delta", index=self._num_blocks, delta=delta)

  def _end(self) -> bytes:
    if not self._block:
      return b""
    number, self._block = self._num_blocks, ""
    self._num_blocks += 1
    return _event("content_block_stop", index=number)

  def _message(self, completion: contract.Completion | None) -> dict[str, Any]:
    return {
      "id": self._format.name,
      "type": "message",
      "role": "assistant",
      "model": self._format.model,
      "usage": self._usage(completion),
    }

  def _usage(self, completion: contract.Completion | None) -> dict[str, int]:
    cached = 0 if completion is None else completion.cached_tokens
    return {
      "input_tokens": len(self._format.prompt) - cached,
      "cache_read_input_tokens": cached,
      "cache_creation_input_tokens": 0,
      "output_tokens": 0 if completion is None else len(completion.tokens),
    }


def _blocks(choice: openai_replies.AnswerChoice) -> list[dict[str, Any]]:
  answer, blocks = choice.answer, []
  if answer.reasoning:
    thought = {"thinking": answer.reasoning, "signature": ""}
    blocks.append({"type": "thinking", **thought})
  if answer.content:
    blocks.append({"type": "text", "text": answer.content})
  for call in answer.tool_calls:
    given = {"name": call.name, "input": json.loads(call.arguments)}
    blocks.append({"type": "tool_use", "id": call.id, **given})
  return blocks


def _stop(choice: openai_replies.AnswerChoice) -> dict[str, Any]:
  if choice.stop_text is not None:
    return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
  reason = choice.finish_reason
  return {"stop_reason": _STOPS.get(reason, reason), "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
  data = {"type": kind, **fields}
  text = json.dumps(data, ensure_ascii=False, allow_nan=False)
  return f"event: {kind}\ndata: {text}\n\n".encode()
