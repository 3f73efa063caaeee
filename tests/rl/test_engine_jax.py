"""Against the plain model: an uncached forward pass for every token."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import config as config_lib
from models import sharding, transformer
from rl import (
  batch,
  dispatch,
  engine,
  engine_jax,
  learner,
  placement,
  trace,
  trajectory,
)

CONFIG = config_lib.tiny_moe(
  vocab_size=24,
  num_layers=2,
  d_model=32,
  head_dim=8,
  d_ff=32,
  max_length=32,
  moe_block=4,
)
SETTINGS = engine_jax.EngineSettings(
  slots=4,
  row_buckets=(2,),
  chunk_buckets=(2, 6),
  steps_per_dispatch=3,
  linger_s=0.004,
)
TINY = dataclasses.replace(
  SETTINGS, slots=1, row_buckets=(1,), chunk_buckets=(4,)
)


@functools.cache
def weights(seed):
  """Large and without structure, so that answers vary."""
  leaves, tree = jax.tree.flatten(transformer.init(jax.random.key(0), CONFIG))
  rng = np.random.default_rng(seed)
  noisy = [
    leaf + rng.normal(scale=0.4, size=leaf.shape).astype(np.float32)
    for leaf in leaves
  ]
  return jax.tree.unflatten(tree, noisy)


@jax.jit
def _forward(params, tokens):
  positions = jnp.arange(CONFIG.max_length)[None]
  logits, _ = transformer.apply(
    params, CONFIG, tokens, positions, jnp.ones_like(tokens)
  )
  return logits[0]


def greedy(params, prompt, count):
  """The most probable continuation, one whole forward pass a token."""
  ids = np.zeros((1, CONFIG.max_length), np.int32)
  ids[0, : len(prompt)] = prompt
  for at in range(len(prompt), len(prompt) + count):
    ids[0, at] = _forward(params, ids)[at - 1].argmax()
  return ids[0, len(prompt) : len(prompt) + count].tolist()


@dataclasses.dataclass
class Served:
  """A running engine and the event loop on which it lives."""

  runner: asyncio.Runner
  engine: engine_jax.JaxEngine
  shardings: transformer.Params
  names: int = 0

  @property
  def params(self):
    return weights(self.engine.stats().version % 5)

  def run(self, coroutine):
    async def guarded():
      async with asyncio.timeout(60):
        return await coroutine

    return self.runner.run(guarded())

  def name(self):
    self.names += 1
    return f"s{self.names}"

  async def publish(self, mode: engine.OnPublish):
    version = trajectory.PolicyVersion(self.engine.stats().version + 1)
    await self.engine.pause(mode)
    await self.engine.update_weights(version, self.placed(version))
    self.engine.resume()

  def placed(self, version):
    return jax.device_put(weights(version % 5), self.shardings)

  def request(self, prompt, max_tokens=6, **kwargs):
    session = kwargs.pop("session", None) or self.name()
    request_id = kwargs.pop("request_id", None) or self.name()
    return engine.DecodeRequest(
      request_id=request_id,
      session=session,
      tokens=np.asarray(prompt, np.int32),
      max_tokens=max_tokens,
      **{"temperature": 0.0, **kwargs},
    )

  async def answer(self, *args, **kwargs):
    return await self.engine.generate(self.request(*args, **kwargs))

  def begin(self, *args, **kwargs):
    """Returns a request and the task that waits for its answer."""
    request = self.request(*args, **kwargs)
    return request, asyncio.create_task(self.engine.generate(request))

  async def begun(self, count):
    """Returns when `count` more tokens have been sampled."""
    goal = self.engine.stats().sampled_tokens + count
    while self.engine.stats().sampled_tokens < goal:
      await asyncio.sleep(0)


class Mesh:
  """Builds engines on one mesh; used by fixtures and by tests that break."""

  def __init__(self, settings, data=1, expert=1):
    spec = placement.MeshSpec(data=data, expert=expert)
    self.mesh, _ = placement.Placement(learner=spec, colocated=True).meshes()
    self.settings = settings

  def __enter__(self):
    self.thread = dispatch.MeshThread("decode", trace.Trace(None))
    self.runner = asyncio.Runner().__enter__()
    where = sharding.param_shardings(CONFIG, self.mesh)
    served = Served(
      self.runner,
      engine_jax.JaxEngine(CONFIG, self.settings, self.mesh, self.thread),
      where,
    )
    version = trajectory.PolicyVersion(0)
    served.run(served.engine.start(served.placed(version), version))
    self.served = served
    return served

  def __exit__(self, *exc):
    self.served.run(self.served.engine.close())
    self.runner.__exit__(*exc)
    self.thread.close()


@pytest.fixture(scope="module")
def served():
  with Mesh(SETTINGS) as served:
    yield served


@pytest.fixture
def breakable():
  with Mesh(TINY) as served:
    yield served


def prompt(rng, low=1, high=20):
  return rng.integers(CONFIG.vocab_size, size=rng.integers(low, high)).tolist()


async def episode(served, seed, check, turns=3):
  """Some turns of one session that may be aborted, cancelled or released."""
  rng = np.random.default_rng(seed)
  session, ids = served.name(), prompt(rng, 1, 12)
  for _ in range(turns):
    await asyncio.sleep(rng.choice([0, 0, 0.01]))
    count = int(rng.integers(1, 6))
    request, answer = served.begin(ids, count, session=session)
    fate = rng.choice(["whole", "whole", "whole", "abort", "cancel", "release"])
    await asyncio.sleep(0 if fate == "whole" else rng.choice([0, 0.004, 0.01]))
    if fate == "abort":
      served.engine.abort(request.request_id)
    elif fate == "cancel":
      answer.cancel()
      served.engine.release(session)
      session = served.name()
    elif fate == "release":
      served.engine.release(session)
    done = (await asyncio.gather(answer, return_exceptions=True))[0]
    if isinstance(done, asyncio.CancelledError):
      continue
    check(fate, request, done)
    ids = [*ids, *done.tokens, *prompt(rng, 1, 5)]
    if len(ids) > CONFIG.max_length - 5:
      break
  served.engine.release(session)


def test_greedy_answers_are_those_of_the_plain_model_under_any_load(served):
  compilations = served.engine.stats().compilations
  seen = {"whole": 0, "cached": 0, "stopped": 0}

  def check(fate, request, done):
    expected = greedy(served.params, request.tokens, request.max_tokens)
    assert done.tokens.tolist() == expected[: len(done.tokens)]
    assert len(done.logprobs) == len(done.versions) == len(done.tokens)
    if done.stop != "abort":
      assert len(done.tokens) == request.max_tokens
    else:
      assert fate in ("abort", "release")
    seen["whole"] += fate == "whole"
    seen["cached"] += done.cached_tokens > 0
    seen["stopped"] += len(done.tokens) < request.max_tokens

  async def load():
    # 12 sessions on 4 rows take each other's rows; 4 sessions keep theirs.
    for seeds in (range(12), range(12, 16), range(16, 20)):
      await asyncio.gather(*(episode(served, seed, check) for seed in seeds))

  served.run(load())
  # 46 requests are made; each kind of fate must have been met.
  print("SEEN", seen)
  assert seen["whole"] > 15
  assert seen["cached"] > 5
  assert seen["stopped"] > 2
  stats = served.engine.stats()
  assert (stats.running, stats.waiting) == (0, 0)
  # 2 numbers of rows and 2 chunk sizes, compiled by `start`.
  assert stats.compilations == compilations == 4


def test_a_later_turn_feeds_only_what_is_new(served):
  async def turns():
    session, ids = served.name(), [1, 2, 3, 4, 5]
    first = await served.answer(ids, 3, session=session)
    ids += [*first.tokens.tolist(), 7, 8]
    before = served.engine.stats().prefilled_tokens
    second = await served.answer(ids, 3, session=session)
    # 5 of the prompt and 2 of the 3 sampled: the last was never fed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 7)
    # That one and the context [7, 8].
    assert served.engine.stats().prefilled_tokens - before == 3
    assert second.tokens.tolist() == greedy(served.params, ids, 3)

  served.run(turns())


def test_a_session_that_changes_its_past_is_encoded_from_there(served):
  async def turns():
    session = served.name()
    await served.answer([1, 2, 3, 4, 5], 3, session=session)
    changed = await served.answer([1, 2, 9, 4, 5, 6], 3, session=session)
    shorter = await served.answer([1, 2, 9], 3, session=session)
    assert (changed.cached_tokens, shorter.cached_tokens) == (2, 2)
    assert changed.tokens.tolist() == greedy(
      served.params, [1, 2, 9, 4, 5, 6], 3
    )
    assert shorter.tokens.tolist() == greedy(served.params, [1, 2, 9], 3)

  served.run(turns())


def test_more_sessions_than_slots_are_all_served_by_priority(served):
  async def load():
    order = []

    async def one(priority):
      await served.answer([1, 2], 6, priority=(priority,))
      order.append(priority)

    await asyncio.gather(*(one(p) for p in reversed(range(12))))
    return order

  order = served.run(load())
  # Four rows at a time: each later wave has higher numbers.
  waves = [sorted(order[i : i + 4]) for i in range(0, 12, 4)]
  assert waves == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_logprobs_and_versions_are_the_learners(served):
  rng = np.random.default_rng(0)

  async def sample(seed):
    ids = prompt(rng, 1, 16)
    answer = await served.answer(ids, 8, temperature=0.7, seed=seed)
    return trajectory.Turn(
      context=np.asarray(ids, np.int32),
      tokens=answer.tokens,
      logprobs=answer.logprobs,
      versions=answer.versions,
      stop=answer.stop,
    )

  async def load():
    return await asyncio.gather(*(sample(seed) for seed in range(8)))

  records = [
    trajectory.Trajectory(
      task_id="",
      group_id=0,
      index=i,
      turns=[turn],
      status=trajectory.Status.COMPLETED,
    )
    for i, turn in enumerate(served.run(load()))
  ]
  (packed,) = batch.pack(records, [0.0] * 8, rows=8, length=24)
  mesh, _ = placement.Placement(colocated=True).meshes()
  scored, _, _ = jax.jit(
    functools.partial(
      learner.token_logprobs, config=CONFIG, mesh=mesh, temperature=0.7
    )
  )(served.params, packed)
  gap = np.abs(np.asarray(scored) - packed.behaviour)[packed.sampled]
  assert len(gap) == 64
  # Measured: XX
  print("GAP", gap.max())
  assert gap.max() < 1e-4
  versions = packed.versions[packed.sampled]
  assert (versions == served.engine.stats().version).all()


def test_noise_follows_from_the_seed_and_not_from_the_batch(served):
  async def sample(seed):
    return await served.answer([1, 2, 3], 12, temperature=1.0, seed=seed)

  async def crowd():
    return await asyncio.gather(*(sample(seed) for seed in (5, 6, 7, 5, 8)))

  alone = served.run(sample(5)).tokens.tolist()
  tokens = [answer.tokens.tolist() for answer in served.run(crowd())]
  assert tokens[0] == tokens[3] == alone
  assert len({tuple(t) for t in tokens}) == 4


def test_sampling_ends_behind_a_stop_id_and_at_the_limit(served):
  async def scenario():
    ask = functools.partial(served.answer, [1, 2, 3], temperature=3.0, seed=3)
    tokens = (await ask(12)).tokens.tolist()
    # The last place where an id occurs for the first time.
    last = max(tokens.index(id_) for id_ in tokens)
    assert last > 3
    for room, stop in ((12, "stop"), (last + 1, "stop"), (last, "length")):
      answer = await ask(room, stop_ids=(tokens[last],))
      assert answer.stop == stop
      assert answer.tokens.tolist() == tokens[: min(room, last + 1)]
    one = await ask(1)
    assert (one.stop, one.tokens.tolist()) == ("length", tokens[:1])
    again = await ask(1, stop_ids=(tokens[0],))
    assert (again.stop, again.tokens.tolist()) == ("stop", tokens[:1])

  served.run(scenario())


def test_a_conversation_may_fill_the_whole_length(served):
  async def scenario():
    ids = prompt(np.random.default_rng(1), 20, 21)
    answer = await served.answer(ids, 12)
    assert answer.tokens.tolist() == greedy(served.params, ids, 12)

  served.run(scenario())


def test_abort_ends_running_and_waiting_requests_and_no_other(served):
  async def scenario():
    begun = [served.begin([i + 1], 20) for i in range(6)]
    await served.begun(4)
    for i in (1, 5):  # A running one, and one that waits for a row.
      served.engine.abort(begun[i][0].request_id)
    served.engine.abort("unknown")
    answers = await asyncio.gather(*(task for _, task in begun))
    served.engine.abort(begun[0][0].request_id)
    for (request, _), answer in zip(begun, answers, strict=True):
      expected = greedy(served.params, request.tokens, 20)
      assert answer.tokens.tolist() == expected[: len(answer.tokens)]
    assert [a.stop for a in answers] == [
      *("length", "abort", "length", "length", "length", "abort")
    ]
    assert 0 < len(answers[1].tokens) < 20
    assert len(answers[5].tokens) == 0
    assert {len(answers[i].tokens) for i in (0, 2, 3, 4)} == {20}

  served.run(scenario())


def test_abort_of_all_that_runs_before_a_dispatch_is_no_failure(served):
  async def scenario():
    # A session that idles lets the engine linger before it dispatches.
    await served.answer([9], 1)
    request, task = served.begin([3], 20)
    await served.begun(1)
    served.engine.abort(request.request_id)
    await asyncio.sleep(0.02)
    assert (await task).stop == "abort"
    assert (await served.answer([3], 2)).stop == "length"

  served.run(scenario())


def test_abort_while_paused_answers_at_once(served):
  async def scenario():
    request, task = served.begin([3], 20)
    await served.begun(1)
    await served.engine.pause("recompute")
    served.engine.abort(request.request_id)
    answer = await task
    served.engine.resume()
    assert answer.stop == "abort"
    assert 0 < len(answer.tokens) < 20

  served.run(scenario())


@pytest.mark.parametrize("position", ["running", "waiting"])
def test_a_cancelled_request_gives_back_its_name_and_its_row(served, position):
  async def scenario():
    first, last = ((0,), (1,))
    own, theirs = (first, last) if position == "running" else (last, first)
    others = [served.begin([i + 1], 20, priority=theirs)[1] for i in range(4)]
    request, task = served.begin([9], 20, priority=own)
    await served.begun(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    served.engine.release(request.session)
    await asyncio.gather(*others)
    again = await served.engine.generate(request)
    assert again.tokens.tolist() == greedy(served.params, [9], 20)
    assert again.cached_tokens == 0

  served.run(scenario())


@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.001, 0.003])
def test_the_row_of_a_session_released_while_it_runs_has_one_owner(
  served, delay_s
):
  async def scenario():
    # A session that idles lets the engine linger before it dispatches.
    await served.answer([9], 1, session="idle")
    begun = [served.begin([i + 1], 20) for i in range(3)]
    await served.begun(3)
    await asyncio.sleep(delay_s)
    served.engine.release(begun[0][0].session)
    begun.append(served.begin([8], 20))
    answers = await asyncio.gather(*(task for _, task in begun))
    assert [a.stop for a in answers] == ["abort", *["length"] * 3]
    for (request, _), answer in zip(begun, answers, strict=True):
      expected = greedy(served.params, request.tokens, 20)
      assert answer.tokens.tolist() == expected[: len(answer.tokens)]
    served.engine.release("idle")

  served.run(scenario())


def test_release_ends_a_request_that_waits(served):
  async def scenario():
    others = [served.begin([i + 1], 8)[1] for i in range(4)]
    request, task = served.begin([9], 8, priority=(1,))
    await served.begun(1)
    served.engine.release(request.session)
    assert (await task).stop == "abort"
    assert served.engine.stats().waiting == 0
    await asyncio.gather(*others)

  served.run(scenario())


def test_new_weights_go_on_in_the_middle_of_an_answer(served):
  async def scenario():
    idle, session = [1, 2, 3], served.name()
    idle += (await served.answer(idle, 3, session=session)).tokens.tolist()
    old, before = served.params, served.engine.stats().version
    # One in the middle of its answer, one in the middle of its long prompt.
    long = prompt(np.random.default_rng(2), 19, 20)
    _, task = served.begin([4, 5], 20)
    await served.begun(3)
    _, late = served.begin(long, 8)
    await asyncio.sleep(0.003)
    await served.publish("recompute")
    for ids, answer in (([4, 5], await task), (long, await late)):
      tokens, versions = answer.tokens.tolist(), answer.versions.tolist()
      kept = versions.count(before)
      assert versions == [before] * kept + [before + 1] * (len(tokens) - kept)
      assert tokens[:kept] == greedy(old, ids, kept)
      ids = [*ids, *tokens[:kept]]
      assert tokens[kept:] == greedy(served.params, ids, len(tokens) - kept)
    assert 0 < (await task).versions.tolist().count(before) < 20
    # What idled is encoded again too.
    answer = await served.answer([*idle, 6], 4, session=session)
    assert answer.cached_tokens == 0
    assert answer.tokens.tolist() == greedy(served.params, [*idle, 6], 4)

  served.run(scenario())


@pytest.mark.parametrize("first", [None, "recompute"])
def test_drain_finishes_what_runs_and_keeps_the_queue(served, first):
  async def scenario():
    before = served.engine.stats().version
    tasks = [served.begin([i + 1], 20)[1] for i in range(7)]
    await served.begun(1)
    if first:
      await served.engine.pause(first)
    await served.publish("drain")
    answers = await asyncio.gather(*tasks)
    # Four rows ran under the old weights to their end; three had to wait.
    versions = [set(answer.versions.tolist()) for answer in answers]
    assert versions == [{before}] * 4 + [{before + 1}] * 3

  served.run(scenario())


def test_requests_made_while_paused_wait_for_resume(served):
  async def scenario():
    await served.engine.pause("drain")
    _, task = served.begin([1], 2)
    await asyncio.sleep(0.02)
    assert not task.done()
    assert served.engine.stats().waiting == 1
    served.engine.resume()
    assert (await task).tokens.tolist() == greedy(served.params, [1], 2)

  served.run(scenario())


def test_200_updates_under_load_lose_and_repeat_nothing(served):
  async def scenario():
    start = served.engine.stats()
    finished = asyncio.Event()
    answers = []

    async def client(seed):
      rng = np.random.default_rng(seed)
      while not finished.is_set():
        count = int(rng.integers(1, 9))
        answer = await served.answer(prompt(rng, 1, 12), count)
        assert (answer.stop, len(answer.tokens)) == ("length", count)
        assert (np.diff(answer.versions) >= 0).all()
        answers.append(answer)

    async with asyncio.TaskGroup() as clients:
      for seed in range(6):
        clients.create_task(client(seed))
      for i in range(200):
        await served.publish("drain" if i % 10 == 0 else "recompute")
        await asyncio.sleep(0.002 * (i % 3))
      finished.set()
    stats = served.engine.stats()
    assert stats.version == start.version + 200
    assert stats.sampled_tokens - start.sampled_tokens == sum(
      len(answer.tokens) for answer in answers
    )
    assert any(len(set(answer.versions.tolist())) > 1 for answer in answers)
    assert stats.compilations == start.compilations

  served.run(scenario())


def test_weights_that_cannot_be_served_are_refused(served):
  def cut(params):
    return {**params, "embed": params["embed"][:-1]}

  async def scenario():
    version = trajectory.PolicyVersion(served.engine.stats().version)
    good, later = served.placed(version), trajectory.PolicyVersion(version + 1)
    with pytest.raises(RuntimeError, match="await pause"):
      await served.engine.update_weights(later, good)
    await served.engine.pause("recompute")
    with pytest.raises(ValueError, match=f"not above the served {version}"):
      await served.engine.update_weights(version, good)
    with pytest.raises(ValueError, match=r"'embed'.*\(24, 32\).*\(23, 32\)"):
      await served.engine.update_weights(later, cut(good))
    with pytest.raises(ValueError, match="'head'"):
      await served.engine.update_weights(later, {**good, "head": good["embed"]})
    served.engine.resume()
    assert served.engine.stats().version == version
    assert (await served.answer([1, 2], 3)).tokens.tolist() == greedy(
      served.params, [1, 2], 3
    )

  served.run(scenario())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokens": np.zeros(0, np.int32)}, "no tokens"),
    ({"tokens": np.array([1, 24], np.int32)}, "outside"),
    ({"tokens": np.array([-1], np.int32)}, "outside"),
    # 30 + 3 = 33 is one more than max_length.
    ({"tokens": np.ones(30, np.int32)}, "do not fit model.max_length=32"),
    ({"max_tokens": 0}, "max_tokens=0 is below 1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"stop_ids": (1, 2, 3, 4, 5)}, "5 stop ids, at most 4"),
    ({"stop_ids": (24,)}, "leave"),
    ({"seed": 2**31}, "32 bits"),
    ({"request_id": "taken"}, "already in flight"),
    ({"session": "busy"}, "already has a request"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_cannot_be_served_fails_alone(served, change, message):
  async def scenario():
    _, other = served.begin([5], 6, request_id="taken", session="busy")
    await asyncio.sleep(0)
    bad = dataclasses.replace(served.request([1, 2], 3), **change)
    with pytest.raises(ValueError, match=message):
      await served.engine.generate(bad)
    assert (await other).tokens.tolist() == greedy(served.params, [5], 6)

  served.run(scenario())


def test_close_fails_what_is_in_flight_and_all_that_follows(breakable):
  async def scenario():
    tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
    await breakable.begun(1)
    await breakable.engine.close()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, engine.EngineClosed) for end in ends)
    calls: list[Callable[[], Awaitable]] = [
      lambda: breakable.answer([1], 1),
      lambda: breakable.engine.pause("drain"),
      lambda: breakable.publish("recompute"),
    ]
    for call in calls:
      with pytest.raises(engine.EngineClosed, match="was closed"):
        await call()

  breakable.run(scenario())


def test_close_while_paused_or_before_the_start_returns(breakable):
  async def scenario():
    _, task = breakable.begin([1], 20)
    await breakable.begun(1)
    await breakable.engine.pause("recompute")
    await breakable.engine.close()
    with pytest.raises(engine.EngineClosed):
      await task

  breakable.run(scenario())
  mesh, _ = placement.Placement(colocated=True).meshes()
  thread = dispatch.MeshThread("decode", trace.Trace(None))
  unborn = engine_jax.JaxEngine(CONFIG, TINY, mesh, thread)
  breakable.run(unborn.close())
  thread.close()


def test_a_device_program_that_fails_fails_the_requests(breakable):
  async def scenario():
    tasks = [breakable.begin([1], 20)[1] for _ in range(3)]
    await breakable.begun(1)
    await breakable.engine.pause("recompute")
    # On another device than the cache: the next dispatch raises.
    elsewhere = jax.device_put(weights(1), jax.devices()[1])
    await breakable.engine.update_weights(
      trajectory.PolicyVersion(1), elsewhere
    )
    breakable.engine.resume()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, engine.EngineClosed) for end in ends)
    with pytest.raises(engine.EngineClosed, match="decoding raised ValueError"):
      await breakable.answer([1], 1)

  breakable.run(scenario())


def test_a_mesh_of_four_devices_gives_the_same_answers():
  settings = dataclasses.replace(
    SETTINGS, row_buckets=(4,), chunk_buckets=(4,), linger_s=0.0
  )
  with Mesh(settings, data=2, expert=2) as served:

    async def load():
      rng = np.random.default_rng(0)
      requests = [served.request(prompt(rng), 8) for _ in range(8)]
      answers = [served.engine.generate(request) for request in requests]
      await served.publish("recompute")
      for request, answer in zip(
        requests, await asyncio.gather(*answers), strict=True
      ):
        expected = greedy(served.params, request.tokens, 8)
        assert answer.tokens.tolist() == expected

    served.run(load())
    assert served.engine.stats().compilations == 1


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"slots": 0}, "engine.slots=0 is below 1"),
    ({"steps_per_dispatch": 0}, "engine.steps_per_dispatch=0 is below 1"),
    ({"row_buckets": ()}, "engine.row_buckets=.. needs"),
    ({"chunk_buckets": (4, 0)}, "engine.chunk_buckets="),
  ],
)
def test_sizes_that_cannot_work_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(SETTINGS, **change).validate()
