"""Numbers that are not finite are planted, and found where they were."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms import losses, objective, value_loss
from rl.data import batch
from rl.train import learner, nonfinite_diagnosis, optimizers, skipped_updates

pytestmark = pytest.mark.compiled

GOAL = objective.Objective(loss=losses.ClippedSurrogate())
BAD = nonfinite_diagnosis.RowPlace(1, 2, 2)


@pytest.fixture(scope="module")
def untied(dense_config):
  """A model whose rows of embeddings matter to who uses them alone."""
  return dataclasses.replace(dense_config, tie_embeddings=False)


@pytest.fixture(scope="module")
def programs(untied, one_device):
  return learner.Learner(untied, one_device, GOAL, optimizers.AdamW()())


@pytest.fixture(scope="module")
def params(programs):
  return programs.init(jax.random.key(0)).params


def _packed(seed):
  """3 rows of 10: two trajectories of 2 + 3 ids, the last 3 sampled."""
  rng = np.random.default_rng(seed)
  packed = batch.empty(3, 10)
  packed.tokens[:] = rng.integers(1, 20, (3, 10))
  packed.positions[:] = [*range(5)] * 2
  packed.segments[:] = [1] * 5 + [2] * 5
  packed.sampled[:] = [False, False, True, True, True] * 2
  packed.versions[packed.sampled] = 4
  packed.behaviour[packed.sampled] = -2.5
  packed.advantages[packed.sampled] = rng.normal(size=18)
  return packed


@pytest.fixture
def skipped(params):
  batches = [_packed(0), _packed(1)]
  return skipped_updates.SkippedUpdate(batches, params, None, 5, 0, 0.0)


def _found(programs, skipped):
  """Micro-batches, rows and trajectories that are not finite."""
  found = []
  for i, packed in enumerate(skipped.batches):
    rows = [*nonfinite_diagnosis.rows(skipped, i)]
    parts = [
      x for row in rows for x in nonfinite_diagnosis.trajectories(skipped, row)
    ]
    for place in [*rows, *parts]:
      one = [nonfinite_diagnosis.alone(packed, place)]
      if not nonfinite_diagnosis.outcome(programs, skipped, one).is_finite:
        found.append(place)
  return found


def test_a_finite_update_is_finite_in_all_of_its_parts(programs, skipped):
  assert nonfinite_diagnosis.outcome(
    programs, skipped, skipped.batches
  ).is_finite
  assert _found(programs, skipped) == []


def test_loss_and_norm_are_those_of_the_update(programs, skipped):
  skipped = skipped._replace(left_out_divisor=3.0)
  total, state = None, programs.init(jax.random.key(0))
  for packed in skipped.batches:
    total = programs.accumulate(state.params, total, programs.place(packed))
  _, metrics = programs.update(state, total, 3.0)
  ours = nonfinite_diagnosis.outcome(programs, skipped, skipped.batches)
  assert ours.loss == pytest.approx(float(metrics["loss"]), rel=1e-6)
  assert ours.norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)


@pytest.mark.parametrize("name", ["advantages", "behaviour"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_in_a_column_is_traced_to_its_trajectory(
  programs, skipped, name, value
):
  getattr(skipped.batches[1], name)[2, 8] = value
  if name == "behaviour" and value == np.inf:
    # A ratio of exp(-inf) is bounded: not every infinity does harm.
    assert _found(programs, skipped) == []
  else:
    assert _found(programs, skipped) == [BAD._replace(segment=None), BAD]
  columns = {x.name: x for x in nonfinite_diagnosis.columns(programs, skipped)}
  assert columns[name].bad == 1
  assert columns[name].first == (BAD, 8)
  others = {"advantages", "behaviour"} - {name}
  assert [columns[x].bad for x in others] == [0]


def test_a_parameter_is_traced_to_who_uses_it(programs, skipped):
  # Id 21 is in the context of one trajectory, and nowhere else.
  skipped.batches[1].tokens[2, 6] = 21
  embed = skipped.params["embed"].at[21].set(jnp.nan)
  skipped = skipped._replace(params={**skipped.params, "embed": embed})
  assert _found(programs, skipped) == [BAD._replace(segment=None), BAD]
  found = nonfinite_diagnosis.parameters(programs, skipped)
  assert found.bad == ("policy/embed",)
  leaves = nonfinite_diagnosis.outcome(
    programs, skipped, skipped.batches
  ).leaves
  assert "policy/embed" in leaves


def test_the_largest_parameter_is_named(programs, skipped):
  norm = skipped.params["final_norm"].at[3].set(-70.0)
  skipped = skipped._replace(params={**skipped.params, "final_norm": norm})
  found = nonfinite_diagnosis.parameters(programs, skipped)
  assert found == ((), (70.0, "policy/final_norm"))


def test_a_layer_is_named_where_layers_are_scanned(untied, one_device):
  compute = dataclasses.replace(untied.compute, layers="scan")
  scanned = dataclasses.replace(untied, num_layers=3, compute=compute)
  programs = learner.Learner(scanned, one_device, GOAL, optimizers.AdamW()())
  params = programs.init(jax.random.key(0)).params
  stack = params["layers"][0]
  norm = stack["mlp_norm"].at[1, 2].set(jnp.nan)
  params = {**params, "layers": {0: {**stack, "mlp_norm": norm}}}
  skipped = skipped_updates.SkippedUpdate([_packed(0)], params, None, 5, 0, 0.0)
  found = nonfinite_diagnosis.parameters(programs, skipped)
  assert found.bad == ("policy/layers/1/mlp_norm",)
  leaves = nonfinite_diagnosis.outcome(
    programs, skipped, skipped.batches
  ).leaves
  assert "policy/layers/2/mlp_norm" in leaves


def _extremes(name, low, high, bad=0):
  return nonfinite_diagnosis.Extremes(name, low, high, bad, None)


@pytest.mark.parametrize(
  ("bad", "largest", "advantages", "where"),
  [
    (("policy/embed",), 1.0, (-1.0, 1.0, 0), "the parameters, not the data"),
    ((), 1e30, (-1.0, 1.0, 0), "the parameters, not the data"),
    ((), 3.0, (-1e25, 1.0, 0), "advantages, not the parameters"),
    ((), 3.0, (-1.0, 1.0, 4), "advantages, not the parameters"),
    ((), 3.0, (-1.0, 1.0, 0), "the parameters and the loss, not the data"),
  ],
)
def test_where_every_row_fails_the_odd_one_is_suspected(
  bad, largest, advantages, where
):
  found = nonfinite_diagnosis.Parameters(bad, (largest, "policy/embed"))
  told = [
    _extremes("advantages", *advantages),
    # Of these parameters, and so no fault of the data.
    _extremes("log ratio", -1e30, 1e30, 7),
  ]
  assert nonfinite_diagnosis.suspect(found, told).endswith(where)


def test_a_column_without_a_finite_number_is_suspected():
  found = nonfinite_diagnosis.Parameters((), (3.0, "policy/embed"))
  told = [_extremes("old", np.nan, np.nan, 9)]
  assert "data has as old, not" in nonfinite_diagnosis.suspect(found, told)


def test_padding_that_is_not_finite_is_not_counted(programs, skipped):
  for name in ("advantages", "behaviour"):
    getattr(skipped.batches[0], name)[0, 0] = np.nan
  assert {x.bad for x in nonfinite_diagnosis.columns(programs, skipped)} == {0}


def test_extremes_are_of_what_is_finite_and_of_all_micro_batches(
  programs, skipped
):
  skipped.batches[0].advantages[0, 2] = 40.0
  skipped.batches[1].advantages[0, 2:4] = -50.0, -np.inf
  columns = {x.name: x for x in nonfinite_diagnosis.columns(programs, skipped)}
  assert (columns["advantages"].low, columns["advantages"].high) == (-50, 40)
  ratio, scored = columns["log ratio"], columns["logprobs"]
  # Every behaviour is -2.5.
  assert ratio.high == pytest.approx(scored.high + 2.5)
  assert {"old", "values"}.isdisjoint(columns)


def test_a_trajectory_alone_has_its_shared_prompt_and_no_other(skipped):
  experts = np.zeros((1, 2), np.int8)
  packed = batch.empty(2, 8, share_prompts=True, experts=experts)
  packed = packed._replace(old=np.full((2, 8), 3.0, np.float32))
  assert packed.prefix is not None
  assert packed.experts is not None
  packed.segments[:] = [1, 1, 2, 2, 3, 3, 4, 0]
  packed.tokens[:] = range(10, 18)
  packed.experts[:] = 5
  packed.prefix.parents[:] = [-1, -1, 1, 1, 1, 1, -1, -1]
  packed.prefix.previous[:] = [0, 0, 1, 2, 1, 4, 5, 6]
  alone = nonfinite_diagnosis.alone(
    packed, nonfinite_diagnosis.RowPlace(0, 1, 3)
  )
  assert alone.segments.tolist() == [[0] * 8, [1, 1, 0, 0, 3, 3, 0, 0]]
  assert alone.tokens[1].tolist() == [10, 11, 0, 0, 14, 15, 0, 0]
  assert alone.prefix is not None
  assert alone.prefix.parents[1].tolist() == [-1] * 4 + [1, 1, -1, -1]
  assert alone.prefix.previous[1, 4] == 1
  assert alone.experts is not None
  assert alone.experts.dtype == np.int8
  assert alone.experts[1, :, 0, 0].tolist() == [5, 5, -1, -1, 5, 5, -1, -1]
  assert alone.old is not None
  assert alone.old.tolist() == [[0] * 8, [3, 3, 0, 0, 3, 3, 0, 0]]


def test_a_span_is_of_sampled_tokens(skipped):
  assert nonfinite_diagnosis.span(skipped.batches[1], BAD) == (7, 9, 3)
  assert nonfinite_diagnosis.span(
    skipped.batches[1], BAD._replace(segment=None)
  ) == (
    2,
    9,
    6,
  )


def _root(x):
  # At 0 the gradient is infinite, and its product with 0 is nan.
  return jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()


def _log(x):
  return jnp.log(x - 2.0)


@pytest.mark.parametrize(
  ("function", "operation", "line"),
  [(_log, "log", "in _log"), (jax.grad(_root), "mul", "in _root")],
)
def test_the_first_operation_with_a_nan_is_named(function, operation, line):
  found = nonfinite_diagnosis.first_nan(jax.jit(function), jnp.zeros(3)[0])
  assert found is not None
  assert f"encountered in {operation}" in found
  assert "tests/rl/train/test_nonfinite_diagnosis.py:" in found
  assert line in found


@pytest.mark.parametrize("planted", [False, True])
def test_the_learners_own_program_is_looked_into(programs, skipped, planted):
  packed = skipped.batches[1]
  if planted:
    packed.advantages[2, 8] = np.nan
  placed = programs.place(packed)
  found = nonfinite_diagnosis.first_nan(
    programs.accumulate, skipped.params, None, placed
  )
  if planted:
    assert found is not None
    assert " at rl/" in found
  else:
    assert found is None


def test_an_infinity_is_no_nan():
  # log(0) is -inf.
  assert nonfinite_diagnosis.first_nan(jnp.log, jnp.zeros(())) is None


def test_what_a_critic_cannot_learn_is_traced_as_well(
  skipped, untied, one_device
):
  with_critic = learner.Learner(
    untied,
    one_device,
    dataclasses.replace(GOAL, value=value_loss.ValueLoss(clip=None)),
    optimizers.AdamW()(),
    critic=True,
  )
  state = with_critic.init(jax.random.key(0))
  blank = np.zeros((3, 10), np.float32)
  batches = [
    b._replace(values=blank, returns=blank + 1) for b in skipped.batches
  ]
  batches[1].returns[2, 8] = np.nan
  skipped = skipped._replace(batches=batches, critic=state.critic)
  assert _found(with_critic, skipped) == [BAD._replace(segment=None), BAD]
  whole = nonfinite_diagnosis.outcome(with_critic, skipped, skipped.batches)
  assert "critic/kernel" in whole.leaves
