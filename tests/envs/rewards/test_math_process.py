"""Expressions compared in a process that may be killed."""

import importlib.util
import os
import signal
import threading
import time

import pytest

from envs.rewards import math_process

pytestmark = [
  pytest.mark.process,
  # Found and not imported, which takes long and is for processes of their own.
  pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="no math_verify"
  ),
]


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
  yield
  while math_process._idle:
    math_process._idle.pop().close()


@pytest.mark.parametrize(
  ("reference", "answer", "is_equal"),
  [
    ("72", "72", True),
    ("72", "73", False),
    (r"\frac{1}{2}", "0.5", True),
    ("0.5", r"\frac12", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x+1)^3", False),
    (r"\{1, 2\}", r"\{2, 1\}", True),
    ("1234", "1,234", True),
    ("5", r"5\text{ cm}", True),
    ("5", "x = 5", True),
    (r"\infty", r"\infty", True),
    # Intervals.
    (r"(-\infty, 2)", "x < 2", True),
    (r"(-\infty, 2)", r"x \le 2", False),
    ("x < 2", r"(-\infty, 2)", True),
    (r"\{1, 2\}", "1 < x < 2", False),
    # Small numbers, to six digits.
    (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}", False),
    (r"1.6\times 10^{-19}", r"0.16\times 10^{-18}", True),
    (r"x = 1.6\times 10^{-19}", r"9.1\times 10^{-31}", False),
    ("10^{-19}", "10^{-31}", False),
    ("0.00000012", "0.00000034", False),
    ("0.00012", "0.0001204", False),
    (r"\pi", "3.141593", True),
    (r"\frac{1}{3}", "0.333333", True),
    ("0", r"\sqrt{2}^2 - 2", True),
    ("0", "10^{-7}", False),
    ("50", r"50\%", True),
    (r"50\%", "0.5", True),
    ("x + y = 5", "2x + 2y = 10", True),
    # More than one candidate.
    ("5", "1, 2, 3, 4, 5", False),
    ("5", r"5 \text{ or } 6", False),
    ("5", r"4 \pm 1", False),
    ("5", r"x = 4, x = 5", False),
    ("5", r"\boxed{5}, \boxed{6}", False),
    ("5", "4}, \\boxed{5", False),
    # Junk, some of which is a value elsewhere.
    ("0", r"\emptyset", False),
    ("0", r"\frac{0}{0}", False),
    ("5", r"\infty", False),
    ("5", "NaN", False),
    ("5", "\u0665", False),
    ("5", "__import__('os')", False),
    ("5", "}}}{{{", False),
    ("x", "y", False),
  ],
)
def test_expressions_are_compared(reference, answer, is_equal):
  assert math_process.equal(reference, answer, 5.0) == is_equal


@pytest.mark.parametrize(
  "bomb", ["9^{9^{9^{9^9}}}", "100000000!", "(" * 400 + "5" + ")" * 400]
)
def test_an_answer_that_takes_too_long_is_not_equal(bomb):
  assert not math_process.equal("5", bomb, 0.3)
  assert math_process.equal("5", "5", 5.0)


def test_a_process_is_used_again_and_by_any_thread():
  results = []
  for _ in range(2):
    thread = threading.Thread(
      target=lambda: results.append(math_process.equal("5", "5", 5.0))
    )
    thread.start()
    thread.join()
  assert results == [True, True]
  assert len(math_process._idle) == 1


def test_a_reference_that_is_no_expression_is_named():
  with pytest.raises(ValueError, match=r"'x\*\*2' is no LaTeX"):
    math_process.equal("x**2", "5", 5.0)
  assert math_process.equal("5", "5", 5.0)


def test_a_process_that_others_ended_grades_nothing():
  assert math_process.equal("5", "5", 5.0)
  process = math_process._idle[0]._process
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  with pytest.raises(OSError, match=r"Broken pipe|ended with status -9"):
    math_process.equal("5", "5", 5.0)
  assert math_process.equal("5", "5", 5.0)


def test_a_late_process_is_killed(monkeypatch):
  assert math_process.equal("5", "5", 5.0)
  process = math_process._idle[0]._process
  os.kill(process.pid, signal.SIGSTOP)
  monkeypatch.setattr(math_process, "_WALL_S", 0.1)
  begun = time.monotonic()
  with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
    math_process.equal("5", "5", 5.0)
  assert time.monotonic() - begun < 10
  assert process.returncode == -signal.SIGKILL
