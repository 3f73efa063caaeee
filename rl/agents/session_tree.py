"""One session: the answers that an agent got -> Trajectories.

  messages -> begin -> ids: those on record, and new ones -> engine -> record

The answers of a session are a tree. A request goes on behind the answer that
its history ends with, and the ids of that history are those on record: what
was sampled is never encoded again. The first request that goes on behind an
answer belongs to its branch. A second one begins a branch of its own, in which
all before it is context, so that every sampled id is in exactly one branch. A
history in which an answer was changed is encoded anew, as another branch.
"""

import contextlib
import dataclasses
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
  """How a session ended, and which episode it was.

  Attributes:
    reward: of all its branches; None leaves the grading to others.
    fault: what went wrong, in words.
    task_id: the name of the session when empty.
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


@dataclasses.dataclass(slots=True, eq=False)
class _Answer:
  """A completion, the context it was asked with, and what went on from it.

  `said` and `answer` are what a history must show to be this one's; None where
  ids were asked with. The first of `children` is of the same branch.
  """

  before: "_Answer | None"
  said: tuple[Any, ...] | None
  answer: Any
  tools: str
  context: Int32[np.ndarray, " P"]
  completion: contract.Completion
  asked_s: float
  answered_s: float
  children: "list[_Answer]" = dataclasses.field(default_factory=list)

  @property
  def ids(self) -> Int32[np.ndarray, " N"]:
    """The whole conversation up to the end of this answer."""
    pieces, at = [], self
    while at is not None:
      pieces += [at.completion.tokens, at.context]
      at = at.before
    return np.concatenate(pieces[::-1])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Opening:
  """A request that found its place in a session.

  Attributes:
    tokens: the whole conversation, N ids, the last P of them new.
    seed: 31 bits that differ between requests and repeat in a rerun.
  """

  tokens: Int32[np.ndarray, " N"]
  seed: int
  context: Int32[np.ndarray, " P"]
  before: _Answer | None
  said: tuple[Any, ...] | None
  tools: str
  asked_s: float


class Session:
  """One conversation, or several that one agent leads."""

  def __init__(
    self,
    name: str,
    chat: episode_lib.Chat,
    seed: int,
    priority: tuple[int, ...] = (),
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts without answers; `Sessions.open` calls it.

    Args:
      seed: decides the seeds of requests that bring none.
      priority: of its requests, where they wait for the engine.
      clock: in seconds.
    """
    self.name = name
    self.priority = priority
    self.running = 0
    self.engine_closed = False
    self._chat = chat
    self._seed = seed
    self._clock = clock
    self._number = 0
    self._roots: list[_Answer] = []
    self._heads: list[_Answer] = []

  @property
  def number(self) -> int:
    """Requests so far."""
    return self._number

  @property
  def num_answers(self) -> int:
    """Answers on record."""
    return sum(len(branch) for branch in self._branches())

  @contextlib.contextmanager
  def asking(self) -> Iterator[None]:
    """Keeps the session from being given up while a request of it runs."""
    self.running += 1
    try:
      yield
    finally:
      self.running -= 1

  def begin(
    self,
    messages: Sequence[messages_lib.Message],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> Opening:
    """Returns the ids of a conversation.

    An answer in it counts as the one on record when it has the same text, but
    for white space around it, and calls the same tools with the same values.

    Raises:
      ValueError: the chat has no ids for it.
    """
    try:
      return self._begin(messages, tools)
    except ValueError:
      raise
    except Exception as error:  # Templates and tokenizers raise all kinds.
      raise ValueError(
        f"the messages cannot be encoded: {isolation.reason(error)}"
      ) from error

  def _begin(
    self,
    messages: Sequence[messages_lib.Message],
    tools: Sequence[Mapping[str, Any]],
  ) -> Opening:
    keys = tuple(messages_lib.key(message) for message in messages)
    shown = json.dumps(tools, sort_keys=True) if tools else ""

    def end(answer: _Answer, start: int) -> int:
      if answer.said is None or answer.tools != shown:
        return 0
      stop = start + len(answer.said) + 1
      same = keys[start:stop] == (*answer.said, answer.answer)
      return stop if same else 0

    before, known = self._deepest(end)
    if any(message.role == "assistant" for message in messages[known:]):
      before, known = None, 0
    if before is None:
      context = messages_lib.open_ids(self._chat, messages, tools)
    else:
      context = messages_lib.append_ids(
        self._chat, messages[known:], before.completion.tokens
      )
    context = np.asarray(context, np.int32)
    return self._opening(before, context, keys[known:], shown)

  def begin_ids(self, ids: Int32[np.ndarray, " N"]) -> Opening:
    """Returns the place of a conversation that is given as ids."""

    def end(answer: _Answer, start: int) -> int:
      for piece in (answer.context, answer.completion.tokens):
        if not np.array_equal(ids[start : start + len(piece)], piece):
          return 0
        start += len(piece)
      return start

    before, known = self._deepest(end)
    return self._opening(before, ids[known:], None, "")

  def record(
    self,
    opening: Opening,
    completion: contract.Completion,
    answer: messages_lib.Message | None,
  ) -> None:
    """Keeps an answer.

    Args:
      answer: as the agent got it; None when it asked with ids.
    """
    before = opening.before
    entry = _Answer(
      before=before,
      said=opening.said,
      answer=answer and messages_lib.key(answer),
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

  def trajectories(self, ending: Ending) -> list[trajectory.Trajectory]:
    """Returns one for each branch, in the order in which they began.

    A branch in which the engine gave an answer up has ENGINE_FAULT.
    """
    branches = self._branches() or [[]]
    return [self._trajectory(branch, ending) for branch in branches]

  def _trajectory(
    self, branch: Sequence[_Answer], ending: Ending
  ) -> trajectory.Trajectory:
    task = base.Task(ending.task_id or self.name, 0, "train", 0)
    record = episode_lib.Record(
      episode_lib.Episode(task, ending.group_id, ending.index, self._seed)
    )
    _turns(record, branch)
    status, fault, reward = ending.status, ending.fault, ending.reward
    if status.trainable and any(turn.stop == "abort" for turn in record.turns):
      status, fault = trajectory.Status.ENGINE_FAULT, "aborted"
      reward = None
    parts = {} if reward is None else dict(ending.parts)
    left, _ = record.end(status, fault)
    return dataclasses.replace(left, reward=reward, parts=parts)

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
    """Returns the answer furthest into a history, and where it ends there.

    Args:
      end: where an answer that begins at a place ends; 0 when it is another.
    """
    best, depth = None, 0
    # Popped from the end: of several that fit, the latest was seen last.
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
    before: _Answer | None,
    context: Int32[np.ndarray, " P"],
    said: tuple[Any, ...] | None,
    tools: str,
  ) -> Opening:
    number, self._number = self._number, self._number + 1
    known = [] if before is None else [before.ids]
    return Opening(
      tokens=np.concatenate([*known, context]),
      seed=zlib.crc32(f"{self._seed}/{number}".encode()) & 0x7FFFFFFF,
      context=context,
      before=before,
      said=said,
      tools=tools,
      asked_s=self._clock(),
    )


def _turns(record: episode_lib.Record, branch: Sequence[_Answer]) -> None:
  """Adds the answers of a branch to a record that has none."""
  for place, answer in enumerate(branch):
    context = answer.context
    if not place and answer.before is not None:
      context = np.concatenate([answer.before.ids, context])
    env_s = 0.0
    if answer.children:
      env_s = max(answer.children[0].asked_s - answer.answered_s, 0.0)
    record.add(context, answer.completion, env_s, 0.0)
