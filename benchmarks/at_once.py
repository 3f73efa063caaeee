"""An engine and games that answer at once: what is left is the host's work."""

import asyncio
import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envs import base
from models.chat import word_chat
from rl.engine import contract

CHAT = word_chat.WordChat(("go", "on", "yes", "no"))
_ANSWER = np.asarray([*CHAT.encode_answer("yes")], np.int32)
_LOGPROBS = np.full(len(_ANSWER), -0.5, np.float32)


class Engine:
  """Says "yes" to everything, at once."""

  def __init__(self, yields: bool):
    self.capabilities = contract.Capabilities(
      in_flight=frozenset(typing.get_args(contract.InFlight)),
      max_length=1 << 20,
      vocab_size=CHAT.vocab_size,
      max_stop_ids=16,
      seeds=True,
      bias=False,
      constraints=False,
      experts=False,
      top_logprobs=0,
    )
    self._yields = yields
    self._answered = 0
    self._serve(0)

  def _serve(self, version: int) -> None:
    self._version = version
    self._versions = np.full(len(_ANSWER), version, np.int32)

  async def generate(
    self, request: contract.DecodeRequest
  ) -> contract.Completion:
    """Says yes."""
    if self._yields:
      await asyncio.sleep(0)
    self._answered += 1
    return contract.Completion(
      tokens=_ANSWER,
      logprobs=_LOGPROBS,
      versions=self._versions,
      stop="stop",
      cached_tokens=len(request.tokens) - 1,
      decode_s=0.0,
    )

  async def update_weights(
    self,
    version: int,
    params: Any,
    in_flight: contract.InFlight = "recompute",
    on_step: Callable[[contract.SwitchStep], None] = contract.ignore_step,
  ) -> None:
    """Serves the version at once."""
    del params, in_flight
    with contract.switching(on_step):
      self._serve(version)

  def abort(self, request_id: str | None) -> None:
    """Nothing is ever in flight."""
    del request_id

  def begun(self, request_id: str) -> int | None:
    """Nothing is ever in flight."""
    del request_id
    return None

  def stats(self) -> contract.EngineStats:
    """Returns the counters."""
    return contract.EngineStats(
      version=self._version,
      running=0,
      waiting=0,
      sampled_tokens=self._answered * len(_ANSWER),
      prefilled_tokens=self._answered,
    )


@dataclasses.dataclass(frozen=True)
class Games:
  """Games of so many turns."""

  turns: int
  yields: bool
  name: str = "game"
  words: tuple[str, ...] = CHAT.words

  def task(self, index: int, split: base.Split) -> base.Task:
    """Returns a game."""
    return base.Task(f"game/{split}/{index}", index, split, index)

  def __call__(self, task: base.Task) -> "_Game":
    """Returns a fresh game."""
    return _Game(self.turns, self.yields)

  def oracle(self, task: base.Task, messages: Sequence[base.Message]) -> str:
    """Returns "yes"."""
    return "yes"

  def explore(
    self, task: base.Task, messages: Sequence[base.Message], seed: int
  ) -> str:
    """Returns "no"."""
    return "no"


_GO, _ON = [base.Message("user", "go")], [base.Message("user", "on")]


@dataclasses.dataclass(slots=True)
class _Game:
  left: int
  yields: bool

  async def start(self) -> Sequence[base.Message]:
    return _GO

  async def step(self, answer: base.Message) -> base.Step:
    if self.yields:
      await asyncio.sleep(0)
    self.left -= 1
    return base.Step(_ON, 1.0, not self.left)

  async def close(self) -> None:
    pass
