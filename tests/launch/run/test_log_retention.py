"""Logs that lose their beginning: what is left is checked as if all was there.

Runs on a virtual clock that are killed now and then, and go on from one of
their last two checkpoints, as those on disk do.
"""

import asyncio
import dataclasses
import json
import shutil
import threading
from typing import Any

import pytest

from envs import base
from launch.report import log_check, run_files
from launch.report import page as report_page
from launch.run import log_retention
from rl.loop import progress as progress_lib
from rl.runtime import segments, watchdog
from rl.schedule import overlap
from rl.settings import overrides
from rl.testing import fakes
from tests.helpers import virtual_run

ROUNDS = 16
FLYING = overlap.in_flight(2, 1, 2)
SCHEDULES = {
  "sync": overlap.sync(2),
  "bounded": overlap.bounded(2, 2, 1),
  "in flight": FLYING,
  "drop": dataclasses.replace(overlap.in_flight(2, 1, 1), consume="drop"),
  "redundant": dataclasses.replace(
    FLYING,
    consume="drop",
    redundancy=overlap.Redundancy(extra_groups=1, extra_members=1),
  ),
}
# So many rounds after its start each process is killed, with so many events
# more; the next one goes on after its last checkpoint, or the one before.
KILLS = ((4, 9, "last"), (3, 0, "before"), (5, 30, "last"), (1, 3, "before"))


class Saving(virtual_run.Observer):
  """Keeps every boundary, with the number of events before it."""

  def __init__(self):
    super().__init__()
    self.boundaries: list[tuple[progress_lib.Progress, int]] = []
    self.run: virtual_run.Run | None = None

  async def on_boundary(self, progress):
    await super().on_boundary(progress)
    host = json.loads(json.dumps(progress.to_host()))
    saved = progress_lib.from_host(progress.state, host)
    assert self.run is not None
    self.boundaries.append((saved, len(self.run.log.events)))


def uneven(priority):
  """Some members take longer than a round."""
  return 9.0 if sum(priority) % 7 == 3 else 0.5


def lives(schedule):
  """Yields the log of each process, and the rounds of its oldest checkpoint."""
  saved, start_s, checkpoints = None, 0.0, []
  for rounds, more, which in (*KILLS, (ROUNDS, 0, "")):
    observer = Saving()
    run = virtual_run.Run(
      schedule, rounds=ROUNDS, delay_s=uneven, observer=observer
    )
    observer.run = run
    run.start(saved)
    at = min(rounds, len(observer.boundaries)) - 1
    events = run.log.events[: observer.boundaries[at][1] + more]
    if not which:
      events = run.log.events
    yield (
      [_later(event, start_s) for event in events],
      min((x.trained for x in checkpoints[-2:]), default=0),
    )
    checkpoints += [x for x, _ in observer.boundaries[: at + 1]]
    saved = checkpoints[-1 if which == "last" else -2]
    if which == "before":  # The last one was damaged.
      del checkpoints[-1]
    start_s += 1e4


def _later(event, seconds):
  times = ("t", "start", "end")
  return {k: v + seconds if k in times else v for k, v in event.items()}


def written(path, logs, size=2000):
  """Writes the logs of processes in segments of about 20 events."""
  for log in logs:
    file = segments.SegmentedFile(path, size)
    for event in log:
      file.append([json.dumps(event)])
    compressed()


def compressed():
  """Waits until the threads that compress have ended."""
  for thread in threading.enumerate():
    if thread.name == "segments":
      thread.join()


def a_run(path, schedule):
  """Returns the directory of a run, with its settings only."""
  path.mkdir()
  config = {
    "overlap": overrides.to_json(schedule),
    "rollout": {"group_size": 2},
  }
  (path / "config.json").write_text(json.dumps(config))
  return path


def told(verdict):
  """Returns all of a verdict but what is no longer there, to be compared."""
  fields = {**vars(verdict)}
  del fields["whole_from"]
  counted = {name: vars(fields[name]) for name in ("census", "phases")}
  return fields | counted


@pytest.fixture(scope="module")
def flown(tmp_path_factory):
  """A run that was killed now and then."""
  run = a_run(tmp_path_factory.mktemp("runs") / "run", FLYING)
  written(run / "events.jsonl", [log for log, _ in lives(FLYING)])
  return run


@pytest.fixture
def flying(flown, tmp_path):
  """Its copy."""
  return shutil.copytree(flown, tmp_path / "run")


def trimmed(run, rounds, max_bytes=1):
  log_retention.LogRetention(run, max_bytes).trim(rounds)
  return segments.deleted(run / "events.jsonl")


@pytest.mark.parametrize(
  "name",
  [
    name
    if name in ("in flight", "drop")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in SCHEDULES
  ],
)
def test_what_is_left_of_a_log_gets_the_verdict_of_all_of_it(name, tmp_path):
  schedule, numbers = SCHEDULES[name], [0]
  whole = a_run(tmp_path / "whole", schedule)
  run = a_run(tmp_path / "run", schedule)
  for log, oldest in lives(schedule):
    # Trimmed when the process begins, as far as its checkpoints allow.
    if oldest:
      numbers.append(trimmed(run, oldest))
      assert told(log_check.of_run(run)) == told(log_check.of_run(whole))
    for path in (run, whole):
      written(path / "events.jsonl", [log])
  numbers.append(trimmed(run, ROUNDS))
  verdict = log_check.of_run(run)
  assert verdict.violations == []
  assert verdict.ledger.error == 0
  assert told(verdict) == told(log_check.of_run(whole))
  assert numbers == sorted(numbers)
  assert numbers[-1] > numbers[2] > 0
  assert f"whole from round {verdict.whole_from}" in verdict.text
  assert 1 < verdict.whole_from <= ROUNDS


def test_what_a_restart_may_supersede_is_not_deleted(flying):
  assert not trimmed(flying, 1)
  # Rounds train two groups each, so the first ones are over after a few.
  early = trimmed(flying, 6)
  assert 0 < early < trimmed(flying, ROUNDS)


def test_a_log_below_the_bound_is_left_alone(flying):
  log = flying / "events.jsonl"
  most = segments.num_bytes(log)
  assert not trimmed(flying, ROUNDS, most)
  # Half a segment less: the first one is enough.
  first = segments.closed(log)[0].stat().st_size
  assert trimmed(flying, ROUNDS, most - first // 2) >= 1


def test_a_log_is_read_a_few_times_however_many_segments_go(
  flying, monkeypatch
):
  log, read, lines = flying / "events.jsonl", [0], segments.lines

  def counted(*args, **kwargs):
    for line in lines(*args, **kwargs):
      read[0] += 1
      yield line

  total, before = len([*lines(log)]), len(segments.closed(log))
  monkeypatch.setattr(segments, "lines", counted)
  # Its last restart is near the end, and each deletion reads until there.
  number = trimmed(flying, ROUNDS, segments.num_bytes(log) * 2 // 3)
  assert before > number >= before // 3
  assert read[0] < 4 * total


def test_the_rest_of_a_log_is_found_out_when_it_is_changed(flying):
  assert trimmed(flying, 6)
  log = flying / "events.jsonl"
  kept = [json.loads(line) for line in segments.lines(log)]
  # Closed segments were compressed: put the rest in one piece.
  for segment in segments.closed(log):
    segment.unlink()

  def violations(events):
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    return log_check.of_run(flying).violations

  assert violations(kept) == []
  trained = [i for i, event in enumerate(kept) if event["kind"] == "trained"]
  for i in (trained[0], trained[-1]):
    more = kept[i] | {"tokens": kept[i]["tokens"] + 1}
    assert violations([*kept[:i], more, *kept[i + 1 :]])
    assert violations([*kept[:i], *kept[i + 1 :]])
  # As if a checkpoint that was put back by hand had been gone on from.
  back = {"t": kept[-1]["t"], "kind": "resumed", "trained": 2, "next_group": 6}
  found = violations([*kept, back])
  assert "went on after 2 rounds, but what it supersedes was" in str(found)


def test_a_segment_that_went_missing_behind_the_mark_is_told(flying):
  number = trimmed(flying, 6)
  segments.closed(flying / "events.jsonl")[0].unlink()
  with pytest.raises(
    log_check.UnreadableLog, match=f"{number + 1:06}.jsonl.gz is missing"
  ):
    log_check.of_run(flying)


def test_a_damaged_state_is_named(flying):
  log = flying / "events.jsonl"
  mark = segments.mark(log, trimmed(flying, ROUNDS))
  text = mark.read_text()
  other = text.replace('"rounds":', '"sounds":')
  assert other != text
  for damaged in (other, text[: len(text) // 2], ""):
    mark.write_text(damaged)
    with pytest.raises(log_check.UnreadableLog, match="checksum differs"):
      log_check.of_run(flying)


def test_a_log_without_its_beginning_needs_the_schedule(flying):
  trimmed(flying, ROUNDS)
  with pytest.raises(log_check.UnreadableLog, match=r"put config\.json back"):
    log_check.read(flying / "events.jsonl")
  with pytest.raises(log_check.UnreadableLog, match="lost its beginning"):
    log_check.tampered(flying)


@pytest.mark.parametrize("step", ["rename", "unlink"])
def test_a_kill_between_state_and_deletion_costs_nothing(
  flying, monkeypatch, step
):
  whole = told(log_check.of_run(flying))

  class Killed(BaseException):
    pass

  def kill(*_, **__):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(f"pathlib.Path.{step}", kill)
    with pytest.raises(Killed):
      trimmed(flying, ROUNDS)
  assert told(log_check.of_run(flying)) == whole
  # The next process deletes what the mark stands for, and goes on.
  number = segments.deleted(flying / "events.jsonl")
  assert bool(number) == (step == "unlink")
  segments.SegmentedFile(flying / "events.jsonl")
  left = [int(x.name[:6]) for x in (flying / "events").iterdir()]
  assert min(left) >= number
  assert trimmed(flying, ROUNDS) > number
  assert told(log_check.of_run(flying)) == whole


def test_spans_are_deleted_and_pages_say_what_is_gone(flying):
  path = flying / "spans.jsonl"
  span = {"track": "host", "name": "x", "start": 0.0, "end": 1.0, "args": {}}
  written(path, [[span] * 200])
  log_retention.LogRetention(flying, 1).trim_later(ROUNDS)
  for thread in threading.enumerate():
    if thread.name == "retention":
      thread.join()
  notes = []
  spans = run_files.spans(path, notes)
  assert len(spans.middle) == spans.count < 200
  gone = segments.deleted(path)
  assert notes == [
    f"spans.jsonl begins with segment {gone + 1}; older ones were deleted "
    "(retention.log_bytes)."
  ]
  shown = " ".join(report_page.read(flying).notes)
  assert notes[0] in shown
  assert "events.jsonl is whole from round" in shown


def test_a_damaged_log_is_told_once_and_left(flying):
  segments.closed(flying / "events.jsonl")[0].write_bytes(b"\x1f\x8b")
  told_of = []
  retention = log_retention.LogRetention(flying, 1, told_of.append)
  for _ in range(2):
    retention.trim_later(ROUNDS)
    retention.close()
  (line,) = told_of
  assert "nothing of the log is deleted" in line
  assert not segments.deleted(flying / "events.jsonl")


@dataclasses.dataclass(frozen=True)
class Full(fakes.Counting):
  """A source that has no room for the sixth of its tasks, for ever."""

  begun: list[base.Task] = dataclasses.field(default_factory=list)

  def __call__(self, task):
    if task not in self.begun:
      self.begun.append(task)
    environment: Any = super().__call__(task)
    if self.begun.index(task) == 5:
      environment.admit = asyncio.Event().wait
    return environment


def test_an_attempt_that_does_not_end_is_named_once_the_log_is_long(tmp_path):
  # Without a token it has no age by which it could be dropped.
  run = virtual_run.Run(SCHEDULES["drop"], rounds=ROUNDS, source=Full())
  with pytest.raises(watchdog.Stalled):
    run.start()
  directory = a_run(tmp_path / "run", run.schedule)
  written(directory / "events.jsonl", [run.log.events])
  told_of = []
  retention = log_retention.LogRetention(directory, 10**9, told_of.append)
  retention.trim(ROUNDS)
  assert not told_of
  retention = log_retention.LogRetention(directory, 1, told_of.append)
  for _ in range(2):
    retention.trim(ROUNDS)
  (line,) = told_of
  assert "attempt 0 of group 5 is not over" in line
  # What came before it is gone.
  kept = [json.loads(x) for x in segments.lines(directory / "events.jsonl")]
  begun = {x["group"] for x in kept if x["kind"] == "submitted"}
  assert 5 in begun
  assert 0 not in begun
