"""Settings of the reference policy: the initial weights, or a teacher.

`rl.train.scoring` turns them into a program.
"""

import dataclasses
from typing import Literal

from models import config as model_config
from models.hf import load
from rl.settings import checks

Memory = Literal["device", "host"]
MEMORY_KINDS: dict[Memory, str] = {"device": "device", "host": "pinned_host"}
"""The names that jax has for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initial:
  """The weights that the run began with, after a warm start if there is one.

  Attributes:
    refresh_every: rounds after which those of the policy take their place, as
      in the outer loop of GRPO (arXiv 2402.03300, algorithm 1) and in ProRL
      (arXiv 2505.24864, which starts the optimizer anew as well); None keeps
      the first.
    memory: "device" keeps a second copy of the parameters there; "host" keeps
      it in the memory of the host, and moves it for every batch.
  """

  refresh_every: int | None = None
  memory: Memory = "device"
  short_name = "initial"

  def validate(self) -> None:
    """Raises ValueError on fewer rounds than one."""
    if self.refresh_every is not None:
      where = "algorithm.reference"
      checks.at_least(self, 1, "refresh_every", where=where)


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
  memory: Memory = "device"
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


def memory(reference: Reference | None) -> Memory | None:
  """Returns where a state is to keep its first parameters; None: nowhere."""
  return reference.memory if isinstance(reference, Initial) else None


def refresh_every(reference: Reference | None) -> int | None:
  """Returns after how many rounds the policy becomes its own reference."""
  return reference.refresh_every if isinstance(reference, Initial) else None
