"""The table of a start, from spans made by hand."""

import time

from launch.run import startup
from rl.runtime import trace


def test_a_table_tells_the_phases_up_to_the_first_update():
  began_s = time.monotonic() - 100
  begun = startup.Startup(began_s)
  spans = trace.Trace(None)
  begun.follow(spans)
  for track, name, start, end in (
    ("learner", "warm start", 110, 114),
    ("decode", "warm up", 111, 118),
    ("learner", "warm start", 115, 116),
    ("learner", "update", 119, 120),
    ("learner", "update", 121, 122),
  ):
    spans.add(track, name, began_s + start, began_s + end)
  _, head, *rows, last = begun.end()
  assert head.split() == ["from", "to", "busy", "first"]
  # Of the warm start 4 s and 1 s, with a second between them.
  assert [row.rsplit(maxsplit=4) for row in rows[2:]] == [
    ["learner: warm start", "110.0", "116.0", "5.0", "4.0"],
    ["decode: warm up", "111.0", "118.0", "7.0", "7.0"],
    ["learner: update", "119.0", "122.0", "2.0", "1.0"],
  ]
  assert [row.split(":")[1].split()[0] for row in rows[:2]] == [
    "imports,",
    "parts",
  ]
  assert last.startswith("first update after 120.0 s, ")
  assert float(last.split()[-4]) > 0
  assert not spans.listeners
