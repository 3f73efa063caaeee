"""A reference policy stays what it was, wherever it is kept."""

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest

from models import config as model_config
from models import logprobs, lora
from models import policy as policy_lib
from models.hf import export
from rl.algorithms import kl, losses, objective, references
from rl.pools import placement
from rl.train import learner, optimizers, scoring, train_state
from tests.helpers import real_programs, scored_episodes
from tests.helpers import tiny_engine as tiny
from tests.helpers.real_programs import on_mesh

pytestmark = pytest.mark.compiled

CONFIG = tiny.DENSE
TEACHER = dataclasses.replace(
  CONFIG, vocab_size=32, num_layers=2, d_model=24, d_ff=32
)
ADAPTED = dataclasses.replace(CONFIG, lora=lora.Lora(rank=2))
OBJECTIVE = objective.Objective(
  loss=losses.ClippedSurrogate(), kl=kl.KlPenalty(weight=0.1)
)
TEMPERATURE = 0.7


@functools.cache
def layout():
  spec = placement.MeshSpec(data=2)
  return placement.Placement(learner=spec, colocated=True).layouts()[0]


@functools.cache
def build(
  config: model_config.ModelConfig, memory: references.Memory | None = None
) -> learner.Learner:
  return learner.Learner(
    config,
    layout(),
    OBJECTIVE,
    optimizers.AdamW(learning_rate=0.05)(),
    TEMPERATURE,
    reference=memory,
  )


@functools.cache
def data():
  episodes = scored_episodes.draw(2)
  (packed,) = scored_episodes.pack(episodes, rows=8, length=32).batches
  return packed


def start(programs: learner.Learner) -> train_state.TrainState:
  return programs.init(jax.random.key(0))


def updated(programs, state, count=3):
  for _ in range(count):
    total = programs.accumulate(state.params, None, programs.place(data()))
    state, _ = programs.update(state, total)
  return state


def scored(reference, programs, state):
  score = scoring.reference_program(reference, programs, layout(), TEMPERATURE)
  assert score is not None
  found = on_mesh(lambda: score(state, programs.place(data())))
  return np.asarray(found)[data().sampled]


def policy(programs, params):
  found = on_mesh(lambda: programs.score(params, programs.place(data())))
  return np.asarray(found)[data().sampled]


@pytest.mark.parametrize("memory", ["device", "host"])
def test_the_first_weights_are_kept_through_updates_and_a_checkpoint(
  memory: references.Memory, tmp_path
):
  programs = build(CONFIG, memory)
  reference = references.Initial(memory=memory)
  assert references.memory(reference) == memory
  state = start(programs)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.reference)}
  assert kinds == {references.MEMORY_KINDS[memory]}
  first = policy(programs, state.params)
  np.testing.assert_array_equal(scored(reference, programs, state), first)
  state = on_mesh(updated, programs, state)
  assert np.abs(policy(programs, state.params) - first).max() > 0.1
  np.testing.assert_array_equal(scored(reference, programs, state), first)
  again = real_programs.saved_and_restored(tmp_path, state, programs.abstract)
  jax.tree.map(np.testing.assert_array_equal, again, state)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(again.reference)}
  assert kinds == {references.MEMORY_KINDS[memory]}
  again = on_mesh(updated, programs, again, 1)
  np.testing.assert_array_equal(scored(reference, programs, again), first)
  second = policy(programs, again.params)
  again = on_mesh(updated, programs, programs.refer(again), 1)
  np.testing.assert_array_equal(scored(reference, programs, again), second)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(again.reference)}
  assert kinds == {references.MEMORY_KINDS[memory]}


def test_nobody_keeps_what_nobody_asks_for():
  assert start(build(CONFIG)).reference is None
  for reference in (None, references.Base()):
    assert references.memory(reference) is None
  assert scoring.reference_program(None, build(CONFIG), layout(), 1.0) is None


def test_the_base_is_the_policy_with_adapters_at_zero():
  programs = build(ADAPTED)
  state = on_mesh(updated, programs, start(programs))
  adapters, frozen = lora.split(state.params)
  zeros = jax.tree.map(lambda x: jax.device_put(0 * x, x.sharding), adapters)
  expected = policy(programs, lora.join(zeros, frozen))
  found = scored(references.Base(), programs, state)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert np.abs(policy(programs, state.params) - expected).max() > 0.01


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
  """Weights of a larger model, and the directory that holds them."""
  params = policy_lib.of(TEACHER).init(jax.random.key(7))
  params = jax.tree.map(lambda x: 2 * x, params)
  directory = tmp_path_factory.mktemp("teacher") / "hf"
  export.export(directory, params, TEACHER)
  return params, directory


@pytest.mark.parametrize("memory", ["device", "host"])
def test_a_teacher_says_what_its_checkpoint_says(
  taught, memory: references.Memory
):
  params, directory = taught
  teacher = references.Teacher(
    model=TEACHER, directory=str(directory), memory=memory
  )
  teacher.check()
  programs = build(CONFIG)
  found = scored(teacher, programs, start(programs))
  own = data()
  model = policy_lib.of(TEACHER).bind(params)
  for row in np.flatnonzero(own.sampled.any(1)):
    hidden, _ = model.hidden(*(jax.numpy.asarray(x[[row]]) for x in own[:3]))
    logits = logprobs.logits(model.terms(hidden[0])) / TEMPERATURE
    at = np.flatnonzero(own.sampled[row])
    chosen = np.asarray(jax.nn.log_softmax(logits))[at - 1, own.tokens[row, at]]
    before = own.sampled[:row].sum()
    np.testing.assert_allclose(
      found[before : before + len(at)], chosen, atol=1e-5
    )


def test_a_teacher_is_read_once_and_takes_routes_of_its_own(taught, tmp_path):
  _, directory = taught
  teacher = references.Teacher(model=TEACHER, directory=str(directory))
  programs = build(CONFIG)
  score = scoring.reference_program(teacher, programs, layout(), TEMPERATURE)
  assert score is not None
  state = start(programs)
  # Of a model without routers; the policy's would not even fit.
  routed = data()._replace(
    experts=np.zeros((*data().tokens.shape, 5, 3), np.int32)
  )
  first = on_mesh(lambda: score(state, programs.place(data())))
  os.rename(directory, tmp_path / "away")
  try:
    again = on_mesh(lambda: score(state, programs.place(routed)))
  finally:
    os.rename(tmp_path / "away", directory)
  np.testing.assert_array_equal(first, again)


def test_a_teacher_that_is_not_there_is_refused(tmp_path):
  missing = tmp_path / "nobody"
  teacher = references.Teacher(model=TEACHER, directory=str(missing))
  with pytest.raises(ValueError, match=r"reference\.directory=.*nobody"):
    teacher.check()


def test_a_teacher_of_another_size_than_its_checkpoint_is_refused(taught):
  _, directory = taught
  teacher = references.Teacher(model=CONFIG, directory=str(directory))
  with pytest.raises(
    ValueError, match=r"(?s)reference\.directory=.*model\.d_model=16"
  ):
    teacher.check()
