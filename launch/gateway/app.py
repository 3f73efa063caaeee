"""The APIs of OpenAI and Anthropic over a decode engine, for ASGI servers.

  POST [/sessions/ID]/v1/chat/completions, /v1/completions, /v1/messages
  POST [/sessions/ID]/tokenize, /detokenize
  GET [/sessions/ID]/v1/models
  GET /sessions/ID    POST /sessions/ID/finish
  GET /health, /ready, /metrics

  _read -> chat_query -> Session.begin -> engine -> Session.record -> reply
  '  '----- in threads, within limits -'                              '
  '         what is long, in a process                               '
  '- body_s -'---------------------- answer_s -----------------------'

The path names the session of a request, so that a client only needs another
base_url; the header x-session-id does the same. A request with neither gets a
session of its own. A client that disconnects aborts its requests.
"""

import asyncio
import contextlib
import dataclasses
import functools
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import numpy as np
from starlette import applications, requests, responses, routing

from launch.gateway import answers as openai_answers
from launch.gateway import (
  anthropic_messages,
  body_reader,
  daemon_threads,
  deadline,
  error_replies,
  gate,
  openai_replies,
  openai_requests,
  reading_process,
  server_metrics,
)
from launch.http import (
  access,
  admission,
  disconnect,
  http_server,
  json_fields,
  limits,
)
from models.chat import answer_grammar
from rl.agents import answer_stream, session_tree
from rl.agents import sessions as sessions_lib
from rl.data import trajectory
from rl.engine import contract

_T = TypeVar("_T")
# Of a request that is read and encoded fast; others do not wait for slow ones.
_SMALL = 32 << 10
# Reading more holds up the event loop, in whatever thread it is done.
_LONG = 128 << 10
# Characters that take as long as a message and its form in a template.
_A_MESSAGE = 64
_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
  """Settings of the server.

  Attributes:
    model: name in replies; requests may use any other, so that agents need no
      change.
    temperature: of requests without one.
    one_temperature: samples every request at `temperature`, and replies say
      so: a learner scores tokens at one temperature only.
    answer_s: deadline of the answers to a request, from its body on.
    body_s: deadline of receiving its body.
    max_body: bytes of its body, of which a short context allows fewer.
    max_length: ids of a conversation; None: as many as the engine takes.
    opens_sessions: for requests of any session, or of none; otherwise these
      are refused.
  """

  model: str = "twinmesh"
  temperature: float = 1.0
  one_temperature: bool = False
  answer_s: float = 600.0
  body_s: float = 30.0
  max_body: int = 16 << 20
  max_length: int | None = None
  opens_sessions: bool = True

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
  rules: access.Access | None = None,
  admitted: admission.Admission | None = None,
) -> gate.Gate:
  """Returns the application; it owns neither the engine nor the sessions.

  Args:
    rules: by default those of a server on loopback without keys.
    admitted: by default any number of requests.

  Raises:
    ValueError: the engine cannot stop where answers of the chat end.
  """
  limit = engine.capabilities.max_stop_ids
  if len(sessions.chat.stop_ids) > limit:
    raise ValueError(
      f"answers of this chat end with {len(sessions.chat.stop_ids)} ids; the "
      f"engine takes {limit} at most"
    )
  admitted = admitted or admission.Admission()
  api = _Api(engine, sessions, serving or Serving(), admitted)
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
  answering = applications.Starlette(
    routes=[
      *post,
      routing.Route("/health", api.health),
      routing.Route("/ready", api.ready),
      routing.Route(gate.METRICS, api.metrics),
      *[
        routing.Route(f"{path}/v1/models{rest}", api.models)
        for path in ("", "/sessions/{session}")
        for rest in ("", "/{model:path}")
      ],
      routing.Route("/sessions/{session}", api.session),
      routing.Route("/sessions/{session}/finish", api.finish, methods=["POST"]),
    ],
    exception_handlers=dict.fromkeys(
      error_replies.HANDLED, error_replies.reply
    ),
  )
  rules = rules or access.Access()
  return gate.Gate(answering, rules, admitted, api.counted)


class _Api:
  """The endpoints."""

  def __init__(
    self,
    engine: answer_stream.ServedEngine,
    sessions: sessions_lib.Sessions,
    serving: Serving,
    admitted: admission.Admission,
  ):
    self.counted = server_metrics.ServerMetrics()
    self._admitted = admitted
    self._engine = engine
    self._sessions = sessions
    self._serving = serving
    able = engine.capabilities
    self._limits = limits.of_chat(
      sessions.chat, serving.max_length or able.max_length, serving.max_body
    )
    self._reader = body_reader.BodyReader(
      chat=sessions.chat,
      bounds=self._limits,
      vocab_size=able.vocab_size,
      max_length=able.max_length,
    )
    self._quick, self._slow, self._long, self._forms = (
      daemon_threads.DaemonThreads(number, f"gateway-{name}")
      for name, number in (
        *(("quick", _THREADS), ("slow", _THREADS)),
        *(("long", 1), ("forms", _THREADS)),
      )
    )

  async def health(self, request: requests.Request) -> responses.Response:
    """Reports that the server is up, and the version of its weights."""
    version = self._engine.stats().version
    return responses.JSONResponse({"status": "ok", "version": version})

  async def ready(self, request: requests.Request) -> responses.Response:
    """Reports whether requests for answers are taken."""
    status = "draining" if self._admitted.draining else "ready"
    return responses.JSONResponse(
      {"status": status}, 503 if self._admitted.draining else 200
    )

  async def metrics(self, request: requests.Request) -> responses.Response:
    """Returns the counters of the server, its sessions and its engine."""
    text = self.counted.text(
      self._admitted, self._sessions, self._engine.stats()
    )
    return responses.Response(text, media_type=server_metrics.CONTENT_TYPE)

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
    name, client = request.path_params["session"], request.state.client
    session = self._sessions.get(name, client)
    ending = session_tree.Ending(status=trajectory.Status.TRUNCATED)
    branches = session.trajectories(ending) if session.num_answers else []
    self._set_deadline(request)
    return await self._shown(
      request,
      branches,
      session=session.name,
      requests=session.number,
      running=session.running,
    )

  async def finish(self, request: requests.Request) -> responses.Response:
    """Ends a session; returns and records its trajectories."""
    ending = await self._read(request, "ending")
    name = request.path_params["session"]
    branches = self._sessions.finish(name, ending, request.state.client)
    return await self._shown(request, branches, session=name)

  async def _shown(
    self,
    request: requests.Request,
    branches: Sequence[trajectory.Trajectory],
    **fields: Any,
  ) -> responses.Response:
    """Returns the reply that shows trajectories; a long session has many."""

    def reply() -> responses.Response:
      lines = [trajectory.trajectory_to_json(t) for t in branches]
      return responses.JSONResponse({**fields, "trajectories": lines})

    size = sum(len(one.ids) for one in branches)
    return await self._in_thread(request, self._pool(size), reply)

  async def chat(self, request: requests.Request) -> responses.Response:
    """Answers a conversation."""
    query = await self._read(request, "chat_query")
    return await self._chat(request, query)

  async def messages(self, request: requests.Request) -> responses.Response:
    """Answers a conversation of Anthropic's API."""
    query = await self._read(request, "message_query")
    return await self._chat(request, query, anthropic_messages.MessageFormat)

  async def _chat(
    self,
    request: requests.Request,
    query: openai_requests.ChatQuery,
    as_reply: Callable[[openai_replies.ReplyFormat], Any] = lambda own: own,
  ) -> responses.Response:
    session = self._open(request)
    number = session.take_number()
    with session.request_running(), _as_bad_request("messages"):
      size = _A_MESSAGE * len(query.messages)
      size += sum(len(message.content) for message in query.messages)
      encode = functools.partial(self._do, request, size, "encode")
      opening = await self._in_thread(
        request,
        self._pool(size),
        lambda: session.begin(query.messages, query.tools, number, encode),
      )
    constraint = await self._constraint(request, query.grammar)

    def parser() -> answer_stream.AnswerParser:
      return answer_stream.AnswerParser(
        self._sessions.chat,
        stops=query.sampling.stop,
        calls=query.calls,
        tools=query.tools,
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
    query = await self._read(request, "text_query")
    prompt, chat = query.prompt, self._sessions.chat
    session = self._open(request)
    number = session.take_number()

    def begin() -> session_tree.Opening:
      ids = prompt
      if isinstance(ids, str):
        ids = self._do(request, len(ids), "text_ids", ids)
      return session.begin_ids(np.asarray(ids, np.int32), number)

    with session.request_running(), _as_bad_request("prompt"):
      pool = self._pool(len(prompt))
      opening = await self._in_thread(request, pool, begin)

    def parser() -> answer_stream.AnswerParser:
      return answer_stream.AnswerParser(
        chat, stops=query.sampling.stop, raw=True
      )

    return await self._answer(
      request, session, opening, query.sampling, parser, chat=False
    )

  async def tokenize(self, request: requests.Request) -> responses.Response:
    """Returns the ids of a text or of a conversation, whatever was sampled."""
    with _as_bad_request():
      reply = await self._read(request, "tokenized")
    return responses.Response(reply, media_type="application/json")

  async def detokenize(self, request: requests.Request) -> responses.Response:
    """Returns the text of ids."""
    reply = await self._read(request, "detokenized")
    return responses.Response(reply, media_type="application/json")

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
    if session.temperature is not None:
      temperature = session.temperature
    answer_requests = openai_answers.decode_requests(
      self._engine.capabilities,
      self._sessions.chat.stop_ids,
      session,
      opening,
      sampling,
      temperature,
      constraint,
      field="messages" if chat else "prompt",
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
      deadline=request.state.deadline,
      include_usage=sampling.include_usage,
    )
    headers = {"x-session-id": session.name}
    with contextlib.ExitStack() as running:
      running.enter_context(session.request_running())
      running.enter_context(
        self._admitted.answering(request.state.client, len(answer_requests) - 1)
      )
      if not sampling.stream:
        work = pending.reply()
        reply = await disconnect.unless_gone(request.receive, work)
        return responses.JSONResponse(reply, headers=headers)
      events = pending.events()
      await disconnect.unless_gone(request.receive, _first(events))
      return disconnect.Events(events, running.pop_all().close, headers)

  async def _constraint(
    self,
    request: requests.Request,
    grammar: answer_grammar.AnswerGrammar | None,
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
      compiled = functools.partial(
        answer_grammar.compiled, chat, grammar, able.vocab_size
      )
      return await self._in_thread(request, self._forms, compiled)

  def _open(self, request: requests.Request) -> session_tree.Session:
    path = request.path_params.get("session")
    header = request.headers.get("x-session-id")
    if path and header and path != header:
      raise json_fields.BadRequest(
        f"the path names session {path}, and x-session-id {header}; send one"
      )
    name, client = path or header, request.state.client
    if self._serving.opens_sessions:
      with _as_bad_request():
        return self._sessions.open(name, owner=client)
    try:
      return self._sessions.get(name or "", client)
    except sessions_lib.UnknownSession:
      raise json_fields.BadRequest(
        f"no agent plays in session {name}"
      ) from None

  async def _read(self, request: requests.Request, name: str) -> Any:
    """Returns what a method of the reader makes of a body."""
    limit, seconds = self._limits.body_bytes, self._serving.body_s
    try:
      body = await http_server.body(request, limit, seconds)
      self._set_deadline(request)
      size = len(body)
      work = functools.partial(self._do, request, size, name, body)
      return await self._in_thread(request, self._pool(size), work)
    except json_fields.BadRequest as error:
      if error.status == 413 or error.code == "context_length_exceeded":
        self._note_too_long(request)
      raise

  def _note_too_long(self, request: requests.Request) -> None:
    name = request.path_params.get("session")
    name = name or request.headers.get("x-session-id", "")
    with contextlib.suppress(
      sessions_lib.UnknownSession, sessions_lib.FinishedSession
    ):
      session = self._sessions.get(name, request.state.client)
      session.was_too_long = True

  def _set_deadline(self, request: requests.Request) -> None:
    answer_s = self._serving.answer_s
    request.state.deadline = deadline.Deadline.after(answer_s)

  def _do(
    self, request: requests.Request, size: int, name: str, *arguments: Any
  ) -> Any:
    """Calls a method of the reader, in the thread of `_pool`."""
    process = self._process if size > _LONG else None
    if process is None:
      return getattr(self._reader, name)(*arguments)
    left_s = request.state.deadline.left_s
    return process.call(name, *arguments, within_s=left_s)

  @functools.cached_property
  def _process(self) -> reading_process.ReadingProcess | None:
    """Reads what is long; None with a chat that cannot be pickled."""
    process = reading_process.ReadingProcess(self._reader)
    return process if process.takes_chat() else None

  def _pool(self, size: int) -> futures.Executor:
    if size <= _SMALL:
      return self._quick
    return self._slow if size <= _LONG else self._long

  async def _in_thread(
    self,
    request: requests.Request,
    pool: futures.Executor,
    work: Callable[[], _T],
  ) -> _T:
    """Returns what `work` returns, for which a request waits.

    Once nobody waits, it is not begun; what has begun keeps its thread until it
    ends, so that no more of it runs at once.

    Raises:
      ClientGone: the client disconnected.
      TimeoutError: the deadline of the request passed.
    """

    async def done() -> _T:
      return await asyncio.get_running_loop().run_in_executor(pool, work)

    async with request.state.deadline.kept():
      return await disconnect.unless_gone(request.receive, done())


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
