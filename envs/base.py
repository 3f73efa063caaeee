"""The contract of environments, tasks and rewards: text in, text out."""

import contextlib
import contextvars
import dataclasses
import inspect
import json
import os
import reprlib
import sysconfig
import traceback
import types
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]
OPENAI_ROLES: Mapping[str, Role] = {
  "system": "system",
  "developer": "system",
  "user": "user",
  "assistant": "assistant",
  "tool": "tool",
}
"""Roles of the OpenAI API, and what they are here."""

_MAX_SEEDS = 1000
_MAX_REASON = 4000
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = ("envs", "launch", "models", "rl", "twinmesh")
_NOT_THE_USERS = (
  *(os.path.join(_ROOT, top, "") for top in _OURS),
  os.path.join(sysconfig.get_path("stdlib"), ""),
  "<",  # Generated code, such as that of dataclasses.
)
_INSTALLED = {"site-packages", "dist-packages"}
_NO_METRICS: Mapping[str, float] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
  """One call of a tool by the agent.

  Attributes:
    arguments: JSON text of an object.
    id: unique within a conversation; None in sampled text, which has none.
  """

  name: str
  arguments: str
  id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
  """One message of a conversation.

  Attributes:
    content: text; of an answer, what is left without reasoning and tool calls.
    tool_calls: of an answer, in order, where the model's format has such.
    reasoning: of an answer: what the model thought before it.
    name: of the tool whose result this is.
    tool_call_id: the call whose result this is.
  """

  role: Role
  content: str
  tool_calls: tuple[ToolCall, ...] = ()
  reasoning: str | None = None
  name: str | None = None
  tool_call_id: str | None = None


def part_text(part: Any) -> str | None:
  """Returns the text of a part of a content of the OpenAI API, if it is one."""
  is_text = isinstance(part, Mapping) and part.get("type") == "text"
  text = part.get("text") if is_text else None
  return text if isinstance(text, str) else None


def calling(tool: str, /, **arguments: Any) -> Message:
  """Returns an answer that calls one tool."""
  call = ToolCall(tool, json.dumps(arguments, ensure_ascii=False))
  return Message("assistant", "", (call,))


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
  """One thing to do; equal tasks build equal environments.

  Attributes:
    id: unique within a run, readable: "guess_number/train/17".
    index: position in the stream of its split.
    split: eval tasks never appear in training.
    seed: determines all randomness of the environment.
    answer: the final answer alone, such as "42", for a reward that compares
      (`envs.rewards`); None if there is none. Only rewards read it: it must not
      stand in a message.
  """

  id: str
  index: int
  split: Split
  seed: int
  answer: str | None = None

  @property
  def source(self) -> str:
    """Name of the source that made the task: the first part of its id."""
    return self.id.partition("/")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
  """The environment's reply to one answer.

  Attributes:
    messages: shown to the agent next; may be empty when done.
    reward: of this step. Untrusted: the rollout requires a finite number, or a
      bool for 1 or 0, and anything else is a fault of the environment.
    done: the episode is over.
    metrics: numbers of the environment's own, by name. They are summed over an
      episode; a round reports their mean over its episodes as `env/<name>`.
  """

  messages: Sequence[Message]
  reward: float
  done: bool
  metrics: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: _NO_METRICS  # Python 3.11 takes no view as default.
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Transcript:
  """A finished episode as text, the only input of a stateless reward.

  Attributes:
    messages: both sides, in order.
    step_rewards: one for each answer of the agent that was stepped.
  """

  messages: Sequence[Message]
  step_rewards: Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
  """The reward of one trajectory and the named parts it is made of."""

  value: float
  parts: Mapping[str, float]

  @classmethod
  def single(cls, name: str, value: float) -> "Grade":
    """Returns a grade of one part, which is all of it."""
    return cls(float(value), {name: float(value)})


@runtime_checkable
class Environment(Protocol):
  """One episode. Single-use: start, step until done, close.

  Any method may raise; the rollout turns it into a status of the trajectory.
  An environment with tools also has an attribute `tools`, read after `start`:
  JSON schemas of functions, as in the OpenAI API. One whose source limits the
  number of environments has a coroutine `admit()`, awaited before `start` and
  beyond its deadline, which returns when there is room; a run with `repeatable`
  refuses it.
  """

  async def start(self) -> Sequence[Message]:
    """Returns the first observation."""
    ...

  def step(self, answer: Message) -> Awaitable[Step]:
    """Returns the reply to the agent's answer.

    As a rule it is `async`. A plain future costs a task less where thousands
    of environments only wait.
    """
    ...

  async def close(self) -> None:
    """Releases the resources of the episode; called once, on every path."""
    ...


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
  """The address at which an agent asks for its answers.

  Attributes:
    url: of its session; "/v1/messages" of Anthropic's API lies below it.
    key: of the API; it is not secret, and names the session.
  """

  url: str
  key: str

  @property
  def openai_url(self) -> str:
    """The base_url of a client of the OpenAI API."""
    return f"{self.url}/v1"


@dataclasses.dataclass(frozen=True, slots=True)
class AgentResult:
  """The end of an agent's episode.

  Attributes:
    reward: None leaves it to a reward of the run that reads the transcript.
    metrics: numbers of the agent's own, by name, as those of a `Step`.
  """

  reward: float | None
  metrics: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: _NO_METRICS  # Python 3.11 takes no view as default.
  )


@runtime_checkable
class Agent(Protocol):
  """One episode of a program that asks for its answers itself.

  A source may build it in place of an `Environment`: `run` takes the place of
  `start` and `step`. Only a run can play it, with a server of its answers.
  """

  async def run(self, endpoint: Endpoint) -> AgentResult:
    """Plays to the end; cancelled when it takes too long between answers."""
    ...

  async def close(self) -> None:
    """Releases the resources of the episode; called once, on every path."""
    ...


@runtime_checkable
class Source(Protocol):
  """A family of tasks and how to build their environments.

  Frozen, hashable, picklable: it is a setting of the run. A source may also be
  a `WordList` and may be one that `Demonstrates`.
  """

  @property
  def name(self) -> str:
    """Short name: the first part of every task id."""
    ...

  def task(self, index: int, split: Split) -> Task:
    """Returns the task at `index` >= 0 of a split; the stream has no end."""
    ...

  def __call__(self, task: Task) -> Environment:
    """Returns a fresh environment; does no slow work (that is `start`)."""
    ...


@runtime_checkable
class WordList(Protocol):
  """A source of few words, which a model without a tokenizer can learn."""

  @property
  def words(self) -> Sequence[str]:
    """Every word of its environments' messages and answers, without repeats."""
    ...


@runtime_checkable
class Demonstrates(Protocol):
  """A source that plays its own tasks, for a warm start.

  It may also have a method `check_demonstrations()`, which raises ValueError
  if it cannot as it is set.
  """

  def oracle(self, task: Task, messages: Sequence[Message]) -> str | Message:
    """Returns a good answer to a conversation, tool calls included."""
    ...

  def explore(
    self, task: Task, messages: Sequence[Message], seed: int
  ) -> str | Message:
    """Returns a random legal answer; the same seed gives the same answer."""
    ...


def check_name(name: str) -> None:
  """Raises ValueError if a source cannot be called this."""
  if not name or "/" in name:
    raise ValueError(
      f"name={name!r}: a name is the first part of a task id, so it must not "
      "be empty or contain a slash"
    )


def misfit(function: Callable[..., Any], *args: Any) -> str:
  """Returns why a function cannot be called like this; "" if it can."""
  try:
    inspect.signature(function).bind(*args)
  except TypeError as error:
    return str(error)
  except ValueError:  # Some that are written in C do not tell.
    pass
  return ""


def split_of(text: str, eval_every: int = 5) -> Split:
  """Returns the split of a text by its hash: one in so many is for eval."""
  return "eval" if zlib.crc32(text.encode()) % eval_every == 0 else "train"


def first_seed(
  name: str, split: Split, index: int, beginning: Callable[[int], str]
) -> int:
  """Returns the first of a task's seeds that is of the split.

  The splits of a source that takes its seeds from here share no beginning.

  Args:
    name: of the source, for the error.
    beginning: seed of 32 bits -> the text by whose hash tasks are split.

  Raises:
    ValueError: none is.
  """
  for attempt in range(_MAX_SEEDS):
    seed = zlib.crc32(f"{split}/{index}/{attempt}".encode())
    if split_of(beginning(seed)) == split:
      return seed
  raise ValueError(
    f"none of {_MAX_SEEDS} tasks of {name} is for {split}: these settings have "
    "too few different ones; use larger or harder ones"
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
  """A conversation that has taken place, for supervised training.

  Attributes:
    place: where it stands, for errors: "chats.jsonl:17".
    messages: ends with an answer.
    tools: JSON schemas of functions, as in the OpenAI API.
    first: answers from this message on are trained, earlier ones are context.
  """

  place: str
  messages: Sequence[Message]
  tools: Sequence[Mapping[str, Any]] = ()
  first: int = 0


@runtime_checkable
class Recorded(Protocol):
  """A source of recorded conversations."""

  @property
  def paired(self) -> bool:
    """True if an example is a preferred conversation and a rejected one.

    Else it is a single conversation.
    """
    ...

  def examples(self, split: Split) -> Iterator[tuple[Recording, ...]]:
    """Yields every example of a split once, in order.

    Raises:
      ValueError: a row holds none; names its place and field.
    """
    ...


def words(source: Source) -> Sequence[str]:
  """Returns the words of a source.

  Raises:
    ValueError: it has no list of them.
  """
  if isinstance(source, WordList):
    return source.words
  raise ValueError(
    f"environment {source.name} has no list of words, so the run needs the "
    "tokenizer of a model: name one by initial, or use chat=hf(directory='DIR')"
  )


def check_source(source: Source) -> None:
  """Raises ValueError where a source lacks what every run asks of it."""
  wanted = ("name", "task", "__call__")
  if missing := [name for name in wanted if not hasattr(source, name)]:
    raise ValueError(
      f"environment {type(source).__name__} has no {', '.join(missing)}; see "
      "envs.base.Source"
    )


def demonstrator(source: Source) -> Demonstrates:
  """Returns a source that can play its own tasks.

  Raises:
    ValueError: it cannot, or what it wraps cannot.
  """
  if isinstance(source, Demonstrates):
    if (check := getattr(source, "check_demonstrations", None)) is not None:
      check()
    return source
  raise ValueError(
    f"environment {source.name} has no demonstrations, for want of an oracle "
    "and an explore; use warm_start=none, or add them to its class"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
  """A source that changes how the environments of another are played.

  Attributes:
    source: makes the tasks and environments.
  """

  source: Source

  @property
  def name(self) -> str:
    """Name of the source."""
    return self.source.name

  @property
  def words(self) -> Sequence[str]:
    """Words of the source."""
    return words(self.source)

  def task(self, index: int, split: Split) -> Task:
    """Returns the source's task."""
    return self.source.task(index, split)

  def check_demonstrations(self) -> None:
    """Raises ValueError if the source has none."""
    demonstrator(self.source)

  def oracle(self, task: Task, messages: Sequence[Message]) -> str | Message:
    """Returns the source's good answer."""
    return demonstrator(self.source).oracle(task, messages)

  def explore(
    self, task: Task, messages: Sequence[Message], seed: int
  ) -> str | Message:
    """Returns the source's random answer."""
    return demonstrator(self.source).explore(task, messages, seed)


def restarts(source: Source, name: str) -> bool:
  """Returns whether an environment may be started afresh after a failed start.

  A source says so by an attribute `restarts` that is True: building and
  starting another of the task does no harm, and may succeed.

  Args:
    name: of the source of the task, where `source` is a mixture.
  """
  for part in getattr(source, "sources", ()):
    if part.name == name:
      return restarts(part, name)
  wrapped = getattr(source, "source", None)
  default = wrapped is not None and restarts(wrapped, name)
  return bool(getattr(source, "restarts", default))


def members_together(source: Source) -> int:
  """Returns how many members of a group play one episode with each other.

  A source may have such a number as its `members_together`; it is 1 otherwise.
  """
  wrapped = getattr(source, "source", None)
  default = 1 if wrapped is None else members_together(wrapped)
  return getattr(source, "members_together", default)


@runtime_checkable
class Reward(Protocol):
  """Grades finished episodes from their text alone.

  It may also have a method `check_task(task)` that raises ValueError on a task
  that it cannot grade: the first one of each source is tried before a run.

  One with `compares = True` is called once for a group, when all its members
  have ended, with the transcripts of those without a fault, two at least. Its
  attribute `alone` is the reward of an episode that is played without a group,
  as in an evaluation.
  """

  @property
  def stateless(self) -> bool:
    """True if calls may run anywhere and be repeated after a failure."""
    ...

  async def __call__(
    self, task: Task, transcripts: Sequence[Transcript]
  ) -> Sequence[Grade]:
    """Returns one grade for each transcript, in order."""
    ...


class CallClock(Protocol):
  """Measures a call of a reward or an environment against its deadline."""

  def change(self, *, waiting: int = 0, held: int = 0) -> None:
    """Changes the number of places that the call waits for, or holds.

    The clock stands still while it waits for some and holds none; see
    `envs.call_clock.place`.
    """


CLOCK: contextvars.ContextVar[CallClock | None] = contextvars.ContextVar(
  "clock of a call", default=None
)
"""Of the call that runs now; tasks that it begins have it, too."""


@runtime_checkable
class Offloaded(Protocol):
  """A reward, or a part of one, whose work is done elsewhere.

  It is a setting too, so connections and processes are kept beside it, for each
  event loop. They begin when it is first called, at the latest.
  """

  async def open(self) -> None:
    """Checks that the other side can be used; called before a run.

    Raises:
      OSError: it cannot, with the way out.
    """
    ...

  async def close(self) -> None:
    """Ends connections and processes; a later call begins others."""
    ...

  def counts(self) -> Mapping[str, float]:
    """Returns costs since `open`, by name; of all that are called alike the
    sum is reported as `rewards/<name>`.
    """
    ...


def parts(reward: object) -> Iterator[Any]:
  """Yields a reward, or another setting, and all settings in its fields."""
  if dataclasses.is_dataclass(reward) and not isinstance(reward, type):
    yield reward
    for field in dataclasses.fields(reward):
      yield from parts(getattr(reward, field.name))
  elif isinstance(reward, tuple | list):
    for part in reward:
      yield from parts(part)


def checked_grades(given: Any, count: int, of: str) -> Sequence[Grade]:
  """Returns what a reward, called `of` in an error, has returned.

  Raises:
    ValueError: it is no list of so many grades.
  """
  if not isinstance(given, Sequence) or len(given) != count:
    wanted = "one Grade" if count == 1 else f"{count} of Grade"
    raise ValueError(
      f"{of} returned {reprlib.repr(given)}, not a list of {wanted}"
    )
  for one in given:
    if not isinstance(one, Grade):
      kind = type(one).__name__
      raise ValueError(f"{of} returned {kind} in place of a Grade")
  return given


def check_task(reward: Reward, task: Task) -> None:
  """Raises ValueError if a reward says that it cannot grade a task."""
  if (check := getattr(reward, "check_task", None)) is not None:
    check(task)


def compares(reward: Reward) -> bool:
  """Returns whether a reward grades the members of a group together."""
  return bool(getattr(reward, "compares", False))


def alone(reward: Reward) -> Reward:
  """Returns the reward of an episode that is played without a group.

  Raises:
    ValueError: the reward compares, and does not say.
  """
  if not compares(reward):
    return reward
  if (one := getattr(reward, "alone", None)) is None or compares(one):
    raise ValueError(
      f"reward {type(reward).__name__} compares the members of a group; give "
      "it the attribute alone, a reward for episodes without a group"
    )
  return one


def reason(error: BaseException) -> str:
  """Returns "OSError: no such game (game.py:38, in step)".

  The place is the innermost one in code of the user's, if there is one. An
  error that cannot be shown has its type alone.
  """
  text = type(error).__name__
  with contextlib.suppress(Exception, SystemExit):
    text += f": {error}"
  if len(text) > _MAX_REASON:
    text = f"{text[: _MAX_REASON - 3]}..."
  return text + _place(error)


def _place(error: BaseException) -> str:
  """Returns " (game.py:38, in step)", or "" of an error of nobody's code."""
  place = ""
  for frame, line in traceback.walk_tb(error.__traceback__):
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    parts = file.split(os.sep)
    if file.startswith(_NOT_THE_USERS) or not _INSTALLED.isdisjoint(parts):
      continue
    place = f" ({parts[-1]}:{line}, in {name})"
  return place
