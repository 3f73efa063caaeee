"""Rewards of code that a model wrote: its unit tests, or what it prints."""

import asyncio
import dataclasses
import functools
import json
import os
import pathlib
import re
import secrets
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envs import base, call_clock, threads
from envs.rewards import answers, code_harness, code_tests
from envs.sandbox import sandbox

MAX_CHARS = 50_000
"""Length of an answer above which its code is not tried."""

# Possessive: a fence of spaces or letters alone would take time squared.
_FENCE = re.compile(r"([ \t]*+)```[ \t]*+(\w*+)[^`]*+")
_FENCE_ENDS = {" " * indent + "```" for indent in range(4)}
_PYTHON = {"python", "py", "python3"}
# More at once would only make each other late.
_SLOTS = call_clock.LoopPlaces(os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitTests:
  """1 if the last block of Python of the last message passes the task's tests.

  The tests are the text in `base.Task.answer`: statements with `assert`, and
  functions `test...` without arguments. They call functions of the answer by
  name, with copies of plain data: None, bools, numbers, text, bytes, and lists,
  tuples, sets, frozensets and dicts of these. So no argument is a function, and
  no change of one in place is seen. They call methods of its classes' objects,
  as in `Solution().add(2, 3)`. A builtin's name is Python's own, a name that
  begins with _ is never the answer's, and what tests import they import
  themselves. They run in another process than the answer, which can neither
  read them nor end them with a pass.

  Tests that pass without a call of the answer, import what is not there, or
  call with other data, are a fault, and no reward.

  Attributes:
    limits: of one answer with its tests. `wall_s` below
      `rollout.grading.deadline_s`, or an endless answer is a fault, not 0.
  """

  limits: sandbox.Sandbox = sandbox.Sandbox()
  stateless = True

  def __post_init__(self) -> None:
    if self.limits.processes < 2:
      raise ValueError(
        f"limits.processes={self.limits.processes}: tests need 2 at least"
      )

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task without tests, or with idle ones."""
    _tests(task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order.

    Raises:
      SandboxError: this machine has no sandbox.
      ValueError: the task's tests are at fault, not an answer.
    """
    tests = await threads.call(_tests, task)
    passes = functools.partial(self._passes, tests, task.id)
    return await _grades("unit_tests", transcripts, passes)

  async def _passes(self, tests: str, task_id: str, answer: str) -> bool:
    word = secrets.token_hex(16)
    done = await self.limits.run(_harness(), json.dumps([answer, tests, word]))
    if done.status != "ok" or not done.stdout.startswith(word):
      return False
    if fault := done.stdout.removeprefix(word):
      raise ValueError(f"tests of task {task_id} are at fault: {fault}")
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTests:
  """1 if the last block of Python is a program that prints what is expected.

  It is run once for each test, with the test's input as its stdin, and must
  print the lines of the test's output, up to white space around each and around
  all. The tests are JSON in `base.Task.answer`, as in APPS, TACO and
  LiveCodeBench: {"inputs": [text, ..], "outputs": [text, ..]}, or
  [{"input": text, "output": text}, ..].

  Attributes:
    limits: of one answer. `wall_s` is for all its tests together, and below
      `rollout.grading.deadline_s`, or an endless answer is a fault, not 0.
  """

  limits: sandbox.Sandbox = sandbox.Sandbox()
  stateless = True

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task without tests that a program can pass."""
    self._tests(task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order.

    Raises:
      SandboxError: this machine has no sandbox.
      ValueError: the task's tests are at fault, not an answer.
    """
    tests = await threads.call(self._tests, task)
    passes = functools.partial(self._passes, tests)
    return await _grades("program_tests", transcripts, passes)

  def _tests(self, task: base.Task) -> list[tuple[str, str]]:
    tests = _program_tests(task)
    longest = max(len(output) for _, output in tests)
    if longest > self.limits.output_kib * 1024:
      raise ValueError(
        f"task {task.id} expects {longest} characters, above limits.output_kib="
        f"{self.limits.output_kib}; raise that"
      )
    return tests

  async def _passes(
    self, tests: Sequence[tuple[str, str]], answer: str
  ) -> bool:
    end_s = time.monotonic() + self.limits.wall_s
    for given, expected in tests:
      # A sandbox has at least 0.1 s.
      if (left_s := end_s - time.monotonic()) < 0.1:
        return False
      limits = dataclasses.replace(self.limits, wall_s=left_s)
      done = await limits.run(answer, given)
      if done.status != "ok" or _lines(done.stdout) != _lines(expected):
        return False
    return True


async def _grades(
  name: str,
  transcripts: Sequence[base.Transcript],
  passes: Callable[[str], Awaitable[bool]],
) -> list[base.Grade]:
  """Returns one grade for each transcript: whether its code passes.

  An answer without code does not, and each other waits for a place.
  """

  async def grade(answer: str) -> base.Grade:
    if not answer.strip():
      return base.Grade.single(name, False)
    async with _SLOTS.place():
      return base.Grade.single(name, await passes(answer))

  return await asyncio.gather(*(grade(code(t)) for t in transcripts))


def code(transcript: base.Transcript) -> str:
  """Returns the last block of Python in the last answer; "" if it has none.

  Blocks without a language count where none is of Python, as they may be what
  the code prints.
  """
  text = answers.last(transcript)
  if len(text) > MAX_CHARS:
    return ""
  named, unnamed = "", ""
  fence, lines = None, []
  # All blocks, in pairs: the end of another language's must not begin one.
  for line in text.split("\n"):
    if fence is None:
      fence, lines = _FENCE.fullmatch(line), []
    elif (end := line.rstrip()) not in _FENCE_ENDS and end != f"{fence[1]}```":
      lines.append(line)
    else:
      block = "\n".join(lines)
      block = textwrap.dedent(block) if fence[1] else block
      if fence[2].lower() in _PYTHON:
        named = block
      elif not fence[2]:
        unnamed = block
      fence = None
  return named or unnamed


def _tests(task: base.Task) -> str:
  out = f"task {task.id} has no tests for reward unit_tests"
  if not isinstance(task.answer, str):
    raise ValueError(f"{out}: its source must give them as base.Task.answer")
  try:
    code_tests.check(task.answer)
  except SyntaxError as error:
    raise ValueError(
      f"{out}, but a text that is not Python: {error}"
    ) from error
  except ValueError as error:
    raise ValueError(f"{out} that could fail: {error}") from error
  return task.answer


def _program_tests(task: base.Task) -> list[tuple[str, str]]:
  """Returns pairs of an input and the expected output.

  Raises:
    ValueError: there are none, or a program without a line passes them.
  """
  out = f"task {task.id} has no tests for reward program_tests"
  try:
    tests: Any = json.loads(task.answer or "")
    if isinstance(tests, dict):
      if tests.get("fn_name"):
        raise ValueError(f"fn_name={tests['fn_name']!r} is of functions")
      pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    else:
      pairs = ((test["input"], test["output"]) for test in tests)
    pairs = list(pairs)
  except (ValueError, TypeError, LookupError, RecursionError) as error:
    raise ValueError(
      f'{out}: its source must give {{"inputs": [..], "outputs": [..]}} or '
      f'[{{"input": .., "output": ..}}, ..] as JSON: {error!r}'
    ) from error
  if not all(isinstance(text, str) for pair in pairs for text in pair):
    raise ValueError(f"{out}: inputs and outputs must be text")
  if not any(output.strip() for _, output in pairs):
    raise ValueError(f"{out} that could fail: no output has any text")
  return pairs


def _lines(text: str) -> list[str]:
  return [line.strip() for line in text.strip().split("\n")]


@functools.cache
def _harness() -> str:
  return pathlib.Path(code_harness.__file__).read_text()
