"""RollArt's redundancy grid: more groups and larger ones than a round needs.

  python -m benchmarks.rollart_redundancy [--rounds=7]

A round trains 32 groups of 8. 32, 34 or 36 groups of 8, 10 or 12 members are
played; the first 8 members that end make up a group, the first 32 groups that
are whole make up the round, and the rest is aborted. A cell is seconds of
rollout without redundancy by those with it, as in RollArt (arXiv 2512.22560,
7.4, figure 14b: GEM-math, 8B, 32k, 32 H800).

Lengths are not published. Log-normal ones of a prompt (sigma 0.3), times those
of a member (0.2), and decoding that slows down mildly with load, nearly as
load ** 0.2 between the 256 and 432 episodes of the grid's corners, were fitted
to these nine cells, and so they are no prediction. `held out` is one: the same
three numbers fitted to three corners of the grid alone, by order statistics
without a coordinator, and the other five cells from them.
Independent lengths are shown as well; they overstate larger groups. `aborted`
is the share of sampled tokens that nothing is trained on, and `length` the mean
length of trained answers by that of all: the price, and the bias.
Writes benchmarks/results/rollart_redundancy.json.
"""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import app

from benchmarks import machine, simulated
from rl.audit import event_log
from rl.rollout import group_rollout
from rl.schedule import overlap
from rl.simulation import distributions, simulate, workload
from rl.simulation import processor as simulated_processor

PUBLISHED = {
  (8, 32): 1.00,
  (8, 34): 1.16,
  (8, 36): 1.30,
  (10, 32): 1.11,
  (10, 34): 1.38,
  (10, 36): 1.52,
  (12, 32): 1.24,
  (12, 34): 1.51,
  (12, 36): 1.62,
}
_GROUPS, _MEMBERS = 32, 8
_PROMPT, _MEMBER = 0.3, 0.2
_ENGINES = 8
# tau(b) = 1 + b / b0 grows by (432 / 256) ** 0.2 from 256 to 432 episodes.
_LOW, _HIGH, _EXPONENT = 256, 432, 0.2


def load_b0(low: float, high: float, exponent: float) -> float:
  """Returns b0 of an engine whose token time grows as load ** exponent."""
  ratio = (high / low) ** exponent
  return (high - ratio * low) / (ratio - 1.0)


def settings(
  size: int, groups: int, *, rounds: int, shared: bool = True
) -> simulate.Simulation:
  """Returns a run of one cell, in which only decoding takes time.

  Args:
    shared: lengths have a part that the members of a group have alike.
  """
  variance = _PROMPT**2 + _MEMBER**2
  speed = simulated_processor.Speed(
    b0=load_b0(_LOW, _HIGH, _EXPONENT) / _ENGINES, slots=1_000
  )
  schedule = overlap.Overlap(
    groups_per_round=_GROUPS,
    wait_for_round=True,
    consume="ready",
    redundancy=overlap.Redundancy(
      extra_groups=groups - _GROUPS, extra_members=size - _MEMBERS
    ),
  )
  return simulate.Simulation(
    cluster=simulated.cluster(speed, _ENGINES),
    workloads=(
      workload.Workload(
        answer_tokens=distributions.LogNormal(
          mean=2000.0, sigma=math.sqrt(variance)
        ),
        correlation=_PROMPT**2 / variance if shared else 0.0,
      ),
    ),
    overlap=schedule,
    rollout=group_rollout.Rollout(
      group_size=_MEMBERS, max_turns=1, turn_tokens=65_536, max_tokens=131_072
    ),
    rounds=rounds,
    warmup=0,
  )


def play(chosen: simulate.Simulation) -> dict[str, float]:
  """Returns the seconds of a round, and the cost of redundancy."""
  record = simulated.play(chosen)
  ended = {
    event_log.member(e): e["tokens"]
    for e in event_log.of_kind(record.events, "ended")
  }
  trained = [
    ended[e["group"], e["attempt"], index]
    for e in event_log.of_kind(record.events, "trained")
    for index in e["members"]
  ]
  return {
    "rollout_s": statistics.mean(simulated.rounds_s(record)),
    "aborted": 1.0 - record.ledger.trained / record.ledger.sampled,
    "trained_length": statistics.mean(trained),
  }


def grid(rounds: int, shared: bool) -> list[dict[str, Any]]:
  """Returns a row for each cell."""
  cells = {
    (size, groups): play(settings(size, groups, rounds=rounds, shared=shared))
    for size, groups in PUBLISHED
  }
  need = cells[_MEMBERS, _GROUPS]
  rows = []
  for (size, groups), cell in cells.items():
    speedup = need["rollout_s"] / cell["rollout_s"]
    published = PUBLISHED[size, groups]
    rows.append(
      {
        "group size": size,
        "groups": groups,
        "rollout_s": cell["rollout_s"],
        "speedup": speedup,
        "published": published,
        "deviation": simulated.deviation(speedup, published),
        "aborted": cell["aborted"],
        "length": cell["trained_length"] / need["trained_length"],
      }
    )
  return rows


_CORNERS = ((8, 36), (12, 32), (12, 36))
_SIGMAS = tuple(0.05 * i for i in range(1, 13))
_EXPONENTS = tuple(0.05 * i for i in range(13))
_Cells = Mapping[tuple[int, int], float]


class Lengths:
  """Draws of prompts and members, and the rounds that they make.

  Without a coordinator: a group ends with its 8th member, a round with its 32nd
  group, and the load slows down all of it.
  """

  def __init__(self, draws: int = 300):
    rng = np.random.default_rng(0)
    groups = max(groups for _, groups in PUBLISHED)
    size = max(size for size, _ in PUBLISHED)
    self._prompt = rng.standard_normal((draws, groups, 1))
    self._member = rng.standard_normal((draws, groups, size))

  def seconds(self, cell: tuple[int, int], prompt: float, own: float) -> float:
    """Returns the mean length that a round of a cell waits for."""
    size, groups = cell
    prompts, members = self._prompt[:, :groups], self._member[:, :groups, :size]
    lengths = np.exp(prompt * prompts + own * members)
    ends = np.partition(lengths, _MEMBERS - 1, axis=2)[..., _MEMBERS - 1]
    return float(np.partition(ends, _GROUPS - 1, axis=1)[:, _GROUPS - 1].mean())

  def gains(self, prompt: float, own: float) -> _Cells:
    """Returns the speed-up of each cell, before the load."""
    seconds = {cell: self.seconds(cell, prompt, own) for cell in PUBLISHED}
    return {c: seconds[_MEMBERS, _GROUPS] / s for c, s in seconds.items()}


def _loaded(gains: _Cells, exponent: float) -> _Cells:
  """Returns speed-ups where decoding slows down with a power of the load."""
  least = _MEMBERS * _GROUPS
  return {
    cell: gain * (least / (cell[0] * cell[1])) ** exponent
    for cell, gain in gains.items()
  }


def held_out() -> dict[str, Any]:
  """Returns the numbers fitted to the corners, and the cells that they give."""
  lengths = Lengths()

  def worst(gains: _Cells) -> float:
    return max(
      abs(simulated.deviation(gains[cell], PUBLISHED[cell]))
      for cell in _CORNERS
    )

  found = []
  for prompt, own in itertools.product(_SIGMAS, _SIGMAS):
    alone = lengths.gains(prompt, own)
    for exponent in _EXPONENTS:
      gains = _loaded(alone, exponent)
      found.append((worst(gains), prompt, own, exponent, gains))
  _, prompt, own, exponent, gains = min(found, key=lambda one: one[0])
  rows = [
    {
      "group size": cell[0],
      "groups": cell[1],
      "fitted": cell in _CORNERS,
      "speedup": gains[cell],
      "published": known,
      "deviation": simulated.deviation(gains[cell], known),
    }
    for cell, known in PUBLISHED.items()
    if cell != (_MEMBERS, _GROUPS)
  ]
  return {
    "prompt": prompt,
    "member": own,
    "exponent": exponent,
    "rows": rows,
    "worst": max(abs(r["deviation"]) for r in rows if not r["fitted"]),
  }


def main(_: list[str]) -> None:
  """Measures, prints and keeps both."""
  rounds = simulated.ROUNDS.value
  rows = grid(rounds, shared=True)
  machine.show("prompts share lengths", rows)
  apart = grid(rounds, shared=False)
  machine.show("lengths are independent", apart)
  split = held_out()
  machine.show("fitted to three corners, the rest held out", split["rows"])
  worst = max(abs(row["deviation"]) for row in rows)
  print(f"\nworst deviation {worst:.1%}")
  machine.keep(
    "rollart_redundancy",
    groups=_GROUPS,
    members=_MEMBERS,
    rounds=rounds,
    rows=rows,
    independent=apart,
    worst_deviation=worst,
    held_out=split,
  )


if __name__ == "__main__":
  app.run(main)
