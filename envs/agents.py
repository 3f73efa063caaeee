"""Agents as a source: a program of yours is started for every episode.

  run: task file, variables -> the program -> its last line -> reward
                                   |
                                   +-- asks the run for its answers

The program needs no change for training. It finds the server of its answers
where clients of the OpenAI and Anthropic APIs look for it:

  OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
  TASK_FILE     JSON: {"id", "index", "split", "seed", "row"}

It ends with status 0, and the last line of its stdout is a JSON object with its
reward, {"reward": 1.0}, and maybe numbers of its own, "metrics": {...}.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from envs import base, extras, guarded_process
from envs import rows as rows_lib

_TAIL = 1 << 16


class AgentFailed(Exception):
  """The program failed, or did not print its reward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenAI:
  """Episodes of a program that asks for answers over HTTP.

  A program that fails, or that `rollout.step_s` passes without a request, is a
  fault of its own trajectory, with the end of what it wrote to stderr. At its
  end, and at that of the run, all that it has started is killed. Linux only.

  Attributes:
    command: the program and its arguments, without a shell.
    rows: None: the task is its seed alone.
    answer: the field of a row with the final answer, for rewards that compare.
    prints_reward: False leaves the reward to the run's, which grades the last
      conversation of the program; its output is ignored then.
    name: the first part of every task id.
  """

  command: tuple[str, ...]
  rows: rows_lib.Rows | None = None
  answer: str | None = None
  prints_reward: bool = True
  name: str = "agent"

  def __post_init__(self) -> None:
    if not self.command or not self.command[0]:
      raise ValueError("command=() is empty; use ('python', 'agent.py')")
    if self.answer is not None and self.rows is None:
      raise ValueError(
        f"answer={self.answer!r} is the name of a row's field; give rows"
      )
    base.check_name(self.name)

  def validate(self) -> None:
    """Raises ValueError on a program or a row that is not there."""
    if sys.platform != "linux":
      raise ValueError(
        f"programs are played on Linux, not on {sys.platform}; use agents in "
        "the process of the run"
      )
    extras.require("uvicorn", "serve", "environment=agents.OpenAI")
    if shutil.which(self.command[0]) is None:
      raise ValueError(
        f"command={list(self.command)}: no program {self.command[0]} is found; "
        "give its path, or add its directory to PATH"
      )
    for record in self.rows.known() if self.rows is not None else ():
      record.answer(self.answer)

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a task; its seed is the number of its row, if there are rows."""
    return rows_lib.task(self.name, self.rows, self.answer, index, split)

  def __call__(self, task: base.Task) -> Any:
    """Returns an agent (`base.Agent`), which starts the program in `run`."""
    return _Program(self, task)


class _Program:
  """The program of one episode, with its task file."""

  def __init__(self, source: OpenAI, task: base.Task):
    self._source = source
    self._task = task
    self._files = contextlib.ExitStack()

  async def run(self, endpoint: base.Endpoint) -> base.AgentResult:
    process = await guarded_process.GuardedProcess.start(
      self._source.command, env=self._variables(endpoint), reads_stdin=False
    )
    reading = asyncio.create_task(_tail(process.stdout))
    try:
      status = await process.wait()
      said = await reading
    finally:
      reading.cancel()
      await asyncio.wait([reading])
      how = await process.end()
    if status:
      raise AgentFailed(f"the program {how}")
    if not self._source.prints_reward:
      return base.AgentResult(None)
    return _result(said)

  def _variables(self, endpoint: base.Endpoint) -> Mapping[str, str]:
    # Clients may read either, and some the second alone if there are both.
    names = "NO_PROXY", "no_proxy"
    direct = [*(os.environ.get(name) for name in names), "127.0.0.1"]
    return {
      **os.environ,
      "OPENAI_BASE_URL": endpoint.openai_url,
      "OPENAI_API_KEY": endpoint.key,
      "ANTHROPIC_BASE_URL": endpoint.url,
      "ANTHROPIC_API_KEY": endpoint.key,
      **dict.fromkeys(names, ",".join(filter(None, direct))),
      "TASK_FILE": self._task_file(),
    }

  def _task_file(self) -> str:
    task, rows, row = self._task, self._source.rows, None
    if rows is not None:
      row = dict(rows.record(task.seed, task.split).fields)
    keys = ("id", "index", "split", "seed")
    data = {key: getattr(task, key) for key in keys} | {"row": row}
    file = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115
    self._files.enter_context(file)
    json.dump(data, file, default=str)
    file.flush()
    return file.name

  async def close(self) -> None:
    self._files.close()


async def _tail(stream: asyncio.StreamReader) -> str:
  """Returns the end of a stream."""
  tail = b""
  while chunk := await stream.read(_TAIL):
    tail = (tail + chunk)[-_TAIL:]
  return tail.decode(errors="replace").strip()


def _result(stdout: str) -> base.AgentResult:
  """Returns the result on the last line of what a program printed."""
  last = stdout.splitlines()[-1] if stdout else ""
  try:
    said = json.loads(last)
    return base.AgentResult(said["reward"], said.get("metrics", {}))
  except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
    raise AgentFailed(
      'the last line of its stdout must be like {"reward": 1.0}, not '
      f"{last[:200]!r}"
    ) from None
