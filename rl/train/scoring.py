"""Scores the tokens of trajectories before their gradient is taken.

  trajectories -> packed rows -> scores on the mesh -> arrays by trajectory

Letters: T sampled tokens of a trajectory.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from models import policy as policy_lib
from models import sharding
from models.hf import load
from rl.algorithms import kl, references
from rl.data import batch as batch_lib
from rl.data import trajectory
from rl.runtime import mesh_thread
from rl.train import learner, train_state

Tokens = Sequence[Float32[np.ndarray, " _"]]
"""An array for each trajectory, with an entry for each of its T tokens."""


class Scores(NamedTuple):
  """Scores by trajectory; None if not needed.

  Attributes:
    old: log-probabilities under the policy that ratios are against, in nats;
      None if that is the policy that sampled.
    reference: the same under the policy to stay close to.
    values: the critic's, of the state before each token.
    finals: the critic's, of the last state of each trajectory.
  """

  old: Tokens | None = None
  reference: Tokens | None = None
  values: Tokens | None = None
  finals: Sequence[float] | None = None

  @property
  def columns(self) -> dict[batch_lib.Column, Tokens]:
    """Returns the scores that are there, as columns of a batch."""
    named: dict[batch_lib.Column, Tokens | None] = {
      "old": self.old,
      "reference": self.reference,
      "values": self.values,
    }
    return {name: own for name, own in named.items() if own is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
  """Runs the programs that score, on the thread of their mesh.

  Attributes:
    pack: lays trajectories into rows; see `batch.pack`.
    reference: scores under the reference; None when there is none.
  """

  programs: learner.Learner
  thread: mesh_thread.MeshThread
  pack: Callable[[Sequence[trajectory.Trajectory]], batch_lib.Packed]
  reference: learner.ScoreProgram | None

  async def score(
    self,
    trajectories: Sequence[trajectory.Trajectory],
    state: train_state.TrainState,
    old: Any | None,
    critic: tuple[Any, Any] | None = None,
  ) -> Scores:
    """Returns the scores of every trajectory.

    Args:
      old: parameters of the policy that ratios are against, or None.
      critic: the parameters and the head that give values, or None.
    """
    if old is None and self.reference is None and critic is None:
      return Scores()
    if critic is not None:
      trajectories = [_with_unanswered(one) for one in trajectories]
    packed = self.pack(trajectories)
    programs, reference = self.programs, self.reference
    under_old = under_reference = values = None
    if old is not None:
      under_old = functools.partial(programs.score, old)
    if reference is not None:
      under_reference = functools.partial(reference, state)
    if critic is not None:
      values = functools.partial(programs.values, *critic)
    found = Scores(
      old=await self._collect(packed, under_old),
      reference=await self._collect(packed, under_reference),
    )
    states = await self._collect(packed, values, batch_lib.collect_states)
    if states is None:
      return found
    return found._replace(
      values=[own[:-1] for own in states],
      finals=[float(own[-1]) for own in states],
    )

  async def _collect(
    self,
    packed: batch_lib.Packed,
    score: Callable[[batch_lib.Batch], jax.Array] | None,
    collect: Callable[..., Tokens] = batch_lib.collect,
  ) -> Tokens | None:
    if score is None:
      return None
    scores = [
      await self.thread.run("forward", _on_host, score, batch)
      for batch in packed.batches
    ]
    return collect(packed, scores)


def _with_unanswered(one: trajectory.Trajectory) -> trajectory.Trajectory:
  """Returns it up to the state in which it was cut, if it was."""
  if not len(one.unanswered):
    return one
  nothing = np.zeros(0, np.int32)
  rest = trajectory.Turn(
    context=one.unanswered,
    tokens=nothing,
    logprobs=np.zeros(0, np.float32),
    versions=nothing,
    stop="length",
  )
  return dataclasses.replace(one, turns=[*one.turns, rest])


def _on_host(
  score: Callable[[batch_lib.Batch], jax.Array], batch: batch_lib.Batch
) -> np.ndarray:
  return jax.device_get(score(batch))


def penalties(
  penalty: kl.KlPenalty | None,
  trajectories: Sequence[trajectory.Trajectory],
  scores: Scores,
) -> Tokens | None:
  """Returns the KL penalty on the reward of each token; None without one.

  It compares the policy that ratios are against with the reference.
  """
  if penalty is None:
    return None
  if scores.reference is None:
    raise ValueError("a KL penalty without log-probabilities of a reference")
  old = scores.old if scores.old is not None else behaviour(trajectories)
  if not old:
    return []
  gap = np.concatenate(old) - np.concatenate(scores.reference)
  # Each size is a program of its own: powers of two keep them few.
  padded = np.zeros(1 << len(gap).bit_length(), np.float32)
  padded[: len(gap)] = gap
  nats = np.asarray(kl.estimate(penalty.estimator, jnp.asarray(padded)))
  ends = np.cumsum([len(own) for own in old])[:-1]
  return np.split(np.float32(penalty.weight) * nats[: len(gap)], ends)


def behaviour(trajectories: Sequence[trajectory.Trajectory]) -> Tokens:
  """Returns the log-probabilities that the engine recorded."""
  return [
    np.concatenate([turn.logprobs for turn in member.turns])
    for member in trajectories
  ]


def reference_program(
  reference: references.Reference | None,
  programs: learner.Learner,
  layout: sharding.Layout,
  temperature: float,
) -> learner.ScoreProgram | None:
  """Returns the program that scores batches under the reference.

  Args:
    programs: of the policy.
    temperature: that of sampling, for a teacher as for its student.
  """
  if reference is not None and programs.score_reference is not None:
    return programs.score_reference
  match reference:
    case None:
      return None
    case references.Base():
      return lambda state, batch: programs.score_base(state.params, batch)
    case references.Initial():
      where = jax.tree.map(lambda x: x.sharding, programs.abstract.params)
      return lambda state, batch: programs.score(
        jax.device_put(state.reference, where), batch
      )
    case references.Teacher():
      return _TeacherProgram(reference, layout, temperature)


class _TeacherProgram:
  """A teacher that is loaded when it is first asked, on the mesh's thread."""

  def __init__(
    self,
    teacher: references.Teacher,
    layout: sharding.Layout,
    temperature: float,
  ):
    self._teacher = teacher
    self._layout = layout
    self._score = learner.score_program(teacher.model, layout, temperature)
    self._where = layout.tree(policy_lib.of(teacher.model).axes)
    self._params: Any = None

  def __call__(
    self, state: train_state.TrainState, batch: batch_lib.Batch
  ) -> Array:
    """Returns the teacher's log-probabilities; the policy's state is unused."""
    del state
    if self._params is None:
      teacher = self._teacher
      with jax.transfer_guard("allow"):
        params = load.load(teacher.directory, teacher.model, self._layout)
      kind = references.MEMORY_KINDS[teacher.memory]
      self._params = jax.device_put(
        params, jax.tree.map(lambda x: x.with_memory_kind(kind), self._where)
      )
    # Experts that the engine recorded are those of the policy.
    own = batch._replace(experts=None)
    params = jax.device_put(self._params, self._where)
    own = jax.device_put(own, self._layout.sharding("batch", "length"))
    return self._score(params, own)
