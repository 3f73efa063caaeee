"""Checkpoints of a run: whole or not at all, and verified when read."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import logging as python_logging
import os
import pathlib
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import logging
from jaxtyping import PyTree

from rl.runtime import checksum, disk

# Failures that are not the checkpoint's. Any other exception is: orbax raises
# all kinds, bare Exception included, on files that are cut, changed or gone.
_NOT_DAMAGE = (MemoryError, PermissionError, jax.errors.JaxRuntimeError)
_PASSING = {
  errno.EMFILE,
  errno.ENFILE,
  errno.ENOMEM,
  errno.EINTR,
  errno.ESTALE,
  errno.ETIMEDOUT,
}
"""Errors of a system that is short of something, or of a network."""
_OF_DISK = re.compile(
  r"No space left on device|no space left for [\d.,]+ MB"
  "|Read-only file system|Disk quota exceeded|File too large"
)
_STATE, _MANIFEST = "state", "manifest.ocdbt"
"""The arrays of a checkpoint, and the list of them, which orbax writes last."""
_DELETED = ".deleted"
_UNFINISHED = ".orbax-checkpoint-tmp"


# Orbax takes its own paths for patterns, and finds no file to merge.
_NOT_IN_PATHS = "[]\\"


class Mismatch(Exception):
  """The checkpoint is sound, but its state has another tree or shapes."""


class Unsaved(Exception):
  """A checkpoint could not be written, or no existing one can be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """The result of `Checkpoints.restore`.

  Attributes:
    step: of the checkpoint in use.
    state: arrays in the requested tree and shardings.
    host: as saved, after a round trip through JSON.
    skipped: name and reason of each newer checkpoint that is damaged.
  """

  step: int
  state: PyTree
  host: dict[str, Any]
  skipped: tuple[str, ...]


class Checkpoints:
  """The checkpoints of one run, in directories named for their step.

  One process owns the directory and calls `save`; it must `restore` before
  its first save. Others may `restore` meanwhile: that changes nothing on
  disk. The file system must rename atomically.

  Every leaf has a checksum, computed on its devices: one read of their memory,
  and one small compilation for each new shape.

  Args:
    keep: newest checkpoints to keep, >= 1, not counting the one being
      written.
  """

  def __init__(self, directory: pathlib.Path | str, keep: int):
    if keep < 1:
      raise ValueError(f"keep={keep} leaves nothing to resume from; use >= 1")
    logging.get_absl_logger().addFilter(_is_not_chatter)
    hook = sys.unraisablehook
    if getattr(hook, "func", None) is not _drop_late_wakes:
      sys.unraisablehook = functools.partial(_drop_late_wakes, hook)
    self._directory = pathlib.Path(directory).absolute()
    self._keep = keep
    # Here, not on top: it imports a fifth of what --help would wait for.
    import orbax.checkpoint as ocp

    self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    self._writing: pathlib.Path | None = None
    self._finishing = threading.Lock()
    self._error: Exception | None = None
    self._damaged: list[int] = []

  @contextlib.contextmanager
  def saving(self, what: str) -> Iterator[None]:
    """Turns any exception of the body into Unsaved, which names `what`."""
    try:
      yield
    except Exception as error:  # Orbax raises all kinds.
      # It tells an error of the disk within pages of its own.
      known = _OF_DISK.search(str(error))
      why = known[0] if known else f"{type(error).__name__}: {_in_short(error)}"
      newest = max(self._steps(), default=None)
      left = "no other is there" if newest is None else f"{newest} is whole"
      raise Unsaved(
        f"{what} could not be saved: {why}{disk.room(self._directory)}; {left}"
      ) from error

  def save(self, step: int, state: PyTree, host: Mapping[str, Any]) -> None:
    """Starts a checkpoint; returns once the arrays may be donated.

    Waits for the save before it. A kill at any moment leaves the earlier
    checkpoints as they are.

    Args:
      state: any pytree of jax arrays.
      host: data for JSON; copied before the return.

    Raises:
      ValueError: the step exists already, or `check_path`.
      OSError: there is no room for it.
      Exception: the error of the save before this one.
    """
    import orbax.checkpoint as ocp

    self.wait()
    check_path(self._directory)
    self._tidy()
    arrays, sums = _by_name(state), checksums(state)
    disk.check_room(self._directory, sum(x.nbytes for x in arrays.values()))
    with jax.transfer_guard("allow"):
      leaves = {
        name: {"like": _like(x), "checksum": sums[name]}
        for name, x in arrays.items()
      }
      # Through JSON and back: the caller may change its data while orbax
      # writes, and keys become the strings that the sum will see on reading.
      body = json.loads(json.dumps({"leaves": leaves, "host": host}))
      path = self._directory / str(step)
      self._orbax.save(
        path,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(arrays),
          record=ocp.args.JsonSave({"body": body, "crc32": _sum(body)}),
        ),
      )
    self._writing = path

  async def written(self) -> None:
    """Returns when the last save is over, well or not; `wait` says which."""
    await asyncio.to_thread(self._finish)

  def _finish(self) -> None:
    with self._finishing:
      try:
        self._orbax.wait_until_finished()
      except Exception as error:
        self._error = error

  def wait(self) -> None:
    """Returns when the last save is whole; deletes those beyond `keep`.

    Raises:
      Exception: the error of that save, once.
    """
    self._finish()
    error, self._error = self._error, None
    written, self._writing = self._writing, None
    if error is not None:
      raise error
    if written is None:
      return
    if not (written / _STATE / _MANIFEST).exists():
      # An impatient user may have ended the wait before this one.
      if written.exists():
        _set_aside(written)
      raise OSError(f"its {_STATE}/{_MANIFEST} was not written")
    for step in self._steps()[: -self._keep]:
      _delete(self._directory / str(step))

  def close(self) -> None:
    """Waits as `wait` does and ends the threads."""
    try:
      self.wait()
    finally:
      self._orbax.close()

  def restore(self, abstract: PyTree) -> Restored | None:
    """Reads the newest whole checkpoint; None when there is none.

    A damaged one is skipped with a warning, and moved aside to
    `<step>.damaged` by the next save.

    Args:
      abstract: jax.ShapeDtypeStructs with shardings. It may lack fields at
        the top of the saved state: `{"params": params}` reads only the
        parameters of a state with such a field.

    Raises:
      Mismatch: the newest readable one has another tree, shape or dtype.
      OSError: the system, not a checkpoint, made a read fail.
    """
    skipped, tried = [], set[int]()
    self._damaged = []
    while left := [step for step in self._steps() if step not in tried]:
      step = left[-1]
      tried.add(step)
      path = self._directory / str(step)
      try:
        state, host = self._read(path, abstract)
      except (Mismatch, *_NOT_DAMAGE):
        raise
      except Exception as error:
        if number := _passing(error):
          why = f"{os.strerror(number)}, as it was read"
          raise OSError(number, why, str(path)) from error
        if not os.path.lexists(path):  # Its run has a newer one by now.
          continue
        self._damaged.append(step)
        skipped.append(f"{step} ({_in_short(error)})")
        continue
      _warn(self._directory, skipped, f"using {step}")
      return Restored(step=step, state=state, host=host, skipped=tuple(skipped))
    _warn(self._directory, skipped, "none is left")
    return None

  def _read(
    self, path: pathlib.Path, abstract: PyTree
  ) -> tuple[PyTree, dict[str, Any]]:
    import orbax.checkpoint as ocp

    record = self._orbax.restore(
      path, args=ocp.args.Composite(record=ocp.args.JsonRestore())
    ).record
    body = record["body"]
    if _sum(body) != record["crc32"]:
      raise ValueError("its record does not match its checksum")
    wanted = _by_name(abstract)
    _check_same_model(path, body["leaves"], wanted)
    arrays = self._orbax.restore(
      path,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeRestore(
          wanted,
          restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
          partial_restore=True,
        )
      ),
    ).state
    for name, found in checksums(arrays).items():
      if found != body["leaves"][name]["checksum"]:
        raise ValueError(f"leaf {name} does not match its checksum")
    tree = jax.tree.structure(abstract)
    return tree.unflatten([arrays[name] for name in wanted]), body["host"]

  def _steps(self) -> list[int]:
    if not self._directory.exists():
      return []
    return sorted(
      int(path.name)
      for path in self._directory.iterdir()
      # Other numerals are decimal digits as well, and so is "007".
      if re.fullmatch("0|[1-9][0-9]*", path.name)
    )

  def _tidy(self) -> None:
    """Removes leftovers of a killed run; moves damaged checkpoints aside."""
    self._directory.mkdir(parents=True, exist_ok=True)
    for path in list(self._directory.iterdir()):
      if _UNFINISHED in path.name or path.name.endswith(_DELETED):
        # Threads of a save that failed may still write; then the next save
        # removes the rest.
        shutil.rmtree(path, ignore_errors=True)
    for step in self._damaged:
      _set_aside(self._directory / str(step))
    self._damaged = []


def check_path(directory: pathlib.Path | str) -> None:
  """Raises ValueError unless checkpoints can be kept below a directory."""
  path = str(pathlib.Path(directory).absolute())
  if found := "".join(x for x in _NOT_IN_PATHS if x in path):
    raise ValueError(
      f"the path {path} has {' and '.join(found)}, with which no checkpoint "
      "could be read; choose one without"
    )


def checksums(tree: PyTree) -> dict[str, str]:
  """Returns the checksum of each leaf by its path."""
  with jax.transfer_guard("allow"):
    return {
      name: checksum.of_leaf(_on_device(leaf))
      for name, leaf in _by_name(tree).items()
    }


def check_same(saved: Mapping[str, str], found: Mapping[str, str]) -> None:
  """Raises Mismatch naming the first leaf whose checksum differs."""
  for name in [*found, *saved]:
    if saved.get(name) != found.get(name):
      raise Mismatch(
        f"the checkpoint was trained on top of frozen parameters of which "
        f"{name} has checksum {saved.get(name, 'none')}, but here it has "
        f"{found.get(name, 'none')}; use the weights that the run started "
        "from (where it drew them, on that mesh), or another directory"
      )


def _on_device(leaf: Any) -> Any:
  """Moves a leaf from host memory to where programs can read it."""
  return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))


def _by_name(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves by path; a field and a dict key look the same."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _like(leaf: Any) -> str:
  """Returns shape and dtype as text: "float32[8,16]"."""
  return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _check_same_model(
  path: pathlib.Path,
  saved: Mapping[str, Mapping[str, Any]],
  wanted: Mapping[str, Any],
) -> None:
  """Raises Mismatch naming the first leaf that differs."""
  tops = {name.split("/")[0] for name in wanted}
  has = {k: v["like"] for k, v in saved.items() if k.split("/")[0] in tops}
  wants = {k: _like(v) for k, v in wanted.items()}
  renamed = ""
  if wants.keys() - has.keys() and has.keys() - wants.keys():
    renamed = (
      ". If an older version saved it, parameters had other names: start again,"
      " or use that version"
    )
  for name in [*wants, *has]:
    if has.get(name) != wants.get(name):
      raise Mismatch(
        f"{path}: leaf {name} is {has.get(name, 'absent')}, but the state"
        f" to restore has {wants.get(name, 'no such leaf')}; use the model,"
        f" algorithm and optimizer of that run, or another directory{renamed}"
      )


def _sum(body: Any) -> int:
  return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _delete(path: pathlib.Path) -> None:
  # Renamed first: a kill during the deletion must not leave half of it.
  trash = path.with_name(path.name + _DELETED)
  path.rename(trash)
  _remove(trash)


def _set_aside(path: pathlib.Path) -> None:
  """Renames a checkpoint that cannot be read."""
  aside = path.with_name(f"{path.name}.damaged")
  _remove(aside)
  path.rename(aside)


def _remove(path: pathlib.Path) -> None:
  """Removes a checkpoint, or the file or link that took its place."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def _warn(directory: pathlib.Path, skipped: list[str], instead: str) -> None:
  for name in skipped:
    logging.warning(
      "skipped the damaged checkpoint %s/%s; %s", directory, name, instead
    )


def _passing(error: Exception) -> int:
  """Returns the number of a passing error of the system; 0 of another."""
  # Orbax and tensorstore keep the words of an error, but not its type.
  return next((n for n in _PASSING if os.strerror(n) in str(error)), 0)


def _in_short(error: Exception) -> str:
  # Messages of orbax fill pages.
  return (str(error).splitlines() or [type(error).__name__])[0][:100]


def _is_not_chatter(record: python_logging.LogRecord) -> bool:
  """Drops logs of orbax: pages for each save, and for errors it raises too."""
  return "orbax" not in record.pathname


def _drop_late_wakes(
  otherwise: Callable[["sys.UnraisableHookArgs"], None],
  raised: "sys.UnraisableHookArgs",
) -> None:
  """Drops errors of tensorstore that wake the event loop of a failed save.

  The first array that cannot be written ends the save, and orbax closes its
  loop. Each array that is still being written would print a traceback.
  """
  trace = raised.exc_traceback
  wake = asyncio.BaseEventLoop.call_soon_threadsafe.__code__
  # On top of the stack: no code in Python called it.
  if trace is None or trace.tb_frame.f_code is not wake:
    otherwise(raised)
