"""The other side of benchmarks/decode.py: google-tunix's sampler.

  <python with google-tunix 0.1.7> benchmarks/decode_tunix.py

Says "ready" and then answers every line KIND CONCURRENCY SEED with [wall s, CPU
s, tokens] as JSON. Imports nothing of this project but the load, so that it
runs in an environment of its own.

"single" is one call for all prompts, as its synchronous learner does. "five" is
a thread a conversation, which calls the sampler with its whole history for
every turn, as its agentic learner does: the sampler keeps no cache. Prompts are
padded to one length of 160 and answers to 8, 12 or 16 tokens, so that the
number of programs is small and all of them are compiled before the clock runs;
its learner compiles one for every remaining budget.
"""

import concurrent.futures
import json
import pathlib
import sys
import time

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from flax import nnx  # pyright: ignore[reportMissingImports]
from tunix.generate import (  # pyright: ignore[reportMissingImports]
  sampler as sampler_lib,
)
from tunix.models.qwen3 import (  # pyright: ignore[reportMissingImports]
  model,
)

from benchmarks import decode_load

_PROMPT = 128
_CACHE = 256


class _Numbers:
  """A tokenizer whose texts are ids."""

  def encode(self, text: str, **kwargs) -> list[int]:
    del kwargs
    return [int(word) for word in text.split()]

  def decode(self, ids, **kwargs) -> str:
    del kwargs
    return " ".join(str(int(id_)) for id_ in ids)

  def bos_id(self) -> int:
    return decode_load.VOCAB

  def eos_id(self) -> int:
    return decode_load.VOCAB + 1

  def pad_id(self) -> int:
    return decode_load.VOCAB + 2


def _sampler() -> sampler_lib.Sampler:
  sizes = decode_load.MODEL
  config = model.ModelConfig(
    num_layers=sizes["num_layers"],
    # Ids that tunix itself needs, which are never sampled on purpose.
    vocab_size=sizes["vocab_size"] + 3,
    embed_dim=sizes["d_model"],
    hidden_dim=sizes["d_ff"],
    num_heads=sizes["num_heads"],
    head_dim=sizes["head_dim"],
    num_kv_heads=sizes["num_kv_heads"],
    rope_theta=int(sizes["rope_theta"]),
    norm_eps=1e-6,
    use_tied_embedding=True,
  )
  policy = model.Qwen3(config, rngs=nnx.Rngs(0))
  cache = sampler_lib.CacheConfig(
    cache_size=_CACHE,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )
  return sampler_lib.Sampler(policy, _Numbers(), cache)


class _Side:
  def __init__(self):
    self._sampler = _sampler()
    self._seed = 0

  def _sample(self, prompts, tokens, length):
    self._seed += 1
    return self._sampler(
      [" ".join(map(str, ids)) for ids in prompts],
      max_generation_steps=tokens,
      max_prompt_length=length,
      temperature=1.0,
      top_p=1.0,
      seed=self._seed,
      # None of the words ends an answer: all have the same length.
      eos_tokens=[decode_load.VOCAB + 1],
      forbidden_tokens=[decode_load.VOCAB + i for i in range(3)],
      return_logprobs=True,
    ).tokens

  def single(self, load):
    self._sample([turns[0].context for turns in load], 64, 32)

  def converse(self, turns):
    ids: list[int] = []
    for turn in turns:
      ids += turn.context
      room = next(size for size in (8, 12, 16) if size >= turn.tokens)
      (answer,) = self._sample([ids], room, _PROMPT)
      ids += [int(id_) for id_ in answer[: turn.tokens]]

  def play(self, kind: str, concurrency: int, seed: int):
    """Decodes one load; returns wall and CPU seconds and tokens."""
    load = decode_load.conversations(kind, concurrency, seed)
    wall, cpu = time.monotonic(), time.process_time()
    if kind == "single":
      self.single(load)
    else:
      with concurrent.futures.ThreadPoolExecutor(concurrency) as threads:
        list(threads.map(self.converse, load))
    took = time.monotonic() - wall, time.process_time() - cpu
    return *took, decode_load.num_tokens(load)


def main() -> None:
  """Plays whenever asked."""
  side = _Side()
  print("ready", flush=True)
  for line in sys.stdin:
    kind, concurrency, seed = line.split()
    print(json.dumps(side.play(kind, int(concurrency), int(seed))), flush=True)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  main()
