"""What every engine must do with new weights, whichever it is."""

import asyncio

import numpy as np
import pytest

from rl.data import trajectory
from rl.runtime import checksum
from tests.helpers import engines_under_test
from tests.helpers.engines_under_test import CLOSE, LONG, check_shape


@pytest.fixture(scope="module", params=engines_under_test.parameters())
def served(request):
  with engines_under_test.serve(request.param) as served:
    yield served


async def _updated(served, in_flight, prompt=(1, 2, 3), count=LONG):
  """Publishes in the middle of an answer."""
  _, task = served.begin(list(prompt), count)
  await served.begun(5)
  await served.engine.pause()  # Lest the answer ends before the update.
  old = served.version
  new = await served.publish(in_flight)
  served.engine.resume()
  return await task, old, new


def test_recomputed_answers_go_on_under_the_new_weights(served):
  done, old, new = served.run(_updated(served, "recompute"))
  check_shape(done, LONG)
  cut = int((done.versions == old).sum())
  assert done.versions.tolist() == [old] * cut + [new] * (LONG - cut)
  assert 0 < cut < LONG
  tokens = done.tokens.tolist()
  assert tokens[:cut] == served.greedy([1, 2, 3], cut, old)
  assert tokens[cut:] == served.greedy(
    [1, 2, 3, *tokens[:cut]], LONG - cut, new
  )
  expected = served.logprobs([1, 2, 3, *tokens[:cut]], tokens[cut:], 0.0)
  np.testing.assert_allclose(done.logprobs[cut:], expected, atol=CLOSE)
  assert done.oldest_kv in (new, -1)


def test_weights_may_come_while_others_are_decoded(served):
  starts = [[i, 2 * i, 5] for i in range(6)]

  async def scenario():
    tasks = [served.begin(prompt, LONG)[1] for prompt in starts]
    for _ in range(3):
      await served.begun(8)
      await served.publish("recompute")
    return await asyncio.gather(*tasks)

  versions = set()
  for prompt, done in zip(starts, served.run(scenario()), strict=True):
    check_shape(done, LONG)
    tokens = done.tokens.tolist()
    for version, start, end in done.spans:
      so_far = [*prompt, *tokens[:start]]
      expected = served.greedy(so_far, end - start, version)
      assert tokens[start:end] == expected
      versions.add(version)
  assert len(versions) > 1


def test_drained_answers_are_of_one_version(served):
  done, old, new = served.run(_updated(served, "drain"))
  assert set(done.versions.tolist()) == {old}
  assert done.tokens.tolist() == served.greedy([1, 2, 3], LONG, old)
  after = served.run(served.answer([1, 2, 3], 9))
  assert set(after.versions.tolist()) == {new}
  assert after.tokens.tolist() == served.greedy([1, 2, 3], 9)
  assert after.cached_tokens == 0
  assert after.oldest_kv == new


def test_aborted_answers_end_with_what_they_have(served):
  done, old, _ = served.run(_updated(served, "abort"))
  assert done.stop == "abort"
  assert 0 < len(done.tokens) < LONG
  assert set(done.versions.tolist()) == {old}
  expected = served.greedy([1, 2, 3], len(done.tokens), old)
  assert done.tokens.tolist() == expected


def test_kept_keys_and_values_show_in_versions(served):
  done, old, new = served.run(_updated(served, "keep_kv"))
  check_shape(done, LONG)
  cut = int((done.versions == old).sum())
  assert 0 < cut < LONG
  assert done.versions.tolist() == [old] * cut + [new] * (LONG - cut)
  assert done.oldest_kv in (old, -1)
  tokens = done.tokens.tolist()
  assert tokens[:cut] == served.greedy([1, 2, 3], cut, old)
  # What was kept matters: these are not the log-probabilities of either.
  expected = served.logprobs([1, 2, 3, *tokens[:cut]], tokens[cut:], 0.0)
  assert abs(done.logprobs[cut:] - expected).max() > 10 * CLOSE
  # A prefix may be from before, but not in secret.
  after = served.run(served.answer([1, 2, 3], 9))
  if after.oldest_kv == new:
    assert after.tokens.tolist() == served.greedy([1, 2, 3], 9)
  else:
    assert after.cached_tokens > 0
  served.run(served.engine.flush_cache())


def test_wrong_weights_are_refused_and_the_old_ones_serve(served):
  version = trajectory.PolicyVersion(served.version + 1)
  good = served.placed(version)
  missing = {name: leaf for name, leaf in good.items() if name != "embed"}
  misshaped = good | {"final_norm": good["final_norm"][:-1]}
  cases = [
    (trajectory.PolicyVersion(served.version), good, "recompute", "version"),
    (version, missing, "recompute", "embed"),
    (version, misshaped, "drain", "final_norm"),
    (version, good, "never", "in_flight"),
  ]
  for new, params, in_flight, words in cases:
    with pytest.raises(ValueError, match=words):
      served.run(served.engine.update_weights(new, params, in_flight))
  assert served.version == version - 1
  done = served.run(served.answer([1, 2], 6))
  assert done.tokens.tolist() == served.greedy([1, 2], 6)


def test_a_cancelled_update_leaves_the_old_weights(served):
  async def scenario():
    _, running = served.begin([1, 2, 3], LONG)
    await served.begun(3)
    update = asyncio.create_task(served.publish("drain"))
    await served.begun(3)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
      await update
    return await running, await served.answer([3], 4)

  version = served.version
  done, after = served.run(scenario())
  assert served.version == version
  assert done.tokens.tolist() == served.greedy([1, 2, 3], LONG)
  assert after.tokens.tolist() == served.greedy([3], 4)


def test_the_checksum_is_that_of_the_weights(served):
  version, number = served.run(served.engine.checksum())
  assert (version, number) == (
    served.version,
    checksum.of(engines_under_test.weights(version % 5)),
  )


@pytest.mark.parametrize(
  "in_flight", ["drain", "abort", "recompute", "keep_kv"]
)
def test_a_paused_engine_takes_weights_and_stays_paused(served, in_flight):
  async def scenario():
    _, task = served.begin([2, 3, 4], LONG)
    await served.begun(5)
    await served.engine.pause()
    _, late = served.begin([5], 5)
    new = await served.publish(in_flight)
    before = served.engine.stats().sampled_tokens
    await asyncio.sleep(0.1)
    held = served.engine.stats().sampled_tokens - before
    waits = not late.done()
    served.engine.resume()
    ended = await task, await late, new, held, waits
    await served.engine.flush_cache()
    return ended

  done, late, new, held, waits = served.run(scenario())
  assert held == 0
  assert waits
  assert done.stop == ("abort" if in_flight == "abort" else "length")
  check_shape(done, len(done.tokens))
  assert set(late.versions.tolist()) == {new}
  assert late.tokens.tolist() == served.greedy([5], 5)


def test_a_pause_holds_everything_until_the_resume(served):
  async def scenario():
    _, task = served.begin([6, 7], LONG)
    await served.begun(5)
    await served.engine.pause()
    before = served.engine.stats().sampled_tokens
    _, late = served.begin([8], 5)
    await asyncio.sleep(0.1)
    held = served.engine.stats().sampled_tokens - before
    served.engine.resume()
    return held, await task, await late

  held, done, late = served.run(scenario())
  assert held == 0
  assert done.tokens.tolist() == served.greedy([6, 7], LONG)
  assert late.tokens.tolist() == served.greedy([8], 5)
