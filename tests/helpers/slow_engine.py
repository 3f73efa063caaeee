"""A built-in engine that takes its time, however busy the machine is."""

import dataclasses
import time
from typing import Any

from rl.engine.builtin import settings

_DISPATCH_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowSettings(settings.EngineSettings):
  """Settings of an engine each of whose dispatches sleeps for 5 ms.

  A test in another process can so do something in the middle of an answer.
  """

  def build(self, *given: Any) -> Any:
    """Returns the engine."""
    engine: Any = super().build(*given)
    advance = engine._runner.advance

    def slowly(*args: Any, **options: Any) -> Any:
      time.sleep(_DISPATCH_S)
      return advance(*args, **options)

    engine._runner.advance = slowly
    return engine
