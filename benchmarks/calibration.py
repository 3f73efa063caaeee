"""Calibrates a simulation on one or two runs of one machine.

  sync, alone      -> seconds of a dispatch, of a trained id, of an optimizer
                      step, of a publish; of the host for a turn and a group
  sync, episodes   -> turns, ids and declared waits, repeated
  in flight        -> seconds of a publish behind training; slowdown of
                      decoding, learner and host while both meshes work

In a synchronous run the meshes work one after the other, and in flight at once.
On one machine they share its cores, and the difference is the cost of that.
Nothing is fitted to any other schedule.

Where meshes have accelerators of their own, `of_processes` takes the first run
alone, with an engine in a process of its own, and from its publishes the
seconds of a call to a process and of a copy of all weights.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import jax

from benchmarks import one_engine
from envs import base, delayed
from rl.audit import event_log
from rl.data import batch, trajectory
from rl.engine.builtin import settings as engine_settings
from rl.planning import fitting
from rl.runtime import trace
from rl.schedule import overlap as overlap_lib
from rl.simulation import (
  dispatched_engine,
  distributions,
  host_thread,
  processes,
  result,
  simulate,
  workload,
  world,
)
from rl.simulation import learner as simulated_learner
from rl.simulation import processor as simulated_processor

_NO_LOAD = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
  """The cost of both meshes' work at once, as a share of the time alone.

  Attributes:
    learner, decode, host: on the seconds of a program of the learner, of a
      dispatch, and of the host.
  """

  learner: float
  decode: float
  host: float

  def factors(
    self, learner: float, decode: float, host: float
  ) -> tuple[float, float, float]:
    """Returns the slowdown of each, by its share of time in which both work."""
    return (
      1.0 + self.learner * learner,
      1.0 + self.decode * decode,
      1.0 + self.host * host,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated:
  """Predicts the runs of one machine on one task.

  Attributes:
    settings: of a synchronous run.
    behind_s: seconds of a publish behind training.
    recorded: groups of the synchronous run, whose episodes it repeats.
  """

  settings: simulate.Simulation
  sharing: Sharing
  behind_s: float
  recorded: Sequence[trajectory.Group]

  def under(self, schedule: overlap_lib.Overlap) -> simulate.Simulation:
    """Returns the simulation of a schedule, as if nothing were shared."""
    settings = dataclasses.replace(self.settings, overlap=schedule)
    if not schedule.publishes_behind_training:
      return settings
    cluster = dataclasses.replace(settings.cluster, transfer_s=self.behind_s)
    return dataclasses.replace(settings, cluster=cluster)


def of(sync: one_engine.Run, flying: one_engine.Run) -> Calibrated:
  """Returns the calibration by a synchronous run and one in flight."""
  sync, flying = settled(sync), settled(flying)
  cluster = simulate.Cluster(
    learner=learner(sync),
    pools=(pool(sync, flying),),
    transfer_s=_publish_s(sync.events),
    host=host_work(sync),
  )
  return Calibrated(
    settings=_settings(sync, cluster),
    sharing=sharing(sync, flying, cluster.host),
    behind_s=_publish_s(flying.events),
    recorded=recorded(sync),
  )


def of_processes(sync: one_engine.Run) -> Calibrated:
  """Returns the calibration by a run with an engine in a process of its own.

  Nothing is shared, and a publish costs the same behind training.
  """
  sync = settled(sync)
  cluster = simulate.Cluster(
    learner=learner(sync),
    pools=(dataclasses.replace(pool(sync, sync), processes=1),),
    transfer_s=0.0,
    host=host_work(sync),
    processes=process_costs(sync),
  )
  return Calibrated(
    settings=_settings(sync, cluster),
    sharing=Sharing(learner=0.0, decode=0.0, host=0.0),
    behind_s=0.0,
    recorded=recorded(sync),
  )


def _settings(
  sync: one_engine.Run, cluster: simulate.Cluster
) -> simulate.Simulation:
  experiment = sync.experiment
  return simulate.Simulation(
    cluster=cluster,
    workloads=(task(sync),),
    overlap=experiment.overlap,
    rollout=experiment.rollout,
    rounds=experiment.rounds,
    seed=experiment.seed,
  )


def settled(run: one_engine.Run) -> one_engine.Run:
  """Returns a run without its first round, which imports."""
  served = [e["t"] for e in event_log.of_kind(run.events, "published")]
  log = [e for e in run.events if e["t"] > served[0]]
  spans = [s for s in run.spans if served[0] < s.start and s.end < served[-1]]
  groups = run.groups[run.experiment.overlap.groups_per_round :]
  return dataclasses.replace(run, events=log, spans=spans, groups=groups)


# Two meshes on the cores of one machine.


def sharing(
  sync: one_engine.Run, flying: one_engine.Run, work: host_thread.HostWork
) -> Sharing:
  """Returns the cost of sharing a machine."""
  both = trace.overlap(flying.spans)
  expected_s = work.turn_s * turns(flying) + work.group_s * groups(flying)
  return Sharing(
    learner=_cost(_id_s(flying) / _id_s(sync), both.both_s / both.first_s),
    decode=_cost(
      _dispatch_s(flying) / _dispatch_s(sync), both.both_s / both.second_s
    ),
    host=_cost(host_s(flying) / expected_s, both.both_s / _length_s(flying)),
  )


def _cost(ratio: float, share: float) -> float:
  """Returns the cost that makes work longer by a ratio in a share of it."""
  return max(ratio - 1.0, 0.0) / max(share, 0.1)


def slowed(
  settings: simulate.Simulation, learner: float, decode: float, host: float
) -> simulate.Simulation:
  """Returns a simulation whose parts take longer by `Sharing.factors`."""
  cluster = settings.cluster
  (engine,), trains = cluster.pools, cluster.learner
  assert engine.dispatches is not None
  dispatch_s = engine.dispatches.dispatch_s * decode
  return dataclasses.replace(
    settings,
    cluster=dataclasses.replace(
      cluster,
      learner=dataclasses.replace(
        trains,
        token_s=trains.token_s * learner,
        update_s=trains.update_s * learner,
        describe_s=trains.describe_s * learner,
      ),
      pools=(
        dataclasses.replace(
          engine,
          speed=dataclasses.replace(
            engine.speed, tau0_s=engine.speed.tau0_s * decode
          ),
          dispatches=dataclasses.replace(
            engine.dispatches, dispatch_s=dispatch_s
          ),
        ),
      ),
      host=host_thread.HostWork(
        turn_s=cluster.host.turn_s * host, group_s=cluster.host.group_s * host
      ),
    ),
  )


def decode_spans(record: simulate.RunRecord) -> list[trace.Span]:
  """Returns the dispatches of all simulated engines, as in a real run."""
  return [
    trace.Span("decode", "decode", *one)
    for states in record.states
    for one in result.in_state(states, record.virtual_s, "decode")
  ]


def replay(
  settings: simulate.Simulation, recorded: Sequence[trajectory.Group]
) -> simulate.RunRecord:
  """Returns a simulation that repeats recorded episodes.

  Raises:
    RuntimeError: it broke a promise of its schedule.
  """
  thread = host_thread.HostThread(settings.cluster.host)
  record = simulate.simulate(
    settings,
    world.World(
      settings.workloads, settings.seed, thread=thread, recorded=recorded
    ),
  )
  if broken := record.violations:
    raise RuntimeError(f"the simulation broke its promises: {broken[:3]}")
  return record


# Processes.


def process_costs(sync: one_engine.Run) -> processes.ProcessCosts:
  """Returns the costs of a process, of publishes while nothing else goes on.

  Each of them writes the weights, has the engine read them, and has it switch.
  """
  copies_s = sum(
    statistics.median(seconds(sync, name)) for name in ("store", "stage")
  )
  calls_s = max(_publish_s(sync.events) - copies_s, 0.0)
  return processes.ProcessCosts(call_s=calls_s / 2, copy_s=copies_s / 2)


def divided(
  settings: simulate.Simulation, learners: int, engines: int
) -> simulate.Simulation:
  """Returns a simulation with more processes than the one of each.

  Rows and optimizer steps are divided among the processes of the learner.
  """
  cluster = settings.cluster
  trains, (engine,) = cluster.learner, cluster.pools
  trains = dataclasses.replace(
    trains,
    token_s=trains.token_s / learners,
    update_s=trains.update_s / learners,
    accelerators=learners,
    processes=learners,
  )
  pools = (dataclasses.replace(engine, engines=engines),)
  return dataclasses.replace(
    settings, cluster=dataclasses.replace(cluster, learner=trains, pools=pools)
  )


# Decoding.


def pool(sync: one_engine.Run, flying: one_engine.Run) -> simulate.EnginePool:
  """Returns the only engine.

  At its best it samples as much in each dispatch as it does in flight.
  """
  settings, model = sync.experiment.engine, sync.experiment.model
  assert isinstance(settings, engine_settings.EngineSettings)
  assert settings.slots is not None
  mesh = sync.experiment.placement.decode
  tokens = sum(e["tokens"] for e in event_log.of_kind(flying.events, "turn"))
  per_dispatch = tokens / len(seconds(flying, "decode"))
  return simulate.EnginePool(
    engines=1,
    speed=simulated_processor.Speed(
      tau0_s=_dispatch_s(sync) * settings.slots / per_dispatch,
      b0=_NO_LOAD,
      slots=settings.slots,
      kv_tokens=settings.slots * model.max_length,
    ),
    dispatches=dispatched_engine.Dispatches(
      settings=settings,
      model=model,
      # Of devices of this process, also if the engine has another.
      layout=mesh.layout(jax.devices()[: mesh.size]),
      dispatch_s=_dispatch_s(sync),
    ),
  )


def _dispatch_s(run: one_engine.Run) -> float:
  return statistics.fmean(seconds(run, "decode"))


def seconds(run: one_engine.Run, name: str) -> list[float]:
  """Returns the seconds of all spans of a name."""
  return [s.end - s.start for s in run.spans if s.name == name]


# The host.


def host_work(sync: one_engine.Run) -> host_thread.HostWork:
  """Returns the seconds of the host for a turn and a group, kept apart.

  From the first group of a round that is taken until its weights are served
  nothing plays.
  """
  log = sync.events
  ends = [e["t"] for e in event_log.of_kind(log, "published")]
  begins: dict[int, float] = {}
  for event in event_log.of_kind(log, "dequeued"):
    begins.setdefault(event["version"], event["t"])
  trains = list(zip(sorted(begins.values()), ends, strict=True))
  packing_s = sum(b - a for a, b in trains) - trace.intersection(
    trains, trace.busy(sync.spans, one_engine.HOST_WAITS)
  )
  return host_thread.HostWork(
    turn_s=(host_s(sync) - packing_s) / turns(sync),
    group_s=packing_s / groups(sync),
  )


def host_s(run: one_engine.Run) -> float:
  """Returns the seconds in which the thread of the event loop works."""
  return _length_s(run) - math.fsum(seconds(run, one_engine.HOST_WAITS))


def _length_s(run: one_engine.Run) -> float:
  waits = [s for s in run.spans if s.track == one_engine.HOST_WAITS]
  return max(s.end for s in waits) - min(s.start for s in waits)


def turns(run: one_engine.Run) -> int:
  """Returns the number of turns, and of starts, which cost about as much."""
  kinds = [e["kind"] for e in run.events]
  return kinds.count("turn") + kinds.count("admitted")


def groups(run: one_engine.Run) -> int:
  """Returns the number of trained groups."""
  return sum(1 for _ in event_log.of_kind(run.events, "trained"))


# Tasks.


def task(run: one_engine.Run) -> workload.Workload:
  """Returns the turns and ids of episodes, and declared waits, as a workload.

  All else that takes an environment time is work of the host.
  """
  log, source = run.events, run.experiment.environment
  step_s: distributions.Distribution = distributions.Fixed(0.0)
  if isinstance(source, delayed.Delayed):
    mean_s = source.median_s * math.exp(source.sigma**2 / 2.0)
    step_s = distributions.LogNormal(mean=mean_s, sigma=source.sigma)
  turns = list(event_log.of_kind(log, "turn"))
  ended = list(event_log.of_kind(log, "ended"))
  prompt, reply = fitting.contexts(ended)
  rewards = [e["value"] for e in event_log.of_kind(log, "reward")]
  return workload.Workload(
    name="calibrated",
    turns=fitting.counts([e["turns"] for e in ended]),
    prompt_tokens=distributions.Fixed(max(prompt, 2.0)),
    answer_tokens=fitting.counts([e["tokens"] for e in turns if e["tokens"]]),
    reply_tokens=distributions.Fixed(reply),
    step_s=step_s,
    success=statistics.fmean(value >= 1.0 for value in rewards),
  )


def recorded(run: one_engine.Run) -> list[trajectory.Group]:
  """Returns the groups of a run, whose steps take what is declared."""
  source, chat = run.experiment.environment, run.experiment.build_chat()

  def declared(
    task: base.Task, member: trajectory.Trajectory
  ) -> trajectory.Trajectory:
    said = [chat.parse(turn.tokens).content for turn in member.turns]
    turns = [
      dataclasses.replace(turn, env_s=_declared_s(source, task, said[: i + 1]))
      for i, turn in enumerate(member.turns)
    ]
    return dataclasses.replace(member, turns=turns)

  return [
    dataclasses.replace(
      group, trajectories=[declared(group.task, t) for t in group.trajectories]
    )
    for group in run.groups
  ]


def _declared_s(
  source: base.Source, task: base.Task, answers: Sequence[str]
) -> float:
  if isinstance(source, delayed.Delayed):
    return source.wait_s(task, answers)
  return 0.0


# Training.


def learner(sync: one_engine.Run) -> simulated_learner.LearnerSpeed:
  """Returns the seconds of an id and an optimizer step."""
  return simulated_learner.LearnerSpeed(
    token_s=_id_s(sync),
    batch_ids=_batch_ids(sync),
    update_s=statistics.fmean(seconds(sync, "update")),
    describe_s=statistics.fmean(seconds(sync, "score") or [0.0]),
    accelerators=1,
  )


def _id_s(run: one_engine.Run) -> float:
  """Returns the learner's seconds of an id, context included."""
  ids = sum(e["length"] for e in event_log.of_kind(run.events, "dequeued"))
  return math.fsum(seconds(run, "accumulate")) / ids


def _batch_ids(run: one_engine.Run) -> float:
  """Returns the ids of members that make up a full batch."""
  shape = run.experiment.batch
  last = run.groups[-run.experiment.overlap.groups_per_round :]
  members = [t for group in last for t in group.trajectories]
  packed = batch.pack(
    members,
    rows=shape.rows,
    length=shape.length,
    version=0,
    share_prompts=shape.share_prompts,
    only_full=True,
  )
  placed = zip(members, packed.places, strict=True)
  ids = sum(member.num_ids for member, place in placed if place is not None)
  return ids / len(packed.batches)


def _publish_s(log: Sequence[event_log.Event]) -> float:
  """Returns the seconds from an update until its weights serve."""
  ends = {e["version"] + 1: e["end"] for e in event_log.of_kind(log, "update")}
  return statistics.median(
    e["t"] - ends[e["version"]]
    for e in event_log.of_kind(log, "published")
    if e["version"] in ends
  )
