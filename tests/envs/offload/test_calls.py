"""Hedged calls on a clock that jumps: every time below is exact."""

import asyncio
import dataclasses

import pytest

from envs.offload import calls
from rl.runtime import virtual_clock

HEDGE = calls.Hedge(percentile=90, min_s=0.5, first_s=5.0)


@dataclasses.dataclass
class Sent:
  """Calls that answer after so many seconds; those below 0 fail after them."""

  script: list[float]
  cancelled: int = 0
  times: list[float] = dataclasses.field(default_factory=list)

  async def __call__(self):
    self.times.append(asyncio.get_running_loop().time())
    number = len(self.times)
    seconds = self.script[number - 1]
    try:
      await asyncio.sleep(abs(seconds))
    except asyncio.CancelledError:
      self.cancelled += 1
      raise
    if seconds < 0:
      raise OSError(f"call {number} failed")
    return number


async def ask(sent, hedge: calls.Hedge | None = HEDGE, max_calls=9):
  asked = calls.Calls(hedge, max_calls)
  try:
    answer = await asked.call(sent)
  except OSError as error:
    answer = str(error)
  return answer, asked.counts, asyncio.get_running_loop().time()


def test_a_slow_call_is_sent_again_and_the_first_answer_wins():
  sent = Sent([60.0, 2.0])
  answer, counts, time = virtual_clock.run(ask(sent))
  # The second begins after 5 s and takes 2 s; 7 s of the first are billed.
  assert (answer, time, sent.cancelled) == (2, 7.0, 1)
  assert counts == calls.CallCounts(
    offloaded_calls=2, hedges=1, hedges_won=1, billed_s=9.0
  )


def test_the_first_call_may_win_too():
  sent = Sent([6.0, 60.0])
  answer, counts, time = virtual_clock.run(ask(sent))
  assert (answer, time, sent.cancelled) == (1, 6.0, 1)
  assert (counts.hedges, counts.hedges_won) == (1, 0)


def test_a_quick_failure_is_not_hedged():
  sent = Sent([-1.0])
  assert virtual_clock.run(ask(sent))[0] == "call 1 failed"
  assert sent.times == [0.0]


@pytest.mark.parametrize(
  ("script", "answer"),
  [([-6.0, 2.0], 2), ([7.0, -1.0], 1), ([-6.0, -0.5], "call 1 failed")],
)
def test_one_answer_of_two_is_enough(script, answer):
  assert virtual_clock.run(ask(Sent(script)))[0] == answer


def test_without_hedges_a_slow_call_is_waited_for():
  answer, counts, time = virtual_clock.run(ask(Sent([60.0]), hedge=None))
  assert (answer, time, counts.offloaded_calls) == (1, 60.0, 1)


def test_cancelling_cancels_both_calls():
  sent = Sent([60.0, 60.0])

  async def scenario():
    asking = asyncio.create_task(ask(sent))
    await asyncio.sleep(6.0)
    asking.cancel()
    await asyncio.wait([asking])

  virtual_clock.run(scenario())
  assert sent.cancelled == 2


def test_calls_wait_for_a_place_and_waiting_is_neither_slow_nor_billed():
  sent = Sent([4.0] * 3)

  async def scenario():
    asked = calls.Calls(HEDGE, 1)
    await asyncio.gather(*(asked.call(sent) for _ in range(3)))
    return asked.counts

  counts = virtual_clock.run(scenario())
  assert sent.times == [0.0, 4.0, 8.0]
  assert counts == calls.CallCounts(offloaded_calls=3, billed_s=12.0)


def test_a_call_is_slow_by_the_percentile_of_recent_ones():
  assert HEDGE.after_s([1.0] * 19) == 5.0  # Too few are known.
  # Of 0, 1, ... 20 s the 90th percentile is 18 s.
  assert HEDGE.after_s([float(i) for i in range(21)]) == pytest.approx(18.0)
  assert HEDGE.after_s([0.01] * 50) == 0.5


def test_a_quick_failure_makes_no_later_call_slow():
  sent = Sent([-0.0001] * 20 + [4.0])

  async def scenario():
    asked = calls.Calls(HEDGE, 9)
    for _ in range(20):
      with pytest.raises(OSError, match="failed"):
        await asked.call(sent)
    return await asked.call(sent), asked.counts.hedges

  # None has been answered, so a call is slow above first_s=5.
  assert virtual_clock.run(scenario()) == (21, 0)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"percentile": 100.0}, r"percentile=100.0 must be in \(0, 100\)"),
    ({"first_s": float("inf")}, "first_s=inf must be finite"),
  ],
)
def test_a_hedge_that_never_comes_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    calls.Hedge(**fields)
