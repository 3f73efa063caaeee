"""What is sglang-jax's alone: settings, its process, its failures."""

import asyncio
import dataclasses
import gc
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import threading
import time

import jax
import numpy as np
import pytest

from models import config as config_lib
from models import rope
from rl.engine import contract
from rl.engine.sglang import process_isolation, scheduler_thread
from rl.engine.sglang import requests as sglang_requests
from rl.engine.sglang.settings import SglangSettings
from tests.helpers import engines_under_test, machine_speed

pytestmark = pytest.mark.process

INSTALLED = importlib.util.find_spec("sgl_jax") is not None
needs_sglang = pytest.mark.skipif(not INSTALLED, reason="not installed")
ON_QUIT = signal.getsignal(signal.SIGQUIT)
CONFIG = engines_under_test.CONFIG
DENSE = dataclasses.replace(CONFIG, num_experts=0)
SMALL = SglangSettings(slots=2, row_buckets=(2,), token_buckets=(32,))


def test_the_defaults_are_settings_that_a_run_can_have():
  settings: contract.EngineSpec = SglangSettings()
  settings.validate()
  settings.validate_model(CONFIG)
  assert settings.split_rows == {}


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"slots": 0}, "slots=0"),
    ({"page_size": -1}, "page_size=-1"),
    ({"max_total_tokens": 0}, "max_total_tokens=0"),
    ({"row_buckets": (4, 0)}, "row_buckets"),
    ({"token_buckets": (-1,)}, "token_buckets"),
    ({"memory_fraction": 1.0}, "memory_fraction=1.0"),
    ({"patience_s": 0.0}, "patience_s=0.0"),
  ],
)
def test_sizes_that_cannot_work_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    SglangSettings(**changes).validate()


def test_models_that_it_cannot_serve_are_refused():
  settings = SglangSettings(max_total_tokens=100)
  # Twice 96 and 8 spare ids.
  with pytest.raises(ValueError, match="use 208 or more"):
    settings.validate_model(CONFIG)
  scaled = dataclasses.replace(CONFIG, rope_scaling=rope.Linear(factor=2.0))
  with pytest.raises(ValueError, match="rope_scaling"):
    SglangSettings().validate_model(scaled)


def test_sizes_follow_the_platform():
  # 2560 // (96 + 8) = 24 conversations, each of which sees all.
  cpu = SglangSettings().sizes(CONFIG, "cpu")
  assert (cpu.slots, cpu.page_size) == (24, 1)
  tpu = SglangSettings().sizes(CONFIG, "tpu")
  assert (tpu.slots, tpu.page_size, tpu.max_total_tokens) == (256, 128, None)
  odd = SglangSettings(
    slots=20, row_buckets=(8, 64), token_buckets=(4, 50), page_size=16
  ).sizes(CONFIG, "cpu")
  # No more rows than slots; tokens in whole pages, and as many as slots.
  assert odd.row_buckets == (8, 20)
  assert odd.token_buckets == (32, 64)


def test_a_missing_package_is_named(one_device, thread):
  if INSTALLED:
    pytest.skip("it is installed")
  with pytest.raises(ValueError, match=r"pip install 'twinmesh\[sglang\]'"):
    SglangSettings().build(CONFIG, one_device, thread)


@pytest.mark.parametrize(
  ("tokens", "longest", "lengths"),
  [(10, 95, [10]), (10, 4, [4, 3, 3]), (100, 4, [4] * 8)],
)
def test_prompts_fill_a_bucket(tokens, longest, lengths):
  sizes = dataclasses.replace(SMALL, slots=8).sizes(CONFIG, "cpu")
  assert sizes.prompts(tokens, longest) == lengths


def output(tokens, version=3, flushed=3, cached=0):
  return scheduler_thread.Output(
    rid="",
    tokens=tokens,
    logprobs=[-1.0] * len(tokens),
    version=version,
    flushed=flushed,
    cached=cached,
    end=None,
  )


def record(length=5, max_tokens=9):
  request = sglang_requests.of_length("one", length, max_tokens)
  return sglang_requests.TrackedRequest(request)


def test_a_request_goes_on_behind_what_it_has():
  one = record()
  one.submit()
  first = one.rid
  assert one.add(output([7, 8], cached=2)) == (3, 2)
  one.submit()
  assert one.rid != first
  assert len(one.rid) == len(first)
  assert one.ids == [0, 0, 0, 0, 0, 7, 8]
  assert one.remaining == 7
  # 5 + 2 ids are encoded again, and what was cached first is what counts.
  assert one.add(output([9], version=4, flushed=4)) == (7, 0)
  one.finish("length")
  last = one.deltas.get_nowait()
  assert isinstance(last, contract.Delta)
  assert last.completion is not None
  done = last.completion
  assert done.tokens.tolist() == [7, 8, 9]
  assert done.versions.tolist() == [3, 3, 4]
  assert done.cached_tokens == 2
  assert done.oldest_kv == 4


def test_keys_of_unknown_age_are_said_to_be():
  one = record()
  one.submit()
  one.add(output([7], version=5, flushed=3, cached=2))
  assert one.oldest_kv == -1
  other = record()
  other.submit()
  other.add(output([7], version=5, flushed=3, cached=0))
  other.add(output([7], version=6, flushed=3, cached=0))
  assert other.oldest_kv == 5


def test_what_it_changes_in_the_process_is_put_back():
  def state():
    return {
      "signals": [
        signal.getsignal(n) for n in (signal.SIGCHLD, signal.SIGQUIT)
      ],
      "policy": asyncio.get_event_loop_policy(),
      "log": (logging.getLogger().level, list(logging.getLogger().handlers)),
      "atexit": vars(threading)["_register_atexit"],
      "numbers": np.random.get_state()[1].tolist(),
      "platforms": os.environ.get("JAX_PLATFORMS"),
      "cache": jax.config.jax_persistent_cache_min_compile_time_secs,
    }

  def act():
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGQUIT, lambda *_: None)
    asyncio.set_event_loop_policy(None)
    logging.getLogger().setLevel(1)
    logging.getLogger().addHandler(logging.NullHandler())
    setattr(threading, "_register_atexit", None)  # noqa: B010
    np.random.seed(0)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 77.0)

  before = state()
  with process_isolation.contained("anything"):
    assert os.environ["JAX_PLATFORMS"] == "anything"
    act()
  assert state() == before

  def fail():
    with process_isolation.contained("anything"):
      act()
      raise KeyError

  with pytest.raises(KeyError):
    fail()
  assert state() == before


def test_it_starts_in_the_main_thread_only():
  errors = []

  def start():
    try:
      with process_isolation.contained("cpu"):
        pass
    except RuntimeError as error:
      errors.append(str(error))

  thread = threading.Thread(target=start)
  thread.start()
  thread.join(machine_speed.scaled(10))
  assert errors
  assert "main thread" in errors[0]


@pytest.fixture
def served():
  with engines_under_test.serve("sglang", DENSE, SMALL) as served:
    yield served


@needs_sglang
def test_our_process_stays_ours(served):
  assert subprocess.run(["false"]).returncode == 1
  assert signal.getsignal(signal.SIGQUIT) == ON_QUIT
  assert type(asyncio.new_event_loop()).__module__.startswith("asyncio")
  # Collected while open, one would block whatever thread collects it.
  kind = importlib.import_module("zmq").Socket
  sockets = [one for one in gc.get_objects() if isinstance(one, kind)]
  assert sockets
  assert all(one.closed for one in sockets)


@needs_sglang
async def test_its_steps_are_work_of_its_mesh(served):
  spans = served.thread._spans.spans
  assert "warm up" in {span.name for span in spans}
  before = len(spans)
  began = time.monotonic()
  await served.answer([1, 2], 9)
  passed_s = time.monotonic() - began
  steps = [span for span in spans[before:] if span.name == "decode"]
  assert len(steps) >= 8
  assert {span.track for span in steps} == {"decode"}
  assert 0 < sum(span.end - span.start for span in steps) <= passed_s


@needs_sglang
def test_an_idle_scheduler_waits(served):
  scheduler = served.engine._bridge.scheduler
  idle, looks = scheduler.is_fully_idle, []
  scheduler.is_fully_idle = lambda: looks.append(1) or idle()
  time.sleep(0.3)
  # It looks once a second, where upstream's looks all the time.
  assert len(looks) < 5


@needs_sglang
def test_a_closed_engine_holds_no_cache():
  # Keys and values of 208 ids, and one row more for what is padding.
  def caches():
    gc.collect()
    return sum(209 in array.shape for array in jax.live_arrays())

  settings = dataclasses.replace(SMALL, max_total_tokens=208)
  with engines_under_test.serve("sglang", DENSE, settings):
    assert caches() > 0
  assert caches() == 0


@needs_sglang
async def test_a_failing_step_ends_the_engine_and_nothing_else(served):
  _, task = served.begin([1, 2], 60)
  await served.begun(3)
  served.engine._bridge.scheduler.run_batch = None
  late = served.begin([3], 5)[1]
  ended = await asyncio.gather(task, late, return_exceptions=True)
  assert [type(one) for one in ended] == [contract.EngineClosed] * 2
  assert "scheduler raised" in str(ended[0])
  with pytest.raises(contract.EngineClosed):
    await served.engine.update_weights(1, served.placed(1))
  with pytest.raises(contract.EngineClosed):
    await served.engine.pause()


@needs_sglang
def test_a_step_that_hangs_ends_the_engine():
  settings = dataclasses.replace(SMALL, patience_s=20.0)
  with engines_under_test.serve("sglang", DENSE, settings) as served:
    hung, over = threading.Event(), threading.Event()

    def hang(*_):
      hung.set()
      over.wait(machine_speed.scaled(30))

    async def scenario():
      served.engine._sizes = dataclasses.replace(
        served.engine._sizes, patience_s=0.2
      )
      _, task = served.begin([1, 2], 60)
      await served.begun(3)
      served.engine._bridge.post(hang)
      with pytest.raises(contract.EngineClosed, match="patience_s"):
        await task

    served.run(scenario())
    assert hung.is_set()
    over.set()


@needs_sglang
def test_both_engines_answer_the_same_to_a_seed(served):
  # One sampler: rounding decides otherwise once in thousands of tokens.
  prompts = [[1], [2, 3], [4, 5, 6], [7, 8, 9, 10]]

  async def scenario(of):
    return await asyncio.gather(
      *(of.answer(p, 12, temperature=1.0, seed=9) for p in prompts)
    )

  theirs = served.run(scenario(served))
  built_in = engines_under_test.SETTINGS["built_in"]
  with engines_under_test.serve("built_in", DENSE, built_in) as other:
    ours = other.run(scenario(other))
  for one, two in zip(theirs, ours, strict=True):
    assert one.tokens.tolist() == two.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)


@needs_sglang
def test_requests_that_give_up_their_pages_go_on():
  # 4 conversations of 62 ids do not fit 208 pages, but the fourth is let in
  # when it comes while the others are short: at one of a few attempts.
  settings = dataclasses.replace(SMALL, slots=4, max_total_tokens=208)
  with engines_under_test.serve("sglang", DENSE, settings) as served:

    async def scenario():
      tasks = []
      for i in range(4):
        tasks.append(served.begin([i, 1], 60)[1])
        await served.begun(1)
      return await asyncio.gather(*tasks)

    for _ in range(9):
      for i, done in enumerate(served.run(scenario())):
        assert done.tokens.tolist() == served.greedy([i, 1], 60)
      if served.engine.stats().preemptions:
        break
    assert served.engine.stats().preemptions > 0


@needs_sglang
def test_long_prompts_are_encoded_in_parts():
  settings = dataclasses.replace(SMALL, token_buckets=(16,))
  with engines_under_test.serve("sglang", CONFIG, settings) as served:
    prompt = np.random.default_rng(0).integers(0, 24, 70).tolist()
    done = served.run(served.answer(prompt, 9))
    assert done.tokens.tolist() == served.greedy(prompt, 9)


@needs_sglang
def test_a_model_may_be_split_over_devices():
  with engines_under_test.serve("sglang", DENSE, SMALL, tensor=2) as served:
    done = served.run(served.answer([1, 2, 3], 20))
    assert done.tokens.tolist() == served.greedy([1, 2, 3], 20)
    served.run(served.publish())
    done = served.run(served.answer([1, 2, 3], 20))
    assert done.tokens.tolist() == served.greedy([1, 2, 3], 20)


@needs_sglang
def test_dense_layers_beside_experts_and_a_head_of_its_own():
  config = dataclasses.replace(
    CONFIG, dense_layers=(0,), tie_embeddings=False, head_dim=32
  )
  with engines_under_test.serve("sglang", config, SMALL) as served:
    done = served.run(served.answer([1, 2, 3], 30))
    assert done.tokens.tolist() == served.greedy([1, 2, 3], 30)
    expected = served.logprobs([1, 2, 3], done.tokens.tolist(), 0.0)
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


@needs_sglang
def test_bfloat16_agrees_as_far_as_it_has_digits():
  config = dataclasses.replace(
    DENSE, compute=config_lib.Compute(dtype="bfloat16")
  )
  with engines_under_test.serve("sglang", config, SMALL) as served:
    done = served.run(served.answer([1, 2, 3], 30, temperature=1.0))
    expected = served.logprobs([1, 2, 3], done.tokens.tolist(), 1.0)
    # 8 bits of a logit of 5 are worth 0.02, and layers add up.
    np.testing.assert_allclose(done.logprobs, expected, atol=0.3)
