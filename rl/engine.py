"""The contract of a decode engine: token ids in, token ids out."""

import dataclasses
import math
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float32, Int32

from rl import trajectory

OnPublish = Literal["drain", "recompute"]


class EngineClosed(RuntimeError):
  """The engine stopped; the task may be replayed elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRequest:
  """One answer to sample.

  Attributes:
    request_id: unique among requests in flight.
    session: requests of one trajectory share it and so reuse its KV cache.
    tokens: the whole conversation so far, N >= 1 ids.
    max_tokens: sampled at most, >= 1.
    temperature: 0 takes the most probable token.
    stop_ids: sampling ends behind the first of them, which is kept.
    seed: 32 bits, signed; with the position it decides the noise of every
      token, so the result does not depend on what else is in the batch.
    priority: requests that wait are served lowest first.
  """

  request_id: str
  session: str
  tokens: Int32[np.ndarray, " N"]
  max_tokens: int
  temperature: float = 1.0
  stop_ids: tuple[int, ...] = ()
  seed: int = 0
  priority: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
  """What was sampled.

  Attributes:
    tokens: T ids, stop token included.
    logprobs: log-softmax(logits / temperature) of each id in nats, over the
      whole vocabulary.
    versions: policy that sampled each id.
    stop: "abort" may come with tokens sampled until then.
    cached_tokens: ids of the request that were not encoded again.
    decode_s: seconds from acceptance to the last token.
  """

  tokens: Int32[np.ndarray, " T"]
  logprobs: Float32[np.ndarray, " T"]
  versions: Int32[np.ndarray, " T"]
  stop: trajectory.Stop
  cached_tokens: int
  decode_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
  """Counters since the engine was built."""

  version: int
  running: int
  waiting: int
  sampled_tokens: int
  prefilled_tokens: int
  dispatches: int
  compilations: int


def check_request(
  request: DecodeRequest,
  *,
  vocab_size: int,
  max_length: int,
  max_stop_ids: int,
) -> None:
  """Raises ValueError on a request that an engine of this size cannot serve."""
  name, ids = (
    f"request {request.request_id}",
    np.asarray(request.tokens, np.int32),
  )
  if not len(ids):
    raise ValueError(f"{name}: no tokens")
  if int(ids.view(np.uint32).max()) >= vocab_size:  # Negative ones are huge.
    raise ValueError(f"{name}: an id is outside [0, {vocab_size})")
  if request.max_tokens < 1:
    raise ValueError(f"{name}: max_tokens={request.max_tokens} is below 1")
  if len(ids) + request.max_tokens > max_length:
    raise ValueError(
      f"{name}: {len(ids)} tokens and max_tokens={request.max_tokens} do "
      f"not fit model.max_length={max_length}"
    )
  if not 0 <= request.temperature < math.inf:
    raise ValueError(
      f"{name}: temperature={request.temperature} is not a number >= 0"
    )
  if len(request.stop_ids) > max_stop_ids:
    raise ValueError(
      f"{name}: {len(request.stop_ids)} stop ids, at most {max_stop_ids}"
    )
  if any(not 0 <= id_ < vocab_size for id_ in request.stop_ids):
    raise ValueError(
      f"{name}: stop_ids={request.stop_ids} leave [0, {vocab_size})"
    )
  if not -(2**31) <= request.seed < 2**31:
    raise ValueError(f"{name}: seed={request.seed} needs more than 32 bits")


def check_same_tree(old: Any, new: Any) -> None:
  """Raises ValueError when weights have other leaves, shapes or dtypes."""

  def describe(tree: Any) -> dict[str, Any]:
    return {
      jax.tree_util.keystr(path): (leaf.shape, leaf.dtype)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

  before, after = describe(old), describe(new)
  for name in sorted(before.keys() | after.keys()):
    if before.get(name) != after.get(name):
      raise ValueError(
        f"weights{name}: expected {before.get(name)}, got {after.get(name)}"
      )


@runtime_checkable
class DecodeEngine(Protocol):
  """Samples answers; all methods belong to one event loop."""

  @property
  def capabilities(self) -> frozenset[OnPublish]:
    """Ways in which `pause` can treat requests in flight."""
    ...

  async def generate(self, request: DecodeRequest) -> Completion:
    """Samples one answer.

    Raises:
      ValueError: the request cannot be served; others go on.
      EngineClosed: the engine stopped.
    """
    ...

  def abort(self, request_id: str) -> None:
    """Ends a request with what it has; unknown ids are ignored."""
    ...

  def release(self, session: str) -> None:
    """Frees what a session holds and aborts its request; unknown: ignored."""
    ...

  async def pause(self, in_flight: OnPublish) -> None:
    """Suspends; new requests queue until `resume`.

    Args:
      in_flight: with "drain" requests in flight finish first, with
        "recompute" they keep the tokens they have and this returns as soon as
        no device step runs.
    """
    ...

  async def update_weights(
    self, version: trajectory.PolicyVersion, params: Any
  ) -> None:
    """Serves `params` from now on; every cached key and value is recomputed.

    Args:
      version: must be higher than the served one.
      params: placed with the engine's shardings.

    Raises:
      ValueError: the version is no higher, or the tree is another model's.
      RuntimeError: the engine is not paused.
    """
    ...

  def resume(self) -> None:
    """Goes on after `pause`."""
    ...

  def stats(self) -> EngineStats:
    """Returns the counters."""
    ...

  async def close(self) -> None:
    """Stops; requests in flight raise EngineClosed."""
    ...
