"""A run that starts from a Hugging Face checkpoint."""

import dataclasses
import json
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from envs.rewards import rewards
from models import config as model_config
from models import logprobs, lora
from models import policy as policy_lib
from models.hf import config as hf_config
from models.hf import export, load
from rl import experiment as experiment_lib
from rl import initial_state
from rl.engine.builtin import settings as engine_settings
from rl.loop import fine_tuning, warm_start
from rl.pools import placement
from rl.rollout import group_rollout
from rl.testing import fakes
from tests.helpers import counting_runs, scored_episodes

pytestmark = pytest.mark.compiled

# Counting has 7 ids; the vocabulary is padded to 8.
MODEL = model_config.tiny_moe(
  vocab_size=8, num_layers=1, d_model=32, max_length=16
)


@pytest.fixture(scope="module")
def params():
  return policy_lib.of(MODEL).init(jax.random.key(7))


@pytest.fixture(scope="module")
def directory(params, tmp_path_factory):
  path = tmp_path_factory.mktemp("initial") / "hf"
  export.export(path, params, MODEL)
  return path


ROLLOUT = group_rollout.Rollout(group_size=4, max_tokens=16)


def experiment(directory, model=MODEL, rollout=ROLLOUT, **changes):
  return experiment_lib.Experiment(
    environment=fakes.Counting(turns=2),
    reward=rewards.Outcome(),
    model=model,
    rollout=rollout,
    engine=engine_settings.EngineSettings(
      slots=32, row_buckets=(32,), chunk_buckets=(4,)
    ),
    batch=experiment_lib.BatchShape(rows=8, length=16),
    initial=str(directory),
    **changes,
  )


async def initial_params(settings):
  async with counting_runs.built(settings) as parts:
    return (await initial_state.create(parts)).params, parts


def assert_equal(one, other):
  equal = jax.tree.map(np.array_equal, one, other)
  assert jax.tree.all(equal), equal


async def test_a_run_starts_from_the_checkpoints_parameters(directory, params):
  found, _ = await initial_params(experiment(directory, seed=3))
  assert_equal(found, params)


async def test_they_lie_on_the_learners_mesh(directory, params):
  four = placement.MeshSpec(data=2, expert=2)
  found, parts = await initial_params(
    experiment(directory, placement=placement.Placement(learner=four))
  )
  axes = policy_lib.of(MODEL).axes
  wanted = parts.learner_layout.tree(axes)
  assert jax.tree.map(lambda x: x.sharding, found) == wanted
  assert_equal(found, params)


async def test_adapters_are_drawn_on_top_of_the_checkpoint(directory, params):
  model = dataclasses.replace(MODEL, lora=lora.Lora(rank=2))
  found, parts = await initial_params(experiment(directory, model))
  adapters, base = lora.split(found)
  assert_equal(base, params)
  # As a run without a checkpoint draws them.
  fresh = initial_state.fresh_state(parts.programs, 0).params
  assert_equal(adapters, lora.split(fresh)[0])


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"d_model": 64}, "model.d_model=64, but config.json has 32"),
    ({"max_length": 17}, "model.max_length=17 is above the 16 of config.json"),
    ({"vocab_size": 9}, "model.vocab_size=9, but config.json has 8"),
  ],
)
def test_a_checkpoint_of_another_model_is_refused_before_devices_are_touched(
  directory, change, reason
):
  model = dataclasses.replace(MODEL, **change)
  start = f"initial={directory} cannot be loaded:\n  "
  with pytest.raises(ValueError, match=f"^{re.escape(start + reason)}"):
    experiment(directory, model).validate_initial()


def test_a_directory_that_does_not_exist_is_refused(directory):
  settings = experiment(directory.with_name("hff"))
  with pytest.raises(
    ValueError, match=r"hff cannot .*\n.*directory does not exist"
  ):
    settings.validate_initial()


def test_only_a_run_that_starts_from_a_directory_needs_it(directory):
  experiment(directory.with_name("hff")).validate()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      {"max_length": 15},
      "model.max_length=15 is below rollout.max_tokens=16; an episode would"
      " not fit; lower rollout.max_tokens to 15, or use 16 or more if",
    ),
    (
      {"vocab_size": 6},
      "model.vocab_size=6 is below the 7 ids that the words of counting make;"
      " in the config file, take the model's sizes from initial:"
      " model=models.hf.config.load('{directory}')",
    ),
  ],
)
def test_the_way_out_keeps_to_what_the_checkpoint_has(
  directory, change, message
):
  message = re.escape(message.format(directory=directory))
  model = dataclasses.replace(MODEL, **change)
  with pytest.raises(ValueError, match=f"^{message}"):
    experiment(directory, model).validate()


def test_a_checkpoint_that_is_too_small_itself_is_not_recommended(directory):
  class Talkative(fakes.Counting):
    @property
    def words(self):
      return ("go", "on", "yes", "no", "well", "then")

  # Its 6 words make 9 ids, and config.json has 8.
  settings = dataclasses.replace(experiment(directory), environment=Talkative())
  with pytest.raises(ValueError, match="has too few ids for them, so start"):
    settings.validate()


async def test_weights_that_are_no_numbers_end_a_run_before_it_starts(
  directory, tmp_path
):
  tensors = safetensors.numpy.load_file(directory / "model.safetensors")
  tensors["model.norm.weight"][3] = np.nan
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  text = (directory / "config.json").read_text()
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(load.Unusable, match=r"in 1 tensors: model\.norm\.weight"):
    await initial_params(experiment(tmp_path))


def test_the_config_of_the_checkpoint_is_the_one_that_fits(directory):
  model = hf_config.load(directory)
  experiment(directory, model).validate_initial()
  data = json.loads((directory / "config.json").read_text())
  assert data["vocab_size"] == model.vocab_size == 8


async def test_the_optimizer_of_a_warm_start_makes_room_for_the_next(
  directory, monkeypatch
):
  class Watched(warm_start.WarmStartObserver):
    moments = staticmethod(lambda: None)

    async def on_boundary(self, now):
      self.moments = weakref.ref(jax.tree.leaves(now.state.opt_state)[-1])

  start = warm_start.WarmStart(steps=1, episodes=2)
  seen = Watched()
  async with counting_runs.built(
    experiment(directory, warm_start=start)
  ) as parts:
    wrap, left = parts.programs.wrap, []

    def wrapped(params):
      left.append(seen.moments())
      return wrap(params)

    monkeypatch.setattr(parts.programs, "wrap", wrapped)
    await initial_state.create(parts, observer=seen)
  assert left[-1] is None


@pytest.mark.parametrize(
  ("settings", "temperature"),
  [(fine_tuning.FineTuning(), 1.0), (warm_start.WarmStart(), 2.0)],
)
def test_fine_tuning_is_of_the_model_and_not_of_its_sampling(
  directory, settings, temperature
):
  model = model_config.tiny(vocab_size=24, max_length=32)
  hot = dataclasses.replace(ROLLOUT, temperature=2.0)
  (data,) = scored_episodes.pack(
    scored_episodes.draw(5, groups=1, size=2), rows=2, length=32
  ).batches
  layout, _ = placement.Placement(colocated=True).layouts()
  learner = initial_state.supervised_settings(
    experiment(directory, model, rollout=hot, warm_start=settings), settings
  ).build(layout)
  params = jax.tree.map(lambda x: 2 * x, learner.init(jax.random.key(0)).params)
  policy = policy_lib.of(model).bind(params)
  hidden, _ = policy.hidden(
    *map(jnp.asarray, (data.tokens, data.positions, data.segments))
  )
  logits = np.asarray(logprobs.logits(policy.terms(hidden)), np.float64)
  logits = logits[:, :-1] / temperature
  chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  said = np.take_along_axis(chances, data.tokens[:, 1:, None], -1)[..., 0]
  expected = -np.log(said[data.sampled[:, 1:]]).mean()
  found = learner.measure(params, [data])["loss"]
  assert found == pytest.approx(expected, rel=1e-5)
