"""Success of trained runs, and the bias of estimators."""

from collections.abc import Mapping
from typing import Any

from scripts.tables import cells

_ESTIMATES = {
  "SequenceTruncated(cap=inf)": (
    "trajectory's importance weight, with REINFORCE"
  ),
  "SequenceTruncated": "the same, truncated at 2",
  "Cispo": "token's importance weight (CISPO, AIPO, truncated)",
  "Reinforce": "REINFORCE, uncorrected",
  "ClippedSurrogate": "clipped ratio",
  "Gspo": "GSPO",
  "Gmpo": "GMPO",
  "GeometricRejection": "geometric rejection, 0.999 to 1.001",
}


def seeds_guess_number_moe(result: Mapping[str, Any]) -> cells.Rows:
  """Yields success before and after training, a row a seed."""
  yield "seed", "after the warm start", "after 1,000 rounds", "minutes in all"
  yield from _seeds(result)


def seeds_guess_number_moe_bfloat16(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the same of runs in bfloat16, whose processors others used, too."""
  yield from (row[:-1] for row in seeds_guess_number_moe(result))


def seeds_frozen_lake_moe(result: Mapping[str, Any]) -> cells.Rows:
  """Yields success before and after training, a row a seed."""
  yield "seed", "after the warm start", "after 160 rounds", "minutes in all"
  yield from _seeds(result)


def seeds_agent_letters(result: Mapping[str, Any]) -> cells.Rows:
  """Yields success before and after training, a row a seed."""
  yield "seed", "untrained", "after 30 rounds", "minutes in all"
  yield from _seeds(result)


def tools(result: Mapping[str, Any]) -> cells.Rows:
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


def _seeds(result: Mapping[str, Any]) -> cells.Rows:
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


def estimator_bias(result: Mapping[str, Any]) -> cells.Rows:
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
