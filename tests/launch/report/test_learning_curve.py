"""The numbers behind the picture of a run, by hand."""

from launch.report import learning_curve, svg
from rl.runtime import trace


def test_the_window_is_four_publishing_periods_of_the_middle():
  # Publishes end at 1, 3, 5 ... 19; the middle one of ten is 11: [7, 15].
  spans = [
    trace.Span("host", "publish", 2.0 * i, 2.0 * i + 1) for i in range(10)
  ]
  assert learning_curve.window(spans) == (7.0, 15.0)
  assert learning_curve.window(spans[:4]) == (0.0, 7.0)


def test_smoothing_is_a_mean_over_a_twenty_fifth_of_the_run_each_way():
  # Three values: one neighbour each way. (1+2)/2, (1+2+6)/3, (2+6)/2.
  assert svg.smooth([1.0, 2.0, 6.0]) == [1.5, 3.0, 4.0]


def test_ticks_are_round_numbers_within_the_range():
  # 50 / 7 = 7.1, so the step is 10, from 10 (5 is below) to 50.
  assert svg.ticks(5, 55) == [10, 20, 30, 40, 50]
  assert svg.ticks(0, 0.35) == [
    0,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
  ]
