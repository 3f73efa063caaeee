"""Draws of a workload: repeatable, of the set distribution, correlated."""

import dataclasses
import math
import statistics

import pytest

from rl.simulation import distributions, workload

LAW = distributions.LogNormal(mean=2000.0, sigma=0.5)


@pytest.fixture
def source():
  return workload.Workload(name="math", answer_tokens=LAW, correlation=0.5)


def groups(source, count, size=4, seed=0):
  """Returns answers of `count` groups of `size` members."""
  draws = workload.Draws(source, seed)
  return [
    [
      draws.of_turn("answer_tokens", workload.GroupMember(task, number))
      for number in range(size)
    ]
    for task in range(count)
  ]


def test_a_draw_depends_on_its_key_alone(source):
  first = groups(source, 5)
  assert groups(source, 5) == first
  assert groups(source, 3) == first[:3]
  draws = workload.Draws(source, 0)
  late = draws.of_turn("answer_tokens", workload.GroupMember(4, 2))
  assert late == first[4][2]


@pytest.mark.parametrize(
  "change",
  [
    lambda source: (source, 1),
    lambda source: (dataclasses.replace(source, name="code"), 0),
  ],
  ids=["seed", "name"],
)
def test_another_seed_or_source_draws_otherwise(source, change):
  other, seed = change(source)
  assert groups(other, 3, seed=seed) != groups(source, 3)


def test_turns_and_quantities_draw_on_their_own(source):
  draws = workload.Draws(dataclasses.replace(source, reply_tokens=LAW), 0)
  member = workload.GroupMember(0, 0)
  turns = [draws.of_turn("answer_tokens", member, turn) for turn in range(50)]
  assert len(set(turns)) == 50
  assert draws.of_turn("reply_tokens", member) != turns[0]


def test_uniform_draws_are_uniform():
  values = [workload.uniform(7, i) for i in range(20_000)]
  assert 0.0 < min(values) < 1e-3
  assert 1 - 1e-3 < max(values) < 1.0
  # The standard error of the mean is 0.002, of the variance 0.0005.
  assert statistics.fmean(values) == pytest.approx(0.5, abs=0.01)
  assert statistics.pvariance(values) == pytest.approx(1 / 12, abs=0.003)


def test_draws_keep_their_distribution_whatever_the_correlation(source):
  for rho in (0.0, 0.5, 1.0):
    law = dataclasses.replace(source, correlation=rho)
    values = [group[0] for group in groups(law, 4000)]
    # Standard error: 2000 * 0.53 / sqrt(4000) = 17.
    assert statistics.fmean(values) == pytest.approx(2000.0, abs=70.0)
    logs = [math.log(value) for value in values]
    assert statistics.pstdev(logs) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.8])
def test_members_of_a_group_are_correlated_as_told(source, rho):
  law = dataclasses.replace(source, correlation=rho)
  pairs = [[math.log(value) for value in g[:2]] for g in groups(law, 4000)]
  measured = statistics.correlation(*zip(*pairs, strict=True))
  # Standard error at most 1 / sqrt(4000) = 0.016.
  assert measured == pytest.approx(rho, abs=0.06)


def test_members_of_a_group_have_the_same_prompt(source):
  law = dataclasses.replace(source, prompt_tokens=LAW)
  draws = workload.Draws(law, 0)
  assert draws.of_task("prompt_tokens", 3) == draws.of_task("prompt_tokens", 3)
  assert draws.of_task("prompt_tokens", 3) != draws.of_task("prompt_tokens", 4)


def test_counts_are_whole_and_at_least_1(source):
  law = dataclasses.replace(
    source, turns=distributions.Gaussian(mean=1.0, sigma=1.0)
  )
  draws = workload.Draws(law, 0)
  counts = [
    draws.count("turns", workload.GroupMember(i, 0)) for i in range(500)
  ]
  assert min(counts) == 1
  assert max(counts) > 2
  assert all(isinstance(count, int) for count in counts)


def test_faults_and_successes_come_in_their_share(source):
  law = dataclasses.replace(source, step_fault=0.1, success=0.25)
  draws = workload.Draws(law, 0)
  members = [workload.GroupMember(i, 0) for i in range(4000)]
  # Standard errors: 0.005 and 0.007.
  faults = statistics.fmean(draws.faulty("step", m, 3) for m in members)
  assert faults == pytest.approx(0.1, abs=0.02)
  wins = statistics.fmean(draws.succeeds(member) for member in members)
  assert wins == pytest.approx(0.25, abs=0.03)
  assert not any(draws.faulty("start", member) for member in members)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("share", 0.0),
    ("share", math.inf),
    ("correlation", 1.5),
    ("step_fault", -0.1),
    ("success", 2.0),
  ],
)
def test_what_is_no_share_is_refused(field, value):
  with pytest.raises(ValueError, match=rf"math\.{field}={value} must be"):
    workload.Workload(**{field: value})


@pytest.mark.parametrize(
  "law",
  [
    distributions.Fixed(math.inf),
    distributions.LogNormal(mean=math.inf, sigma=1.0),
    distributions.LogNormal(mean=1.0, sigma=1000.0),
  ],
  ids=["fixed", "mean", "sigma"],
)
def test_counts_without_an_end_are_refused(law):
  with pytest.raises(ValueError, match=r"math\.turns=.* must be finite: these"):
    workload.Workload(turns=law)
  # A step may hang until its deadline.
  assert workload.Workload(step_s=distributions.Fixed(math.inf))


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_name_that_no_task_could_have_is_refused(name):
  with pytest.raises(
    ValueError, match=f"name='{name}' is empty or has a slash"
  ):
    workload.Workload(name=name)
