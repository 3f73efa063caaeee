"""The runs of the learning benchmark: which there are, and one after another.

  Case -> experiment -> parts -> rounds, held-out tasks every 20 updates -> Row

All runs of a seed begin with the same weights and see the same tasks in the
same order; an update is of as many samples on every schedule. A run repeats to
the last digit.
"""

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from envs.rewards import rewards
from envs.suites import textarena
from models import config as model_config
from rl import assemble, initial_state
from rl import experiment as experiment_lib
from rl.algorithms import algorithm as algorithm_lib
from rl.algorithms import corrections, packed_row, presets
from rl.audit import checker, event_log
from rl.engine.builtin import settings as engine_settings
from rl.loop import progress, warm_start
from rl.rollout import evaluate, group_rollout
from rl.schedule import overlap
from rl.train import learner, optimizers

GROUPS, MEMBERS = 8, 8
"""Of an update, and of a group."""
SAMPLES = GROUPS * MEMBERS
UPDATES, EVERY = 120, 20
"""Of a run, and between two looks at the held-out tasks."""
LEARNING_RATES = {
  "grpo": 1e-3,
  "dr_grpo": 1e-3,
  "dapo": 2e-3,
  "rloo": 1e-3,
  "gspo": 1e-3,
  "cispo": 1e-3,
}
"""Of each algorithm, that with the most success over the run in sync."""
MOST_LATE = 4
_EPISODES, _LAST_EPISODES = 200, 400

Row = dict[str, Any]
"""What a run was worth; JSON data, without nan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Untouched:
  """Weight 1, however far the policy has moved since it sampled.

  With a lag a run refuses to score old again without a correction: the ratio
  would forget who sampled. This is that mistake, made on purpose.
  """

  compares_old = True
  weighs = True

  def __call__(self, row: packed_row.Row) -> corrections.Weights:
    """Returns 1 everywhere."""
    nowhere = jnp.zeros(row.sampled.shape, bool)
    return corrections.Weights(jnp.ones_like(row.logprobs), nowhere, nowhere)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """What a run does about tokens that older weights sampled."""

  old_logprob: overlap.OldLogprob = "decode"
  correction: corrections.Correction | None = None


ALGORITHMS: Mapping[str, algorithm_lib.Algorithm] = {
  each.short_name: each
  for each in (
    presets.Grpo(),
    presets.DrGrpo(),
    presets.Dapo(),
    presets.Rloo(),
    presets.Gspo(),
    presets.Cispo(),
  )
}
SCHEDULES: Mapping[str, overlap.Overlap] = {
  "sync": overlap.sync(GROUPS),
  "pipe": overlap.rollout_pipe(2 * GROUPS, updates_per_round=2),
  "eta1": overlap.in_flight(GROUPS, max_staleness=1),
  "eta2": overlap.in_flight(GROUPS, max_staleness=2),
  "eta4": overlap.in_flight(GROUPS, max_staleness=MOST_LATE),
}
ON_POLICY = "on policy"
ARMS: Mapping[str, Arm] = {
  ON_POLICY: Arm(),
  "uncorrected": Arm(old_logprob="recompute", correction=Untouched()),
  "ratio": Arm(),
  "truncated": Arm(
    old_logprob="recompute", correction=corrections.TokenTruncated(cap=2.0)
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One run, by the names of its parts."""

  algorithm: str
  schedule: str
  arm: str
  seed: int
  learning_rate: float

  @property
  def name(self) -> str:
    """Returns all of them: algorithm/schedule/arm/seed/learning rate."""
    parts = self.algorithm, self.schedule, self.arm, self.seed
    return "/".join(map(str, (*parts, self.learning_rate)))


def case_of(row: Row) -> Case:
  """Returns which run a row is of."""
  names = [field.name for field in dataclasses.fields(Case)]
  return Case(**{name: row[name] for name in names})


def grid(seeds: Sequence[int]) -> Iterator[Case]:
  """Yields every run there is, those of the same programs side by side.

  On policy all arms are the same. The loss of RLOO has no ratio.
  """
  for name, algorithm in ALGORITHMS.items():
    for arm, schedule, seed in itertools.product(ARMS, SCHEDULES, seeds):
      if (arm == ON_POLICY) != (schedule == "sync"):
        continue
      if arm != "ratio" or algorithm.loss.has_ratio:
        yield Case(
          algorithm=name,
          schedule=schedule,
          arm=arm,
          seed=seed,
          learning_rate=LEARNING_RATES[name],
        )


def tuning(seeds: Sequence[int], rates: Sequence[float]) -> Iterator[Case]:
  """Yields what the learning rates are chosen by: runs in sync."""
  for name, rate, seed in itertools.product(ALGORITHMS, rates, seeds):
    yield Case(
      algorithm=name,
      schedule="sync",
      arm=ON_POLICY,
      seed=seed,
      learning_rate=rate,
    )


def experiment(case: Case) -> experiment_lib.Experiment:
  """Returns the settings of a run."""
  arm, schedule = ARMS[case.arm], SCHEDULES[case.schedule]
  algorithm = ALGORITHMS[case.algorithm]
  return experiment_lib.Experiment(
    environment=textarena.GuessTheNumber(low=1, high=12, turns=4),
    reward=rewards.Outcome(),
    model=model_config.tiny(
      vocab_size=24,
      num_layers=2,
      d_model=64,
      head_dim=16,
      d_ff=128,
      max_length=32,
    ),
    rollout=group_rollout.Rollout(
      group_size=MEMBERS, max_turns=6, turn_tokens=2, max_tokens=32
    ),
    engine=engine_settings.EngineSettings(
      slots=(MOST_LATE + 1) * SAMPLES,
      row_buckets=(64,),
      chunk_buckets=(4,),
      steps_per_dispatch=2,
      compile_ahead=True,
    ),
    overlap=dataclasses.replace(schedule, old_logprob=arm.old_logprob),
    algorithm=dataclasses.replace(algorithm, correction=arm.correction),
    optimizer=optimizers.AdamW(learning_rate=case.learning_rate),
    batch=experiment_lib.BatchShape(rows=16, length=64),
    warm_start=warm_start.WarmStart(
      steps=150,
      exploration=0.5,
      optimizer=optimizers.AdamW(learning_rate=3e-3),
    ),
    rounds=UPDATES // schedule.updates_per_round,
    seed=case.seed,
    repeatable=True,
    # None is written, and so none is waited for.
    retention=experiment_lib.Retention(checkpoint_every=UPDATES + 1),
    # What diverges is worth no less to know.
    max_skipped=UPDATES,
  )


class Bench:
  """Plays runs one after another, in one process.

  What a run starts from and the learner's programs are kept for the next.
  """

  def __init__(self):
    self._programs: dict[Any, learner.Learner] = {}
    self._params: dict[int, Any] = {}

  async def play(self, case: Case) -> Row:
    """Returns what a run was worth.

    Raises:
      RuntimeError: it broke a promise of its schedule.
    """
    start_s = time.monotonic()
    parts = self._parts(experiment(case))
    try:
      state = await self._state(parts)
      await parts.start(state, 0)
      watcher = _Watcher(parts)
      await watcher.look(0)
      await assemble.coordinate(parts, watcher).run(
        progress.beginning(state, parts.tasks.cursor)
      )
    finally:
      await parts.close()
    _check(parts)
    return {
      **dataclasses.asdict(case),
      "updates": UPDATES,
      "curve": watcher.curve,
      "played": len(list(event_log.of_kind(parts.log.events, "ended"))),
      "trained": UPDATES * SAMPLES,
      **described(watcher.metrics),
      "wall_s": round(time.monotonic() - start_s, 1),
    }

  def _parts(self, one: experiment_lib.Experiment) -> assemble.Parts:
    """Returns the parts, with programs that all schedules share."""
    clock = asyncio.get_running_loop().time
    parts = assemble.build(one, clock=clock)
    key = one.algorithm, one.optimizer
    if key not in self._programs:
      latest = dataclasses.replace(parts.experiment, overlap=SCHEDULES["eta4"])
      self._programs[key] = assemble.learner_programs(
        latest, parts.learner_layout
      )
    return dataclasses.replace(parts, programs=self._programs[key])

  async def _state(self, parts: assemble.Parts) -> Any:
    seed, run = parts.experiment.seed, parts.learner_thread.run
    if seed not in self._params:
      self._params[seed] = (await initial_state.create(parts)).params
    return await run("init", parts.programs.wrap, self._params[seed])


class _Watcher(progress.RunObserver):
  """An observer that looks at held-out tasks as training goes on.

  Attributes:
    curve: share of successes, from before the first update on.
    metrics: of each round.
  """

  def __init__(self, parts: assemble.Parts):
    self._parts = parts
    self.curve: list[float] = []
    self.metrics: list[Mapping[str, float]] = []

  async def on_round(self, trained: progress.TrainedRound) -> None:
    self.metrics.append(trained.metrics)

  async def on_published(self, version: int) -> None:
    updates = version * self._parts.experiment.overlap.updates_per_round
    if updates % EVERY == 0:
      await self.look(updates)

  async def look(self, updates: int) -> None:
    """Adds a point to the curve."""
    one = self._parts.experiment
    found, _ = await evaluate.evaluate(
      self._parts.player,
      episodes=_LAST_EPISODES if updates == UPDATES else _EPISODES,
      temperature=one.evaluation.temperature,
      success=one.evaluation.success,
      seed=one.seed,
    )
    self.curve.append(round(found.success, 4))


def described(metrics: Sequence[Mapping[str, float]]) -> Row:
  """Returns what the rounds of a run were like, in means over its tokens.

  `late` is by how many updates a trained token was late, and `staleness` by how
  many rounds the first token of its group was. `kl` is, for each lag in rounds,
  KL(who sampled, policy) in nats a token, and None where no token was so late.
  """
  tokens = [row["trained_tokens"] for row in metrics]
  by_lag = [
    [
      row.get(f"lag_share/{lag}", 0.0) * own
      for row, own in zip(metrics, tokens, strict=True)
    ]
    for lag in range(MOST_LATE + 1)
  ]
  rounds_late = sum(lag * sum(own) for lag, own in enumerate(by_lag))
  # Within a round update j trains j updates late.
  late = rounds_late / sum(tokens) + metrics[0]["updates_late_max"] / 2
  return {
    "staleness": _mean(metrics, "staleness_mean", [1.0] * len(metrics)),
    "late": round(late, 4),
    "kl": [
      _mean(metrics, f"behaviour_kl/lag_{lag}", own)
      for lag, own in enumerate(by_lag)
    ],
    "clipped": _mean(metrics, "clip_fraction", tokens),
    "ess": _mean(metrics, "correction/ess", tokens),
    "entropy": _mean(metrics, "entropy", tokens),
    "skipped": sum(row["skipped_updates"] for row in metrics),
    "success": [round(row["success"], 4) for row in metrics],
  }


def _mean(
  metrics: Sequence[Mapping[str, float]], name: str, weights: Sequence[float]
) -> float | None:
  """Returns the weighed mean of what is known; None of nothing."""
  total = weight = 0.0
  for row, own in zip(metrics, weights, strict=True):
    value = row.get(name, math.nan)
    if own and not math.isnan(value):
      total, weight = total + own * value, weight + own
  return round(total / weight, 5) if weight else None


def _check(parts: assemble.Parts) -> None:
  one = parts.experiment
  broken = checker.violations(
    parts.log.events, one.overlap, one.rollout.group_size
  )
  if broken:
    raise RuntimeError(f"a run broke its promises: {broken[:3]}")
