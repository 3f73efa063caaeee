"""The numbers of a round, each worked out from groups made by hand."""

import math

import numpy as np
import pytest

from rl import learner, round_report, trace, trajectory

OK = trajectory.Status.COMPLETED
CUT = trajectory.Status.TRUNCATED
FAULT = trajectory.Status.ENV_FAULT


def _member(status, reward, *versions):
  """Returns an episode with a turn of two tokens for each version."""
  turns = [
    trajectory.Turn(
      context=np.zeros(1, np.int32),
      tokens=np.zeros(2, np.int32),
      logprobs=np.zeros(2, np.float32),
      versions=np.full(2, version, np.int32),
      stop="stop",
    )
    for version in versions
  ]
  return trajectory.Trajectory(
    task_id="game/train/0",
    group_id=0,
    index=0,
    turns=turns,
    status=status,
    reward=reward,
  )


def _group(*members, admitted=0):
  return trajectory.Group(
    group_id=0,
    trajectories=members,
    admitted=trajectory.PolicyVersion(admitted),
  )


def test_a_round_is_counted_over_all_members_of_its_groups():
  groups = [
    _group(_member(OK, 1.0, 3, 4), _member(CUT, 0.0, 3)),
    _group(_member(OK, 0.5, 4), _member(FAULT, None)),
    _group(_member(OK, 0.5, 4), _member(OK, 0.5, 4)),
  ]
  got = round_report.of_groups(groups, success=1.0, trained_at=4)
  # Rewards 1, 0, 0.5, 0.5, 0.5, one of which reaches 1; the fault has none.
  assert got["success"] == pytest.approx(1 / 5)
  assert got["reward_mean"] == pytest.approx(0.5)
  # Turns 2, 1, 1, 0, 1, 1 and twice as many tokens.
  assert got["turns_mean"] == 1
  assert got["sampled_tokens"] == 12
  # Trained at version 4: the first group began at 3, the others at 4.
  assert got["staleness_mean"] == pytest.approx(1 / 3)
  assert got["staleness_max"] == 1
  # A single reward has no variance to miss; two equal ones do.
  assert (got["groups"], got["zero_variance_groups"]) == (3, 1)
  assert (got["truncated"], got["faults"], got["faults/env_fault"]) == (1, 1, 1)
  assert got["faults/reward_fault"] == got["faults/engine_fault"] == 0


def test_a_round_without_rewards_has_no_success_rather_than_none():
  groups = [_group(_member(FAULT, None), admitted=2)]
  got = round_report.of_groups(groups, success=1.0, trained_at=3)
  assert math.isnan(got["success"])
  assert math.isnan(got["reward_mean"])
  # No token: as old as its admission.
  assert got["staleness_max"] == 1
  # A group of nothing but faults has no variance to speak of.
  assert (got["faults"], got["zero_variance_groups"]) == (1, 0)


def test_every_sum_of_the_learner_has_a_metric():
  names = [*learner.METRICS, "router_entropy", "dropped", "load/0"]
  sums = {name: float(i) for i, name in enumerate(names)}
  got = round_report.of_updates([sums])
  assert sorted(got.values()) == sorted(sums.values())
  assert got["trained_tokens"] == sums["tokens"]
  assert got["clip_fraction"] == sums["clipped"]
  assert got["dropped_assignments"] == sums["dropped"]


def test_updates_of_a_round_are_averaged_and_their_tokens_added():
  one = dict.fromkeys(learner.METRICS, 1.0) | {"tokens": 30.0, "max_load": 3.0}
  two = dict.fromkeys(learner.METRICS, 2.0) | {"tokens": 10.0}
  got = round_report.of_updates([one, two])
  assert (got["loss"], got["trained_tokens"]) == (1.5, 40.0)
  # An update that trained nothing says nothing about the router.
  assert got["max_load"] == 3.0
  assert "dropped_assignments" not in got


def test_speed_counts_the_tokens_of_episodes_that_ended():
  # 6 + 4 tokens played and 8 trained in 2 s.
  log = [
    {"kind": "ended", "tokens": 6},
    {"kind": "cancelled", "tokens": 100},
    {"kind": "ended", "tokens": 4},
  ]
  got = round_report.of_speed(log, [{"tokens": 8.0}], wall_s=2.0)
  assert (got["decode_tokens_per_s"], got["learner_tokens_per_s"]) == (5, 4)


def test_busy_shares_are_of_the_wall_time_and_overlap_of_the_shorter():
  # Of 10 s the learner works 2 and decode 8; 1 s of both is the same second,
  # half of the learner's 2.
  spans = [
    trace.Span("learner", "update", 0.0, 2.0),
    trace.Span("decode", "step", 1.0, 9.0),
  ]
  got = round_report.of_spans(spans, wall_s=10.0)
  assert got == {
    "learner_busy": 0.2,
    "decode_busy": 0.8,
    "overlap_share": 0.5,
  }
