"""Engines and learners whose programs take a declared time, in any process.

A program that is done earlier is followed by a sleep, whatever part of the time
the cores compute. So two cores stand in for several accelerators, as long as
each program needs less of them than is declared.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax

from models import config as model_config
from models import sharding
from rl import assemble
from rl.engine.builtin import engine
from rl.engine.builtin import settings as engine_settings
from rl.remote import gang as gang_lib
from rl.remote import learner_worker
from rl.runtime import mesh_thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
  """Declared seconds of an accelerator.

  Attributes:
    dispatch_s: of a dispatch of decoding.
    row_s: of a row that one device trains.
    update_s: of an optimizer step of one device, of which several do a part
      each.
  """

  dispatch_s: float
  row_s: float
  update_s: float = 0.0

  def seconds(self, name: str, args: Sequence[Any]) -> float:
    """Returns the seconds of a program of a mesh of one device."""
    match name:
      case "decode":
        return self.dispatch_s
      case "accumulate":
        _, _, packed, *_ = args
        return self.row_s * len(packed.tokens)
      case "update":
        return self.update_s
    return 0.0


class DeclaredThread(mesh_thread.MeshThread):
  """The thread of a mesh, with programs that end no earlier than declared.

  Args:
    thread: runs them.
    seconds: of a program, by its name and arguments.
  """

  def __init__(
    self,
    thread: mesh_thread.MeshThread,
    seconds: Callable[[str, Sequence[Any]], float],
  ):
    # Not that of the base, which starts another thread.
    self._declared = thread
    self._seconds = seconds

  def submit(
    self, name: str, function: Callable[..., Any], *args
  ) -> asyncio.Future[Any]:
    """Queues a program."""

    def declared(*args) -> Any:
      with lasting(self._seconds(name, args)):
        return jax.block_until_ready(function(*args))

    return self._declared.submit(name, declared, *args)

  def record(self, name: str, start: float, end: float) -> None:
    """Records a busy span."""
    self._declared.record(name, start, end)

  def close(self) -> None:
    """Ends the thread."""
    self._declared.close()


@contextlib.contextmanager
def lasting(seconds: float) -> Iterator[None]:
  """Sleeps after the body until so many seconds have passed since it began."""
  end_s = time.monotonic() + seconds
  yield
  time.sleep(max(end_s - time.monotonic(), 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeclaredEngine(engine_settings.EngineSettings):
  """A built-in engine whose dispatches take so many seconds."""

  short_name: ClassVar[str] = "declared"

  dispatch_s: float = 0.0

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> engine.BuiltinEngine:
    """Returns an engine of this pace, not started."""
    pace = Pace(dispatch_s=self.dispatch_s, row_s=0.0)
    declared = DeclaredThread(thread, pace.seconds)
    return super().build(config, layout, declared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DeclaredTask(learner_worker.LearnerTask):
  pace: Pace

  def build(self) -> learner_worker.LearnerWorker:
    return _DeclaredWorker(self)


class _DeclaredWorker(learner_worker.LearnerWorker):
  """A process of a learner, which trains its own rows at the pace of one."""

  def __init__(self, task: _DeclaredTask):
    super().__init__(task)
    self._pace = task.pace
    self._update_s = task.pace.update_s / task.processes

  def _accumulate(
    self, programs: int, fields: Any, total: Any, into: int, tiles: Any
  ) -> None:
    with lasting(self._pace.row_s * sum(map(len, tiles["tokens"]))):
      super()._accumulate(programs, fields, total, into, tiles)

  def _update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
    with lasting(self._update_s):
      return super()._update(*args, **kwargs)


def with_learner(
  parts: assemble.Parts, seconds: Callable[[str, Sequence[Any]], float]
) -> assemble.Parts:
  """Returns parts whose learner, of this process, keeps to declared times."""
  thread = DeclaredThread(parts.learner_thread, seconds)
  return dataclasses.replace(
    parts,
    learner_thread=thread,
    trainer=assemble.trainer(
      parts.experiment, parts.learner_layout, parts.programs, thread, None
    ),
  )


def pace_gang(gang: gang_lib.Gang, pace: Pace) -> None:
  """Has the processes of a learner, not started yet, keep to a pace."""
  gang._tasks[:] = [
    _DeclaredTask(**vars(task), pace=pace) for task in gang._tasks
  ]
