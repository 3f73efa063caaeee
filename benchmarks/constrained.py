"""Answers of a given form: what masks cost, with random weights.

  python -m benchmarks.constrained [--repeats=5]

Rates are sampled tokens a second over the wall time of 32 requests of 64 tokens
on the built-in engine; the kinds take turns, and medians are kept. The ids are
random words, so that all text fits where the form is "text, or a call with
strict arguments", and almost none where it is an array of integers. A mask is
timed in the middle of such an array. Writes
benchmarks/results/constrained.json.
"""

import asyncio
import json
import statistics
import time
from typing import Any

import numpy as np
from absl import app
from absl import flags as absl_flags

from benchmarks import decode_engine, machine
from models import config as model_config
from models.chat import answer_grammar, call_formats
from rl.engine import contract
from rl.engine.builtin import settings as engine_settings

_REPEATS = absl_flags.DEFINE_integer("repeats", 5, "Of each kind.")
_ROWS, _TOKENS, _IDS = 32, 64, 768
_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 99}
_FREE = None
_FITS = answer_grammar.AnswerGrammar(
  functions=(("add", answer_grammar.ANY_OBJECT),)
)
_FORCED = answer_grammar.AnswerGrammar(
  content=answer_grammar.Schema(text=json.dumps(_SCHEMA), name="array")
)
# The grammars of both halves of the requests.
KINDS = {
  "no form": (_FREE, _FREE),
  "text fits": (_FITS, _FITS),
  "integers": (_FORCED, _FORCED),
  "a half integers": (_FREE, _FORCED),
}


class _Words:
  """A tokenizer of random words."""

  stop_ids = (0,)
  thinking: answer_grammar.Thinking = "none"
  call_format: call_formats.CallFormat = call_formats.HERMES

  def __init__(self, size: int):
    self._size = size

  def text_ids(self, text: str) -> list[int]:
    return [byte - 31 for byte in text.encode()]

  def pieces(self) -> list[bytes]:
    letters = [bytes([byte]) for byte in range(32, 127)]
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, self._size - len(letters) - 1)
    words = [bytes(rng.integers(97, 123, n).tolist()) for n in lengths]
    return [b"", *letters, *words]


def _mask_us(size: int) -> float:
  words = _Words(size)
  matcher = answer_grammar.compiled(words, _FORCED, size).deep_copy()
  matcher.try_consume_tokens(words.text_ids("[12"))
  start = time.perf_counter()
  for _ in range(200):
    matcher.compute_bitmask()
  return 1e6 * (time.perf_counter() - start) / 200


async def _play(engine: Any, words: _Words, kind: str, number: int) -> float:
  """Returns the sampled tokens a second."""
  requests = []
  for i in range(_ROWS):
    grammar = KINDS[kind][i % 2]
    matcher = grammar and answer_grammar.compiled(words, grammar, _IDS)
    requests.append(
      contract.DecodeRequest(
        request_id=f"{kind} {number} {i}",
        session=f"{kind} {number} {i}",
        tokens=np.arange(i, i + 8, dtype=np.int32),
        max_tokens=_TOKENS,
        stop_ids=words.stop_ids,
        seed=number * _ROWS + i,
        constraint=matcher,
      )
    )
  start = time.monotonic()
  answers = await asyncio.gather(*map(engine.generate, requests))
  seconds = time.monotonic() - start
  return sum(len(answer.tokens) for answer in answers) / seconds


async def _measure() -> dict[str, float]:
  words = _Words(_IDS)
  config = model_config.tiny_moe(vocab_size=_IDS, max_length=128)
  settings = engine_settings.EngineSettings(
    slots=_ROWS,
    row_buckets=(_ROWS,),
    chunk_buckets=(8,),
  )
  rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
  async with decode_engine.started(settings, config) as engine:
    for number in range(_REPEATS.value + 1):
      for kind in KINDS:
        rate = await _play(engine, words, kind, number)
        if number:  # The first compiles the grammars.
          rates[kind].append(rate)
  medians = {kind: statistics.median(rates[kind]) for kind in KINDS}
  return {
    **medians,
    "us a mask": _mask_us(_IDS),
    "us a mask of 151,936 ids": _mask_us(151_936),
  }


def main(_: list[str]) -> None:
  """Measures all kinds in turn, and prints and keeps the medians."""
  row = asyncio.run(_measure())
  print(machine.describe())
  machine.show("forms of answers", [row])
  machine.keep("constrained", **row)


if __name__ == "__main__":
  app.run(main)
