"""Who the policy is held against: its own beginnings, or a teacher."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from models import config as model_config
from models import sharding, transformer
from models.hf import load
from rl.data import batch as batch_lib
from rl.train import learner, train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initial:
  """The weights that the run began with, after a warm start if there is one.

  Attributes:
    memory: "device" keeps a second copy of the parameters there; "host" keeps
      it in the memory of the host, and moves it for every batch.
  """

  memory: train_state.Memory = "device"
  short_name = "initial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
  """The frozen weights below the adapters: no copy of anything.

  A policy with adapters (`models.lora`) alone has them.
  """

  short_name = "base"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
  """Another model with the same ids: on-policy distillation.

  Attributes:
    directory: a Hugging Face checkpoint of it, such as `launch.export` writes.
    memory: see `Initial`.
  """

  model: model_config.ModelConfig
  directory: str
  memory: train_state.Memory = "device"
  short_name = "teacher"

  def check(self) -> None:
    """Raises ValueError when no checkpoint of the model is there.

    Reads headers and config.json only; touches no device.
    """
    try:
      load.check(self.directory, self.model)
    except load.Unusable as error:
      raise ValueError(f"algorithm.reference.directory={error}") from error


Reference = Initial | Base | Teacher
"""Where the engine's choices of experts are replayed, the first two take them
as well, so that a policy that has not moved is at no distance."""
Program = Callable[[train_state.TrainState, batch_lib.Batch], Array]
"""(state, placed batch) -> log-probabilities [B, L], on the learner's mesh."""


def memory(reference: Reference | None) -> train_state.Memory | None:
  """Returns where a state is to keep its first parameters; None: nowhere."""
  return reference.memory if isinstance(reference, Initial) else None


def program(
  reference: Reference | None,
  programs: learner.Learner,
  layout: sharding.Layout,
  temperature: float,
) -> Program | None:
  """Returns what scores batches under the reference.

  Args:
    programs: of the policy.
    temperature: that of sampling, for a teacher as for its student.
  """
  match reference:
    case None:
      return None
    case Base():
      return lambda state, placed: programs.score_base(state.params, placed)
    case Initial():
      where = jax.tree.map(lambda x: x.sharding, programs.abstract.params)
      return lambda state, placed: programs.score(
        jax.device_put(state.reference, where), placed
      )
    case Teacher():
      return _Taught(reference, layout, temperature)


class _Taught:
  """A teacher that is loaded when it is first asked, on the mesh's thread."""

  def __init__(
    self, teacher: Teacher, layout: sharding.Layout, temperature: float
  ):
    self._teacher = teacher
    self._layout = layout
    self._score = learner.score_program(teacher.model, layout, temperature)
    self._where = layout.tree(transformer.logical_axes(teacher.model))
    self._params: Any = None

  def __call__(
    self, state: train_state.TrainState, placed: batch_lib.Batch
  ) -> Array:
    """Returns the teacher's log-probabilities; the policy's state is unused."""
    del state
    if self._params is None:
      teacher = self._teacher
      with jax.transfer_guard("allow"):
        params = load.load(teacher.directory, teacher.model, self._layout)
      kind = train_state.MEMORY_KINDS[teacher.memory]
      self._params = jax.device_put(
        params, jax.tree.map(lambda x: x.with_memory_kind(kind), self._where)
      )
    # Experts that the engine recorded are those of the policy. What is there
    # already does not move.
    own = placed._replace(experts=None)
    return self._score(jax.device_put(self._params, self._where), own)
