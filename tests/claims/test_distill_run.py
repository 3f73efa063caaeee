"""A student learns from a teacher's say; a policy learns from an oracle's."""

import dataclasses

import jax
import pytest

from models import config as model_config
from models import policy as policy_lib
from models.hf import export
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.algorithms import presets, references
from rl.engine.builtin import settings as engine_settings
from rl.loop import warm_start
from rl.schedule import overlap
from rl.train import optimizers
from tests.helpers import counting_runs

pytestmark = pytest.mark.compiled

SIZES = {
  "vocab_size": 8,
  "num_heads": 2,
  "num_kv_heads": 1,
  "head_dim": 8,
  "max_length": 16,
}
TEACHER = model_config.tiny(num_layers=2, d_model=32, d_ff=32, **SIZES)
STUDENT = model_config.tiny(num_layers=1, d_model=16, d_ff=16, **SIZES)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """A checkpoint with a strong opinion on every token."""
  directory = tmp_path_factory.mktemp("teacher") / "hf"
  params = policy_lib.of(TEACHER).init(jax.random.key(5))
  params["embed"] = 20 * params["embed"]
  export.export(directory, params, TEACHER)
  return references.Teacher(model=TEACHER, directory=str(directory))


def experiment(**changes):
  base = counting_runs.experiment(
    STUDENT,
    optimizer=optimizers.AdamW(learning_rate=0.02),
    engine=engine_settings.EngineSettings(
      slots=32,
      row_buckets=(32,),
      chunk_buckets=(4,),
      steps_per_dispatch=1,
    ),
    overlap=overlap.sync(8),
    batch=experiment_lib.BatchShape(rows=8, length=32, tail_rows=None),
    rounds=30,
    seed=3,
  )
  return dataclasses.replace(base, **changes)


async def run(tree):
  """Returns the metrics of all rounds."""
  watching = counting_runs.Watching()
  async with counting_runs.built(tree) as parts:
    start = await counting_runs.begun(parts)
    await assemble.coordinate(parts, watching).run(start)
  return watching.rounds


@pytest.mark.slow
async def test_a_student_comes_closer_to_its_teacher_without_a_reward(teacher):
  found = await run(experiment(algorithm=presets.Distill(reference=teacher)))
  # The mean of log student - log teacher over what the student says.
  gaps = [metrics["kl"] for metrics in found]
  assert gaps[0] > 0.3
  assert gaps[-1] < 0.2 * gaps[0]


@pytest.mark.slow
async def test_a_teacher_on_the_host_says_the_same(teacher):
  on_host = dataclasses.replace(teacher, memory="host")
  device, host = [
    await run(experiment(algorithm=presets.Distill(reference=one), rounds=2))
    for one in (teacher, on_host)
  ]
  assert host[1]["kl"] == pytest.approx(device[1]["kl"], rel=1e-6)


async def test_a_warm_start_alone_learns_what_an_oracle_says():
  said = []
  tree = experiment(
    warm_start=warm_start.WarmStart(
      steps=40,
      episodes=8,
      exploration=0.0,
      optimizer=optimizers.AdamW(learning_rate=0.02),
    ),
    rounds=0,
  )
  tree.validate()
  async with counting_runs.built(tree) as parts:
    state = await initial_state.create(parts, said.append)
  assert int(state.updates) == 0  # The run's own optimizer begins afresh.
  # "warm start done: loss 0.012 nats a token": the oracle always says "yes".
  loss = float(said[-1].split("loss ")[1].split()[0])
  assert loss < 0.1
