"""The built-in engine as it is, on a mesh that only takes time.

BuiltinEngine._launch -> SimulatedMesh.submit: one dispatch after another
      ^                         |
      +------ _complete <-------+ ids that the world gives each request

Queue, scheduler, pages and prefix cache are those of a real run, so rows wait
for a dispatch that pays, two are in flight, and new weights have contexts
encoded again. An idle engine looks for requests when the turns that the host
has begun have ended. A simulated turn costs about as much of the processor as
a real one; `engine.SimulatedEngine` costs far less, and knows only a token's
time.
"""

import asyncio
import dataclasses
import typing
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from models import config as model_config
from models import sharding
from rl.engine import contract
from rl.engine.builtin import decode_step, dispatch_plan, engine, sizing
from rl.engine.builtin import request as request_lib
from rl.engine.builtin import settings as engine_settings
from rl.runtime import mesh_thread
from rl.settings import checks
from rl.simulation import host_thread, processor

_LOGPROB = -0.5
_IDS = 2**31 - 1
_LEAST_DELAY_S = 1e-5
_LOOK_S = 1e-4

Ids = Int32[np.ndarray, " n"]
Conversation = Callable[[contract.DecodeRequest], tuple[Ids, Ids]]
"""Returns the context of a request, and its answer before that is cut."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatches:
  """The settings of a built-in engine, and the seconds of its dispatches.

  Attributes:
    model: decides on the length of a conversation, and nothing else.
    layout: of a mesh whose devices decide on nothing but the platform.
    dispatch_s: seconds of a dispatch, whatever its shape.
    encode_s: of one that encodes chunks of context; None is `dispatch_s`.
  """

  settings: engine_settings.EngineSettings
  model: model_config.ModelConfig
  layout: sharding.Layout
  dispatch_s: float
  encode_s: float | None = None

  def validate(self, where: str) -> None:
    """Raises ValueError if a dispatch takes no time."""
    checks.finite_above(self, 0, "dispatch_s", "encode_s", where=where)

  def seconds(self, dispatch: dispatch_plan.Dispatch) -> float:
    """Returns the seconds of a dispatch."""
    if self.encode_s is None or not dispatch.chunks[0]:
      return self.dispatch_s
    return self.encode_s


class SimulatedMesh:
  """A `mesh_thread.MeshThread` without a thread, on a virtual clock.

  Args:
    seconds: of a dispatch.
    cause: of idle time that begins now.

  Attributes:
    answers: of requests, by their futures.
    states: (second, state) of each change.
    served: tokens sampled so far.
  """

  def __init__(
    self,
    seconds: Callable[[dispatch_plan.Dispatch], float],
    host: host_thread.HostThread,
    cause: Callable[[], processor.EngineActivity],
  ):
    self._seconds = seconds
    self._host = host
    self._cause = cause
    self._free_s = 0.0
    self.answers: MutableMapping[asyncio.Future[Any], Ids] = (
      weakref.WeakKeyDictionary()
    )
    self.states: list[tuple[float, processor.EngineActivity]] = []
    self.served = 0

  async def run(self, name: str, function: Callable[..., Any], *args) -> Any:
    """Does nothing: allocation and compilation take no time."""
    del name, function, args

  def submit(
    self, name: str, function: Callable[..., Any], *args
  ) -> asyncio.Future[Any]:
    """Queues a dispatch behind those before it; all else is done at once."""
    del name, function
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    dispatches = [a for a in args if isinstance(a, dispatch_plan.Dispatch)]
    if not dispatches:
      done.set_result(None)
      return done
    if self._free_s <= loop.time():
      self._free_s = loop.time()
      self.states.append((self._free_s, "decode"))
    self._free_s += self._seconds(dispatches[0])
    loop.call_at(self._free_s, self._end, done, dispatches[0])
    return done

  def _end(
    self, done: asyncio.Future[Any], dispatch: dispatch_plan.Dispatch
  ) -> None:
    """Ends a dispatch; the host takes its result when it is free."""
    loop = asyncio.get_running_loop()
    if self._free_s <= loop.time():
      self.states.append((loop.time(), self._cause()))
    self._deliver(done, dispatch)

  def _deliver(
    self, done: asyncio.Future[Any], dispatch: dispatch_plan.Dispatch
  ) -> None:
    loop = asyncio.get_running_loop()
    free_s = self._host.free_at(loop.time())
    if free_s > loop.time():
      loop.call_at(free_s, self._deliver, done, dispatch)
    elif not done.done():
      done.set_result(self._sampled(dispatch))

  def _sampled(self, dispatch: dispatch_plan.Dispatch) -> decode_step.Sampled:
    budgets = dispatch.plan.integers[:, decode_step.BUDGET]
    counts = np.zeros(len(budgets), np.int32)
    tokens = np.zeros((len(budgets), max(1, budgets.max())), np.int32)
    for i, state in enumerate(dispatch.rows):
      if not state.future.done():
        rest = self.answers[state.future][state.num_sampled :][: budgets[i]]
        tokens[i, : len(rest)] = rest
        counts[i] = len(rest)
    self.served += int(counts.sum())
    logprobs = np.full(tokens.shape, _LOGPROB, np.float32)
    sampled: Any = decode_step.Sampled
    return sampled(tokens, logprobs, counts)


class DispatchedEngine(engine.BuiltinEngine):
  """A built-in engine in virtual time; `start` it before it serves.

  Its weights are version numbers. All else is as in a `SimulatedEngine`.
  """

  def __init__(
    self,
    dispatches: Dispatches,
    conversation: Conversation,
    host: host_thread.HostThread,
  ):
    self._conversation = conversation
    self._host = host
    self._mesh = SimulatedMesh(dispatches.seconds, host, self._cause)
    self._sessions = self._graded = 0
    settings, model = dispatches.settings, dispatches.model
    super().__init__(
      model,
      settings.sizes(model, [sizing.Room(dispatches.layout)]),
      dispatches.layout,
      typing.cast(mesh_thread.MeshThread, self._mesh),
      dataclasses.replace(settings.capabilities(model), vocab_size=_IDS),
      dataclasses.replace(
        settings,
        # Polled from the clock, which would never move without any.
        batching_delay_s=max(settings.batching_delay_s, _LEAST_DELAY_S),
        bias_slots=0,
        speculative_tokens=0,
        record_experts=False,
        compile_ahead=False,
      ),
    )

  def _accept(
    self, request: contract.DecodeRequest
  ) -> request_lib.RequestState:
    """Queues a request, whose answer is known to the mesh from here on."""
    context, answer = self._conversation(request)
    ends = len(answer) < request.max_tokens
    stop_ids = (int(answer[-1]),) if ends else ()
    state = super()._accept(
      dataclasses.replace(request, tokens=context, stop_ids=stop_ids)
    )
    self._mesh.answers[state.future] = answer
    return state

  def _delays_batch(self) -> bool:
    # A loop looks at its timers when it has gone round, however short the
    # delay, and about then these turns have asked again.
    if self._host.has_turns:
      asyncio.get_running_loop().call_later(_LOOK_S, self._wake.set)
      return True
    return super()._delays_batch()

  @property
  def served(self) -> float:
    """Tokens sampled so far."""
    return self._mesh.served

  @property
  def states(self) -> Sequence[tuple[float, processor.EngineActivity]]:
    """(second, state) of each change so far; the last one goes on."""
    return self._mesh.states

  def forget_states(self) -> None:
    """Forgets the states so far, so that memory is flat in a long run."""
    self._mesh.states.clear()

  def expect(self, sessions: int = 0, graded: int = 0) -> None:
    """Adds to the sessions here, and to those graded: causes of idle time."""
    self._sessions += sessions
    self._graded += graded

  def _cause(self) -> processor.EngineActivity:
    if self._sessions:
      return "environments"
    return "rewards" if self._graded else "gate"
