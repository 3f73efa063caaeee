"""The rows that each process is sent, and numbers in the place of arrays."""

import gc
import itertools
import weakref
from typing import Any

import jax
import numpy as np
import pytest

from models import config as model_config
from rl.algorithms import losses, objective
from rl.data import batch as batch_lib
from rl.pools import placement
from rl.remote import learner_worker, remote_learner, wire
from rl.train import learner, optimizers, train_state

pytestmark = pytest.mark.compiled
ROWS, LENGTH = 8, 6


class RecordingGang:
  """Two processes of two devices each, which answer what they are told to.

  Attributes:
    sent: (method, arguments of each process) of every command.
    dropped: numbers of what ended.
  """

  def __init__(self, answers=(None, None), length_blocks=1):
    blocks = itertools.product(range(4 // length_blocks), range(length_blocks))
    places = list(blocks)
    self.tiles = [places[:2], places[2:]]
    self.answers = answers
    self.sent = []
    self.dropped = []
    self._numbers = itertools.count()

  def hold(self, value):
    number = next(self._numbers)
    weakref.finalize(value, self.dropped.append, number)
    return number

  def build(self, settings):
    return 0

  def ask(self, method, args):
    # What cannot be sent is found out here.
    self.sent.append((method, [wire.unpack(wire.pack(own)) for own in args]))
    return list(self.answers)


def programs(gang: Any, **mesh):
  settings = learner.LearnerSettings(
    model=model_config.tiny(vocab_size=8, num_layers=1, max_length=16),
    objective=objective.Objective(loss=losses.Reinforce()),
    optimizer=optimizers.AdamW(),
  )
  spec = placement.MeshSpec(**mesh)
  layout = placement.Placement(colocated=True).layouts()[0]
  return remote_learner.RemoteLearner(settings, layout, spec.plan, gang)


def numbered() -> batch_lib.Batch:
  """Returns a batch whose tokens are all different, with a prefix."""
  empty = batch_lib.empty(ROWS, LENGTH, share_prompts=True)
  tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
  return empty._replace(tokens=tokens, reference=tokens.astype(np.float32))


@pytest.mark.parametrize(
  ("mesh", "first"),
  [
    # Process 0 has the first half of the rows, whole.
    ({"data": 2, "expert": 2}, [[0, 1], [2, 3]]),
    # Or the first half of the rows, in two halves of their tokens.
    ({"data": 2, "context": 2}, [[0, 1, 2, 3], [0, 1, 2, 3]]),
  ],
)
def test_each_process_is_sent_the_rows_of_its_devices_and_no_more(mesh, first):
  gang = RecordingGang(length_blocks=mesh.get("context", 1))
  learning, batch = programs(gang, **mesh), numbered()
  learning.accumulate({}, None, learning.place(batch))
  ((method, sent),) = gang.sent
  assert method == "accumulate"
  tiles = [args[-1] for args in sent]
  columns = batch_lib.columns(batch)
  assert [set(own) for own in tiles] == [set(columns)] * 2
  for name, column in columns.items():
    sizes = [sum(part.nbytes for part in own[name]) for own in tiles]
    assert sizes == [column.nbytes // 2] * 2
    parts = [part.ravel() for own in tiles for part in own[name]]
    joined = np.sort(np.concatenate(parts))
    np.testing.assert_array_equal(joined, np.sort(column.ravel()))
  rows = [(part[:, 0] // LENGTH).tolist() for part in tiles[0]["tokens"]]
  assert rows == first


def test_scores_of_all_processes_are_put_together():
  halves = [np.full((4, LENGTH), x, np.float32) for x in (1, 2)]
  gang = RecordingGang([[((0, 0), halves[0])], [((4, 0), halves[1])]])
  scores = programs(gang, data=4).score({}, numbered())
  np.testing.assert_array_equal(scores, np.concatenate(halves))


def test_an_array_that_nothing_refers_to_is_dropped():
  gang = RecordingGang()
  learning = programs(gang, data=4)
  arrays = {"kernel": jax.numpy.ones((2, 3)), "bias": jax.numpy.ones(())}
  state: Any = train_state.TrainState(arrays, (), jax.numpy.zeros((), "int32"))
  state = learning.put(state)
  assert [x.nbytes for x in jax.tree.leaves(state)] == [4, 24, 4]
  kept = state.params["kernel"]
  del state
  gc.collect()
  assert sorted(gang.dropped) == [0, 2]
  assert kept.number == 1


@pytest.mark.parametrize(
  ("why", "advice"),
  [
    ("Gloo context initialization failed", "; on CPUs the name of each host"),
    ("no device cuda", "$"),
  ],
)
def test_an_error_of_gloo_says_what_it_needs(why, advice):
  with (
    pytest.raises(RuntimeError, match=f"{why}{advice}"),
    learner_worker._naming_hosts(),
  ):
    raise RuntimeError(why)
