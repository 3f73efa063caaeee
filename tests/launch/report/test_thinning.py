"""Points of long curves: their places and their means."""

import pytest

from launch.report import thinning

ROUNDS = list(range(1, 8))


@pytest.mark.parametrize(
  ("most", "places", "means"),
  [
    (9, ROUNDS, ROUNDS),
    (7, ROUNDS, ROUNDS),
    # Of two each; the first has one.
    (6, [1, 3, 5, 7], [1, 2.5, 4.5, 6.5]),
    (3, [1, 4, 7], [1, 3, 6]),
    (1, [7], [4]),
  ],
)
def test_a_point_is_the_mean_of_its_rounds_at_the_last(most, places, means):
  assert thinning.places(ROUNDS, most) == places
  assert thinning.values("loss", ROUNDS, most) == means
  assert thinning.values("evaluation/time_s", ROUNDS, most) == places
  assert len(places) <= most


def test_missing_values_are_left_out_of_means():
  column = [None, None, 1.0, None, 2.0, 4.0]
  # Pairs: none, one of two, both; a third is rounded to six digits.
  assert thinning.values("loss", column, 3) == [None, 1.0, 3.0]
  assert thinning.values("loss", [1.0, 0.0, 0.0], 1) == [0.333333]
  assert thinning.values("loss", [1.5e308] * 2, 1) == [1.5e308]


def test_nothing_has_no_points():
  assert thinning.places([], 3) == thinning.values("loss", [], 3) == []
