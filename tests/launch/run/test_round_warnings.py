"""Warnings after a round, from metrics and groups made by hand."""

import math
import pathlib

import numpy as np
import pytest

from launch.run import round_warnings
from rl.data import trajectory
from rl.loop import metric_bounds
from rl.rollout import evaluate

STATUS = trajectory.Status
BOUNDS = metric_bounds.MetricBounds(
  logprob_gap=metric_bounds.Bound(limit=0.1, rounds=2, then="stop"),
  entropy=metric_bounds.Bound(limit=0.5, rounds=1),
  kl=metric_bounds.Bound(limit=1.0, rounds=2, then="pause"),
)


def _member(index, status, fault=""):
  turn = trajectory.Turn(
    context=np.zeros(1, np.int32),
    tokens=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    versions=np.zeros(2, np.int32),
    stop="stop",
  )
  reward = 1.0 if status.trainable else None
  return trajectory.Trajectory(
    "game/train/0", 0, index, [turn], status, reward, fault=fault
  )


def _group(*ends):
  members = [_member(i, *end) for i, end in enumerate(ends)]
  return trajectory.Group(group_id=0, trajectories=members, admitted=0)


NAN = (STATUS.REWARD_FAULT, "Outcome returned nan")
LATE = (STATUS.ENV_FAULT, "step took over 10 s")
OK = (STATUS.COMPLETED,)


def _metrics(number, **changes):
  base = {"trained_tokens": 0.0, "zero_variance_groups": 0.0, "groups": 1.0}
  return {"round": float(number), "skipped_updates": 0.0, **base, **changes}


@pytest.fixture
def warnings(tmp_path):
  return round_warnings.RoundWarnings(tmp_path / "run", 2, BOUNDS, 1, True)


def test_an_evaluation_of_faults_alone_names_the_most_frequent():
  members = _group(NAN, NAN, LATE).trajectories
  outcome = evaluate.summarise(list(members), success=1.0)
  assert round_warnings.of_evaluation(7, outcome) == (
    "the evaluation of version 7 says nothing of success: all 3 episodes ended "
    "in faults, most with reward_fault: Outcome returned nan"
  )


def test_an_evaluation_with_a_graded_episode_is_no_warning():
  members = _group(NAN, NAN, OK).trajectories
  outcome = evaluate.summarise(list(members), success=1.0)
  assert outcome.fault == "reward_fault: Outcome returned nan"
  assert round_warnings.of_evaluation(7, outcome) is None


def test_a_round_that_faults_left_empty_names_kind_and_message(warnings):
  lines = warnings.after(_metrics(1), [_group(NAN, NAN, NAN, LATE)])
  assert lines == [
    "round 1 trained nothing: 3 of 4 episodes ended with reward_fault: Outcome "
    "returned nan"
  ]


def test_a_metric_beyond_its_bound_is_told(warnings):
  metrics = _metrics(3, trained_tokens=8.0, entropy=0.25)
  assert warnings.after(metrics, [_group(OK)]) == [
    "round 3: entropy is 0.25, below 0.5"
  ]
  assert warnings.hopeless is None


def test_one_that_stays_beyond_a_bound_that_stops_is_hopeless(warnings):
  for number in (1, 2):
    metrics = _metrics(number, trained_tokens=8.0, logprob_gap_mean=0.2)
    assert warnings.after(metrics, [_group(OK)]) == []
  assert isinstance(warnings.hopeless, round_warnings.OutOfBounds)
  assert str(warnings.hopeless).startswith(
    "round 2: logprob_gap_mean is 0.2, above 0.1, for 2 rounds."
  )
  assert "bounds.logprob_gap" in str(warnings.hopeless)


def _after(warnings, *values):
  """Returns the lines after rounds with these values of `kl`."""
  lines = []
  for number, value in enumerate(values, 1):
    metrics = _metrics(number, trained_tokens=8.0, kl=value)
    lines += warnings.after(metrics, [_group(OK)])
  return lines


def test_one_that_pauses_holds_publishing_until_it_is_back(warnings):
  (line,) = _after(warnings, 2.0, 2.0)
  assert "round 2: kl is 2, above 1, for 2 rounds; no later weights" in line
  assert warnings.held in line
  # One round more is what a staleness of 1 allows.
  assert _after(warnings, 2.0) == []
  assert (bool(warnings.held), warnings.hopeless) == (True, None)
  assert _after(warnings, 0.5) == [
    "round 1: the metric is back; publishing goes on"
  ]
  assert (warnings.held, warnings.hopeless) == ("", None)


def test_one_that_pauses_ends_the_run_when_the_bound_is_used_up(warnings):
  _after(warnings, 2.0, 2.0, 2.0)
  assert not warnings.hopeless
  _after(warnings, 2.0)
  assert "has not come back in 2 rounds" in str(warnings.hopeless)
  assert "overlap.max_staleness=1 lets no more" in str(warnings.hopeless)


def test_a_few_such_rounds_in_a_row_are_hopeless(warnings):
  for number in (1, 2):
    assert warnings.after(_metrics(number), [_group(NAN)])
  assert warnings.hopeless is None
  # A round that trains resets the count.
  assert warnings.after(_metrics(3, trained_tokens=8.0), [_group(NAN)]) == []
  for number in (4, 5):
    warnings.after(_metrics(number), [_group(NAN)])
    assert warnings.hopeless is None
  warnings.after(_metrics(6), [_group(NAN)])
  assert "because of faults: 3, and max_skipped=2" in str(warnings.hopeless)
  assert "reward_fault: Outcome returned nan" in str(warnings.hopeless)


def test_zero_variance_groups_are_told_at_times_and_are_never_hopeless(
  warnings,
):
  equal = {"zero_variance_groups": 1.0}
  first = warnings.after(_metrics(1, **equal), [_group(OK, OK, NAN)])
  assert first[0].startswith("round 1 trained nothing: in 1 of 1 groups all ")
  for number in range(2, 9):
    assert warnings.after(_metrics(number, **equal), [_group(OK, OK)]) == []
  # Not within 50 rounds, whatever comes between; then however many were equal.
  warnings.after(_metrics(9, trained_tokens=8.0), [_group(OK, OK)])
  for number in range(10, 51):
    assert warnings.after(_metrics(number, **equal), [_group(OK, OK)]) == []
  assert warnings.after(_metrics(51, **equal), [_group(OK, OK)])
  assert warnings.hopeless is None


def test_each_skipped_update_has_the_command_that_looks_into_it(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  # As the user typed it: relative.
  run_dir = pathlib.Path("runs/wild")
  names = ["round_000002_update_0", "round_000003_update_0"]
  names += ["round_000003_update_1"]
  for name in names:
    path = run_dir / "skipped" / name
    path.mkdir(parents=True)
    (path / "batches.npz").touch()
  warnings = round_warnings.RoundWarnings(run_dir, 2, BOUNDS, 1, True)
  metrics = _metrics(3, skipped_updates=2.0, trained_tokens=8.0)
  lines = warnings.after(metrics, [_group(OK, OK)])
  assert [line.rpartition(" ")[2] for line in lines] == [
    f"runs/wild/skipped/{name}" for name in names[1:]
  ]
  for line in lines:
    assert line.startswith("round 3: an update was skipped, as its loss or ")
    assert "python -m launch.replay " in line


def test_a_skipped_update_that_nobody_kept_is_told_all_the_same(warnings):
  metrics = _metrics(3, skipped_updates=1.0, trained_tokens=8.0)
  (line,) = warnings.after(metrics, [])
  assert line.endswith("its loss or gradient is not finite")


def test_a_round_of_flat_groups_is_told_although_routers_were_trained(warnings):
  flat = {"trained_tokens": 8.0, "zero_variance_groups": 4.0, "groups": 4.0}
  mixed = flat | {"zero_variance_groups": 3.0}
  (line,) = warnings.after(_metrics(1, **flat), [])
  assert line.startswith(
    "round 1 learned nothing from its rewards: in 4 of 4 groups all members did"
  )
  assert warnings.after(_metrics(50, **flat), []) == []
  assert warnings.after(_metrics(51, **mixed), []) == []
  assert len(warnings.after(_metrics(52, **flat), [])) == 1


def test_a_run_without_a_warm_start_is_told_of_one(tmp_path):
  warnings = round_warnings.RoundWarnings(tmp_path, 2, BOUNDS, 1, False)
  flat = {"zero_variance_groups": 4.0, "groups": 4.0, "success": 0.0}
  (line,) = warnings.after(_metrics(1, **flat), [])
  assert "too hard; a warm start helps, or rewards for" in line


@pytest.mark.parametrize(
  ("success", "cut", "words"),
  [
    (0.0, {}, "no episode succeeded, so the tasks are too hard; more warm_st"),
    (
      0.0,
      {"truncated_share": 1.0, "cut_answer_share": 1.0},
      "no episode succeeded, and limits cut 100% of them; raise rollout.max_tu",
    ),
    (
      0.0,
      {"truncated_share": 0.0, "cut_answer_share": 0.96},
      "no episode succeeded, and limits cut 96% of the answers; raise rollout.",
    ),
    (1.0, {}, "all episodes succeeded, so the tasks are too easy"),
    (0.5, {}, "the tasks are too easy or too hard, or the policy has become"),
    (
      math.nan,
      {},
      "the tasks are too easy or too hard, or the policy has become",
    ),
  ],
)
def test_success_and_limits_tell_why_members_did_equally_well(
  warnings, success, cut, words
):
  flat = {"zero_variance_groups": 4.0, "groups": 4.0, "success": success} | cut
  (empty,) = warnings.after(_metrics(1, **flat), [])
  assert f"did equally well: {words}" in empty
  warnings.after(_metrics(50, trained_tokens=8.0), [])
  (trained,) = warnings.after(_metrics(51, trained_tokens=8.0, **flat), [])
  assert f"did equally well: {words}" in trained
