"""The numbers behind the picture of a run, by hand."""

from launch.report import learning_curve
from rl.runtime import trace


def test_the_window_is_four_publishing_periods_of_the_middle():
  # Publishes end at 1, 3, 5 ... 19; the middle one of ten is 11: [7, 15].
  spans = [
    trace.Span("host", "publish", 2.0 * i, 2.0 * i + 1) for i in range(10)
  ]
  assert learning_curve.window(spans) == (7.0, 15.0)
  assert learning_curve.window(spans[:4]) == (0.0, 7.0)
