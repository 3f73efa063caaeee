import io
import math

import pytest

from launch.run import display
from tests.helpers import terminal as terminal_lib

_METRICS = {
  "success": 0.62,
  "reward_mean": 0.5,
  "decode_tokens_per_s": 1234.0,
  "learner_tokens_per_s": 3.4e6,
  "decode_busy": 0.874,
  "learner_busy": 0.336,
  "overlap_share": 0.911,
  "staleness_max": 1.0,
  "staleness_bound": 2.0,
  "groups": 16.0,
  "zero_variance_groups": 3.0,
  "entropy": 1.25,
  "faults": 0.0,
}


def _plain(total_rounds: int = 300, quiet: bool = False):
  stream, clock = io.StringIO(), terminal_lib.Clock()
  shown = display.Display(
    total_rounds, stream, quiet=quiet, clock=clock, now=lambda: "09:30:00"
  )
  return shown, stream, clock


def test_an_evaluation_without_a_graded_episode_has_no_interval():
  shown, stream, _ = _plain()
  shown.start()
  shown.evaluation(math.nan, 0.0, 1.0)
  shown.close()
  assert stream.getvalue() == "09:30:00 evaluation: success -\n"


def test_a_line_shows_a_round():
  shown, stream, clock = _plain()
  shown.start()
  shown.update({"round": 1, **_METRICS})
  clock.now_s = 3.0
  shown.evaluation(0.58, 0.512, 0.648)
  shown.update({"round": 3, **_METRICS, "faults": 4})
  shown.close()
  # Two rounds took 3 s after the first update; 297 are left: 445.5 s.
  assert stream.getvalue().splitlines() == [
    "09:30:00 busy: decode/learner mesh, % of the round; lag: largest/bound",
    "09:30:00 round   1/300 success  62% reward 0.50 busy  87/34  lag 1/2"
    " left -",
    "09:30:00 evaluation: success 58% (51% to 65%)",
    "09:30:00 round   3/300 success  62% reward 0.50 busy  87/34  lag 1/2"
    " left 7:26",
    "09:30:00   faults 4",
  ]


def test_the_longest_line_has_80_columns():
  shown, stream, clock = _plain(9999)
  full = {"success": 1.0, "decode_busy": 1.0, "learner_busy": 1.0}
  shown.evaluation(1.0, 1.0, 1.0)
  shown.update({"round": 1, **_METRICS, **full})
  clock.now_s = 30.0
  faults = {"faults": 128.0, "skipped_updates": 1.0}
  shown.update({"round": 2, **_METRICS, **full, **faults}, "env_fault: " * 20)
  lines = stream.getvalue().splitlines()
  assert "left 83h" in lines[-2]
  assert max(map(len, lines)) == 80


def test_a_quiet_run_shows_notes_and_warnings_only(capsys):
  shown, stream, _ = _plain(quiet=True)
  shown.start()
  shown.phase("compiling")
  shown.update({"round": 1, **_METRICS})
  shown.evaluation(0.58, 0.512, 0.648)
  shown.warn("late")
  shown.note("report: report.html")
  shown.close()
  assert stream.getvalue() == "09:30:00 report: report.html\n"
  assert capsys.readouterr().err == "09:30:00 warning: late\n"


def test_a_line_tells_the_kind_of_fault_and_skipped_updates():
  shown, stream, _ = _plain(9)
  fault = "reward_fault: Outcome returned nan"
  metrics = {"round": 1, "faults": 128.0, "skipped_updates": 1.0}
  shown.update(metrics, fault)
  assert stream.getvalue().endswith(f"   skipped 1  faults 128 ({fault})\n")


def test_a_long_fault_is_cut():
  shown, stream, _ = _plain(9)
  shown.update({"round": 1, "faults": 2.0}, "env_fault: " + "x" * 200)
  assert stream.getvalue().endswith(f"(env_fault: {'x' * 45}...\n")


def test_a_warning_goes_to_stderr_and_not_among_the_lines(capsys):
  shown, stream, _ = _plain(9)
  shown.warn("round 2: an update was skipped")
  assert capsys.readouterr().err == (
    "09:30:00 warning: round 2: an update was skipped\n"
  )
  assert stream.getvalue() == ""


def test_missing_and_infinite_metrics_are_dashes():
  shown, stream, _ = _plain(9)
  shown.update({"round": 1, "success": math.nan})
  assert stream.getvalue().splitlines()[1:] == [
    "09:30:00 round 1/9 success    - reward    - busy   -/-   lag -/- left -"
  ]


def test_lines_come_at_most_every_two_seconds_and_the_last_always():
  shown, stream, clock = _plain(5)
  for index, clock.now_s in enumerate([0.0, 1.9, 2.1, 2.2, 2.3]):
    shown.update({"round": index + 1})
  shown.close()
  lines = stream.getvalue().splitlines()
  rounds = [line[9:18] for line in lines[1:]]
  assert rounds == ["round 1/5", "round 3/5", "round 5/5"]


def test_a_run_that_stops_early_shows_where():
  shown, stream, _ = _plain(5)
  shown.update({"round": 1})
  shown.update({"round": 2})
  shown.close()
  assert "round 2/5" in stream.getvalue().splitlines()[-1]


def test_phases_are_lines_but_not_every_count_of_one():
  shown, stream, clock = _plain(5)
  shown.phase("compiling")
  shown.phase("warm start 1/40")
  shown.phase("warm start 2/40")
  clock.now_s = 2.0
  shown.phase("warm start 3/40")
  shown.update({"round": 1})
  lines = stream.getvalue().splitlines()
  words = [line.removeprefix("09:30:00 ") for line in lines]
  assert words[:3] == ["compiling", "warm start 1/40", "warm start 3/40"]
  assert words[4].startswith("round 1/5")


def test_a_note_is_printed_as_it_is_behind_the_time():
  shown, stream, _ = _plain()
  text = "[bold]groups[0:3][/bold] :warning: " + "x" * 200
  shown.note(text)
  assert stream.getvalue() == f"09:30:00 {text}\n"


def test_lines_hold_no_escapes_even_when_colour_is_forced(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  shown, stream, _ = _plain()
  shown.start()
  shown.phase("compiling")
  shown.update({"round": 1, **_METRICS})
  shown.note("12 of 'these'")
  shown.close()
  assert stream.getvalue().isascii()
  assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_panel_with_everything(terminal):
  shown = display.Display(300, terminal, clock=terminal_lib.Clock())
  shown.start()
  for index, success in enumerate([0.0, 0.5, 1.0]):
    shown.update({"round": index + 1, **_METRICS, "success": success})
  shown.evaluation(0.58, 0.512, 0.648)
  shown.close()
  text = terminal.getvalue()
  # 0, 3.5 rounded to even, and 7 of the bars 0 to 7.
  for expected in (
    "round 3/300",
    "100%  ▁▅█",
    "58% (51% to 65%)",
    "1.2k/s, busy 87%",
    "3.4M/s, busy 34%",
    "91%",
    "1/2",
    "0.500",
    "1.250",
    "left 0:00",
  ):
    assert expected in text


def test_a_terminal_shows_the_fault_and_what_was_skipped(terminal):
  shown = display.Display(300, terminal, clock=terminal_lib.Clock())
  shown.start()
  shown.update(
    {"round": 1, **_METRICS, "faults": 4, "skipped_updates": 2.0},
    "env_fault: [raised] :warning:",
  )
  shown.close()
  assert "fault: env_fault: [raised] :warning:" in terminal.getvalue()
  assert "skipped updates" in terminal.getvalue()


@pytest.mark.parametrize(
  ("dropped", "shown_load"),
  [(0.0, "1.38x"), (2.0, "1.38x, 2 dropped")],
)
def test_a_terminal_shows_how_the_router_does(terminal, dropped, shown_load):
  router = {"router_entropy": 1.204, "max_load": 1.377}
  shown = display.Display(300, terminal, clock=terminal_lib.Clock())
  shown.start()
  shown.update(
    {"round": 1, **_METRICS, **router, "dropped_assignments": dropped}
  )
  shown.close()
  assert "1.204" in terminal.getvalue()
  assert shown_load in terminal.getvalue()


def test_a_model_without_experts_shows_no_router(terminal):
  shown = display.Display(300, terminal, clock=terminal_lib.Clock())
  shown.start()
  shown.update({"round": 1, **_METRICS})
  shown.close()
  assert "busiest expert" not in terminal.getvalue()


def test_a_terminal_shows_the_phase_until_the_first_round(terminal):
  shown = display.Display(300, terminal)
  shown.phase("warm start 12/40")
  shown.start()
  shown.note("engine 1 restarted")
  shown.close()
  assert "warm start 12/40" in terminal.getvalue()
  assert "engine 1 restarted" in terminal.getvalue()


def test_a_terminal_that_cannot_draw_gets_lines(terminal, monkeypatch):
  monkeypatch.setenv("TERM", "dumb")
  shown = display.Display(9, terminal)
  shown.start()
  shown.update({"round": 1})
  shown.close()
  assert "round 1/9 success" in terminal.getvalue()
  assert "\x1b" not in terminal.getvalue()


def test_a_sparkline_averages_a_long_history():
  assert display.sparkline([]) == ""
  assert display.sparkline([0.0, 1.0]) == "▁█"
  # Halves of 0, 0, 1, 1 average to 0 and 1; out of range is clipped.
  assert display.sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
  assert display.sparkline([-1.0, 2.0]) == "▁█"
