"""Published workloads on simulated clusters."""

from collections.abc import Mapping
from typing import Any

from scripts.tables import cells


def rollart_trajectories(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the published and the simulated speed-up at each latency."""
  yield "sigma of a step", "published", "simulated", "deviation"
  for row in result["rows"]:
    yield (
      f"{row['sigma_s']} s",
      f"{row['published']:.2f}x",
      f"{row['speedup']:.2f}x",
      cells.signed(row["deviation"]),
    )


def rollart_redundancy(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the published and the simulated speed-up for each surplus."""
  yield "members", "groups", "published", "simulated", "deviation", "aborted"
  for row in result["rows"]:
    yield (
      str(row["group size"]),
      str(row["groups"]),
      f"{row['published']:.2f}x",
      f"{row['speedup']:.2f}x",
      cells.signed(row["deviation"]),
      f"{100 * row['aborted']:.0f} %",
    )


def rollart_affinity(result: Mapping[str, Any]) -> cells.Rows:
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


def rollart_rewards(result: Mapping[str, Any]) -> cells.Rows:
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


def rollart_weights(result: Mapping[str, Any]) -> cells.Rows:
  """Yields published and predicted seconds of each way of the weights."""
  yield "way", "model", "published", "predicted", "error"
  for row in result["rows"]:
    yield (
      row["way"],
      row["model"],
      f"{row['published_s']:.1f} s",
      f"{row['predicted_s']:.1f} s",
      "fitted" if row["fitted"] else cells.signed(row["error"]),
    )


def rollart_weights_gains(result: Mapping[str, Any]) -> cells.Rows:
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
      # Without the end of the range that it is measured from.
      *(
        f"{one['gain']:.2f}x, {one['place'].partition(' of ')[0]}"
        for one in simulated
      ),
    )


def rollart_failures(result: Mapping[str, Any]) -> cells.Rows:
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
      cells.signed(row["error"]),
    )


def rollart_failures_others(result: Mapping[str, Any]) -> cells.Rows:
  """Yields the cost of one outage under other schedules."""
  yield "schedule", "spare slots", "environments lost", "costs"
  for row in result["others"]:
    yield (
      row["schedule"],
      str(row["spare slots"]),
      str(row["lost"]),
      f"{row['cost_s']:.0f} s",
    )


def rollart_pd(result: Mapping[str, Any]) -> cells.Rows:
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
      cells.signed(row["error"]) if known else "",
    )


def rollart_ladder(result: Mapping[str, Any]) -> cells.Rows:
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


def rollout_pipe(result: Mapping[str, Any]) -> cells.Rows:
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
