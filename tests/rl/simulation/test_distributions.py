"""Distributions by their quantiles: moments, tails, bounds."""

import math
import statistics

import pytest

from rl.simulation import distributions


def draws(distribution, count=20_000):
  return [distribution.quantile((i + 0.5) / count) for i in range(count)]


def test_a_constant_is_always_the_same():
  assert set(draws(distributions.Fixed(3.5), 10)) == {3.5}


def test_a_log_normal_has_its_mean_and_its_spread():
  law = distributions.LogNormal(mean=2000.0, sigma=0.4)
  values = draws(law)
  assert statistics.fmean(values) == pytest.approx(2000.0, rel=2e-3)
  logs = [math.log(value) for value in values]
  assert statistics.pstdev(logs) == pytest.approx(0.4, rel=2e-3)
  # The median of a log-normal is mean * exp(-sigma ** 2 / 2).
  assert law.quantile(0.5) == pytest.approx(2000.0 * math.exp(-0.08))


def test_the_tail_follows_a_power_and_joins_the_body():
  law = distributions.LogNormal(
    mean=100.0, sigma=0.5, tail_share=0.1, tail_index=2.0
  )
  start = law.quantile(0.9)
  assert law.quantile(0.9 + 1e-9) == pytest.approx(start, rel=1e-6)
  # P(X > x) = 0.1 (start / x) ** 2: a hundredth of the tail is 10 starts out.
  assert law.quantile(0.999) == pytest.approx(10 * start, rel=1e-6)
  body = distributions.LogNormal(mean=100.0, sigma=0.5)
  assert law.quantile(0.3) == body.quantile(0.3)
  assert distributions.mean(law) > distributions.mean(body)


def test_a_cap_cuts_the_largest_draws():
  law = distributions.LogNormal(mean=2000.0, sigma=0.9, max_value=16384.0)
  assert law.quantile(1 - 1e-9) == 16384.0
  assert distributions.mean(law) < 2000.0


def test_a_normal_draw_below_0_becomes_0():
  law = distributions.Gaussian(mean=1.0, sigma=1.0)
  values = draws(law)
  assert min(values) == 0.0
  # E max(0, X) = mu Phi(mu / s) + s phi(mu / s) = 0.8413 + 0.2420.
  assert statistics.fmean(values) == pytest.approx(1.0833, abs=1e-3)
  assert distributions.Gaussian(mean=4.0, sigma=0.0).quantile(0.99) == 4.0


def test_a_histogram_is_even_within_its_bins():
  law = distributions.Histogram(edges=(0.0, 10.0, 30.0), counts=(3.0, 1.0))
  # Three quarters of the draws are in [0, 10), the rest in [10, 30).
  assert law.quantile(0.375) == pytest.approx(5.0)
  assert law.quantile(0.75) == pytest.approx(10.0)
  assert law.quantile(0.875) == pytest.approx(20.0)
  # 0.75 * 5 + 0.25 * 20.
  assert distributions.mean(law) == pytest.approx(8.75, rel=1e-6)


def test_an_empty_bin_of_a_histogram_is_never_drawn():
  law = distributions.Histogram(
    edges=(0.0, 1.0, 2.0, 3.0), counts=(1.0, 0.0, 1.0)
  )
  assert not any(1.0 < value < 2.0 for value in draws(law, 1000))
  assert law.quantile(1 - 1e-12) == pytest.approx(3.0)


def test_a_histogram_adds_up_its_bins_once():
  class Counts(tuple):
    reads = 0

    def __iter__(self):
      Counts.reads += 1
      return super().__iter__()

  law = distributions.Histogram(edges=(0.0, 1.0, 2.0), counts=Counts((1, 1)))
  before = Counts.reads
  draws(law, 100)
  assert Counts.reads == before + 1


def test_the_mean_of_a_log_normal_is_found_from_its_quantiles():
  law = distributions.LogNormal(mean=50.0, sigma=0.9)
  assert distributions.mean(law) == pytest.approx(50.0, rel=5e-3)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: distributions.Fixed(-1.0), r"value=-1.0 must be at least 0"),
    (lambda: distributions.Gaussian(mean=1.0, sigma=-2.0), "sigma=-2.0"),
    (
      lambda: distributions.LogNormal(mean=0.0, sigma=1.0),
      "mean=0.0 must be above",
    ),
    (
      lambda: distributions.LogNormal(mean=1.0, sigma=1.0, tail_index=1.0),
      "tail_index=1.0 must be above 1",
    ),
    (
      lambda: distributions.LogNormal(mean=1.0, sigma=1.0, tail_share=1.0),
      "tail_share=1.0 must be in",
    ),
    (
      lambda: distributions.Histogram(edges=(0.0, 1.0), counts=(1.0, 1.0)),
      "2 counts with 2 edges",
    ),
    (
      lambda: distributions.Histogram(edges=(0.0, 2.0, 1.0), counts=(1.0, 1.0)),
      "do not rise",
    ),
    (
      lambda: distributions.Histogram(edges=(0.0, math.inf), counts=(1.0,)),
      "to a finite number",
    ),
    (
      lambda: distributions.Histogram(edges=(1.0,), counts=()),
      "have no bin; give one or more",
    ),
    (
      lambda: distributions.Histogram(edges=(0.0, 1.0), counts=(0.0,)),
      "must be 0 or above, and one",
    ),
  ],
)
def test_what_is_no_distribution_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()
