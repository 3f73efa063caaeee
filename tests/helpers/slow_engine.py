"""A built-in engine that takes its time, however busy the machine is."""

import dataclasses
import time
from typing import Any

from models import config as model_config
from models import sharding
from rl.engine.builtin import engine as builtin_engine
from rl.engine.builtin import settings
from rl.runtime import mesh_thread

_DISPATCH_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowSettings(settings.EngineSettings):
  """Settings of an engine each of whose dispatches sleeps for 5 ms.

  A test in another process can so do something in the middle of an answer.
  """

  def build(
    self,
    config: model_config.ModelConfig,
    layout: sharding.Layout,
    thread: mesh_thread.MeshThread,
  ) -> builtin_engine.BuiltinEngine:
    """Returns the engine."""
    engine = super().build(config, layout, thread)
    advance = engine._runner.advance

    def slowly(*args: Any, **options: Any) -> Any:
      time.sleep(_DISPATCH_S)
      return advance(*args, **options)

    runner: Any = engine._runner
    runner.advance = slowly
    return engine
