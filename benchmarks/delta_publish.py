"""Publishing only what an update has changed: how much that is, and its cost.

  python -m benchmarks.delta_publish

The learner updates a float32 model of 7.2 M parameters by AdamW on drawn
answers and advantages, at three learning rates. Its versions are published as
float32 and as bfloat16. Between one and the next, from the fifth on, counts

  values   share of the numbers whose bits differ
  blocks   share of blocks of 4 KiB and of 64 bytes in which one does
  bytes    of the changed values with 4 bytes each for their places, over all

and CPU time, in turn, from the learner's arrays to another process's:

  whole    WeightStore.write, and an array of each tensor by its reader
  delta    the old version is compared with the new one, changed blocks of 4 KiB
           and their numbers are written and read, put into a copy of the old
           version that the reader keeps, and arrays are made of that

Both ends are in this process. Writes medians over updates and publishes to
benchmarks/results/delta_publish.json.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app

from benchmarks import machine, small_parts
from launch.cli import jax_setup
from models import memory_report, sharding
from models.hf import safetensors_io
from rl.data import batch
from rl.pools import placement, weight_transfer
from rl.remote import weight_store

_UPDATES, _REPEATS = 12, 5
_MODEL = dataclasses.replace(small_parts.PUBLISHED, max_length=64)
_RATES = (5e-4, 1e-5, 1e-6)
_DTYPES: tuple[weight_transfer.Dtype, ...] = ("same", "bfloat16")
_ROWS, _FIRST = 8, 5
_PAGE, _LINE = 4096, 64
Leaves = Sequence[np.ndarray]


def versions(layout: sharding.Layout, rate: float) -> list[Any]:
  """Returns the parameters after each update, on the host."""
  programs = small_parts.programs(_MODEL, layout, rate)
  state = programs.init(jax.random.key(0))
  found = []
  for update in range(_UPDATES):
    total = programs.accumulate(state.params, None, _drawn(update))
    state, _ = programs.step(state, total)
    found.append(jax.device_get(state.params))
  return found


def _drawn(seed: int) -> batch.Batch:
  """Returns a batch of answers whose ids and advantages are drawn."""
  rng, words = np.random.default_rng(seed), _MODEL.vocab_size
  length = _MODEL.max_length
  episodes = []
  for row in range(_ROWS):
    context, tokens = rng.integers(words, size=(2, length // 2), dtype=np.int32)
    turn = small_parts.turn(context, tokens, -np.log(words))
    episodes.append(small_parts.episode([turn], group=row))
  packed = batch.pack(episodes, rows=_ROWS, length=length, version=0)
  values = small_parts.advantages(episodes, rng)
  (only,) = batch.with_column(packed, "advantages", values).batches
  return only


def _published(params: Any, dtype: weight_transfer.Dtype) -> list[jax.Array]:
  return jax.tree.leaves(weight_transfer.cast(jax.device_put(params), dtype))


# What has changed.


def changes(old: Leaves, new: Leaves) -> dict[str, float]:
  """Returns shares of values and of blocks, and of bytes by values."""
  differ = [_bits(a) != _bits(b) for a, b in zip(old, new, strict=True)]
  size = new[0].dtype.itemsize
  changed = sum(int(x.sum()) for x in differ)
  return {
    "values": changed / sum(x.size for x in differ),
    "blocks of 4 KiB": _blocks(differ, _PAGE // size),
    "blocks of 64 B": _blocks(differ, _LINE // size),
    "bytes": changed * (4 + size) / sum(x.nbytes for x in new),
  }


def _bits(array: np.ndarray) -> np.ndarray:
  """Returns the numbers as unsigned integers, in one row."""
  return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def _blocks(differ: Sequence[np.ndarray], length: int) -> float:
  """Returns the share of blocks of so many values in which one differs."""
  starts = [np.arange(0, x.size, length) for x in differ]
  hit = [
    np.logical_or.reduceat(x, s) for x, s in zip(differ, starts, strict=True)
  ]
  return sum(int(x.sum()) for x in hit) / sum(x.size for x in hit)


# What it costs.


def whole_s(new: Sequence[jax.Array]) -> float:
  """Returns the processor seconds of a publish of everything."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  start_s = time.process_time()
  stored = weight_store.WeightStore().write(new)
  with weight_store.Readers() as readers:
    placed = [
      weight_store.placed(readers.of(x.address), x.address, place)
      for x in stored
    ]
    jax.block_until_ready(placed)
  return time.process_time() - start_s


def delta_s(kept: Leaves, old: Leaves, new: Sequence[jax.Array]) -> float:
  """Returns the processor seconds of a publish of the changed blocks.

  Args:
    kept: the reader's copy of the old version, which becomes the new one.
    old: the writer's.
  """
  start_s = time.process_time()
  sent = [_delta(a, x) for a, x in zip(old, new, strict=True)]
  file = weight_store.StoredFile(sum(x.nbytes for pair in sent for x in pair))
  end = 0
  for part in (part for pair in sent for part in pair):
    end = file.write(end, part.reshape(-1).view(np.uint8).data)
  memory, start, placed = np.memmap(file.path, np.uint8, "r"), 0, []
  for array, (places, rows) in zip(kept, sent, strict=True):
    parts = []
    for part in (places, rows):
      piece = memory[start : start + part.nbytes].view(part.dtype)
      parts.append(piece.reshape(part.shape))
      start += part.nbytes
    _bits(array).reshape(-1, rows.shape[1])[parts[0]] = parts[1]
    placed.append(jax.device_put(array, may_alias=False))
  jax.block_until_ready(placed)
  return time.process_time() - start_s


def _delta(old: np.ndarray, new: jax.Array) -> tuple[np.ndarray, np.ndarray]:
  """Returns numbers and contents of the blocks that differ.

  A tensor that whole blocks do not fill is one block.
  """
  a, b = _bits(old), _bits(safetensors_io.on_host(new))
  length = _PAGE // b.dtype.itemsize
  length = b.size if b.size % length else length
  a, b = a.reshape(-1, length), b.reshape(-1, length)
  places = np.flatnonzero((a != b).any(axis=1)).astype(np.uint32)
  return places, b[places]


def _rows(layout: sharding.Layout, rate: float) -> list[dict[str, Any]]:
  """Returns a row for each type of the published weights."""
  trained, rows = versions(layout, rate), []
  for dtype in _DTYPES:
    told = [_published(params, dtype) for params in trained]
    hosts = [[safetensors_io.on_host(x) for x in leaves] for leaves in told]
    counts = [
      changes(hosts[i - 1], hosts[i]) for i in range(_FIRST, len(hosts))
    ]
    seconds = []
    for _ in range(_REPEATS + 1):
      kept = [array.copy() for array in hosts[-2]]
      seconds.append((whole_s(told[-1]), delta_s(kept, hosts[-2], told[-1])))
      for a, b in zip(kept, hosts[-1], strict=True):
        np.testing.assert_array_equal(_bits(a), _bits(b))
    seconds = seconds[1:]  # The first is for whatever happens late.
    rows.append(
      {
        "rate": rate,
        "dtype": "float32" if dtype == "same" else dtype,
        **machine.medians(counts),
        "whole_s": statistics.median(x for x, _ in seconds),
        "delta_s": statistics.median(x for _, x in seconds),
        "ratio": statistics.median(b / a for a, b in seconds),
      }
    )
  return rows


def main(_: list[str]) -> None:
  """Measures, prints and keeps the rows."""
  place = placement.Placement()
  jax_setup.prepare(place)
  rows = [row for rate in _RATES for row in _rows(place.layouts()[0], rate)]
  print(machine.describe())
  machine.show("publishes of what has changed", rows)
  machine.keep(
    "delta_publish",
    params=memory_report.num_params(_MODEL).total,
    updates=_UPDATES,
    repeats=_REPEATS,
    rows=rows,
  )


if __name__ == "__main__":
  app.run(main)
