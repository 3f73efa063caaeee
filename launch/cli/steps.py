"""Steps of a command as they go on: a bar in a terminal, lines elsewhere.

A step is told as text, "evaluating 12/40": its count makes the bar and the time
left. Programs that jax compiles are named while they hold a step up.
"""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

import jax.monitoring
import rich.console
import rich.live
import rich.progress_bar
import rich.table

from rl.runtime import log_line

COLUMNS = 80
_LINE_EVERY_S = 2.0
_LONG_S = 2.0
"""Seconds of a compilation that is told of."""
_COUNT = re.compile(r"(\d+)/(\d+)")
_COMPILATION = "/jax/core/compile/backend_compile_duration"


class Steps:
  """Shows steps on a stream, from `start` to `close`, or as a context.

  A terminal gets rows that are redrawn in place; any other stream gets lines
  with the time of day, those of one step at most every two seconds.
  """

  def __init__(
    self,
    stream: TextIO,
    *,
    quiet: bool = False,
    panel: Callable[[], rich.console.RenderableType] | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], str] = log_line.time_of_day,
  ):
    """Shows nothing yet.

    Args:
      quiet: shows no steps.
      panel: returns rows for a terminal, whose last state stays; it is called
        by the thread that draws. None: `row`, which is removed at the end.
      clock: in seconds, for the time left and the pause between lines.
      now: time of day at which a line was printed.
    """
    self.console = rich.console.Console(
      file=stream, markup=False, emoji=False, highlight=False
    )
    self._stream, self._quiet = stream, quiet
    self._clock, self._now = clock, now
    self._line_s = float("-inf")
    self._text = self._name = "starting"
    # (done, time) at which the step was first told of.
    self._first = (0, clock())
    # Thread -> program that it compiles, and since when.
    self._compiling: dict[int, tuple[str, float]] = {}
    self._panel = panel
    self.is_live = _can_draw(stream, self.console) and not quiet
    self._closing = contextlib.ExitStack()

  def start(self) -> None:
    """Starts drawing, and listening to jax."""
    heard, closing = jax.monitoring, self._closing
    heard.register_scalar_listener(self._on_compiling)
    closing.callback(heard.unregister_scalar_listener, self._on_compiling)
    heard.register_event_duration_secs_listener(self._on_compiled)
    closing.callback(
      heard.unregister_event_duration_listener, self._on_compiled
    )
    if self.is_live:
      live = rich.live.Live(
        console=self.console,
        get_renderable=self._panel or self.row,
        transient=self._panel is None,
        # Leave alone what goes to a file.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
      )
      closing.enter_context(live)

  def close(self) -> None:
    """Stops; may be called again."""
    self._closing.close()

  def __enter__(self) -> Self:
    self.start()
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  @property
  def is_soon(self) -> bool:
    """True within 2 s of the latest line."""
    return self._clock() - self._line_s < _LINE_EVERY_S

  def phase(self, text: str) -> None:
    """Shows the step under way, "playing 12/40"; in any thread."""
    is_same = _COUNT.sub("", text) == _COUNT.sub("", self._text)
    if (name := _COUNT.split(text)[0]) != self._name:
      self._name, self._first = name, (_count(text)[0], self._clock())
    self._text = text
    if not (is_same and self.is_soon):
      self.print(cut(text, self.room()))

  def print(self, line: str, *, starts_pause: bool = True) -> None:
    """Prints a line with the time, where nothing is redrawn."""
    if self._quiet or self.is_live:
      return
    print(self._now(), line, file=self._stream, flush=True)
    if starts_pause:
      self._line_s = self._clock()

  def room(self) -> int:
    """Returns the columns of a line that are left behind the time."""
    return COLUMNS - len(self._now()) - 1

  def row(self) -> rich.console.RenderableType:
    """Returns the step with its bar, if it has a count, and its times."""
    done, total = _count(self._text)
    bar = rich.progress_bar.ProgressBar(total, done) if total else ""
    return bar_row(cut(self._text, 48), bar, self.compiling() or self._times())

  def compiling(self) -> str:
    """Returns "compiling NAME 0:12" of what takes longest; "" if none does."""
    compiling = self._compiling.copy().values()
    name, begun_s = min(compiling, key=lambda one: one[1], default=("", 0.0))
    seconds = self._clock() - begun_s
    if not name or seconds < _LONG_S:
      return ""
    return f"compiling {cut(name, 20)} {duration(seconds)}"

  def _times(self) -> str:
    """Returns "0:12", and the time left at the mean pace of the step."""
    (first, since_s), (done, total) = self._first, _count(self._text)
    passed_s = self._clock() - since_s
    # The last piece of a step that tells of pieces as they begin takes time.
    if done in (first, total):
      return duration(passed_s)
    left_s = passed_s / (done - first) * (total - done)
    return f"{duration(passed_s)}, left {duration(left_s)}"

  def _on_compiling(self, event: str, value: float, **about: Any) -> None:
    if event == _COMPILATION:
      name = _program(about)
      self._compiling[threading.get_ident()] = name, self._clock()

  def _on_compiled(self, event: str, seconds: float, **about: Any) -> None:
    if event == _COMPILATION:
      self._compiling.pop(threading.get_ident(), None)
      if seconds >= _LONG_S:
        self.print(
          cut(f"compiled {_program(about)} in {seconds:.0f} s", self.room()),
          starts_pause=False,
        )


def bar_row(
  left: str, bar: rich.console.RenderableType, right: str
) -> rich.console.RenderableType:
  """Returns a row as wide as the terminal: a bar between two texts."""
  row = rich.table.Table.grid(padding=(0, 2), expand=True)
  row.add_column(no_wrap=True)
  row.add_column(ratio=1)
  row.add_column(no_wrap=True, justify="right")
  row.add_row(left, bar, right)
  return row


def cut(text: str, width: int) -> str:
  """Returns a text of at most `width` characters."""
  return text if len(text) <= width else f"{text[: width - 3]}..."


def duration(seconds: float) -> str:
  """Returns "2:05", or "1h05" from an hour on, or "10h" from ten hours on."""
  minutes, seconds = divmod(round(seconds), 60)
  hours = minutes // 60
  if not hours:
    return f"{minutes}:{seconds:02}"
  return f"{hours}h" if hours >= 10 else f"{hours}h{minutes % 60:02}"


def _count(text: str) -> tuple[int, int]:
  """Returns (12, 40) of "playing 12/40"; (0, 0) without a count."""
  found = _COUNT.search(text)
  return (int(found[1]), int(found[2])) if found else (0, 0)


def _program(about: Any) -> str:
  """Returns "update" where jax says "jit(update)"."""
  return (
    str(about.get("fun_name", "a program")).removeprefix("jit(").rstrip(")")
  )


def _can_draw(stream: TextIO, console: rich.console.Console) -> bool:
  return (
    stream.isatty()
    and not console.is_dumb_terminal
    and console.encoding.startswith("utf")
  )
