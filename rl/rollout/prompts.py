"""The stream of tasks: seeded, in proportion, with a checkpointed cursor.

next: turn (the source that is due) -> _draw: its grain stream
        -> Curriculum.choose -> task
"""

import dataclasses
import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from envs import base
from rl.rollout import curriculum as curriculum_lib
from rl.runtime import isolation
from rl.settings import checks

_SPAN = 2**31 - 1


class NoTask(ValueError):
  """A source has raised in place of making a task; the message says where."""


@runtime_checkable
class Mixed(Protocol):
  """A source made of others; `envs.mixture.Mixture` and simulated ones."""

  @property
  def sources(self) -> Sequence[base.Source]:
    """Sources of the tasks, with different names."""
    ...

  @property
  def weights(self) -> Sequence[float]:
    """Weights of the sources, in the same order, above 0."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOrder:
  """The pool of training tasks, and the choice among them.

  Attributes:
    pool: training tasks of each source. When all have come they come again, in
      another order. None: endless, and a task never comes twice.
    curriculum: skips tasks that are too easy or too hard; None skips none.
  """

  pool: int | None = None
  curriculum: curriculum_lib.PassRate | None = None

  def validate(self) -> None:
    """Raises ValueError on an empty pool, or a curriculum without one."""
    out = "use none for tasks without end"
    checks.within(self, 1, _SPAN, "pool", where="tasks", out=out)
    if self.curriculum is not None and self.pool is None:
      why = "no task comes again; give pool a number, or use curriculum=none"
      checks.refuse(self, "curriculum", "pool", why=why, where="tasks")


def sources_of(source: base.Source) -> Sequence[base.Source]:
  """Returns the parts of a mixture, or the one source."""
  return source.sources if isinstance(source, Mixed) else (source,)


def task_of(source: base.Source, index: int, split: base.Split) -> base.Task:
  """Returns a task of a source.

  Raises:
    NoTask: the source raised instead.
  """
  what = f"task({index}, {split!r}) of environment {source.name}"
  try:
    return isolation.contained(source.task, what, index, split)
  except isolation.Fault as error:
    raise NoTask(str(error)) from error


def check_id(task: base.Task, source: str) -> None:
  """Raises ValueError on a task that is not named for its source."""
  if task.source != source:
    raise ValueError(
      f"source {source} made task {task.id}: ids must begin with the source's "
      "name and a slash; wrap the parts of a mixture, not the mixture"
    )


def demonstrator(source: base.Source) -> base.Demonstrates:
  """Returns a source that can play its own tasks.

  Raises:
    ValueError: it cannot, or one that it mixes cannot.
  """
  for part in sources_of(source):
    base.demonstrator(part)
  return base.demonstrator(source)


class Prompts:
  """Training tasks of one source, or of several in proportion.

  Each source has a stream of its own, whose order depends on the seed alone,
  not on draws from the others.

  The producer calls `next` for each slot; `next(source)` when it plays a slot
  again, so that a slot keeps its source when its tasks are dropped;
  `give_back` when it gives a slot up; `learned` when a group was graded. So
  the proportions hold among the trained slots, however slow a source is.
  `cursor` and `seek` save and restore all of this.

  Args:
    pool, curriculum: see `TaskOrder`.
  """

  def __init__(
    self,
    source: base.Source,
    seed: int,
    *,
    pool: int | None = None,
    curriculum: curriculum_lib.PassRate | None = None,
  ):
    sources = sources_of(source)
    weights = source.weights if isinstance(source, Mixed) else (1.0,)
    exact = [fractions.Fraction(weight) for weight in weights]
    total = sum(exact)
    self._shares = [weight / total for weight in exact]
    self._names = [source.name for source in sources]
    self._streams = [_stream(source, seed, pool) for source in sources]
    self._slots = [0] * len(sources)
    self._curriculum = curriculum and curriculum_lib.Curriculum(curriculum)

  def next(self, source: str | None = None) -> base.Task:
    """Returns the next task.

    Args:
      source: draw from this one, uncounted: its slot was counted before. None
        draws from the source that is due.

    Raises:
      ValueError: the source is unknown, or makes tasks of another name.
    """
    if source is not None:
      return self._draw(self._number(source))
    number = turn(self._slots, self._shares)
    task = self._draw(number)
    self._slots[number] += 1
    return task

  def _draw(self, number: int) -> base.Task:
    stream = self._streams[number]
    if self._curriculum is None:
      task = next(stream)
    else:
      task = self._curriculum.choose(lambda: next(stream))
    check_id(task, self._names[number])
    return task

  def _number(self, source: str) -> int:
    if source not in self._names:
      raise ValueError(f"no source is called {source}; there are {self._names}")
    return self._names.index(source)

  def give_back(self, task: base.Task) -> None:
    """Takes a slot back; the source of its task gets another one for it.

    Raises:
      ValueError: no slot of its source is left.
    """
    number = self._number(task.source)
    if not self._slots[number]:
      raise ValueError(
        f"task {task.id} was given back, but no slot of {self._names[number]} "
        "is left"
      )
    self._slots[number] -= 1

  def learned(self, task: base.Task, rewards: Sequence[float | None]) -> None:
    """Passes the rewards of a group to the curriculum, if there is one.

    Args:
      rewards: graded rewards of its members, before shaping; None of a faulty
        member.
    """
    if self._curriculum is not None:
      self._curriculum.learned(task.id, rewards)

  @property
  def cursor(self) -> dict[str, Any]:
    """JSON data for `seek`."""
    states = [dict(stream.get_state()) for stream in self._streams]
    curriculum = self._curriculum and self._curriculum.state
    return {
      "streams": dict(zip(self._names, states, strict=True)),
      "slots": dict(zip(self._names, self._slots, strict=True)),
      "curriculum": curriculum,
    }

  def seek(self, cursor: Mapping[str, Any]) -> None:
    """Continues from a saved cursor.

    Raises:
      ValueError: it belongs to other sources.
    """
    saved = cursor.get("streams", {})
    if set(saved) != set(self._names):
      raise ValueError(
        f"the cursor is of sources {sorted(saved)}, but these are "
        f"{sorted(self._names)}; resume with the same sources, or start a new "
        "run from the weights"
      )
    for name, stream in zip(self._names, self._streams, strict=True):
      stream.set_state(dict(saved[name]))
    self._slots = [cursor["slots"][name] for name in self._names]
    if self._curriculum is not None and cursor["curriculum"] is not None:
      self._curriculum.restore(cursor["curriculum"])


def turn(slots: Sequence[int], shares: Sequence[fractions.Fraction]) -> int:
  """Returns the source that gets the next slot, so that shares hold throughout.

  It is the one whose next slot is due first, among those that are not ahead of
  their share. If every slot was given out this way, each source has its share
  of any number of slots to within less than one.

  Args:
    slots: of each source so far.
    shares: they add up to 1.

  Source: Tijdeman, "The chairman assignment problem", 1980; as a schedule,
  earliest deadline first over the windows of Baruah et al., "Proportionate
  progress", 1996.
  """
  following = sum(slots) + 1

  def due(i: int) -> tuple[int, fractions.Fraction]:
    exact = (slots[i] + 1) / shares[i]
    return math.ceil(exact), exact

  behind = [i for i, n in enumerate(slots) if n < shares[i] * following]
  return min(behind, key=due)


def _stream(source: base.Source, seed: int, pool: int | None) -> Any:
  """Returns an iterator with a state over a source's training tasks."""
  # Here, not on top: it imports a fifth of what --help would wait for.
  import grain

  pipeline = (
    grain.MapDataset.range(pool or _SPAN)
    .seed(seed)
    .shuffle()
    .map(lambda index: task_of(source, int(index), "train"))
    .repeat()
  )
  # No read threads: tasks are made on demand and the order is exact.
  options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  return iter(pipeline.to_iter_dataset(options))
