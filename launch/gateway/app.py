"""The APIs of OpenAI and Anthropic over a decode engine, for ASGI servers.

  POST [/sessions/ID]/v1/chat/completions, /v1/completions, /v1/messages
  POST [/sessions/ID]/tokenize, /detokenize
  GET [/sessions/ID]/v1/models
  GET /sessions/ID    POST /sessions/ID/finish                GET /health

  _body -> chat_query -> Session.begin -> engine -> Session.record -> reply

The path names the session of a request, so that a client only needs another
base_url; the header x-session-id does the same. A request with neither gets a
session of its own. A client that disconnects aborts its requests.
"""

import asyncio
import contextlib
import dataclasses
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np
from starlette import applications, exceptions, requests, responses, routing

from launch.gateway import answers as openai_answers
from launch.gateway import (
  anthropic_messages,
  disconnect,
  http_server,
  json_fields,
  openai_replies,
  openai_requests,
  tokenization,
)
from models.chat import answer_grammar
from rl.agents import answer_stream, session_tree
from rl.agents import messages as messages_lib
from rl.agents import sessions as sessions_lib
from rl.data import trajectory
from rl.engine import contract


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
  """Settings of the server.

  Attributes:
    model: name in replies; requests may use any other, so that agents need no
      change.
    temperature: of requests without one.
    one_temperature: samples every request at `temperature`, and replies say
      so: a learner scores tokens at one temperature only.
    record_experts: records the experts that the engine chose for every id.
    answer_s: deadline of the answers to a request.
    body_s: deadline of receiving its body.
    max_body: bytes of its body.
  """

  model: str = "twinmesh"
  temperature: float = 1.0
  one_temperature: bool = False
  record_experts: bool = False
  answer_s: float = 600.0
  body_s: float = 30.0
  max_body: int = 16 << 20

  def __post_init__(self):
    if not 0 <= self.temperature < math.inf:
      raise ValueError(
        f"temperature={self.temperature} must be a finite number >= 0"
      )
    for name in ("answer_s", "body_s", "max_body"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be above 0")


def app(
  engine: answer_stream.ServedEngine,
  sessions: sessions_lib.Sessions,
  serving: Serving | None = None,
) -> applications.Starlette:
  """Returns the application; it owns neither the engine nor the sessions.

  Raises:
    ValueError: the engine cannot stop where answers of the chat end.
  """
  limit = engine.capabilities.max_stop_ids
  if len(sessions.chat.stop_ids) > limit:
    raise ValueError(
      f"answers of this chat end with {len(sessions.chat.stop_ids)} ids; the "
      f"engine takes {limit} at most"
    )
  api = _Api(engine, sessions, serving or Serving())
  post = [
    routing.Route(f"{path}/{name}", call, methods=["POST"])
    for path in ("", "/sessions/{session}")
    for name, call in (
      ("v1/chat/completions", api.chat),
      ("v1/completions", api.text),
      ("v1/messages", api.messages),
      ("tokenize", api.tokenize),
      ("detokenize", api.detokenize),
    )
  ]
  return applications.Starlette(
    routes=[
      *post,
      routing.Route("/health", api.health),
      *[
        routing.Route(f"{path}/v1/models{rest}", api.models)
        for path in ("", "/sessions/{session}")
        for rest in ("", "/{model:path}")
      ],
      routing.Route("/sessions/{session}", api.session),
      routing.Route("/sessions/{session}/finish", api.finish, methods=["POST"]),
    ],
    exception_handlers={
      kind: _on_error
      for kind in (
        *_STATUS,
        json_fields.BadRequest,
        exceptions.HTTPException,
        disconnect.ClientGone,
        Exception,
      )
    },
  )


_STATUS: dict[type[Exception], tuple[int, str]] = {
  contract.EngineClosed: (503, "engine_closed"),
  TimeoutError: (504, "timeout"),
  sessions_lib.UnknownSession: (404, "unknown_session"),
  sessions_lib.FinishedSession: (410, "finished_session"),
  sessions_lib.TooManySessions: (503, "too_many_sessions"),
}


async def _on_error(
  request: requests.Request, error: Exception
) -> responses.Response:
  if isinstance(error, disconnect.ClientGone):
    return responses.Response(status_code=499)  # The client cannot read it.
  path = request.url.path
  api = {"type": "error"} if path.endswith("/v1/messages") else {}
  if isinstance(error, json_fields.BadRequest):
    body = openai_replies.error(str(error), param=error.param, code=error.code)
    return responses.JSONResponse(api | body, error.status)
  if isinstance(error, exceptions.HTTPException):
    body = openai_replies.error(f"{request.method} {path}: {error.detail}")
    return responses.JSONResponse(api | body, error.status_code, error.headers)
  status, code = _STATUS.get(type(error), (500, "internal_error"))
  kind = "invalid_request_error" if status < 500 else "server_error"
  text = "the server failed" if status == 500 else str(error)
  body = openai_replies.error(text, kind, code=code)
  # Clients retry every 5xx by themselves, which only helps a busy server.
  retry = {} if code == "too_many_sessions" else {"x-should-retry": "false"}
  return responses.JSONResponse(api | body, status, retry)


class _Api:
  """The endpoints."""

  def __init__(
    self,
    engine: answer_stream.ServedEngine,
    sessions: sessions_lib.Sessions,
    serving: Serving,
  ):
    self._engine = engine
    self._sessions = sessions
    self._serving = serving

  async def health(self, request: requests.Request) -> responses.Response:
    """Reports that the server is up, and the version of its weights."""
    version = self._engine.stats().version
    return responses.JSONResponse({"status": "ok", "version": version})

  async def models(self, request: requests.Request) -> responses.Response:
    """Lists the only model, or describes it under any name."""
    model = {
      "id": request.path_params.get("model", self._serving.model),
      "object": "model",
      "created": 0,
      "owned_by": "twinmesh",
      "version": self._engine.stats().version,
    }
    if "model" in request.path_params:
      return responses.JSONResponse(model)
    return responses.JSONResponse({"object": "list", "data": [model]})

  async def session(self, request: requests.Request) -> responses.Response:
    """Shows an open session and its trajectories so far."""
    session = self._sessions.get(request.path_params["session"])
    ending = session_tree.Ending(status=trajectory.Status.TRUNCATED)
    branches = session.trajectories(ending) if session.num_answers else []
    return responses.JSONResponse(
      {
        "session": session.name,
        "requests": session.number,
        "running": session.running,
        "trajectories": [trajectory.trajectory_to_json(t) for t in branches],
      }
    )

  async def finish(self, request: requests.Request) -> responses.Response:
    """Ends a session; returns and records its trajectories."""
    body = await self._body(request)
    name = request.path_params["session"]
    branches = self._sessions.finish(name, openai_requests.ending(body))
    lines = [trajectory.trajectory_to_json(t) for t in branches]
    return responses.JSONResponse({"session": name, "trajectories": lines})

  async def chat(self, request: requests.Request) -> responses.Response:
    """Answers a conversation."""
    return await self._chat(request, await self._body(request))

  async def messages(self, request: requests.Request) -> responses.Response:
    """Answers a conversation of Anthropic's API."""
    body = anthropic_messages.chat_body(await self._body(request))
    as_reply = anthropic_messages.MessageFormat
    return await self._chat(request, body, as_reply)

  async def _chat(
    self,
    request: requests.Request,
    body: dict[str, Any],
    as_reply: Callable[[openai_replies.ReplyFormat], Any] = lambda own: own,
  ) -> responses.Response:
    query = openai_requests.chat_query(body)
    session = self._open(request)
    with _as_bad_request("messages"):
      opening = session.begin(query.messages, query.tools)
    constraint = await self._constraint(query.grammar)

    def parser() -> answer_stream.AnswerParser:
      return answer_stream.AnswerParser(
        self._sessions.chat,
        stops=query.sampling.stop,
        calls=query.calls,
        one_call=query.one_call,
      )

    return await self._answer(
      request,
      session,
      opening,
      query.sampling,
      parser,
      chat=True,
      constraint=constraint,
      as_reply=as_reply,
    )

  async def text(self, request: requests.Request) -> responses.Response:
    """Continues a text, or ids."""
    query = openai_requests.text_query(await self._body(request))
    session, chat = self._open(request), self._sessions.chat
    with _as_bad_request("prompt"):
      prompt = query.prompt
      if isinstance(prompt, str):
        prompt = messages_lib.text_ids(chat, prompt)
      opening = session.begin_ids(np.asarray(prompt, np.int32))

    def parser() -> answer_stream.AnswerParser:
      return answer_stream.AnswerParser(
        chat, stops=query.sampling.stop, raw=True
      )

    return await self._answer(
      request, session, opening, query.sampling, parser, chat=False
    )

  async def tokenize(self, request: requests.Request) -> responses.Response:
    """Returns the ids of a text or of a conversation, whatever was sampled."""
    body = await self._body(request)
    with _as_bad_request(), messages_lib.encoding():
      tokens = tokenization.tokens(body, self._sessions.chat)
    longest = self._engine.capabilities.max_length
    return responses.JSONResponse(
      {"tokens": tokens, "count": len(tokens), "max_model_len": longest}
    )

  async def detokenize(self, request: requests.Request) -> responses.Response:
    """Returns the text of ids."""
    body, able = await self._body(request), self._engine.capabilities
    text = tokenization.text(body, self._sessions.chat, able.vocab_size)
    return responses.JSONResponse({"prompt": text})

  async def _answer(
    self,
    request: requests.Request,
    session: session_tree.Session,
    opening: session_tree.Opening,
    sampling: openai_requests.Sampling,
    parser: Callable[[], answer_stream.AnswerParser],
    *,
    chat: bool,
    constraint: contract.TokenMatcher | None = None,
    as_reply: Callable[[openai_replies.ReplyFormat], Any] = lambda own: own,
  ) -> responses.Response:
    serving, temperature = self._serving, sampling.temperature
    if temperature is None or serving.one_temperature:
      temperature = serving.temperature
    answer_requests = openai_answers.decode_requests(
      self._engine.capabilities,
      self._sessions.chat.stop_ids,
      session,
      opening,
      sampling,
      temperature,
      serving.record_experts,
      constraint,
    )
    reply_format = openai_replies.ReplyFormat(
      name=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
      chat=chat,
      model=serving.model,
      session=session.name,
      prompt=opening.tokens,
      temperature=temperature,
      logprobs=sampling.logprobs,
      codec=self._sessions.chat,
    )
    pending = openai_answers.PendingAnswer(
      engine=self._engine,
      sessions=self._sessions,
      session=session,
      opening=opening,
      reply_format=as_reply(reply_format),
      requests=answer_requests,
      parsers=[parser() for _ in answer_requests],
      answer_s=serving.answer_s,
      include_usage=sampling.include_usage,
    )
    headers = {"x-session-id": session.name}
    with contextlib.ExitStack() as running:
      running.enter_context(session.request_running())
      if not sampling.stream:
        work = pending.reply()
        reply = await disconnect.unless_gone(request.receive, work)
        return responses.JSONResponse(reply, headers=headers)
      events = pending.events()
      await disconnect.unless_gone(request.receive, _first(events))
      return disconnect.Events(events, running.pop_all().close, headers)

  async def _constraint(
    self, grammar: answer_grammar.AnswerGrammar | None
  ) -> contract.TokenMatcher | None:
    """Returns the compiled grammar, in a thread: large ones take a while."""
    if grammar is None:
      return None
    field = "response_format" if grammar.content else "tools"
    field = "tool_choice" if grammar.call else field
    able, chat = self._engine.capabilities, self._sessions.chat
    if not able.constraints or not isinstance(chat, answer_grammar.Vocabulary):
      lacking = "tokenizer" if able.constraints else "engine"
      raise json_fields.BadRequest(
        f"{field} needs masks of ids, which this {lacking} does not have",
        field,
        "unsupported_value",
      )
    with _as_bad_request(field):
      return await asyncio.to_thread(
        answer_grammar.compiled, chat, grammar, able.vocab_size
      )

  def _open(self, request: requests.Request) -> session_tree.Session:
    path = request.path_params.get("session")
    header = request.headers.get("x-session-id")
    if path and header and path != header:
      raise json_fields.BadRequest(
        f"the path names session {path}, and x-session-id {header}; send one"
      )
    with _as_bad_request():
      return self._sessions.open(path or header)

  async def _body(self, request: requests.Request) -> dict[str, Any]:
    serving = self._serving
    return json_fields.loads(
      await http_server.body(request, serving.max_body, serving.body_s)
    )


async def _first(events: AsyncGenerator[bytes]) -> bytes:
  return await anext(events)


@contextlib.contextmanager
def _as_bad_request(param: str | None = None) -> Iterator[None]:
  """Turns a ValueError of the session into an error of the API."""
  try:
    yield
  except json_fields.BadRequest:
    raise
  except ValueError as error:
    raise json_fields.BadRequest(str(error), param) from error
