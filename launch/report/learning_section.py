"""The outcome of learning, on top of a report: tiles and sentences.

Metrics that the run has not recorded are left out. Start and end values are
means over the first and the last tenth of the rounds.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.report import run_files
from rl.loop import metric_bounds
from rl.settings import overrides
from rl.train import skipped_updates

Tile = tuple[str, str, str]
"""Label, value, note."""

_MAX_LISTED = 8
_BY_LAG = re.compile(r"behaviour_kl/lag_(\d+)")


def tiles(rows: run_files.Rows) -> list[Tile]:
  """Returns the tiles of rewards, policy and updates."""
  candidates = [
    _course(rows, "success", "Success in training", "{:.0%}", "episodes won"),
    _course(rows, "reward_mean", "Reward", "{:.3g}", "mean of an episode"),
    _course(rows, "entropy", "Entropy", "{:.3g}", "nats a token"),
    _largest(rows, "clip_fraction", "Clipped", "{:.1%}", "of the tokens"),
    _kl_to_sampler(rows),
    _zero_variance(rows),
    _skipped(rows),
  ]
  return [tile for tile in candidates if tile is not None]


def complaints(rows: run_files.Rows, run_dir: pathlib.Path) -> list[str]:
  """Returns sentences about failed updates, and where to look.

  Args:
    run_dir: named in the commands.
  """
  sentences = []
  if skipped := [row["round"] for row in rows if row.get("skipped_updates")]:
    saved = skipped_updates.updates(run_dir / "skipped")
    look = (
      f" Look into one: python -m launch.replay {saved[-1]}" if saved else ""
    )
    sentences.append(
      "Updates were skipped, as their loss or gradient was not finite, in "
      f"{_rounds(skipped)}.{look}"
    )
  empty = [
    row["round"]
    for row in rows
    if row.get("trained_tokens") == 0
    and row.get("faults")
    and not row.get("zero_variance_groups")
  ]
  if empty:
    sentences.append(
      f"Faults left nothing to train in {_rounds(empty)}; their messages are "
      "with the trajectories."
    )
  return sentences


def crossings(rows: run_files.Rows, config: Mapping[str, Any]) -> list[str]:
  """Returns sentences about metrics that have left their bounds.

  Args:
    config: of the run; an older one has no bounds.
  """
  if "bounds" not in config:
    return []
  try:
    data = {"class": "rl.loop.metric_bounds.MetricBounds", **config["bounds"]}
    bounds = overrides.from_json(data).resolved(
      compute=config["model"]["compute"]["dtype"],
      published=config["publishing"]["dtype"],
      on_publish=config["overlap"]["on_publish"],
    )
  except (LookupError, ValueError, TypeError):
    return ["config.json has no bounds to compare the metrics with."]
  found = [f"{crossing}." for crossing in metric_bounds.crossings(bounds, rows)]
  more = len(found) - _MAX_LISTED
  rest = [f"Metrics left their bounds {more} times more."] if more > 0 else []
  return [f"{line[0].upper()}{line[1:]}" for line in found[:_MAX_LISTED]] + rest


def _rounds(numbers: Sequence[float]) -> str:
  listed = ", ".join(f"{n:.0f}" for n in numbers[:_MAX_LISTED])
  more = (
    f" and {len(numbers) - _MAX_LISTED} more"
    if len(numbers) > _MAX_LISTED
    else ""
  )
  return f"{'rounds' if len(numbers) > 1 else 'round'} {listed}{more}"


def _course(
  rows: run_files.Rows, key: str, label: str, form: str, what: str
) -> Tile | None:
  """Returns the start and end values of a metric."""
  if not (values := run_files.column(rows, key)):
    return None
  many = max(1, len(values) // 10)
  first, last = values[:many], values[-many:]
  value = " → ".join(form.format(sum(x) / many) for x in (first, last))
  span = f"{many} rounds" if many > 1 else "round"
  return label, value, f"{what}; first and last {span}"


def _largest(
  rows: run_files.Rows, key: str, label: str, form: str, what: str
) -> Tile | None:
  """Returns the mean of a metric, and its largest."""
  if not (values := run_files.column(rows, key)):
    return None
  mean = form.format(sum(values) / len(values))
  return label, mean, f"{what}; in a round at most {form.format(max(values))}"


def _kl_to_sampler(rows: run_files.Rows) -> Tile | None:
  """Returns the KL to the policy that sampled the oldest tokens."""
  lags = {
    int(found[1])
    for row in rows
    for key in row
    if (found := _BY_LAG.fullmatch(key)) and row[key] is not None
  }
  if not lags:
    return _largest(
      rows, "behaviour_kl", "KL to the sampler", "{:.2g}", "nats a token"
    )
  last = max(lags)
  what = (
    f"nats a token, {last} version{'s' * (last > 1)} late"
    if last
    else "nats a token"
  )
  key = f"behaviour_kl/lag_{last}"
  return _largest(rows, key, "KL to the sampler", "{:.2g}", what)


def _zero_variance(rows: run_files.Rows) -> Tile | None:
  parts = run_files.column(rows, "zero_variance_groups")
  groups = sum(run_files.column(rows, "groups"))
  if not parts or not groups:
    return None
  note = f"{sum(parts):,.0f} of {groups:,.0f} groups taught nothing"
  return "Zero-variance groups", f"{sum(parts) / groups:.0%}", note


def _skipped(rows: run_files.Rows) -> Tile | None:
  if not (values := run_files.column(rows, "skipped_updates")):
    return None
  hit = sum(1 for x in values if x)
  note = f"in {hit:,} of {len(values):,} rounds" if hit else "all were finite"
  return "Skipped updates", f"{sum(values):,.3g}", note
