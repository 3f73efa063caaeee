"""Steps in a terminal and in a file, with their bars, times and programs."""

import io

import jax.monitoring
import pytest
import rich.console

from launch.cli import steps
from tests.helpers import terminal as terminal_lib

COMPILATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def clock():
  return terminal_lib.Clock()


def of(stream, clock, **settings):
  return steps.Steps(stream, clock=clock, now=lambda: "09:30:00", **settings)


def drawn(shown):
  """The row as text of 80 columns."""
  console = rich.console.Console(file=io.StringIO(), width=80)
  with console.capture() as capture:
    console.print(shown.row())
  return capture.get()


def test_lines_of_one_step_come_at_most_every_two_seconds(clock):
  stream = io.StringIO()
  shown = of(stream, clock)
  for clock.now_s, text in (
    (0.0, "loading"),
    (0.1, "playing 1/9"),
    (1.0, "playing 2/9"),
    (2.2, "playing 5/9"),
  ):
    shown.phase(text)
  assert stream.getvalue().splitlines() == [
    "09:30:00 loading",
    "09:30:00 playing 1/9",
    "09:30:00 playing 5/9",
  ]


def test_a_row_has_a_bar_and_the_time_left_at_the_pace_of_its_step(
  clock, terminal
):
  shown = of(terminal, clock)
  shown.phase("loading")
  clock.now_s = 100.0
  shown.phase("playing 4/40")
  clock.now_s = 106.0
  shown.phase("playing 10/40")
  # Six in 6 s, so 30 s for the other 30.
  row = drawn(shown)
  assert row.startswith("playing 10/40")
  assert "━" in row
  assert row.rstrip().endswith("0:06, left 0:30")
  assert len(row.splitlines()) == 1
  shown.phase("playing 40/40")
  assert drawn(shown).rstrip().endswith(" 0:06")


def test_a_step_without_a_count_has_the_time_that_it_has_taken(clock, terminal):
  shown = of(terminal, clock)
  shown.phase("starting sglang-jax")
  clock.now_s = 65.0
  assert drawn(shown).split() == ["starting", "sglang-jax", "1:05"]


def test_a_terminal_is_left_empty_and_a_file_has_no_escapes(clock, terminal):
  for stream in (terminal, io.StringIO()):
    with of(stream, clock) as shown:
      shown.phase("playing 4/40")
  assert "playing 4/40" in terminal.getvalue()
  # The last thing erases the row: up to its line, and to the end of it.
  assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")
  assert "\x1b" not in stream.getvalue()


def test_what_is_printed_meanwhile_goes_where_it_would(clock, terminal, capsys):
  with of(terminal, clock):
    print("a result")
  assert capsys.readouterr().out == "a result\n"
  assert "a result" not in terminal.getvalue()


def test_the_longest_line_has_80_columns(clock):
  stream = io.StringIO()
  of(stream, clock).phase("simulating round 1/9: " + "x" * 100)
  assert len(stream.getvalue().rstrip("\n")) == 80


def test_a_quiet_command_shows_no_steps(clock, terminal):
  for stream in (terminal, io.StringIO()):
    with of(stream, clock, quiet=True) as shown:
      shown.phase("playing 4/40")
    assert stream.getvalue() == ""


@pytest.mark.compiled  # For those who listen too.
def test_a_long_compilation_is_named_while_it_lasts(clock, terminal):
  with of(terminal, clock) as shown:
    shown.phase("playing 4/40")
    jax.monitoring.record_scalar(COMPILATION, 0.0, fun_name="jit(update)")
    clock.now_s = 1.9
    assert "compiling" not in drawn(shown)
    clock.now_s = 12.0
    assert drawn(shown).rstrip().endswith("compiling update 0:12")
    jax.monitoring.record_event_duration_secs(
      COMPILATION, 12.0, fun_name="jit(update)"
    )
    assert "compiling" not in drawn(shown)


@pytest.mark.compiled  # For those who listen too.
def test_a_file_names_programs_that_took_long_to_compile(clock):
  stream = io.StringIO()
  with of(stream, clock):
    for seconds, name in ((1.9, "short"), (12.3, "update")):
      jax.monitoring.record_event_duration_secs(
        COMPILATION, seconds, fun_name=f"jit({name})"
      )
  jax.monitoring.record_event_duration_secs(
    COMPILATION, 30.0, fun_name="jit(after)"
  )
  assert stream.getvalue() == "09:30:00 compiled update in 12 s\n"
