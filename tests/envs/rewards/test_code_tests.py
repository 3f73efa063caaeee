"""Tests as text: those that run, and those that only look like it."""

import pytest

from envs.rewards import code_tests


@pytest.mark.parametrize(
  "tests",
  [
    "assert add(2, 3) == 5",
    "for n in (1, 2):\n  if n:\n    with open('x'):\n      assert add(n, 0)",
    "try:\n  add()\nexcept TypeError:\n  pass\nelse:\n  raise AssertionError",
    "def test_add(base=1):\n  assert add(base, 0) == base",
    "def check(f):\n  assert f(2, 3) == 5\ncheck(add)",
    "def same(a, b):\n  assert a == b\ndef test_add():\n  same(add(1, 1), 2)",
    "def run():\n  assert add(0, 0) == 0\nif __name__ == 'tests':\n  run()",
    "class Raises:\n  def __exit__(self, *of):\n    assert of[0]\n"
    "with Raises():\n  add()",
    "class TestAdd:\n  def test_zero(self):\n    assert add(0, 0) == 0\n"
    "TestAdd().test_zero()",
    "@given(integers())\ndef test_add(n):\n  assert add(n, 0) == n",
    "def test_it():\n  with pytest.raises(TypeError):\n    add(1, '')",
    "import numpy as np\nnp.testing.assert_allclose(add(.1, .2), .3)",
    "import asyncio\nasync def test_it():\n  assert await add(1, 1) == 2\n"
    "asyncio.run(test_it())",
  ],
)
def test_tests_that_run_are_accepted(tests):
  code_tests.check(tests)


@pytest.mark.parametrize(
  ("tests", "reason"),
  [
    ("add(2, 3)", "there is no assert"),
    ("def check(f):\n  assert f(2, 3) == 5", "`check` is never called"),
    (
      "def run():\n  assert add(2, 3)\nif __name__ == '__main__':\n  run()",
      '`run` is never called, and `__name__` is "tests"',
    ),
    (
      "class TestAdd:\n  def test_it(self):\n    assert add(2, 3) == 5",
      "methods of `TestAdd` are never called",
    ),
    (
      "import unittest\nclass T(unittest.TestCase):\n"
      "  def test_it(self):\n    assert add(2, 3) == 5\nassert add(0, 0) == 0",
      "methods of `T` are never called",
    ),
    (
      "class T(unittest.TestCase):\n"
      "  def test_it(self):\n    self.assertEqual(add(2, 3), 5)",
      "methods of `T` are never called",
    ),
    (
      "@pytest.mark.asyncio\nasync def test_it():\n  assert add(2, 3) == 5",
      "nothing awaits `test_it`",
    ),
    (
      "def test_it(tmp_path, *, n):\n  assert add(2, 3) == 5",
      "nothing gives `test_it` `tmp_path`, `n`",
    ),
    (
      "@pytest.mark.parametrize('n', [1])\ndef test_it(n):\n  assert add(n)",
      "nothing gives `test_it` `n`",
    ),
  ],
)
def test_tests_that_do_not_run_are_refused(tests, reason):
  with pytest.raises(ValueError, match=reason):
    code_tests.check(tests)


@pytest.mark.parametrize(
  "tests",
  [
    "assert pow(2, 3) == 8",
    "assert _add(2, 3) == 5",
    "import math\ndef test_it():\n  x = 2\n  assert sum([x]) == math.ceil(x)",
    "def add(a, b):\n  return a + b\ndef test_it():\n  assert add(2, 3) == 5",
    "from solution import add\ndef test_it():\n  assert add(2, 3) == 5",
  ],
)
def test_tests_of_nothing_but_builtins_are_refused(tests):
  with pytest.raises(ValueError, match=r"no function of .* without an import"):
    code_tests.check(tests)


def test_a_name_that_one_test_keeps_for_itself_is_the_answers_in_another():
  code_tests.check(
    "def test_a():\n  add = sum\n  assert add([1]) == 1\n"
    "def test_b():\n  assert add(2, 3) == 5"
  )
