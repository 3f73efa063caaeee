"""Records the answers of one session as a tree; branches are trajectories.

  messages -> begin -> recorded ids + new ids -> engine -> record

A request continues the recorded answer that its history ends with, and reuses
the recorded ids of that history: sampled text is never encoded again. The
first request after an answer continues its branch. A second one starts a new
branch, in which everything before it is context, so that each sampled id
belongs to exactly one branch. A history with an edited answer is encoded anew,
as another branch.
"""

import contextlib
import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from envs import base
from rl.agents import messages as messages_lib
from rl.data import trajectory
from rl.engine import contract
from rl.rollout import episode as episode_lib
from rl.runtime import isolation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
  """The outcome of a session and the episode it belongs to.

  Attributes:
    reward: of every branch; None if it is graded elsewhere.
    fault: description of the fault, if any.
    task_id: the name of the session if empty.
  """

  status: trajectory.Status = trajectory.Status.COMPLETED
  reward: float | None = None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  fault: str = ""
  task_id: str = ""
  group_id: int = 0
  index: int = 0

  def __post_init__(self):
    try:
      if self.reward is not None:
        isolation.checked_reward(self.reward)
      for name, part in self.parts.items():
        isolation.checked_reward(part, f"part {name} of the reward")
    except isolation.Fault as error:
      raise ValueError(str(error)) from None
    if self.reward is not None and not self.status.trainable:
      raise ValueError(
        f"reward={self.reward} with status={self.status.value}: a fault has no "
        "reward; leave it out"
      )


Encode = Callable[
  [
    Sequence[base.Message],
    Sequence[Mapping[str, Any]],
    Int32[np.ndarray, " T"] | None,
  ],
  Int32[np.ndarray, " P"],
]
"""Returns the ids of messages; see `messages.encode`."""

# Objects, names and ids.
_ANSWER_BYTES, _MESSAGE_BYTES = 2000, 1000

INTERRUPTED = Ending(status=trajectory.Status.TRUNCATED)
"""The end of a session that nobody finished."""


@dataclasses.dataclass(slots=True, eq=False)
class _Answer:
  """A completion with its context and the answers that continue it.

  A history that contains this answer shows `prompt_keys` and then
  `answer_key`; both are None if the request came as ids. `said` are the same
  as messages. The first of `children` belongs to the same branch.
  """

  before: "_Answer | None"
  prompt_keys: tuple[Any, ...] | None
  answer_key: Any
  said: tuple[base.Message, ...]
  tools: str
  context: Int32[np.ndarray, " P"]
  completion: contract.Completion
  asked_s: float
  answered_s: float
  children: "list[_Answer]" = dataclasses.field(default_factory=list)

  @property
  def ids(self) -> Int32[np.ndarray, " N"]:
    """The whole conversation up to the end of this answer."""
    pieces, answer = [], self
    while answer is not None:
      pieces += [answer.completion.tokens, answer.context]
      answer = answer.before
    return np.concatenate(pieces[::-1])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Opening:
  """A request with its place in the tree of a session.

  Attributes:
    number: of the request in its session.
    tokens: the whole conversation, N ids; the last P are new.
    seed: 31 bits that differ between requests and repeat in a rerun.
  """

  number: int
  tokens: Int32[np.ndarray, " N"]
  seed: int
  context: Int32[np.ndarray, " P"]
  before: _Answer | None
  prompt_keys: tuple[Any, ...] | None
  said: tuple[base.Message, ...]
  tools: str
  asked_s: float


class Session:
  """The conversations of one agent in one episode.

  Args:
    seed: seeds the requests that have no seed of their own.
    priority: of its requests in the engine's queue.
    clock: in seconds.
    owner: of the session; see `sessions.Sessions`.
    temperature: of all its requests, whatever they ask for; None is theirs.

  Attributes:
    running: requests that wait for an answer.
    num_bytes: about what its answers take.
    asked_s, used_s: of its last request, and of the end of one, on `clock`.
    was_too_long: a conversation was refused because it cannot fit.
    engine_closed: one of them never will have one.
    on_record: called after each answer.
  """

  def __init__(
    self,
    name: str,
    chat: episode_lib.Chat,
    seed: int,
    priority: tuple[int, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    owner: str = "",
    temperature: float | None = None,
  ):
    self.name = name
    self.owner = owner
    self.temperature = temperature
    self.priority = priority
    self.running = 0
    self.num_bytes = 0
    self.asked_s = self.used_s = clock()
    self.was_too_long = False
    self.engine_closed = False
    self.on_record: Callable[[], None] = lambda: None
    self._chat = chat
    self._seed = seed
    self._clock = clock
    self._number = 0
    self._roots: list[_Answer] = []
    self._heads: list[_Answer] = []
    self._last: _Answer | None = None

  @property
  def number(self) -> int:
    """Requests so far."""
    return self._number

  @property
  def num_answers(self) -> int:
    """Answers on record."""
    return sum(len(branch) for branch in self._branches())

  @contextlib.contextmanager
  def request_running(self) -> Iterator[None]:
    """Keeps the session from being ended as idle while a request runs."""
    self.running += 1
    try:
      yield
    finally:
      self.running -= 1
      self.used_s = self._clock()

  def take_number(self) -> int:
    """Returns the number of one more request; called on the event loop."""
    self._number += 1
    return self._number - 1

  def begin(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]] = (),
    number: int | None = None,
    encode: Encode | None = None,
  ) -> Opening:
    """Returns the ids of a conversation and its place in the tree.

    An answer in it matches a recorded one that has the same text, apart from
    white space around it, and calls the same tools with the same values.

    Args:
      number: from `take_number`, which a caller in another thread needs.
      encode: does as `messages.encode` with the chat of the session, elsewhere.

    Raises:
      ValueError: the chat cannot encode it.
    """
    number = self.take_number() if number is None else number
    encode = encode or functools.partial(messages_lib.encode, self._chat)
    with messages_lib.encoding():
      return self._begin(messages, tools, number, encode)

  def _begin(
    self,
    messages: Sequence[base.Message],
    tools: Sequence[Mapping[str, Any]],
    number: int,
    encode: Encode,
  ) -> Opening:
    keys = tuple(messages_lib.key(message) for message in messages)
    shown = json.dumps(tools, sort_keys=True) if tools else ""

    def end(answer: _Answer, start: int) -> int:
      if answer.prompt_keys is None or answer.tools != shown:
        return 0
      stop = start + len(answer.prompt_keys) + 1
      same = keys[start:stop] == (*answer.prompt_keys, answer.answer_key)
      return stop if same else 0

    before, num_recorded = self._deepest(end)
    if any(message.role == "assistant" for message in messages[num_recorded:]):
      before, num_recorded = None, 0
    sampled = before and before.completion.tokens
    context = encode(messages[num_recorded:], tools, sampled)
    context = np.asarray(context, np.int32)
    said = tuple(messages[num_recorded:])
    keys = keys[num_recorded:]
    return self._opening(number, before, context, keys, said, shown)

  def begin_ids(
    self, ids: Int32[np.ndarray, " N"], number: int | None = None
  ) -> Opening:
    """Returns the place of a conversation that came as ids; see `begin`."""
    number = self.take_number() if number is None else number

    def end(answer: _Answer, start: int) -> int:
      for piece in (answer.context, answer.completion.tokens):
        if not np.array_equal(ids[start : start + len(piece)], piece):
          return 0
        start += len(piece)
      return start

    before, num_recorded = self._deepest(end)
    return self._opening(number, before, ids[num_recorded:], None, (), "")

  def record(
    self,
    opening: Opening,
    completion: contract.Completion,
    answer: base.Message | None,
  ) -> None:
    """Adds an answer to the tree.

    Args:
      answer: as sent to the agent; None if the request came as ids.
    """
    before = opening.before
    answered = answer
    if answered is None:
      answered = episode_lib.as_message(self._chat.parse(completion.tokens))
    entry = _Answer(
      before=before,
      prompt_keys=opening.prompt_keys,
      answer_key=answer and messages_lib.key(answer),
      said=(*opening.said, answered),
      tools=opening.tools,
      context=opening.context,
      completion=completion,
      asked_s=opening.asked_s,
      answered_s=self._clock(),
    )
    siblings = self._roots if before is None else before.children
    if before is None or siblings:
      self._heads.append(entry)
    siblings.append(entry)
    self._last = entry
    self.num_bytes += _size(entry)
    self.on_record()

  def add_to(self, partial: episode_lib.PartialTrajectory) -> None:
    """Adds all answers to an empty trajectory, branch after branch."""
    for branch in self._branches():
      _add_turns(partial, branch)

  @property
  def messages(self) -> list[base.Message]:
    """The conversation of the last answer, from its first message on.

    Of a request that came as ids it has the answer alone.
    """
    said, answer = [], self._last
    while answer is not None:
      said.append(answer.said)
      answer = answer.before
    return [message for piece in said[::-1] for message in piece]

  def trajectories(self, ending: Ending) -> list[trajectory.Trajectory]:
    """Returns one trajectory per branch, oldest first.

    A branch with an answer that the engine aborted has ENGINE_FAULT.
    """
    branches = self._branches() or [[]]
    return [self._trajectory(branch, ending) for branch in branches]

  def _trajectory(
    self, branch: Sequence[_Answer], ending: Ending
  ) -> trajectory.Trajectory:
    task = base.Task(ending.task_id or self.name, 0, "train", 0)
    partial = episode_lib.PartialTrajectory(
      episode_lib.Episode(task, ending.group_id, ending.index, self._seed)
    )
    _add_turns(partial, branch)
    status, fault, reward = ending.status, ending.fault, ending.reward
    if status.trainable and any(turn.stop == "abort" for turn in partial.turns):
      status, fault = trajectory.Status.ENGINE_FAULT, "aborted"
      reward = None
    parts = {} if reward is None else dict(ending.parts)
    ended, _ = partial.end(status, fault)
    return dataclasses.replace(ended, reward=reward, parts=parts)

  def _branches(self) -> list[list[_Answer]]:
    branches = []
    for head in self._heads:
      branch = [head]
      while branch[-1].children:
        branch.append(branch[-1].children[0])
      branches.append(branch)
    return branches

  def _deepest(
    self, end: Callable[[_Answer, int], int]
  ) -> tuple[_Answer | None, int]:
    """Returns the deepest answer of a history, and its end in the history.

    Args:
      end: (answer, start) -> its end; 0 if the history does not contain it.
    """
    best, depth = None, 0
    # Popped from the end: among equals the newest wins.
    stack = [(root, 0) for root in self._roots]
    while stack:
      answer, start = stack.pop()
      stop = end(answer, start)
      if not stop:
        continue
      if stop > depth:
        best, depth = answer, stop
      stack += [(child, stop) for child in answer.children]
    return best, depth

  def _opening(
    self,
    number: int,
    before: _Answer | None,
    context: Int32[np.ndarray, " P"],
    prompt_keys: tuple[Any, ...] | None,
    said: tuple[base.Message, ...],
    tools: str,
  ) -> Opening:
    recorded = [] if before is None else [before.ids]
    return Opening(
      number=number,
      tokens=np.concatenate([*recorded, context]),
      seed=zlib.crc32(f"{self._seed}/{number}".encode()) & 0x7FFFFFFF,
      context=context,
      before=before,
      prompt_keys=prompt_keys,
      said=said,
      tools=tools,
      asked_s=self._clock(),
    )


def _size(answer: _Answer) -> int:
  """Returns about the bytes of an answer, without those before it."""
  done, size = answer.completion, _ANSWER_BYTES + 4 * len(answer.tools)
  for one in (answer.context, done.tokens, done.logprobs, done.versions):
    size += one.nbytes
  if done.experts is not None:
    size += done.experts.nbytes
  for message in answer.said:
    # The keys repeat the arguments of calls. A character takes up to 4 bytes.
    calls = [2 * len(call.arguments) for call in message.tool_calls]
    thought = len(message.reasoning or "")
    size += 4 * (len(message.content) + thought + sum(calls))
    size += _MESSAGE_BYTES * (1 + len(calls))
  return size


def _add_turns(
  partial: episode_lib.PartialTrajectory, branch: Sequence[_Answer]
) -> None:
  """Adds the answers of a branch to a trajectory, as a conversation."""
  opens = bool(partial.turns)
  for place, answer in enumerate(branch):
    context = answer.context
    if not place and answer.before is not None:
      context = np.concatenate([answer.before.ids, context])
    env_s = 0.0
    if answer.children:
      env_s = max(answer.children[0].asked_s - answer.answered_s, 0.0)
    partial.add(
      context, answer.completion, env_s, 0.0, opens=opens and not place
    )
