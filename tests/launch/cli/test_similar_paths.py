"""What is said of a path that is not there."""

import pathlib

import pytest

from launch.cli import similar_paths

ALIKE = [pathlib.Path(f"runs/lake{i}") for i in range(5)]
PATHS = [pathlib.Path("runs", name) for name in ("sums", "lake", "mine", "x")]


@pytest.mark.parametrize(
  ("missing", "paths", "words"),
  [
    ("lakes", PATHS, "; did you mean runs/lake?"),
    # Four are alike, and three are named.
    (
      "lake",
      ALIKE[1:],
      "; did you mean runs/lake4 or runs/lake3 or runs/lake2?",
    ),
    ("nope", PATHS, "; there are runs/lake, runs/mine, runs/sums and 1 more"),
    ("nope", PATHS[:2], "; there are runs/lake, runs/sums"),
    ("nope", PATHS[:1], "; there is runs/sums"),
    ("nope", [], ""),
  ],
)
def test_three_that_are_alike_are_meant_and_others_only_listed(
  missing, paths, words
):
  assert similar_paths.advice(pathlib.Path("runs", missing), paths) == words
