"""Recorded experts: those that sampled the tokens, whatever comes later."""

import asyncio
import dataclasses

import numpy as np
import pytest

from tests.helpers import tiny_engine

pytestmark = pytest.mark.compiled

LONG = 30


@pytest.fixture(scope="module")
def served():
  with tiny_engine.serve(
    config=dataclasses.replace(tiny_engine.CONFIG, max_length=48),
    row_buckets=(4,),
    chunk_buckets=(6,),
    record_experts=True,
    compile_ahead=False,
  ) as engine:
    yield engine
    engine.check()


async def chosen(served, ids):
  """Returns the experts of all ids but the last, under the served weights."""
  await served.engine.flush_cache()
  done = await served.answer(ids, 1, experts=True)
  # An order of the experts of an id means nothing.
  return np.sort(done.experts[: len(ids) - 1], -1)


async def test_new_weights_change_no_experts_of_tokens_sampled_before(served):
  prompt = [1, 2, 3, 4, 5]

  await served.engine.flush_cache()
  request, answer = served.begin(prompt, LONG, experts=True)
  await served.first_token(request)
  await served.publish("recompute")
  done = await answer
  ids, old = [*prompt, *done.tokens.tolist()], served.version - 1
  # The last of them, and all before, were fed to sample the others.
  fed = len(prompt) + done.versions.tolist().count(old) - 1
  assert len(prompt) <= fed < len(ids) - 1
  new = await chosen(served, ids)
  recorded = np.sort(done.experts, -1)
  assert (recorded[fed:-1] == new[fed:]).all()
  assert (recorded[-1] == -1).all()
  await served.publish("recompute")
  # Five versions have weights of their own, and then they come again.
  while (served.version - old) % 5:
    await served.publish("recompute")
  assert (recorded[:fed] == (await chosen(served, ids))[:fed]).all()
  assert (recorded[:fed] != new[:fed]).any()


async def test_before_its_first_token_a_request_records_the_newest_experts(
  served,
):
  # It is fed in chunks of 6 ids, and weights come between two of them.
  prompt = list(range(19))

  await served.engine.flush_cache()
  begun = served.engine.stats().prefilled_tokens
  _, answer = served.begin(prompt, 4, experts=True)
  async with served.held(1):
    publishing = asyncio.create_task(served.publish("recompute"))
    await asyncio.sleep(0)
  await publishing
  assert served.engine.stats().prefilled_tokens - begun in (6, 12)
  done = await answer
  assert set(done.versions.tolist()) == {served.version}
  ids = [*prompt, *done.tokens.tolist()]
  expected = await chosen(served, ids)
  assert (np.sort(done.experts[:-1], -1) == expected).all()


async def test_context_from_the_cache_has_the_experts_that_encoded_it(served):
  await served.engine.flush_cache()
  ids = [7, 8, 9, 10, 11, 12]
  first = await served.answer(ids, 6)
  ids += [*first.tokens.tolist(), 3]
  later = await served.answer(ids, 1, experts=True)
  assert later.cached_tokens == len(ids) - 2
  expected = await chosen(served, ids)
  assert (np.sort(later.experts[: len(ids) - 1], -1) == expected).all()


async def test_a_request_that_never_ran_has_no_experts(served):
  await served.engine.pause()
  request, answer = served.begin([1, 2, 3], 4, experts=True)
  await asyncio.sleep(0)
  served.engine.abort(request.request_id)
  done = await answer
  served.engine.resume()
  assert len(done.experts) == 3
  assert (done.experts == -1).all()
