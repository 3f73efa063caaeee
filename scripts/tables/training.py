"""The learner: steps, layers, experts, packing, checkpoints."""

from collections.abc import Mapping
from typing import Any

from scripts.tables import cells


def learner(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the learner's rates beside those of the bare step."""
  yield "batches an update", "learner", "bare step", "ratio", "of CPU time"
  for row in result["rows"]:
    yield (
      str(row["batches"]),
      f"{row['learner tokens/s']:,.0f} tokens/s",
      f"{row['bare step tokens/s']:,.0f} tokens/s",
      f"{row['ratio']:.2f} ({cells.ratio_range(row)})",
      f"{row['CPU ratio']:.2f} ({cells.ratio_range(row, 'CPU ratio')})",
    )


def start(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the phases of a first start and of a later one."""
  yield "", "first start", "later ones"
  for name, later in result["second"].items():
    form = "{:.0f}" if name == "programs compiled" else "{:.1f} s"
    yield name, form.format(result["first"][name]), form.format(later)


def moe(result: Mapping[str, Any]) -> cells.Rows:
  """Yields seconds for each number of experts."""
  yield (
    "experts", "forward and backward", "train step",
    "google-tunix 0.1.7, train step", "ratio of wall time, of CPU time",
  )  # fmt: skip
  passes = result["forward and backward"]
  for experts, row in passes["experts"].items():
    step = result["train step"].get(experts)
    more = passes.get(f"{experts} over 8")
    yield (
      experts,
      _median(row) + (f" ({more['wall_s']:.2f}x of 8)" if more else ""),
      _median(step["ours"]) if step else "",
      _median(step["tunix"]) if step else "",
      "{wall_s:.1f}x, {cpu_s:.1f}x".format_map(step["tunix over ours"])
      if step
      else "",
    )


def moe_dense(result: Mapping[str, Any]) -> cells.Rows:
  """Yields seconds of experts and of a dense model of the same active size."""
  yield "rows", "128 experts, 8 a token", "dense", "ratio of wall, of CPU time"
  for count, rows in result["against dense"].items():
    over = "{wall_s:.2f}x, {cpu_s:.2f}x".format_map(rows["experts over dense"])
    yield count, _median(rows["experts"]), _median(rows["dense"]), over


def _median(row: Mapping[str, Mapping[str, float]]) -> str:
  return f"{row['wall_s']['median']:.2f} s"


def train_step(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the speed of a step, and of a hand-written one of the model."""
  yield (
    "model", "tokens/s", "hand-written step", "ratio of wall time",
    "of CPU time", "share of matmul",
  )  # fmt: skip
  for row in result["rows"]:
    plain = row.get("plain")
    yield (
      row["name"],
      f"{row['ours']['tokens/s']:,.0f}",
      f"{plain['tokens/s']:,.0f}" if plain else "",
      f"{row['ours / plain, wall']['median']:.2f}x" if plain else "",
      f"{row['ours / plain, CPU']['median']:.2f}x" if plain else "",
      f"{100 * row['ours']['share of matmul']:.0f} %",
    )


def layers(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what compiling and running deep models costs, in both forms."""
  yield (
    "model", "layers", "program", "unrolled, first call", "scanned",
    "unrolled, later calls", "scanned",
  )  # fmt: skip
  for row in result["rows"]:
    first, later = (
      [f"{row[f'{form}, {name}']:.1f} {unit}" for form in ("unroll", "scan")]
      for name, unit in (("first s", "s"), ("ms", "ms"))
    )
    yield row["model"], f"{row['layers']}", row["program"], *first, *later


def train_step_logprobs(result: Mapping[str, Any]) -> cells.Rows:
  """Yields memory of the head, in chunks and whole."""
  row = result["logprobs"]
  yield (
    "tokens",
    "words",
    f"chunks of {row['chunk']:,}",
    "whole",
    "logits alone",
  )
  yield (
    f"{row['tokens']:,}",
    f"{row['words']:,}",
    *(f"{row[f'{name} MB']:,.0f} MB" for name in ("chunks", "whole", "logits")),
  )


def packing(result: Mapping[str, Any]) -> cells.Rows:
  """Yields tokens, rows and speed-up of each mix of lengths."""
  yield "groups of 8", "tokens", "rows", "speed-up"
  for row in result["rows"]:
    yield (
      row["case"],
      f"{row['tokens']:,} to {row['tokens shared']:,}",
      f"{row['rows']} to {row['rows shared']} of {row['row length']:,}",
      f"{row['step speed-up']:.2f}x",
    )


def fill(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the share of rows that is tokens, by shape and policy."""
  yield "rows x length", "last batch", "halves", "fill", "batches an update"
  names = {
    "apart": "each on its own",
    "carry": "rest carried over",
    "whole": "together",
  }
  for row in result["rows"]:
    if row["groups"] == "all":
      yield (
        f"{row['rows']} x {row['length']}",
        f"{row['tail']} rows",
        names[row["packed"]],
        f"{100 * row['fill']:.1f} %",
        f"{row['batches']:.1f}",
      )


def attention(result: Mapping[str, Any]) -> cells.Rows:
  """Yields time and memory of plain and tiled attention."""
  yield "rows of", "plain", "tiles"
  rows = {
    "rows of 64": "64",
    "rows of 256": "256",
    "rows of 1024": "1,024",
    "rows of 4096": "4,096",
    "rows of 2048, 8 packed": "2,048, 8 segments each",
  }
  for name, label in rows.items():
    forms = result["forms"][name]
    yield (
      label,
      *(
        f"{forms[form]['ms']:,.0f} ms, {forms[form]['MiB']:,.0f} MiB"
        for form in ("reference", "blockwise")
      ),
    )


def checkpoints(result: Mapping[str, Any]) -> cells.Rows:
  """Yields time and host memory of reading and writing a checkpoint."""
  yield "", "time", "peak of host memory"
  for name in ("load", "export"):
    yield (
      name,
      f"{result[f'{name} s']:.2f} s",
      f"{result[f'{name} host peak MiB']:.0f} MiB",
    )


def accelerator_first(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what was seen of whole programs in the first minutes on a GPU."""
  yield "row", "of", "measured", "share of the matmul's FLOP/s"
  for row in result["rows"]:
    share = "" if row["share"] is None else f"{row['share']:.2f}"
    yield row["name"], row["case"], row["figure"], share


def accelerator_first_attention(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the forms of attention beside cuDNN's without a mask."""
  yield "attention, forward and backward", "time", "of the first"
  first, *_ = rows = result["attention"]
  for row in rows:
    yield row["form"], f"{row['ms']:.1f} ms", f"{row['ms'] / first['ms']:.1f}x"


def accelerator_first_experts(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the rates of the experts' products."""
  yield "experts", "TFLOP/s"
  for row in result["experts"]:
    yield row["case"], f"{row['tflops']:.0f}"
