"""Calibrates a simulation on synchronous runs of one machine.

  turns      -> tau(b): seconds of a token when b answers are under way
             -> environments: seconds of a step, a start, a grading
  episodes   -> turns, ids, within-group correlation
  updates    -> seconds of a trained id, an optimizer step, a publish
  beside     -> slowdown of either mesh while the other one works

Nothing is fitted to the schedules that are predicted. Waits of turns and steps
for the event loop count as part of their time. The meshes of one machine share
its cores: a second run, in which the learner always works, measures the cost.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import one_engine
from rl.audit import event_log
from rl.engine.builtin import settings as engine_settings
from rl.planning import fitting
from rl.runtime import trace
from rl.simulation import distributions, simulate, workload
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor

_FAR = 5.0


def of(run: one_engine.Run, rounds: int) -> simulate.Simulation:
  """Returns the simulation of a synchronous run with one engine.

  Args:
    rounds: to be simulated.
  """
  run = settled(run)
  experiment, log = run.experiment, run.events
  cluster = simulate.Cluster(
    learner=learner(run),
    pools=(simulate.EnginePool(engines=1, speed=speed(run)),),
    transfer_s=_publish_s(log),
  )
  return simulate.Simulation(
    cluster=cluster,
    workloads=(task(log),),
    overlap=experiment.overlap,
    rollout=experiment.rollout,
    rounds=rounds,
    seed=experiment.seed,
  )


def settled(run: one_engine.Run) -> one_engine.Run:
  """Returns a synchronous run without its first round, which imports."""
  first = next(event_log.of_kind(run.events, "published"))["t"]
  log = [event for event in run.events if event["t"] > first]
  return dataclasses.replace(run, events=log)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
  """The cost of working at the same time, as a share of the time alone.

  Attributes:
    learner: on its seconds while the engine has requests.
    answers, host: on the seconds of answers, and of environments and rewards,
      while the learner works.
  """

  learner: float
  answers: float
  host: float


def sharing(alone: one_engine.Run, beside: one_engine.Run) -> Sharing:
  """Returns the cost of sharing a machine.

  Args:
    beside: the same run with the learner always at work.
  """
  alone, beside = settled(alone), settled(beside)
  tau0_s, slope_s = fitting.line(*answers(alone.events))
  under_way, token_s = answers(beside.events)
  expected_s = tau0_s + slope_s * under_way
  return Sharing(
    learner=_learner_cost(beside),
    answers=_cost(float(token_s.sum()), float(expected_s.sum())),
    host=_cost(_step_s(beside.events), _step_s(alone.events)),
  )


def slowed(
  settings: simulate.Simulation,
  cost: Sharing,
  learner_share: float,
  answers_share: float,
) -> simulate.Simulation:
  """Returns a simulation slowed down for the time that both meshes work.

  Args:
    learner_share: of the learner's time with requests on the engine.
    answers_share: of the time of requests while the learner works.
  """
  cluster, tasks = settings.cluster, settings.workloads[0]
  pool, trains = cluster.pools[0], cluster.learner
  by_learner = 1.0 + cost.learner * learner_share
  by_answers = 1.0 + cost.answers * answers_share
  by_host = 1.0 + cost.host * answers_share
  times = {
    name: _times(getattr(tasks, name), by_host)
    for name in ("start_s", "step_s", "reward_s")
  }
  return dataclasses.replace(
    settings,
    cluster=dataclasses.replace(
      cluster,
      learner=dataclasses.replace(
        trains,
        token_s=trains.token_s * by_learner,
        update_s=trains.update_s * by_learner,
        describe_s=trains.describe_s * by_learner,
      ),
      pools=(
        dataclasses.replace(
          pool,
          speed=dataclasses.replace(
            pool.speed, tau0_s=pool.speed.tau0_s * by_answers
          ),
        ),
      ),
    ),
    workloads=(dataclasses.replace(tasks, **times),),
  )


def _times(
  distribution: distributions.Distribution, factor: float
) -> distributions.Distribution:
  if isinstance(distribution, distributions.Fixed):
    return distributions.Fixed(factor * distribution.value)
  assert isinstance(distribution, distributions.Histogram)
  edges = tuple(factor * edge for edge in distribution.edges)
  return dataclasses.replace(distribution, edges=edges)


def _learner_cost(run: one_engine.Run) -> float:
  """Returns the cost on the learner while the engine always has requests."""
  under_way = trace.busy([*answer_spans(run.events)], "answers")
  work = [s for s in run.spans if s.name == one_engine.BESIDE]
  took = np.array([span.end - span.start for span in work])
  shared = np.array(
    [trace.intersection([(s.start, s.end)], under_way) for s in work]
  )
  at_zero, slope = fitting.line(shared / took, took)
  return slope / at_zero


def _cost(together: float, alone: float) -> float:
  return max(together / alone - 1.0, 0.0)


def _step_s(log: Sequence[event_log.Event]) -> float:
  return statistics.fmean(e["env_s"] for e in event_log.of_kind(log, "turn"))


def answer_spans(log: Sequence[event_log.Event]) -> Iterator[trace.Span]:
  """Yields the spans in which an engine had a request, on track "answers"."""
  for event in event_log.of_kind(log, "turn"):
    end = event["t"] - event["env_s"]
    yield trace.Span("answers", "answer", end - event["decode_s"], end)


# Decoding.


def speed(run: one_engine.Run) -> simulated_processor.Speed:
  """Fits tau(b) to the seconds of answers, encoding of context included."""
  settings, model = run.experiment.engine, run.experiment.model
  assert isinstance(settings, engine_settings.EngineSettings)
  assert settings.slots is not None
  tau0_s, slope_s = fitting.line(*answers(run.events))
  return simulated_processor.Speed(
    tau0_s=tau0_s,
    b0=tau0_s / slope_s,
    slots=settings.slots,
    kv_tokens=settings.slots * model.max_length,
  )


def answers(
  log: Sequence[event_log.Event],
) -> tuple[fitting.Samples, fitting.Samples]:
  """Returns `fitting.answers` of the only engine."""
  return fitting.answers(
    e for e in event_log.of_kind(log, "turn") if e["tokens"]
  )


# Tasks.


def task(log: Sequence[event_log.Event]) -> workload.Workload:
  """Returns the turns, ids and seconds of episodes as a workload."""
  turns = list(event_log.of_kind(log, "turn"))
  ended = list(event_log.of_kind(log, "ended"))
  prompt, reply = fitting.contexts(ended)
  graded = _pairs(log, "grading", "reward")
  return workload.Workload(
    name="calibrated",
    turns=fitting.counts([e["turns"] for e in ended]),
    prompt_tokens=distributions.Fixed(max(prompt, 2.0)),
    answer_tokens=fitting.counts([e["tokens"] for e in turns if e["tokens"]]),
    reply_tokens=distributions.Fixed(reply),
    start_s=fitting.seconds(
      _usual([*fitting.starts_s(event_log.of_kind(log, "admitted"), turns)])
    ),
    step_s=fitting.seconds([e["env_s"] for e in turns]),
    reward_s=fitting.seconds(_usual([b["t"] - a["t"] for a, b in graded])),
    correlation=correlation(log),
    success=statistics.fmean(end["value"] >= 1.0 for _, end in graded),
  )


def correlation(log: Sequence[event_log.Event]) -> float:
  """Returns the within-group correlation of environment seconds.

  The engine has no part in these.
  """
  rounds = {e["group"]: e["version"] for e in event_log.of_kind(log, "trained")}
  turns = list(event_log.of_kind(log, "turn"))
  # Only the machine causes a deviation that a whole round has in common.
  round_s: dict[int, list[float]] = collections.defaultdict(list)
  for event in turns:
    round_s[rounds[event["group"]]].append(event["env_s"])
  usual_s = {version: statistics.fmean(s) for version, s in round_s.items()}
  excess_s: dict[fitting.MemberId, list[float]] = collections.defaultdict(list)
  for event in turns:
    seconds = event["env_s"] - usual_s[rounds[event["group"]]]
    excess_s[event_log.member(event)].append(seconds)
  return fitting.correlation(excess_s)


def _pairs(
  log: Sequence[event_log.Event], first: str, then: str
) -> list[tuple[event_log.Event, event_log.Event]]:
  before = {event_log.member(e): e for e in event_log.of_kind(log, first)}
  return [
    (before[event_log.member(e)], e) for e in event_log.of_kind(log, then)
  ]


def _usual(values: Sequence[float]) -> list[float]:
  """Returns values with outliers cut.

  In an outlier the machine stood still for all episodes at once; drawn one by
  one it would stand still in every round.
  """
  largest = _FAR * statistics.median(values)
  return [min(value, largest) for value in values]


# Training.


def learner(run: one_engine.Run) -> simulated_learner.LearnerSpeed:
  """Returns the seconds of an id and an optimizer step, packing included."""
  spans: dict[str, list[float]] = collections.defaultdict(list)
  for span in run.spans:
    if span.track == "learner":
      spans[span.name].append(span.end - span.start)
  update_s = statistics.median(spans["update"])
  lengths: dict[tuple[int, int], int] = collections.Counter()
  for event in event_log.of_kind(run.events, "ended"):
    lengths[event["group"], event["attempt"]] += event["length"]
  trained = event_log.of_kind(run.events, "trained")
  ids = sum(lengths[e["group"], e["attempt"]] for e in trained)
  took = [
    e["end"] - e["start"] for e in event_log.of_kind(run.events, "update")
  ]
  # The median round: others may have waited for the machine.
  per_round = ids / len(took)
  token_s = max(statistics.median(took) - update_s, 0.0) / per_round
  return simulated_learner.LearnerSpeed(
    token_s=token_s,
    update_s=update_s,
    describe_s=statistics.median(spans["score"] or [0.0]),
    accelerators=1,
  )


def _publish_s(log: Sequence[event_log.Event]) -> float:
  """Returns the seconds from an optimizer step until its weights serve."""
  ends = [e["end"] for e in event_log.of_kind(log, "update")]
  served = [e["t"] for e in event_log.of_kind(log, "published")]
  return statistics.median(b - a for a, b in zip(ends, served, strict=True))
