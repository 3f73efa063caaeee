"""A run that trains adapters: what changes, moves, is saved and comes back."""

import asyncio
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from models import config as model_config
from models import lora, memory_report
from models import policy as policy_lib
from models.hf import export
from rl import assemble, initial_state
from rl.engine.builtin import engine as builtin_engine
from rl.loop import warm_start
from rl.pools import placement
from rl.runtime import checkpoint
from rl.schedule import overlap
from rl.train import train_state
from tests.helpers import counting_runs

pytestmark = pytest.mark.compiled


def experiment(**changes):
  base = counting_runs.experiment(
    model_config.tiny_moe(
      vocab_size=8,
      num_layers=1,
      d_model=32,
      max_length=16,
      lora=lora.Lora(rank=2, targets=(*lora.TARGETS[:7], "router")),
    ),
    # Nothing is drawn or summed by the clock, and what the engine records
    # enters no gradient: two runs are equal bit for bit.
    overlap=dataclasses.replace(overlap.sync(4, 2), old_logprob="snapshot"),
    rounds=4,
  )
  return dataclasses.replace(base, **changes)


class Saving(counting_runs.Watching):
  """Keeps metrics, and saves where a round is due."""

  def __init__(self, checkpoints: checkpoint.Checkpoints | None, at=()):
    super().__init__()
    self._checkpoints, self._at = checkpoints, at

  async def on_boundary(self, progress):
    if self._checkpoints and progress.trained in self._at:
      initial_state.save(self._checkpoints, progress)


@dataclasses.dataclass
class Ran:
  """What a run was, and what it has left."""

  first: train_state.TrainState
  last: train_state.TrainState
  rounds: list
  events: list
  served: Any


async def run(settings, checkpoints=None, save_at=()):
  """Runs to the end, from the newest checkpoint if there is one."""
  async with counting_runs.built(settings) as parts:
    start = await counting_runs.begun(parts, checkpoints)
    saving = Saving(checkpoints, save_at)
    last = await assemble.coordinate(parts, saving).run(start)
    (engine,) = parts.engines
    assert isinstance(engine, builtin_engine.BuiltinEngine)
    return Ran(
      start.state, last, saving.rounds, parts.log.events, engine._params
    )


def leaves(tree):
  return {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def bits(tree):
  return {name: np.asarray(x).tobytes() for name, x in leaves(tree).items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
  """Of `ran`: that of its second round."""
  kept = checkpoint.Checkpoints(tmp_path_factory.mktemp("run"), keep=1)
  yield kept
  kept.close()


@pytest.fixture(scope="module")
def ran(checkpoints):
  ran = asyncio.run(run(experiment(), checkpoints, save_at=(2,)))
  checkpoints.wait()
  return ran


def test_adapters_change_and_nothing_else_does(ran):
  before, after = (lora.split(s.params) for s in (ran.first, ran.last))
  assert bits(before[1]) == bits(after[1])
  # The very same arrays, which is what the publisher looks at.
  for name, leaf in leaves(before[1]).items():
    assert leaves(after[1])[name] is leaf, name
  changed = {
    name for name, old in bits(before[0]).items() if bits(after[0])[name] != old
  }
  assert changed == bits(before[0]).keys()


def test_optimizer_and_gradients_are_of_adapters_alone(ran):
  num = memory_report.num_params(experiment().model).trained
  moments = [x for x in jax.tree.leaves(ran.last.opt_state) if x.ndim]
  # Two moments of Adam.
  assert sum(x.size for x in moments) == 2 * num


def test_the_engine_samples_with_the_learners_probabilities(ran):
  assert len(ran.rounds) == 4
  for metrics in ran.rounds:
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["logprob_gap_tokens"] > 0


def test_publishing_moves_adapters_alone(ran):
  num_bytes = 4 * memory_report.num_params(experiment().model).trained
  moved = [
    event["moved_bytes"] for event in ran.events if event["kind"] == "staged"
  ]
  assert moved == [num_bytes] * 4
  # And the engine serves all of the last parameters all the same.
  assert bits(ran.served) == bits(ran.last.params)


@pytest.mark.slow
async def test_a_resumed_run_ends_bit_equal_to_one_that_wasnt(ran, checkpoints):
  resumed = await run(experiment(), checkpoints)
  assert [metrics["round"] for metrics in resumed.rounds] == [3, 4]
  assert bits(resumed.last) == bits(ran.last)


def test_a_checkpoint_holds_adapters_and_their_optimizer(ran, checkpoints):
  adapters, base = lora.split(ran.last.params)
  like = {"params": jax.tree.map(abstract, adapters)}
  saved = checkpoints.restore(like)
  # Of the same adapters, two rounds before; and no leaf of the base.
  assert saved is not None
  assert bits(saved.state["params"]).keys() == bits(adapters).keys()
  assert bits(saved.state["params"]) != bits(adapters)
  with pytest.raises(checkpoint.Mismatch, match="embed is absent"):
    checkpoints.restore({"params": jax.tree.map(abstract, ran.last.params)})
  assert len(saved.host["frozen"]) == len(jax.tree.leaves(base))


async def test_another_base_is_refused(ran, checkpoints):
  async with counting_runs.built(experiment(seed=1)) as parts:
    with pytest.raises(checkpoint.Mismatch, match=r"frozen .* on that mesh"):
      await initial_state.restore(parts, checkpoints)


def abstract(leaf):
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


async def test_a_warm_start_trains_adapters_alone(ran):
  warm = warm_start.WarmStart(steps=2, episodes=8)
  async with counting_runs.built(experiment(warm_start=warm)) as parts:
    state = await initial_state.create(parts)
  (old, frozen), (new, base) = map(lora.split, (ran.first.params, state.params))
  assert bits(frozen) == bits(base)
  assert bits(old) != bits(new)


async def test_a_run_from_a_loaded_model_adds_fresh_adapters(ran, tmp_path):
  settings = experiment(
    initial=str(tmp_path / "base"),
    placement=placement.Placement(learner=placement.MeshSpec(data=2, expert=2)),
  )
  bare = dataclasses.replace(settings.model, lora=None)
  base = policy_lib.of(bare).init(jax.random.key(7))
  export.export(tmp_path / "base", base, bare)
  async with counting_runs.built(settings) as parts:
    state = await initial_state.create(parts)
  adapters, frozen = lora.split(state.params)
  assert bits(frozen) == bits(base)
  # Drawn from the seed of the run, as without a model to start from.
  fresh, _ = lora.split(ran.first.params)
  assert bits(adapters) == bits(fresh)
  gate = adapters["layers"][0]["moe"]["lora"]["gate"]["b"]
  sizes = {"data": 2, "expert": 2, "context": 1, "tensor": 1}
  assert gate.sharding.mesh.shape == sizes
