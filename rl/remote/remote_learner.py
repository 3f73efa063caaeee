"""A learner whose mesh lies in other processes.

  accumulate, step, score --> gang.Gang ==> LearnerWorker, of each process
  put:   state into shared memory --> each reads what its devices keep
  fetch: each writes its slices into shared memory --> arrays of this process

The leaves of a state there are `RemoteArray` here. Methods wait for an answer,
so they belong to another thread than the loop's, as `mesh_thread.MeshThread`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from models import definition, sharding
from rl.data import batch as batch_lib
from rl.remote import gang as gang_lib
from rl.remote import learner_worker, weight_store
from rl.train import learner, train_state


class RemoteArray:
  """An array that the processes of a gang hold, for as long as this exists.

  It also stands for all sums of an update, which have no shape.

  Attributes:
    number: its name in the gang.
    shape, dtype: of the whole array.
  """

  def __init__(
    self,
    gang: gang_lib.Gang,
    shape: tuple[int, ...] = (),
    dtype: Any = np.float32,
  ):
    self.number = gang.hold(self)
    self.shape = shape
    self.dtype = np.dtype(dtype)

  @property
  def nbytes(self) -> int:
    """Bytes of its values."""
    return math.prod(self.shape) * self.dtype.itemsize


class RemoteLearner(learner.Learner):
  """`learner.Learner` in the processes of a gang, which is open.

  `init` and `wrap` return a state of this process; all else takes what `put`
  and `step` have returned.

  Args:
    layout: of one device of this process, for states on their way.
    mesh: layout of the mesh of all processes; a plan.
  """

  def __init__(
    self,
    settings: learner.LearnerSettings,
    layout: sharding.Layout,
    mesh: sharding.Layout,
    gang: gang_lib.Gang,
  ):
    super().__init__(layout=layout, **settings.arguments)
    self._settings = settings
    self._gang = gang
    self._blocks = mesh.num_batch, mesh.size("length")
    self._whole: Any = layout.sharding()
    self._built: int | None = None
    if settings.reference is not None:
      self.score_reference = self._score_reference

  # State.

  def put(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns a state of arrays of this process, in those of the gang."""
    arrays, tree = jax.tree.flatten(state)
    held = [RemoteArray(self._gang, x.shape, x.dtype) for x in arrays]
    stored = weight_store.WeightStore().write(arrays)
    addresses = [tensor.address for tensor in stored]
    self._ask("take", [x.number for x in held], addresses)
    return tree.unflatten(held)

  def fetch(self, tree: Any) -> Any:
    """Returns parts of a state as arrays of this process."""
    leaves, structure = jax.tree.flatten(tree)
    held = [leaf for leaf in leaves if isinstance(leaf, RemoteArray)]
    if not held:
      return tree
    stored = weight_store.reserve([(x.shape, x.dtype) for x in held])
    path = stored[0].file.path
    named = [(x.number, y.name) for x, y in zip(held, stored, strict=True)]
    self._gang.ask("store", [(path, named)] * len(self._gang.tiles))
    with weight_store.Readers() as readers:
      fetched = {
        x.number: weight_store.placed(
          readers.of(y.address), y.address, self._whole
        )
        for x, y in zip(held, stored, strict=True)
      }
    return structure.unflatten(
      [fetched[x.number] if isinstance(x, RemoteArray) else x for x in leaves]
    )

  def place(self, batch: batch_lib.Batch) -> batch_lib.Batch:
    """Returns the batch as it is: a command takes each process its rows."""
    return batch

  # Programs.

  def score(self, params: definition.Params, batch: batch_lib.Batch) -> Any:
    """Returns the log-probability of every token, in nats."""
    return self._scores("score", {"params": params}, batch)

  def score_base(
    self, params: definition.Params, batch: batch_lib.Batch
  ) -> Any:
    """Returns the same without adapters."""
    return self._scores("base", {"params": params}, batch)

  def _score_reference(
    self, state: train_state.TrainState, batch: batch_lib.Batch
  ) -> Any:
    used = {"params": state.params, "reference": state.reference}
    return self._scores("reference", used, batch)

  def values(
    self,
    params: definition.Params,
    critic: definition.Params,
    batch: batch_lib.Batch,
  ) -> Any:
    """Returns the critic's value of the state after every token."""
    used = {"params": params, "critic": critic}
    return self._scores("values", used, batch)

  def accumulate(
    self,
    params: definition.Params,
    total: learner.Accumulator | None,
    batch: batch_lib.Batch,
    critic: definition.Params | None = None,
  ) -> learner.Accumulator:
    """Returns the sums with one more batch in them; donates `total`."""
    into = RemoteArray(self._gang)
    self._ask(
      "accumulate",
      _numbers({"params": params, "critic": critic}),
      None if total is None else _number(total),
      into.number,
      tiles=self._tiles(batch),
    )
    return learner.Accumulator._make((into, ()))

  def update(
    self,
    state: train_state.TrainState,
    total: learner.Accumulator,
    left_out_divisor: float = 0.0,
  ) -> tuple[train_state.TrainState, Any]:
    """Returns the state after an optimizer step, and metrics."""
    fields = {name: x for name, x in state._asdict().items() if x is not None}
    after = jax.tree.map(
      lambda x: RemoteArray(self._gang, x.shape, x.dtype),
      train_state.changing(state),
    )
    into = [x.number for x in jax.tree.leaves(after)]
    metrics, *_ = self._ask(
      "update", _numbers(fields), _number(total), float(left_out_divisor), into
    )
    _, frozen = train_state.split(state.params, state.critic)
    return train_state.changed(state, frozen, after), metrics

  def measure(
    self, params: definition.Params, batches: Iterable[batch_lib.Batch]
  ) -> dict[str, float]:
    """Returns the metrics of the loss on batches, without a gradient."""
    each = zip(*map(self._tiles, batches), strict=True)
    answers = self._ask("measure", _numbers({"params": params}), tiles=each)
    return answers[0]

  def _scores(
    self, name: str, fields: Mapping[str, Any], batch: batch_lib.Batch
  ) -> Any:
    """Returns scores [B, L] on the host; each process has those of its rows."""
    scores = np.empty(batch.tokens.shape, np.float32)
    answers = self._ask(
      "score", name, _numbers(fields), tiles=self._tiles(batch)
    )
    for parts in answers:
      for (row, token), own in parts:
        rows, length = own.shape
        scores[row : row + rows, token : token + length] = own
    return scores

  def _ask(
    self, method: str, *args: Any, tiles: Iterable[Any] | None = None
  ) -> list[Any]:
    """Returns the answers of all processes to a command to these programs.

    Args:
      tiles: the last argument, of each process.
    """
    if self._built is None:
      self._built = self._gang.build(self._settings)
    count = len(self._gang.tiles)
    own = [()] * count if tiles is None else [(each,) for each in tiles]
    return self._gang.ask(method, [(self._built, *args, *x) for x in own])

  def _tiles(self, batch: batch_lib.Batch) -> list[learner_worker.Tiles]:
    """Returns the parts of a batch that each process keeps."""
    columns = batch_lib.columns(batch)
    return [
      {
        name: [learner_worker.tile(x, self._blocks, place) for place in places]
        for name, x in columns.items()
      }
      for places in self._gang.tiles
    ]


def _number(total: learner.Accumulator) -> int:
  sums: Any = total.grads
  return sums.number


def _numbers(fields: Mapping[str, Any]) -> dict[str, Sequence[int]]:
  """Returns the numbers of the leaves of fields of a state."""
  return {
    name: [leaf.number for leaf in jax.tree.leaves(tree)]
    for name, tree in fields.items()
  }
