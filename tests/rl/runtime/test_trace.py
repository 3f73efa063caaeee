"""Tests of rl/runtime/trace.py; every expected second is worked out by hand."""

import contextlib
import gc
import json
import threading
import time

import pytest

from rl.runtime import trace


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


def test_what_was_flushed_reads_back_and_only_the_rest_is_in_memory(tmp_path):
  path = tmp_path / "spans.jsonl"
  recorder = trace.Trace(path)
  recorder.add("decode", "step", recorder.origin, recorder.origin + 1, rows=2)
  first = recorder.spans[:]
  recorder.flush()
  recorder.flush()
  recorder.add("decode", "step", recorder.origin + 1, recorder.origin + 2)
  assert list(trace.read(path)) == first
  (rest,) = recorder.spans
  assert (rest.start, rest.end) == pytest.approx((1.0, 2.0))


def test_a_trace_without_a_file_keeps_all_of_its_spans():
  recorder = trace.Trace(None)
  for _ in range(3000):
    recorder.add("decode", "step", 0.0, 1.0)
  recorder.flush()
  assert len(recorder.spans) == 3000


def test_memory_is_flat_in_a_round_that_is_never_flushed(tmp_path):
  recorder = trace.Trace(tmp_path / "spans.jsonl")
  most = 0
  for _ in range(3500):
    recorder.add("decode", "step", 0.0, 1.0)
    most = max(most, len(recorder.spans))
  assert most < 1000
  recorder.flush()
  assert len(list(trace.read(tmp_path / "spans.jsonl"))) == 3500


def test_times_are_of_the_clock_that_was_given():
  # The trace begins when its clock reads 5 s; the body takes 2 s of it.
  readings = iter([5.0, 7.0, 9.0])
  recorder = trace.Trace(None, clock=lambda: next(readings))
  with recorder.span("host", "publish"):
    pass
  (span,) = recorder.spans
  assert (span.start, span.end) == (2.0, 4.0)


def test_a_listener_hears_every_span():
  recorder, heard = trace.Trace(None), []
  recorder.listeners.append(heard.append)
  recorder.add("host", "pack", recorder.origin, recorder.origin + 1)
  assert heard == recorder.spans


def test_a_meter_measures_what_ended_since_it_was_last_asked():
  meter = trace.Meter()
  # 2 s of learner and 3 s of decode, together from 1 to 2 s; neither the
  # learner's checks nor the host count.
  for track, name, start, end in (
    ("learner", "update", 0.0, 2.0),
    ("learner", "checksum", 2.0, 9.0),
    ("decode", "decode", 1.0, 4.0),
    ("host", "update", 0.0, 9.0),
  ):
    meter.add(trace.Span(track, name, start, end))
  first = meter.take()
  assert (first.first_s, first.second_s, first.both_s) == (2, 3, 1)
  assert meter.take().first_s == 0
  meter.add(trace.Span("learner", "update", 10.0, 11.0))
  total = first + meter.take()
  assert (total.first_s, total.second_s, total.both_s) == (3, 3, 1)


def test_evaluations_between_the_updates_of_a_process_are_not_lone():
  lone = trace.LoneEvaluations()
  for track, name, start, end in (
    ("host", "evaluate", 0.0, 1.0),
    ("learner", "accumulate", 2.0, 3.0),
    ("host", "evaluate", 3.0, 4.0),
    ("learner", "update", 5.0, 6.0),
    ("host", "evaluate", 6.0, 7.0),
    # Another process goes on.
    ("learner", "init", 7.0, 8.0),
    ("host", "evaluate", 8.0, 9.0),
    ("learner", "update", 10.0, 11.0),
  ):
    lone.observe(trace.Span(track, name, start, end))
  assert lone.intervals == [(0, 1), (6, 7), (8, 9)]


def test_a_meter_leaves_out_work_that_starts_in_given_times():
  meter = trace.Meter(without=[(0.0, 1.0), (5.0, 6.0)])
  for start in (0.0, 0.5, 1.0, 5.5):
    meter.add(trace.Span("decode", "decode", start, start + 0.5))
  assert meter.take().second_s == 0.5


def test_a_meter_keeps_no_spans_of_a_long_run():
  meter = trace.Meter()
  # Each second the learner works for 0.5 s, 0.25 s of it beside the engines.
  for second in range(5000):
    meter.add(trace.Span("learner", "update", second, second + 0.5))
    meter.add(trace.Span("decode", "decode", second + 0.25, second + 0.75))
  kept = sum(isinstance(one, trace.Span) for one in gc.get_objects())
  assert kept < 2000
  total = meter.take()
  assert (total.first_s, total.second_s, total.both_s) == (2500, 2500, 1250)


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
  spans = list(trace.read(path))
  assert [s.start for s in spans] == pytest.approx([0, 5], abs=0.1)


def test_lines_that_are_no_spans_are_left_out(tmp_path):
  path = tmp_path / "spans.jsonl"
  whole = b'{"track": "a", "name": "b", "start": 0.0, "end": 1.0}'
  lines = [b"null", b"3", b'{"track": "a"}', b"\xff", b"[" * 99_999, whole]
  path.write_bytes(b"\n".join(lines))
  assert [span.name for span in trace.read(path)] == ["b"]


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
  assert len(list(trace.read(tmp_path / "spans.jsonl"))) == 4 * 500
  assert recorder.spans == []


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


def test_of_a_long_run_the_chrome_trace_holds_the_last_spans(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(trace, "_MAX_CHROME", 2)
  spans = (trace.Span("decode", "step", float(i), i + 1.0) for i in range(5))
  trace.write_chrome(spans, tmp_path / "trace.json")
  events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  assert [e["ts"] for e in events if e["ph"] == "X"] == [3_000_000, 4_000_000]


def test_a_trace_in_segments_reads_as_one_and_goes_on_behind_the_last(tmp_path):
  path = tmp_path / "spans.jsonl"
  # Every flush closes a segment of one span; the clock stands at 0.
  spans = trace.Trace(path, clock=lambda: 0.0, segment_bytes=1)
  for end in (1.0, 2.0, 3.0):
    spans.add("learner", "update", end - 1.0, end)
    spans.flush()
  assert path.read_text() == ""
  assert [span.end for span in trace.read(path)] == [1.0, 2.0, 3.0]
  assert trace.Trace(path, clock=lambda: 0.0).origin == -3.0
