"""RollArt's affinity: two kinds of accelerators against one, at equal cost.

  python -m benchmarks.rollart_affinity [--rounds=7]

Rollout on 64 H800 and 24 H20 (cost 206), on 208 H20 (208) or on 72 H800 (205),
as in RollArt (arXiv 2512.22560, 7.3); training takes no time. Half of the tasks
are heavy on prefill (FrozenLake, SWE) and half on decoding (math, game).

Rates follow from two ratios of table 2: H20 by H800 is 148 by 989.5 TFLOPS for
context and 4 by 3.35 TB/s for answers. How the time of a task on an H800 is
shared between the two follows from section 3.1: 82 % context in FrozenLake, 11
to 26 % in math (18 % here). Assumed are that SWE is like FrozenLake, that the
single turn of a game has 2 %, and that a session of each task takes an H800
equally long. An engine is 4 accelerators that serve one request after the
other, at the rate of a full batch; an id of context is as much as an H800
encodes in the time of a sampled one. Cached prefixes outlive a publish.

  blind         sessions go to the engine with the fewest
  declared      routing.prefer by task; a session goes elsewhere when the other
                pool has fewer sessions an engine (overload=1)
  strict        declared, and no session leaves its pool
  learned       routing.learn, with the same tasks and no declaration

`limit` is the gain of the mixed pool if no engine were ever idle and H20 had
the tasks that suit them best. Homogeneous pools with and without routing must
not differ. Writes benchmarks/results/rollart_affinity.json.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from absl import app

from benchmarks import machine, simulated
from rl.audit import event_log
from rl.pools import affinity
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor

OVER_BANDWIDTH, OVER_COMPUTE = (1.30, 1.68), (1.12, 1.37)
COMPUTE_RATIO, BANDWIDTH_RATIO = 148.0 / 989.5, 4.0 / 3.35
_PER_ENGINE, _PER_S, _COST = 4, 1_000.0, 2.85
_GROUPS, _MEMBERS, _IDS = 64, 8, 10_000
_TURNS = {"frozen_lake": 10, "swe": 12, "math": 3, "game": 1}
_HEAVY = ("frozen_lake", "swe")
# Share of context in the time of an H800.
MIDDLE = {"frozen_lake": 0.82, "swe": 0.82, "math": 0.18, "game": 0.02}
_DECLARED = affinity.Routing(
  prefer={
    name: "compute" if name in _HEAVY else "bandwidth" for name in _TURNS
  },
  overload=1.0,
)
ROUTINGS = {
  "blind": affinity.Routing(),
  "declared": _DECLARED,
  "strict": dataclasses.replace(_DECLARED, overload=None),
  "learned": affinity.Routing(learn=True, explore_every=64),
}


def slowdown(share: float) -> float:
  """Returns the time of a task on an H20 over that on an H800."""
  return share / COMPUTE_RATIO + (1.0 - share) / BANDWIDTH_RATIO


def pool(name: str, accelerators: int) -> simulate.EnginePool:
  """Returns a pool of H800 or H20; other names are H800 too."""
  h20 = name == "h20"
  return simulate.EnginePool(
    name=name,
    engines=accelerators // _PER_ENGINE,
    speed=simulated_processor.Speed(
      tau0_s=1.0 / _PER_S / (BANDWIDTH_RATIO if h20 else 1.0),
      b0=math.inf,
      prefill_per_s=_PER_S * (COMPUTE_RATIO if h20 else 1.0),
      slots=1,
    ),
    kind="bandwidth" if h20 else "compute",
    cost=_PER_ENGINE * (1.0 if h20 else _COST),
    accelerators=_PER_ENGINE,
  )


POOLS = {
  "208 H20": (pool("h20", 208),),
  "72 H800": (pool("h800", 72),),
  "64 H800 + 24 H20": (pool("h800", 64), pool("h20", 24)),
  "36 H800 + 36 H800": (pool("first", 36), pool("second", 36)),
}


def workloads(shares: Mapping[str, float]) -> tuple[workload.Workload, ...]:
  """Returns tasks in the given shares, equally long on an H800."""
  return tuple(
    workload.Workload(
      name=name,
      turns=distributions.Fixed(float(turns)),
      prompt_tokens=distributions.Fixed(_IDS * shares[name] / turns),
      reply_tokens=distributions.Fixed(_IDS * shares[name] / turns),
      answer_tokens=distributions.LogNormal(
        mean=_IDS * (1.0 - shares[name]) / turns, sigma=0.6
      ),
    )
    for name, turns in _TURNS.items()
  )


def play(
  pools: tuple[simulate.EnginePool, ...],
  routing: affinity.Routing,
  shares: Mapping[str, float],
  *,
  rounds: int,
) -> tuple[float, Mapping[str, float]]:
  """Returns the seconds of one round's work, and the router's counts."""
  chosen = simulate.Simulation(
    cluster=simulate.Cluster(
      learner=simulated_learner.LearnerSpeed(token_s=0.0, update_s=0.0),
      pools=pools,
      transfer_s=0.0,
    ),
    workloads=workloads(shares),
    overlap=overlap.in_flight(_GROUPS, 1, on_publish="keep_kv"),
    rollout=group_rollout.Rollout(
      group_size=_MEMBERS,
      max_turns=64,
      turn_tokens=1 << 19,
      max_tokens=1 << 20,
      step_s=1e6,
    ),
    routing=routing,
    rounds=rounds + 3,
  )
  record = simulated.play(chosen)
  return _GROUPS * _MEMBERS / _sessions_per_s(record), record.routes


def _sessions_per_s(record: simulate.RunRecord) -> float:
  """Returns sessions a second, each turn as a part of one.

  Work that later rounds train counts when it is done, which may be nearly a
  round more or less between two publishes.
  """
  ends = [e["t"] for e in event_log.of_kind(record.events, "published")]
  counted = record.settings.counted
  start, end = ends[counted.start - 1], ends[counted.stop - 1]
  sources = {
    e["group"]: e["source"]
    for e in event_log.of_kind(record.events, "submitted")
  }
  done = sum(
    1.0 / _TURNS[sources[e["group"]]]
    for e in event_log.of_kind(record.events, "turn")
    if start < e["t"] <= end
  )
  return done / (end - start)


def limit(shares: Mapping[str, float], one: str) -> float:
  """Returns the gain over pools of one kind without any idle time.

  H20 take tasks in the order of their slowdown there, until both kinds of
  accelerator need equally long.
  """
  each = sorted(slowdown(shares[name]) for name in _TURNS)
  alone = len(each) / 72 if one == "72 H800" else sum(each) / 208
  h800, h20 = float(len(each)), 0.0  # H800 and H20 seconds of work.
  for lost in each:
    moved = min(1.0, max(0.0, (24 * h800 - 64 * h20) / (64 * lost + 24)))
    h800, h20 = h800 - moved, h20 + moved * lost
  return alone / max(h800 / 64, h20 / 24)


def gains(
  shares: Mapping[str, float],
  rounds: int,
  routings: Collection[str] = tuple(ROUTINGS),
) -> list[dict[str, Any]]:
  """Returns a row for each routing of the mixed pool."""
  blind = ROUTINGS["blind"]
  single = {
    name: play(POOLS[name], blind, shares, rounds=rounds)[0]
    for name in ("208 H20", "72 H800")
  }
  rows = []
  for name in routings:
    pools = POOLS["64 H800 + 24 H20"]
    step_s, _ = play(pools, ROUTINGS[name], shares, rounds=rounds)
    over = {one: seconds / step_s for one, seconds in single.items()}
    rows.append(
      {
        "math": shares["math"],
        "game": shares["game"],
        "routing": name,
        "step_s": step_s,
        "over 208 H20": over["208 H20"],
        "of 1.30-1.68": simulated.place(over["208 H20"], *OVER_BANDWIDTH),
        "limit": limit(shares, "208 H20"),
        "over 72 H800": over["72 H800"],
        "of 1.12-1.37": simulated.place(over["72 H800"], *OVER_COMPUTE),
        "its limit": limit(shares, "72 H800"),
      }
    )
  return rows


def alike(rounds: int) -> list[dict[str, Any]]:
  """Returns the effect of routing when all accelerators are of one kind."""
  pools = POOLS["36 H800 + 36 H800"]
  blind, _ = play(pools, ROUTINGS["blind"], MIDDLE, rounds=rounds)
  rows = []
  for name in ("declared", "learned"):
    step_s, _ = play(pools, ROUTINGS[name], MIDDLE, rounds=rounds)
    rows.append({"routing": name, "change": blind / step_s - 1.0})
  return rows


def main(_: list[str]) -> None:
  """Measures, prints and keeps both."""
  rounds = simulated.ROUNDS.value
  rows = gains(MIDDLE, rounds)
  machine.show("mixed against single pools at equal cost", rows)
  sweep = [
    row
    for math_share, game in ((0.11, 0.02), (0.26, 0.02), (0.18, 0.18))
    for row in gains(
      {**MIDDLE, "math": math_share, "game": game},
      4,
      ["declared", "learned"],
    )
  ]
  machine.show("other shares of context", sweep)
  same = alike(rounds)
  machine.show("pools of one kind", same)
  machine.keep(
    "rollart_affinity",
    rounds=rounds,
    published={"over_208_h20": OVER_BANDWIDTH, "over_72_h800": OVER_COMPUTE},
    rows=rows,
    sweep=sweep,
    homogeneous=same,
  )


if __name__ == "__main__":
  app.run(main)
