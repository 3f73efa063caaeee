"""The thread of sglang-jax's scheduler, driven by jobs instead of sockets.

  post(job) --> _receive: jobs run, between two steps --> messages --> a step
  deliver  <--- _harvest: tokens of the step, and the version of its weights

Any thread may call `post`; everything else runs on the scheduler's thread. The
scheduler reads its requests here instead of from a tokenizer, and writes tokens
here instead of to a detokenizer: so requests are told apart by whole ids,
log-probabilities come once, new weights come between steps, and an idle
scheduler waits.

Written against the scheduler of sglang-jax's main;
`rl.engine.sglang.compat_0_0_2` gives release 0.0.2 what it lacks. Nothing of
sgl_jax is imported.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from rl.data import trajectory
from rl.engine import sampling

_LOOK_S = 1.0
_END: dict[str, trajectory.Stop] = {x: x for x in get_args(trajectory.Stop)}


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
  """The tokens of one step for one request.

  Attributes:
    rid: the scheduler's name of the request.
    version: of the weights that sampled them.
    flushed: version at which the prefix cache was last empty.
    cached: ids of the request whose keys and values were in the cache.
    end: reason of the request's end, or None.
  """

  rid: str
  tokens: list[int]
  logprobs: list[float]
  version: int
  flushed: int
  cached: int
  end: trajectory.Stop | None


class _Closed(Exception):
  """Ends the loop."""


class Bridge:
  """Runs one scheduler on a thread of its own.

  Life: `serve(scheduler)` by the constructor of sglang-jax's engine, then
  `post`, then `close`.

  Args:
    deliver: gets the outputs of each step, on the scheduler's thread.
    on_death: gets the error that ended the scheduler, on its thread.
    evict_argument: turns a number of ids into the argument of the prefix
      cache's `evict`.
    replicated: sharding of logits to sample from, on the engine's devices.
    on_step: gets the begin and the end of each step, on its thread.
  """

  def __init__(
    self,
    deliver: Callable[[list[Output]], None],
    on_death: Callable[[BaseException], None],
    evict_argument: Callable[[int], Any],
    replicated: jax.sharding.Sharding,
    on_step: Callable[[float, float], None],
  ):
    self._on_step = on_step
    self._step_began_s: float | None = None
    self._deliver = deliver
    self._on_death = on_death
    self._evict_argument = evict_argument
    self._replicated = replicated
    self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._when_idle: list[Callable[[], None]] = []
    self._messages: list[Any] = []
    self._known: dict[str, int] = {}
    self._held = False
    self._thread: threading.Thread | None = None
    self.scheduler: Any = None
    self._runner: Any = None
    self._requeue: Any = None
    self.version = -1
    self.flushed = -1
    self.last_seen = time.monotonic()
    self.compilations = 0
    self.preemptions = 0

  # Called by the engine's constructor, in the main thread.

  def serve(
    self, scheduler: Any, split: Callable[[Any], tuple[Any, Any]]
  ) -> None:
    """Hooks into a fresh scheduler and starts its loop.

    Args:
      split: that of flax.nnx.
    """
    self.scheduler = scheduler
    self._runner = scheduler.tp_worker.worker.model_runner
    # In the order of the runner's list of leaves.
    named = jax.tree_util.tree_leaves_with_path(split(self._runner.model)[1])
    self._paths = [jax.tree_util.keystr(path) for path, _ in named]
    self._runner.sample = self._sample
    self._runner.compute_logprobs = lambda logprobs, ids: logprobs
    scheduler.recv_requests = self._receive
    scheduler.stream_output = self._harvest
    # All other messages are notices of aborted requests, which we know of.
    scheduler.send_to_tokenizer = scheduler.send_to_detokenizer = self
    self._requeue = scheduler._extend_requests_to_queue
    scheduler._extend_requests_to_queue = self._count_preemptions
    self._thread = threading.Thread(
      target=self._run, name="sglang-jax", daemon=True
    )
    self._thread.start()

  # Called by any thread.

  def post(self, job: Callable[[], None], *, idle: bool = False) -> None:
    """Runs a job on the scheduler's thread, between two steps.

    Args:
      idle: only when no request runs or waits. Until then steps go on, even
        while the scheduler is held.
    """
    if idle:
      self._jobs.put(lambda: self._when_idle.append(job))
    else:
      self._jobs.put(job)

  def cancel(self, job: Callable[[], None]) -> None:
    """Drops a job that was posted to run when idle, if it has not run."""
    self.post(
      lambda: self._when_idle.remove(job) if job in self._when_idle else None
    )

  def close(self, timeout_s: float) -> None:
    """Ends the thread, or abandons it when a step hangs."""

    def end() -> None:
      raise _Closed

    self.post(end)
    if self._thread is not None:
      self._thread.join(timeout_s)
      if not self._thread.is_alive():  # They hold weights and cache.
        self.scheduler = self._runner = self._requeue = None

  @property
  def steps(self) -> int:
    """Device steps so far."""
    return getattr(self.scheduler, "forward_ct", 0)

  @property
  def pages(self) -> tuple[int, int]:
    """Pages of the cache, and the number that hold nothing."""
    # The thread may be ending at this moment.
    pool = getattr(self.scheduler, "token_to_kv_pool_allocator", None)
    if pool is None:
      return 0, 0
    return (
      pool.size // pool.page_size,
      pool.available_size() // pool.page_size,
    )

  @property
  def leaves(self) -> tuple[list[str], list[Array]]:
    """Key paths and arrays of the served weights, in one order."""
    return self._paths, self._runner.model_state_leaves

  # Called by jobs, on the scheduler's thread.

  def send(self, message: Any) -> None:
    """Hands a message to the scheduler before its next step."""
    self._messages.append(message)

  def hold(self) -> None:
    """Takes no more steps until `release`."""
    self._held = True

  def release(self) -> None:
    """Takes steps again."""
    self._held = False

  def swap(self, leaves: list[Array], version: int) -> None:
    """Serves other weights from the next step on."""
    self._runner.model_state_leaves = leaves
    self.version = version

  def flush(self) -> None:
    """Drops every cached prefix that no running request uses."""
    if self.scheduler.is_fully_idle():
      self.scheduler.flush_cache()
      self.flushed = self.version
      return
    tree = self.scheduler.tree_cache
    tree.evict(self._evict_argument(tree.evictable_size()))

  # The scheduler's loop.

  def _run(self) -> None:
    try:
      self.scheduler.event_loop_normal()
    except BaseException as error:
      self._on_death(error)
    finally:
      # Threads of sglang-jax outlive this one and hold both objects; emptied,
      # they free weights and cache.
      vars(self._runner).clear()
      vars(self.scheduler).clear()
      self.scheduler = self._runner = self._requeue = None

  def send_pyobj(self, message: Any) -> None:
    """Drops a message of the scheduler to its tokenizer."""

  def _receive(self) -> list[Any]:
    if self._step_began_s is not None:
      self._on_step(self._step_began_s, time.monotonic())
      self._step_began_s = None
    messages = self._next_messages()
    if messages or not self.scheduler.is_fully_idle():
      self._step_began_s = time.monotonic()
    return messages

  def _next_messages(self) -> list[Any]:
    while True:
      self.last_seen = time.monotonic()
      idle = self.scheduler.is_fully_idle() and not self._messages
      if idle:
        self._known.clear()  # Requests aborted in its queue are never reported.
        ready, self._when_idle = self._when_idle, []
        for job in ready:
          job()
      waits = idle or (self._held and not self._when_idle)
      try:
        job = self._jobs.get(block=waits, timeout=_LOOK_S if waits else None)
      except queue.Empty:
        if waits:
          continue
        messages, self._messages = self._messages, []
        return messages
      job()

  def _harvest(self, requests: Sequence[Any], *rest: Any, **named: Any) -> None:
    outputs = []
    # The last argument, by name or by position.
    misses = named.get("cache_miss_count", rest[-1] if rest else 0)
    self.compilations += misses or 0
    for request in requests:
      known = self._known.get(request.rid, 0)
      count = len(request.output_ids)
      reason = request.finished_reason
      if count == known and reason is None:  # Its prompt is not done.
        continue
      self._known[request.rid] = count
      if reason is not None:
        del self._known[request.rid]
      logprobs = request.output_token_logprobs_val[known:count]
      outputs.append(
        Output(
          rid=request.rid,
          tokens=[int(id_) for id_ in request.output_ids[known:count]],
          logprobs=[float(value) for value in logprobs],
          version=self.version,
          flushed=self.flushed,
          cached=int(request.cached_tokens),
          end=None if reason is None else _END[reason.to_json()["type"]],
        )
      )
    self._deliver(outputs)

  def _count_preemptions(
    self, requests: list[Any], is_retracted: bool = False
  ) -> None:
    self.preemptions += len(requests) * is_retracted
    self._requeue(requests, is_retracted)

  def _sample(self, output: Any, metadata: Any, fed: Any = None) -> Any:
    """Samples as the built-in engine does, in place of sglang-jax's sampler.

    Random numbers of its seeded requests depend on each other: of five ids with
    seeded noise, frequencies differ from probabilities by a total variation of
    0.2. Release 0.0.2 draws the same numbers at every step, and loses its
    log-probabilities inside a compiled program.
    """
    positions = metadata.positions if fed is None else fed
    logits, *params = jax.device_put(
      (
        output.next_token_logits,
        metadata.temperatures,
        metadata.top_ps,
        metadata.min_ps,
        metadata.top_ks,
        metadata.sampling_seeds,
        positions,
      ),
      self._replicated,
    )
    ids, logprobs = _pick(logits, *params)
    if fed is None:
      return ids, logprobs, None
    output.next_token_logprobs = logprobs
    return ids


@jax.jit
def _pick(
  logits: Float[Array, "R V"],
  temperature: Float32[Array, "R 1"],
  top_p: Float32[Array, " R"],
  min_p: Float32[Array, " R"],
  top_k: Int32[Array, " R"],
  seed: Int32[Array, " R"],
  fed: Int32[Array, " any"],
) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
  """Returns ids and log-probabilities; `fed` is the position before each."""
  size = logits.shape[1]
  params = sampling.SamplingParams(
    temperature=temperature[:, 0],
    top_p=top_p,
    min_p=min_p,
    # sglang-jax has a large number for all.
    top_k=jnp.where(top_k >= size, 0, top_k),
    seed=seed,
    bias=jnp.zeros_like(seed),
  )
  positions = fed[: len(logits)] + 1
  no_bias = jnp.zeros((1, size), np.float32)
  return sampling.sample(logits, positions, params, no_bias)
