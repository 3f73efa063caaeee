"""The runs of the learning benchmark as tables: rows -> spreads -> Markdown."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks import learning_runs
from benchmarks.learning_runs import ON_POLICY, Row

NAMES = {
  "grpo": "GRPO",
  "dr_grpo": "Dr.GRPO",
  "dapo": "DAPO",
  "rloo": "RLOO",
  "gspo": "GSPO",
  "cispo": "CISPO",
}
LABELS = {
  "sync": "sync",
  "pipe": "round pipelined",
  "eta1": "eta 1",
  "eta2": "eta 2",
  "eta4": "eta 4",
}
LATE = [arm for arm in learning_runs.ARMS if arm != ON_POLICY]
"""The arms of schedules with a lag."""
_LATEST = "eta4"


@dataclasses.dataclass(frozen=True)
class Spread:
  """Mean, least and most over the seeds."""

  mean: float
  low: float
  high: float


def spread(values: Sequence[float]) -> Spread | None:
  """Returns the spread; None of nothing."""
  if not values:
    return None
  return Spread(statistics.fmean(values), min(values), max(values))


def final(row: Row) -> float:
  """Returns the share of successes after the last update."""
  return row["curve"][-1]


def area(row: Row) -> float:
  """Returns the mean share of successes over the samples of the run.

  It is the area below the curve, by trapezoids, over its length.
  """
  curve = row["curve"]
  inner = sum(curve[1:-1]) + (curve[0] + curve[-1]) / 2
  return inner / (len(curve) - 1)


class Table:
  """Runs by what they are of; any of them may be missing."""

  def __init__(self, rows: Sequence[Row]):
    self._rows = rows

  def runs(self, algorithm: str, schedule: str, arm: str) -> list[Row]:
    """Returns the runs of all seeds; on policy all arms are one."""
    wanted = arm if schedule != "sync" else ON_POLICY
    return [
      row
      for row in self._rows
      if (row["algorithm"], row["schedule"], row["arm"])
      == (algorithm, schedule, wanted)
      and _chosen(row)
    ]

  def spread(
    self,
    algorithm: str,
    schedule: str,
    arm: str,
    value: Callable[[Row], float] = final,
  ) -> Spread | None:
    """Returns what the seeds were worth; None where none has run."""
    return spread([value(r) for r in self.runs(algorithm, schedule, arm)])

  def before(self) -> Spread | None:
    """Returns the share of successes before the first update."""
    return spread([row["curve"][0] for row in self._rows])

  def of_schedule(self, schedule: str) -> list[Row]:
    """Returns all runs of a schedule."""
    return [
      row for row in self._rows if row["schedule"] == schedule and _chosen(row)
    ]

  def rates(self, algorithm: str) -> dict[float, list[Row]]:
    """Returns the runs by which a learning rate was chosen.

    Those of the chosen rate are of all seeds; the seeds of the others decide.
    """
    runs = [
      row
      for row in self._rows
      if (row["algorithm"], row["schedule"]) == (algorithm, "sync")
    ]
    seeds = {row["seed"] for row in runs if not _chosen(row)}
    found: dict[float, list[Row]] = {}
    for row in runs:
      if row["seed"] in seeds:
        found.setdefault(row["learning_rate"], []).append(row)
    return dict(sorted(found.items()))


def _chosen(row: Row) -> bool:
  """Whether the run had the learning rate that its algorithm has."""
  chosen = learning_runs.LEARNING_RATES[row["algorithm"]]
  return row["learning_rate"] == chosen


def has_arm(algorithm: str, arm: str) -> bool:
  """Whether there are such runs: a loss without a ratio has none of "ratio"."""
  return any(
    (case.algorithm, case.arm) == (algorithm, arm)
    for case in learning_runs.grid([0])
  )


def _arms() -> Iterator[tuple[str, str]]:
  for algorithm in NAMES:
    for arm in LATE:
      if has_arm(algorithm, arm):
        yield algorithm, arm


# As Markdown.


def page(table: Table, machine: str) -> str:
  """Returns docs/learning.md."""
  parts = [
    _HEAD.format(
      updates=learning_runs.UPDATES,
      groups=learning_runs.GROUPS,
      members=learning_runs.MEMBERS,
      samples=learning_runs.UPDATES * learning_runs.SAMPLES,
      before=_percent(table.before()),
      machine=machine,
    ),
    "## Success at equal samples\n\n" + _FINAL,
    by_schedule(table, final),
    "## What lag costs, and what is won back\n\n" + _COSTS,
    costs(table),
    "## Success over the whole run\n\n"
    + _AREA.format(every=learning_runs.EVERY),
    by_schedule(table, area),
    "## How late the samples were\n\n" + _LAGS,
    lags(table),
    _DETAILS,
    details(table),
    "## The learning rates\n\n" + _RATES,
    rates(table),
  ]
  return "\n\n".join(parts) + "\n"


def by_schedule(table: Table, value: Callable[[Row], float]) -> str:
  """Returns a line for each algorithm and arm, with a column a schedule."""
  rows = [
    [
      NAMES[algorithm],
      arm,
      _seeds(table, algorithm, arm),
      *(
        _percent(table.spread(algorithm, schedule, arm, value))
        for schedule in LABELS
      ),
    ]
    for algorithm, arm in _arms()
  ]
  return _markdown(["algorithm", "arm", "seeds", *LABELS.values()], rows)


def _seeds(table: Table, algorithm: str, arm: str) -> str:
  """Returns how many seeds a line has: "5", or "3–5" if its cells differ."""
  found = {len(table.runs(algorithm, schedule, arm)) for schedule in LABELS}
  return "–".join(str(count) for count in sorted({min(found), max(found)}))


def costs(table: Table) -> str:
  """Returns what each algorithm loses at the largest bound, in points."""
  corrected = [arm for arm in LATE if arm != "uncorrected"]
  pairs = [
    ("uncorrected", ON_POLICY),
    *((arm, "uncorrected") for arm in corrected),
    *((arm, ON_POLICY) for arm in corrected),
  ]
  changes = {
    algorithm: [_change(table, algorithm, *pair) for pair in pairs]
    for algorithm in NAMES
  }
  rows = [
    [NAMES[algorithm], *map(_points, found)]
    for algorithm, found in changes.items()
  ]
  means = [
    spread([change for change in column if change is not None])
    for column in zip(*changes.values(), strict=True)
  ]
  rows.append(["mean", *(_points(own and own.mean) for own in means)])
  return _markdown(
    ["algorithm", *(f"{arm} against {other}" for arm, other in pairs)], rows
  )


def _change(table: Table, algorithm: str, arm: str, other: str) -> float | None:
  """Returns how much better one arm ends than another, at the latest.

  It is the mean over the seeds that both have run.
  """

  def by_seed(name: str) -> dict[int, float]:
    schedule = "sync" if name == ON_POLICY else _LATEST
    runs = table.runs(algorithm, schedule, name)
    return {row["seed"]: final(row) for row in runs}

  values, base = by_seed(arm), by_seed(other)
  change = spread([values[seed] - base[seed] for seed in values.keys() & base])
  return change and change.mean


def lags(table: Table) -> str:
  """Returns how late samples were on each schedule, over all its runs."""
  rows = []
  for schedule in LABELS:
    runs = table.of_schedule(schedule)
    rows.append(
      [
        LABELS[schedule],
        *(
          _number(spread([row[name] for row in runs]), 2)
          for name in ("staleness", "late")
        ),
      ]
    )
  header = ["schedule", "groups, in rounds", "trained tokens, in updates"]
  return _markdown(header, rows)


def details(table: Table) -> str:
  """Returns what else was measured at the largest bound, a line an arm."""
  rows = []
  for algorithm, arm in _arms():
    runs = table.runs(algorithm, _LATEST, arm)
    kl = [
      spread([row["kl"][lag] for row in runs if row["kl"][lag] is not None])
      for lag in range(learning_runs.MOST_LATE + 1)
    ]
    rows.append(
      [
        NAMES[algorithm],
        arm,
        *(f"{own.mean:.1e}" if own else "–" for own in kl),
        *(_mean(runs, name) for name in ("clipped", "ess", "entropy")),
        _number(spread([row["played"] / row["trained"] for row in runs]), 2),
      ]
    )
  header = [
    "algorithm",
    "arm",
    *(f"KL, lag {lag}" for lag in range(learning_runs.MOST_LATE + 1)),
    "clipped",
    "ESS",
    "entropy",
    "played / trained",
  ]
  return _markdown(header, rows)


def rates(table: Table) -> str:
  """Returns what each algorithm learns in sync with each learning rate."""
  found = {name: table.rates(name) for name in NAMES}
  tried = sorted({rate for own in found.values() for rate in own})
  rows = [
    [
      NAMES[name],
      *(
        _percent(spread([area(r) for r in own.get(rate, [])])) for rate in tried
      ),
      f"{learning_runs.LEARNING_RATES[name]:g}",
    ]
    for name, own in found.items()
  ]
  return _markdown(["algorithm", *(f"{x:g}" for x in tried), "chosen"], rows)


def _mean(runs: Sequence[Row], name: str) -> str:
  found = spread([row[name] for row in runs if row[name] is not None])
  return f"{found.mean:.2f}" if found else "–"


def _percent(found: Spread | None) -> str:
  if found is None:
    return "–"
  return f"{found.mean:.0%} ({100 * found.low:.0f}–{100 * found.high:.0f})"


def _number(found: Spread | None, digits: int) -> str:
  if found is None:
    return "–"
  low, high = f"{found.low:.{digits}f}", f"{found.high:.{digits}f}"
  return f"{found.mean:.{digits}f} ({low}–{high})"


def _points(change: float | None) -> str:
  return "–" if change is None else f"{100 * change:+.0f}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_HEAD = """# Learning from late samples

Six algorithms learn to find a number from 1 to 12 in four guesses, on every
schedule. All runs of a seed begin with the same weights, which have imitated
random guesses and a binary search in equal parts, and succeed in {before} of
all games. Then come {updates} updates of {groups} groups of {members} games:
{samples:,} games for every run, whatever its schedule; an algorithm has the same
learning rate on all of them. The policy is a dense transformer of two layers
and width 64.

Written by `python -m benchmarks.learning` ({machine}).

![success by schedule, a panel for each algorithm](learning.svg)

| schedule | samples |
|---|---|
| sync | on policy: the weights in training sampled every token |
| round pipelined | two updates a round: every second update trains samples that are one update late |
| eta 1, 2, 4 | in flight: up to that many rounds between the first token of a group and its training; weights arrive in the middle of games |

| arm | correction |
|---|---|
| uncorrected | none: the ratio is against the weights in training, so it is 1, as if these had sampled (`old_logprob=recompute`, weights of 1). A run refuses this; the benchmark does it on purpose |
| ratio | the ratio of the loss is against the policy that sampled (`old_logprob=decode`, the default). GRPO, Dr.GRPO and DAPO stop the gradient of tokens whose ratio is out of bounds, GSPO that of whole games; CISPO stops none and weighs up to 5. The loss of RLOO has no ratio |
| truncated | the ratio is against the weights in training, and every token weighs min(p, 2), with p its probability under these weights over that under the policy that sampled it (`old_logprob=recompute`, `correction=token_truncated(cap=2)`) |

On policy all three are the same run, but for rounding: the column sync. Every
batch has one update, so a ratio against the weights in training never leaves
its bounds: the arms uncorrected and truncated clip nothing.

Every run repeats to the last digit, those in flight as well
(`repeatable=true`), on the same machine and version of jax."""  # noqa: E501
_FINAL = """Held-out games won after the last update, at temperature 1: mean
over the seeds, lowest and highest in brackets. A sample is a trained game. DAPO
replaces groups whose rewards are all equal by others, and the replaced ones are
not counted here: see "played / trained" below."""
_COSTS = """At eta 4, in percentage points: the mean over the seeds that both have run."""  # noqa: E501
_AREA = """The same as a mean over the samples of the run: the area under the
curve of held-out success, measured every {every} updates."""
_LAGS = """Mean over all runs of a schedule, lowest and highest in brackets. The
version of its first token decides how late a group is; tokens that were sampled
after weights had arrived are less late. In a round of two updates every second
one is an update late."""
_DETAILS = """At eta 4: KL(sampler, policy) in nats a token, for tokens of
each lag in rounds; the share of tokens that a bound clips; effective sample
size of the weights as a share of tokens; entropy in nats a token; games played
for each trained one."""
_RATES = """Success over the whole run in sync, by learning rate: that with
the most was chosen. A clip of the gradient's norm at 1 acts more often on
Dr.GRPO and RLOO, which sum over the tokens of a game where others average."""
