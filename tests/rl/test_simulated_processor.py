"""The time of a simulated engine, without an event loop."""

import dataclasses
import math

import numpy as np
import pytest

from rl import engine, simulated_processor

SPEED = simulated_processor.Speed(
  tau0_s=0.01, b0=10.0, slots=8, kv_tokens=100_000
)


def job(length, tokens=10, session="s"):
  return simulated_processor.Job(
    request=engine.DecodeRequest(
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
  processor.hold = "publish"
  assert processor.wait_s() == math.inf


def test_every_second_is_counted_once():
  processor = simulated_processor.Processor(SPEED)
  ends = run_all(processor, [job(100), job(200)])
  processor.advance(10.0)
  assert ends[200] == pytest.approx(1.2 + 1.1)
  assert processor.decode_s == pytest.approx(ends[200], abs=1e-5)
  # Both for 100 tokens at 0.012 s, one for 100 at 0.011 s.
  assert processor.sequence_s == pytest.approx(2 * 1.2 + 1.1, abs=1e-5)
  assert [state for _, state in processor.states] == ["decode", "gate"]


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
  with pytest.raises(ValueError, match=rf"pools.0.speed.{field}={value} is"):
    speed.validate("pools.0.speed")


def test_a_pause_below_0_is_refused():
  speed = simulated_processor.Speed(update_s=-1.0)
  with pytest.raises(ValueError, match=r"x\.update_s=-1.0 is below 0"):
    speed.validate("x")
