"""The contract of a decode engine: token ids in, token ids out.

generate / stream --> waiting --> running --> Completion
update_weights(version, params, in_flight): new weights, and the treatment of
  requests that run
"""

import contextlib
import dataclasses
import math
from collections.abc import (
  AsyncGenerator,
  Callable,
  Generator,
  Iterator,
  Mapping,
)
from typing import (
  Any,
  Literal,
  NamedTuple,
  Protocol,
  TypeVar,
  runtime_checkable,
)

import jax
import numpy as np
from jaxtyping import Float32, Int, Int32

from models import config as model_config
from models import sharding
from rl.data import trajectory
from rl.runtime import mesh_thread

_T = TypeVar("_T")

InFlight = Literal["drain", "abort", "recompute", "keep_kv"]
"""Treatment of requests in flight when weights arrive.

drain: they finish first, under the old weights; new ones wait.
abort: they end with the tokens they have.
recompute: they keep their tokens; keys and values are computed again.
keep_kv: they keep tokens, keys and values. Faster, but later tokens attend to
  keys and values of older weights (`Completion.oldest_kv`), so no forward pass
  of a single version gives their log-probabilities. Later requests, the next
  turn of a session included, begin without those; sglang-jax keeps prefixes.
"""

SwitchStep = Literal["decode_suspended", "switched", "decode_resumed"]
"""Steps of an engine that changes its weights.

decode_suspended: no device step runs, and none is launched.
switched: the new weights are served.
decode_resumed: decoding goes on; without "switched", under the old weights.
"""


_MIN_TEMPERATURE = 1e-6
"""Logits over a smaller temperature exceed float32."""
_MAX_BIAS = 1e6
"""A larger bias over a small temperature exceeds float32."""


class EngineClosed(RuntimeError):
  """The engine stopped; the task may be replayed elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
  """Abilities of an engine; a request for any other is refused, not ignored.

  Attributes:
    in_flight: ways in which it takes new weights.
    max_length: ids of a conversation, sampled ones included.
    vocab_size: ids are below it.
    max_stop_ids: of one request.
    seeds: a request's seed decides its tokens, whatever else is decoded.
    bias: it can forbid or favour ids.
    constraints: it can hold an answer to a grammar.
    experts: it records the chosen experts.
    top_logprobs: most probable ids that it lists beside each sampled one.
    prefixes: it is a `PrefixEngine`.
  """

  in_flight: frozenset[InFlight]
  max_length: int
  vocab_size: int
  max_stop_ids: int
  seeds: bool
  bias: bool
  constraints: bool
  experts: bool
  top_logprobs: int
  prefixes: bool = False


class TokenMatcher(Protocol):
  """The state of a grammar after some ids: the methods of llguidance.LLMatcher.

  A request is given one at the beginning of the grammar and copies it.
  """

  def deep_copy(self) -> "TokenMatcher":
    """Returns an independent matcher in the same state."""
    ...

  def compute_bitmask(self) -> bytes:
    """Returns a bit for each id, the lowest first: whether it may come next.

    Where an answer may end these are ids that end one. Called on another
    thread than the rest, but never at the same time.
    """
    ...

  def try_consume_tokens(self, tokens: list[int]) -> int:
    """Consumes as many of the first ids as fit; returns their number."""
    ...

  def is_accepting(self) -> bool:
    """Returns whether the answer may end here."""
    ...

  def get_error(self) -> str:
    """Returns the reason why the matcher cannot go on, or ""."""
    ...


# Nobody changes requests and completions. But they are not frozen: a run makes
# one of each in every turn, and frozen ones take three times as long to make.
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
  """One answer to sample.

  Attributes:
    request_id: unique among requests in flight.
    session: name of the conversation; its requests go to the engine that holds
      its keys and values.
    tokens: the whole conversation so far, N >= 1 ids.
    max_tokens: sampled at most, >= 1.
    temperature: 0 takes the most probable token.
    top_k: choose among the k most probable ids; 0 is all.
    top_p: choose among the most probable ids that together reach this
      probability at the temperature; 1 is all.
    min_p: choose among ids at least this fraction as probable as the best, at
      the temperature; 0 is all.
    stop_ids: sampling ends after the first of them, which is kept.
    seed: 32 bits, signed; decides the noise of every token, together with its
      position, so the rest of the batch does not matter.
    bias: added to the logits before an id is chosen, -inf forbids it; one
      value for each id. Log-probabilities are those of the plain logits.
    constraint: ids that it does not allow are forbidden, step by step. Its end
      of an answer stops too, as does a stop id that it allows as content.
      Log-probabilities stay those of the plain logits, see
      `rl.engine.sampling`.
    experts: return the chosen experts in the completion.
    top_logprobs: most probable ids to list beside each sampled one.
    priority: waiting requests are served lowest first.
  """

  request_id: str
  session: str
  tokens: Int32[np.ndarray, " N"]
  max_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop_ids: tuple[int, ...] = ()
  seed: int = 0
  bias: Float32[np.ndarray, " V"] | None = None
  constraint: TokenMatcher | None = None
  experts: bool = False
  top_logprobs: int = 0
  priority: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
  """The n most probable ids at the place of each of some sampled tokens.

  The best comes first. Log-probabilities are those of `Completion.logprobs`:
  filters, biases and constraints do not change them, so a sampled id need not
  be among the listed.
  """

  ids: Int32[np.ndarray, "T n"]
  logprobs: Float32[np.ndarray, "T n"]

  def span(self, start: int, stop: int) -> "TopLogprobs":
    """Returns those of the tokens from `start` to `stop`."""
    return TopLogprobs(
      ids=self.ids[start:stop], logprobs=self.logprobs[start:stop]
    )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)  # As requests.
class Completion:
  """The answer to a request.

  Attributes:
    tokens: T ids, stop token included.
    logprobs: log-softmax(logits / temperature) of each id in nats, over the
      whole vocabulary: before filters and bias. At temperature 0 those of the
      plain logits.
    versions: policy that sampled each id; never decreases.
    stop: "abort" may come with tokens sampled until then.
    cached_tokens: ids of the request that were not encoded for it, because an
      earlier request had the same prefix.
    decode_s: seconds from acceptance to the last token.
    first_token_s: seconds from acceptance until the first token was on the
      host; 0 without tokens.
    queue_s: seconds of these in which it waited for a slot.
    oldest_kv: lowest version of the keys and values that the last id attended
      to: its own, or an older one after `keep_kv`; -1 if unknown.
    experts: of every id of the conversation, N + T; -1 where unknown, as for
      the last id, which was never fed. Tokens keep those that sampled them, as
      does the context before, when `recompute` feeds them again. The built-in
      engine's are of `ModelConfig.expert_dtype`. None unless the request asks
      for them.
    top: the most probable ids; None unless the request asks for them.
  """

  tokens: Int32[np.ndarray, " T"]
  logprobs: Float32[np.ndarray, " T"]
  versions: Int32[np.ndarray, " T"]
  stop: trajectory.Stop
  cached_tokens: int
  decode_s: float
  first_token_s: float = 0.0
  queue_s: float = 0.0
  oldest_kv: int = -1
  experts: Int[np.ndarray, "ids S k"] | None = None
  top: TopLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
  """Tokens sampled since the delta before; the last has the completion too."""

  tokens: Int32[np.ndarray, " t"]
  logprobs: Float32[np.ndarray, " t"]
  versions: Int32[np.ndarray, " t"]
  top: TopLogprobs | None = None
  completion: Completion | None = None


def whole_delta(answer: Completion) -> Delta:
  """Returns a finished answer as its only delta."""
  return Delta(
    tokens=answer.tokens,
    logprobs=answer.logprobs,
    versions=answer.versions,
    top=answer.top,
    completion=answer,
  )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
  """Counters since the engine was built, and its current load.

  Attributes:
    version: of the served weights.
    running, waiting: requests.
    prefilled_tokens: ids of context that were encoded, repeats included.
    cached_tokens: ids of context that were in the cache instead.
    drafted_tokens, right_drafts: tokens that were guessed ahead, and how many
      of them were sampled; see `settings.EngineSettings.speculative_tokens`.
    preemptions: requests that gave up their pages to others and went on later.
    pages, free_pages: of the cache, and how many of them hold nothing.
    paused_s: seconds in which decoding stood still for new weights.
  """

  version: int
  running: int
  waiting: int
  sampled_tokens: int
  prefilled_tokens: int
  cached_tokens: int = 0
  drafted_tokens: int = 0
  right_drafts: int = 0
  dispatches: int = 0
  compilations: int = 0
  preemptions: int = 0
  pages: int = 0
  free_pages: int = 0
  paused_s: float = 0.0


def check_request(request: DecodeRequest, capabilities: Capabilities) -> None:
  """Raises ValueError on a request that such an engine cannot serve."""
  for problems in (_wrong_types, _wrong_ids, _wrong_sampling, _wrong_bias):
    for problem in problems(request, capabilities):
      raise ValueError(f"request {request.request_id}: {problem}")


def _wrong_types(request: DecodeRequest, _: Capabilities) -> Iterator[str]:
  tokens, bias = request.tokens, request.bias
  if getattr(tokens, "dtype", None) != np.int32 or tokens.ndim != 1:
    yield "tokens must be int32[N]; use np.asarray(ids, np.int32)"
  if bias is not None and getattr(bias, "dtype", None) != np.float32:
    yield "bias must be float32[V]; use np.asarray(bias, np.float32)"
  sizes = request.max_tokens, request.top_k, request.top_logprobs
  for value in (*sizes, request.seed, *request.stop_ids, *request.priority):
    if not isinstance(value, (int, np.integer)):
      fields = "max_tokens, top_k, seed, top_logprobs, stop_ids and priority"
      yield f"{fields} must be integers, not {value!r}"
  for value in (request.temperature, request.top_p, request.min_p):
    if not isinstance(value, (float, int, np.integer, np.floating)):
      yield f"temperature, top_p and min_p must be numbers, not {value!r}"


def _wrong_ids(request: DecodeRequest, able: Capabilities) -> Iterator[str]:
  ids, most, stop_ids = request.tokens, request.max_tokens, request.stop_ids
  if not len(ids):
    yield "no tokens; send at least one"
  # Negative ids are huge when unsigned.
  if int(ids.view(np.uint32).max()) >= able.vocab_size:
    yield f"an id is outside [0, {able.vocab_size})"
  if most < 1:
    yield f"max_tokens={most} is below 1"
  if len(ids) + most > able.max_length:
    sizes = f"{len(ids)} tokens and max_tokens={most}"
    yield f"{sizes} do not fit model.max_length={able.max_length}; use fewer"
  if len(stop_ids) > able.max_stop_ids:
    yield f"{len(stop_ids)} stop ids, at most {able.max_stop_ids}"
  if any(not 0 <= id_ < able.vocab_size for id_ in stop_ids):
    yield f"stop_ids={stop_ids} must be in [0, {able.vocab_size})"


def _wrong_sampling(
  request: DecodeRequest, able: Capabilities
) -> Iterator[str]:
  heat, seed = request.temperature, request.seed
  lowest, highest = _MIN_TEMPERATURE, 1 / _MIN_TEMPERATURE
  if heat and not lowest <= heat <= highest:
    yield f"temperature={heat} must be 0 or in [{lowest:g}, {highest:g}]"
  if not 0 <= request.top_k < 2**31:
    yield f"top_k={request.top_k} must be in [0, 2**31); 0 is all"
  if not 0 < request.top_p <= 1:
    yield f"top_p={request.top_p} must be in (0, 1]"
  if not 0 <= request.min_p <= 1:
    yield f"min_p={request.min_p} must be in [0, 1]"
  if not -(2**31) <= seed < 2**31:
    yield f"seed={seed} needs more than 32 bits"
  if seed and not able.seeds:
    yield f"seed={seed}, but this engine has no seeds; use 0"
  if not 0 <= request.top_logprobs <= able.top_logprobs:
    most = f"[0, {able.top_logprobs}] with this engine"
    yield f"top_logprobs={request.top_logprobs} must be in {most}"


def _wrong_bias(request: DecodeRequest, able: Capabilities) -> Iterator[str]:
  if (bias := request.bias) is not None:
    if not able.bias:
      out = "use engine.bias_slots=1 or more of the built-in engine"
      yield f"this engine takes no bias; {out}"
    if bias.shape != (able.vocab_size,):
      out = f"use one value for each of {able.vocab_size} ids"
      yield f"bias has shape {bias.shape}; {out}"
    if not (bias <= _MAX_BIAS).all():  # Also false for nan.
      yield f"bias must be at most {_MAX_BIAS:g}, or -inf to forbid an id"
    if not (bias > -math.inf).any():
      yield "bias forbids every id; leave one above -inf"
    if request.constraint is not None:
      yield "bias may forbid what its constraint demands; leave one of them out"
  if request.constraint is not None and not able.constraints:
    out = "use the built-in engine with engine.bias_slots=1 or more"
    yield f"this engine takes no constraint; {out}"
  if request.experts and not able.experts:
    out = "use engine.record_experts=true with a model that has some"
    yield f"experts are not recorded; {out}"


def find(requests: Mapping[str, _T], request_id: str) -> _T:
  """Returns the state of a request; ValueError if none of that id is there."""
  if request_id not in requests:
    raise ValueError(f"request {request_id} is not in flight")
  return requests[request_id]


def check_version(version: int, served: int) -> None:
  """Raises ValueError unless a version is above the served one."""
  if version <= served:
    raise ValueError(f"version {version} is not above the served {served}")


def check_in_flight(in_flight: InFlight, able: Capabilities) -> None:
  """Raises ValueError unless an engine can take new weights in this way."""
  if in_flight not in able.in_flight:
    ways = " or ".join(sorted(able.in_flight))
    raise ValueError(f"in_flight={in_flight!r}; use {ways}")


def check_same_tree(old: Any, new: Any) -> None:
  """Raises ValueError if leaves, shapes or dtypes of the weights differ."""

  def describe(tree: Any) -> dict[str, Any]:
    return {
      jax.tree_util.keystr(path): (np.shape(leaf), getattr(leaf, "dtype", None))
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

  before, after = describe(old), describe(new)
  for name in sorted(before.keys() | after.keys()):
    if before.get(name) != after.get(name):
      raise ValueError(
        f"weights{name}: expected {before.get(name)}, got {after.get(name)}"
      )


def ignore_step(step: SwitchStep) -> None:
  """Ignores a step of a switch."""


@contextlib.contextmanager
def switching(on_step: Callable[[SwitchStep], None]) -> Generator[None]:
  """Reports the steps of a switch around its body, which takes the weights."""
  on_step("decode_suspended")
  try:
    yield
    on_step("switched")
  finally:
    on_step("decode_resumed")


@runtime_checkable
class Sampler(Protocol):
  """Samples answers; all methods belong to one event loop."""

  @property
  def capabilities(self) -> Capabilities:
    """Its abilities; of several engines those that all of them share."""
    ...

  async def generate(self, request: DecodeRequest) -> Completion:
    """Samples one answer. Cancelling aborts the request.

    Raises:
      ValueError: the request cannot be served; others go on.
      EngineClosed: the engine stopped.
    """
    ...

  def stream(self, request: DecodeRequest) -> AsyncGenerator[Delta]:
    """Yields an answer as it is sampled; the last delta has the completion.

    Raises what `generate` does, at the first step of the iteration. Closing the
    iterator early aborts the request.
    """
    ...

  def abort(self, request_id: str | None) -> None:
    """Ends a request with what it has; None ends all of them.

    Raises:
      ValueError: no such request is in flight.
    """
    ...

  def begun(self, request_id: str) -> int | None:
    """Returns the version of the first token of a request in flight.

    None until it is sampled; new weights do not change it.

    Raises:
      ValueError: no such request is in flight.
    """
    ...

  def stats(self) -> EngineStats:
    """Returns the counters; of several engines their sums."""
    ...


@runtime_checkable
class DecodeEngine(Sampler, Protocol):
  """A sampler whose weights can be replaced while it serves."""

  async def pause(self) -> None:
    """Stops decoding and returns when no device step runs.

    Requests keep what they hold, and new ones queue until `resume`.
    """
    ...

  def resume(self) -> None:
    """Resumes decoding after `pause`."""
    ...

  async def update_weights(
    self,
    version: int,
    params: Any,
    in_flight: InFlight = "recompute",
    on_step: Callable[[SwitchStep], None] = ignore_step,
  ) -> None:
    """Serves `params` from now on.

    All or nothing: a failed or cancelled update leaves the old version serving.
    A paused engine stays paused, except that "drain" first finishes the
    requests in flight.

    Args:
      version: must be higher than the served one.
      params: placed with the engine's shardings.
      on_step: told of each step as it happens; see `switching`.

    Raises:
      ValueError: the version is not higher, the tree is another model's, or
        the engine cannot do `in_flight`.
    """
    ...

  async def checksum(self) -> tuple[int, int]:
    """Returns the served version and `checksum.of` its weights."""
    ...

  async def flush_cache(self) -> None:
    """Drops every cached prefix that no running request uses."""
    ...

  async def close(self) -> None:
    """Stops and frees its devices; requests in flight raise EngineClosed.

    May be called again. A device program that hangs keeps its memory.
    """
    ...


@runtime_checkable
class StartableEngine(DecodeEngine, Protocol):
  """An engine that a run starts itself."""

  async def start(
    self,
    params: Any,
    version: int,
    report: Callable[[str], None] = lambda text: None,
  ) -> None:
    """Takes the first weights, compiles its programs and begins to serve.

    Args:
      report: gets messages about progress.
    """
    ...


@runtime_checkable
class StagingEngine(DecodeEngine, Protocol):
  """An engine whose weights have a way to go that `update_weights` may skip."""

  async def stage(self, params: Any) -> None:
    """Brings weights to its devices, while decoding goes on.

    The next `update_weights` is given the same object. All or nothing: after a
    failure nothing is staged.

    Raises:
      ValueError: they are another model's, or cannot be read.
      EngineClosed: the engine stopped.
    """
    ...


@runtime_checkable
class LeavingEngine(DecodeEngine, Protocol):
  """An engine that can be told from elsewhere to leave its run."""

  async def told_to_leave(self) -> None:
    """Returns once it is told; `close` then waits for it to end by itself.

    Raises:
      EngineClosed: the engine stopped.
    """
    ...


class PrefixPages(NamedTuple):
  """Pages of keys and values of the beginning of a conversation.

  Attributes:
    ids: from its beginning on; they may end within the last page.
    start: ids before the first page.
    version: of the weights that made all of them; -1 if there is no page.
    nbytes: of all pages.
    pages: each array of the cache, [K layers pages page_size d]; of an engine
      in another process where to read them.
  """

  ids: Int32[np.ndarray, " n"]
  start: int
  version: int
  nbytes: int
  pages: Any


@runtime_checkable
class PrefixEngine(DecodeEngine, Protocol):
  """An engine that encodes prompts for others of its kind, or takes them."""

  def export_prefix(
    self,
    ids: Int32[np.ndarray, " N"],
    start: int = 0,
    priority: tuple[int, ...] = (),
  ) -> contextlib.AbstractAsyncContextManager[PrefixPages]:
    """Encodes all ids but the last; yields pages that last until the end.

    There may be fewer if others needed the room, or new weights came.

    Args:
      start: ids before which no page is asked for.
      priority: as that of a request.

    Raises:
      ValueError: the ids cannot be encoded, or the pages not be kept.
      EngineClosed: the engine stopped.
    """
    ...

  async def import_prefix(self, prefix: PrefixPages) -> str:
    """Adds the pages to its prefix cache, in which a request finds them.

    Returns:
      "" or the reason why it has not: "version" if it serves another, "room"
      if no pages are free, "gap" if it lacks ids before `start`.

    Raises:
      ValueError: they cannot be read.
      EngineClosed: the engine stopped.
    """
    ...


@runtime_checkable
class SessionRouter(Sampler, Protocol):
  """Engines as one, for episodes and served agents: `pools.router.Router`.

  A conversation is a session: `begin`, requests that carry its name, `end`.
  """

  async def begin(
    self, session: str, domain: str, engine: int = -1, group: str = ""
  ) -> int:
    """Returns the number of a session's engine, once one takes it.

    Args:
      domain: name of the source of the session's task.
      engine: that the session had before a restart; -1 if none.
      group: of sessions with the same prompt; "" if it is alone.

    Raises:
      EngineClosed: every engine has stopped, and none will come back.
      ValueError: the session has begun and not ended.
    """
    ...

  def serves(self, number: int) -> int:
    """Returns the version that an engine serves."""
    ...

  def end(self, session: str) -> None:
    """Ends a session, also one that has ended."""
    ...


@runtime_checkable
class EngineSpec(Protocol):
  """Settings of an engine, a frozen dataclass with its sizes and `build`."""

  def validate(self) -> None:
    """Raises ValueError on a size that cannot work."""
    ...

  def validate_model(self, config: model_config.ModelConfig) -> None:
    """Raises ValueError on a model that such an engine cannot serve."""
    ...

  def validate_installed(self, python: str | None = None) -> None:
    """Raises ValueError when its package is missing.

    Args:
      python: the program that is to run it; None is this process.
    """
    ...

  @property
  def split_rows(self) -> Mapping[str, int]:
    """Numbers of rows that are split over the mesh, by their setting."""
    ...

  def capabilities(self, config: model_config.ModelConfig) -> Capabilities:
    """Returns the abilities of an engine of this model."""
    ...

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> StartableEngine:
    """Returns an engine, not started.

    Args:
      thread: of the mesh; the caller closes it.

    Raises:
      ValueError: its package is missing.
    """
    ...
