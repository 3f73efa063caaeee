"""A Python interpreter as a tool: the agent's code, in a sandbox of its own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from envs import base
from envs.sandbox import bubblewrap, sandbox, session
from envs.tools import tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Python:
  """The tool `python`, whose variables live as long as the episode.

  A call returns what the code printed, the value of its last expression, or its
  traceback. One that overruns a limit ends the interpreter; the result says so,
  and the next call begins with another.

  Attributes:
    limits: of one episode, except for wall time and output: of one call.
  """

  limits: sandbox.Sandbox = sandbox.Sandbox()

  def validate(self) -> None:
    """Raises ValueError where there is no sandbox."""
    try:
      bubblewrap.check()
    except bubblewrap.SandboxError as error:
      raise ValueError(str(error)) from error
    tools.of(_Signature, frozenset())

  async def open(self) -> "_Interpreter":
    """Returns an interpreter, which starts when it is called."""
    return _Interpreter(self.limits)


class _Signature:
  """The tool as the agent sees it."""

  def python(self, code: str) -> str:
    """Runs Python code, and returns its output and the last value.

    Variables, imports and files in the working directory stay for later calls.
    There is no network.

    Args:
      code: statements; the value of a last expression is shown.
    """
    return code


class _Interpreter:
  """The interpreter of one episode, begun again where it has ended."""

  def __init__(self, limits: sandbox.Sandbox):
    self._limits = limits
    self._tools = tools.of(_Signature, frozenset())
    self._session = session.PythonSession(limits)

  @property
  def schemas(self) -> Sequence[Mapping[str, Any]]:
    return [tool.schema for tool in self._tools.values()]

  async def call(self, asked: base.ToolCall) -> tuple[str, bool]:
    code, is_wrong = tools.call(self._tools, _Signature(), asked)
    if is_wrong:
      return code, True
    if self._session.is_over:
      self._session = session.PythonSession(self._limits)
    done = await self._session.call(code)
    text = done.stdout + done.stderr
    if self._session.is_over:
      text += f"\n{self._end(done)} All variables are lost."
    return text.strip("\n"), done.status != "ok" or self._session.is_over

  async def close(self) -> None:
    await self._session.close()

  def _end(self, done: sandbox.Execution) -> str:
    if done.status == "timeout":
      limits = self._limits
      return (
        f"error: stopped after {limits.wall_s:g} s of one call, or "
        f"{limits.cpu_s} s of CPU time of all."
      )
    if done.status == "output":
      return f"error: stopped after {self._limits.output_kib} KiB of output."
    return f"error: the interpreter ended with exit code {done.code}."
