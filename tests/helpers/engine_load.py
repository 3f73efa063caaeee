"""Clients and an operator that put an engine under load of all kinds."""

import asyncio
import contextlib

import numpy as np

BIASES = [
  np.where(np.arange(24) % step == 0, -np.inf, 0).astype(np.float32)
  for step in (3, 4, 5)
]


def check(served, request, done):
  """Asserts all that holds for every answer."""
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
    # The last version went on behind the tokens of those before. Where it kept
    # their keys and values `oldest_kv` speaks of the last token alone: those
    # before it may be older than a preemption that encoded all of it again.
    last = versions[-1]
    kept = len(tokens) - 1 if last in served.kept_kv else versions.index(last)
    ids = [*request.tokens.tolist(), *tokens[:kept]]
    assert served.is_greedy(ids, tokens[kept:], version=last)


async def ask(served, request, fate, rng):
  """Returns the answer, or None if it was not awaited to its end."""
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
    with contextlib.suppress(ValueError):  # It may have ended just now.
      served.engine.abort(request.request_id)
  await asyncio.wait([answer])
  return None if answer.cancelled() else answer.result()


async def client(served, seed, turns):
  """Plays sessions of several turns, half of which have a common prefix."""
  rng, ids, answers = np.random.default_rng(seed), [], 0
  for _ in range(turns):
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
  """Publishes in all ways, at times cancelled, pauses and flushes."""
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
