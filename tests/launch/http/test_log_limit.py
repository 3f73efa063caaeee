"""What clients do wrong is logged a few times a minute."""

import logging

from launch.http import log_limit


def test_the_same_line_is_logged_a_few_times_in_a_period():
  now, logged = [0.0], []
  limit = log_limit.LogLimit(most=2, period_s=60.0, clock=lambda: now[0])

  def log(text, *given):
    record = logging.LogRecord("x", 30, "", 0, text, given, None)
    if limit.filter(record):
      logged.append(record.getMessage())

  for i in range(9):
    log("bad request %s", i)
  log("another")
  now[0] = 60.0
  for i in range(3):
    log("bad request %s", i)
  now[0] = 200.0
  log("another")
  assert logged == [
    "bad request 0",
    "bad request 1",
    "another",
    # 9 lines, of which 2 were let through.
    "bad request 0 (7 more of these were left out)",
    "bad request 1",
    "another",
  ]
