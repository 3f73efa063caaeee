"""Tests of rl/trace.py; every expected second is worked out by hand."""

import contextlib
import json
import threading
import time

import pytest

from rl import trace


def _spans(track, *intervals):
  return [trace.Span(track, "work", float(a), float(b)) for a, b in intervals]


def test_busy_merges_spans_that_overlap_touch_or_contain_each_other():
  # [0, 2] and [1, 3] overlap, [3, 4] touches, [6, 9] contains [7, 8].
  spans = _spans("decode", (6, 9), (0, 2), (1, 3), (3, 4), (7, 8))
  spans += _spans("learner", (4, 6))
  assert trace.busy(spans, "decode") == [(0, 4), (6, 9)]


def test_intersection_adds_up_what_both_lists_cover():
  # [0, 4] meets [1, 2] for 1 s and [3, 7] for 1 s; [6, 9] meets [3, 7] for
  # 1 s and [8, 8.5] for 0.5 s: 3.5 s.
  a, b = [(0.0, 4.0), (6.0, 9.0)], [(1.0, 2.0), (3.0, 7.0), (8.0, 8.5)]
  assert trace.intersection(a, b) == 3.5
  assert trace.intersection(b, a) == 3.5


def test_overlap_share_is_of_the_track_that_works_less():
  # The learner works 2 s in [1, 3], decode 6 s; both in [1, 2.5] = 1.5 s.
  # The share is 1.5 / min(2, 6) = 0.75.
  spans = _spans("learner", (1, 3)) + _spans("decode", (0, 2.5), (3, 6.5))
  got = trace.overlap(spans)
  assert (got.first_s, got.second_s, got.both_s) == (2, 6, 1.5)
  assert got.share == 0.75


def test_overlap_share_is_zero_when_a_track_never_worked():
  assert trace.overlap(_spans("learner", (0, 1))).share == 0
  assert trace.overlap([]).share == 0


def test_spans_of_one_lane_never_overlap():
  # [1, 3] starts while [0, 2] runs, so it moves to lane 1; at 2 lane 0 is
  # free again; at 2.5 both are taken; another track has lanes of its own.
  spans = _spans("host", (0, 2), (1, 3), (2, 4), (2.5, 5))
  spans += _spans("decode", (0, 2))
  assert trace.lanes(spans) == [0, 1, 0, 2, 0]


def test_a_span_is_relative_to_the_start_of_the_trace():
  recorder = trace.Trace(None)
  recorder.add("learner", "update", recorder.origin, recorder.origin + 2.0)
  (span,) = recorder.spans
  assert (span.start, span.end) == pytest.approx((0.0, 2.0))


def test_a_body_that_raises_is_recorded_too():
  recorder = trace.Trace(None)
  with (
    contextlib.suppress(ZeroDivisionError),
    recorder.span("host", "pack", rows=4),
  ):
    time.sleep(0.01)
    _ = 1 / 0
  (span,) = recorder.spans
  assert (span.track, span.name, span.args) == ("host", "pack", {"rows": 4})
  assert span.end - span.start >= 0.01


def test_what_was_flushed_reads_back_and_the_rest_is_not_written(tmp_path):
  path = tmp_path / "spans.jsonl"
  recorder = trace.Trace(path)
  recorder.add("decode", "step", recorder.origin, recorder.origin + 1, rows=2)
  recorder.flush()
  recorder.flush()
  recorder.add("decode", "step", recorder.origin + 1, recorder.origin + 2)
  assert trace.read(path) == recorder.spans[:1]


def test_a_resumed_trace_goes_on_behind_its_file_and_survives_a_cut_line(
  tmp_path,
):
  path = tmp_path / "spans.jsonl"
  first = trace.Trace(path)
  first.add("decode", "step", first.origin, first.origin + 5)
  first.flush()
  with path.open("a") as file:
    file.write('{"track": "deco')
  second = trace.Trace(path)
  # The file ends at 5 s, so work from now to now + 1 s is [5, 6].
  now = time.monotonic()
  second.add("decode", "step", now, now + 1)
  second.flush()
  spans = trace.read(path)
  assert spans == second.spans
  assert [s.start for s in spans] == pytest.approx([0, 5], abs=0.1)


def test_device_threads_lose_no_span(tmp_path):
  recorder = trace.Trace(tmp_path / "spans.jsonl")

  def work():
    for _ in range(500):
      recorder.add("decode", "step", 0.0, 1.0)

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  while any(thread.is_alive() for thread in threads):
    recorder.flush()
  recorder.flush()
  assert len(trace.read(tmp_path / "spans.jsonl")) == 4 * 500


def test_chrome_trace_names_its_tracks_and_counts_in_microseconds(tmp_path):
  # 1.5 s is 1,500,000 us; it starts at 0.25 s and so at 250,000 us.
  spans = [
    trace.Span("learner", "update", 0.25, 1.75, {"version": 3}),
    trace.Span("host", "pack", 0.0, 1.0),
    trace.Span("host", "publish", 0.5, 0.75),
  ]
  trace.write_chrome(spans, tmp_path / "trace.json")
  events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  named = {(e["name"], e["pid"], e["args"]["name"]) for e in events[:6]}
  assert ("process_name", 0, "learner") in named
  assert ("thread_name", 1, "host") in named
  update, pack, publish = events[6:]
  assert (update["ts"], update["dur"]) == (250_000, 1_500_000)
  assert update["args"] == {"version": 3}
  # Publishing happens within packing: same process, another thread.
  assert (pack["pid"], pack["tid"]) == (1, 0)
  assert (publish["pid"], publish["tid"]) == (1, 1)
