"""Writes the parts of the documentation that follow from other files.

  python -m scripts.make_docs [--check]

- The tables of docs/performance.md and of some guides, from
  benchmarks/results. A table stands between `<!-- table NAME -->` and
  `<!-- end -->`; the prose around it stays.
- docs/packages.svg, from the floors of tests/test_house.py.
- docs/licences.md, from the metadata of what is installed.
- docs/long_run.svg, from benchmarks/results/long_run.json.
- docs/recipes.md and docs/settings.md, from docstrings.

With --check nothing is written: a file that differs is an error.
"""

import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scripts import (
  make_docs_licences,
  make_docs_long_run,
  make_docs_picture,
  make_docs_recipes,
  make_docs_settings,
)

ROOT = pathlib.Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"
ENVIRONMENTS = ROOT / "docs" / "guides" / "environments.md"
WORKERS = ROOT / "docs" / "guides" / "workers-and-sandbox.md"
AGENTS = ROOT / "docs" / "guides" / "agents.md"
REWARDS = ROOT / "docs" / "guides" / "rewards.md"
HOSTILE = ROOT / "docs" / "guides" / "hostile.md"
PAGES = (PERFORMANCE, ENVIRONMENTS, WORKERS, AGENTS, REWARDS, HOSTILE)
PICTURE = ROOT / "docs" / "packages.svg"
RECIPES = ROOT / "docs" / "recipes.md"
LONG_RUN = ROOT / "docs" / "long_run.svg"
SETTINGS = ROOT / "docs" / "settings.md"
RESULTS = ROOT / "benchmarks" / "results"
_SIMULATED = ("rollart_", "rollout_pipe")
"""Results that no machine changes."""
_TABLE = re.compile(
  r"(?<=^<!-- table )(\w+) -->\n.*?^<!-- end -->", re.DOTALL | re.MULTILINE
)

Rows = Iterator[Sequence[str]]

_SCHEDULES = {
  "sync": "sync",
  "strict_pipeline": "strict pipeline",
  "rollout_pipe": "round pipelined",
  "hard_frontier": "round pipelined, hard window",
  "one_step_off": "one step off",
  "bounded": "bounded, eta = 2",
  "in_flight": "in flight, eta = 1",
  "keep_kv": "in flight, caches kept",
  "drop": "in flight, as completed, drop",
  "recycle": "in flight, as completed, recycle",
}
_STEPS = {
  "choose": ("event loop", "rows and their pages are chosen"),
  "build": ("event loop", "the arrays of the plan are filled"),
  "queue": ("", "waits for the mesh's thread, and for the dispatch before"),
  "transfer": ("mesh", "the plan goes to the device"),
  "launch": ("mesh", "the program is called"),
  "program": ("mesh", "its results become ready"),
  "fetch": ("mesh", "tokens come to the host"),
  "wake": ("", "waits for the event loop"),
  "absorb": ("event loop", "requests get their tokens, and most end"),
}
_ESTIMATES = {
  "SequenceTruncated(cap=inf)": (
    "trajectory's importance weight, with REINFORCE"
  ),
  "SequenceTruncated": "the same, truncated at 2",
  "Cispo": "token's importance weight (CISPO, AIPO, truncated)",
  "Reinforce": "REINFORCE, uncorrected",
  "ClippedSurrogate": "clipped ratio",
  "Gspo": "GSPO",
  "GeometricRejection": "geometric rejection, 0.999 to 1.001",
}


def seeds_guess_number_moe(result: Mapping[str, Any]) -> Rows:
  """Yields success before and after training, a row a seed."""
  yield "seed", "after the warm start", "after 1,000 rounds", "minutes in all"
  yield from _seeds(result)


def seeds_frozen_lake_moe(result: Mapping[str, Any]) -> Rows:
  """Yields success before and after training, a row a seed."""
  yield "seed", "after the warm start", "after 160 rounds", "minutes in all"
  yield from _seeds(result)


def seeds_agent_letters(result: Mapping[str, Any]) -> Rows:
  """Yields success before and after training, a row a seed."""
  yield "seed", "untrained", "after 30 rounds", "minutes in all"
  yield from _seeds(result)


def tools(result: Mapping[str, Any]) -> Rows:
  """Yields success and calls before and after training, a row a seed."""
  rounds = result["rows"][0]["after"]["round"]
  yield (
    *("seed", "after the warm start", f"after {rounds} rounds"),
    *("calls, first rounds", "last", "minutes in all", "of a processor"),
  )
  for row, seed in zip(result["rows"], _seeds(result), strict=True):
    calls = (row[part]["env/tool_calls"] for part in ("first", "last"))
    yield (
      *seed[:3],
      *(f"{number:.2f}" for number in calls),
      seed[3],
      f"{row['cpu_minutes']:.1f}",
    )


def _seeds(result: Mapping[str, Any]) -> Rows:
  for row in result["rows"]:
    yield (
      row["seed"],
      _success(row["before"]),
      _success(row["after"]),
      f"{row['minutes']:.1f}",
    )


def _success(row: Mapping[str, float]) -> str:
  return (
    f"{row['success']:.1%} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
  ).replace("%", " %")


def overlap_as_is(result: Mapping[str, Any]) -> Rows:
  """Yields a row for each schedule, on the task as it is."""
  yield from _overlap(result, "as_is")


def overlap_slow(result: Mapping[str, Any]) -> Rows:
  """Yields a row for each schedule, where steps of the game take time."""
  yield from _overlap(result, "slow")


def overlap_accelerator(result: Mapping[str, Any]) -> Rows:
  """Yields a row for each schedule, where dispatches of decoding sleep."""
  yield from _overlap(result, "accelerator")


def _overlap(result: Mapping[str, Any], task: str) -> Rows:
  yield (
    "schedule", "round, ms", "speed-up", "learner, decode busy, ms",
    "both busy, ms", "lag: mean, max", "useful tokens", "success",
    "T*, ms", "simulated / measured",
  )  # fmt: skip
  rows = [row for row in result["rows"] if row["task"] == task]
  for row in rows:
    measured = row["measured"]
    busy = [
      f"{1000 * measured[name] / result['rounds']:.0f}"
      for name in ("learner_busy_s", "decode_busy_s", "both_busy_s")
    ]
    speedup = rows[0]["measured"]["step_s"] / measured["step_s"]
    yield (
      _SCHEDULES[row["schedule"]],
      f"{1000 * measured['step_s']:,.0f}",
      f"{speedup:.2f}x",
      f"{busy[0]}, {busy[1]}",
      busy[2],
      f"{measured['lag']:.2f}, {measured['max_lag']:.0f}",
      f"{100 * measured['useful']:.0f} %",
      f"{100 * measured['success']:.1f} %",
      f"{1000 * row['simulated']['ideal_s']:,.0f}",
      f"{row['ratio']:.2f}x",
    )


def rollart_trajectories(result: Mapping[str, Any]) -> Rows:
  """Yields the published and the simulated speed-up at each latency."""
  yield "sigma of a step", "published", "simulated", "deviation"
  for row in result["rows"]:
    yield (
      f"{row['sigma_s']} s",
      f"{row['published']:.2f}x",
      f"{row['speedup']:.2f}x",
      _signed(row["deviation"]),
    )


def rollart_redundancy(result: Mapping[str, Any]) -> Rows:
  """Yields the published and the simulated speed-up for each surplus."""
  yield "members", "groups", "published", "simulated", "deviation", "aborted"
  for row in result["rows"]:
    yield (
      str(row["group size"]),
      str(row["groups"]),
      f"{row['published']:.2f}x",
      f"{row['speedup']:.2f}x",
      _signed(row["deviation"]),
      f"{100 * row['aborted']:.0f} %",
    )


def rollart_affinity(result: Mapping[str, Any]) -> Rows:
  """Yields the speed-up of each way to route over pools of one kind."""
  yield (
    "prefill share: math, game", "routing", "over bandwidth only",
    "over compute only",
  )  # fmt: skip
  published = result["published"]
  low, high = published["over_208_h20"], published["over_72_h800"]
  yield (
    "", "published", f"{low[0]:.2f} to {low[1]:.2f}x",
    f"{high[0]:.2f} to {high[1]:.2f}x",
  )  # fmt: skip
  names = {
    "blind": "no affinity",
    "declared": "declared",
    "strict": "declared, never another pool",
    "learned": "learned",
  }
  for row in [*result["rows"], *result["sweep"]]:
    yield (
      f"{row['math']}, {row['game']}",
      names[row["routing"]],
      f"{row['over 208 H20']:.2f}x",
      f"{row['over 72 H800']:.2f}x",
    )


def rollart_rewards(result: Mapping[str, Any]) -> Rows:
  """Yields the gain by the spread of lengths, then the use of a platform."""
  yield ("inputs", "dedicated", "serverless", "gain", "use of the graders")
  published = result["published"]
  before, after = published["rollout_s"].values()
  low, high = published["use"].values()
  yield (
    "published", f"{before:.0f} s", f"{after:.0f} s",
    f"{published['gain']:.2f}x", f"{low:.0%}, then {high:.0%}",
  )  # fmt: skip
  for row in result["rows"]:
    yield (
      f"spread of lengths {row['sigma']:g}",
      f"{row['dedicated_s']:.0f} s",
      f"{row['serverless_s']:.0f} s",
      f"{row['gain']:.2f}x",
      f"{row['dedicated_use']:.0%}, dedicated",
    )
  for row in result["platforms"]:
    yield (
      f"cold start {row['cold_s']:g} s, {row['max_workers']} seats at most",
      "", f"{row['serverless_s']:.0f} s", f"{row['gain']:.2f}x",
      f"{row['use']:.0%}, waits {row['mean_wait_s']:.1f} s",
    )  # fmt: skip


def rollart_weights(result: Mapping[str, Any]) -> Rows:
  """Yields published and predicted seconds of each way of the weights."""
  yield "way", "model", "published", "predicted", "error"
  for row in result["rows"]:
    yield (
      row["way"],
      row["model"],
      f"{row['published_s']:.1f} s",
      f"{row['predicted_s']:.1f} s",
      "fitted" if row["fitted"] else _signed(row["error"]),
    )


def rollart_weights_gains(result: Mapping[str, Any]) -> Rows:
  """Yields what hiding a transfer gains of a step, declared and simulated."""
  low, high = result["published_gain"]
  columns = sorted({(row["played"], row["eta"]) for row in result["gains"]})
  yield (
    "exposed transfer", "model", f"steps of {low:.2f} to {high:.2f}x",
    "step as long as the push",
    *(f"{played}, eta = {eta}" for played, eta in columns),
  )  # fmt: skip
  cells = {
    (row["exposed"], row["model"], row["played"], row["eta"]): row
    for row in result["gains"]
  }
  for row in sorted(result["declared"], key=lambda row: row["exposed"]):
    where = row["exposed"], row["model"]
    simulated = [cells[(*where, *column)] for column in columns]
    yield (
      *where,
      f"{row['most_s']:.0f} to {row['least_s']:.0f} s",
      f"{row['push_s']:.0f} s: {row['gain']:.2f}x",
      *(f"{one['gain']:.2f}x, {_place(one['place'])}" for one in simulated),
    )


def _place(place: str) -> str:
  """Returns a place in a range without the end that it is measured from."""
  return place.partition(" of ")[0]


def rollart_failures(result: Mapping[str, Any]) -> Rows:
  """Yields a step with each kind of failure beside the published one."""
  yield "failure", "resets, of the rollout", "step", "error"
  published = result["published"]
  yield "none, published", "21%", f"{published['step_s']:.0f} s", ""
  yield "none, simulated", "fitted", f"{result['plain_s']:.0f} s", "fitted"
  yield (
    "published, with one", f"{published['share']:.0%}",
    f"{published['failed_s']:.0f} s", "",
  )  # fmt: skip
  for row in result["rows"]:
    share = f"{row['reset share']:.0%}"
    yield (
      row["failure"],
      f"{share}, fitted" if row["down_s"] else share,
      f"{row['step_s']:.0f} s",
      _signed(row["error"]),
    )


def rollart_failures_others(result: Mapping[str, Any]) -> Rows:
  """Yields the cost of one outage under other schedules."""
  yield "schedule", "spare slots", "environments lost", "costs"
  for row in result["others"]:
    yield (
      row["schedule"],
      str(row["spare slots"]),
      str(row["lost"]),
      f"{row['cost_s']:.0f} s",
    )


def rollart_pd(result: Mapping[str, Any]) -> Rows:
  """Yields published and predicted gains of the split, then the sweep."""
  yield (
    "model", "nodes", "assumptions", "gain of a rollout", "of a step",
    "published", "error",
  )  # fmt: skip
  for row in [*result["rows"], *result["sweep"]]:
    assumed = "as stated"
    if "reply" in row:
      assumed = f"interference {row['interference']:g}, {row['reply']} ids"
    known = row["published"]
    yield (
      row["model"],
      row["nodes"],
      assumed,
      f"{row['rollout gain']:.2f}x",
      f"{row['gain']:.2f}x",
      f"{known:.2f}x" if known else "the worst",
      _signed(row["error"]) if known else "",
    )


def rollart_ladder(result: Mapping[str, Any]) -> Rows:
  """Yields each rung's speed-up over the one below, a column a trace."""
  cells: dict[str, dict[str, str]] = {}
  over_sync: dict[str, str] = {}
  dropped: dict[str, list[float]] = {}
  for latency, traces in result["latencies"].items():
    for row in traces["rows"]:
      trace = f"{row['model']}, {latency}"
      cells.setdefault(row["rung"], {})[trace] = f"{row['over']:.2f}x"
      dropped.setdefault(row["rung"], []).append(100 * row["dropped"])
      if row["rung"] == "ours":
        over_sync[trace] = f"{row['over sync']:.2f}x"
  columns = list(cells["sync"])
  yield "schedule", "published", *columns, "tokens dropped"
  for rung, row in cells.items():
    low, high = result["published"].get(rung, (0, 0))
    yield (
      "ours, in order of submission" if rung == "ours in order" else rung,
      f"{low:.2f} to {high:.2f}x" if high else "",
      *(row[column] for column in columns),
      f"{min(dropped[rung]):.0f} to {max(dropped[rung]):.0f} %",
    )
  low, high = result["published"]["over_sync"]
  yield (
    "ours, over sync", f"{low:.2f} to {high:.2f}x",
    *(over_sync[column] for column in columns), "",
  )  # fmt: skip


def rollout_pipe(result: Mapping[str, Any]) -> Rows:
  """Yields what pipelining saves of a round, and of the learner's waits."""
  yield (
    "groups a round", "schedule", "round", "saved", "first dispatch",
    "learner waits", "waits saved",
  )  # fmt: skip
  names = {
    "CGP": "as groups complete",
    "CGP + FGD": "as groups complete, frontier first",
    "by tokens": "the same, by a budget of tokens",
    "in order": "in the order of submission",
    "hard window 4": "hard window of two updates",
    "hard window 2": "hard window of one update",
    "shuffled CGP": "requests shuffled, as groups complete",
    "shuffled CGP + FGD": "requests shuffled, frontier first",
  }
  for row in result["rows"]:
    if row["schedule"] in names:
      yield (
        str(row["R"]),
        names[row["schedule"]],
        f"{row['T']:.0f} s",
        f"{100 * row['saved']:.1f} %",
        f"{row['first']:.0f} s",
        f"{100 * row['waits']:.0f} %",
        f"{100 * row['waits less']:.0f} %",
      )


def decode(result: Mapping[str, Any]) -> Rows:
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


def engine(result: Mapping[str, Any]) -> Rows:
  """Yields the engine's rate beside that of the bare program."""
  yield (
    "engine",
    "bare decode program",
    "ratio",
    "by CPU time",
    "host time a turn",
  )
  yield (
    f"{result['engine tokens/s']:,.0f} tokens/s",
    f"{result['bare loop tokens/s']:,.0f} tokens/s",
    f"{result['ratio']:.2f} ({_range(result)})",
    f"{result['ratio by CPU time']:.2f}",
    f"{result['host us a turn']:.0f} us",
  )


def engine_dispatch(result: Mapping[str, Any]) -> Rows:
  """Yields where the time of a dispatch goes."""
  yield "thread", "step of a dispatch", "time"
  for step, (thread, text) in _STEPS.items():
    yield thread, text, f"{result[f'{step} us']:,.0f} us"


def latency(result: Mapping[str, Any]) -> Rows:
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


def processes(result: Mapping[str, Any]) -> Rows:
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


def constrained(result: Mapping[str, Any]) -> Rows:
  """Yields the rate of each form, and what a mask takes."""
  yield "answers", "tokens/s"
  for name in ("no form", "text fits", "integers", "a half integers"):
    yield name, f"{result[name]:,.0f}"
  few, many = result["us a mask"], result["us a mask of 151,936 ids"]
  yield "a mask", f"{few:.0f} us; of 151,936 ids {many:.0f} us"


def learner(result: Mapping[str, Any]) -> Rows:
  """Yields the learner's rates beside those of the bare step."""
  yield "batches an update", "learner", "bare step", "ratio", "of CPU time"
  for row in result["rows"]:
    yield (
      str(row["batches"]),
      f"{row['learner tokens/s']:,.0f} tokens/s",
      f"{row['bare step tokens/s']:,.0f} tokens/s",
      f"{row['ratio']:.2f} ({_range(row)})",
      f"{row['CPU ratio']:.2f} ({_range(row, 'CPU ratio')})",
    )


def start(result: Mapping[str, Any]) -> Rows:
  """Yields the phases of a first start and of a later one."""
  yield "", "first start", "later ones"
  for name, later in result["second"].items():
    form = "{:.0f}" if name == "programs compiled" else "{:.1f} s"
    yield name, form.format(result["first"][name]), form.format(later)


def _range(row: Mapping[str, float], name: str = "ratio") -> str:
  return f"{row[f'{name} min']:.2f} to {row[f'{name} max']:.2f}"


def coordinator(result: Mapping[str, Any]) -> Rows:
  """Yields turns a second of one core for each case."""
  yield "case", "turns/s", "a turn"
  names = {
    "sync": "one round after the other",
    "in flight": "in flight, eta = 1",
    "yielding": "the same, each answer a turn of the event loop later",
    "checked": "the same, log checked and tokens booked",
    "packed": "the same, trained groups packed into rows",
  }
  for name, case in result["cases"].items():
    yield (
      names[name],
      f"{case['turns_per_s']:,.0f}",
      f"{case['us_per_turn']:.0f} us",
    )


def coordinator_memory(result: Mapping[str, Any]) -> Rows:
  """Yields memory over the trajectories that were played."""
  memory = result["memory"]
  yield "trajectories", *(f"after {at}" for at in memory["resident_mib"])
  yield (
    f"{memory['trajectories']:,}",
    *(f"{mib:.1f} MiB" for mib in memory["resident_mib"].values()),
  )


def long_run(result: Mapping[str, Any]) -> Rows:
  """Yields the growth of the long runs, and the verdict on their logs."""
  runs = [found for name in ("simulated", "real") if (found := result[name])]
  yield "", *(f"{run['rounds']:,} rounds" for run in runs)
  names = {
    "resident_mib": "memory",
    "descriptors": "open files",
    "threads": "threads",
    "tasks": "tasks",
    "waits": "waits",
    "checkpoint_kib": "checkpoints",
  }
  for key, name in names.items():
    cells = [run["growth"].get(key) for run in runs]
    shown = ["" if x is None else f"{100 * x + 0.0:+.1f}%" for x in cells]
    yield f"{name}, last quarter against the second", *shown
  yield (
    "event log on disk",
    *(f"{run['events_disk_mib']:.1f} MiB" for run in runs),
  )
  yield (
    "segments of it, and those deleted",
    *(f"{run['segments']}, {run.get('segments_deleted', 0)}" for run in runs),
  )
  yield "broken promises", *(str(len(run["violations"])) for run in runs)
  yield "tokens not booked", *(str(run["ledger_error"]) for run in runs)


def publish(result: Mapping[str, Any]) -> Rows:
  """Yields how long decoding and its device stand still, in decode steps."""
  yield "`on_publish`", "decoding stands still", "device idle"
  for name, row in result["under load"].items():
    yield (
      f"`{name}`",
      f"{row['stall ratio']:.2f}",
      f"{row['idle ratio']:.1f}",
    )


def weight_dtypes(result: Mapping[str, Any]) -> Rows:
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


def moe(result: Mapping[str, Any]) -> Rows:
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


def moe_dense(result: Mapping[str, Any]) -> Rows:
  """Yields seconds of experts and of a dense model of the same active size."""
  yield "rows", "128 experts, 8 a token", "dense", "ratio of wall, of CPU time"
  for count, rows in result["against dense"].items():
    over = "{wall_s:.2f}x, {cpu_s:.2f}x".format_map(rows["experts over dense"])
    yield count, _median(rows["experts"]), _median(rows["dense"]), over


def _median(row: Mapping[str, Mapping[str, float]]) -> str:
  return f"{row['wall_s']['median']:.2f} s"


def train_step(result: Mapping[str, Any]) -> Rows:
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


def speculation(result: Mapping[str, Any]) -> Rows:
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


def layers(result: Mapping[str, Any]) -> Rows:
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


def train_step_logprobs(result: Mapping[str, Any]) -> Rows:
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


def packing(result: Mapping[str, Any]) -> Rows:
  """Yields tokens, rows and speed-up of each mix of lengths."""
  yield "groups of 8", "tokens", "rows", "speed-up"
  for row in result["rows"]:
    yield (
      row["case"],
      f"{row['tokens']:,} to {row['tokens shared']:,}",
      f"{row['rows']} to {row['rows shared']} of {row['row length']:,}",
      f"{row['step speed-up']:.2f}x",
    )


def fill(result: Mapping[str, Any]) -> Rows:
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


def estimator_bias(result: Mapping[str, Any]) -> Rows:
  """Yields the bias of each estimate, a column a lag."""
  columns = {
    "lag 0": "on policy",
    "lag 1": "lag 1",
    "lag 2": "lag 2",
    "lag 4": "lag 4",
    "mixed": "mixed",
  }
  yield "estimate", *columns.values()
  for name, label in _ESTIMATES.items():
    biases = result["off_policy"][name]
    yield label, *(f"{100 * biases[lag][0]:.0f} %" for lag in columns)


def attention(result: Mapping[str, Any]) -> Rows:
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


def checkpoints(result: Mapping[str, Any]) -> Rows:
  """Yields time and host memory of reading and writing a checkpoint."""
  yield "", "time", "peak of host memory"
  for name in ("load", "export"):
    yield (
      name,
      f"{result[f'{name} s']:.2f} s",
      f"{result[f'{name} host peak MiB']:.0f} MiB",
    )


def _signed(share: float) -> str:
  return f"{100 * share:+.1f} %" if share else "0 %"


def rewards_places(result: Mapping[str, Any]) -> Rows:
  """Yields the times of a call in each place."""
  yield ("computed", "first call", "a call", "calls/s, 64 at a time")
  for row in result["places"]:
    yield (
      row["place"],
      f"{row['first_ms']:.1f} ms",
      f"{row['call_ms']:.2f} ms",
      f"{row['calls_per_s']:,.0f}",
    )


def rewards_rounds(result: Mapping[str, Any]) -> Rows:
  """Yields what a slow reward adds to a round of each schedule."""
  yield ("schedule", "reward of 0 s", "reward of 1 s", "added")
  for row in result["rows"]:
    yield (
      row["schedule"],
      f"{row['fast_s']:.2f} s",
      f"{row['late_s']:.2f} s",
      _signed(row["added"]),
    )


def reward_rounds(result: Mapping[str, Any]) -> Rows:
  """Yields what a slow reward adds to a round of real runs."""
  yield "step", "eta", "reward of 0 s", "of 1 s", "added", "learner busy"
  for row in result["rows"]:
    yield (
      f"{row['step_s']:g} s",
      f"{row['eta']}",
      f"{row['fast_s']:.2f} s",
      f"{row['late_s']:.2f} s",
      _signed(row["added"]),
      f"{100 * row['learner_busy']:.0f} %",
    )


def environments(result: Mapping[str, Any]) -> Rows:
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


def environment_processes(result: Mapping[str, Any]) -> Rows:
  """Yields a row for each way to run an environment or a tool."""
  yield from _ways(result["rows"])


def environment_processes_whole(result: Mapping[str, Any]) -> Rows:
  """Yields a row for each way to play a game from end to end."""
  yield from _ways(result["whole"])


def _ways(rows: Iterable[Mapping[str, Any]]) -> Rows:
  yield "way", "ms a start", "ms a turn", "turns/s, 16 at once"
  for row in rows:
    yield (
      row["name"],
      f"{row['start_ms']:.2f}",
      f"{row['turn_ms']:.2f}",
      f"{row['turns_per_s']:.0f}",
    )


def repeatable(result: Mapping[str, Any]) -> Rows:
  """Yields seconds of a round: with the mode, checkpoints, both or neither."""
  yield "`repeatable`", "checkpoints", "a round", "over neither"
  base = result["rows"][0]["round_s"]
  for row in result["rows"]:
    yield (
      str(row["repeatable"]).lower(),
      "every round" if row["saves"] else "at the end",
      f"{row['round_s']:.2f} s",
      f"{row['round_s'] / base:.2f}x",
    )


def hostile_server(result: Mapping[str, Any]) -> Rows:
  """Yields what large requests got, and how long others waited meanwhile."""
  yield ("request", "status", "took", "others waited", "at most")
  for row in result["server"]:
    yield (
      row["request"],
      str(row["status"]),
      f"{row['took_s']:.1f} s",
      f"{row['others_ms']:.0f} ms",
      f"{row['worst_ms']:.0f} ms",
    )


def hostile_files(result: Mapping[str, Any]) -> Rows:
  """Yields what became of runs whose files were damaged."""
  fates = ("moved aside", "left as it is", "refused")
  yield ("damage", "tried", "shown", *fates, "anything else")
  for row in result["files"]:
    counts = dict(row["outcomes"])
    shown = counts.pop("shown", 0)
    tried = sum(counts.values())
    known = [counts.pop(fate, 0) for fate in fates]
    numbers = (tried, shown, *known, sum(counts.values()))
    yield (row["damage"], *map(str, numbers))


def hostile_runs(result: Mapping[str, Any]) -> Rows:
  """Yields how many runs went on after each way to hurt them."""
  yield ("hurt by", "tried", "survived")
  for row in (*result["kills"], *result["disks"]):
    way = row["way"].replace("_", " ")
    yield (way, str(row["tried"]), str(row["survived"]))


TABLES: Sequence[Callable[[Mapping[str, Any]], Rows]] = (
  tools, seeds_guess_number_moe, seeds_frozen_lake_moe, seeds_agent_letters,
  overlap_as_is, overlap_slow, overlap_accelerator, repeatable,
  rollart_trajectories, rollart_redundancy, rollart_affinity, rollart_rewards,
  rollart_weights, rollart_weights_gains,
  rollart_failures, rollart_failures_others, rollart_pd,
  rollart_ladder,
  rollout_pipe, decode, latency, speculation, engine, engine_dispatch,
  constrained, start, learner,
  processes,
  coordinator,
  coordinator_memory,
  long_run,
  publish, weight_dtypes, moe, moe_dense, train_step, layers,
  train_step_logprobs,
  packing, fill, estimator_bias, attention, checkpoints, environments,
  environment_processes, environment_processes_whole,
  rewards_places, rewards_rounds, reward_rounds,
  hostile_server, hostile_files, hostile_runs,
)  # fmt: skip
"""A table's name begins with that of its file in benchmarks/results."""


def tables() -> dict[str, str]:
  """Returns every table as Markdown, by its name."""
  return {table.__name__: _markdown(table) for table in TABLES}


def result(name: str) -> Any:
  """Returns a file of benchmarks/results."""
  return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _markdown(table: Callable[[Mapping[str, Any]], Rows]) -> str:
  names = sorted((path.stem for path in RESULTS.glob("*.json")), key=len)
  name = next(n for n in reversed(names) if table.__name__.startswith(n))
  found = result(name)
  head, *rows = table(found)
  lines = [head, ["---"] * len(head), *rows]
  text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
  if name.startswith(_SIMULATED):
    return text
  return f"{text}\n*{found['machine'].split(',')[0]}*\n"


def with_tables(page: str) -> str:
  """Returns a page with its tables written anew.

  Raises:
    KeyError: the page names a table that is not in TABLES.
  """
  made = tables()

  def replaced(match: re.Match[str]) -> str:
    return f"{match[1]} -->\n\n{made[match[1]]}\n<!-- end -->"

  return _TABLE.sub(replaced, page)


def outdated() -> dict[pathlib.Path, str]:
  """Returns the text of each file that differs from its sources."""
  texts = {page: with_tables(page.read_text("utf-8")) for page in PAGES} | {
    PICTURE: make_docs_picture.draw(),
    RECIPES: make_docs_recipes.page(),
    make_docs_licences.PAGE: make_docs_licences.page(),
    LONG_RUN: make_docs_long_run.draw(result("long_run")),
    SETTINGS: make_docs_settings.page(),
  }
  return {
    path: text
    for path, text in texts.items()
    if not path.exists() or path.read_text("utf-8") != text
  }


def main() -> None:
  """Writes what differs, or reports it with --check."""
  differing = outdated()
  names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
  if "--check" in sys.argv[1:] and differing:
    sys.exit(f"{names}: not up to date; run python -m scripts.make_docs")
  for path, text in differing.items():
    path.write_text(text, "utf-8")


if __name__ == "__main__":
  main()
