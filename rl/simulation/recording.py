"""Episodes of a real run, whose turns, ids and waits a simulated one repeats.

Engines share what conversations have in common, which lengths do not tell; and
members of a group that said the same may wait equally long.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from rl.data import trajectory
from rl.simulation import workload as workload_lib


class RecordedDraws(workload_lib.Draws):
  """Draws in which turns, lengths and steps are those of recorded groups.

  A task is given the next group when it is first asked for, over and over.

  Args:
    groups: at least one; all of one size. A step takes the `env_s` of its turn.
  """

  def __init__(
    self,
    workload: workload_lib.Workload,
    seed: int,
    groups: Sequence[trajectory.Group],
  ):
    super().__init__(workload, seed)
    self._groups = groups
    self._places: dict[int, int] = {}

  def episode(self, task: int, number: int = 0) -> trajectory.Trajectory:
    """Returns the recorded episode of a play of a task."""
    place = self._places.setdefault(task, len(self._places))
    members = self._groups[place % len(self._groups)].trajectories
    return members[number % len(members)]

  def of_task(self, what: workload_lib.Quantity, task: int) -> float:
    """Returns the length of a prompt, or a draw."""
    if what == "prompt_tokens":
      return float(len(self.episode(task).turns[0].context))
    return super().of_task(what, task)

  def of_turn(
    self,
    what: workload_lib.Quantity,
    member: workload_lib.GroupMember,
    turn: int = 0,
  ) -> float:
    """Returns the seconds of a step, or a draw."""
    if what == "step_s":
      return self.episode(*member).turns[turn].env_s
    return super().of_turn(what, member, turn)

  def count(
    self,
    what: workload_lib.Quantity,
    member: workload_lib.GroupMember,
    turn: int = 0,
  ) -> int:
    """Returns a number of turns or ids, or a draw."""
    turns = self.episode(*member).turns
    match what:
      case "turns":
        return len(turns)
      case "answer_tokens":
        return len(turns[turn].tokens)
      case "reply_tokens":
        return len(turns[turn + 1].context)
    return super().count(what, member, turn)

  def ids(
    self, member: workload_lib.GroupMember, turn: int
  ) -> tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " T"]]:
    """Returns the context and the answer of a turn."""
    turns = self.episode(*member).turns
    before = [ids for t in turns[:turn] for ids in (t.context, t.tokens)]
    return (
      np.concatenate([*before, turns[turn].context]),
      turns[turn].tokens,
    )
