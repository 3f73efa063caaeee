"""A prompt that a group shares trains as if every member had its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import config as config_lib
from models import policy as policy_lib
from rl.algorithms import losses, objective
from rl.data import batch, trajectory
from rl.pools import placement
from rl.train import learner

pytestmark = pytest.mark.compiled

ROWS, LENGTH, VOCAB = 8, 32, 24
TEMPERATURE = 0.7
OBJECTIVE = objective.Objective(
  loss=losses.ClippedSurrogate(), entropy_bonus=0.1, balance_weight=0.5
)
MODELS = {
  "dense": config_lib.tiny,
  "moe": functools.partial(config_lib.tiny_moe, dense_layers=(0,)),
}
GROUPS = {
  # Prompt, then (context, sampled) lengths of what follows it, a member each.
  "members of several turns": [
    (6, [[3], [2, 2, 4], [1, 1, 1, 3, 2], [5]]),
  ],
  "a group over several rows": [
    (9, [[6], [2, 3, 7], [12], [1, 4, 3], [4], [9], [3, 1, 2]]),
  ],
  "a group of one": [(5, [[4, 2, 3]])],
  "several groups in a row": [
    (3, [[2], [3], [1]]),
    (4, [[2, 1, 1], [3]]),
    (2, [[1], [2, 2, 2]]),
  ],
  "one member with another prompt": [(7, [[3], [4, 1, 1], [2], [5]])],
}
SPLIT = "a group over several rows"


def config_of(model, form: Any = "auto"):
  return MODELS[model](
    vocab_size=VOCAB,
    num_layers=2,
    d_model=32,
    head_dim=8,
    d_ff=32,
    d_expert=32,
    max_length=LENGTH,
    compute=config_lib.Compute(moe_block=4, attention=form, attention_block=8),
  )


@functools.cache
def params_of(model):
  """Without structure, so that no part of the model is idle."""
  config, rng = config_of(model), np.random.default_rng(0)

  def noise(leaf):
    values = rng.normal(float(leaf.ndim == 1), 0.2, leaf.shape)
    return jnp.asarray(values, leaf.dtype)

  return jax.tree.map(noise, policy_lib.of(config).shapes)


@functools.cache
def layout_of(data, expert):
  spec = placement.MeshSpec(data=data, expert=expert)
  return placement.Placement(learner=spec, colocated=True).layouts()[0]


@functools.cache
def programs_of(model, data=1, expert=1, form="auto"):
  return learner.Learner(
    config_of(model, form),
    layout_of(data, expert),
    OBJECTIVE,
    optax.sgd(1.0),
    TEMPERATURE,
  )


def episodes_of(case):
  """Returns episodes; `versions` number the sampled tokens of all of them."""
  rng, episodes, sampled = np.random.default_rng(1), [], 0

  def ids(count):
    return rng.integers(VOCAB, size=count).astype(np.int32)

  for group, (width, members) in enumerate(GROUPS[case]):
    shared = ids(width)
    for index, lengths in enumerate(members):
      prompt, turns = shared.copy(), []
      if case == "one member with another prompt" and index == 2:
        prompt[3] = (prompt[3] + 1) % VOCAB
      contexts = [prompt, *map(ids, lengths[1::2])]
      for context, count in zip(contexts, lengths[::2], strict=True):
        turns.append(
          trajectory.Turn(
            context=context,
            tokens=ids(count),
            # About as likely as in the model: some ratios are clipped.
            logprobs=rng.uniform(-4, -2.5, count).astype(np.float32),
            versions=np.arange(sampled, sampled + count, dtype=np.int32),
            stop="stop",
          )
        )
        sampled += count
      episodes.append(
        trajectory.Trajectory(
          task_id="game/train/0",
          group_id=group,
          index=index,
          turns=turns,
          status=trajectory.Status.COMPLETED,
          reward=0.0,
        )
      )
  values = [
    np.full(one.num_sampled, rng.normal(), np.float32) for one in episodes
  ]
  return episodes, values


def pack(case, share):
  episodes, values = episodes_of(case)
  packed = batch.pack(
    episodes, rows=ROWS, length=LENGTH, version=0, share_prompts=share
  )
  (whole,) = batch.with_column(packed, "advantages", values).batches
  return whole


def accumulate(programs, params, packed):
  shardings = jax.tree.map(lambda x: x.sharding, programs.abstract.params)
  placed = jax.device_put(params, shardings)
  total = programs.accumulate(placed, None, programs.place(packed))
  return jax.device_get(total)


def assert_close(actual, expected):
  """To 1e-5 of the largest entry of each leaf; a sum is a leaf of its own."""
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@functools.cache
def unshared(model, case):
  return accumulate(programs_of(model), params_of(model), pack(case, False))


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("model", MODELS)
def test_loss_metrics_and_gradients_equal_those_of_unshared_rows(model, case):
  own, shared = pack(case, False), pack(case, True)
  saved = int((own.segments > 0).sum() - (shared.segments > 0).sum())
  # Each member after the first of a row saves a prompt: 3 of 6 ids; of seven
  # the 5 that find it in their row; 0; 2 of 3, 1 of 4, 1 of 2; 2 of 7.
  assert saved == dict(zip(GROUPS, (18, 36, 0, 12, 14), strict=True))[case]
  total = accumulate(programs_of(model), params_of(model), shared)
  expected = unshared(model, case)
  assert_close(total.sums, expected.sums)
  assert_close(total.grads, expected.grads)
  assert expected.sums.clipped > 0


def test_prompts_are_shared_on_a_mesh_as_on_one_device():
  programs = programs_of("moe", data=2, expert=2)
  total = accumulate(programs, params_of("moe"), pack(SPLIT, True))
  expected = unshared("moe", SPLIT)
  assert_close(total.sums, expected.sums)
  assert_close(total.grads, expected.grads)


@pytest.mark.parametrize("form", ["reference", "blockwise"])
def test_every_form_of_attention_sees_the_shared_prompt(form):
  programs = programs_of("dense", form=form)
  total = accumulate(programs, params_of("dense"), pack(SPLIT, True))
  expected = unshared("dense", SPLIT)
  assert_close(total.sums, expected.sums)
  assert_close(total.grads, expected.grads)


@pytest.mark.parametrize(
  ("model", "wrap", "share"),
  [
    pytest.param("dense", jax.jit, False, id="dense-own"),
    pytest.param("dense", jax.jit, True, id="dense-shared"),
    pytest.param("moe", jax.jit, False, id="moe-own"),
    pytest.param("moe", jax.jit, True, id="moe-shared"),
    # A row for each trajectory is what shared ones are compared with.
    pytest.param("moe", lambda f: f, True, id="moe-shared-eager"),
  ],
)
def test_packed_rows_score_as_if_every_row_held_one_trajectory(
  model, wrap, share
):
  score = wrap(
    functools.partial(
      learner.score_tokens,
      config=config_of(model),
      layout=layout_of(1, 1),
      temperature=TEMPERATURE,
    )
  )
  episodes, _ = episodes_of("several groups in a row")
  alone = jax.tree.map(
    lambda *rows: np.concatenate(rows),
    *(
      batch.pack([episode], rows=1, length=LENGTH, version=0).batches[0]
      for episode in episodes
    ),
  )
  packed = pack("several groups in a row", share)
  assert packed.segments.any(1).sum() < len(episodes)

  def scores(rows):
    """Log-probability and entropy of the sampled tokens, in their order."""
    by_number = np.argsort(rows.versions[rows.sampled])
    logprobs, entropy, *_ = score(params_of(model), None, rows)
    found = np.stack([logprobs, entropy])[:, rows.sampled]
    return found[:, by_number]

  # In float32, nats; each is at most some 4.
  np.testing.assert_allclose(scores(packed), scores(alone), rtol=0, atol=1e-5)
