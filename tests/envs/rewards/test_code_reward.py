"""Code that is tried by unit tests: right, wrong, and cheating."""

import asyncio
import json
import shutil
import threading
import time

import pytest

from envs import base
from envs.rewards import code_reward, code_tests
from envs.sandbox import bubblewrap, sandbox

TESTS = """
assert add(2, 3) == 5
assert add("a", "b") == "ab"

def test_of_large_numbers():
  assert add(10**30, 1) == 10**30 + 1
"""
RIGHT = "def add(a, b):\n  return a + b"
LIMITS = sandbox.Sandbox(wall_s=20, cpu_s=2, memory_mib=128)


def in_the_sandbox(test):
  """Marks a test that starts processes of bubblewrap."""
  skip = pytest.mark.skipif(
    shutil.which("bwrap") is None,
    reason="there is no bwrap: apt-get install bubblewrap",
  )
  return pytest.mark.process(skip(test))


def transcript(content):
  """Returns an episode of one answer."""
  question = base.Message("user", "Write add.")
  return base.Transcript([question, base.Message("assistant", content)], [0.0])


def reward(*codes, tests=TESTS):
  """Returns the rewards of answers."""
  task = base.Task("code/train/0", 0, "train", 0, tests)
  answers = [transcript(f"So:\n```python\n{code}\n```\n") for code in codes]
  unit_tests = code_reward.UnitTests(limits=LIMITS)
  return [g.value for g in asyncio.run(unit_tests(task, answers))]


CHEATS = {
  "nothing": "",
  "prints": "print('passed', 'ok', 0)",
  "ends at once": "import os; os._exit(0)",
  "ends when it is called": "def add(a, b):\n  import os\n  os._exit(0)",
  "raises SystemExit": "def add(a, b):\n  raise SystemExit(0)",
  "equal to all": """
class Any(int):
  def __eq__(self, other): return True
  def __ne__(self, other): return False
  __hash__ = None
def add(a, b): return Any()""",
  "says that it is equal": """
class Any:
  def __repr__(self): return "type('A', (), {'__eq__': lambda *_: True})()"
def add(a, b): return Any()""",
  "has builtins of its own": """
import builtins
def add(a, b): return 0
def all(x): return True
def isinstance(*_): return True
def __eq__(*_): return True
builtins.AssertionError = Exception""",
  "raises what a test may catch": "def add(a, b):\n  raise AssertionError",
  "looks through frames and objects": """
import gc, sys
def add(a, b):
  frame = sys._getframe()
  while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
      if isinstance(value, str) and len(value) == 32:
        print(value)
    frame = frame.f_back
  found = [o for o in gc.get_objects() if isinstance(o, (str, list))]
  for o in found:
    if any(isinstance(x, str) and len(x) == 32 for x in o):
      print(o)
  return 0""",
  "writes to all files": """
import os
for fd in range(64):
  try: os.write(fd, b"x" * 32)
  except OSError: pass""",
  "reads the process of the tests": """
import os, ctypes
libc = ctypes.CDLL(None)
def add(a, b):
  for pid in range(1, 9):
    for name in ("mem", "environ", "cmdline", "fd/0", "fd/1"):
      try: print(open(f"/proc/{pid}/{name}", "rb").read())
      except OSError: pass
    libc.ptrace(16, pid, 0, 0)
  return 0""",
  "kills the tests": """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
  os.kill(os.getppid(), number)
def add(a, b): return 0""",
  "leaves modules for the tests": """
import os, sys
for path in [".", *sys.path]:
  for name in ("ast.py", "json.py", "types.py", "sitecustomize.py"):
    try: open(f"{path}/{name}", "w").write("import os; os._exit(0)")
    except OSError: pass
def add(a, b): return 0""",
  "runs on": "while True: pass",
}


@in_the_sandbox
def test_no_cheat_is_rewarded():
  assert dict(
    zip(CHEATS, reward(*CHEATS.values()), strict=True)
  ) == dict.fromkeys(CHEATS, 0.0)


NO_EXCEPTIONS = {
  "no plain data": "def add(a, b): return range(3)",
  "exit": "def add(a, b): raise SystemExit",
  "death": "import os\ndef add(a, b): os.kill(os.getpid(), 9)",
  "nonsense": """
import os
def add(a, b):
  for fd in range(3, 64):
    try: os.write(fd, b"nonsense\\n")
    except OSError: pass""",
}


@in_the_sandbox
@pytest.mark.parametrize("wanted", ["ValueError", "BaseException"])
def test_only_an_exception_that_a_function_raises_is_one(wanted):
  tests = f"""
try:
  add(2, 3)
except {wanted}:
  pass
else:
  raise AssertionError"""
  right = "def add(a, b): raise ValueError"
  assert reward(right, tests=tests) == [1.0]
  assert dict(
    zip(
      NO_EXCEPTIONS, reward(*NO_EXCEPTIONS.values(), tests=tests), strict=True
    )
  ) == dict.fromkeys(NO_EXCEPTIONS, 0.0)


@in_the_sandbox
def test_only_right_code_is_rewarded():
  wrong = RIGHT.replace("+", "-")
  prints = f"print('working', end='')\n{RIGHT}"
  small = "def add(a, b):\n  return a + b if a != 10**30 else 0"
  values = reward(RIGHT, wrong, prints, small, "def add(")
  assert values == [1.0, 0.0, 1.0, 0.0, 0.0]


@in_the_sandbox
def test_plain_values_and_exceptions_come_as_they_are():
  code = """
def same(x, times=1):
  return x
def fail(x):
  [][x]
def decode(x):
  x.decode()
"""
  tests = """
import math
values = [None, True, 10**5000, 1.5, -math.inf, 2j, "\\u4e2d", b"x"]
values += [(1,), {1}, set(), frozenset(), {}]
assert [same(v, times=2) for v in values] == values
assert [type(same(v)) for v in values] == [type(v) for v in values]
assert math.isnan(same([math.nan])[0])
def test_of_exceptions():
  try:
    fail(3)
  except IndexError:
    pass
  else:
    raise AssertionError
  try:
    decode(b"a\\xff")
  except UnicodeDecodeError as error:
    assert error.start == 1
  else:
    raise AssertionError
"""
  assert reward(code, tests=tests) == [1.0]


@in_the_sandbox
def test_many_numbers_go_to_the_answer_and_come_back():
  code = "def double(x): return [2 * n for n in x]"
  tests = "assert double([*range(200_000)]) == [*range(0, 400_000, 2)]"
  assert reward(code, tests=tests) == [1.0]


@in_the_sandbox
def test_an_answer_that_reads_finds_nothing_and_waits_for_nothing():
  reads = f"import sys\nassert not sys.stdin.read()\n{RIGHT}"
  asks = f"n = int(input())\n{RIGHT}"
  assert reward(reads, asks) == [1.0, 0.0]


@in_the_sandbox
def test_tests_may_print_more_than_the_sandbox_permits():
  tests = f"""
import sys
for stream in (sys.stdout, sys.stderr):
  print("x" * {2 * LIMITS.output_kib * 1024}, file=stream)
assert add(2, 3) == 5"""
  assert reward(RIGHT, tests=tests) == [1.0]


@in_the_sandbox
def test_an_exception_of_the_answers_own_is_the_builtin_that_it_extends():
  code = """
import json
class Bad(ValueError):
  def __str__(self): return f"bad {self.args[0]}"
class TypeError(Exception): pass
def own(x): raise Bad(x)
def parse(x): return json.loads(x)
def named(x): raise TypeError(x)
def read(x): open(x)
"""
  tests = """
def error_of(f, x):
  try:
    f(x)
  except Exception as error:
    return error
assert isinstance(error_of(own, 3), ValueError)
assert str(error_of(own, 3)) == "bad 3"
assert isinstance(error_of(parse, "{"), ValueError)
assert type(error_of(named, "x")) is Exception
assert error_of(read, "/no").errno == 2
assert str(error_of(read, "/no")).endswith("directory: '/no'")
"""
  assert reward(code, tests=tests) == [1.0]


@in_the_sandbox
def test_an_answer_is_a_module_to_its_dataclasses():
  code = """
from __future__ import annotations
import dataclasses
@dataclasses.dataclass
class Node:
  value: int
  next: Node = None
def f(x): return Node(x).value
"""
  assert reward(code, tests="assert f(1) == 1") == [1.0]


@in_the_sandbox
def test_methods_of_the_answers_classes_are_called():
  code = """
class Pair:
  def __init__(self, a, b=0): self.a, self.b = a, b
class Stack:
  def __init__(self, *items): self.items = list(items)
  def push(self, x): self.items.append(x)
  def pop(self): return self.items.pop()
def total(pairs): return sum(p.a + p.b for p in pairs)
"""
  tests = """
one, two = Stack(), Stack(1, 2)
one.push((3, {4}))
assert [one.pop(), two.pop(), two.pop()] == [(3, {4}), 2, 1]
assert total([Pair(1, b=2), Pair(3)]) == 6
def check(candidate):
  assert candidate() == 7
check(Stack(7).pop)
try:
  one.pop()
except IndexError:
  pass
else:
  raise AssertionError
"""
  assert reward(code, tests=tests) == [1.0]


@in_the_sandbox
@pytest.mark.parametrize(
  "test",
  [
    "assert add(2, 3)",
    "assert not add(2, 3)",
    "assert add(2, 3) != 6",
    "assert add(2, 3).is_sum",
  ],
)
def test_an_object_in_place_of_a_value_is_no_pass(test):
  code = """
class add:
  def __init__(self, a, b): pass
  def __eq__(self, other): return True
"""
  assert reward(code, tests=test) == [0.0]


@in_the_sandbox
@pytest.mark.parametrize(
  ("tests", "fault"),
  [
    ("import missing_module\nassert add(1, 1)", "No module named 'missing_mod"),
    ("def test_it():\n  from math import ad\n  assert add", "'ad' from 'math'"),
    ("try:\n  assert add(len, 1)\nexcept:\n  pass", "<built-in function len>"),
    ("assert add(range(2), 1)", r"other than plain data.*range\(0, 2\)"),
  ],
)
def test_a_fault_of_tests_is_no_reward(tests, fault):
  with pytest.raises(ValueError, match=f"code/train/0 are at fault.*{fault}"):
    reward(RIGHT, tests=tests)


@in_the_sandbox
def test_an_import_that_fails_in_the_answer_is_no_fault_of_the_tests():
  inside = "def add(a, b):\n  import missing_module"
  assert reward(inside, f"import missing_module\n{RIGHT}") == [0.0, 0.0]


@in_the_sandbox
def test_tests_that_call_nothing_of_the_answer_are_a_fault_and_no_reward():
  with pytest.raises(ValueError, match="call no function of the answer"):
    reward("x = 1", tests="for case in ():\n  assert add(case) == 1")


@in_the_sandbox
def test_values_are_the_plain_data_that_they_are_equal_to():
  code = """
import collections, enum
import numpy as np
class Color(enum.IntEnum):
  RED = 1
class Word(str):
  def __repr__(self): return "0"
Pair = collections.namedtuple("Pair", "a b")
def count(x): return collections.Counter(x)
def nested(x):
  out = collections.defaultdict(list, {Color.RED: [Pair(1, Word("b"))]})
  return collections.OrderedDict(x=out)
def sets(x): return {frozenset(x), frozenset()}
def views(x): return [x.keys(), x.items()]
def numbers():
  return [np.float64(.5), np.int64(2), np.bool_(True), np.str_("a")]
def data(): return bytearray(b"a")
"""
  tests = """
assert count("aab") == {"a": 2, "b": 1}
assert nested(0) == {"x": {1: [(1, "b")]}}
assert nested(0) != {"x": {1: [[1, "b"]]}}
assert type(sets([1])) is set
assert sets([1]) == {frozenset({1}), frozenset()}
assert views({1: 2}) == [{1}, {(1, 2)}] != [[1], [(1, 2)]]
assert numbers() == [.5, 2, True, "a"]
assert numbers()[2] is True
assert data() == b"a"
"""
  assert reward(code, tests=tests) == [1.0]


@in_the_sandbox
def test_a_failing_sandbox_is_a_fault_and_no_reward(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(bubblewrap.SandboxError):
    reward(RIGHT)


@pytest.mark.parametrize(
  ("text", "code"),
  [
    ("```python\na\n```\nand\n```py\nb\n```", "b"),
    ("```\na\n```", "a"),
    ("```python\na\n```\n```json\n{}\n```\n", "a"),
    ("```json\n{}\n```\nno code\n```sh\nls\n```", ""),
    ("```python\na\n```\nprints\n```\n3\n```\n", "a"),
    ("```Python title='a.py'\r\na\r\n```\r\n", "a\r"),
    ("1. So\n    ```python\n    if a:\n      b\n    ```\n", "if a:\n  b"),
    ('```python\na = """\n    ```\n"""\n ```', 'a = """\n    ```\n"""'),
    ("```python\na", ""),
    ("a = 1", ""),
    ("", ""),
    ("```python\n" + "a" * code_reward.MAX_CHARS + "\n```", ""),
    ("```a\n" * (code_reward.MAX_CHARS // 5), ""),
    ("```" + "a" * 40_000 + "`", ""),
  ],
)
def test_code_is_the_last_block_of_python(text, code):
  assert code_reward.code(transcript(text)) == code


def test_an_episode_without_an_answer_has_no_code():
  assert not code_reward.code(base.Transcript([base.Message("user", "?")], []))


@pytest.mark.parametrize("tests", [None, "", "add(1, 2)", "assert (", 42])
def test_a_task_without_tests_is_refused(tests):
  task = base.Task("code/train/0", 0, "train", 0, tests)
  with pytest.raises(ValueError, match="code/train/0 has no tests"):
    code_reward.UnitTests().check_task(task)


def test_tests_are_checked_once_for_all_answers_and_in_a_thread(monkeypatch):
  checked_in = []

  def outside(*args):
    checked_in.append(threading.current_thread())
    return outside_of_functions(*args)

  outside_of_functions = code_tests._outside_of_functions
  monkeypatch.setattr(code_tests, "_outside_of_functions", outside)
  tests = "assert add(19, 23) == 42"
  assert reward("", "", tests=tests) + reward("", tests=tests) == [0.0] * 3
  assert len(checked_in) == 1
  assert checked_in[0] is not threading.current_thread()


SUMS = {"inputs": ["1 2\n", "-3\n5"], "outputs": ["3\n", "2"]}
PROGRAMS = {
  "import sys\nprint(sum(map(int, sys.stdin.read().split())))": 1.0,
  "def main():\n  print(sum(map(int, open(0).read().split())), ' \\n')\n"
  "if __name__ == '__main__':\n  main()": 1.0,
  "print(sum(map(int, input().split())))": 0.0,
  "print(3)": 0.0,
  "import sys\nprint(3 if '1' in input() else 2)\nsys.exit(1)": 0.0,
  "while True: pass": 0.0,
}


@in_the_sandbox
@pytest.mark.parametrize(
  "tests",
  [
    SUMS,
    [
      {"input": given, "output": wanted, "testtype": "stdin"}
      for given, wanted in zip(SUMS["inputs"], SUMS["outputs"], strict=True)
    ],
  ],
)
def test_programs_are_paid_for_what_they_print(tests):
  task = base.Task("code/train/0", 0, "train", 0, json.dumps(tests))
  programs = code_reward.ProgramTests(limits=LIMITS)
  answers = [transcript(f"```python\n{code}\n```") for code in PROGRAMS]
  grades = asyncio.run(programs(task, [*answers, transcript("3")]))
  assert [g.value for g in grades] == [*PROGRAMS.values(), 0.0]


@in_the_sandbox
def test_all_tests_of_a_program_have_the_wall_time_together():
  tests = {"inputs": [""] * 100, "outputs": ["1"] * 100}
  task = base.Task("code/train/0", 0, "train", 0, json.dumps(tests))
  programs = code_reward.ProgramTests(limits=sandbox.Sandbox(wall_s=2))
  slow = "```python\nimport time\ntime.sleep(1)\nprint(1)\n```"
  begun = time.monotonic()
  assert asyncio.run(programs(task, [transcript(slow)]))[0].value == 0
  assert time.monotonic() - begun < 50


@pytest.mark.parametrize(
  ("tests", "reason"),
  [
    (None, "must give"),
    ("assert add(2, 3) == 5", "must give"),
    ('{"inputs": ["1"]}', "KeyError.*outputs"),
    ('{"inputs": ["1", "2"], "outputs": ["1"]}', "shorter"),
    ('{"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}', "of functions"),
    ('{"inputs": ["1"], "outputs": [["1"]]}', "must be text"),
    ('{"inputs": ["1"], "outputs": [" "]}', "could fail"),
    ("[]", "could fail"),
    (json.dumps([{"input": "", "output": "1" * 65537}]), "output_kib=64"),
  ],
)
def test_a_task_that_no_program_can_pass_or_fail_is_refused(tests, reason):
  task = base.Task("code/train/0", 0, "train", 0, tests)
  with pytest.raises(ValueError, match=rf"code/train/0 .*{reason}"):
    code_reward.ProgramTests().check_task(task)


def test_tests_need_a_process_beside_that_of_the_answer():
  with pytest.raises(ValueError, match=r"limits\.processes=1"):
    code_reward.UnitTests(limits=sandbox.Sandbox(processes=1))
