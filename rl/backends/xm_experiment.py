"""Programs as work units of an experiment of XManager, on this host."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import pathlib
import sys
import threading
from typing import Any

from absl import flags as absl_flags

from rl.backends import contract, followed, local, spool
from rl.settings import checks

_ROOT = pathlib.Path(__file__).parents[2]
_ADD_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Xm:
  """Starts each program as a work unit of one experiment, by `xm_local`.

  XManager runs them as processes of this host and lists the experiment; whoever
  launches by a script of XManager has `launch/xm.py`.

  Attributes:
    title: of the experiment.
    place_s: longest wait for the start of an engine.
    silence_s: longest time without a sign of whoever has started it, after
      which a program ends.
  """

  title: str = "twinmesh"
  place_s: float = 60.0
  silence_s: float = 30.0

  shares_memory = True

  def validate(self) -> None:
    """Raises ValueError on a time that cannot be."""
    where = "placement.backend"
    checks.finite_above(self, 0, "place_s", where=where)
    checks.finite_at_least(self, 4, "silence_s", where=where)

  def validate_installed(self) -> None:
    """Raises ValueError without xmanager."""
    checks.installed("backend xm", "xm", "xmanager")

  def open(self, folder: pathlib.Path) -> contract.Launcher:
    """Returns what adds work units to a new experiment."""
    self.validate_installed()
    return _XmLauncher(self, folder / "programs")


class _XmLauncher(followed.FollowingLauncher):
  host = local.LOOPBACK

  def __init__(self, setting: Xm, folder: pathlib.Path):
    from xmanager import xm_local  # pyright: ignore[reportMissingImports]

    super().__init__()
    self._folder = folder
    self._silence_s = setting.silence_s
    # It reads flags of its own, also where nobody has parsed any.
    if not absl_flags.FLAGS.is_parsed():
      absl_flags.FLAGS.mark_as_parsed()
    self._experiment = xm_local.create_experiment(setting.title)
    self._began: concurrent.futures.Future[asyncio.AbstractEventLoop]
    self._began = concurrent.futures.Future()
    self._closing = asyncio.Event()
    self._thread = threading.Thread(
      target=asyncio.run, args=[self._live()], name="xmanager", daemon=True
    )
    self._thread.start()
    self._loop = self._began.result(_ADD_S)

  async def _live(self) -> None:
    """Keeps the experiment open until `close`."""
    # Its end raises for work units that failed: their programs tell of that.
    with contextlib.suppress(RuntimeError):
      async with self._experiment:
        self._began.set_result(asyncio.get_running_loop())
        await self._closing.wait()

  def _call(self, awaited: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(awaited, self._loop).result(_ADD_S)

  def _make(self, program: contract.Program) -> followed.Followed:
    return spool.SpooledProcess(
      program, self._folder, self._silence_s, self._add
    )

  def _add(self, directory: pathlib.Path) -> "_WorkUnit":
    """Adds a work unit that runs the program of a directory."""
    unit = self._call(self._added(directory))
    done = asyncio.run_coroutine_threadsafe(
      unit.wait_until_complete(), self._loop
    )
    return _WorkUnit(directory, done)

  async def _added(self, directory: pathlib.Path) -> Any:
    from xmanager import xm, xm_local  # pyright: ignore[reportMissingImports]

    binary = xm.binary(
      executor_spec=xm_local.Local.Spec(),
      path=sys.executable,
      args=["-m", spool.__name__, str(directory)],
      env_vars={"PYTHONPATH": str(_ROOT)},
    )
    (python,) = self._experiment.package([binary])
    return await self._experiment.add(xm.Job(python, xm_local.Local()))

  def close(self) -> None:
    """Ends every process that is left, and the experiment."""
    super().close()
    if self._thread.is_alive():
      self._loop.call_soon_threadsafe(self._closing.set)
      self._thread.join(_ADD_S)


class _WorkUnit:
  def __init__(
    self, directory: pathlib.Path, done: "concurrent.futures.Future[None]"
  ):
    self._directory = directory
    self._done = done

  def ended(self) -> bool:
    return self._done.done()

  def describe(self) -> str:
    return f"its work unit has {'ended' if self.ended() else 'not ended'}"

  def cancel(self) -> None:
    # XManager cannot end one of this host: without its file it does not begin,
    # and one that has begun ends when it hears no more of us.
    (self._directory / "job.json").unlink(missing_ok=True)
