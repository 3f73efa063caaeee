"""Decode engines side by side, and against the least that decoding costs.

  python -m benchmarks.decode [--repeats=5] [--tunix_python=PATH] \
      [--sglang_python=PATH]

A Qwen3 of 4 layers, width 128 and 512 words, random weights, float32,
temperature 1, log-probabilities of what was sampled; see `decode_load` for the
conversations: one turn of 64 tokens, or five turns of 8 to 16. Sides, each in a
process of its own, take turns with the same load:

  floor     a bare jitted step, one call a token for all rows (`decode_floor`)
  built_in  the engine of this project (`decode_engine`)
  tunix     google-tunix 0.1.7's sampler (`decode_tunix`), given its Python
  sglang    sglang-jax 0.0.2 behind the same protocol (`decode_engine`), given
            a Python of `make sglang`

Every side has seen every load once before, so that nothing is compiled. Printed
and kept in benchmarks/results/decode.json: medians of tokens a second by wall
time, and ratios of medians; of each ratio also that of CPU seconds, which
depends less on what else the machine does.
"""

import contextlib
import pathlib
import statistics
import sys
from collections.abc import Callable

from absl import app, flags

from benchmarks import decode_load, machine

_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds of each load.")
_TUNIX = flags.DEFINE_string(
  "tunix_python", None, "Python with google-tunix 0.1.7."
)
_SGLANG = flags.DEFINE_string(
  "sglang_python", None, "Python with sglang-jax and this project's needs."
)

Side = Callable[[str], tuple[float, float, int]]
"""Decodes a load, "KIND CONCURRENCY SEED"; returns wall and CPU seconds, and
tokens."""


def _commands() -> dict[str, list[str]]:
  here = pathlib.Path(__file__).parent
  commands = {
    "floor": [sys.executable, "-m", "benchmarks.decode_floor"],
    "built_in": [sys.executable, "-m", "benchmarks.decode_engine", "built_in"],
  }
  if _TUNIX.value is not None:
    commands["tunix"] = [_TUNIX.value, str(here / "decode_tunix.py")]
  if _SGLANG.value is not None:
    module = "benchmarks.decode_engine"
    commands["sglang"] = [_SGLANG.value, "-m", module, "sglang"]
  return commands


def _row(
  sides: dict[str, Side], kind: str, concurrency: int, repeats: int
) -> dict[str, dict[str, float]]:
  """Returns the figures of every side for one kind of load."""
  rounds: dict[str, list[tuple[float, float, int]]] = {s: [] for s in sides}
  for seed in range(repeats + 1):
    for name, play in sides.items():
      rounds[name].append(play(f"{kind} {concurrency} {seed % repeats}"))
  row: dict[str, dict[str, float]] = {}
  for name, taken in rounds.items():
    # The first round compiles.
    wall, cpu, _ = zip(*taken[1:], strict=True)
    rate = statistics.median(tokens / s for s, _, tokens in taken[1:])
    row[name] = {
      "tokens/s": rate,
      "wall_s": statistics.median(wall),
      "cpu_s": statistics.median(cpu),
    }
  ours = row["built_in"]
  for theirs in row.values():
    for kind_ in ("wall_s", "cpu_s"):
      theirs[f"over ours, {kind_}"] = theirs[kind_] / ours[kind_]
  return row


def main(_: list[str]) -> None:
  """Measures, prints and keeps every load."""
  print(machine.describe())
  result: dict[str, dict[str, dict[str, float]]] = {}
  with contextlib.ExitStack() as stack:
    sides = {
      name: stack.enter_context(machine.asked(command))
      for name, command in _commands().items()
    }
    for kind in decode_load.KINDS:
      for concurrency in decode_load.CONCURRENCIES:
        row = _row(sides, kind, concurrency, _REPEATS.value)
        result[f"{kind}, {concurrency}"] = row
        machine.show(
          f"{kind}, {concurrency}",
          [{"side": name, **cells} for name, cells in row.items()],
        )
  machine.keep("decode", **result)


if __name__ == "__main__":
  app.run(main)
