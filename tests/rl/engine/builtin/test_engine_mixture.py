"""Everything at once: requests of all kinds, their ends, and new weights."""

import asyncio

import numpy as np
import pytest

SIZES = {
  "few pages": {"slots": 6, "pages": 10, "row_buckets": (6,)},
  "pages of one id": {
    "slots": 3,
    "pages": 33,
    "page_size": 1,
    "chunk_buckets": (5,),
    "prefill_tokens": 5,
    "steps_per_dispatch": 1,
  },
  "several lengths": {
    "slots": 8,
    "pages": 14,
    "page_size": 3,
    "row_buckets": (8,),
    "chunk_buckets": (2,),
    "length_buckets": (12,),
    "steps_per_dispatch": 5,
  },
}
BIASES = [
  np.where(np.arange(24) % step == 0, -np.inf, 0).astype(np.float32)
  for step in (3, 4, 5)
]
CLIENTS, TURNS = 10, 10


def check(served, request, done):
  """What is true of every answer, however it came about."""
  tokens, versions = done.tokens.tolist(), done.versions.tolist()
  assert len(tokens) == len(versions) == len(done.logprobs)
  assert versions == sorted(versions)
  assert np.isfinite(done.logprobs).all()
  assert not set(tokens[:-1]) & set(request.stop_ids)
  if done.stop == "length":
    assert len(tokens) == request.max_tokens
  if done.stop == "stop":
    assert tokens[-1] in request.stop_ids
  if request.bias is not None:
    assert np.isfinite(request.bias[tokens]).all()
  if not tokens:
    return
  assert done.oldest_kv <= versions[-1]
  if done.oldest_kv < versions[-1] or request.bias is not None:
    return
  if request.temperature == 0:
    # The last version went on behind what those before had said.
    kept = versions.index(versions[-1])
    ids = [*request.tokens.tolist(), *tokens[:kept]]
    assert served.is_greedy(ids, tokens[kept:], version=versions[-1])


async def ask(served, request, fate, rng):
  """The answer, or None if nobody waited for it to the end."""
  if fate == "close":
    stream = served.engine.stream(request)
    deltas = int(rng.integers(1, 4))
    async for _ in stream:
      deltas -= 1
      if not deltas:
        break
    await stream.aclose()
    return None
  answer = asyncio.create_task(served.engine.generate(request))
  if fate != "whole":
    await asyncio.sleep(rng.choice([0, 0.001, 0.005]))
  if fate == "cancel":
    answer.cancel()
  elif fate == "abort" and not answer.done():
    served.engine.abort(request.request_id)
  await asyncio.wait([answer])
  return None if answer.cancelled() else answer.result()


async def client(served, seed):
  """Sessions of several turns, half of which begin alike."""
  rng, ids, answers = np.random.default_rng(seed), [], 0
  for _ in range(TURNS):
    if not 0 < len(ids) < 29:
      count = int(rng.integers(1, 12))
      alike = rng.random() < 0.5
      ids = [*range(count)] if alike else rng.integers(24, size=count).tolist()
    request = served.request(
      ids,
      int(rng.integers(1, 33 - len(ids))),
      temperature=float(rng.random() < 0.4),
      seed=int(rng.integers(1000)),
      bias=[None, None, None, *BIASES][rng.integers(6)],
      stop_ids=tuple(rng.integers(24, size=rng.integers(0, 3)).tolist()),
      priority=(int(rng.integers(2)),),
    )
    fate = rng.choice(["whole"] * 4 + ["abort", "cancel", "close"])
    done = await ask(served, request, fate, rng)
    if done is not None:
      check(served, request, done)
      answers += 1
      ids = [*ids, *done.tokens.tolist(), *rng.integers(24, size=2).tolist()]
  return answers


async def operate(served, finished):
  """New weights in all ways, some of them cancelled, and pauses."""
  rng, modes = np.random.default_rng(7), ["recompute", "keep_kv", "drain"]
  while not finished.is_set():
    await asyncio.sleep(rng.choice([0.002, 0.02]))
    mode, what = str(rng.choice([*modes, "abort"])), rng.random()
    if what < 0.6:
      publishing = asyncio.create_task(served.publish(mode))
      if rng.random() < 0.2:
        await asyncio.sleep(0.001)
        publishing.cancel()
      await asyncio.wait([publishing])
      assert publishing.cancelled() or publishing.exception() is None
    elif what < 0.8:
      await served.engine.pause()
      if rng.random() < 0.5:
        await served.publish(mode)
      served.engine.resume()
    elif what < 0.95:
      await served.engine.flush_cache()
    else:
      served.engine.abort(None)
    served.check()


@pytest.mark.parametrize("size", SIZES)
def test_every_answer_is_right_whatever_else_happens(serving, size):
  async def load():
    finished = asyncio.Event()
    operating = asyncio.create_task(operate(served, finished))
    answers = await asyncio.gather(
      *(client(served, seed) for seed in range(CLIENTS))
    )
    finished.set()
    await operating
    return sum(answers)

  with serving(**SIZES[size]) as served:
    before = served.engine.stats()
    assert served.run(load()) > CLIENTS * TURNS // 2
    stats = served.engine.stats()
    served.check()
  assert stats.version > before.version + 5
  assert stats.preemptions > 0
  assert stats.compilations == before.compilations
