"""One dispatch: what it samples, what it writes and what it leaves alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kv_cache, logprobs
from models import policy as policy_lib
from rl.engine.builtin import decode_step

pytestmark = pytest.mark.compiled

PROMPTS = ([1, 2, 3, 7, 8], [4, 5], [6])
# Pages of 4 positions: two for each of four rows.
PAGES, WIDTH, SLOTS, STEPS = 8, 2, 4, 3
CHUNKS = (2, 7)


def program(params, chunks, **kwargs):
  return jax.jit(
    functools.partial(
      decode_step.advance, params, chunks=chunks, max_steps=STEPS, **kwargs
    )
  )


@pytest.fixture(scope="module")
def advance(dense_config, dense_params, one_device):
  """((cache, carry), plan, chunks, biases) -> (both again, sampled)."""
  programs = {
    chunks: program(
      dense_params, chunks, config=dense_config, layout=one_device
    )
    for chunks in ((0, 1), CHUNKS)
  }
  none = np.zeros((2, 24), np.float32)

  def run(state, plan, chunks=CHUNKS, biases=none):
    cache, carry, sampled = programs[chunks](*state, biases, plan)
    return (cache, carry), sampled

  return run


@pytest.fixture(scope="module")
def plain(dense_config, dense_params):
  """ids -> logits of the plain model."""

  @jax.jit
  def forward(ids):
    at = jnp.arange(ids.shape[1])[None]
    model = policy_lib.of(dense_config).bind(dense_params)
    hidden, _ = model.hidden(ids, at, jnp.ones_like(ids))
    return logprobs.logits(model.terms(hidden))[0]

  def logits(ids):
    padded = np.zeros((1, 8), np.int32)
    padded[0, : len(ids)] = ids
    return forward(padded)[: len(ids)]

  return logits


@pytest.fixture(scope="module")
def greedy(plain):
  """(ids, count) -> the most probable answer of the plain model."""

  def answer(ids, count):
    ids = list(ids)
    for _ in range(count):
      ids.append(int(plain(ids)[-1].argmax()))
    return ids[-count:]

  return answer


def unused(config):
  """A cache full of sevens: what is overwritten can be told. And a carry."""
  cache = kv_cache.init_cache(config, PAGES, 4)
  sevens = jax.tree.map(lambda x: jnp.full_like(x, 7), cache)
  return sevens, decode_step.init_carry(SLOTS)


@pytest.fixture
def fresh(dense_config):
  return unused(dense_config)


def empty(chunks=CHUNKS):
  return decode_step.empty_plan(SLOTS, chunks, WIDTH, slots=SLOTS)


def set_row(
  plan, row, slot, past, ids, budget, *, chunks=CHUNKS, steps=STEPS, **fields
):
  """Row `row` feeds ids behind `past` and samples; pages are the slot's."""
  count, size = chunks
  columns = plan.integers
  columns[row, : decode_step.BUDGET + 1] = (slot, past, len(ids), budget)
  columns[:, decode_step.STEPS] = steps
  columns[row, decode_step.FOLLOW] = fields.get("follow", False)
  columns[row, decode_step.BIAS] = fields.get("bias", 0)
  stops = fields.get("stops", ())
  plan.stop_ids[row, : len(stops)] = stops
  plan.tables[row] = (2 * slot, 2 * slot + 1)
  plan.floats[row, 0] = 0
  start = row * size if row < count else count * (size - 1) + row
  plan.ids[start : start + len(ids)] = ids


def written(cache):
  """Which positions of which pages are no longer sevens, in every layer."""
  changed = [
    np.any(np.asarray(pages) != 7, (0, 3))
    for x in cache
    for pages in np.moveaxis(x, 1, 0)
  ]
  for other in changed[1:]:
    np.testing.assert_array_equal(other, changed[0])
  return [np.flatnonzero(page).tolist() for page in changed[0]]


def told(sampled, row):
  return sampled.tokens[row, : int(sampled.counts[row])].tolist()


def test_rows_sample_up_to_their_budget_and_idle_rows_write_nothing(
  advance, fresh, greedy
):
  plan = empty()
  set_row(plan, 0, 2, 0, PROMPTS[0], 3)
  set_row(plan, 1, 0, 0, PROMPTS[1], 0)
  set_row(plan, 2, 3, 0, PROMPTS[2], 3)
  (cache, carry), sampled = advance(fresh, plan)
  assert sampled.counts.tolist() == [3, 0, 3, 0]
  assert told(sampled, 0) == greedy(PROMPTS[0], 3)
  assert told(sampled, 2) == greedy(PROMPTS[2], 3)
  # The last sampled token is never written: 5 + 2 of slot 2, and 1 + 2 of
  # slot 3. Slot 0 has its context, and slot 1 is nobody's.
  every = [0, 1, 2, 3]
  assert written(cache) == [[0, 1], [], [], [], every, every[:3], every[:3], []]
  assert carry.length.tolist() == [2, 0, 7, 3]
  assert carry.alive.tolist() == [False, False, True, True]
  assert int(carry.last[2]) == told(sampled, 0)[-1]


@pytest.mark.parametrize("follow", [False, True])
def test_a_row_goes_on_from_the_host_or_from_where_the_device_stands(
  advance, fresh, greedy, follow
):
  plan = empty()
  for row, (slot, budget) in enumerate(((2, 3), (0, 1), (3, 2))):
    set_row(plan, row, slot, 0, PROMPTS[row], budget)
  state, first = advance(fresh, plan)
  # In another order of rows, and without chunks.
  plan = empty((0, 1))
  for row, (slot, at) in enumerate(((3, 2), (2, 0), (0, 1))):
    last, past = told(first, at)[-1], len(PROMPTS[at]) + int(first.counts[at])
    if follow:
      # Of what the host says only the bounds are right.
      last, past = 23, past + 2
    set_row(plan, row, slot, past - 1, [last], 2, chunks=(0, 1), follow=follow)
  _, second = advance(state, plan, (0, 1))
  for row, at in enumerate((2, 0, 1)):
    tokens = told(first, at) + told(second, row)
    assert tokens == greedy(PROMPTS[at], len(tokens))
    assert len(told(second, row)) == 2


def test_context_is_fed_in_chunks_of_several_dispatches(advance, fresh, greedy):
  state, tokens = fresh, []
  for start, stop, budget in ((0, 2, 0), (2, 4, 0), (4, 5, 3)):
    plan = empty()
    set_row(plan, 1, 2, start, PROMPTS[0][start:stop], budget)
    state, sampled = advance(state, plan)
    tokens += told(sampled, 1)
  assert tokens == greedy(PROMPTS[0], 3)


def test_a_stop_id_ends_its_row_and_no_other(advance, fresh, greedy):
  answers = [greedy(ids, 3) for ids in PROMPTS]
  stop = answers[0][1]
  expected = [
    tokens.index(stop) + 1 if stop in tokens else 3 for tokens in answers
  ]
  assert min(expected) < max(expected)
  plan = empty()
  for row, ids in enumerate(PROMPTS):
    set_row(plan, row, row, 0, ids, 3, stops=(23, stop))
  (cache, carry), sampled = advance(fresh, plan)
  assert sampled.counts[:3].tolist() == expected
  assert carry.alive[:3].tolist() == [count == 3 for count in expected]
  # One that follows a row that has stopped does nothing at all.
  before = written(cache)
  plan = empty((0, 1))
  row = expected.index(min(expected))
  set_row(plan, 0, row, 5, [1], 3, chunks=(0, 1), follow=True)
  (cache, after), sampled = advance((cache, carry), plan, (0, 1))
  assert not sampled.counts.any()
  assert written(cache) == before
  np.testing.assert_array_equal(after.length, carry.length)
  np.testing.assert_array_equal(after.alive, carry.alive)


def test_a_dispatch_ends_early_when_half_of_its_rows_have(
  advance, fresh, greedy
):
  # Two of four have one token to sample: the others stop with them.
  prompts = (*PROMPTS, [9])
  plan = empty()
  for row, ids in enumerate(prompts):
    set_row(plan, row, row, 0, ids, 1 if row < 2 else 3)
  state, first = advance(fresh, plan)
  assert first.counts.tolist() == [1, 1, 1, 1]
  # Behind them goes on who follows; of three only one ends now.
  plan = empty((0, 1))
  for row in range(1, 4):
    most = 1 if row == 1 else 3
    set_row(plan, row, row, 5, [0], most, chunks=(0, 1), follow=True)
  _, second = advance(state, plan, (0, 1))
  assert second.counts.tolist() == [0, 1, 3, 3]
  for row in range(1, 4):
    tokens = told(first, row) + told(second, row)
    assert tokens == greedy(prompts[row], len(tokens))


def test_the_host_may_ask_for_fewer_steps_than_are_compiled(
  advance, fresh, greedy
):
  plan = empty()
  set_row(plan, 0, 0, 0, PROMPTS[0], 3, steps=2)
  _, sampled = advance(fresh, plan)
  assert told(sampled, 0) == greedy(PROMPTS[0], 2)


@pytest.mark.parametrize("chunks", [(0, 1), CHUNKS])
def test_an_empty_plan_does_nothing(advance, fresh, chunks):
  (cache, carry), sampled = advance(fresh, empty(chunks), chunks)
  assert written(cache) == [[]] * PAGES
  assert not sampled.counts.any()
  assert np.isfinite(sampled.logprobs).all()
  assert not np.any(carry.length)


def test_a_bias_forbids_at_every_step(advance, fresh, plain):
  allowed = [3, 11]
  biases = np.zeros((2, 24), np.float32)
  biases[1] = -np.inf
  biases[1, allowed] = 0
  plan = empty()
  set_row(plan, 0, 0, 0, PROMPTS[0], 3, bias=1)
  set_row(plan, 1, 1, 0, PROMPTS[1], 3)
  _, sampled = advance(fresh, plan, biases=biases)
  ids = [*PROMPTS[0]]
  for token, logprob in zip(told(sampled, 0), sampled.logprobs[0], strict=True):
    logits = plain(ids)[-1]
    assert token == allowed[int(logits[jnp.array(allowed)].argmax())]
    # That of the plain distribution: 2e-6 is typical.
    assert abs(float(jax.nn.log_softmax(logits)[token]) - logprob) < 1e-4
    ids.append(token)
  assert set(told(sampled, 1)) - set(allowed)


def test_the_experts_of_all_that_was_fed_are_told(config, params, one_device):
  advance = program(
    params, CHUNKS, config=config, layout=one_device, record_experts=True
  )
  biases = np.zeros((2, 24), np.float32)
  plan = empty()
  set_row(plan, 0, 2, 0, PROMPTS[0], 3)
  set_row(plan, 3, 0, 0, PROMPTS[2], 3)
  *state, sampled = advance(*unused(config), biases, plan)
  # Two chunks of 7, and one id of each other row.
  assert sampled.fed.shape == (16, config.num_layers, 2)
  assert sampled.stepped.shape == (SLOTS, STEPS - 1, config.num_layers, 2)
  assert sampled.fed.dtype == sampled.stepped.dtype == config.expert_dtype
  # Padding has none.
  assert (sampled.fed[5:15] == -1).all()
  # Sampled or fed as context, an id takes the same experts.
  plan = empty()
  ids = [*PROMPTS[0], *told(sampled, 0)[:2]]
  set_row(plan, 1, 1, 0, ids, 0)
  *_, again = advance(*state, biases, plan)
  both = np.concatenate([sampled.fed[:5], sampled.stepped[0]])
  np.testing.assert_array_equal(again.fed[7:14], both)
  assert ((both >= 0) & (both < config.num_experts)).all()
