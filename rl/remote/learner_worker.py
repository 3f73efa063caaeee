"""One process of a learner that has several.

  remote_learner.RemoteLearner <== gang.Gang ==> LearnerWorker -> Learner

Parameters, sums and optimizer state lie here, by the numbers that the other
side gives them; what passes are numbers, rows of this process's devices, and
measures. Every process runs the same commands in one order, which is what
collective programs need.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from websockets.asyncio import client as websockets_client

from rl.backends import host as backends_host
from rl.data import batch as batch_lib
from rl.pools import placement
from rl.remote import connection, weight_store, weight_stream
from rl.settings import overrides
from rl.train import learner, scoring, train_state

Numbers = Mapping[str, Sequence[int]]
"""Numbers of the leaves of some fields of a `TrainState`."""
Tiles = Mapping[str, Sequence[np.ndarray]]
"""A batch: of each column, the parts that a process keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerTask:
  """The part of a learner that a worker is to run.

  Attributes:
    mesh: of the learner, over all processes.
    process: number of this one, of `processes`.
    platform: of its devices; None takes the one that jax finds.
    stream: has its state on the run's host; None is memory of this one.
  """

  mesh: placement.MeshSpec
  process: int
  processes: int
  platform: str | None = None
  stream: weight_stream.StreamAddress | None = None

  @property
  def placement(self) -> placement.Placement:
    """The devices of this process."""
    own = placement.MeshSpec(data=self.mesh.size // self.processes)
    return placement.Placement(
      learner=own, platform=self.platform, colocated=True
    )

  def build(self) -> "LearnerWorker":
    """Returns the worker that runs it."""
    return LearnerWorker(self)


class LearnerWorker:
  """Training programs behind a connection, whose other side commands them.

  Whoever has the socket calls `serve`.
  """

  def __init__(self, task: LearnerTask):
    self._task = task
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._programs: list[learner.Learner] = []
    self._references: list[learner.ScoreProgram | None] = []
    self._held: dict[int, Any] = {}

  async def serve(
    self, stream: websockets_client.ClientConnection, name: str
  ) -> str:
    """Serves until the stream ends; returns why it did."""
    methods = {
      "offer": functools.partial(
        backends_host.free_address, stream.local_address[0]
      ),
      "join": _unguarded(self._join),
      "build": _unguarded(self._build),
      "take": self._take,
      "store": self._store,
      "accumulate": self._accumulate,
      "update": self._update,
      "score": self._score,
      "measure": self._measure,
    }
    served = {
      name: functools.partial(self._run, method)
      for name, method in methods.items()
    }
    return await connection.Connection(stream, name=name, serves=served).run()

  async def _run(
    self, method: Callable[..., Any], dropped: Sequence[int], *args: Any
  ) -> Any:
    """Runs commands one by one, off the loop, which answers heartbeats.

    Args:
      dropped: numbers to which nothing refers any more.
    """

    def run() -> Any:
      for number in dropped:
        self._held.pop(number, None)
      with jax.transfer_guard("disallow"):
        return method(*args)

    return await asyncio.get_running_loop().run_in_executor(self._thread, run)

  # Start.

  def _join(self, address: str) -> list[tuple[int, int]]:
    """Makes the mesh with the other processes.

    Args:
      address: that the first of them has offered.

    Returns:
      The tiles that this process keeps of a batch: (block of rows, block of
      the tokens of a row), of as many blocks as these are split into.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
      address,
      self._task.processes,
      self._task.process,
      cluster_detection_method="deactivate",
      local_device_ids=range(self._task.mesh.size // self._task.processes),
      # By default it listens at every address of the host.
      coordinator_bind_address=address,
    )
    with _naming_hosts():
      self._layout = self._task.mesh.layout(jax.devices(self._task.platform))
      assert isinstance(self._layout.mesh, jax.sharding.Mesh)
      _connect(self._layout.mesh)
    self._place = self._layout.sharding("batch", "length")
    self._blocks = self._layout.num_batch, self._layout.size("length")
    places = self._place.addressable_devices_indices_map(self._blocks)
    self._tiles = sorted({_starts(index) for index in places.values()})
    return self._tiles

  def _build(self, settings: str) -> None:
    """Makes training programs, numbered in the order in which they come."""
    read: learner.LearnerSettings = overrides.from_json(json.loads(settings))
    programs = read.build(self._layout)
    self._programs.append(programs)
    self._references.append(
      scoring.reference_program(
        read.reference, programs, self._layout, read.temperature
      )
    )

  # State.

  def _take(
    self,
    programs: int,
    numbers: Sequence[int],
    tensors: Sequence[weight_store.Tensor],
  ) -> int:
    """Reads a state, of which devices get what they keep; returns its bytes."""
    places = jax.tree.leaves(self._programs[programs].abstract)
    opened = weight_stream.reader_at(self._task.stream)
    with weight_store.Readers(opened) as readers:
      for number, told, like in zip(numbers, tensors, places, strict=True):
        tensor = weight_store.Tensor._make(told)
        self._held[number] = weight_store.placed(
          readers.of(tensor), tensor, like.sharding
        )
      return readers.bytes_read

  def _store(self, path: str, named: Sequence[tuple[int, str]]) -> None:
    """Writes this process's slices of arrays to a file of all processes."""
    with weight_stream.writer_at(self._task.stream, path) as writer:
      for number, name in named:
        writer.write(name, self._held[number])

  def _state(self, programs: int, fields: Numbers) -> train_state.TrainState:
    """Returns a state that has these fields."""
    like = self._programs[programs].abstract
    found: dict[str, Any] = dict.fromkeys(like._fields)
    for name, numbers in fields.items():
      tree = jax.tree.structure(getattr(like, name))
      found[name] = tree.unflatten([self._held[x] for x in numbers])
    return train_state.TrainState(**found)

  def _placed(self, tiles: Tiles) -> batch_lib.Batch:
    """Returns a batch on the mesh, of which this process has its tiles."""
    return batch_lib.of_columns(
      {name: self._column(parts) for name, parts in tiles.items()}
    )

  def _column(self, parts: Sequence[np.ndarray]) -> jax.Array:
    size = parts[0].shape
    shape = tuple(a * b for a, b in zip(size, self._blocks, strict=False))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
      starts = _starts(index)
      tile = starts[0] // size[0], starts[1] // size[1]
      return parts[self._tiles.index(tile)]

    with jax.transfer_guard("allow"):
      return jax.make_array_from_callback(
        (*shape, *size[2:]), self._place, part
      )

  # Programs.

  def _accumulate(
    self,
    programs: int,
    fields: Numbers,
    total: int | None,
    into: int,
    tiles: Tiles,
  ) -> None:
    """Adds a batch to sums, which get another number."""
    state = self._state(programs, fields)
    before = None if total is None else self._held.pop(total)
    self._held[into] = jax.block_until_ready(
      self._programs[programs].accumulate(
        state.params, before, self._placed(tiles), state.critic
      )
    )

  def _update(
    self,
    programs: int,
    fields: Numbers,
    total: int,
    left_out_divisor: float,
    into: Sequence[int],
  ) -> dict[str, float]:
    """Takes a step; numbers `into` are those of all that may change."""
    state = self._state(programs, fields)
    after, metrics = self._programs[programs].step(
      state, self._held.pop(total), left_out_divisor
    )
    leaves = jax.tree.leaves(train_state.changing(after))
    self._held.update(zip(into, jax.block_until_ready(leaves), strict=True))
    return metrics

  def _score(
    self, programs: int, name: str, fields: Numbers, tiles: Tiles
  ) -> list[tuple[tuple[int, int], np.ndarray]]:
    """Returns where the scores of this process begin, and these.

    Args:
      name: of the method of `Learner`, or "reference".
    """
    state, batch = self._state(programs, fields), self._placed(tiles)
    learned = self._programs[programs]
    if name == "reference":
      reference = self._references[programs]
      assert reference is not None
      scores = reference(state, batch)
    elif name == "values":
      assert state.critic is not None
      scores = learned.values(state.params, state.critic, batch)
    else:
      score = {"score": learned.score, "base": learned.score_base}[name]
      scores = score(state.params, batch)
    return [
      (_starts(shard.index), jax.device_get(shard.data))
      for shard in jax.block_until_ready(scores).addressable_shards
      if shard.replica_id == 0
    ]

  def _measure(
    self, programs: int, fields: Numbers, batches: Sequence[Tiles]
  ) -> dict[str, float]:
    state = self._state(programs, fields)
    placed = map(self._placed, batches)
    return self._programs[programs].measure(state.params, placed)


@contextlib.contextmanager
def _naming_hosts() -> Iterator[None]:
  """Adds to an error of gloo what it needs of the names of hosts."""
  try:
    yield
  except RuntimeError as error:
    if "gloo" not in str(error).lower():
      raise
    raise RuntimeError(
      f"{error}; on CPUs the name of each host, {socket.gethostname()} of this "
      "one, must stand for an address at which the others reach it"
    ) from error


def _connect(mesh: jax.sharding.Mesh) -> None:
  """Makes the connections among processes that collective programs use.

  The first program over some axes makes theirs, and gives up if the others are
  not there within 30 s. Larger programs, which one process may have to compile
  while another has them in its cache, would begin further apart.
  """
  axes = [name for name, size in mesh.shape.items() if size > 1]
  shape = [mesh.shape[name] for name in axes]
  place = jax.sharding.NamedSharding(mesh, jax.P(*axes))
  ones = jax.make_array_from_callback(
    tuple(shape), place, lambda _: np.ones([1] * len(axes), np.float32)
  )
  for count in range(1, len(axes) + 1):
    for over in itertools.combinations(axes, count):
      add = jax.shard_map(
        functools.partial(jax.lax.psum, axis_name=over),
        mesh=mesh,
        in_specs=place.spec,
        out_specs=jax.P(*(None if name in over else name for name in axes)),
      )
      jax.block_until_ready(jax.jit(add)(ones))


def tile(
  column: np.ndarray, blocks: tuple[int, int], place: tuple[int, int]
) -> np.ndarray:
  """Returns one of so many blocks of rows and of their tokens."""
  rows, length = (
    size // count for size, count in zip(column.shape, blocks, strict=False)
  )
  row, token = place[0] * rows, place[1] * length
  return column[row : row + rows, token : token + length]


def _unguarded(method: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a method that may place its own constants on devices."""

  def run(*args: Any) -> Any:
    with jax.transfer_guard("allow"):
      return method(*args)

  return run


def _starts(index: tuple[slice, ...] | None) -> tuple[int, int]:
  """Returns where a part begins, in rows and in tokens."""
  row, token, *_ = (*(part.start or 0 for part in index or ()), 0, 0)
  return row, token
