"""Checks that the log of a run keeps the promises of its schedule.

  python -m launch.report --check runs/first

One pass over events.jsonl and its segments, in flat memory; the run may have
millions of episodes, still go on, or have been killed. Where the oldest
segments were deleted (`launch/run/log_retention.py`), it begins with the state
that a reader of them had at their end.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from launch.report import bubbles, episode_census, run_files
from models import untrusted_files
from rl.audit import (
  checker,
  event_log,
  lifecycle,
  snapshot,
  tampering,
  token_ledger,
)
from rl.rollout import group_rollout
from rl.runtime import segments
from rl.schedule import overlap
from rl.settings import overrides

_MAX_ROWS = 120
_MAX_TAMPERED = 500
_MAX_STATE = 256 << 20
_VERSION = 1
_Row = list[Any]


class UnreadableLog(Exception):
  """The run to check is missing, or lacks its log or settings."""


@dataclasses.dataclass(kw_only=True)
class SourceCounts:
  """The groups that were given to a source of tasks, and their fate.

  Attributes:
    submitted: places in the order of submission. The weights of the sources
      assign them, so this is the mix that was requested; the place of a
      redundant group is assigned again, and counts once.
    trained: groups of its tasks of which tokens were trained.
    too_slow: places that it lost because it was too slow for the bound.
    attempts: at those places.
  """

  submitted: int = 0
  trained: int = 0
  too_slow: int = 0
  attempts: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """The result of checking a log.

  Attributes:
    bound: eta of the schedule; None when the settings are unknown.
    checks: the promises that were checked, a line each; empty without
      settings.
    violations: a sentence each.
    lags: groups of which tokens were trained, by T - F.
    faults: by status.
    sources: by name.
    rounds: trained, in whole or in part.
    groups: some attempts, spread over the run; see `Ages`.
    census: lengths and faults of all episodes.
    phases: times at which members were played and groups taken.
    num_cut: lines left out because a crash has cut them.
    whole_from: the first round, as in the metrics, whose events are all in the
      log; those of older ones were checked before they were deleted.
  """

  bound: int | None
  checks: Sequence[str]
  violations: Sequence[str]
  ledger: token_ledger.Ledger
  by_source: Mapping[str, token_ledger.Ledger]
  selection: token_ledger.SelectionBias
  lags: collections.Counter[int]
  faults: collections.Counter[str]
  sources: Mapping[str, SourceCounts]
  rounds: int
  groups: Sequence[_Row]
  census: episode_census.EpisodeCensus
  phases: bubbles.Phases
  num_cut: int
  whole_from: int = 1

  @property
  def deleted(self) -> str:
    """A sentence about what is no longer in the log; "" if nothing is."""
    if self.whole_from <= 1:
      return ""
    return (
      f"events.jsonl is whole from round {self.whole_from:,} on; older events "
      "were counted and checked before they were deleted "
      "(retention.log_bytes)"
    )

  @property
  def summary(self) -> str:
    """A sentence for the end of a run."""
    bound = "an unknown bound" if self.bound is None else str(self.bound)
    return (
      f"staleness: at most {max(self.lags, default=0)} of {bound} allowed, "
      f"over {self.lags.total():,} groups; {self.ledger}{self._slow_sources}"
    )

  @property
  def _slow_sources(self) -> str:
    slow = [
      f"{name} in {source.too_slow:,} of {source.submitted:,} places, after "
      f"{source.attempts:,} attempts"
      for name, source in self.sources.items()
      if source.too_slow
    ]
    return f"; too slow for the bound: {', '.join(slow)}" if slow else ""

  @property
  def text(self) -> str:
    """The whole verdict, for a terminal."""
    chosen, launched = self.selection.trained, self.selection.launched
    lines = [self.summary]
    if len(self.by_source) > 1:
      lines += [
        f"  {name}: {ledger}" for name, ledger in self.by_source.items()
      ]
    lines.append(
      f"selection: {chosen.episodes:,} of {launched.episodes:,} episodes "
      f"trained, {chosen.mean_length:,.1f} ids long where those launched have "
      f"{launched.mean_length:,.1f}"
    )
    for source, share in launched.shares.items():
      trained = chosen.shares.get(source, 0.0)
      lines.append(f"  {source}: {share:.1%} launched, {trained:.1%} trained")
    lines += self._mix
    if self.deleted:
      lines.append(self.deleted)
    if self.num_cut:
      lines.append(f"lines cut by a crash and left out: {self.num_cut}")
    lines += [f"checked: {check}" for check in self.checks]
    lines += [f"broken: {violation}" for violation in self.violations]
    return "\n".join([*lines, f"{len(self.violations)} violations"])

  @property
  def _mix(self) -> list[str]:
    """A line for each source, when there are several or one is too slow."""
    sources = self.sources.values()
    if len(sources) < 2 and not any(source.too_slow for source in sources):
      return []
    submitted = sum(source.submitted for source in sources)
    trained = sum(source.trained for source in sources)
    return [
      f"groups of {name}: {_share(source.submitted, submitted)} of those "
      f"submitted, {_share(source.trained, trained)} of those trained; "
      f"{source.too_slow:,} too slow, after {source.attempts:,} attempts"
      for name, source in self.sources.items()
    ]


def _share(part: int, whole: int) -> str:
  return f"{part / whole:.1%}" if whole else "none"


class Mix:
  """Counts the groups of each source; memory is that of those under way."""

  def __init__(self):
    self.sources: collections.defaultdict[str, SourceCounts] = (
      collections.defaultdict(SourceCounts)
    )
    # Sources of the first attempt at a group, and of the last.
    self._first: dict[int, str] = {}
    self._last: dict[int, str] = {}

  def observe(self, event: event_log.Event) -> None:
    """Counts one event."""
    match event["kind"]:
      case "submitted":
        self._begin(event["group"], event["source"])
      case "restored":
        source = self._last.get(event["group"], token_ledger.UNKNOWN)
        self._begin(event["group"], source)
      case "source_too_slow":
        source = self.sources[event["source"]]
        source.too_slow += 1
        source.attempts += event["attempts"]
      case "trained" if event["group"] in self._last:
        source = self.sources[self._last[event["group"]]]
        source.trained += bool(event["tokens"])
        self._end(event["group"])
      case "dropped" if self._is_redundant(event):
        self.sources[self._first[event["group"]]].submitted -= 1
        self._end(event["group"])

  def _is_redundant(self, event: event_log.Event) -> bool:
    return event["reason"] == "redundant" and event["group"] in self._first

  def _begin(self, group: int, source: str) -> None:
    self._last[group] = source
    if group not in self._first:
      self._first[group] = source
      self.sources[source].submitted += 1

  def _end(self, group: int) -> None:
    del self._first[group], self._last[group]


class Ages:
  """Seconds that a sample of attempts waited, played, queued and trained.

  Rows are [group, attempt, outcome, wait_s, play_s, queue_s, train_s]; phases
  that a dropped attempt never reached are 0. Memory is flat: as the log grows,
  only every second group is kept, then every fourth and so on.
  """

  def __init__(self):
    self.rows: list[_Row] = []
    self._stride = 1
    self._times: dict[tuple[int, int], list[float]] = {}

  def observe(self, event: event_log.Event) -> None:
    """Takes the time of one transition."""
    kind = event["kind"]
    if kind not in _SEEN or event["group"] % self._stride:
      return
    place = event["group"], event["attempt"]
    if kind == "submitted":
      self._times[place] = [event["t"]]
    elif place in self._times:
      times = self._times[place]
      # An attempt is dropped in any phase; skipped phases took no time.
      phase = _PHASES.get(kind, len(times))
      if len(times) <= phase:
        times += [times[-1]] * (phase - len(times)) + [event["t"]]
      if kind in ("trained", "dropped"):
        self._end(place, event.get("reason", "trained"))

  def _end(self, place: tuple[int, int], outcome: str) -> None:
    times = self._times.pop(place)
    pairs = itertools.pairwise(times)
    ages = [round(max(0.0, after - before), 3) for before, after in pairs]
    self.rows.append([*place, outcome, *ages, *[0.0] * (4 - len(ages))])
    if len(self.rows) > 2 * _MAX_ROWS:
      self._stride *= 2
      self.rows = [row for row in self.rows if row[0] % self._stride == 0]


_BALANCE = "The token ledger balances."
_PHASES = {
  "submitted": 0,
  "first_token": 1,
  "ready": 2,
  "dequeued": 3,
  "trained": 4,
}
_SEEN = (*_PHASES, "dropped")


def of_run(run_dir: pathlib.Path) -> Verdict:
  """Returns the verdict on a run.

  Raises:
    UnreadableLog: it has no log, or no settings.
  """
  return read_whole(run_dir, *promised(run_dir))


def read_whole(
  run_dir: pathlib.Path,
  schedule: overlap.Overlap | None = None,
  group_size: int = 0,
) -> Verdict:
  """Reads the log of a run, and checks that it goes as far as the metrics.

  Args and errors are those of `read`.
  """
  # Read first: a run that goes on writes both meanwhile.
  metrics = run_files.lines(run_dir / "metrics.jsonl", [], round=int)
  newest = max((row["round"] for row in metrics), default=0)
  verdict = read(run_dir / "events.jsonl", schedule, group_size)
  # Metrics are written a moment before the events of the same round.
  if newest <= verdict.rounds + 1:
    return verdict
  missing = (
    f"the log ends in round {verdict.rounds}, but metrics.jsonl has {newest}: "
    "lines are missing at its end"
  )
  return dataclasses.replace(verdict, violations=[*verdict.violations, missing])


def promised(run_dir: pathlib.Path) -> tuple[overlap.Overlap, int]:
  """Returns the schedule and the group size of a run that has a log.

  Raises:
    UnreadableLog: it has no log, or no settings.
  """
  try:
    is_there = segments.exists(run_dir / "events.jsonl")
  except segments.Damaged as error:
    raise UnreadableLog(str(error)) from error
  if not is_there:
    raise UnreadableLog(
      f"{run_dir}/events.jsonl is missing; name the --workdir of a run"
    )
  try:
    return schedule_of(run_files.settings(run_dir))
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise UnreadableLog(
      f"{run_dir}/config.json: it should hold the schedule: {error}"
    ) from error


def tampered(run_dir: pathlib.Path) -> str:
  """Returns a table of changes of the beginning of a run's log.

  A row for each kind of event and each of its fields: how many changes of it
  break a promise, of those tried; "event" is to leave it out.

  Raises:
    UnreadableLog: it has no log, no settings, or no longer the beginning.
  """
  schedule, group_size = promised(run_dir)
  if segments.deleted(run_dir / "events.jsonl"):
    raise UnreadableLog(
      f"{run_dir}/events.jsonl has lost its beginning to retention.log_bytes; "
      "tamper with a log that is whole"
    )
  log = event_log.LogFile(run_dir / "events.jsonl")
  try:
    beginning = list(itertools.islice(log, _MAX_TAMPERED))
  except segments.Damaged as error:
    raise UnreadableLog(str(error)) from error
  counts = tampering.notice(beginning, schedule, group_size, most=4)
  rows = [f"{'kind':18}{'changed':16}noticed"]
  for (kind, field), (found, tried) in sorted(counts.items()):
    rows.append(f"{kind:18}{field or 'event':16}{found} of {tried}")
  return "\n".join(rows)


def schedule_of(config: Mapping[str, Any]) -> tuple[overlap.Overlap, int]:
  """Returns the schedule and the group size in the settings of a run.

  Raises:
    LookupError: the settings have no schedule.
    ValueError: a setting is unknown or does not fit.
  """
  data = {"class": "rl.schedule.overlap.Overlap", **config["overlap"]}
  size = config.get("rollout", {}).get("group_size")
  if size is None:
    size = group_rollout.Rollout().group_size
  if not isinstance(size, int):
    raise ValueError(f"rollout.group_size={size!r} must be a count")
  return overrides.from_json(data), size


def read(
  path: pathlib.Path,
  schedule: overlap.Overlap | None = None,
  group_size: int = 0,
) -> Verdict:
  """Reads a log; without a schedule nothing is checked.

  Raises:
    UnreadableLog: an event lacks a field, as one of an older version may, or
      a segment of the log is damaged.
  """
  while True:
    before = segments.deleted(path)
    try:
      return _read(path, LogReader(schedule, group_size))
    except UnreadableLog:
      # The run has deleted another segment meanwhile.
      if segments.deleted(path) == before:
        raise


def _read(path: pathlib.Path, reader: "LogReader") -> Verdict:
  log = event_log.LogFile(path)
  try:
    survivors = reader.begin(path)
    for event in event_log.surviving(log, survivors):
      reader.observe(event)
    verdict = reader.verdict(log, survivors)
    _ = verdict.text  # Its means may be beyond a float.
    return verdict
  except LookupError as error:
    raise UnreadableLog(f"{path.name}: an event lacks {error}") from error
  except segments.Damaged as error:
    raise UnreadableLog(str(error)) from error
  except (TypeError, ValueError, OverflowError, AttributeError) as error:
    raise UnreadableLog(
      f"{path.name}: a field of an event is of another type: {error}"
    ) from error


_GIVEN = ("_promised", "_bound", "_ledgers", "_checker", "_gap")


def _state(text: str, name: str) -> Any:
  """Returns the state in the text of `LogReader.to_host`; raises ValueError."""
  checksum, _, rest = text.partition("\n")
  if hashlib.sha256(rest.rstrip("\n").encode()).hexdigest() != checksum:
    raise ValueError("its checksum differs")
  state = untrusted_files.parse_json(rest, name)
  if state["version"] != _VERSION:
    raise ValueError(f"it has version {state['version']}, not {_VERSION}")
  return state


class LogReader:
  """Gives each event to the checker, the ledger and the counters.

  Call `begin`, then `observe` with each event that survives.

  Attributes:
    rounds: trained, in whole or in part.
  """

  def __init__(self, schedule: overlap.Overlap | None, group_size: int):
    self._promised = [schedule and overrides.to_json(schedule), group_size]
    self._bound = schedule.max_staleness if schedule else None
    self._ledgers, self._ages, self._mix = (
      token_ledger.LedgerBuilder(),
      Ages(),
      Mix(),
    )
    self._checker = (
      checker.Checker(schedule, group_size, self._ledgers) if schedule else None
    )
    self._census = episode_census.EpisodeCensus()
    self._phases = bubbles.Phases()
    self._lags: collections.Counter[int] = collections.Counter()
    self._faults: collections.Counter[str] = collections.Counter()
    self._num_cut = self._num_garbled = 0
    self._gap = ""
    self.rounds = 0

  @property
  def under_way(self) -> list[lifecycle.AttemptRecord]:
    """Attempts of which more may come; a schedule is known."""
    assert self._checker is not None
    return self._checker.under_way

  def count_lines(self, log: event_log.LogFile) -> None:
    """Takes the lines into account that the last reading left out."""
    self._num_cut += log.num_cut
    self._num_garbled += log.num_garbled

  def to_host(self, survivors: Mapping[str, Any]) -> str:
    """Returns the state after a part of a log as text, for `segments.delete`.

    Args:
      survivors: the state of those.
    """
    assert self._checker is not None
    state = {
      "version": _VERSION,
      "promised": self._promised,
      "survivors": survivors,
      "checker": self._checker.to_host(),
      "counts": snapshot.of(self, _GIVEN),
    }
    text = json.dumps(state, separators=(",", ":"))
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n"

  def begin(self, path: pathlib.Path) -> event_log.Survivors:
    """Goes on from the state of what was deleted of a log, if any was.

    Raises:
      UnreadableLog: that state is damaged, or cannot be used.
    """
    survivors = event_log.Survivors()
    if not (number := segments.deleted(path)):
      return survivors
    file = segments.mark(path, number)
    name = f"{path.stem}/{file.name}"
    if self._checker is None:
      raise UnreadableLog(
        f"the beginning of {path.name} was deleted, and without a schedule the "
        "rest cannot be read; put config.json back"
      )
    try:
      state = _state(untrusted_files.read_text(file, _MAX_STATE), name)
      if state["promised"] != self._promised:
        raise ValueError("it is of another schedule or group size")
      survivors.restore(state["survivors"])
      self._checker.restore(state["checker"])
      snapshot.restore(self, state["counts"], SourceCounts, without=_GIVEN)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise UnreadableLog(
        f"{name}, the state after what was deleted, cannot be used: {error}; "
        "put a copy of it back"
      ) from error
    return survivors

  def observe(self, event: event_log.Event) -> None:
    """Takes an event into account."""
    if self._checker:
      self._checker.observe(event)
    else:
      self._ledgers.observe(event)
    self._ages.observe(event)
    self._mix.observe(event)
    self._census.observe(event)
    self._phases.observe(event)
    if event["kind"] == "trained":
      if event["tokens"]:
        self._lags[event["version"] - event["first_version"]] += 1
      self.rounds = max(self.rounds, event["version"] + 1)
    elif event["kind"] == "fault":
      self._faults[event["status"]] += 1
    elif event["kind"] == "resumed" and event["trained"] > self.rounds:
      self._gap = self._gap or (
        f"the log has nothing of rounds {self.rounds + 1} to "
        f"{event['trained']}, after which a restart went on: it was removed, "
        "or copied at another time than the checkpoints, so it cannot be "
        "checked"
      )

  def verdict(
    self, log: event_log.LogFile, survivors: event_log.Survivors
  ) -> Verdict:
    """Returns the verdict on all that was observed; call it once."""
    self.count_lines(log)
    checks, violations, ledger = [], [], self._ledgers.ledger()
    if self._checker:
      checks = [*self._checker.checks, _BALANCE]
      violations = self._checker.finish()
      if ledger.error:
        violations.append(f"the ledger does not balance: {ledger}")
    if self._num_garbled:
      violations.append(
        f"{self._num_garbled} lines in the middle of the log are not events"
      )
    if self._gap:  # Whatever else is wrong may follow from it.
      violations = [self._gap]
    violations += [
      f"a restart went on after {rounds} rounds, but what it supersedes was "
      f"deleted: the log begins with round {survivors.floor}"
      for rounds in survivors.too_far_back
    ]
    return Verdict(
      bound=self._bound,
      checks=checks,
      violations=violations,
      ledger=ledger,
      by_source=self._ledgers.by_source(),
      selection=self._ledgers.selection_bias(),
      lags=self._lags,
      faults=self._faults,
      sources=dict(sorted(self._mix.sources.items())),
      rounds=self.rounds,
      groups=self._ages.rows,
      census=self._census,
      phases=self._phases,
      num_cut=self._num_cut,
      whole_from=max(1, survivors.floor),
    )
