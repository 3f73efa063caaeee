"""Decoding, environments, rewards, and weights on their way to engines."""

from collections.abc import Iterable, Mapping
from typing import Any

from scripts.tables import cells

_STEPS = {
  "choose": ("event loop", "rows and their pages are chosen"),
  "build": ("event loop", "the arrays of the plan are filled"),
  "queue": ("", "waits for the mesh's thread, and for the dispatch before"),
  "launch": ("mesh", "the program is called, and takes the plan"),
  "program": ("mesh", "its results become ready"),
  "fetch": ("mesh", "tokens come to the host"),
  "wake": ("", "waits for the event loop"),
  "absorb": ("event loop", "requests get their tokens, and most end"),
}


def decode(result: Mapping[str, Any]) -> cells.Rows:
  """Yields each side's time over that of the built-in engine."""
  yield (
    "conversations", "at once", "tokens/s", "bare step",
    "google-tunix 0.1.7", "sglang-jax 0.0.2",
  )  # fmt: skip
  turns = {"single": "one turn", "five": "five turns"}
  for name, sides in result.items():
    if name == "machine":
      continue
    kind, at_once = name.split(", ")
    yield (
      turns[kind],
      at_once,
      f"{sides['built_in']['tokens/s']:,.0f}",
      *(
        f"{sides[side]['over ours, wall_s']:.2f}x, "
        f"{sides[side]['over ours, cpu_s']:.2f}x"
        for side in ("floor", "tunix", "sglang")
      ),
    )


def decode_passes(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what five turns take of the engine, and of the bare step."""
  yield (
    "five turns, at once",
    "side",
    "passes over the weights",
    "ids of a pass",
    "of them asked for",
    "CPU time of programs",
    "of the event loop",
  )
  for at_once, sides in result.items():
    if at_once == "machine":
      continue
    for side, row in sides.items():
      yield (
        at_once,
        side,
        f"{row['passes']:.0f}",
        f"{row['ids a pass']:.0f}",
        f"{100 * row['wanted']:.0f} %",
        f"{1000 * row['programs, CPU s']:,.0f} ms",
        f"{1000 * row['event loop, CPU s']:,.0f} ms",
      )


def engine(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the engine's rate beside that of the bare program."""
  yield (
    "engine",
    "bare decode program",
    "ratio",
    "by CPU time",
    "CPU time a turn",
    "of the event loop",
    "mesh idle a turn",
  )
  yield (
    f"{result['engine tokens/s']:,.0f} tokens/s",
    f"{result['bare loop tokens/s']:,.0f} tokens/s",
    f"{result['ratio']:.2f} ({cells.ratio_range(result)})",
    f"{result['ratio by CPU time']:.2f}",
    f"{result['CPU us a turn']:.0f} us",
    f"{result['event loop, CPU us a turn']:.0f} us",
    f"{result['mesh idle us a turn']:.0f} us",
  )


def engine_dispatch(result: Mapping[str, Any]) -> cells.Rows:
  """Yields where the time of a dispatch goes."""
  yield "thread", "step of a dispatch", "time"
  for step, (thread, text) in _STEPS.items():
    yield thread, text, f"{result[f'{step} us']:,.0f} us"


def latency(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the times of a conversation's tokens beside the throughput."""
  yield "turns", "at once", "to the first token", "a token", "tokens/s"
  turns = {"single": "1 of 64 tokens", "five": "5 of 8 to 16 tokens"}
  for load, row in result["loads"].items():
    kind, at_once = load.split(", ")
    yield (
      turns[kind],
      at_once,
      f"{row['first_token_ms']:.1f} ms",
      f"{row['token_ms']:.2f} ms",
      f"{row['tokens_per_s']:,.0f}",
    )


def processes(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what an engine in another process costs, beside one in this."""
  yield "work", "here", "apart", "wall, over here", "CPU, over here"
  words = {
    "turns": f"{result['calls']} turns of 2 tokens",
    "answers": "16 answers of 64 tokens",
    "publish": f"a publish of {result['params'] / 1e6:.1f} M parameters",
  }
  for load, row in result["loads"].items():
    here, apart, ratio = (row[x] for x in ("here", "apart", "ratio"))
    yield (
      words[load],
      f"{1e3 * here['wall_s']:.0f} ms",
      f"{1e3 * apart['wall_s']:.0f} ms",
      f"{ratio['wall_s']:.2f}x",
      f"{ratio['cpu_s']:.2f}x",
    )


def affinity_measured(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a round of each routing on each pair of pools, and its gain."""
  yield (
    "pools", "routing", "a round", "gain", "least, most", "fallbacks",
    "turns, answers where declared", "predicted round", "gain",
  )  # fmt: skip
  names = {
    "none": "no affinity",
    "declared twice": "declared, overload = 2",
    "declared": "declared, overload = 1",
    "strict": "declared, never another pool",
    "learned": "learned",
  }
  half = result["sessions"] // 2
  for pools, rows in result["pools"].items():
    for row in rows:
      yield (
        pools,
        names[row["routing"]],
        f"{row['wall_s']:.1f} s",
        f"{row['gain']:.2f}x",
        f"{row['gain min']:.2f}, {row['gain max']:.2f}x",
        f"{row['fallbacks']:.0f}",
        f"{row['turns'] / half:.0%}, {row['answers'] / half:.0%}",
        f"{row['predicted_s']:.1f} s",
        f"{row['predicted gain']:.2f}x",
      )


def prefill_apart(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what the split of prefill and decoding gains, in time and work."""
  yield (
    "engines", "prompt", "a round, together", "apart", "gain", "least, most",
    "gain in CPU", "in first tokens", "in later ones", "moved",
  )  # fmt: skip
  for pools, rows in result["pools"].items():
    for prompt, row in rows.items():
      least, median, most = row["gain"]["wall_s"]
      yield (
        pools,
        f"{prompt} ids",
        f"{row['together']['wall_s']:.2f} s",
        f"{row['apart']['wall_s']:.2f} s",
        f"{median:.2f}x",
        f"{least:.2f}, {most:.2f}x",
        *(
          f"{row['gain'][name][1]:.2f}x"
          for name in ("cpu_s", "first_token_s", "token_s")
        ),
        f"{row['apart']['moved_bytes'] / 1e6:.1f} MB",
      )


def delta_publish(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what an update changes, and what it costs to publish only that."""
  yield (
    "learning rate", "weights", "values changed", "blocks of 64 bytes",
    "blocks of 4 KiB", "bytes of values and places", "CPU, over the whole",
  )  # fmt: skip
  for row in result["rows"]:
    yield (
      f"{row['rate']:g}",
      row["dtype"],
      f"{row['values']:.1%}",
      f"{row['blocks of 64 B']:.1%}",
      f"{row['blocks of 4 KiB']:.1%}",
      f"{row['bytes']:.0%}",
      f"{row['ratio']:.2f}x",
    )


def constrained(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the rate of each form, and what a mask takes."""
  yield "answers", "tokens/s"
  for name in ("no form", "text fits", "integers", "a half integers"):
    yield name, f"{result[name]:,.0f}"
  few, many = result["us a mask"], result["us a mask of 151,936 ids"]
  yield "a mask", f"{few:.0f} us; of 151,936 ids {many:.0f} us"


def publish(result: Mapping[str, Any]) -> cells.Rows:
  """Yields how long decoding and its device stand still, in decode steps."""
  yield "`on_publish`", "decoding stands still", "device idle"
  for name, row in result["under load"].items():
    yield (
      f"`{name}`",
      f"{row['stall ratio']:.2f}",
      f"{row['idle ratio']:.1f}",
    )


def weight_dtypes(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the bytes that move for each form of the weights, and its gap."""
  yield "weights", "bytes", "share", "gap", "same experts", "largest"
  for name, row in result["dtypes"].items():
    gaps = [row.get(f"gap{of}") for of in (" mean", " replayed mean", " max")]
    yield (
      name,
      f"{row['bytes']:,}",
      f"{100 * row['share of float32']:.0f} %",
      *("" if gap is None else f"{gap:.2g}" for gap in gaps),
    )


def speculation(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what drafts gain on text that repeats itself or does not."""
  yield (
    "text", "at once", "tokens by drafts", "drafts that were right",
    "speed-up by CPU time", "by wall time",
  )  # fmt: skip
  for row in result["rows"]:
    right = row["right"]
    yield (
      row["text"],
      f"{row['at once']}",
      f"{100 * row['by drafts']:.0f} %",
      "none drafted" if right is None else f"{100 * right:.0f} %",
      f"{row['gain, cpu_s']:.2f}x",
      f"{row['gain, wall_s']:.2f}x",
    )


def rewards_places(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the times of a call in each place."""
  yield ("computed", "first call", "a call", "calls/s, 64 at a time")
  for row in result["places"]:
    yield (
      row["place"],
      f"{row['first_ms']:.1f} ms",
      f"{row['call_ms']:.2f} ms",
      f"{row['calls_per_s']:,.0f}",
    )


def rewards_rounds(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what a slow reward adds to a round of each schedule."""
  yield ("schedule", "reward of 0 s", "reward of 1 s", "added")
  for row in result["rows"]:
    yield (
      row["schedule"],
      f"{row['fast_s']:.2f} s",
      f"{row['late_s']:.2f} s",
      cells.signed(row["added"]),
    )


def reward_rounds(result: Mapping[str, Any]) -> cells.Rows:
  """Yields what a slow reward adds to a round of real runs."""
  yield "step", "eta", "reward of 0 s", "of 1 s", "added", "learner busy"
  for row in result["rows"]:
    yield (
      f"{row['step_s']:g} s",
      f"{row['eta']}",
      f"{row['fast_s']:.2f} s",
      f"{row['late_s']:.2f} s",
      cells.signed(row["added"]),
      f"{100 * row['learner_busy']:.0f} %",
    )


def environments(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a row for each environment."""
  yield (
    "name", "turns", "tools", "tokens", "ms a task", "ms a start", "ms a step",
    "offline", "package", "licence",
  )  # fmt: skip
  for row in result["rows"]:
    times = (row["task_ms"], row["start_ms"], row["step_ms"])
    yield (
      row["name"].replace("_", " "),
      f"{row['turns']:.1f}",
      str(row["tools"]),
      f"{row['tokens']:.0f}",
      *(f"{ms:.2f}" for ms in times),
      "yes" if row["offline"] else "no",
      row["package"],
      row["licence"].removesuffix(" License"),
    )


def environment_processes(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a row for each way to run an environment or a tool."""
  yield from _ways(result["rows"])


def environment_processes_whole(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a row for each way to play a game from end to end."""
  yield from _ways(result["whole"])


def _ways(rows: Iterable[Mapping[str, Any]]) -> cells.Rows:
  yield "way", "ms a start", "ms a turn", "turns/s, 16 at once"
  for row in rows:
    yield (
      row["name"],
      f"{row['start_ms']:.2f}",
      f"{row['turn_ms']:.2f}",
      f"{row['turns_per_s']:.0f}",
    )
