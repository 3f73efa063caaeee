"""Calibrates a planning problem: the speeds and tasks of an earlier run.

events.jsonl  turns     -> tau(b): seconds of a token when b answers are under
                           way on an engine; environments' seconds
              episodes  -> turns, ids, within-group correlation
              publishes -> seconds of a transfer, and for which decoding then
                           stands still
spans.jsonl   learner   -> seconds of a trained id, of an optimizer step

A short run of any schedule will do, since waits between its parts do not count.
Neither does the first round, nor one after a restart, in which programs are
compiled, unless there are no others. Speeds of the learner are medians, as
some programs are compiled later. Faults are drawn at random, as often as they
came: failed starts, steps that raised, and rewards that no call gave.
"""

import collections
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models import untrusted_files
from rl import experiment
from rl.audit import event_log
from rl.data import trajectory
from rl.planning import fitting, fleet
from rl.planning import problem as problem_lib
from rl.runtime import segments, trace
from rl.settings import overrides
from rl.simulation import distributions, workload

_MAX_CONFIG = 16 * untrusted_files.MIB
_MORE = "let it run for a few rounds"
_ENV_FAULT = trajectory.Status.ENV_FAULT.value
_REWARD_FAULT = trajectory.Status.REWARD_FAULT.value


class Update(NamedTuple):
  """An optimizer step of a run.

  Attributes:
    round: (restarts before it, version).
    warms: it belongs to the first round after a start of the run.
    ids: that it trained.
  """

  round: tuple[int, int]
  warms: bool
  ids: int


class Rates(NamedTuple):
  """Speeds of a run's hardware.

  Attributes:
    tau0_s, b0: see `processor.Speed`.
    token_s, update_s: of the whole learner's mesh, for an id and a step.
    describe_s: for scoring a sample after each publish.
    transfer_s: for new weights to travel.
    stand_s: for which decoding then stands still.
  """

  tau0_s: float
  b0: float
  token_s: float
  update_s: float
  describe_s: float
  transfer_s: float
  stand_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class CalibrationRun:
  """The records of a run, read from its directory.

  Attributes:
    log: as if the run had never been interrupted.
    first: version from which on publishes count.
    start_s: start of the first update.
    updates: all of them, also those that a restart has repeated.
    warming: stretches of time until the first round after each start is over.
    sources: of every attempt at a group.
  """

  path: pathlib.Path
  log: Sequence[event_log.Event]
  spans: Sequence[trace.Span]
  first: int
  start_s: float
  updates: Sequence[Update]
  warming: Sequence[trace.Interval]
  settings: experiment.Experiment
  sources: Mapping[tuple[int, int], str]

  def of(self, kind: str, source: str | None = None) -> list[event_log.Event]:
    """Returns events of a kind, of one source or of all."""
    events = event_log.of_kind(self.log, kind)
    if source is None:
      return list(events)
    return [
      e for e in events if self.sources[e["group"], e["attempt"]] == source
    ]


def read(path: pathlib.Path) -> CalibrationRun:
  """Returns a run from its directory.

  Raises:
    ValueError: it does not hold a run that has trained a round, or a line of
      its records is none, or a segment of them is damaged.
    LookupError: an event lacks a field.
  """
  for name in ("config.json", "events.jsonl", "spans.jsonl"):
    if not segments.exists(path / name):
      raise ValueError(
        f"--calibrate={path}: {name} is missing; name the --workdir of a run"
      )
    if segments.deleted(path / name):
      raise ValueError(
        f"--calibrate={path}: the beginning of {name} was deleted "
        "(retention.log_bytes); name a run whose logs are whole"
      )
  raw = _log(path)
  log = list(event_log.surviving(raw))
  trained = list(event_log.of_kind(log, "update"))
  if not trained:
    raise ValueError(f"--calibrate={path}: it has trained no round; {_MORE}")
  first, *others = sorted({e["version"] for e in trained})
  return CalibrationRun(
    path=path,
    log=log,
    spans=_spans(path),
    first=others[0] if others else first,
    start_s=next(event_log.of_kind(raw, "update"))["start"],
    updates=_updates(raw),
    warming=_warming(raw),
    settings=_settings(path),
    sources={
      (e["group"], e["attempt"]): e["source"]
      for e in log
      if e["kind"] == "submitted"
    },
  )


def _log(path: pathlib.Path) -> list[event_log.Event]:
  file = event_log.LogFile(path / "events.jsonl")
  log = list(file)
  if file.num_garbled:
    raise ValueError(
      f"--calibrate={path}: events.jsonl has a line without an event"
    )
  return log


def _updates(log: Sequence[event_log.Event]) -> list[Update]:
  """Returns all updates, in the order in which they ran."""
  lengths: dict[fitting.MemberId, int] = {}
  updates: list[Update] = []
  restarts = ids = 0
  first: int | None = None  # Version, since the start of the run.
  for event in log:
    match event["kind"]:
      case "resumed":
        restarts, ids, first = restarts + 1, 0, None
      case "ended":
        lengths[event_log.member(event)] = event["length"]
      case "trained":
        place = event["group"], event["attempt"]
        used = event.get("used", event["members"])
        ids += sum(lengths.get((*place, i), 0) for i in used)
      case "update":
        version = event["version"]
        first = version if first is None else first
        warms = version == first
        updates.append(Update((restarts, version), warms, ids))
        ids = 0
  return updates


def _warming(log: Sequence[event_log.Event]) -> list[trace.Interval]:
  """Returns the time from each start of a run to the end of its first round."""
  found: list[trace.Interval] = []
  begun, end, first = 0.0, math.inf, None
  for event in log:
    if event["kind"] == "resumed":
      found.append((begun, end))
      begun, end, first = event["t"], math.inf, None
    elif event["kind"] == "update" and first in (None, event["version"]):
      first, end = event["version"], event["end"]
  return [*found, (begun, end)]


def _spans(path: pathlib.Path) -> list[trace.Span]:
  file = path / "spans.jsonl"
  found = list(trace.read(file))
  count, is_cut = 0, False
  for line in segments.lines(file):
    if line.strip():
      count, is_cut = count + 1, not line.rstrip().endswith("}")
  if count - is_cut > len(found):
    raise ValueError(
      f"--calibrate={path}: spans.jsonl has a line without a span"
    )
  return found


def _settings(path: pathlib.Path) -> experiment.Experiment:
  try:
    # Of a run of many config files, which it keeps.
    data = untrusted_files.read_json(path / "config.json", _MAX_CONFIG)
    settings = overrides.from_json(data)
  except ValueError as error:
    raise ValueError(f"--calibrate={path}: config.json: {error}") from error
  if not isinstance(settings, experiment.Experiment):
    raise ValueError(
      f"--calibrate={path}: config.json holds no rl.experiment.Experiment; "
      "name the --workdir of a run"
    )
  return settings


def apply(
  problem: problem_lib.Planning, path: pathlib.Path, kind: str | None = None
) -> problem_lib.Planning:
  """Returns a problem with the speeds and tasks of a run.

  Slots, room for ids, costs and all other kinds of devices stay as stated, and
  so do links, seats and hosts; `fleet.weights` has precedence over the seconds
  of a transfer.
  Seconds of a token include the encoding of its answer's context.

  Args:
    kind: of the devices that the run used; may be None if there is only one.

  Raises:
    ValueError: the run does not suffice, with the way out.
  """
  kinds = problem.fleet.by_name
  if kind is None and len(kinds) == 1:
    kind = next(iter(kinds))
  if kind is None or kind not in kinds:
    raise ValueError(
      f"--calibrate={path}: --kind={kind} must be a kind of the fleet: "
      f"{' or '.join(kinds)}"
    )
  try:
    run = read(path)
    measured = rates(run)
    calibrated = _calibrated(kinds[kind], run, measured)
    workloads = tuple(tasks(run))
  except LookupError as error:
    raise ValueError(
      f"--calibrate={path}: events.jsonl has a line without {error}"
    ) from error
  return dataclasses.replace(
    problem,
    fleet=dataclasses.replace(
      problem.fleet,
      kinds=tuple(calibrated if k.name == kind else k for k in kinds.values()),
      transfer_s=measured.transfer_s,
    ),
    workloads=workloads,
    routing=problem.routing.of([one.name for one in workloads]),
  )


def _calibrated(
  kind: fleet.DeviceKind, run: CalibrationRun, measured: Rates
) -> fleet.DeviceKind:
  """Returns a kind as fast as the run was."""
  size = run.settings.placement.decode.size
  if size != kind.engine_devices:
    raise ValueError(
      f"--calibrate={run.path}: its engines have {size} devices, and not "
      f"{kind.name}.engine_devices={kind.engine_devices}; use {size}"
    )
  devices = run.settings.placement.learner.size
  # `DeviceKind.learner` divides by this again.
  alone = measured.token_s * devices * kind.scaling ** math.log2(devices)
  return dataclasses.replace(
    kind,
    token_s=max(alone, 1e-12),
    update_s=measured.update_s,
    describe_s=measured.describe_s,
    speed=dataclasses.replace(
      kind.speed,
      tau0_s=measured.tau0_s,
      b0=measured.b0,
      prefill_per_s=math.inf,
      update_s=measured.stand_s,
    ),
  )


def rates(run: CalibrationRun) -> Rates:
  """Returns the speeds of a run.

  Raises:
    ValueError: nothing was sampled or trained, or engines differ.
  """
  placement = run.settings.placement
  if placement.more:
    names = " and ".join(pool.name for pool in placement.pools)
    raise ValueError(
      f"--calibrate={run.path}: its pools {names} may differ in speed, and a "
      "kind has one; name a run that decodes on one pool"
    )
  tau0_s, slope_s = fitting.line(*answers(run))
  token_s, update_s, describe_s = _learner(run)
  began = {e["version"]: e["t"] for e in run.of("publish_start")}
  # The copy for the last engine comes last.
  staged = {e["version"]: e["t"] for e in run.of("staged")}
  travel = [staged[v] - began[v] for v in staged if v > run.first]
  stopped = {
    (e["version"], e["engine"]): e["t"] for e in run.of("decode_suspended")
  }
  stand = [
    e["t"] - stopped[e["version"], e["engine"]]
    for e in run.of("decode_resumed")
  ]
  return Rates(
    tau0_s=tau0_s,
    b0=tau0_s / slope_s,
    token_s=token_s,
    update_s=update_s,
    describe_s=describe_s,
    transfer_s=statistics.median(travel or [0.0]),
    stand_s=statistics.median(stand or [0.0]),
  )


def _learner(run: CalibrationRun) -> tuple[float, float, float]:
  """Returns seconds of a trained id, an optimizer step, a scored sample."""
  pairs = [*zip(run.updates, _work(run), strict=False)]
  pairs = [pair for pair in pairs if not pair[0].warms] or pairs
  ids: dict[tuple[int, int], int] = collections.defaultdict(int)
  took_s: dict[tuple[int, int], float] = collections.defaultdict(float)
  for update, work in pairs:
    ids[update.round] += update.ids
    took_s[update.round] += sum(work["forward"]) + sum(work["accumulate"])
  token_s = [took_s[one] / count for one, count in ids.items() if count]
  if not token_s:
    raise ValueError(f"--calibrate={run.path}: nothing was trained; {_MORE}")
  updates = [seconds for _, work in pairs for seconds in work["update"]]
  scores = [seconds for _, work in pairs for seconds in work["score"]]
  return (
    statistics.median(token_s),
    statistics.median(updates),
    statistics.median(scores or [0.0]),
  )


def _work(run: CalibrationRun) -> list[Mapping[str, list[float]]]:
  """Returns the seconds of the learner's spans by name, of every update."""
  work: list[Mapping[str, list[float]]] = [collections.defaultdict(list)]
  for span in run.spans:
    # A warm start comes before. Events are rounded to 1 us, spans are not.
    if span.track != "learner" or span.end <= run.start_s + 1e-5:
      continue
    is_late = span.name == "score" and len(work) > 1  # Behind its update.
    work[-2 if is_late else -1][span.name].append(span.end - span.start)
    if span.name == "update":
      work.append(collections.defaultdict(list))
  return work[:-1]


# Decoding.


def answers(run: CalibrationRun) -> tuple[fitting.Samples, fitting.Samples]:
  """Returns the load and the seconds a token of every answer.

  The load is the number of answers under way on its engine, itself included,
  as a mean over its time.

  Raises:
    ValueError: nothing was sampled, or the log does not tell how long answers
      waited for a slot, and some did.
  """
  homes = {event_log.member(e): e["engine"] for e in run.of("admitted")}
  by_engine: dict[int, list[event_log.Event]] = collections.defaultdict(list)
  turns = [event for event in run.of("turn") if event["tokens"]]
  for event in [e for e in turns if not _warms(run, e)] or turns:
    by_engine[homes.get(event_log.member(event), 0)].append(event)
  if not by_engine:
    raise ValueError(f"--calibrate={run.path}: nothing was sampled; {_MORE}")
  parts = [fitting.answers(turns) for turns in by_engine.values()]
  number, token_s = (np.concatenate(both) for both in zip(*parts, strict=True))
  slots = getattr(run.settings.engine, "slots", None) or math.inf
  if number.max() > slots and any("queue_s" not in e for e in turns):
    raise ValueError(
      f"--calibrate={run.path}: up to {number.max():.0f} answers at once had "
      f"engine.slots={slots}, and its turns have no queue_s, the seconds of "
      "their waits; name a newer run, or one with more slots"
    )
  return number, token_s


def _warms(run: CalibrationRun, turn: event_log.Event) -> bool:
  asked_s = fitting.asked_s(turn)
  return any(start <= asked_s < end for start, end in run.warming)


# Tasks.


def tasks(run: CalibrationRun) -> Iterator[workload.Workload]:
  """Yields the turns, ids and seconds of the episodes of each source."""
  ended = run.of("ended")
  names = [run.sources[e["group"], e["attempt"]] for e in ended]
  for name, count in sorted(collections.Counter(names).items()):
    yield _task(run, name, count / len(names))


def _task(run: CalibrationRun, name: str, share: float) -> workload.Workload:
  turns, ended = run.of("turn", name), run.of("ended", name)
  whole = [
    e for e in ended if trajectory.Status(e["status"]).trainable and e["turns"]
  ]
  if not whole:
    raise ValueError(
      f"--calibrate={run.path}: no episode of {name} ended without a fault; "
      "name a run in which its environments work"
    )
  prompt, reply = fitting.contexts(whole)
  broken = [e for e in ended if e["status"] == _ENV_FAULT and e["turns"]]
  hazard = len(broken) / sum(e["turns"] for e in ended)
  before = {event_log.member(e): e["t"] for e in run.of("grading", name)}
  rewards = [e for e in run.of("reward", name) if event_log.member(e) in before]
  graded = [e["t"] - before[event_log.member(e)] for e in rewards]
  start_fault, step_fault, reward_fault = _faults(run, name)
  return workload.Workload(
    name=name,
    share=share,
    # Of long episodes fewer come to their end.
    turns=fitting.counts(
      [e["turns"] for e in whole],
      [(1.0 - hazard) ** -e["turns"] for e in whole],
    ),
    prompt_tokens=distributions.Fixed(max(prompt, 2.0)),
    answer_tokens=fitting.counts([e["tokens"] for e in turns if e["tokens"]]),
    reply_tokens=distributions.Fixed(reply),
    start_s=fitting.seconds(
      [*fitting.starts_s(run.of("admitted", name), turns)]
    ),
    step_s=fitting.seconds([e["env_s"] for e in turns]),
    reward_s=fitting.seconds(graded),
    correlation=correlation(turns, whole),
    start_fault=start_fault,
    step_fault=step_fault,
    reward_fault=reward_fault,
  )


def _faults(run: CalibrationRun, name: str) -> tuple[float, float, float]:
  """Returns the shares of starts, steps and rewards that raise."""
  rollout, ended = run.settings.rollout, run.of("ended", name)
  lasts = {event_log.member(e): e["env_s"] for e in run.of("turn", name)}
  faulty = [e for e in ended if e["status"] == _ENV_FAULT]
  # Steps past the deadline are among the seconds of steps.
  raised = [
    e
    for e in faulty
    if e["turns"] and lasts.get(event_log.member(e), 0.0) < rollout.step_s
  ]
  graded = len(run.of("grading", name))
  lost = sum(e["status"] == _REWARD_FAULT for e in run.of("fault", name))
  return (
    sum(not e["turns"] for e in faulty) / len(ended),
    len(raised) / sum(e["turns"] for e in ended),
    # All calls of a reward that is lost have failed.
    (lost / max(graded, 1)) ** (1.0 / rollout.grading.attempts),
  )


def correlation(
  turns: Sequence[event_log.Event], ended: Sequence[event_log.Event]
) -> float:
  """Returns the correlation of draws within groups.

  A workload has one for all draws: the mean of those of the turns and of the
  tokens of an answer, or of the one that varies.
  """
  lengths: dict[fitting.MemberId, list[float]] = collections.defaultdict(list)
  for event in turns:
    if event["tokens"]:
      lengths[event_log.member(event)].append(float(event["tokens"]))
  counts = {event_log.member(e): [float(e["turns"])] for e in ended}
  correlations = [
    fitting.correlation(draws)
    for draws in (lengths, counts)
    if len({one for own in draws.values() for one in own}) > 1
  ]
  return statistics.fmean(correlations or [0.0])
