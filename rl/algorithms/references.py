"""Settings of the reference policy: the initial weights, or a teacher.

`rl.train.scoring` turns them into a program.
"""

import dataclasses
from typing import Literal

from models import config as model_config
from models.hf import load

Memory = Literal["device", "host"]
MEMORY_KINDS: dict[Memory, str] = {"device": "device", "host": "pinned_host"}
"""The names that jax has for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initial:
  """The weights that the run began with, after a warm start if there is one.

  Attributes:
    memory: "device" keeps a second copy of the parameters there; "host" keeps
      it in the memory of the host, and moves it for every batch.
  """

  memory: Memory = "device"
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
