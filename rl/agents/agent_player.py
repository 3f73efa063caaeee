"""Plays the agents of a run: programs that ask for their answers over HTTP.

  play: Sessions.open -> run(endpoint) -> its end, or a deadline -> trajectory
          ^                  |
          |                  v
          |      HTTP server of the run -> _Asked.generate / stream
          |                                     |
          +-- Session.record <- MemberRequests <+

The server listens on loopback, from the first agent on until `close`.
"""

import asyncio
import contextlib
import dataclasses
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator

from envs import base
from rl.agents import answer_stream, messages, session_tree
from rl.agents import sessions as sessions_lib
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.rollout import member_requests
from rl.runtime import isolation

Gateway = Callable[
  [answer_stream.ServedEngine, sessions_lib.Sessions, int],
  contextlib.AbstractAsyncContextManager[str],
]
"""Serves an engine on loopback; yields the address of the server.

Conversations of requests have up to so many ids, the last argument.
"""

_NOT_IN_NAMES = re.compile(r"[^\w.:~@=+-]", re.ASCII)
_MAX_SESSIONS = 65_536
_ANY_LENGTH = 2**30


class AgentPlayer:
  """Plays agents, each in a session of its own; all on one event loop.

  `play` is called for every episode, `close` once.
  """

  def __init__(
    self,
    router: contract.SessionRouter,
    chat: episode_lib.Chat,
    gateway: Gateway,
  ):
    self._sessions = sessions_lib.Sessions(chat, max_sessions=_MAX_SESSIONS)
    self._asked = _Asked(router)
    self._gateway = gateway
    self._open = contextlib.AsyncExitStack()
    self._opening = asyncio.Lock()
    self._address = ""

  async def play(
    self,
    run: episode_lib.RunAgent,
    partial: episode_lib.PartialTrajectory,
    requests: member_requests.MemberRequests,
    limits: episode_lib.Limits,
    priority: tuple[int, ...],
  ) -> tuple[trajectory.Trajectory, base.Transcript]:
    """Plays an agent once.

    An agent that edits its history, or leads several conversations, leaves a
    trajectory of several conversations. Answers are limited as those of an
    environment: `max_turns` of all together, `max_tokens` for each
    conversation. One more is refused, and the agent may still end well.

    Args:
      run: raises Fault.
      limits: `step_s` bounds the time without a request.

    Raises:
      Fault: the agent failed, hung, or asked for no answer.
      EngineClosed: the engine stopped; the task may be replayed elsewhere.
    """
    episode, address = partial.episode, await self._listen()
    name = _NOT_IN_NAMES.sub(".", episode.name)[:160]
    name = f"{name}.{secrets.token_hex(16)}"
    session = self._sessions.open(
      name,
      seed=episode.noise,
      priority=priority,
      temperature=limits.temperature,
    )
    playing = _Playing(session, episode, requests, limits)
    try:
      with session.request_running(), self._asked.playing(playing):
        endpoint = base.Endpoint(f"{address}/sessions/{name}", name)
        result = await playing.until_done(run, endpoint)
    except isolation.Fault as fault:
      if session.engine_closed:
        raise contract.EngineClosed("while an agent played") from fault
      raise
    finally:
      # On every path: sampled tokens are never lost.
      session.add_to(partial)
      with contextlib.suppress(
        sessions_lib.FinishedSession, sessions_lib.UnknownSession
      ):
        self._sessions.finish(name, session_tree.INTERRUPTED)
    is_cut = playing.is_cut or session.was_too_long
    return _ended(partial, session, result, is_cut)

  async def _listen(self) -> str:
    async with self._opening:
      if not self._address:
        self._address = await self._open.enter_async_context(
          self._gateway(self._asked, self._sessions, self._asked.max_length)
        )
    return self._address

  async def close(self) -> None:
    """Stops listening; safe when no agent was played."""
    await self._open.aclose()


def _ended(
  partial: episode_lib.PartialTrajectory,
  session: session_tree.Session,
  result: base.AgentResult | None,
  is_cut: bool,
) -> tuple[trajectory.Trajectory, base.Transcript]:
  """Returns the trajectory of an agent that came to its end.

  Args:
    result: None if the engine aborted an answer.
  """
  if result is None or any(turn.stop == "abort" for turn in partial.turns):
    return partial.end(trajectory.Status.ENGINE_FAULT, "aborted")
  if not partial.turns:
    raise isolation.Fault("the agent asked for no answer")
  partial.messages.extend(session.messages)
  partial.metrics.update(result.metrics)
  if result.reward is not None:
    partial.rewards.append(result.reward)
    partial.turns[-1] = dataclasses.replace(
      partial.turns[-1], reward=result.reward
    )
  if is_cut:
    return partial.end(trajectory.Status.TRUNCATED)
  return partial.end(trajectory.Status.COMPLETED)


class _Playing:
  """An agent that is being played.

  Attributes:
    is_cut: an answer was refused because of a limit.
  """

  def __init__(
    self,
    session: session_tree.Session,
    episode: episode_lib.Episode,
    requests: member_requests.MemberRequests,
    limits: episode_lib.Limits,
  ):
    self.session = session
    self.requests = requests
    self.is_cut = False
    self._episode = episode
    self._limits = limits
    self._num_asked = self._num_running = self._num_unrecorded = 0
    self._is_aborted = False
    self._clock = asyncio.timeout(limits.step_s)
    session.on_record = self._recorded

  async def until_done(
    self, run: episode_lib.RunAgent, endpoint: base.Endpoint
  ) -> base.AgentResult | None:
    """Returns the result of the agent; None if the engine aborted an answer.

    The clock stands still while the engine owes an answer.
    """
    step_s = self._limits.step_s
    try:
      async with self._clock:
        return await run(endpoint)
    except TimeoutError:
      if self._is_aborted:
        return None
      raise isolation.Fault(
        f"the agent took over {step_s:g} s without asking for an answer"
      ) from None

  @contextlib.contextmanager
  def asking(
    self, request: contract.DecodeRequest
  ) -> Iterator[contract.DecodeRequest]:
    """Yields a request as the episode's limits allow it.

    Raises:
      ValueError: they do not, or the episode is over.
    """
    limited = self._limited(request)
    self._num_asked += 1
    self._num_running += 1
    self._set_clock(None)
    try:
      yield limited
    except asyncio.CancelledError:
      current = asyncio.current_task()
      if current is not None and current.cancelling():
        raise
      raise ValueError("the episode is over") from None
    finally:
      self._num_running -= 1
      if not self._num_running:
        self._set_clock(self._limits.step_s)

  def answered(self, completion: contract.Completion | None) -> None:
    """Notes an answer, or a part of one, before it is recorded."""
    if completion is not None:
      self._num_unrecorded += 1
      # Where a text of the agent ends an answer, its request is aborted, too.
      self._is_aborted |= self.requests.is_aborted

  def _recorded(self) -> None:
    self._num_unrecorded -= 1
    if self._is_aborted and not self._num_unrecorded:
      self._set_clock(0.0)

  def _set_clock(self, left_s: float | None) -> None:
    """Ends the agent in so many seconds; None stops the clock."""
    now_s = asyncio.get_running_loop().time()
    with contextlib.suppress(RuntimeError):  # It has just ended.
      self._clock.reschedule(None if left_s is None else now_s + left_s)

  def _limited(self, request: contract.DecodeRequest) -> contract.DecodeRequest:
    limits, room = self._limits, self._limits.max_tokens - len(request.tokens)
    if self._is_aborted:
      raise ValueError("the episode is over")
    if self._num_asked >= limits.max_turns or room < 1:
      self.is_cut = True
      bound = f"an episode has {limits.max_turns} answers (rollout.max_turns)"
      if room < 1:
        bound = f"{messages.too_long(limits.max_tokens)} (rollout.max_tokens)"
      raise ValueError(f"{bound}; end it")
    return dataclasses.replace(
      request,
      session=self._episode.name,
      max_tokens=min(request.max_tokens, limits.turn_tokens, room),
      # The learner scores tokens at this temperature, over all ids.
      temperature=limits.temperature,
      top_k=0,
      top_p=1.0,
      min_p=0.0,
      bias=None,
      # With one seed in its program a group would answer alike.
      seed=request.seed ^ self._episode.noise,
      experts=limits.record_experts,
    )


class _Asked:
  """The engines of a run, for the server that its agents ask."""

  def __init__(self, router: contract.SessionRouter):
    self._router = router
    self._playing: dict[str, _Playing] = {}

  @contextlib.contextmanager
  def playing(self, agent: _Playing) -> Iterator[None]:
    """Answers requests of an agent's session in the body of a `with`."""
    self._playing[agent.session.name] = agent
    try:
      yield
    finally:
      del self._playing[agent.session.name]
      agent.requests.abort()

  @property
  def capabilities(self) -> contract.Capabilities:
    """Those of the engines; an agent's limits cut answers that are longer."""
    return dataclasses.replace(
      self._router.capabilities, max_length=_ANY_LENGTH
    )

  @property
  def max_length(self) -> int:
    """Ids of a conversation that the engines hold."""
    return self._router.capabilities.max_length

  def stats(self) -> contract.EngineStats:
    """Returns the counters of the engines."""
    return self._router.stats()

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer of an agent."""
    agent = self._agent(request)
    with agent.asking(request) as limited:
      completion = await agent.requests.generate(limited)
      agent.answered(completion)
    return completion

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer of an agent as it is sampled."""
    agent = self._agent(request)
    with agent.asking(request) as limited:
      deltas = agent.requests.stream(limited)
      async with contextlib.aclosing(deltas):
        async for delta in deltas:
          agent.answered(delta.completion)
          yield delta

  def _agent(self, request: contract.DecodeRequest) -> _Playing:
    if (agent := self._playing.get(request.session)) is None:
      raise ValueError(f"no agent plays in session {request.session}")
    return agent

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; None ends those of all agents."""
    if request_id is not None:
      self._router.abort(request_id)
      return
    for agent in self._playing.values():
      agent.requests.abort()
