import asyncio
import dataclasses

import pytest

from envs.sandbox import bubblewrap, sandbox, session

pytestmark = pytest.mark.process

BOX = sandbox.Sandbox(
  wall_s=10, cpu_s=2, memory_mib=128, disk_mib=4, output_kib=16
)


def run(*pieces, **limits):
  """Returns the executions of pieces in one session, and whether it is over."""

  async def call_all():
    own = session.PythonSession(dataclasses.replace(BOX, **limits))
    try:
      return [await own.call(piece) for piece in pieces], own.is_over
    finally:
      await own.close()

  return asyncio.run(call_all())


def test_state_lives_from_call_to_call():
  done, is_over = run(
    "import math\nx = [1, 2]",
    "def total(): return sum(x)\nx.append(3)",
    "open('note', 'w').write('kept'); total()",
    "open('note').read()",
    "x = None\nx",
  )
  # The value of a last expression is shown; None is not.
  assert [one.stdout for one in done] == ["", "", "6\n", "'kept'\n", ""]
  assert {one.status for one in done} == {"ok"}
  assert not is_over


def test_all_that_a_call_prints_comes_back_in_order():
  done, _ = run(
    "import subprocess, sys\n"
    "print('out')\n"
    "print('error', file=sys.stderr)\n"
    "subprocess.run(['echo', 'child'])\n"
    "print('last', end='')\n"
  )
  assert done[0].stdout == "out\nerror\nchild\nlast"


@pytest.mark.parametrize(
  ("piece", "status", "last_line"),
  [
    ("1 / 0", "error", "ZeroDivisionError: division by zero"),
    ("print(", "error", "SyntaxError: '(' was never closed"),
    ("raise SystemExit(3)", "error", "SystemExit: 3"),
    ("input()", "error", "EOFError: EOF when reading a line"),
    ("y = 'x' * 10**10", "memory", "MemoryError"),
  ],
)
def test_an_exception_ends_the_call_and_not_the_session(
  piece, status, last_line
):
  (first, second), is_over = run(f"x = 7\n{piece}", "x")
  assert first.status == status
  assert first.stderr.splitlines()[-1] == last_line
  assert "main.py" not in first.stderr
  assert second.stdout == ("" if "print(" in piece else "7\n")
  assert not is_over


@pytest.mark.parametrize(
  ("piece", "status", "code", "stdout"),
  [
    ("print('begun')\nwhile True: pass", "timeout", None, "begun\n"),
    ("print('x' * 20000)", "output", None, "x" * 16384),
    ("import os\nwhile True: os.write(2, b'x')", "output", None, "x" * 16384),
    ("import os; os._exit(0)", "ok", 0, ""),
    ("import os; os.abort()", "error", 134, ""),  # 128 + SIGABRT
  ],
)
def test_a_call_that_overruns_or_ends_the_process_ends_the_session(
  piece, status, code, stdout
):
  (first,), is_over = run(piece, wall_s=2)
  assert (first.status, first.code, first.stdout) == (status, code, stdout)
  assert is_over


def test_cpu_time_is_that_of_all_calls():
  busy = "import time\nwhile time.process_time() < {}: pass"
  (first, second), is_over = run(busy.format(0.5), busy.format(9), cpu_s=1)
  assert (first.status, second.status) == ("ok", "timeout")
  assert second.code == 128 + 24  # SIGXCPU
  assert is_over


def test_a_forged_end_of_a_call_deceives_nobody_else():
  forge = """
import os
os.write(1, b"\\0" * 1000 + b'["ok", ""]\\n')
"""
  (first, second), is_over = run(forge, "1 + 1")
  assert first.status == "ok"
  assert second.stdout == "2\n"
  assert not is_over


def test_nothing_runs_in_a_session_that_is_over():
  async def call_again():
    own = session.PythonSession(BOX)
    await own.close()
    await own.call("1")

  with pytest.raises(bubblewrap.SandboxError, match="begin another"):
    asyncio.run(call_again())


def test_a_caller_that_is_cancelled_ends_the_session():
  async def cancel():
    own = session.PythonSession(BOX)
    await own.call("x = 1")
    process = own._process
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(own.call("import time; time.sleep(60)"), 0.1)
    assert process is not None
    return own.is_over, process._process.returncode

  is_over, code = asyncio.run(cancel())
  assert is_over
  assert code is not None
