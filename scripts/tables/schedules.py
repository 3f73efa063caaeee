"""Schedules on real meshes: time and staleness of a round."""

from collections.abc import Mapping
from typing import Any

from scripts.tables import cells

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
_TASKS = {
  "as_is": "as it is",
  "slow": "steps of 30 ms",
  "accelerator": "declared seconds",
}


def overlap_as_is(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a row for each schedule, on the task as it is."""
  yield from _overlap(result, "as_is")


def overlap_slow(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a row for each schedule, where steps of the game take time."""
  yield from _overlap(result, "slow")


def overlap_accelerator(result: Mapping[str, Any]) -> cells.Rows:
  """Yields a row for each schedule, where dispatches of decoding sleep."""
  yield from _overlap(result, "accelerator")


def _overlap(result: Mapping[str, Any], task: str) -> cells.Rows:
  yield (
    "schedule", "round, ms", "speed-up", "learner, decode busy, ms",
    "both busy, ms", "lag: mean, max", "useful tokens", "success",
    "T*, ms", "simulated / measured",
  )  # fmt: skip
  rows = [row for row in result["rows"] if row["task"] == task]
  fitted = ", fitted"
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
      f"{row['ratio']:.2f}x" + fitted * (row["schedule"] in result["fitted"]),
    )


def overlap_agreement(result: Mapping[str, Any]) -> cells.Rows:
  """Yields how far the simulation is from what was measured, by task."""
  yield (
    "task", "predicted rows", "within 10 %", "within 15 %",
    "simulated / measured", "T* / round, in flight",
  )  # fmt: skip
  for task, name in _TASKS.items():
    rows = [row for row in result["rows"] if row["task"] == task]
    ratios = [
      row["ratio"] for row in rows if row["schedule"] not in result["fitted"]
    ]
    flying = next(row for row in rows if row["schedule"] == "in_flight")
    ideal = flying["simulated"]["ideal_s"] / flying["measured"]["step_s"]
    yield (
      name,
      str(len(ratios)),
      *(
        str(sum(abs(ratio - 1.0) <= far for ratio in ratios))
        for far in (0.1, 0.15)
      ),
      f"{min(ratios):.2f} to {max(ratios):.2f}x",
      f"{ideal:.0%}".replace("%", " %"),
    )


def several_processes(result: Mapping[str, Any]) -> cells.Rows:
  """Yields measured and simulated rounds, by processes and schedule."""
  yield (
    "learner x engines", "schedule", "round, s", "least, most, s",
    "simulated, s", "simulated / measured",
  )  # fmt: skip
  for row in result["rows"]:
    low, high = row["range_s"]
    calibrates = row is result["rows"][0]
    yield (
      f"{row['learners']} x {row['engines']}",
      row["schedule"],
      f"{row['measured']['round_s']:.2f}",
      f"{low:.2f}, {high:.2f}",
      f"{row['simulated']['round_s']:.2f}",
      f"{row['ratio']:.2f}x" + ", fitted" * calibrates,
    )


def repeatable(result: Mapping[str, Any]) -> cells.Rows:
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
