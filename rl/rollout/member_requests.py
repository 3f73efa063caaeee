"""The requests of one member, between its player and the router.

  episode.play -> generate: in the past? --yes--> the answer of then
                               | no
                               v
                   +-> Hold.passed -> _sample -> Router.generate
                   +--- what it has <----- ended by `hold`
  AgentPlayer.play -> HTTP -> stream -> Router.stream

To save a run in flight its producer closes the `Hold`: requests end with the
tokens that they have, and go on from these when it opens. After a restart an
episode is played once more with the answers that it had: its environment, which
follows from the seed of its task and from these, must say the same again, and
then the engine goes on with the last one. It reads the conversation, as it
does after new weights, and the noise of an id follows from its position.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

import numpy as np

from rl.audit import event_log
from rl.data import trajectory
from rl.engine import contract
from rl.runtime import watchdog as watchdog_lib


class Diverged(Exception):
  """An environment, played again, said something else than before."""


class Hold:
  """Holds the requests of a run's members back while it is saved.

  The producer calls `close` and `open`; members wait in `passed`.

  Attributes:
    is_closed: from `close` to `open`.
    changed: set when a member has come to wait, or to its end.
  """

  def __init__(self):
    self.is_closed = False
    self.changed = asyncio.Event()
    self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}

  def close(self) -> None:
    """Lets nobody pass from now on."""
    self.is_closed = True

  def open(self) -> None:
    """Lets all pass, in the order of their places."""
    self.is_closed = False
    for place in sorted(self._waiting):
      self.let_pass(place)

  def let_pass(self, place: tuple[int, int]) -> bool:
    """Lets one pass; returns False if it does not wait."""
    if place not in self._waiting:
      return False
    self._waiting.pop(place).set_result(None)
    return True

  def waits(self, place: tuple[int, int]) -> bool:
    """Returns True if a member waits."""
    return place in self._waiting

  async def passed(self, place: tuple[int, int]) -> None:
    """Waits while it is closed.

    Args:
      place: group and index of the member.
    """
    if not self.is_closed:
      return
    opened = asyncio.get_running_loop().create_future()
    self._waiting[place] = opened
    self.changed.set()
    try:
      await opened
    finally:
      if self._waiting.get(place) is opened:
        del self._waiting[place]


class MemberRequests:
  """The requests of one member; logs its first token and lists its waits.

  Args:
    place: group, attempt and index, as events have them.
    turns: of the episode, which its player appends to.
    past: turns that it had before a restart; see `trajectory.OpenMember`.
    progress_timeout_s: deadline of an answer in the list of waits.

  Attributes:
    num_logged: turns from before the restart that were logged then.
    is_aborted: after `abort`.
  """

  def __init__(
    self,
    router: contract.SessionRouter,
    log: event_log.EventLog,
    place: Mapping[str, int],
    hold: Hold,
    *,
    turns: Sequence[trajectory.Turn],
    past: Sequence[trajectory.Turn] = (),
    watchdog: watchdog_lib.Watchdog = watchdog_lib.UNHEARD,
    progress_timeout_s: float = math.inf,
  ):
    self._router = router
    self._log = log
    self._place = place
    self._hold = hold
    self._key = place["group"], place["index"]
    self._turns = turns
    self._past = past
    self._watchdog = watchdog
    self._progress_timeout_s = progress_timeout_s
    self._running: set[str] = set()
    self._first = trajectory.first_version(past)
    self.is_aborted = False
    self._num_asked = 0
    self._sampling = ""  # The request that `hold` may end.
    # The newest answer, to which its environment may not have replied.
    self._open: tuple[contract.DecodeRequest, contract.Completion] | None = None
    self._is_continued = not past
    self.num_logged = len(past) - bool(past and past[-1].stop == "abort")

  @property
  def first_version(self) -> int | None:
    """Version of the first token; None before that is sampled."""
    if self._first is not None:
      return self._first
    return min(self._begun(), default=None)

  def _begun(self) -> Iterator[int]:
    for request_id in self._running:
      with contextlib.suppress(ValueError):  # It has just ended.
        begun = self._router.begun(request_id)
        if begun is not None:
          yield int(begun)

  def abort(self) -> bool:
    """Ends the current requests and refuses later ones; False if none runs."""
    self.is_aborted = True
    for request_id in self._running:
      with contextlib.suppress(ValueError):  # It has just ended.
        self._router.abort(request_id)
    return self._hold.let_pass(self._key) or bool(self._running)

  # Saved and continued.

  def hold(self) -> None:
    """Ends the current answer, to go on with it when the hold opens."""
    if self._sampling:
      with contextlib.suppress(ValueError):  # It has just ended.
        self._router.abort(self._sampling)

  @property
  def is_held(self) -> bool:
    """True if the next answer waits for the hold to open."""
    return self._hold.waits(self._key)

  @property
  def is_sampling(self) -> bool:
    """True while an answer is sampled that `hold` can end."""
    return bool(self._sampling)

  @property
  def turns_so_far(self) -> Sequence[trajectory.Turn]:
    """Turns to go on from after a restart; see `trajectory.OpenMember`."""
    if self._open is not None and len(self._turns) == self._num_asked - 1:
      return [*self._turns, _open_turn(self._turns, *self._open)]
    is_replayed = len(self._turns) < len(self._past)
    return self._past if is_replayed else list(self._turns)

  def log_continued(self, turns: Sequence[trajectory.Turn]) -> None:
    """Logs once that the member goes on after these turns of the past."""
    if self._is_continued:
      return
    self._is_continued = True
    self._log.emit(
      "continued",
      **self._place,
      turns=len(turns),
      tokens=sum(len(turn.tokens) for turn in turns),
      first_version=self._first,
      versions=trajectory.version_runs(turns),
    )

  def check_replayed(self, status: trajectory.Status) -> None:
    """Checks that an episode did not end before it came to where it was.

    Raises:
      Diverged: it did.
    """
    if self._is_continued or self.is_aborted:
      return
    num = len(self._turns)
    if num < len(self._past) or not status.trainable:
      raise Diverged(f"its environment ended it after {num} answers")
    self._check_reward(num)

  def _check_reward(self, number: int) -> None:
    """Compares the reward of the answer before one, if it had one."""
    if 0 < number <= self.num_logged:
      now, then = self._turns[number - 1].reward, self._past[number - 1].reward
      if now != then:
        raise Diverged(f"answer {number} got a reward of {now}, not {then}")

  def _remembered(
    self, request: contract.DecodeRequest, number: int
  ) -> contract.Completion:
    """Returns the answer of the past, or as much of it as there is.

    Raises:
      Diverged: the conversation is not the one of then.
    """
    self._check_reward(number)
    if number >= len(self._past):
      return _UNANSWERED
    turns = self._past[: number + 1]
    start = sum(turn.num_ids for turn in turns[:-1])
    if not np.array_equal(request.tokens[start:], turns[-1].context):
      raise Diverged(
        f"its environment said something else before answer {number + 1}"
      )
    return _as_completion(turns, request)

  # Requests.

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Samples one answer; see `contract.SessionRouter.generate`.

    Raises:
      Diverged: a replayed environment differs from what it was.
    """
    number, self._num_asked = self._num_asked, self._num_asked + 1
    answer = self._remembered(request, number) if self._past else _UNANSWERED
    if number < self.num_logged:
      return answer
    self.log_continued(self._turns)
    while answer.stop == "abort":
      self._open = request, answer
      if self._hold.is_closed:
        await self._hold.passed(self._key)
      if self.is_aborted:
        return answer
      if len(answer.tokens):
        rest = await self._sample(_rest(request, answer))
        answer = _joined(answer, rest)
      else:
        answer = await self._sample(request)
      if not self._hold.is_closed or self.is_aborted:
        break
    self._open = request, answer
    return answer

  async def _sample(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    asked_s, self._sampling = self._ask(request), request.request_id
    try:
      with self._tracked(request):
        completion = await self._router.generate(request)
    finally:
      self._sampling = ""
      self._running.discard(request.request_id)
      self._hold.changed.set()
    return self._answered(completion, asked_s)

  async def stream(
    self, request: contract.DecodeRequest
  ) -> AsyncGenerator[contract.Delta]:
    """Yields an answer as it is sampled; see `contract.SessionRouter`."""
    asked_s = self._ask(request)
    try:
      deltas = self._router.stream(request)
      with self._tracked(request):
        async with contextlib.aclosing(deltas):
          async for delta in deltas:
            if delta.completion is not None:
              done = self._answered(delta.completion, asked_s)
              delta = dataclasses.replace(delta, completion=done)
            yield delta
    finally:
      self._running.discard(request.request_id)

  def _ask(self, request: contract.DecodeRequest) -> float:
    """Lists a request as running, and returns the time."""
    if self.is_aborted:  # The environment caught its cancellation.
      raise asyncio.CancelledError
    self._running.add(request.request_id)
    return asyncio.get_running_loop().time()

  def _tracked(self, request: contract.DecodeRequest) -> watchdog_lib.Listed:
    return self._watchdog.track(
      owner=f"episode {request.session}",
      what="an answer of the engine",
      deadline_s=self._progress_timeout_s,
    )

  def _answered(
    self, completion: contract.Completion, asked_s: float
  ) -> contract.Completion:
    if self._first is None and len(completion.versions):
      # One that is still running may have begun under older weights.
      self._first = min([int(completion.versions[0]), *self._begun()])
      self._log.emit(
        "first_token",
        t=self._log.since(asked_s + completion.first_token_s),
        **self._place,
        version=self._first,
      )
    if self.is_aborted:  # It may have ended by itself at the same moment.
      completion = dataclasses.replace(completion, stop="abort")
    return completion


def _open_turn(
  turns: Sequence[trajectory.Turn],
  request: contract.DecodeRequest,
  answer: contract.Completion,
) -> trajectory.Turn:
  """Returns an answer behind some turns, without a reply."""
  start = sum(turn.num_ids for turn in turns)
  experts = answer.experts
  return trajectory.Turn(
    context=request.tokens[start:],
    tokens=answer.tokens,
    logprobs=answer.logprobs,
    versions=answer.versions,
    stop="abort",
    decode_s=answer.decode_s,
    queue_s=answer.queue_s,
    experts=None if experts is None else experts[start:],
  )


def _as_completion(
  turns: Sequence[trajectory.Turn], request: contract.DecodeRequest
) -> contract.Completion:
  """Returns the answer of the last of some turns."""
  last = turns[-1]
  stop = last.stop
  if stop == "abort" and len(last.tokens):
    if int(last.tokens[-1]) in request.stop_ids:
      stop = "stop"
    elif len(last.tokens) >= request.max_tokens:
      stop = "length"
  experts = [] if last.experts is None else [turn.experts for turn in turns]
  return contract.Completion(
    tokens=last.tokens,
    logprobs=last.logprobs,
    versions=last.versions,
    stop=stop,
    cached_tokens=0,
    decode_s=last.decode_s,
    queue_s=last.queue_s,
    experts=np.concatenate(experts) if experts else None,
  )


def _rest(
  request: contract.DecodeRequest, answer: contract.Completion
) -> contract.DecodeRequest:
  """Returns the request for the rest of an answer."""
  return dataclasses.replace(
    request,
    tokens=np.concatenate([request.tokens, answer.tokens]),
    max_tokens=request.max_tokens - len(answer.tokens),
  )


def _joined(
  first: contract.Completion, rest: contract.Completion
) -> contract.Completion:
  """Returns an answer that was sampled in two pieces.

  Ids that both pieces have fed keep the experts of the first, with whose
  weights its tokens were sampled.
  """
  experts = rest.experts
  if experts is not None and first.experts is not None:
    experts = experts.copy()
    known = first.experts >= 0
    experts[: len(known)][known] = first.experts[known]
  return dataclasses.replace(
    rest,
    tokens=np.concatenate([first.tokens, rest.tokens]),
    logprobs=np.concatenate([first.logprobs, rest.logprobs]),
    versions=np.concatenate([first.versions, rest.versions]),
    decode_s=first.decode_s + rest.decode_s,
    experts=experts,
    queue_s=first.queue_s + rest.queue_s,
  )


_UNANSWERED = contract.Completion(
  tokens=np.zeros(0, np.int32),
  logprobs=np.zeros(0, np.float32),
  versions=np.zeros(0, np.int32),
  stop="abort",
  cached_tokens=0,
  decode_s=0.0,
)
