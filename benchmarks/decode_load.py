"""What every side of benchmarks/decode.py decodes. Imports numpy only.

A load is `concurrency` conversations at once. "single" has one turn of 32 ids
of context and 64 tokens; "five" has five turns: 32 ids of context first and 8
before each later turn, and 8 to 16 tokens, as many as the seed says.
"""

from typing import NamedTuple

import numpy as np

VOCAB = 512
MAX_LENGTH = 160
KINDS = ("single", "five")
CONCURRENCIES = (1, 8, 64)

MODEL = {
  "vocab_size": VOCAB,
  "num_layers": 4,
  "d_model": 128,
  "num_heads": 2,
  "num_kv_heads": 1,
  # Of sglang-jax, whose heads have multiples of 128 values.
  "head_dim": 128,
  "d_ff": 512,
  "rope_theta": 1e6,
}


class Turn(NamedTuple):
  """Ids that are given, and how many tokens are then sampled."""

  context: list[int]
  tokens: int


def conversations(kind: str, concurrency: int, seed: int) -> list[list[Turn]]:
  """Returns the turns of each conversation."""
  rng = np.random.default_rng([concurrency, seed])

  def context(size):
    return rng.integers(VOCAB, size=size).tolist()

  if kind == "single":
    return [[Turn(context(32), 64)] for _ in range(concurrency)]
  return [
    [
      Turn(context(32 if turn == 0 else 8), int(rng.integers(8, 17)))
      for turn in range(5)
    ]
    for _ in range(concurrency)
  ]


def num_tokens(load: list[list[Turn]]) -> int:
  """Returns how many tokens a load samples."""
  return sum(turn.tokens for turns in load for turn in turns)
