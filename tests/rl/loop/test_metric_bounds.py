import dataclasses
import math

import pytest

from rl.loop import metric_bounds

Bound = metric_bounds.Bound
NONE = metric_bounds.MetricBounds(
  **{
    field.name: None for field in dataclasses.fields(metric_bounds.MetricBounds)
  }
)


def rounds(name, values, bound, metric=None):
  """Returns the rounds after which a metric has crossed its bound."""
  bounds = dataclasses.replace(NONE, **{name: bound})
  rows = [
    {"round": number, metric or name: value}
    for number, value in enumerate(values, 1)
  ]
  return [found.round for found in metric_bounds.crossings(bounds, rows)]


def test_a_value_beyond_its_limit_counts_after_so_many_rounds_in_a_row():
  # Rounds 2 and 3 are beyond, 4 is not; 5, 6 and 7 are, and 7 is the third.
  values = [0.5, 0.6, 0.6, 0.5, 0.9, 0.6, 0.6, 0.6]
  assert rounds("fault_share", values, Bound(limit=0.5, rounds=3)) == [7]


def test_a_crossing_that_lasts_is_told_again_only_after_it_has_ended():
  values = [2.0, 2.0, 2.0, 0.0, 2.0, 2.0]
  assert rounds("behaviour_kl", values, Bound(limit=1.0, rounds=2)) == [2, 6]


@pytest.mark.parametrize("name", ["entropy", "behaviour_ess"])
def test_floors_are_crossed_from_above(name):
  values = [0.9, 0.1, 0.05, 0.9]
  assert rounds(name, values, Bound(limit=0.1, rounds=1)) == [3]


def test_what_is_no_number_neither_counts_nor_ends_a_row():
  values = [9.0, math.nan, None, 9.0]
  assert rounds("kl", values, Bound(limit=1.0, rounds=2)) == [4]


def test_a_round_of_faults_alone_counts_for_their_bound():
  # Nothing is trained because of them, which is what the bound is for.
  bounds = dataclasses.replace(NONE, fault_share=Bound(limit=0.5, rounds=2))
  row = {"fault_share": 1.0, "trained_tokens": 0.0}
  rows = [row | {"round": number} for number in (1, 2)]
  assert [x.round for x in metric_bounds.crossings(bounds, rows)] == [2]


def test_a_gradient_norm_is_compared_with_the_median_before_it():
  # The median of 49 rounds of 1 and one of 3 is 1; before 50 rounds are known
  # nothing is compared. 10 is not above 10 x 1, and 11 is.
  bound = Bound(limit=10.0, rounds=1)
  assert rounds("grad_norm", [1.0] * 40 + [99.0], bound) == []
  assert rounds("grad_norm", [1.0] * 49 + [3.0, 10.0], bound) == []
  assert rounds("grad_norm", [1.0] * 49 + [3.0, 0.0, 11.0], bound) == [52]
  # What is not a number takes no part in the median.
  halves = [1.0] * 25 + [math.nan] + [1.0] * 25
  assert rounds("grad_norm", [*halves, 11.0], bound) == [52]


def test_the_default_of_the_gap_follows_from_the_types():
  def limit(compute, published, on_publish="recompute"):
    gap = (
      metric_bounds.MetricBounds()
      .resolved(compute=compute, published=published, on_publish=on_publish)
      .logprob_gap
    )
    return gap and gap.limit

  assert limit("float32", "same") == 0.003
  assert limit("bfloat16", "same") == limit("float32", "bfloat16") == 0.1
  assert limit("bfloat16", "float8_e4m3fn") == 0.5
  # Keys and values of older weights make a gap of their own.
  assert limit("float32", "same", "keep_kv") is None


def test_a_limit_that_is_set_stays():
  bounds = dataclasses.replace(NONE, logprob_gap=Bound(limit=7.0))
  found = bounds.resolved(
    compute="float32", published="int8", on_publish="keep_kv"
  )
  assert found == bounds


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: Bound(limit=-1.0), "limit=-1.0 must be"),
    (lambda: Bound(limit=1.0, rounds=0), "rounds=0 must be at least 1"),
    (lambda: dataclasses.replace(NONE, kl=Bound()), r"bounds\.kl\.limit=None"),
  ],
)
def test_bounds_that_cannot_work_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make().validate()


def test_a_crossing_reads_as_a_sentence():
  bounds = dataclasses.replace(NONE, entropy=Bound(limit=0.01, rounds=2))
  rows = [{"round": number, "entropy": 0.001} for number in (7, 8)]
  (found,) = metric_bounds.crossings(bounds, rows)
  assert str(found) == "round 8: entropy is 0.001, below 0.01, for 2 rounds"
