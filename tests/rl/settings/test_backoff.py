"""The longest time that calls and their waits may take."""

import pytest

from rl.settings import backoff


@pytest.mark.parametrize("attempts", [1, 2, 4, 9])
@pytest.mark.parametrize("first_wait_s", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_longest_time_has_every_call_and_every_wait(
  attempts, first_wait_s, factor
):
  tried = backoff.Backoff(
    attempts=attempts, first_wait_s=first_wait_s, factor=factor
  )
  waits_s = [tried.wait_s(failures) for failures in range(1, attempts)]
  assert tried.longest_s(3.0) == attempts * 3.0 + sum(waits_s)


def test_attempts_with_many_zeros_are_counted_at_once():
  # Waits of 0.5, 1, 2, 4 and 8 s, and then of 10 s.
  tried = backoff.Backoff(attempts=10**15 + 6)
  assert tried.longest_s(0.0) == 15.5 + 10.0 * 10**15
  equal = backoff.Backoff(attempts=10**15 + 1, factor=1.0)
  assert equal.longest_s(0.0) == 0.5 * 10**15
