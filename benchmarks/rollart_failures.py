"""RollArt's environment failures: the step in which environments restart late.

  python -m benchmarks.rollart_failures [--rounds=4]

SWE, an 8B model with 32k tokens, 128 episodes a step on 32 H800. RollArt (arXiv
2512.22560, 3.1) publishes a step of 365.7 s: 53.8 % generation, 14.6 % reset of
environments, 23.1 % training, 8.5 % others; and one in ten with a failure, of
513.3 s, where resets are 78 % of the rollout.

Two readings of a failure, since the paper does not say how many environments it
takes. Either a host goes down 10 s into a rollout with those that start on it,
and does not come back: they start again in slots that others have left. Nothing
of it is fitted. Or no environment can start any more, after so many seconds,
for so long that the last one has started after 78 % of the rollout; then the
outage is fitted, and predicted is what the rest of the rollout takes, with the
engines nearly empty.

Inputs that are published: those above except 513.3 s, 30 to 50 turns, and that
starts are tried again. Fitted, and so no results: the seconds of a token, to
the plain step; of a start, to the last of 53 s. From shapes: a sequence of 16k
ids has 2.4 GB of keys and values beside 16 GB of weights, so 7 of them double
the time of a token. Assumed: log-normal answers of 200 tokens (sigma 0.5),
replies of 400, starts of sigma 0.3, 128 slots and no more.

Then what a host of 16 slots that is down for 300 s costs other schedules, with
and without another host of spare slots. No number is published for that.

In virtual time. Writes benchmarks/results/rollart_failures.json.
"""

import dataclasses
import statistics
from typing import Any

from absl import app

from benchmarks import machine, simulated
from rl.audit import event_log
from rl.rollout import starting
from rl.schedule import overlap
from rl.simulation import distributions, hosts, simulate
from rl.simulation import processor as simulated_processor

STEP_S, FAILED_S, ONE_IN = 365.7, 513.3, 10
RESET_S, RESET_SHARE = 0.146 * STEP_S, 0.78
_LEARNER_S = (0.231 + 0.085) * STEP_S
_GROUPS, _ENGINES = 16, 32
_SLOTS = _GROUPS * simulated.SWE_ROLLOUT.group_size
_OUTAGE_AFTER_S = 10.0
LOST = (1, 4, 16, 64)
STUCK_AFTER_S = (10.0, 25.0, 35.0)
_DOWN_S = 300.0
_SEEDS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
  """What is fitted to a step without a failure, in seconds."""

  tau0_s: float = 0.01
  start_s: float = 30.0


def settings(
  rates: Rates,
  *,
  lost: int = 16,
  outages: tuple[hosts.Outage, ...] = (),
  schedule: overlap.Overlap | None = None,
  rounds: int = 1,
  seed: int = 0,
) -> simulate.Simulation:
  """Returns a run on hosts of `lost` slots each."""
  speed = simulated_processor.Speed(
    tau0_s=rates.tau0_s, b0=7.0, prefill_per_s=40_000.0
  )
  return simulate.Simulation(
    cluster=simulated.cluster(speed, _ENGINES, update_s=_LEARNER_S),
    workloads=(
      dataclasses.replace(
        simulated.SWE,
        start_s=distributions.LogNormal(mean=rates.start_s, sigma=0.3),
        restarts=True,
      ),
    ),
    overlap=schedule or overlap.sync(_GROUPS),
    rollout=dataclasses.replace(
      simulated.SWE_ROLLOUT, starting=starting.Starting(breaker=1 << 10)
    ),
    hosts=hosts.Hosts(count=_SLOTS // lost, slots=lost, outages=outages),
    rounds=rounds,
    warmup=0,
    seed=seed,
  )


def play(chosen: simulate.Simulation) -> tuple[float, float]:
  """Returns seconds of the first rollout, and until its last start is over."""
  record = simulated.play(chosen)
  (ready_s,) = (e["t"] for e in event_log.of_kind(record.events, "update"))
  started_s = max(
    e["t"] - e["decode_s"] - e["env_s"]
    for e in event_log.of_kind(record.events, "turn")
    if e["number"] == 0
  )
  return ready_s - _LEARNER_S, started_s


def means(rates: Rates, **chosen: Any) -> tuple[float, float]:
  """Returns `play` as means over seeds."""
  plays = [play(settings(rates, seed=s, **chosen)) for s in range(_SEEDS)]
  rollouts_s, started_s = zip(*plays, strict=True)
  return statistics.mean(rollouts_s), statistics.mean(started_s)


def fit() -> Rates:
  """Returns the rates with which a step takes what is published.

  The last start takes time in proportion to their mean, and the rest of a
  rollout nearly in proportion to the time of a token.
  """
  rates = Rates()
  for _ in range(3):
    rollout_s, started_s = means(rates)
    wanted_s = STEP_S - _LEARNER_S - RESET_S
    rates = Rates(
      tau0_s=rates.tau0_s * wanted_s / (rollout_s - started_s),
      start_s=rates.start_s * RESET_S / started_s,
    )
  return rates


def gone(rates: Rates, lost: int) -> dict[str, Any]:
  """Returns the row of a host that does not come back in this step."""
  outage = hosts.Outage(start_s=_OUTAGE_AFTER_S, down_s=1e5, host=0)
  rollout_s, started_s = means(rates, lost=lost, outages=(outage,))
  failure = f"a host with {lost} is gone"
  return _row(failure, 0.0, rollout_s, started_s)


def stuck(rates: Rates, after_s: float) -> dict[str, Any]:
  """Returns the row of starts that fail everywhere, after so many seconds.

  They do so until the last start takes the published share of the rollout.
  """
  down_s, rollout_s, started_s = 300.0, 1.0, 0.0
  for _ in range(6):
    outage = hosts.Outage(start_s=after_s, down_s=down_s, starts_only=True)
    rollout_s, started_s = means(rates, outages=(outage,))
    if abs(started_s / rollout_s - RESET_SHARE) < 0.01:
      break
    # What follows the last start hardly depends on when it is.
    rest_s = rollout_s - started_s
    down_s += rest_s * RESET_SHARE / (1.0 - RESET_SHARE) - started_s
  return _row(f"no start after {after_s:g} s", down_s, rollout_s, started_s)


def _row(
  failure: str, down_s: float, rollout_s: float, started_s: float
) -> dict[str, Any]:
  step_s = rollout_s + _LEARNER_S
  mean_s = ((ONE_IN - 1) * STEP_S + step_s) / ONE_IN
  published_s = ((ONE_IN - 1) * STEP_S + FAILED_S) / ONE_IN
  return {
    "failure": failure,
    "down_s": down_s,
    "reset share": started_s / rollout_s,
    "step_s": step_s,
    "error": simulated.deviation(step_s, FAILED_S),
    "mean error": simulated.deviation(mean_s, published_s),
  }


SCHEDULES = {
  "synchronous": overlap.sync(_GROUPS),
  "one member more": dataclasses.replace(
    overlap.sync(_GROUPS), redundancy=overlap.Redundancy(extra_members=1)
  ),
  "in flight": overlap.in_flight(_GROUPS),
}


def cost(rates: Rates, name: str, rounds: int, spare: int) -> dict[str, Any]:
  """Returns the row of what an outage in the second round costs a schedule.

  Args:
    spare: hosts beyond those that the episodes need.
  """
  schedule = SCHEDULES[name]
  more = schedule.redundancy.extra_members * _GROUPS
  shifts = schedule.max_staleness + 1
  base = settings(rates, schedule=schedule, rounds=rounds)
  assert base.hosts is not None
  count = (_SLOTS * shifts + more) // base.hosts.slots + spare
  base = dataclasses.replace(
    base, hosts=dataclasses.replace(base.hosts, count=count)
  )
  plain = simulated.play(base)
  first_s, *_ = simulated.rounds_s(plain)
  assert base.hosts is not None
  outage = hosts.Outage(
    start_s=first_s + _OUTAGE_AFTER_S, down_s=_DOWN_S, host=0
  )
  broken = simulated.play(
    dataclasses.replace(
      base, hosts=dataclasses.replace(base.hosts, outages=(outage,))
    )
  )
  assert broken.hosts is not None
  return {
    "schedule": name,
    "spare slots": spare * base.hosts.slots,
    "step_s": plain.virtual_s / rounds,
    "lost": broken.hosts.lost,
    "cost_s": broken.virtual_s - plain.virtual_s,
  }


def main(_: list[str]) -> None:
  """Fits, predicts, prints and keeps."""
  rates = fit()
  rollout_s, started_s = means(rates)
  print(f"{rates}: {rollout_s + _LEARNER_S:.1f} s, starts {started_s:.1f} s")
  rows = [gone(rates, lost) for lost in LOST]
  rows += [stuck(rates, after_s) for after_s in STUCK_AFTER_S]
  machine.show(f"a step with a failure; published {FAILED_S} s", rows)
  others = [
    cost(rates, name, simulated.ROUNDS.value, spare)
    for name in SCHEDULES
    for spare in (0, 1)
  ]
  machine.show("the cost of one outage", others)
  machine.keep(
    "rollart_failures",
    rounds=simulated.ROUNDS.value,
    seeds=_SEEDS,
    published={"step_s": STEP_S, "failed_s": FAILED_S, "share": RESET_SHARE},
    fitted=dataclasses.asdict(rates),
    plain_s=rollout_s + _LEARNER_S,
    rows=rows,
    others=others,
  )


if __name__ == "__main__":
  app.run(main)
