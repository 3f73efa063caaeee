"""Programs in the sandbox: how they end, and what they may do there."""

import asyncio
import dataclasses
import math

import pytest

from envs.sandbox import sandbox

pytestmark = pytest.mark.process

BOX = sandbox.Sandbox(
  wall_s=10,
  cpu_s=1,
  memory_mib=128,
  disk_mib=4,
  processes=6,
  output_kib=16,
)


def run(code, stdin="", **limits):
  """Runs a program in a sandbox with other limits."""
  return asyncio.run(dataclasses.replace(BOX, **limits).run(code, stdin))


@pytest.mark.parametrize(
  ("code", "status", "exit_code", "stdout"),
  [
    ("print(input()[::-1])", "ok", 0, "cba\n"),
    ("print('\u00fc\u4e2d')", "ok", 0, "\u00fc\u4e2d\n"),
    ("import sys; sys.stdout.buffer.write(b'\\xff')", "ok", 0, "\ufffd"),
    ("print(1); 1 / 0", "error", 1, "1\n"),
    ("print(", "error", 1, ""),
    ("'\ud800'", "error", 1, ""),
    ("\0", "error", 1, ""),
    ("", "ok", 0, ""),
    ("raise SystemExit(7)", "error", 7, ""),
    ("import os; os.abort()", "error", 134, ""),  # 128 + SIGABRT
    ("x = 'x' * 10**10", "memory", 1, ""),
    ("print('x' * 20000)", "output", None, "x" * 16384),
  ],
)
def test_a_result_says_how_the_program_ended(code, status, exit_code, stdout):
  result = run(code, "abc")
  assert (result.status, result.code) == (status, exit_code)
  assert result.stdout == stdout


def test_a_program_may_use_packages_threads_and_files():
  code = """
import numpy, pathlib, tempfile, threading
with tempfile.NamedTemporaryFile() as file:
  pathlib.Path(file.name).write_text("x")
thread = threading.Thread(target=lambda: print(numpy.arange(4).sum()))
thread.start()
thread.join()
"""
  assert run(code, memory_mib=512, cpu_s=10).stdout == "6\n"


def test_equal_programs_print_the_same():
  code = "print(list({str(n) for n in range(50)}))"
  assert run(code).stdout == run(code).stdout


def test_a_program_need_not_read_its_input():
  assert run("print(1)", "x" * 10_000_000).status == "ok"


def test_a_program_finds_nothing_of_the_one_before():
  code = "import os; print(os.path.exists('x')); open('x', 'w').close()"
  assert run(code).stdout == run(code).stdout == "False\n"


@pytest.mark.parametrize(
  "limits",
  [{"wall_s": 0}, {"wall_s": math.nan}, {"memory_mib": 8}, {"processes": 0}],
)
def test_limits_that_no_program_could_meet_are_refused(limits):
  with pytest.raises(ValueError, match=r"sandbox \w+=.*: use"):
    sandbox.Sandbox(**limits)
