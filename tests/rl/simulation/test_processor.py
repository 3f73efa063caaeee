"""The time of a simulated engine, without an event loop."""

import dataclasses
import math

import numpy as np
import pytest

from rl.engine import contract
from rl.simulation import processor as simulated_processor

SPEED = simulated_processor.Speed(
  tau0_s=0.01, b0=10.0, slots=8, kv_tokens=100_000
)


def job(length, tokens=10, session="s"):
  return simulated_processor.Job(
    request=contract.DecodeRequest(
      request_id=f"{session}/{length}",
      session=f"{session}/{length}",
      tokens=np.zeros(tokens, np.int32),
      max_tokens=1 << 15,
    ),
    length=length,
    arrived_s=0.0,
    tag=None,
    left=float(length),
  )


def run_all(processor, jobs):
  """Returns when each job ended, by its length."""
  for one in jobs:
    processor.submit(one)
  now_s, ended = processor.now_s, {}
  while len(ended) < len(jobs):
    processor.advance(now_s)
    while done := processor.settle():
      for one in done:
        processor.end(one)
        ended[one.length] = now_s
    now_s += processor.wait_s() if len(ended) < len(jobs) else 0.0
  return ended


def test_the_shortest_go_first_and_leave_room_for_the_others():
  lengths = [30, 10, 20, 50, 40]
  times = run_all(
    simulated_processor.Processor(SPEED), [job(n) for n in lengths]
  )
  expected, done, at_s = {}, 0, 0.0
  for left, n in zip(range(5, 0, -1), sorted(lengths), strict=True):
    at_s += (n - done) * 0.01 * (1 + left / 10)
    done, expected[n] = n, at_s
  assert times == pytest.approx(expected, abs=1e-5)


def test_nothing_is_due_without_requests_or_while_weights_arrive():
  processor = simulated_processor.Processor(SPEED)
  assert processor.wait_s() == math.inf
  processor.advance(1.0)
  processor.submit(job(100))
  assert processor.settle() == []
  assert processor.wait_s() == pytest.approx(100 * 0.011)
  processor.turn("publish")
  assert processor.wait_s() == math.inf


def test_every_second_is_counted_once():
  processor = simulated_processor.Processor(SPEED)
  ends = run_all(processor, [job(100), job(200)])
  processor.advance(10.0)
  assert ends[200] == pytest.approx(1.2 + 1.1)
  assert [state for _, state in processor.states] == ["decode", "gate"]


def test_tokens_are_counted_as_they_are_served():
  processor = simulated_processor.Processor(SPEED)
  for one in (job(100), job(200)):
    processor.submit(one)
  processor.settle()
  # Two sequences at 0.012 s a token: 50 tokens of each by then.
  assert processor.served_by(0.6) == pytest.approx(100.0)
  assert processor.served == 0.0
  processor.advance(0.6)
  assert processor.served == pytest.approx(100.0)
  processor.turn("publish")
  assert processor.served_by(5.0) == processor.served
  processor.advance(5.0)
  assert processor.served == pytest.approx(100.0)


def test_what_has_ended_was_served():
  processor = simulated_processor.Processor(SPEED)
  run_all(processor, [job(n, session=str(n)) for n in range(1, 40)])
  # A token may end 1e-4 of its time early.
  assert processor.served == pytest.approx(sum(range(1, 40)), rel=1e-4)


def ends_behind(gone, encoded):
  """Returns when c, behind a and b in the queue, decodes if one is ended."""
  speed = dataclasses.replace(SPEED, prefill_per_s=100.0)
  processor = simulated_processor.Processor(speed)
  jobs = {name: job(1, tokens=100, session=name) for name in "abc"}
  for one in jobs.values():
    processor.submit(one)
  processor.settle()
  processor.advance(encoded / 100.0)
  processor.settle()
  processor.end(jobs[gone])
  now_s = processor.now_s
  while jobs["c"].first_s is None:
    processor.advance(now_s)
    for one in processor.settle():
      processor.end(one)
    now_s += processor.wait_s()
  return jobs["c"].first_s, processor.prefilled


@pytest.mark.parametrize(
  ("gone", "encoded", "seconds", "ids"),
  [
    # Of each 100 ids, at 100 a second: 0.3 s of a are spent, 0.7 s are not.
    ("a", 30, 3.0 - 0.7, 230),
    ("b", 30, 3.0 - 1.0, 200),
    # b has begun, behind a.
    ("b", 140, 3.0 - 0.6, 240),
  ],
)
def test_what_is_ended_while_it_is_encoded_takes_no_more_time(
  gone, encoded, seconds, ids
):
  first_s, prefilled = ends_behind(gone, encoded)
  assert first_s == pytest.approx(seconds, abs=1e-5)
  assert prefilled == ids


@pytest.mark.parametrize(
  "quick", [{"prefill_per_s": 1e9}, {"tau0_s": 1e-9}], ids=["prefill", "decode"]
)
def test_work_ends_where_the_clock_is_coarser_than_its_speed(quick):
  # At 1e6 s the clock's numbers are 1.2e-10 s apart: 0.1 ids, or 0.1 tokens.
  processor = simulated_processor.Processor(dataclasses.replace(SPEED, **quick))
  processor.advance(1e6)
  jobs = [job(length, tokens=10 * length) for length in range(1, 40)]
  assert _steps(processor, jobs) < 4 * len(jobs)
  assert processor.sampled == sum(range(1, 40))


def _steps(processor, jobs):
  """Returns how often jobs are looked at until all have ended."""
  for one in jobs:
    processor.submit(one)
  now_s, left, steps = processor.now_s, len(jobs), 0
  while left and (steps := steps + 1) < 1000:
    processor.advance(now_s)
    while done := processor.settle():
      left -= len(done)
      for one in done:
        processor.end(one)
    now_s += processor.wait_s() if left else 0.0
  return steps


def test_all_room_is_given_back():
  processor = simulated_processor.Processor(SPEED)
  run_all(processor, [job(n, session=str(n)) for n in range(1, 40)])
  assert (processor.running, processor.decoding) == (0, 0)
  assert processor.sampled == sum(range(1, 40))
  # All but what is cached: 10 ids of context and the tokens but for the last.
  assert processor.free == 100_000 - sum(10 + n - 1 for n in range(1, 40))
  processor.forget()
  assert processor.free == 100_000


def test_a_session_is_cached_once():
  processor = simulated_processor.Processor(SPEED)
  run_all(processor, [job(20)])
  run_all(processor, [job(20, tokens=60)])
  assert processor.free == 100_000 - 79
  assert processor.hits == 29


@pytest.mark.parametrize(
  "field", ["tau0_s", "b0", "prefill_per_s", "slots", "kv_tokens"]
)
def test_an_engine_without_speed_is_refused(field):
  value = 0 if field in ("slots", "kv_tokens") else 0.0
  speed = dataclasses.replace(SPEED, **{field: value})
  with pytest.raises(ValueError, match=rf"pools.0.speed.{field}={value} must"):
    speed.validate("pools.0.speed")


@pytest.mark.parametrize("update_s", [-1.0, math.inf, math.nan])
def test_a_pause_below_0_or_without_an_end_is_refused(update_s):
  speed = simulated_processor.Speed(update_s=update_s)
  words = rf"x\.update_s={update_s} must be a finite number of at least 0"
  with pytest.raises(ValueError, match=words):
    speed.validate("x")


def test_tokens_that_never_end_are_refused():
  with pytest.raises(ValueError, match=r"x\.tau0_s=inf must be a finite"):
    simulated_processor.Speed(tau0_s=math.inf).validate("x")
