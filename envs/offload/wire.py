"""Tasks, transcripts and grades as JSON, for rewards computed elsewhere.

  {"reward": IDENTITY, "task": {..}, "transcripts": [{..}, ..]}
  -> {"grades": [{"value": 1.0, "parts": {..}}, ..], "cold_start": false}
     or {"error": TEXT}

Python's JSON keeps every float as it is, nan included, so grades are equal.
"""

import dataclasses
import json
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs import base
from envs.offload import calls

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere(calls.Caller):
  """A stateless reward that is computed elsewhere, with the same grades.

  Attributes:
    reward: computed there.
  """

  reward: base.Reward
  stateless = True

  def __post_init__(self) -> None:
    if not self.reward.stateless:
      raise ValueError(
        f"reward {type(self.reward).__name__} is not stateless, so it cannot "
        "be computed elsewhere; take away the "
        f"{type(self).__name__} around it"
      )

  @property
  def compares(self) -> bool:
    """True if the reward compares the members of a group."""
    return base.compares(self.reward)

  @property
  def alone(self) -> base.Reward:
    """The reward of an episode without a group, computed there too."""
    return dataclasses.replace(self, reward=base.alone(self.reward))

  def check_task(self, task: base.Task) -> None:
    """Raises ValueError on a task that the reward cannot grade."""
    base.check_task(self.reward, task)

  async def __call__(
    self, task: base.Task, transcripts: Sequence[base.Transcript]
  ) -> Sequence[base.Grade]:
    """Returns one grade for each transcript, in order."""
    return await self.call(write_request(self.reward, task, transcripts))


def identity(reward: base.Reward) -> str:
  """Returns the settings of a reward, which are equal where grades must be."""
  return _ADDRESS.sub("", repr(core(reward)))


def core(reward: Any) -> base.Reward:
  """Returns the reward itself, without the places where it is computed."""
  while isinstance(reward, Elsewhere):
    reward = reward.reward
  return reward


def write_request(
  reward: base.Reward, task: base.Task, transcripts: Sequence[base.Transcript]
) -> bytes:
  """Returns a request as JSON."""
  data = {
    "reward": identity(reward),
    "task": dataclasses.asdict(task),
    "transcripts": [dataclasses.asdict(t) for t in transcripts],
  }
  return json.dumps(data, default=_number).encode()


def read_request(
  text: bytes,
) -> tuple[str, base.Task, list[base.Transcript]]:
  """Returns the identity of the reward, the task and the transcripts.

  Raises:
    ValueError: it is no request.
  """
  try:
    data = json.loads(text)
    transcripts = [
      base.Transcript(
        [_message(**m) for m in t["messages"]],
        [float(reward) for reward in t["step_rewards"]],
      )
      for t in data["transcripts"]
    ]
    return str(data["reward"]), base.Task(**data["task"]), transcripts
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f"no request for grades: {type(error).__name__}: {error}"
    ) from error


def _message(tool_calls: Sequence[Mapping[str, Any]], **rest: Any) -> Any:
  return base.Message(
    **rest, tool_calls=tuple(base.ToolCall(**call) for call in tool_calls)
  )


def write_grades(
  grades: object, count: int, *, cold_start: bool = False
) -> bytes:
  """Returns the grades of a reward as JSON.

  Args:
    cold_start: this call had to wait until something was started.

  Raises:
    ValueError: the reward did not return so many grades.
  """
  found = base.checked_grades(grades, count, "reward")
  data = [dataclasses.asdict(grade) for grade in found]
  answer = {"grades": data, "cold_start": cold_start}
  return json.dumps(answer, default=_number).encode()


def read_grades(text: bytes, sender: str) -> tuple[list[base.Grade], bool]:
  """Returns grades, whose numbers are still to be checked, and `cold_start`.

  Raises:
    CallError: it is an error, or no answer; names the sender.
  """
  try:
    data = json.loads(text)
    if "error" in data:
      raise calls.CallError(f"{sender}: {data['error']}")
    grades = [base.Grade(g["value"], dict(g["parts"])) for g in data["grades"]]
    return grades, data.get("cold_start") is True
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise calls.CallError(
      f"{sender} answered {text[:60]!r}, which are no grades"
    ) from error


def _number(value: object) -> float:
  """Returns numbers of numpy and the like as those of Python."""
  if isinstance(value, numbers.Real):
    return float(value)
  raise TypeError(f"{type(value).__name__} is no JSON")
