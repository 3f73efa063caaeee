"""Idle time of both meshes, split by hand."""

import pytest

from launch.report import bubbles
from rl.runtime import trace


def span(track, name, start, end, **args):
  return trace.Span(track, name, start, end, args)


def observed(*events):
  phases = bubbles.Phases()
  for t, kind, fields in events:
    phases.observe({"t": t, "kind": kind, "group": 0, "attempt": 0, **fields})
  return phases


def test_every_idle_moment_of_the_learner_has_one_cause():
  phases = observed(
    (1.0, "admitted", {"index": 0}),
    (6.0, "reward", {"index": 0}),
    (8.0, "dequeued", {}),
  )
  found = bubbles.find(
    [
      span("learner", "init", 0.0, 1.0),
      span("learner", "accumulate", 9.0, 10.0),
      span("learner", "accumulate", 12.0, 13.0),
      span("decode", "decode", 2.0, 4.0),
      span("host", "publish", 10.0, 11.5),
    ],
    phases,
  )["learner"]
  # 0-1 compile; 1-2 and 4-6 a member plays but no engine decodes; 2-4 engines
  # decode; 6-8 nothing; 8-9 packing; 9-10 busy; 10-11.5 publish; 11.5-12
  # nothing; 12-13 busy.
  assert found.busy_s == 2.0
  assert found.seconds == 13.0
  assert found.causes == {
    "compile": 1.0,
    "publish": 1.5,
    "packing": 1.0,
    "rollout": 2.0,
    "environment": 3.0,
    "gate": 2.5,
  }
  assert sum(found.causes.values()) + found.busy_s == found.seconds


def test_engines_wait_for_environments_or_for_the_gate():
  phases = observed(
    (1.0, "admitted", {"index": 0}),
    (1.0, "admitted", {"index": 1}),
    (3.0, "reward", {"index": 0}),
    (5.0, "fault", {"index": 1}),
  )
  found = bubbles.find(
    [
      span("decode", "decode", 0.0, 2.0),
      span("learner", "warm start", 6.5, 7.0),
      span("decode", "decode", 8.0, 9.0),
      span("host", "evaluate", 9.0, 12.0),
      span("decode", "decode", 11.0, 12.0),
    ],
    phases,
  )["decode"]
  # A member plays or is graded until 5, after that nothing is let in, and from
  # 9 on environments of an evaluation. What the learner packs is no cause of an
  # engine's.
  assert found.bubbles == [
    (2.0, 5.0, "environment"),
    (5.0, 6.5, "gate"),
    (6.5, 7.0, "warm start"),
    (7.0, 8.0, "gate"),
    (9.0, 11.0, "evaluation"),
  ]


@pytest.mark.parametrize(
  "end", [("dropped", {"reason": "stale"}), ("trained", {}), ("ready", {})]
)
def test_no_member_plays_on_when_its_group_is_over(end):
  phases = observed((1.0, "admitted", {"index": 0}), (2.0, *end))
  assert phases.playing() == [(1.0, 2.0)]


def test_a_member_that_follows_another_at_once_is_no_pause():
  phases = observed(
    (1.0, "admitted", {"index": 0}),
    (2.0, "aborted", {"index": 0}),
    (2.0005, "admitted", {"index": 1}),
    (3.0, "reward", {"index": 1}),
  )
  assert phases.playing() == [(1.0, 3.0)]


def test_the_clock_of_the_log_is_moved_to_that_of_the_spans():
  # A run that was resumed has pauses of its own in either: first the spans are
  # 10 s ahead, then 15 s from their 25th second on, which is the 10th here.
  phases = observed(
    (1.0, "published", {"version": 1}),
    (2.0, "published", {"version": 2}),
    (2.5, "admitted", {"index": 0}),
    (3.0, "reward", {"index": 0}),
    (3.5, "dequeued", {}),
    (10.5, "admitted", {"index": 0}),
    (11.0, "reward", {"index": 0}),
    (16.0, "published", {"version": 3}),
  )
  spans = [
    span("learner", "init", 0.0, 1.0),
    span("host", "publish", 10.0, 11.0, version=1),
    span("host", "publish", 11.0, 12.0, version=2),
    # It was stopped before the log said so, and publishes it again.
    span("host", "publish", 14.0, 15.0, version=3),
    span("learner", "init", 25.0, 26.0),
    span("host", "publish", 30.0, 31.0, version=3),
  ]
  clock = phases.clock(spans)
  assert phases.playing(clock) == [(12.5, 13.0), (25.5, 26.0)]
  assert phases.taken(clock) == [13.5]


def test_without_publishes_both_clocks_are_the_same():
  assert bubbles.Phases().clock([span("learner", "init", 5.0, 6.0)])(7.0) == 7.0


def test_a_run_without_spans_of_a_mesh_has_none_of_its_time():
  spans = [span("host", "publish", 0.0, 1.0)]
  assert bubbles.find(spans, bubbles.Phases()) == {}
