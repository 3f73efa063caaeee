"""RollArt's ladder: five schedules on one trace, each rung on the one before.

  python -m benchmarks.rollart_ladder [--rounds=7]

  sync          rollout, then training; environments wait for the slowest of
                each turn, rewards for the last episode, at 16 local graders
  sync+         trajectories and rewards do not wait; graders are unlimited
  one off       the next round decodes while this one trains, and ends before
                it takes new weights (an engine at a time)
  start-bound   weights arrive inside trajectories; a bound of 1 at admission
                only. AReaL trains in the order of completion and lets groups
                grow older after admission; that is refused here, so groups
                train in the order of submission, which keeps the bound
  checked       the same, in the order of completion; groups that grow too old
                are aborted and played anew; weights travel hidden
  ours          checked, on two thirds H800 and one third H20 by affinity: at
                0.84 of the cost
  ours in order as start-bound, with hidden weights and affinity

The published ladder (RollArt, arXiv 2512.22560, 7.2) is throughput from 8B to
32B on 128 H800, 32 of which train, and 96 H800 + 32 H20 for RollArt; here half
of it, with half of a batch of 512. Weights travel as in tables 3 and 4, ratios
of H20 to H800 are those of table 2, and context takes 0.8 of an H800's time in
FrozenLake as in 3.1. Training takes 84 / 281 of the rollout of sync+, as in the
step of 3.1. Lengths and latencies are not published: environments have
log-normal latencies with a Pareto tail or, in the second table, the Gaussian
(10 s, 5 s) of R2. An id of context stands for all its encodings, so the cache
outlives a publish here: recomputing it would count many times.

Rates are trained tokens a second; `over` is against the rung before, for both
rows of ours against start-bound. `dropped` are sampled tokens that were not
trained; `cost` is that of the accelerators, by that of the other rungs.
Writes benchmarks/results/rollart_ladder.json.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import app

from benchmarks import machine, rollart_affinity, simulated
from rl.pools import affinity
from rl.rollout import grading, group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, resources, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor
from rl.simulation import result as simulation_result

# Of each rung over the one before, 8B to 32B.
PUBLISHED = {
  "sync+": (1.40, 2.40),
  "one off": (1.31, 1.47),
  "start-bound": (1.03, 1.06),
  "ours": (1.22, 1.36),
}
OVER_SYNC = (2.65, 4.58)
GROUPS = 32
_MEMBERS, _GRADERS = 8, 16
TRAIN_SHARE = 84.0 / 281.0
_SLOTS, _B0 = 64, 96.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A size of model on engines of 4 accelerators.

  Attributes:
    tau0_s: of a token on H800.
    exposed_s: for which decoding stands still when weights go over TCP.
    push_s, pull_s: hidden and exposed seconds through a store.
    swe: it plays SWE tasks.
    latency: of its environments, a key of `LATENCIES`.
  """

  tau0_s: float
  exposed_s: float
  push_s: float
  pull_s: float
  swe: bool = False
  latency: str = "tails"


MODELS = {
  "8B": Model(tau0_s=0.010, exposed_s=6.9, push_s=32.4, pull_s=1.4),
  "14B": Model(tau0_s=0.015, exposed_s=14.4, push_s=67.8, pull_s=5.1),
  "32B": Model(
    tau0_s=0.027, exposed_s=29.6, push_s=127.3, pull_s=9.6, swe=True
  ),
}
_RESET = distributions.LogNormal(
  mean=15.0, sigma=0.8, tail_share=0.02, tail_index=1.5, max_value=300.0
)
_TAILS = distributions.LogNormal(
  mean=2.0, sigma=1.0, tail_share=0.01, tail_index=1.5, max_value=120.0
)
# Of a step in (FrozenLake, all other environments).
LATENCIES = {
  "tails": (distributions.LogNormal(mean=0.5, sigma=1.0), _TAILS),
  "gaussian": (distributions.Gaussian(mean=10.0, sigma=5.0),) * 2,
}


def _task(
  name: str, turns: float, reply: float, answer: float, **other: Any
) -> workload.Workload:
  return workload.Workload(
    name=name,
    turns=distributions.LogNormal(mean=turns, sigma=0.4, max_value=50.0),
    prompt_tokens=distributions.Fixed(reply),
    reply_tokens=distributions.Fixed(reply),
    answer_tokens=distributions.LogNormal(
      mean=answer, sigma=0.5, max_value=16_000.0
    ),
    **other,
  )


def workloads(model: Model) -> tuple[workload.Workload, ...]:
  """Returns tasks in equal parts; the first are heavy on prefill."""
  short, slow = LATENCIES[model.latency]
  judged = distributions.LogNormal(mean=3.0, sigma=0.8)
  tests = distributions.LogNormal(mean=20.0, sigma=0.8)
  swe = _task(
    "swe", 12.0, 2_000.0, 400.0, start_s=_RESET, step_s=slow, reward_s=tests
  )
  return (
    _task("frozen_lake", 12.0, 1_500.0, 300.0, step_s=short),
    _task("webshop", 6.0, 2_000.0, 350.0, step_s=slow),
    *([swe] if model.swe else []),
    _task("math", 2.5, 250.0, 2_000.0, reward_s=judged),
    _task("game", 1.0, 800.0, 4_000.0),
  )


_HEAVY = ("frozen_lake", "webshop", "swe")


def _pool(
  name: str, accelerators: int, model: Model, stop_s: float
) -> simulate.EnginePool:
  h20 = name == "h20"
  tau0_s = model.tau0_s / (rollart_affinity.BANDWIDTH_RATIO if h20 else 1.0)
  # Of an H800: 1,000 ids of context take 4.5 times as long as 200 of answers.
  batch = simulated_processor.Speed(tau0_s=model.tau0_s, b0=_B0, slots=_SLOTS)
  encoded = 1_000.0 / (4.5 * 200.0) * batch.tokens_per_s
  return dataclasses.replace(
    rollart_affinity.pool(name, accelerators),
    speed=simulated_processor.Speed(
      tau0_s=tau0_s,
      b0=_B0,
      prefill_per_s=encoded * (rollart_affinity.COMPUTE_RATIO if h20 else 1.0),
      slots=_SLOTS,
      update_s=stop_s,
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
  """A schedule and its hardware.

  Attributes:
    lockstep: environments and rewards wait for the slowest.
    hidden: weights travel through a store while decoding goes on.
    mixed: one third of the decode pool is H20.
  """

  schedule: overlap.Overlap
  lockstep: bool = False
  hidden: bool = False
  mixed: bool = False


_FLYING = overlap.in_flight(GROUPS, 1, on_publish="keep_kv")
_CHECKED = dataclasses.replace(_FLYING, consume="drop")
RUNGS = {
  "sync": Rung(schedule=overlap.sync(GROUPS), lockstep=True),
  "sync+": Rung(schedule=overlap.sync(GROUPS)),
  "one off": Rung(schedule=overlap.one_step_off(GROUPS)),
  "start-bound": Rung(schedule=_FLYING),
  "checked": Rung(schedule=_CHECKED, hidden=True),
  "ours": Rung(schedule=_CHECKED, hidden=True, mixed=True),
  "ours in order": Rung(schedule=_FLYING, hidden=True, mixed=True),
}


def settings(
  rung: Rung, model: Model, token_s: float, rounds: int
) -> simulate.Simulation:
  """Returns the run of one rung."""
  stop_s = model.pull_s if rung.hidden else model.exposed_s
  if rung.mixed:
    pools = _pool("h800", 32, model, stop_s), _pool("h20", 16, model, stop_s)
  else:
    pools = (_pool("h800", 48, model, stop_s),)
  prefer = {
    one.name: "compute" if one.name in _HEAVY else "bandwidth"
    for one in workloads(model)
  }
  ahead = 2 * rung.schedule.max_staleness
  return simulate.Simulation(
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(
        token_s=token_s, update_s=0.0, accelerators=16
      ),
      pools=pools,
      transfer_s=model.push_s if rung.hidden else 0.0,
    ),
    workloads=workloads(model),
    overlap=rung.schedule,
    rollout=group_rollout.Rollout(
      group_size=_MEMBERS,
      max_turns=50,
      turn_tokens=16_000,
      max_tokens=1 << 18,
      step_s=1e6,
      grading=grading.Retries(deadline_s=1e6),
    ),
    routing=affinity.Routing(prefer=prefer)
    if rung.mixed
    else affinity.Routing(),
    rounds=rounds + 1 + ahead,
  )


def play(
  rung: Rung, model: Model, token_s: float, rounds: int
) -> simulation_result.Result:
  """Returns the result of a rung."""
  chosen = settings(rung, model, token_s, rounds)
  world = None
  if rung.lockstep:
    world = simulated.Lockstep(
      chosen.workloads,
      chosen.seed,
      resources.SeatPool(resources.Seats(count=_GRADERS)),
      episodes=GROUPS * _MEMBERS,
      graded_together=True,
    )
  return simulation_result.measure(simulated.play(chosen, world))


def cost(rung: Rung, model: Model) -> float:
  """Returns the cost of all accelerators over that of H800 alone."""
  cluster = settings(rung, model, 0.0, 1).cluster
  trains = 2.85 * cluster.learner.accelerators
  decodes = sum(pool.cost * pool.engines for pool in cluster.pools)
  return (trains + decodes) / (2.85 * cluster.accelerators)


def fit(model: Model, rounds: int) -> float:
  """Returns seconds of a trained id, for the published share of a step."""
  probe = 1e-6
  alone = play(RUNGS["sync+"], model, probe, rounds)
  rollout_s = alone.step_s - alone.train_s - alone.publish_s
  return probe * TRAIN_SHARE * rollout_s / alone.train_s


def climb(name: str, rounds: int, latency: str) -> list[dict[str, Any]]:
  """Returns a row for each rung with one model."""
  model = dataclasses.replace(MODELS[name], latency=latency)
  token_s = fit(model, rounds)
  results = {rung: play(RUNGS[rung], model, token_s, rounds) for rung in RUNGS}
  before = {"ours": "start-bound", "ours in order": "start-bound"}
  rows, last = [], ""
  for rung, result in results.items():
    below = before.get(rung, last) or rung
    over = result.tokens_per_s / results[below].tokens_per_s
    known = PUBLISHED.get(rung)
    rows.append(
      {
        "model": name,
        "rung": rung,
        "step_s": result.step_s,
        "train_s": result.train_s,
        "tokens_per_s": result.tokens_per_s,
        "over": over,
        "published": f"{known[0]:.2f}-{known[1]:.2f}" if known else "",
        "place": simulated.place(over, *known) if known else "",
        "over sync": result.tokens_per_s / results["sync"].tokens_per_s,
        "dropped": 1.0 - result.useful,
        "cost": cost(RUNGS[rung], model),
      }
    )
    last = rung
  return rows


def slower(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns the rungs that are slower than those before."""
  return [
    f"{row['model']} {row['rung']}: {row['over']:.3f}"
    for row in rows
    if row["over"] < 1.0
  ]


def holds(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
  """Returns for each model True if no published rung is slower than before."""
  kept = dict.fromkeys(MODELS, True)
  for row in rows:
    kept[row["model"]] &= row["rung"] not in PUBLISHED or row["over"] >= 1.0
  return kept


def main(_: list[str]) -> None:
  """Measures, prints and keeps both."""
  rounds = simulated.ROUNDS.value
  tables = {}
  for latency in LATENCIES:
    rows = [row for name in MODELS for row in climb(name, rounds, latency)]
    tables[latency] = {
      "rows": rows,
      "slower": slower(rows),
      "holds": holds(rows),
    }
    machine.show(f"each rung over the one before, {latency}", rows)
    print(f"\nslower than the rung before: {slower(rows) or 'none'}")
    print(f"the published ladder holds: {holds(rows)}")
  print(f"published over sync: {OVER_SYNC}")
  machine.keep(
    "rollart_ladder",
    groups=GROUPS,
    members=_MEMBERS,
    rounds=rounds,
    published={**PUBLISHED, "over_sync": OVER_SYNC},
    latencies=tables,
  )


if __name__ == "__main__":
  app.run(main)
