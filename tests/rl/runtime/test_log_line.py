import io
import re

from rl.runtime import log_line
from tests.helpers import terminal as terminal_lib


def test_every_line_of_a_text_gets_the_time():
  text = "saved after 2 rounds; to go on:\n  python -m launch.train"
  assert log_line.stamped(text, "09:30:00") == (
    "09:30:00 saved after 2 rounds; to go on:\n"
    "09:30:00   python -m launch.train"
  )


def test_a_log_file_gets_the_time_and_a_terminal_does_not():
  file, terminal = io.StringIO(), terminal_lib.Terminal()
  log_line.tell("stopping", file)
  log_line.tell("stopping", terminal)
  assert re.fullmatch(r"\d\d:\d\d:\d\d stopping\n", file.getvalue())
  assert terminal.getvalue() == "stopping\n"
